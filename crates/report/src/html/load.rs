use fourtuple_record::{LoadPorts, LoadResults, LoadSettings, Quantiles};
use maud::{Markup, html};

use super::{chart, table, words};
use crate::envelope::plural;
use crate::load::{achieved, asked, errors, held, key_figures, moment, parts, ports_words, stall};
use crate::number::{count, duration};

pub(super) fn section(
    index: usize,
    details: &[String],
    settings: &LoadSettings,
    results: &LoadResults,
) -> Markup {
    let errors = errors(results);
    let measured = results.latency_ns.total.samples > 0;
    html! {
        section {
            h2 { (achieved(settings, results)) }
            p { (asked(settings)) }
            (words(details, "settings"))
            dl.figures {
                @for (name, value) in key_figures(settings, results) {
                    div { dt { (name) } dd.text { (value) } }
                }
                div { dt { "errors" } dd.text.bad[!errors.is_empty()] {
                    @if errors.is_empty() { "none" }
                    @for (number, error) in errors.iter().enumerate() { @if number > 0 { br; } (error) }
                } }
            }
            @if let Some(reason) = &results.engine_reason {
                p.dim { (results.engine) " because " (reason) }
            }
            h2 { "Latency" }
            @if measured { (latency(&parts(results))) } @else { p.remark { "Nothing was measured." } }
            @if results.seconds.iter().any(|second| second.operations > 0) {
                (chart("load-latency", index, "", &html! {
                    "Time of the operations that ended in each second: median, 99th percentile and longest." (shaded(results))
                }))
            }
            @if !results.distribution.is_empty() {
                h2 { "How the times are distributed" }
                (chart("load-distribution", index, "", &html! {
                    "The time that a share of the operations did not exceed. Every nine more is a tenth as many operations; "
                    "the last point is the longest."
                }))
            }
            @if !results.seconds.is_empty() {
                h2 { "Throughput" }
                (chart("load-throughput", index, "", &html! {
                    "Operations, new connections and failures in each second."
                    @if settings.rate_per_s.is_some() { " Dotted: the rate that was offered." }
                    (shaded(results))
                }))
            }
            @if let Some(ports) = &results.ports { (budget(index, ports, results)) }
            @if let Some(hold) = &results.hold {
                h2 { "Held connections" }
                p.bad[hold.lost > 0] { (held(hold)) }
            }
            @if let Some(threshold) = settings.threshold_ns { (slow(threshold, results)) }
        }
    }
}

/// What the bands in the charts over time mean.
fn shaded(results: &LoadResults) -> &'static str {
    let stalled = results.ports.as_ref().is_some_and(|ports| ports.stalled_ns.is_some());
    if stalled { " Shaded: from the first port that was missing." } else { "" }
}

fn latency(parts: &[(&'static str, Quantiles)]) -> Markup {
    html! {
        (table(&["Part", "Samples", "Mean", "p50", "p99", "p99.9", "Max"], &html! {
            @for (name, times) in parts {
                tr {
                    th scope="row" { (name) }
                    td { (count(times.samples)) }
                    td { (duration(times.mean)) }
                    td { (duration(times.p50)) }
                    td { (duration(times.p99)) }
                    td { (duration(times.p999)) }
                    td { (duration(times.max)) }
                }
            }
        }))
        p.dim {
            "Search: in connect(), the search for a port and the SYN. Handshake: from there until the connection was there. "
            "First byte: from the request to the first byte of the response. Total: from the start to the end, closing "
            "not included."
            @if parts.iter().any(|(name, _)| *name == "late") {
                " Late: from the intended start to the real one; it counts in the total."
            }
        }
    }
}

fn budget(index: usize, ports: &LoadPorts, results: &LoadResults) -> Markup {
    html! {
        h2 { "Ports" }
        (words(&ports_words(ports), "settings"))
        p.bad[ports.stalled_ns.is_some()] { (stall(ports)) }
        @if results.seconds.iter().any(|second| second.ports_left.is_some()) {
            (chart("load-ports", index, "", &html! {
                "Tuples left for new connections, as far as known. Dotted: the budget."
                @if ports.predicted_stall_ns.is_some() { " Dashed: where a stall was predicted before the first packet." }
                (shaded(results))
            }))
        }
    }
}

/// Slow operations that are shown; the record has up to 1,000.
const SHOWN: usize = 100;

fn slow(threshold_ns: u64, results: &LoadResults) -> Markup {
    html! {
        h2 { "Slow operations" }
        p.bad[results.slow_count > 0] {
            (plural(results.slow_count, "operation")) " over " (duration(threshold_ns)) "."
            @if results.slow_count > SHOWN as u64 { " The first " (SHOWN) ":" }
        }
        @if !results.slow.is_empty() {
            details open[results.slow.len() <= 10] {
                summary { "When, and what took the time" }
                (table(&["Started after", "Took", "Longest part", "Request of its connection"], &html! {
                    @for slow in results.slow.iter().take(SHOWN) {
                        tr {
                            th scope="row" { (moment(slow.at_ns)) }
                            td { (duration(slow.total_ns)) }
                            td { (slow.longest) }
                            td { (count(slow.request)) }
                        }
                    }
                }))
            }
        }
    }
}
