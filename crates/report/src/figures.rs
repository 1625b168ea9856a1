//! Figures in the words that the terminal and the page share.

use fourtuple_record::{PlanResults, TimeWaitRun};

use crate::number::{count, duration, maybe_count};

/// `16,384`, or `12,000/16,384` when the run was cut.
pub(crate) fn transactions(run: &TimeWaitRun) -> String {
    if run.completed == run.transactions {
        count(run.completed)
    } else {
        format!("{}/{}", count(run.completed), count(run.transactions))
    }
}

/// The stall as measured: `none`, `58.9s`, `> 30.0s` when the patience ended first.
pub(crate) fn stall(run: &TimeWaitRun) -> String {
    format!("{}{}", if run.cut { "> " } else { "" }, none_or(run.stall_ns))
}

/// The predicted stall: `none`, `58.9s`.
pub(crate) fn none_or(stall_ns: u64) -> String {
    if stall_ns == 0 { "none".to_owned() } else { duration(stall_ns) }
}

/// The answers of a plan that are one number each, with their names.
pub(crate) fn key_figures(results: &PlanResults) -> Vec<(&'static str, String)> {
    let after =
        |ns: Option<u64>| ns.map_or_else(|| "never".to_owned(), |ns| format!("after {}", duration(ns)));
    vec![
        ("connections that fit at once", count(results.capacity)),
        ("connect() turns slow at", results.cliff_connections.map_or_else(|| "no cliff".to_owned(), count)),
        ("in use at this churn, in balance", maybe_count(results.steady_tuples)),
        ("the cliff is reached", after(results.cliff_after_ns)),
        ("the ports run out", after(results.exhausted_after_ns)),
        ("source addresses needed", count(results.sources_needed)),
        ("dials that fail though ports are free", count(results.failed_dials)),
        ("connections simulated", count(results.simulated)),
    ]
}
