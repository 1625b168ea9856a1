use fourtuple_record::TraceConnectResults;

use super::heat::{self, Ends};
use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::number::{count, duration, maybe_duration};
use crate::trace::{facts, failures, figures, fill, flame, histogram, more, times};

/// Rows of the table of processes and destinations.
const ROWS: usize = 20;
/// Characters of the longest bar of the histogram.
const BAR: u64 = 24;

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &TraceConnectResults) {
    sheet.heading("How long connect() looked for a source port");
    sheet.list(settings, Tone::Dim);
    sheet.list(&facts(results), Tone::Dim);
    sheet.gap();
    let mut sums = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in figures(results) {
        sums.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&sums);
    match failures(&results.failed) {
        none if none.is_empty() => sheet.item("", "no failures", Tone::Good),
        some => sheet.item("", &format!("failed: {some}"), Tone::Bad),
    }
    if let Some(words) = flame(results) {
        sheet.item("", &words, Tone::Plain);
    }
    all_times(sheet, results);
    steps(sheet, results);
    if !results.heat.columns.is_empty() {
        sheet.heading("Searches over time");
        heat::map(sheet, &results.heat, 4, Ends::Trace);
    }
    tuples(sheet, results);
}

fn all_times(sheet: &mut Sheet, results: &TraceConnectResults) {
    let times = times(results);
    if times.is_empty() {
        return;
    }
    sheet.gap();
    let mut table = Table::new(vec![
        Column::text("", 0),
        Column::number("count", 2),
        Column::number("mean", 3),
        Column::number("p50", 0),
        Column::number("p99", 0),
        Column::number("p99.9", 4),
        Column::number("max", 5),
    ]);
    for (name, times) in times {
        table.row(vec![
            name.into(),
            count(times.count).into(),
            duration(times.mean).into(),
            duration(times.p50).into(),
            duration(times.p99).into(),
            duration(times.p999).into(),
            duration(times.max).into(),
        ]);
    }
    sheet.table(&table);
}

fn steps(sheet: &mut Sheet, results: &TraceConnectResults) {
    let steps = histogram(results);
    if steps.is_empty() {
        return;
    }
    sheet.heading("Searches by time");
    let most = steps.iter().map(|(_, even, odd)| *even.max(odd)).max().unwrap_or(0).max(1);
    let bar = |number: u64| {
        // What is there is seen.
        let length = (number as f64 / most as f64 * BAR as f64).round() as usize;
        "▇".repeat(length.max(usize::from(number > 0)))
    };
    let mut table = Table::new(vec![
        Column::number("from", 0),
        Column::number("even", 0),
        Column::text("", 2),
        Column::number("odd", 0),
        Column::text("", 1),
    ]);
    for (from, even, odd) in steps {
        table.row(vec![
            duration(from).into(),
            count(even).into(),
            bar(even).into(),
            count(odd).into(),
            bar(odd).into(),
        ]);
    }
    sheet.table(&table);
}

fn tuples(sheet: &mut Sheet, results: &TraceConnectResults) {
    if results.tuples.is_empty() {
        return;
    }
    sheet.heading("By process and destination");
    let mut table = Table::new(vec![
        Column::text("process", 0),
        Column::text("destination", 0),
        Column::number("searches", 0),
        Column::number("failed", 1),
        Column::number("no port", 3),
        Column::number("retries", 7),
        Column::number("ports in use", 5),
        Column::number("mean", 6),
        Column::number("p99", 4),
        Column::number("even p50", 2),
        Column::number("odd p50", 2),
    ]);
    for tuple in results.tuples.iter().take(ROWS) {
        let bad = |number: u64| Cell::toned(count(number), if number > 0 { Tone::Bad } else { Tone::Plain });
        table.row(vec![
            format!("{} {}", tuple.process, tuple.name).into(),
            tuple.destination.clone().into(),
            count(tuple.searches).into(),
            bad(tuple.failed),
            bad(tuple.no_port),
            count(tuple.retries).into(),
            fill(tuple).into(),
            duration(tuple.mean_ns).into(),
            duration(tuple.p99_ns).into(),
            maybe_duration(tuple.even_p50_ns).into(),
            maybe_duration(tuple.odd_p50_ns).into(),
        ]);
    }
    sheet.table(&table);
    if let Some(more) = more(ROWS, results.tuples.len()) {
        sheet.item("", &more, Tone::Dim);
    }
}
