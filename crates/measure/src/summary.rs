/// A distribution of durations in nanoseconds, computed from an exact sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of samples.
    pub count: u64,
    /// Arithmetic mean, rounded down.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
}

impl Summary {
    /// Summarises `samples`, which it sorts; `None` without samples.
    ///
    /// A percentile is the smallest sample that at least that share of all samples does not exceed (nearest rank), so
    /// it is always a measured duration.
    pub fn of(samples: &mut [u64]) -> Option<Summary> {
        if samples.is_empty() {
            return None;
        }
        samples.sort_unstable();
        let count = samples.len();
        let rank = |per_mille: usize| samples[(count * per_mille).div_ceil(1000).max(1) - 1];
        let total: u128 = samples.iter().map(|&sample| u128::from(sample)).sum();
        Some(Summary {
            count: count as u64,
            mean: (total / count as u128) as u64,
            p50: rank(500),
            p99: rank(990),
            p999: rank(999),
            max: samples[count - 1],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut samples: Vec<u64> = (1..=1000).rev().collect();
        let summary = Summary::of(&mut samples).unwrap();
        assert_eq!((summary.p50, summary.p99, summary.p999, summary.max), (500, 990, 999, 1000));
        assert_eq!((summary.count, summary.mean), (1000, 500));
    }

    #[test]
    fn one_sample_is_every_percentile() {
        let summary = Summary::of(&mut [7]).unwrap();
        assert_eq!((summary.mean, summary.p50, summary.p999, summary.max), (7, 7, 7, 7));
        assert_eq!(Summary::of(&mut []), None);
    }
}
