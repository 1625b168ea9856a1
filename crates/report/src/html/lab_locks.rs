use fourtuple_record::{LabLocksResults, LocksPair, LocksSide};
use maud::{Markup, html};

use super::{table, words};
use crate::lab_locks::{caveats, classes, cpu_times, rates, ratio, sides, title, wait_time, waits};
use crate::number::{count, total};

pub(super) fn section(settings: &[String], results: &LabLocksResults) -> Markup {
    html! {
        section {
            (words(settings, "settings"))
            @if results.pairs.is_empty() { p.remark { "Nothing was measured." } }
            @for pair in &results.pairs { (one(pair)) }
            @let caveats = caveats(results);
            @if !caveats.is_empty() {
                h2 { "What the lock waits do not show" }
                ul { @for line in &caveats { li { (line) } } }
            }
        }
    }
}

fn one(pair: &LocksPair) -> Markup {
    let head = [
        "Side",
        "Queries",
        "95% interval",
        "CPU per query",
        "95% interval",
        "Lock waits per 1,000",
        "Wait per query",
        "Failed",
    ];
    let sides = sides(pair);
    html! {
        h2 { (title(&pair.change)) }
        p { strong { (pair.verdict) } " (" (ratio(&pair.ratio)) "). " strong { (pair.cpu_verdict) } " (" (ratio(&pair.cpu_ratio)) ")." }
        figure {
            (bars(&sides, "queries per second", [|side| side.queries_per_s, |side| side.queries_per_s_low, |side| side.queries_per_s_high],
                |side| rates(side).0))
            (bars(&sides, "CPU time per query",
                [|side| side.cpu_ns_per_query, |side| side.cpu_ns_per_query_low, |side| side.cpu_ns_per_query_high],
                |side| cpu_times(side).0))
            figcaption { "Medians of " (count(pair.pairs)) " pairs of trials; whiskers are their 95% intervals." }
        }
        (table(&head, &html! {
            @for (name, side) in &sides {
                @let ((rate, rates), (time, times)) = (rates(side), cpu_times(side));
                tr {
                    th scope="row" { (name) }
                    td { (rate) } td { (rates) } td { (time) } td { (times) }
                    td { (waits(side)) } td { (wait_time(side)) }
                    td { (count(total(side.errors.values()))) }
                }
            }
        }))
        @for (name, side) in &sides {
            @if let Some(classes) = classes(side) {
                p { "Lock waits per 1,000 queries, " (name) ": " (classes) "." }
            }
        }
    }
}

/// Room for names, for bars, and for figures.
const NAMES: f64 = 130.0;
const BARS: f64 = 360.0;
const WIDTH: f64 = 600.0;
const ROW: f64 = 28.0;
const TITLE: f64 = 22.0;

/// A bar for each side, with its interval: needs no script.
fn bars(
    sides: &[(String, &LocksSide); 2],
    title: &str,
    [value, low, high]: [fn(&LocksSide) -> f64; 3],
    figure: fn(&LocksSide) -> String,
) -> Markup {
    let longest = sides.iter().map(|(_, side)| high(side).max(value(side))).fold(0.0, f64::max);
    let across = |number: f64| if longest > 0.0 { (number / longest).clamp(0.0, 1.0) * BARS } else { 0.0 };
    let at = |number: f64| format!("{:.1}", NAMES + across(number));
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {}", TITLE + 2.0 * ROW)) role="img" aria-label=(title)
            style="width:100%;height:auto;max-width:60rem" {
            text x="2" y="14" font-size="12" fill="var(--dim)" { (title) }
            @for (row, (name, side)) in sides.iter().enumerate() {
                @let top = TITLE + row as f64 * ROW;
                @let middle = top + ROW / 2.0 - 2.0;
                text x="2" y=(middle + 4.0) font-size="12" fill="var(--text)" { (name) }
                rect x=(NAMES) y=(top + 2.0) width=(format!("{:.1}", across(value(side)))) height=(ROW - 8.0)
                    fill=(format!("var(--series-{row})")) {}
                line x1=(at(low(side))) x2=(at(high(side))) y1=(middle) y2=(middle) stroke="var(--text)" stroke-width="1.5" {}
                @for end in [low(side), high(side)] {
                    line x1=(at(end)) x2=(at(end)) y1=(middle - 5.0) y2=(middle + 5.0) stroke="var(--text)" stroke-width="1.5" {}
                }
                text x=(NAMES + BARS + 8.0) y=(middle + 4.0) font-size="12" fill="var(--text)" { (figure(side)) }
            }
        }
    }
}
