use fourtuple_record::{PortsResults, Spread};

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::number::{NOTHING, count, duration, factor, maybe_duration, rate};
use crate::strategies::{StrategyRow, rows};

/// A mean of connect() this close to the floor is as good as it gets (`Auto` is held to it up to 90% fill).
const CLOSE_TO_FLOOR: f64 = 1.10;
/// Beyond this the search for a port, not the handshake, is what connect() costs.
const FAR_FROM_FLOOR: f64 = 2.0;

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &PortsResults) {
    sheet.heading("What connect() costs under each port strategy");
    sheet.list(settings, Tone::Dim);
    sheet.gap();
    let rows = rows(&results.strategies);
    if rows.is_empty() {
        return sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    sheet.table(&strategies(&rows));
    errors(sheet, &rows);
    fill(sheet, &rows);
}

fn strategies(rows: &[StrategyRow<'_>]) -> Table {
    let repeated = rows.iter().any(|row| row.runs > 1);
    let mut table = Table::new(vec![
        Column::text("strategy", 0),
        Column::number("conns", 3),
        Column::number("failed", 1),
        Column::number("rate", 0),
        Column::number("(min..max)", if repeated { 2 } else { 9 }),
        Column::number("mean", 0),
        Column::number("p50", 8),
        Column::number("p99", 5),
        Column::number("p99.9", 7),
        Column::number("max", 6),
        Column::number("even", 4),
        Column::number("odd", 4),
        Column::number("vs floor", 1),
    ]);
    for row in rows {
        let all = |field: fn(Spread) -> u64| maybe_duration(row.all.map(field));
        let (middle, low, high) = row.rate;
        table.row(vec![
            Cell::toned(row.label(), Tone::Strong),
            count(row.connections).into(),
            Cell::toned(count(row.failed), if row.failed > 0 { Tone::Bad } else { Tone::Plain }),
            rate(middle).into(),
            if row.runs > 1 { format!("({}..{})", rate(low), rate(high)) } else { String::new() }.into(),
            all(|all| all.mean).into(),
            all(|all| all.p50).into(),
            all(|all| all.p99).into(),
            all(|all| all.p999).into(),
            all(|all| all.max).into(),
            maybe_duration(row.even.map(|even| even.mean)).into(),
            maybe_duration(row.odd.map(|odd| odd.mean)).into(),
            Cell::toned(factor(row.ratio), tone_of(row.ratio)),
        ]);
    }
    table
}

fn tone_of(ratio: Option<f64>) -> Tone {
    match ratio {
        Some(ratio) if ratio <= CLOSE_TO_FLOOR => Tone::Good,
        Some(ratio) if ratio > FAR_FROM_FLOOR => Tone::Bad,
        _ => Tone::Plain,
    }
}

fn errors(sheet: &mut Sheet, rows: &[StrategyRow<'_>]) {
    let failing: Vec<_> = rows.iter().filter(|row| !row.errors.is_empty()).collect();
    if failing.is_empty() {
        return;
    }
    sheet.gap();
    for row in failing {
        let runs = if row.runs > 1 { format!(" in {} runs", row.runs) } else { String::new() };
        let errors: Vec<String> =
            row.errors.iter().map(|(errno, number)| format!("{} {errno}", count(*number))).collect();
        sheet.item("  ", &format!("{}: {}{runs}", row.strategy, errors.join(", ")), Tone::Bad);
    }
}

fn fill(sheet: &mut Sheet, rows: &[StrategyRow<'_>]) {
    let means =
        |row: &StrategyRow<'_>| row.by_fill.iter().map(|point| point.mean_ns as f64).collect::<Vec<_>>();
    let Some(extent) = spark::extent(rows.iter().flat_map(means)) else { return };
    let parts = rows.iter().map(|row| row.by_fill.len()).max().unwrap_or(0);
    let part = if parts == 16 { "sixteenth".to_owned() } else { format!("one of {parts} parts") };
    sheet.heading(&format!("Mean connect() by {part} of the fill (log scale)"));
    let mut table = Table::new(vec![
        Column::text("strategy", 0),
        Column::text("empty to full", 0),
        Column::number("first", 1),
        Column::number("last", 1),
        Column::number("floor", 2),
    ]);
    for row in rows {
        let measured = || row.by_fill.iter().map(|point| point.mean_ns).filter(|&mean| mean > 0);
        let end = |mean: Option<u64>| mean.map_or_else(|| NOTHING.to_owned(), duration);
        table.row(vec![
            Cell::toned(row.strategy, Tone::Strong),
            spark::log(means(row).into_iter(), extent).into(),
            end(measured().next()).into(),
            end(measured().next_back()).into(),
            duration(row.floor_ns).into(),
        ]);
    }
    sheet.table(&table);
}
