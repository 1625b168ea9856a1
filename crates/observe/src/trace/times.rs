//! Summaries of histograms that BPF programs fill.

use fourtuple_bpf::tracing::{FINE_BITS, Times};
use fourtuple_record::Distribution;
use fourtuple_record::measure::LogLinear;

/// Builds a histogram from buckets of the fine resolution.
pub(crate) fn times(times: &Times) -> LogLinear {
    LogLinear::new(FINE_BITS, times.buckets.to_vec(), times.sum_ns, times.max_ns)
}

/// Adds histograms of one resolution; `None` without one.
pub(crate) fn merged(all: impl IntoIterator<Item = LogLinear>) -> Option<LogLinear> {
    all.into_iter().reduce(|mut sum, next| {
        sum.merge(&next);
        sum
    })
}

/// Returns the quantiles of a histogram; `None` if it is empty.
pub(crate) fn distribution(times: &LogLinear) -> Option<Distribution> {
    Some(times.summary()).filter(|found| found.count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that loses its processor in one of few searches of a pair makes the percentile of this pair long, not that of all.
    #[test]
    fn one_long_search_is_not_the_percentile_of_all() {
        let of = |searches: &[u64]| {
            let mut times = LogLinear::new(FINE_BITS, Vec::new(), 0, 0);
            let buckets = searches.iter().map(|&ns| (LogLinear::bucket_of(FINE_BITS, ns), 1));
            times.add_counted(buckets, searches.iter().sum(), u64::MAX);
            times
        };
        let (many, few) = (of(&[8_000; 340]), of(&[26_000_000, 7_000]));
        assert!(few.quantile(0.99) > 25_000_000);
        let all = merged([few, many]).unwrap();
        assert_eq!(all.count(), 342);
        assert!(all.quantile(0.99) < 10_000, "{}", all.quantile(0.99));
        assert!(merged([]).is_none());
    }
}
