use fourtuple_record::{AcceptCell, AcceptResults};
use maud::{Markup, html};

use super::accept_timeline::timeline;
use super::{table, words};
use crate::accept::{
    Group, Lab, break_even, close_every, errors, groups, index, interval, label, per, place, row_of, skipped,
};
use crate::number::{NOTHING, count, duration, factor, quantity, share};

pub(super) fn section(record: usize, lab: Lab, settings: &[String], results: &AcceptResults) -> Markup {
    let groups = groups(lab, results);
    html! {
        section {
            (words(settings, "settings"))
            @if groups.is_empty() { p.remark { "Nothing was measured." } }
            @if let Some(found) = &results.break_even { p { strong { (break_even(found)) } } }
            @for group in &groups {
                h2 { (group.title) }
                @match lab {
                    Lab::Accept => {
                        (ladder(group))
                        (accepts(group))
                    }
                    Lab::Keepalive => {
                        @if group.cells.iter().any(|cell| cell.operations > 0) { (chart(record, group)) }
                        (waits(group))
                    }
                }
            }
            @if !groups.is_empty() { (explained(lab)) }
            @if let Some(seen) = &results.timeline {
                h2 { "A request that waits while a worker idles" }
                (timeline(seen))
            }
            @if results.cells.iter().any(|cell| !cell.errors.is_empty()) {
                h2 { "Errors" }
                ul {
                    @for cell in results.cells.iter().filter(|cell| !cell.errors.is_empty()) {
                        li { span { (place(cell)) } ": " span.bad { (errors(cell)) } }
                    }
                }
            }
            @if !results.skipped.is_empty() {
                h2 { "Not run" }
                ul {
                    @for (name, why) in skipped(&results.skipped) { li { strong { (name) } ": " (why) } }
                }
            }
        }
    }
}

fn explained(lab: Lab) -> Markup {
    html! {
        p.dim {
            "Jain's index is 1 when all workers had the same, and 1/n when one of n had everything. "
            @match lab {
                Lab::Accept => {
                    "Wakeups: how often a worker was woken for the listener; empty: accept4 calls that found nobody in the "
                    "queue, both per connection accepted. Sockets: what each worker had open at the end."
                }
                Lab::Keepalive => {
                    "Wait: latency less the service time. Misplaced wait: the part of it in which some worker was idle, the "
                    "mean over all requests; a central queue has none. Probe: one more client, which sends short requests "
                    "only."
                }
            }
        }
    }
}

/// Height of a full bar and width of one worker, in the units of the picture, which is stretched to its place.
const TALL: f64 = 100.0;
const WIDE: f64 = 10.0;

/// A bar per worker, up to the share `most`; the line is where all would be if the work were even.
fn bars(lab: Lab, cell: &AcceptCell, most: f64) -> Markup {
    let shares = lab.shares(cell);
    let width = WIDE * shares.len().max(1) as f64;
    let tall = |share: f64| if most > 0.0 { share / most * TALL } else { 0.0 };
    let even = TALL - tall(1.0 / shares.len().max(1) as f64);
    let what = if lab == Lab::Accept { "accepts" } else { "requests" };
    let name = format!("{} of {}'s workers: {}", what, label(cell), row_of(lab.counts(cell)));
    html! {
        svg.bars viewBox=(format!("0 0 {width} {TALL}")) preserveAspectRatio="none" role="img" aria-label=(name) {
            @for (worker, (of_all, number)) in shares.iter().zip(lab.counts(cell)).enumerate() {
                @let left = WIDE * worker as f64;
                g {
                    title { "worker " (worker) ": " (count(*number)) " " (what) ", " (share(*of_all)) }
                    // The place of the whole bar answers the pointer, also where the bar is low.
                    rect x=(left) y="0" width=(WIDE) height=(TALL) fill="transparent" {}
                    rect x=(left + 1.0) y=(format!("{:.2}", TALL - tall(*of_all))) width=(WIDE - 2.0)
                        height=(format!("{:.2}", tall(*of_all))) fill="var(--series-0)" {}
                }
            }
            line x1="0" x2=(width) y1=(format!("{even:.2}")) y2=(format!("{even:.2}")) stroke="var(--text)"
                stroke-dasharray="3 4" vector-effect="non-scaling-stroke" {}
            line x1="0" x2=(width) y1=(TALL) y2=(TALL) stroke="var(--dim)" vector-effect="non-scaling-stroke" {}
        }
    }
}

fn highest(lab: Lab, group: &Group<'_>) -> f64 {
    group.cells.iter().flat_map(|cell| lab.shares(cell)).fold(0.0, f64::max)
}

/// A picture a policy, side by side where there is room.
fn ladder(group: &Group<'_>) -> Markup {
    let most = highest(Lab::Accept, group);
    html! {
        figure {
            div.ladder {
                @for cell in &group.cells {
                    div {
                        strong { (label(cell)) }
                        @if Lab::Accept.shares(cell).is_empty() {
                            span.dim { "Not known." }
                        } @else {
                            (bars(Lab::Accept, cell, most))
                            span.dim { "Jain " (index(cell.jain)) }
                        }
                    }
                }
            }
            figcaption {
                "Share of the connections that each worker accepted, worker 0 on the left; the highest bar is "
                (share(most)) ". Dotted: what each would have if all had the same."
            }
        }
    }
}

fn accepts(group: &Group<'_>) -> Markup {
    let head = [
        "Policy",
        "Jain",
        "Max/mean",
        "Wakeups per accept",
        "Empty accepts per accept",
        "Open sockets each",
        "Accepts each",
        "Wait p99",
        "CPU per request",
    ];
    table(
        &head,
        &html! {
            @for cell in &group.cells {
                tr {
                    th scope="row" { (label(cell)) }
                    td { (index(cell.jain)) }
                    td { (factor(cell.max_over_mean)) }
                    td { (per(cell.wakeups_per_accept)) }
                    td { (per(cell.empty_accepts_per_accept)) }
                    td { (row_of(&cell.sockets)) }
                    td { (row_of(&cell.accepts)) }
                    td { (duration(cell.wait_ns.p99)) }
                    td { (duration(cell.cpu_ns_per_request)) }
                }
            }
        },
    )
}

/// The wait of each policy against how often connections are closed; accept.js draws it.
fn chart(record: usize, group: &Group<'_>) -> Markup {
    html! {
        figure data-chart="accept-wait" data-record=(record) data-family=(group.family) data-load=(group.load) {
            div.plot {}
            figcaption {
                "Wait of the requests, a line for each policy: latency less the service time. Whiskers: 95% interval of p99.9 "
                "over the repeats. A name in the legend shows or hides its line."
            }
        }
    }
}

fn waits(group: &Group<'_>) -> Markup {
    let head = [
        "Policy",
        "Close every",
        "Wait p50",
        "p99",
        "p99.9",
        "Slow per 10,000",
        "Misplaced wait",
        "CPU per request",
        "Jain",
        "Max/mean",
        "Requests each",
        "Probe slow per 10,000",
        "Probe p99.9",
    ];
    let most = highest(Lab::Keepalive, group);
    table(
        &head,
        &html! {
            @for cell in &group.cells {
                @let interval = interval(&cell.wait_ns);
                tr {
                    th scope="row" { (label(cell)) }
                    td { (close_every(cell.close_every)) }
                    td { (duration(cell.wait_ns.p50)) }
                    td { (duration(cell.wait_ns.p99)) }
                    td { (duration(cell.wait_ns.p999)) @if !interval.is_empty() { br; span.dim { (interval) } } }
                    td { (quantity(cell.slow_per_10k)) }
                    td { (duration(cell.misplaced_wait_ns)) }
                    td { (duration(cell.cpu_ns_per_request)) }
                    td { (index(cell.jain)) }
                    td { (factor(cell.max_over_mean)) }
                    td { @if Lab::Keepalive.shares(cell).is_empty() { (NOTHING) } @else { (bars(Lab::Keepalive, cell, most)) } }
                    @match cell.probe {
                        Some(probe) => {
                            td { (quantity(probe.slow_per_10k)) }
                            td { (duration(probe.wait_ns.p999)) }
                        }
                        None => { td { (NOTHING) } td { (NOTHING) } }
                    }
                }
            }
        },
    )
}
