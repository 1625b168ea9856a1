//! Histograms of the kernel's as summaries of a record.

use fourtuple_bpf::tracing::{FINE_BITS, Times};
use fourtuple_measure::{LogLinear, Quantiles};
use fourtuple_record::Spread;

pub(crate) fn times(times: &Times) -> LogLinear {
    LogLinear::new(FINE_BITS, times.buckets.to_vec(), times.sum_ns, times.max_ns)
}

/// Absent when there is nothing to summarize.
pub(crate) fn spread(times: &LogLinear) -> Option<Spread> {
    let Quantiles { count, mean, p50, p99, p999, max } = times.summary();
    (count > 0).then_some(Spread { count, mean, p50, p99, p999, max })
}
