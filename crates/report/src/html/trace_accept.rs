use fourtuple_record::{TraceAcceptResults, TraceListener};
use maud::{Markup, html};

use super::{table, words};
use crate::number::{count, duration};
use crate::trace_accept::{facts, figures, histogram, more, of_listener, overflow, times, title};

/// Listeners that are shown, and workers of each.
const LISTENERS: usize = 100;
const WORKERS: usize = 200;

pub(super) fn section(settings: &[String], results: &TraceAcceptResults) -> Markup {
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
            @if results.overflows > 0 {
                p.bad { "Dropped at full queues: " (count(results.overflows)) }
            }
            (all_times(results))
            p.dim {
                "The wait begins when the connection is established and ends when accept() gives it, or io_uring tells of it. "
                "The handshake is the kernel's own time from the SYN-ACK to its ACK."
            }
            (steps(results))
            @for listener in results.listeners.iter().take(LISTENERS) { (one_listener(listener)) }
            @if let Some(more) = more(LISTENERS, results.listeners.len(), "listener") { p.dim { (more) } }
        }
    }
}

fn all_times(results: &TraceAcceptResults) -> Markup {
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

fn steps(results: &TraceAcceptResults) -> Markup {
    let steps = histogram(results);
    let most = steps.iter().map(|(_, number)| *number).max().unwrap_or(0);
    html! {
        @if !steps.is_empty() {
            h2 { "Accepts by time of wait" }
            (table(&["From", "Accepts", ""], &html! {
                @for (from, number) in steps {
                    tr { th scope="row" { (duration(from)) } td { (count(number)) } td { (bar(number, most)) } }
                }
            }))
        }
    }
}

/// As long as its share of the most. A meter needs no style, which the page's policy would allow for itself only.
fn bar(number: u64, most: u64) -> Markup {
    html! { meter min="0" max=(most.max(1)) value=(number) { (count(number)) } }
}

fn one_listener(listener: &TraceListener) -> Markup {
    let head = [
        "Worker",
        "Accepts",
        "",
        "Open",
        "Reads",
        "Mean",
        "p50",
        "p99",
        "Max",
        "Woken for nothing",
        "Empty",
        "Closed first",
    ];
    let most = listener.workers.iter().map(|worker| worker.accepts).max().unwrap_or(0);
    html! {
        h2 { (title(listener)) }
        (words(&of_listener(listener), "settings"))
        @if let Some(overflow) = overflow(listener) { p.bad { (overflow) } }
        @if !listener.workers.is_empty() {
            (table(&head, &html! {
                @for worker in listener.workers.iter().take(WORKERS) {
                    tr {
                        th scope="row" { (worker.process) "/" (worker.thread) " " (worker.name) }
                        td { (count(worker.accepts)) }
                        td { (bar(worker.accepts, most)) }
                        td { (count(worker.open)) }
                        td { (count(worker.reads)) }
                        td { (duration(worker.mean_ns)) }
                        td { (duration(worker.p50_ns)) }
                        td { (duration(worker.p99_ns)) }
                        td { (duration(worker.max_ns)) }
                        td.bad[worker.woken_for_nothing > 0] { (count(worker.woken_for_nothing)) }
                        td { (count(worker.empty)) }
                        td { (count(worker.closed_first)) }
                    }
                }
            }))
            @if let Some(more) = more(WORKERS, listener.workers.len(), "worker") { p.dim { (more) } }
        }
    }
}
