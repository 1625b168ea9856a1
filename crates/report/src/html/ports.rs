use fourtuple_record::{PortsResults, Spread};
use maud::{Markup, html};

use super::{chart, table, words};
use crate::number::{count, duration, factor, maybe_duration, rate};
use crate::strategies::{StrategyRow, rows};

pub(super) fn section(index: usize, part: &str, settings: &[String], results: &PortsResults) -> Markup {
    let rows = rows(&results.strategies);
    let windows: Vec<&StrategyRow<'_>> = rows.iter().filter(|row| row.window().is_some()).collect();
    let drawn = results.strategies.iter().any(|result| result.scatter.is_some());
    html! {
        section {
            h2 { "The strategies" }
            (words(settings, "settings"))
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
                (window_table(&windows))
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

fn window_table(rows: &[&StrategyRow<'_>]) -> Markup {
    table(
        &["Window size", "Errors", "Total test time", "Connections/second"],
        &html! {
            @for row in rows {
                tr {
                    th scope="row" { (row.window().map(count).unwrap_or_default()) " ports" }
                    td.bad[row.failed > 0] { (failed(row)) }
                    td { (duration(row.elapsed_ns)) }
                    td { (count(row.rate.0.max(0.0).round() as u64)) }
                }
            }
        },
    )
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
