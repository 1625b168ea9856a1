use std::fmt;
use std::time::Duration;

use crate::Distribution;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::serialization::{Deserializer, Serializer, V2DeflateSerializer};

/// The longest distinguishable time in nanoseconds: an hour.
pub const MAX_NS: u64 = 3_600_000_000_000;

/// Maximum number of samples of a histogram that is read: 2^48.
const MAX_SAMPLES: u64 = 1 << 48;

/// The resolution: buckets are at most 1/1024 of their time wide, so that three digits of every time are exact.
const DIGITS: u8 = 3;

/// The approximate number of points of a [`Histogram::distribution`].
const POINTS: f64 = 160.0;

/// A latency histogram (HdrHistogram): three significant digits from 1 ns to an hour, in 264 KiB for any number of
/// samples.
///
/// Recording neither allocates nor fails. Times over [`MAX_NS`] count as [`MAX_NS`]. Mean and maximum are
/// exact, also after histograms are merged.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: hdrhistogram::Histogram<u64>,
    sum: u128,
    max: u64,
}

/// The error of [`Histogram::from_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAHistogram;

impl fmt::Display for NotAHistogram {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the bytes are not a histogram of fourtuple")
    }
}

impl std::error::Error for NotAHistogram {}

impl Default for Histogram {
    fn default() -> Self {
        Histogram::new()
    }
}

impl Histogram {
    pub fn new() -> Histogram {
        let buckets = hdrhistogram::Histogram::new_with_bounds(1, MAX_NS, DIGITS)
            .expect("the bounds are constants that it takes");
        Histogram { buckets, sum: 0, max: 0 }
    }

    /// Records a time in nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        let ns = ns.min(MAX_NS);
        self.buckets.saturating_record(ns);
        self.sum += u128::from(ns);
        self.max = self.max.max(ns);
    }

    /// Merges `other` into this histogram, with the same result as recording its samples here.
    pub fn merge(&mut self, other: &Histogram) {
        self.buckets.add(&other.buckets).expect("both have the same bounds");
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// Removes all samples and keeps the memory.
    pub fn clear(&mut self) {
        // Clearing an empty histogram costs as much as a full one; with one per second and thread, that adds up.
        if self.count() > 0 {
            self.buckets.reset();
            (self.sum, self.max) = (0, 0);
        }
    }

    /// Returns the histogram as bytes: sum and maximum, then the buckets (encoding V2, deflated).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.sum.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.max.to_le_bytes());
        V2DeflateSerializer::new()
            .serialize(&self.buckets, &mut bytes)
            .expect("memory can be written, and every count is below 2^63");
        bytes
    }

    /// Returns the histogram that [`Histogram::to_bytes`] encoded.
    ///
    /// # Errors
    ///
    /// [`NotAHistogram`] for any other bytes, and for a histogram with other bounds or another resolution, with more than 2^48
    /// samples, or with a sum or a maximum that its samples cannot have.
    pub fn from_bytes(bytes: &[u8]) -> Result<Histogram, NotAHistogram> {
        let (sum, rest) = bytes.split_first_chunk().ok_or(NotAHistogram)?;
        let (max, rest) = rest.split_first_chunk().ok_or(NotAHistogram)?;
        let buckets: hdrhistogram::Histogram<u64> =
            Deserializer::new().deserialize(&mut &*rest).map_err(|_| NotAHistogram)?;
        if (buckets.low(), buckets.high(), buckets.sigfig()) != (1, MAX_NS, DIGITS) {
            return Err(NotAHistogram);
        }
        let (sum, max) = (u128::from_le_bytes(*sum), u64::from_le_bytes(*max));
        // Later sums of such histograms do not overflow.
        let is_possible = buckets.len() <= MAX_SAMPLES
            && max <= MAX_NS
            && sum <= u128::from(buckets.len()) * u128::from(max);
        if is_possible { Ok(Histogram { buckets, sum, max }) } else { Err(NotAHistogram) }
    }

    /// Returns the number of samples.
    pub fn count(&self) -> u64 {
        self.buckets.len()
    }

    /// Returns the mean in nanoseconds, rounded down; 0 for an empty histogram.
    pub fn mean(&self) -> u64 {
        // The mean is at most the maximum, so it fits.
        (self.sum / u128::from(self.count().max(1))) as u64
    }

    /// Returns the maximum in nanoseconds, exact; 0 for an empty histogram.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the quantile `share` (0 to 1) by nearest rank: at most 1/1024 above the exact value, never above
    /// [`Histogram::max`]; 0 for an empty histogram.
    pub fn quantile(&self, share: f64) -> u64 {
        // In floating point 0.07 * 100 is more than 7, which would round up to the next rank.
        let share = (share - f64::EPSILON).clamp(0.0, 1.0);
        // At 0 the library returns the lower end of the bucket, which may be below the smallest sample.
        self.buckets.value_at_quantile(share.max(f64::MIN_POSITIVE)).min(self.max)
    }

    /// Returns the summary that a record contains; all 0 for an empty histogram.
    pub fn summary(&self) -> Distribution {
        Distribution {
            count: self.count(),
            mean: self.mean(),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max,
        }
    }

    /// Returns the samples in 2^`bits` buckets per octave, at most 10 bits. The sum of the results of several histograms is
    /// the result of their sum.
    pub fn to_log_linear(&self, bits: u32) -> LogLinear {
        let mut coarse = LogLinear::new(bits, Vec::new(), 0, 0);
        // A bucket here lies in one bucket there, because both divide octaves evenly.
        let buckets = self
            .buckets
            .iter_recorded()
            .map(|bucket| (LogLinear::bucket_of(bits, bucket.value_iterated_to()), bucket.count_at_value()));
        coarse.add_counted(buckets, u64::try_from(self.sum).unwrap_or(u64::MAX), self.max);
        coarse
    }

    /// Returns points (share, nanoseconds) of the cumulative distribution: `share` of all samples are at most that
    /// long.
    ///
    /// Both values ascend. The points are evenly spaced on an axis of log 1/(1 - share) as in HdrHistogram's plots,
    /// about 160 of them, or one per bucket if those are fewer. The last point is the maximum at 1. Empty for an
    /// empty histogram.
    pub fn distribution(&self) -> Vec<(f64, u64)> {
        let total = self.count();
        let mut points = Vec::new();
        // The number of times that the remaining samples can be halved until one is left.
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

/// A log of histograms by interval (`.hlog`, version 1.3), which HdrHistogram's own tools read.
///
/// One line per interval: its start and length in seconds, its maximum in milliseconds, and all buckets in
/// nanoseconds (encoding V2, deflated, base64). Each interval is encoded when it is added, so that the log of a long
/// run stays small: a few kilobytes per second.
pub struct HistogramLog {
    text: String,
    serializer: V2DeflateSerializer,
}

impl HistogramLog {
    /// Creates an empty log of a run that began `started` after the epoch.
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

    /// Adds an interval that began `start` after the run and lasted `length`; both are rounded to a millisecond.
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

    /// Returns the log as text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// Returns the [`HistogramLog`] of complete intervals: start and length in seconds, and the histogram.
pub fn log<'a>(intervals: impl Iterator<Item = (f64, f64, &'a Histogram)>) -> String {
    let mut log = HistogramLog::new(Duration::ZERO);
    for (start_s, length_s, histogram) in intervals {
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        log.push(seconds(start_s), seconds(length_s), histogram);
    }
    log.finish()
}

/// A histogram that was counted elsewhere, for example by a BPF program: 2^`bits` buckets of equal width per octave.
///
/// Below 2^`bits`, bucket `n` holds times of `n` ns; above, each octave has 2^`bits` buckets. A quantile is the
/// middle of its bucket: at most 1.6% off with 5 bits, 6.3% with 3 bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogLinear {
    bits: u32,
    counts: Vec<u64>,
    sum_ns: u64,
    max_ns: u64,
}

impl LogLinear {
    /// Creates a histogram of `counts` by bucket; `sum_ns` and `max_ns` are exact.
    pub fn new(bits: u32, counts: Vec<u64>, sum_ns: u64, max_ns: u64) -> LogLinear {
        LogLinear { bits, counts, sum_ns, max_ns }
    }

    /// Returns the bucket of a time.
    pub fn bucket_of(bits: u32, ns: u64) -> usize {
        if ns < 1 << bits {
            return ns as usize;
        }
        let octave = ns.ilog2() - bits;
        (((octave + 1) << bits) as usize) + ((ns >> octave) as usize & ((1 << bits) - 1))
    }

    /// Returns the lower end of a bucket, in nanoseconds.
    pub fn start_of(bits: u32, bucket: usize) -> u64 {
        let (octave, step) = (bucket >> bits, (bucket & ((1 << bits) - 1)) as u64);
        match octave {
            0 => step,
            _ => ((1 << bits) + step) << (octave - 1),
        }
    }

    /// Merges another histogram with the same buckets. An empty one has any buckets.
    pub fn merge(&mut self, other: &LogLinear) {
        if self.counts.is_empty() {
            self.bits = other.bits;
        }
        debug_assert!(self.bits == other.bits || other.counts.is_empty());
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine = mine.saturating_add(*theirs);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Adds samples that were counted elsewhere: pairs of a bucket and a count, the sum of the samples, and their maximum.
    pub fn add_counted(&mut self, buckets: impl IntoIterator<Item = (usize, u64)>, sum_ns: u64, max_ns: u64) {
        for (bucket, number) in buckets {
            if bucket >= self.counts.len() {
                self.counts.resize(bucket + 1, 0);
            }
            self.counts[bucket] = self.counts[bucket].saturating_add(number);
        }
        self.sum_ns = self.sum_ns.saturating_add(sum_ns);
        self.max_ns = self.max_ns.max(max_ns);
    }

    /// Returns the samples that were added after an earlier state of the same histogram. The maximum covers all samples, so it
    /// may be too high.
    pub fn since(&self, earlier: &LogLinear) -> LogLinear {
        let before = |bucket: usize| earlier.counts.get(bucket).copied().unwrap_or_default();
        let counts = self.counts.iter().enumerate().map(|(bucket, now)| now.saturating_sub(before(bucket)));
        LogLinear { counts: counts.collect(), sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns), ..*self }
    }

    /// Returns the number of samples.
    pub fn count(&self) -> u64 {
        self.counts.iter().copied().fold(0, u64::saturating_add)
    }

    /// Returns the sum of the samples in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns the maximum in nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Returns the number and the count of each bucket that is not empty, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.counts.iter().copied().enumerate().filter(|(_, number)| *number > 0)
    }

    /// Returns the quantile `share` (0 to 1) by nearest rank: the middle of its bucket, never above the maximum; 0
    /// for an empty histogram.
    pub fn quantile(&self, share: f64) -> u64 {
        let count = self.count();
        let rank = ((share - f64::EPSILON).clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut seen = 0_u64;
        for (bucket, number) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(*number);
            if *number > 0 && seen >= rank {
                let (start, end) = (Self::start_of(self.bits, bucket), Self::start_of(self.bits, bucket + 1));
                return (start + (end - start) / 2).min(self.max_ns.max(start));
            }
        }
        0
    }

    /// Returns the summary that a record contains; all 0 for an empty histogram.
    pub fn summary(&self) -> Distribution {
        let count = self.count();
        Distribution {
            count,
            mean: self.sum_ns / count.max(1),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max_ns,
        }
    }

    /// Returns the lower end in nanoseconds and the count of each bucket that is not empty.
    pub fn steps(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.buckets().map(|(bucket, number)| (Self::start_of(self.bits, bucket), number))
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::measure::summary;

    fn recorded(samples: &[u64]) -> Histogram {
        let mut histogram = Histogram::new();
        samples.iter().for_each(|&ns| histogram.record(ns));
        histogram
    }

    /// Checks a quantile: it is never below the exact value, and at most one bucket above.
    fn close(name: &str, share: f64, found: u64, exact: u64) {
        assert!(found >= exact && found - exact <= exact / 1_000, "{name} at {share}: {found} {exact}");
    }

    /// Times with the distributions that kernels and servers show, from regular to heavy-tailed.
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
    fn percentiles_match_an_exact_sort_within_a_thousandth() {
        for (name, mut samples) in distributions() {
            let histogram = recorded(&samples);
            let exact = summary(&mut samples).unwrap();
            let found = histogram.summary();
            assert_eq!((found.count, found.mean, found.max), (exact.count, exact.mean, exact.max), "{name}");
            close(name, 0.5, found.p50, exact.p50);
            close(name, 0.99, found.p99, exact.p99);
            close(name, 0.999, found.p999, exact.p999);
            for step in 0..=1_000 {
                let share = f64::from(step) / 1_000.0;
                let rank = (samples.len() * step as usize).div_ceil(1_000).max(1);
                close(name, share, histogram.quantile(share), samples[rank - 1]);
            }
        }
    }

    #[test]
    fn merging_equals_recording_in_one() {
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
    fn coarse_histograms_add_up() {
        for (name, samples) in distributions() {
            let whole = recorded(&samples);
            for bits in [3, 6, 10] {
                let mut sum = LogLinear::new(bits, Vec::new(), 0, 0);
                let parts = samples.chunks(samples.len() / 7 + 1);
                parts.for_each(|part| sum.merge(&recorded(part).to_log_linear(bits)));
                assert_eq!(sum, whole.to_log_linear(bits), "{name}");
                let (coarse, exact) = (sum.summary(), whole.summary());
                assert_eq!((coarse.count, coarse.mean, coarse.max), (exact.count, exact.mean, exact.max));
                for (coarse, exact) in
                    [(coarse.p50, exact.p50), (coarse.p99, exact.p99), (coarse.p999, exact.p999)]
                {
                    // Half of a bucket, and the error of the exact one.
                    let most = exact / (2 << bits) + exact / 1_000 + 1;
                    assert!(coarse.abs_diff(exact) <= most, "{name}, {bits} bits: {coarse} {exact}");
                }
            }
        }
    }

    #[test]
    fn bytes_give_the_same_histogram_back() {
        for (name, samples) in distributions() {
            let histogram = recorded(&samples);
            let back = Histogram::from_bytes(&histogram.to_bytes()).unwrap();
            assert_eq!(back.summary(), histogram.summary(), "{name}");
            assert_eq!(back.buckets, histogram.buckets, "{name}");
        }
        assert_eq!(Histogram::from_bytes(&Histogram::new().to_bytes()).unwrap().count(), 0);
    }

    #[test]
    fn truncated_and_foreign_bytes_are_no_histogram() {
        let bytes = recorded(&[5, 7_000_000]).to_bytes();
        // zlib ends with a checksum of 4 bytes, which the reader ignores.
        for length in 0..bytes.len() - 8 {
            assert!(Histogram::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
        let mut foreign = vec![0; 24];
        let coarse = hdrhistogram::Histogram::<u64>::new_with_bounds(1, MAX_NS, 2).unwrap();
        V2DeflateSerializer::new().serialize(&coarse, &mut foreign).unwrap();
        assert!(Histogram::from_bytes(&foreign).is_err());
    }

    #[test]
    fn empty_and_cleared_histograms_are_zero() {
        let mut histogram = recorded(&[5, 7_000_000]);
        histogram.clear();
        assert_eq!(histogram.summary(), Distribution::default());
        assert_eq!((histogram.distribution(), histogram.quantile(1.0)), (vec![], 0));
        histogram.record(9);
        assert_eq!((histogram.summary().p50, histogram.max(), histogram.count()), (9, 9, 1));
    }

    #[test]
    fn zero_and_very_long_times_are_recorded() {
        let histogram = recorded(&[0, u64::MAX]);
        assert_eq!((histogram.quantile(0.5), histogram.quantile(1.0)), (0, MAX_NS));
        assert_eq!((histogram.max(), histogram.mean()), (MAX_NS, MAX_NS / 2));
    }

    #[test]
    fn the_distribution_ascends_and_is_dense_in_the_tail() {
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
    fn a_log_has_the_same_counts_in_another_reader() {
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
    fn a_log_contains_the_start_of_the_run() {
        let mut log = HistogramLog::new(Duration::from_millis(1_767_225_600_250));
        log.push(Duration::from_millis(1_500), Duration::from_secs(1), &recorded(&[2_500_000]));
        let text = log.finish();
        assert!(text.contains("#[StartTime: 1767225600.250 (seconds since epoch)]\n"), "{text}");
        // The cookie of encoding V2, deflated: readers recognise the format by it.
        assert!(text.lines().last().unwrap().starts_with("1.500,1.000,2.500,HISTFAAA"), "{text}");
    }

    #[test]
    fn buckets_are_contiguous_and_contain_their_times() {
        for bits in [3, 5] {
            let mut last = 0;
            for ns in (0..5_000).chain((13..36).map(|bit| (1 << bit) - 1)).chain((13..36).map(|bit| 1 << bit))
            {
                let bucket = LogLinear::bucket_of(bits, ns);
                assert!(LogLinear::start_of(bits, bucket) <= ns, "{bits} {ns}");
                assert!(LogLinear::start_of(bits, bucket + 1) > ns, "{bits} {ns}");
                if ns < 5_000 {
                    assert!(bucket == last || bucket == last + 1, "{bits} {ns}");
                    last = bucket;
                }
            }
        }
        // The kernel's BPF program has the same number of buckets.
        assert_eq!(LogLinear::bucket_of(5, (1 << 36) - 1), ((36 - 5 + 1) << 5) - 1);
    }

    #[test]
    fn later_samples_are_told_apart() {
        let histogram = |times: &[u64]| {
            let mut counts = vec![0; 1024];
            times.iter().for_each(|ns| counts[LogLinear::bucket_of(5, *ns)] += 1);
            LogLinear::new(5, counts, times.iter().sum(), times.iter().copied().max().unwrap_or_default())
        };
        let later = histogram(&[10, 9_000, 20, 20]).since(&histogram(&[10, 9_000]));
        assert_eq!((later.count(), later.sum_ns(), later.quantile(0.99)), (2, 40, 20));
        assert_eq!(histogram(&[7]).since(&LogLinear::default()), histogram(&[7]));
    }

    #[test]
    fn quantiles_are_within_half_a_bucket() {
        let mut counts = vec![0; 1024];
        for ns in 1..=10_000_u64 {
            counts[LogLinear::bucket_of(5, ns)] += 1;
        }
        let times = LogLinear::new(5, counts, 50_005_000, 10_000);
        let summary = times.summary();
        assert_eq!((summary.count, summary.mean, summary.max), (10_000, 5_000, 10_000));
        assert!(summary.p50.abs_diff(5_000) <= 80, "{summary:?}");
        assert!(summary.p99.abs_diff(9_900) <= 158, "{summary:?}");
        assert!(summary.p999 <= summary.max);
        assert_eq!(LogLinear::default().summary(), Distribution::default());
        let mut both = times.clone();
        both.merge(&times);
        assert_eq!((both.count(), both.quantile(0.5)), (20_000, times.quantile(0.5)));
    }
}
