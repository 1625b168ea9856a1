//! Summaries of histograms that BPF programs fill.

use fastrand::Rng;
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

/// A random sample of bounded size from a stream of items; each item has the same chance (reservoir sampling).
#[derive(Debug)]
pub(crate) struct Reservoir<T> {
    kept: Vec<T>,
    capacity: usize,
    seen: u64,
    random: Rng,
}

impl<T> Reservoir<T> {
    pub(crate) fn new(capacity: usize, seed: u64) -> Reservoir<T> {
        Reservoir { kept: Vec::new(), capacity, seen: 0, random: Rng::with_seed(seed) }
    }

    /// Adds an item; a random earlier item may be dropped for it.
    pub(crate) fn offer(&mut self, item: T) {
        self.seen += 1;
        if self.kept.len() < self.capacity {
            self.kept.push(item);
            return;
        }
        let index = self.random.u64(..self.seen);
        if let Some(kept) = usize::try_from(index).ok().and_then(|index| self.kept.get_mut(index)) {
            *kept = item;
        }
    }

    pub(crate) fn into_kept(self) -> Vec<T> {
        self.kept
    }
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

    #[test]
    fn early_and_late_have_the_same_chance() {
        let mut reservoir = Reservoir::new(1_000, 7);
        (0..10_000).for_each(|number| reservoir.offer(number));
        let kept = reservoir.into_kept();
        assert_eq!(kept.len(), 1_000);
        let early = kept.iter().filter(|number| **number < 5_000).count();
        assert!((420..=580).contains(&early), "{early}");
    }

    #[test]
    fn a_short_stream_is_kept_whole() {
        let mut reservoir = Reservoir::new(3, 1);
        (0..2).for_each(|number| reservoir.offer(number));
        assert_eq!(reservoir.into_kept(), [0, 1]);
    }
}
