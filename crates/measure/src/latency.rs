use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::serialization::{Serializer, V2DeflateSerializer};

/// The longest time that is told from longer ones, in nanoseconds: an hour.
pub const LONGEST_NS: u64 = 3_600_000_000_000;

/// Buckets are as wide as 1/1024 of their time at most, so that three digits of every time are right.
const DIGITS: u8 = 3;

/// Points of a [`Histogram::distribution`], about.
const POINTS: f64 = 160.0;

/// A latency histogram (HdrHistogram): three significant digits from 1 ns to an hour, in 264 KiB whatever it counts.
///
/// Recording neither allocates nor fails. Times over [`LONGEST_NS`] count as [`LONGEST_NS`]. Mean and largest are those
/// of the recorded times, not of their buckets; they stay exact when histograms are merged.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: hdrhistogram::Histogram<u64>,
    sum: u128,
    max: u64,
}

/// A [`Histogram`] in short; times in nanoseconds, all 0 when nothing was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantiles {
    /// Recorded times.
    pub count: u64,
    /// Arithmetic mean, rounded down.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Largest.
    pub max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram::new()
    }
}

impl Histogram {
    /// One that has recorded nothing.
    pub fn new() -> Histogram {
        let buckets = hdrhistogram::Histogram::new_with_bounds(1, LONGEST_NS, DIGITS)
            .expect("the bounds are constants that it takes");
        Histogram { buckets, sum: 0, max: 0 }
    }

    /// Records a time in nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        let ns = ns.min(LONGEST_NS);
        self.buckets.saturating_record(ns);
        self.sum += u128::from(ns);
        self.max = self.max.max(ns);
    }

    /// Adds everything that `other` has recorded, exactly as if it had been recorded here.
    pub fn merge(&mut self, other: &Histogram) {
        self.buckets.add(&other.buckets).expect("both have the same bounds");
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// Forgets everything and keeps the memory.
    pub fn clear(&mut self) {
        // Touching all buckets of an empty one costs as much as of a full one: per second and thread, that adds up.
        if self.count() > 0 {
            self.buckets.reset();
            (self.sum, self.max) = (0, 0);
        }
    }

    /// Recorded times.
    pub fn count(&self) -> u64 {
        self.buckets.len()
    }

    /// Mean in nanoseconds, rounded down; 0 when nothing was recorded.
    pub fn mean(&self) -> u64 {
        // The mean is no longer than the longest, so it fits.
        (self.sum / u128::from(self.count().max(1))) as u64
    }

    /// Longest recorded time in nanoseconds, exact; 0 when nothing was recorded.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The time that `share` (0 to 1) of all recorded times do not exceed, by nearest rank; at most 1/1024 above the
    /// recorded one, never above [`Histogram::max`]; 0 when nothing was recorded.
    pub fn quantile(&self, share: f64) -> u64 {
        // 0.07 * 100 is more than 7 in floats, which would be the rank after the one that is meant.
        let share = (share - f64::EPSILON).clamp(0.0, 1.0);
        // At 0 the library gives the lower end of the bucket: then the smallest could be below what was recorded.
        self.buckets.value_at_quantile(share.max(f64::MIN_POSITIVE)).min(self.max)
    }

    /// The numbers that a record shows.
    pub fn summary(&self) -> Quantiles {
        Quantiles {
            count: self.count(),
            mean: self.mean(),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max,
        }
    }

    /// Points (share, nanoseconds) of the cumulative distribution: `share` of all recorded times took no longer.
    ///
    /// They rise in both, are evenly spaced on an axis of log 1/(1 - share) as HdrHistogram's plots have it, about
    /// 160 of them or one per bucket if that is less, and end with the largest at 1. Empty when nothing was recorded.
    pub fn distribution(&self) -> Vec<(f64, u64)> {
        let total = self.count();
        let mut points = Vec::new();
        // So many halvings of the rest until a single operation is left.
        let halvings = (total.max(2) as f64).log2();
        let per_halving = POINTS / halvings;
        let mut step = 0.0;
        let mut seen = 0;
        for bucket in self.buckets.iter_recorded() {
            seen += bucket.count_at_value();
            let share = seen as f64 / total as f64;
            let depth = if seen == total { f64::INFINITY } else { -(1.0 - share).log2() * per_halving };
            if depth >= step {
                points.push((share, bucket.value_iterated_to().min(self.max)));
                step = depth.floor() + 1.0;
            }
        }
        points
    }
}

/// A log of histograms by interval (`.hlog`, version 1.3) as HdrHistogram's own tools read it.
///
/// A line per interval: its start and length in seconds, its longest time in milliseconds, and all buckets (encoding V2,
/// deflated, in base64), whose times are nanoseconds. Each interval is encoded when it is pushed, so that the log of a
/// long run stays small: a few kilobytes a second.
pub struct HistogramLog {
    text: String,
    serializer: V2DeflateSerializer,
}

impl HistogramLog {
    /// The log of a run that began `started` after the epoch, without intervals yet.
    pub fn new(started: Duration) -> HistogramLog {
        let text = format!(
            "#[Logged by fourtuple, times in nanoseconds]\n\
             #[Histogram log format version 1.3]\n\
             #[StartTime: {started:.3} (seconds since epoch)]\n\
             #[BaseTime: {started:.3} (seconds since epoch)]\n\
             \"StartTimestamp\",\"Interval_Length\",\"Interval_Max\",\"Interval_Compressed_Histogram\"\n",
            started = started.as_secs_f64(),
        );
        HistogramLog { text, serializer: V2DeflateSerializer::new() }
    }

    /// Adds the interval that began `start` after the run and lasted `length`; both are kept to the millisecond.
    pub fn push(&mut self, start: Duration, length: Duration, histogram: &Histogram) {
        let mut bytes = Vec::new();
        self.serializer
            .serialize(&histogram.buckets, &mut bytes)
            .expect("memory can be written, and every count is below 2^63");
        let (start, length) = (start.as_secs_f64(), length.as_secs_f64());
        let longest_ms = histogram.max as f64 / 1e6;
        self.text.push_str(&format!("{start:.3},{length:.3},{longest_ms:.3},"));
        STANDARD.encode_string(&bytes, &mut self.text);
        self.text.push('\n');
    }

    /// The log as text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// The [`HistogramLog`] of intervals that are all at hand: start and length in seconds, and what was recorded.
pub fn log<'a>(intervals: impl Iterator<Item = (f64, f64, &'a Histogram)>) -> String {
    let mut log = HistogramLog::new(Duration::ZERO);
    for (start_s, length_s, histogram) in intervals {
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        log.push(seconds(start_s), seconds(length_s), histogram);
    }
    log.finish()
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::Summary;

    fn recorded(samples: &[u64]) -> Histogram {
        let mut histogram = Histogram::new();
        samples.iter().for_each(|&ns| histogram.record(ns));
        histogram
    }

    /// Times as kernels and servers give them, from the plain to the ugly.
    fn distributions() -> Vec<(&'static str, Vec<u64>)> {
        let mut random = Rng::with_seed(5);
        let mut draw = |count: usize, next: &dyn Fn(&mut Rng) -> f64| -> Vec<u64> {
            (0..count).map(|_| next(&mut random) as u64).collect()
        };
        vec![
            ("uniform", draw(50_000, &|random| random.f64() * 1e6)),
            ("exponential", draw(50_000, &|random| -(1.0 - random.f64()).ln() * 80_000.0)),
            ("power law", draw(50_000, &|random| 20_000.0 * (1.0 - random.f64()).powf(-1.0 / 1.1))),
            (
                "two peaks",
                draw(50_000, &|random| if random.u8(..) < 4 { 2.0e8 } else { 3.0e4 + random.f64() }),
            ),
            ("over all magnitudes", draw(50_000, &|random| 10f64.powf(random.f64() * 12.5))),
            ("tiny", draw(1_003, &|random| random.f64() * 40.0)),
            ("one", vec![123_456_789]),
        ]
    }

    #[test]
    fn percentiles_are_those_of_an_exact_sort_within_a_thousandth() {
        for (name, mut samples) in distributions() {
            let histogram = recorded(&samples);
            let exact = Summary::of(&mut samples).unwrap();
            let found = histogram.summary();
            assert_eq!((found.count, found.mean, found.max), (exact.count, exact.mean, exact.max), "{name}");
            for (share, found, exact) in
                [(0.5, found.p50, exact.p50), (0.99, found.p99, exact.p99), (0.999, found.p999, exact.p999)]
            {
                // Never below, never a bucket too far.
                assert!(
                    found >= exact && found - exact <= exact / 1_000,
                    "{name} at {share}: {found} {exact}"
                );
            }
            for step in 0..=1_000 {
                let share = f64::from(step) / 1_000.0;
                let rank = (samples.len() * step as usize).div_ceil(1_000).max(1);
                let (found, exact) = (histogram.quantile(share), samples[rank - 1]);
                assert!(
                    found >= exact && found - exact <= exact / 1_000,
                    "{name} at {share}: {found} {exact}"
                );
            }
        }
    }

    #[test]
    fn merged_is_as_if_recorded_in_one() {
        for (name, samples) in distributions() {
            let whole = recorded(&samples);
            let mut merged = Histogram::new();
            for part in samples.chunks(samples.len() / 7 + 1) {
                merged.merge(&recorded(part));
            }
            merged.merge(&Histogram::new());
            assert_eq!(merged.summary(), whole.summary(), "{name}");
            assert_eq!(merged.distribution(), whole.distribution(), "{name}");
            assert_eq!(merged.buckets, whole.buckets, "{name}");
        }
    }

    #[test]
    fn none_is_nothing_and_cleared_is_none() {
        let mut histogram = recorded(&[5, 7_000_000]);
        histogram.clear();
        assert_eq!(histogram.summary(), Quantiles::default());
        assert_eq!((histogram.distribution(), histogram.quantile(1.0)), (vec![], 0));
        histogram.record(9);
        assert_eq!((histogram.summary().p50, histogram.max(), histogram.count()), (9, 9, 1));
    }

    #[test]
    fn nothing_is_too_short_or_too_long() {
        let histogram = recorded(&[0, u64::MAX]);
        assert_eq!((histogram.quantile(0.5), histogram.quantile(1.0)), (0, LONGEST_NS));
        assert_eq!((histogram.max(), histogram.mean()), (LONGEST_NS, LONGEST_NS / 2));
    }

    #[test]
    fn the_distribution_rises_to_the_largest_and_is_dense_in_the_tail() {
        for (name, mut samples) in distributions() {
            let points = recorded(&samples).distribution();
            samples.sort_unstable();
            assert_eq!(points.last(), Some(&(1.0, *samples.last().unwrap())), "{name}");
            assert!(points.len() <= 200, "{name}: {} points", points.len());
            for pair in points.windows(2) {
                assert!(pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1, "{name}: {pair:?}");
            }
            for &(share, ns) in &points {
                let no_longer = samples.partition_point(|&sample| sample <= ns);
                assert_eq!(no_longer as f64 / samples.len() as f64, share, "{name}: {ns}");
            }
        }
        let (_, exponential) = distributions().swap_remove(1);
        let points = recorded(&exponential).distribution();
        assert!(points.len() >= 100, "{} points", points.len());
        assert!(points.iter().filter(|(share, _)| *share > 0.999).count() >= 20);
    }

    #[test]
    fn a_log_read_back_by_another_reader_has_the_same_counts() {
        let histograms: Vec<Histogram> =
            distributions().iter().map(|(_, samples)| recorded(samples)).collect();
        let text = log(histograms.iter().enumerate().map(|(second, h)| (second as f64, 1.0, h)));
        let mut read = Vec::new();
        for entry in IntervalLogIterator::new(text.as_bytes()) {
            let LogEntry::Interval(interval) = entry.unwrap() else { continue };
            let bytes = STANDARD.decode(interval.encoded_histogram()).unwrap();
            let buckets: hdrhistogram::Histogram<u64> =
                Deserializer::new().deserialize(&mut bytes.as_slice()).unwrap();
            read.push((interval.start_timestamp(), interval.max(), buckets));
        }
        assert_eq!(read.len(), histograms.len());
        for (second, ((start, longest_ms, buckets), histogram)) in read.iter().zip(&histograms).enumerate() {
            assert_eq!(*start, Duration::from_secs(second as u64));
            assert!((longest_ms - histogram.max() as f64 / 1e6).abs() < 0.001);
            assert_eq!(*buckets, histogram.buckets);
        }
    }

    #[test]
    fn a_log_says_when_the_run_began() {
        let mut log = HistogramLog::new(Duration::from_millis(1_767_225_600_250));
        log.push(Duration::from_millis(1_500), Duration::from_secs(1), &recorded(&[2_500_000]));
        let text = log.finish();
        assert!(text.contains("#[StartTime: 1767225600.250 (seconds since epoch)]\n"), "{text}");
        // The cookie of V2, deflated, by which every reader knows the encoding.
        assert!(text.lines().last().unwrap().starts_with("1.500,1.000,2.500,HISTFAAA"), "{text}");
    }
}
