use fourtuple_record::Distribution;

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

    /// Merges another histogram with the same buckets, or an empty one.
    pub fn merge(&mut self, other: &LogLinear) {
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
    use super::*;

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
