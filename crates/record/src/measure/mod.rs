//! Statistics without a clock and without a socket: summaries, histograms, intervals, comparisons.
//!
//! The module measures nothing. Samples come in as numbers, so that every claim in a record can be tested on made-up
//! data.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod balance;
mod comparison;
mod latency;
pub mod misplaced;
pub mod words;

use crate::Distribution;

pub use comparison::{Comparison, Conclusion, FIRST_LOOK, Interval, Verdict, compare_saved, median_interval};
pub use latency::{Histogram, HistogramLog, LogLinear, MAX_NS, NotAHistogram, log};

/// Summarises `samples`, which it sorts; `None` without samples.
///
/// A percentile is the smallest sample that at least that share of all samples does not exceed (nearest rank), so
/// it is always a measured duration.
pub fn summary(samples: &mut [u64]) -> Option<Distribution> {
    if samples.is_empty() {
        return None;
    }
    samples.sort_unstable();
    let count = samples.len();
    let rank = |per_mille: usize| samples[(count * per_mille).div_ceil(1000).max(1) - 1];
    let total: u128 = samples.iter().map(|&sample| u128::from(sample)).sum();
    Some(Distribution {
        count: count as u64,
        mean: (total / count as u128) as u64,
        p50: rank(500),
        p99: rank(990),
        p999: rank(999),
        max: samples[count - 1],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut samples: Vec<u64> = (1..=1000).rev().collect();
        let found = summary(&mut samples).unwrap();
        assert_eq!((found.p50, found.p99, found.p999, found.max), (500, 990, 999, 1000));
        assert_eq!((found.count, found.mean), (1000, 500));
    }

    #[test]
    fn one_sample_is_every_percentile() {
        let found = summary(&mut [7]).unwrap();
        assert_eq!((found.mean, found.p50, found.p999, found.max), (7, 7, 7, 7));
        assert_eq!(summary(&mut []), None);
    }
}
