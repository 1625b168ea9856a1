use std::collections::BTreeMap;

use fourtuple_record::{Distribution, FillPoint, PortsRecord, PortsResults, PortsSettings, StrategyResult};

use crate::document::{Block, Document, Tone};
use crate::table::{self, Cell, Column, Table};
use crate::words::{
    NOTHING, count, duration, errors, factor, grouped, maybe_duration, median, plural, range, rate, repeats,
    share, total,
};

pub(super) const TITLE: &str = "What connect() costs under each port strategy";

/// The ratio to the floor up to which a mean of connect() is good (`Auto` is tested against it up to 90% fill).
const CLOSE_TO_FLOOR: f64 = 1.10;
/// The ratio to the floor below which only noise explains a mean: a search in a table that fills up is not shorter than in an empty one.
const BELOW_FLOOR: f64 = 0.8;
/// The ratio to the floor above which the port search dominates the cost of connect().
const FAR_FROM_FLOOR: f64 = 2.0;

pub(super) fn document(record: &PortsRecord) -> Document {
    let mut document = Document::new(TITLE, record.settings.command_line(), &record.results.advice);
    body(&mut document, &record.settings, &record.results);
    document
}

/// Adds the experiment to its own document or to the document of `lab`.
pub(super) fn body(document: &mut Document, settings: &PortsSettings, results: &PortsResults) {
    document.page_heading("The strategies");
    document.facts(facts(settings));
    let rows = rows(&results.strategies);
    if rows.is_empty() {
        return document.push(Block::Nothing);
    }
    document.table(strategies(&rows));
    document.explain("Floor: the mean of the same calls on a destination with an empty table, measured between the dials. Mean, \
             percentiles and maximum are of the time in connect() of the dials that succeeded.");
    let odd: Vec<&str> = rows.iter().filter(|row| row.is_below_floor()).map(|row| row.strategy).collect();
    if !odd.is_empty() {
        let text = format!(
            "{}: the mean is below the floor, so other work on this host took more time than the search for a port.",
            odd.join(", ")
        );
        document.note(Tone::Bad, text);
    }
    document.terminal(|document| failures(document, &rows));
    let windows: Vec<&StrategyRow<'_>> = rows.iter().filter(|row| row.window().is_some()).collect();
    if !windows.is_empty() {
        document.page(|document| window_table(document, &windows, as_published(settings)));
    }
    if results.strategies.iter().any(|result| result.scatter.is_some()) {
        document.page_heading("Every connection");
        document.chart(
            "scatter",
            "Time in connect() of each dial, in the order of the dials; the line is the moving mean. All strategies have \
             the same axis.",
        );
        document.page_heading("How the times are distributed");
        document.chart(
            "distribution",
            "Share of the connections by time in connect(), 16 steps to a factor of ten.",
        );
    }
    if rows.iter().any(|row| !row.by_fill.is_empty()) {
        document.terminal(|document| fill(document, &rows));
        document.page_heading("Cost as the ports fill up");
        document.chart(
            "fill",
            "Mean time in connect() between the previous point and this one. Dashed: the floor.",
        );
    }
}

fn facts(settings: &PortsSettings) -> Vec<String> {
    let PortsSettings { low, high, windows, fill, protocol, family, sources, seed, .. } = settings;
    vec![
        range(*low, *high),
        plural((*sources).into(), "source"),
        format!("{}/IPv{family}", protocol.to_uppercase()),
        format!("filled to {}", share(*fill)),
        repeats(settings.repeats),
        if *windows {
            "one attempt per window, no fallback"
        } else {
            "a random window first, then the full range"
        }
        .to_owned(),
        format!("seed {seed}"),
    ]
}

fn strategies(rows: &[StrategyRow<'_>]) -> Table {
    let all = |row: &StrategyRow<'_>, field: fn(Distribution) -> u64| maybe_duration(row.all.map(field));
    let lowest_rate = if rows.iter().any(|row| row.runs > 1) { 2 } else { 9 };
    let between = |row: &StrategyRow<'_>, words: &str| match row.rate {
        (_, low, high) if row.runs > 1 => format!("{}{words}{}", rate(low), rate(high)),
        _ => String::new(),
    };
    let chosen = |row: &StrategyRow<'_>| row.chosen.map_or(String::new(), |chosen| format!("chose {chosen}"));
    Table::of(rows)
        .name("strategy", |row| Cell::from(row.label()).on_page(row.strategy).note(chosen(row)))
        .number("conns|Connections", 3, |row| count(row.connections))
        .number("failed", 1, |row| failed(row))
        .page("Total time", |row| duration(row.elapsed_ns))
        .number("rate", 0, |row| Cell::from(rate(row.rate.0)).note(between(row, " to ")))
        .terminal(Column::number("(min..max)", lowest_rate), |row| match between(row, "..").as_str() {
            "" => String::new(),
            some => format!("({some})"),
        })
        .number("mean", 0, |row| all(row, |all| all.mean))
        .number("p50", 8, |row| all(row, |all| all.p50))
        .number("p99", 5, |row| all(row, |all| all.p99))
        .number("p99.9", 7, |row| all(row, |all| all.p999))
        .number("max", 6, |row| all(row, |all| all.max))
        .number("even|Even mean", 4, |row| maybe_duration(row.even.map(|even| even.mean)))
        .number("odd|Odd mean", 4, |row| maybe_duration(row.odd.map(|odd| odd.mean)))
        .number("vs floor|Mean vs floor", 1, |row| {
            Cell::toned(factor(row.ratio), tone_of(row.ratio)).note(format!("of {}", duration(row.floor_ns)))
        })
        .page("CPU per dial", |row| duration(row.cpu_ns_per_dial))
        .into()
}

fn tone_of(ratio: Option<f64>) -> Tone {
    match ratio {
        Some(ratio) if ratio <= CLOSE_TO_FLOOR => Tone::Good,
        Some(ratio) if ratio > FAR_FROM_FLOOR => Tone::Bad,
        _ => Tone::Plain,
    }
}

/// Returns the number of failed dials, with their errors as notes.
fn failed(row: &StrategyRow<'_>) -> Cell {
    let cell = Cell::bad_count(row.failed);
    match row.runs {
        1 => cell.errors(&row.errors),
        _ if row.failed > 0 => cell.note(row.errors.keys().copied().collect::<Vec<_>>().join(", ")),
        _ => cell,
    }
}

fn failures(document: &mut Document, rows: &[StrategyRow<'_>]) {
    let failing = rows.iter().filter(|row| !row.errors.is_empty()).map(|row| {
        let runs = if row.runs > 1 { format!(" in {} runs", row.runs) } else { String::new() };
        (row.strategy.to_owned(), format!("{}{runs}", errors(&row.errors)))
    });
    document.items(Tone::Bad, failing);
}

/// Width, errors and connections per second from Cloudflare, "connect() - why are you so slow?".
const PUBLISHED: [(u64, u64, u64); 4] =
    [(500, 868, 30_139), (1_000, 1_129, 27_260), (5_000, 4_037, 8_405), (10_000, 6_695, 3_183)];

/// Returns whether the settings equal the settings of the article: 56,512 ports filled over one IPv4 address, one attempt per
/// window.
fn as_published(settings: &PortsSettings) -> bool {
    let PortsSettings { low, high, windows, fill, protocol, family, sources, .. } = settings;
    (*low, *high, *windows, *family, *sources) == (9024, 65535, true, 4, 1)
        && *fill == 1.0
        && protocol == "tcp"
}

/// Adds the table of windows, with the published figures if the settings are the same.
fn window_table(document: &mut Document, rows: &[&StrategyRow<'_>], as_published: bool) {
    let published = |row: &&StrategyRow<'_>, field: fn(&(u64, u64, u64)) -> u64| {
        let found = PUBLISHED.iter().find(|(width, ..)| Some(*width) == row.window());
        Cell::toned(found.map_or_else(|| NOTHING.to_owned(), |found| count(field(found))), Tone::Dim)
    };
    document.heading("Windows");
    let table = Table::of(rows)
        .page("Window size", |row| row.window().map(|window| plural(window, "port")).unwrap_or_default())
        .page("Errors", |row| failed(row))
        .page("Total test time", |row| duration(row.elapsed_ns))
        .page("Connections/second", |row| count(row.rate.0.max(0.0).round() as u64));
    if !as_published {
        return document.table(table);
    }
    document.table(
        table
            .page("Published errors", |row| published(row, |(_, errors, _)| *errors))
            .page("Published conn/s", |row| published(row, |(.., rate)| *rate)),
    );
    document.explain(
        "Published: “connect() - why are you so slow?” (Cloudflare, 2024), on another machine, with a kernel that searched \
         windows by halves.",
    );
}

/// Adds sparklines of the mean time by fill.
fn fill(document: &mut Document, rows: &[StrategyRow<'_>]) {
    let means =
        |row: &StrategyRow<'_>| row.by_fill.iter().map(|point| point.mean_ns as f64).collect::<Vec<_>>();
    let Some(extent) = table::extent(rows.iter().flat_map(means)) else { return };
    let parts = rows.iter().map(|row| row.by_fill.len()).max().unwrap_or(0);
    let part = if parts == 16 { "sixteenth".to_owned() } else { format!("one of {parts} parts") };
    document.heading(format!("Mean connect() by {part} of the fill (log scale)"));
    let measured = |row: &StrategyRow<'_>| -> Vec<u64> {
        row.by_fill.iter().map(|point| point.mean_ns).filter(|&mean| mean > 0).collect()
    };
    document.table(
        Table::of(rows)
            .name("strategy", |row| row.strategy)
            .text("empty to full", 0, |row| table::log(means(row).into_iter(), extent))
            .number("first", 1, |row| maybe_duration(measured(row).first().copied()))
            .number("last", 1, |row| maybe_duration(measured(row).last().copied()))
            .number("floor", 2, |row| duration(row.floor_ns)),
    );
}

/// All runs of one strategy: medians over its repeats.
pub(crate) struct StrategyRow<'a> {
    /// Name as given.
    pub(crate) strategy: &'a str,
    /// Strategy that `auto` chose.
    pub(crate) chosen: Option<&'a str>,
    pub(crate) runs: usize,
    /// Connections open at the end.
    pub(crate) connections: u64,
    pub(crate) failed: u64,
    /// Failed dials by errno, over all runs.
    pub(crate) errors: BTreeMap<&'a str, u64>,
    /// Wall time of the dials.
    pub(crate) elapsed_ns: u64,
    /// Connections per second: median, minimum and maximum of the runs.
    pub(crate) rate: (f64, f64, f64),
    /// CPU time per dial.
    pub(crate) cpu_ns_per_dial: u64,
    pub(crate) all: Option<Distribution>,
    pub(crate) even: Option<Distribution>,
    pub(crate) odd: Option<Distribution>,
    /// Mean time of the same calls with an empty table.
    pub(crate) floor_ns: u64,
    /// Mean time in connect() over the floor of the same run.
    pub(crate) ratio: Option<f64>,
    /// Mean time by fill, over all runs.
    pub(crate) by_fill: Vec<FillPoint>,
}

impl StrategyRow<'_> {
    /// Returns the name with the choice of `auto`: `auto (full-range)`.
    pub(crate) fn label(&self) -> String {
        match self.chosen {
            Some(chosen) => format!("{} ({chosen})", self.strategy),
            None => self.strategy.to_owned(),
        }
    }

    fn is_below_floor(&self) -> bool {
        // The floor of select-test-repeat meets the ports of the open connections.
        self.strategy != "select-test-repeat" && self.ratio.is_some_and(|ratio| ratio < BELOW_FLOOR)
    }

    /// Returns the width of a window strategy in ports: 500 for `random-window:500`.
    pub(crate) fn window(&self) -> Option<u64> {
        self.strategy.strip_prefix("random-window:")?.parse().ok()
    }
}

/// Returns one row per strategy, in the order of their first runs.
pub(crate) fn rows(results: &[StrategyResult]) -> Vec<StrategyRow<'_>> {
    let groups = grouped(results, |result| result.strategy.clone());
    groups.iter().map(|group| row(group)).collect()
}

fn row<'a>(runs: &[&'a StrategyResult]) -> StrategyRow<'a> {
    let mut errors = BTreeMap::new();
    for (errno, count) in runs.iter().flat_map(|run| &run.errors) {
        let sum = errors.entry(errno.as_str()).or_insert(0_u64);
        *sum = sum.saturating_add(*count);
    }
    let rates = || runs.iter().map(|run| run.rate_per_s);
    let ratio = |run: &&StrategyResult| {
        let floor = Some(run.floor_ns).filter(|&floor| floor > 0)?;
        Some(run.connect_ns.all?.mean as f64 / floor as f64)
    };
    StrategyRow {
        strategy: &runs[0].strategy,
        chosen: runs[0].chosen.as_deref(),
        runs: runs.len(),
        connections: median_of(runs.iter().map(|run| run.connections)),
        failed: median_of(runs.iter().map(|run| total(run.errors.values()))),
        errors,
        elapsed_ns: median_of(runs.iter().map(|run| run.elapsed_ns)),
        rate: (
            median(rates(), f64::total_cmp, f64::midpoint).unwrap_or(0.0),
            rates().fold(f64::INFINITY, f64::min),
            rates().fold(0.0, f64::max),
        ),
        cpu_ns_per_dial: median_of(runs.iter().map(|run| run.cpu_ns_per_dial)),
        all: spread(runs.iter().filter_map(|run| run.connect_ns.all)),
        even: spread(runs.iter().filter_map(|run| run.connect_ns.even)),
        odd: spread(runs.iter().filter_map(|run| run.connect_ns.odd)),
        floor_ns: median_of(runs.iter().map(|run| run.floor_ns)),
        ratio: median(runs.iter().filter_map(ratio), f64::total_cmp, f64::midpoint),
        by_fill: by_fill(runs),
    }
}

fn spread(spreads: impl Iterator<Item = Distribution> + Clone) -> Option<Distribution> {
    spreads.clone().next()?;
    let field = |field: fn(&Distribution) -> u64| median_of(spreads.clone().map(|spread| field(&spread)));
    Some(Distribution {
        count: field(|spread| spread.count),
        mean: field(|spread| spread.mean),
        p50: field(|spread| spread.p50),
        p99: field(|spread| spread.p99),
        p999: field(|spread| spread.p999),
        max: field(|spread| spread.max),
    })
}

/// Merges the fill curves by position: all runs of a strategy have the same settings.
fn by_fill(runs: &[&StrategyResult]) -> Vec<FillPoint> {
    let parts = runs.iter().map(|run| run.by_fill.len()).max().unwrap_or(0);
    (0..parts)
        .map(|part| {
            let points = || runs.iter().filter_map(|run| run.by_fill.get(part));
            let connections = points().fold(0_u64, |sum, point| sum.saturating_add(point.connections));
            let time = points()
                .map(|point| u128::from(point.connections) * u128::from(point.mean_ns))
                .fold(0, u128::saturating_add);
            FillPoint {
                fill: points().map(|point| point.fill).fold(0.0, f64::max),
                connections,
                mean_ns: time.checked_div(u128::from(connections)).unwrap_or(0) as u64,
                floor_ns: median_of(points().map(|point| point.floor_ns).filter(|&floor| floor > 0)),
            }
        })
        .collect()
}

fn median_of(values: impl Iterator<Item = u64>) -> u64 {
    median(values, u64::cmp, u64::midpoint).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(strategy: &str, repeat: u32, mean: u64) -> StrategyResult {
        let json = format!(
            r#"{{"strategy": "{strategy}", "repeat": {repeat}, "dials": 10, "connections": 8, "retries": 0,
            "errors": {{"EADDRNOTAVAIL": 2}}, "elapsed_ns": {mean}, "rate_per_s": {mean}.0, "cpu_ns_per_dial": 1,
            "connect_ns": {{"all": {{"count": 8, "mean": {mean}, "p50": 1, "p99": 2, "p999": 3, "max": 4}},
            "even": null, "odd": null}},
            "by_fill": [{{"fill": 1.0, "connections": 8, "mean_ns": {mean}, "floor_ns": 0}}], "floor_ns": 100}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn a_mean_below_the_floor_is_noise() {
        // The floor is 100.
        let runs = [run("a", 1, 79), run("b", 1, 80), run("select-test-repeat", 1, 10)];
        let odd: Vec<&str> =
            rows(&runs).iter().filter(|row| row.is_below_floor()).map(|row| row.strategy).collect();
        assert_eq!(odd, ["a"]);
    }

    #[test]
    fn repeats_become_one_row_of_medians() {
        let runs = [run("b", 1, 100), run("a", 1, 5), run("a", 2, 7), run("b", 2, 400), run("b", 3, 200)];
        let rows = rows(&runs);
        assert_eq!(rows.iter().map(|row| (row.strategy, row.runs)).collect::<Vec<_>>(), [("b", 3), ("a", 2)]);
        assert_eq!(rows[0].rate, (200.0, 100.0, 400.0));
        assert_eq!(rows[0].ratio, Some(2.0));
        assert_eq!(rows[0].errors["EADDRNOTAVAIL"], 6);
        assert_eq!(rows[0].failed, 2);
        assert_eq!(rows[0].by_fill[0].mean_ns, 233);
        assert_eq!(rows[0].even, None);
        assert_eq!(rows[1].all.unwrap().mean, 6);
    }

    #[test]
    fn no_floor_no_ratio() {
        let mut run = run("a", 1, 5);
        run.floor_ns = 0;
        assert_eq!(rows(&[run])[0].ratio, None);
    }

    #[test]
    fn window_width_is_parsed_from_the_name() {
        let runs = [run("random-window:500", 1, 5), run("random-window:x", 1, 5), run("auto", 1, 5)];
        assert_eq!(rows(&runs).iter().map(StrategyRow::window).collect::<Vec<_>>(), [Some(500), None, None]);
    }
}
