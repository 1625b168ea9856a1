use crate::latency::Quantiles;

/// A histogram that somebody else has counted, in a kernel for one: 2^`bits` steps of the same width to an octave.
///
/// Bucket `n` below 2^`bits` is the time of `n` ns; above, each octave is cut into 2^`bits` buckets. With 5 bits a quantile
/// is at most 1.6% off, with 3 bits 6.3%: the middle of its bucket stands for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogLinear {
    bits: u32,
    counts: Vec<u64>,
    sum_ns: u64,
    max_ns: u64,
}

impl LogLinear {
    /// Of `counts` by bucket; `sum_ns` and `max_ns` are exact.
    pub fn new(bits: u32, counts: Vec<u64>, sum_ns: u64, max_ns: u64) -> LogLinear {
        LogLinear { bits, counts, sum_ns, max_ns }
    }

    /// The bucket that a time falls into.
    pub fn bucket_of(bits: u32, ns: u64) -> usize {
        if ns < 1 << bits {
            return ns as usize;
        }
        let octave = ns.ilog2() - bits;
        (((octave + 1) << bits) as usize) + ((ns >> octave) as usize & ((1 << bits) - 1))
    }

    /// The shortest time of a bucket, in nanoseconds.
    pub fn start_of(bits: u32, bucket: usize) -> u64 {
        let (octave, step) = (bucket >> bits, (bucket & ((1 << bits) - 1)) as u64);
        match octave {
            0 => step,
            _ => ((1 << bits) + step) << (octave - 1),
        }
    }

    /// Adds what another one of the same steps has counted.
    pub fn merge(&mut self, other: &LogLinear) {
        debug_assert_eq!(self.bits, other.bits);
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Counted times.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time that `share` (0 to 1) of all do not exceed, by nearest rank: the middle of its bucket, never above the
    /// longest; 0 when nothing was counted.
    pub fn quantile(&self, share: f64) -> u64 {
        let count = self.count();
        let rank = ((share - f64::EPSILON).clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, number) in self.counts.iter().enumerate() {
            seen += number;
            if *number > 0 && seen >= rank {
                let (start, end) = (Self::start_of(self.bits, bucket), Self::start_of(self.bits, bucket + 1));
                return (start + (end - start) / 2).min(self.max_ns.max(start));
            }
        }
        0
    }

    /// The numbers that a record shows; all 0 when nothing was counted.
    pub fn summary(&self) -> Quantiles {
        let count = self.count();
        Quantiles {
            count,
            mean: self.sum_ns / count.max(1),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max_ns,
        }
    }

    /// Start of each bucket that has counts, in nanoseconds, with its count.
    pub fn steps(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let used = self.counts.iter().enumerate().filter(|(_, number)| **number > 0);
        used.map(|(bucket, number)| (Self::start_of(self.bits, bucket), *number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_hold_their_times() {
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
        // As many as the kernel's program has room for.
        assert_eq!(LogLinear::bucket_of(5, (1 << 36) - 1), ((36 - 5 + 1) << 5) - 1);
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
        assert_eq!(LogLinear::default().summary(), Quantiles::default());
        let mut both = times.clone();
        both.merge(&times);
        assert_eq!((both.count(), both.quantile(0.5)), (20_000, times.quantile(0.5)));
    }
}
