use fourtuple_record::TraceConnectResults;
use maud::{Markup, html};

use super::{chart, table, words};
use crate::number::{count, duration, maybe_duration};
use crate::trace::{UDP_TIER, facts, failures, figures, fill, flame, histogram, more, times};

/// Rows of the table of processes and destinations.
const ROWS: usize = 200;

pub(super) fn section(index: usize, settings: &[String], results: &TraceConnectResults) -> Markup {
    html! {
        section {
            h2 { "All of them" }
            (words(&facts(results), "settings"))
            (words(settings, "settings"))
            dl.figures {
                @for (name, value) in figures(results) {
                    div { dt { (name) } dd { (value) } }
                }
            }
            @if !results.failed.is_empty() {
                p.bad { "Failed: " (failures(&results.failed)) }
            }
            @if let Some(words) = flame(results) { p { (words) } }
            (all_times(results))
            p.dim { (where_it_ends(results)) }
            @if !results.samples.is_empty() {
                h2 { "Single searches" }
                (chart("trace-scatter", index, "", &html! {
                    "A sample of " (count(results.samples.len() as u64)) " searches: how long each took."
                }))
            }
            @if !results.heat.columns.is_empty() {
                h2 { "Searches over time" }
                (chart("trace-heat", index, "", &html! {
                    "All searches: when they ended and how long they took. The stronger the colour, the more; every factor "
                    "of their number counts the same."
                }))
            }
            (steps(results))
            (tuples(results))
        }
    }
}

fn where_it_ends(results: &TraceConnectResults) -> &'static str {
    match results.tier.as_str() {
        UDP_TIER => {
            "The search begins where the kernel runs the programs of the cgroup, and ends where the route is looked up. \
             Interrupts and context switches in between count with it."
        }
        _ => {
            "The search ends where the route is looked up again (IPv4) or the SYN is queued at the device (IPv6); the \
             handshake begins there. Interrupts and context switches in between count with it."
        }
    }
}

fn all_times(results: &TraceConnectResults) -> Markup {
    let head = ["Time", "Count", "Mean", "p50", "p99", "p99.9", "Max"];
    table(
        &head,
        &html! {
            @for (name, times) in times(results) {
                tr {
                    th scope="row" { (name) }
                    td { (count(times.count)) }
                    td { (duration(times.mean)) }
                    td { (duration(times.p50)) }
                    td { (duration(times.p99)) }
                    td { (duration(times.p999)) }
                    td { (duration(times.max)) }
                }
            }
        },
    )
}

fn steps(results: &TraceConnectResults) -> Markup {
    let steps = histogram(results);
    html! {
        @if !steps.is_empty() {
            h2 { "Searches by time" }
            (table(&["From", "Even ports", "Odd ports"], &html! {
                @for (from, even, odd) in steps {
                    tr { th scope="row" { (duration(from)) } td { (count(even)) } td { (count(odd)) } }
                }
            }))
        }
    }
}

fn tuples(results: &TraceConnectResults) -> Markup {
    let head = [
        "Process",
        "Destination",
        "Searches",
        "Even",
        "Odd",
        "Mean",
        "p99",
        "Even p50",
        "Odd p50",
        "Failed",
        "No port",
        "Bound port",
        "Established",
        "Retries",
        "SYNs again",
        "Closed first",
        "Closed by peer",
        "Ports in use",
    ];
    html! {
        @if !results.tuples.is_empty() {
            h2 { "By process and destination" }
            (table(&head, &html! {
                @for tuple in results.tuples.iter().take(ROWS) {
                    tr {
                        th scope="row" { (tuple.process) " " (tuple.name) }
                        td { (tuple.destination) }
                        td { (count(tuple.searches)) }
                        td { (count(tuple.even)) }
                        td { (count(tuple.odd)) }
                        td { (duration(tuple.mean_ns)) }
                        td { (duration(tuple.p99_ns)) }
                        td { (maybe_duration(tuple.even_p50_ns)) }
                        td { (maybe_duration(tuple.odd_p50_ns)) }
                        td.bad[tuple.failed > 0] { (count(tuple.failed)) }
                        td.bad[tuple.no_port > 0] { (count(tuple.no_port)) }
                        td { (count(tuple.given_port)) }
                        td { (count(tuple.established)) }
                        td { (count(tuple.retries)) }
                        td { (count(tuple.syn_retries)) }
                        td { (count(tuple.closed_first)) }
                        td { (count(tuple.closed_by_peer)) }
                        td { (fill(tuple)) }
                    }
                }
            }))
            @if let Some(more) = more(ROWS, results.tuples.len()) { p.dim { (more) } }
        }
    }
}
