use fourtuple_record::{TimeWaitResults, TimeWaitRun};
use maud::{Markup, html};

use super::{chart, table, words};
use crate::envelope::plural;
use crate::figures::{none_or, stall, transactions};
use crate::number::{count, duration, maybe_count, rate, total};

pub(super) fn section(index: usize, part: &str, settings: &[String], results: &TimeWaitResults) -> Markup {
    html! {
        section {
            h2 { "TIME_WAIT: stalls and remedies" }
            (words(settings, "settings"))
            p {
                "One source address can keep up " strong { (rate(results.ceiling_per_s)) } " for ever: "
                (plural(results.ports, "port")) " divided by " (duration(results.time_wait_ns)) " of TIME_WAIT."
            }
            @if results.runs.is_empty() {
                p.remark { "Nothing was measured." }
            } @else {
                (remedies(&results.runs))
            }
            @if results.runs.iter().any(|run| !run.time_wait.is_empty()) {
                h2 { "Sockets in TIME_WAIT" }
                (chart("time-wait", index, part, &html! {
                    "Sockets in TIME_WAIT since the first connect() of each run. Shaded: the stall as predicted before "
                    "the run. Dashed: the ports of the range. A name in the legend shows or hides its run."
                }))
            }
        }
    }
}

fn remedies(runs: &[TimeWaitRun]) -> Markup {
    let head = [
        "Remedy",
        "Transactions",
        "Rate",
        "Predicted stall at",
        "Stalled at",
        "Predicted stall",
        "Stall",
        "Errors",
        "Elapsed",
    ];
    table(
        &head,
        &html! {
            @for run in runs {
                tr {
                    th scope="row" { (run.remedy) }
                    td { (transactions(run)) }
                    td { (rate(run.rate_per_s)) }
                    td { (maybe_count(run.predicted_stall_at)) }
                    td { (maybe_count(run.stalled_at)) }
                    td { (none_or(run.predicted_stall_ns)) }
                    td.bad[run.stall_ns > 0] { (stall(run)) }
                    td {
                        (count(total(run.errors.values())))
                        @for (errno, number) in &run.errors {
                            br; span.dim { @if run.errors.len() > 1 { (count(*number)) " " } (errno) }
                        }
                    }
                    td { (duration(run.elapsed_ns)) }
                }
            }
        },
    )
}
