use fourtuple_record::{PortsResults, PortsSettings, Spread};
use maud::{Markup, html};

use super::{chart, table, words};
use crate::number::{count, duration, factor, maybe_duration, rate};
use crate::strategies::{StrategyRow, rows};

pub(super) fn section(
    index: usize,
    part: &str,
    in_words: &[String],
    settings: &PortsSettings,
    results: &PortsResults,
) -> Markup {
    let rows = rows(&results.strategies);
    let windows: Vec<&StrategyRow<'_>> = rows.iter().filter(|row| row.window().is_some()).collect();
    let drawn = results.strategies.iter().any(|result| result.scatter.is_some());
    html! {
        section {
            h2 { "The strategies" }
            (words(in_words, "settings"))
            @if rows.is_empty() {
                p.remark { "Nothing was measured." }
            } @else {
                (strategies(&rows))
                p.dim {
                    "Floor: the mean of the same calls on a destination with an empty table, dialed in between. "
                    "Mean, percentiles and maximum are of the time in connect() of the dials that succeeded."
                }
            }
            @if !windows.is_empty() {
                h3 { "Windows" }
                (window_table(&windows, as_published(settings)))
            }
            @if drawn {
                h2 { "Every connection" }
                (chart("scatter", index, part, &html! {
                    "Time in connect() of each dial, in the order of the dials; the line is the moving mean. All "
                    "strategies have the same axis."
                }))
                h2 { "How the times are distributed" }
                (chart("distribution", index, part, &html! {
                    "Share of the connections by time in connect(), 16 steps to a factor of ten."
                }))
            }
            @if rows.iter().any(|row| !row.by_fill.is_empty()) {
                h2 { "Cost as the ports fill up" }
                (chart("fill", index, part, &html! {
                    "Mean time in connect() while the table went from the point before to this one. Dashed: the floor."
                }))
            }
        }
    }
}

fn strategies(rows: &[StrategyRow<'_>]) -> Markup {
    let head = [
        "Strategy",
        "Connections",
        "Failed",
        "Total time",
        "Rate",
        "Mean",
        "p50",
        "p99",
        "p99.9",
        "Max",
        "Even mean",
        "Odd mean",
        "Mean vs floor",
        "CPU per dial",
    ];
    table(
        &head,
        &html! {
            @for row in rows {
                @let all = |field: fn(Spread) -> u64| maybe_duration(row.all.map(field));
                tr {
                    th scope="row" {
                        (row.strategy)
                        @if let Some(chosen) = row.chosen { br; span.dim { "chose " (chosen) } }
                    }
                    td { (count(row.connections)) }
                    td.bad[row.failed > 0] { (failed(row)) }
                    td { (duration(row.elapsed_ns)) }
                    td { (rates(row)) }
                    td { (all(|all| all.mean)) }
                    td { (all(|all| all.p50)) }
                    td { (all(|all| all.p99)) }
                    td { (all(|all| all.p999)) }
                    td { (all(|all| all.max)) }
                    td { (maybe_duration(row.even.map(|even| even.mean))) }
                    td { (maybe_duration(row.odd.map(|odd| odd.mean))) }
                    td { (factor(row.ratio)) br; span.dim { "of " (duration(row.floor_ns)) } }
                    td { (duration(row.cpu_ns_per_dial)) }
                }
            }
        },
    )
}

/// The table of windows; beside the published figures where the same was asked.
fn window_table(rows: &[&StrategyRow<'_>], as_published: bool) -> Markup {
    let mut columns = vec!["Window size", "Errors", "Total test time", "Connections/second"];
    if as_published {
        columns.extend(["Published errors", "Published conn/s"]);
    }
    let body = html! {
        @for row in rows {
            tr {
                th scope="row" { (row.window().map(count).unwrap_or_default()) " ports" }
                td.bad[row.failed > 0] { (failed(row)) }
                td { (duration(row.elapsed_ns)) }
                td { (count(row.rate.0.max(0.0).round() as u64)) }
                @if as_published {
                    @match PUBLISHED.iter().find(|(width, ..)| Some(*width) == row.window()) {
                        Some((_, errors, rate)) => { td.dim { (count(*errors)) } td.dim { (count(*rate)) } }
                        None => { td.dim { "–" } td.dim { "–" } }
                    }
                }
            }
        }
    };
    html! {
        (table(&columns, &body))
        @if as_published {
            p.dim {
                "Published: “connect() - why are you so slow?” (Cloudflare, 2024), on another machine, with a kernel that "
                "searched windows by halves."
            }
        }
    }
}

/// Width, errors and connections per second of that article's table.
const PUBLISHED: [(u64, u64, u64); 4] =
    [(500, 868, 30_139), (1_000, 1_129, 27_260), (5_000, 4_037, 8_405), (10_000, 6_695, 3_183)];

/// Whether a run asked what the article asked: 56,512 ports filled over one IPv4 address, windows with one try.
fn as_published(settings: &PortsSettings) -> bool {
    let PortsSettings { low, high, windows, fill, protocol, family, sources, .. } = settings;
    (*low, *high, *windows, *family, *sources) == (9024, 65535, true, 4, 1)
        && *fill == 1.0
        && protocol == "tcp"
}

fn failed(row: &StrategyRow<'_>) -> Markup {
    html! {
        (count(row.failed))
        @if row.runs == 1 {
            @for (errno, number) in &row.errors {
                br; span.dim { @if row.errors.len() > 1 { (count(*number)) " " } (errno) }
            }
        } @else if row.failed > 0 {
            br; span.dim { (row.errors.keys().copied().collect::<Vec<_>>().join(", ")) }
        }
    }
}

fn rates(row: &StrategyRow<'_>) -> Markup {
    let (middle, low, high) = row.rate;
    html! {
        (rate(middle))
        @if row.runs > 1 { br; span.dim { (rate(low)) " to " (rate(high)) } }
    }
}
