//! Summaries of histograms that BPF programs fill.

use fourtuple_bpf::tracing::{FINE_BITS, Times};
use fourtuple_record::measure::LogLinear;
use fourtuple_record::Distribution;

/// Builds a histogram from buckets of the fine resolution.
pub(crate) fn times(times: &Times) -> LogLinear {
    LogLinear::new(FINE_BITS, times.buckets.to_vec(), times.sum_ns, times.max_ns)
}

/// Returns the quantiles of a histogram; `None` if it is empty.
pub(crate) fn distribution(times: &LogLinear) -> Option<Distribution> {
    Some(times.summary()).filter(|found| found.count > 0)
}
