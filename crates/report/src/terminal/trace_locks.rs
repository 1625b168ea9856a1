use fourtuple_record::TraceLocksResults;

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::number::{NOTHING, count, duration};
use crate::trace_locks::{facts, figures, more, part, way};

/// Rows of the tables of paths and of ports.
const ROWS: usize = 12;

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &TraceLocksResults) {
    sheet.heading("Which locks of TCP were waited for");
    sheet.list(settings, Tone::Dim);
    sheet.list(&facts(results), Tone::Dim);
    sheet.gap();
    let mut sums = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in figures(results) {
        sums.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&sums);
    classes(sheet, results);
    paths(sheet, results);
    ports(sheet, results);
    sheet.heading("What this host does not show");
    for spot in &results.blind_spots {
        sheet.item("- ", spot, Tone::Dim);
    }
}

fn classes(sheet: &mut Sheet, results: &TraceLocksResults) {
    sheet.heading("By class");
    if results.classes.is_empty() {
        sheet.item("", "no waits", Tone::Good);
        return;
    }
    let mut table = Table::new(vec![
        Column::text("class", 0),
        Column::number("waits", 0),
        Column::number("time", 0),
        Column::number("part", 1),
        Column::number("asleep", 2),
        Column::number("locks", 5),
        Column::number("p50", 4),
        Column::number("p99", 3),
        Column::number("max", 6),
    ]);
    for class in &results.classes {
        let time = |of: fn(&fourtuple_record::Spread) -> u64| match &class.times_ns {
            Some(times) => duration(of(times)),
            None => NOTHING.to_owned(),
        };
        table.row(vec![
            class.class.clone().into(),
            count(class.waits).into(),
            duration(class.wait_ns).into(),
            part(class, results).into(),
            count(class.sleeps).into(),
            count(class.locks).into(),
            time(|times| times.p50).into(),
            time(|times| times.p99).into(),
            time(|times| times.max).into(),
        ]);
    }
    sheet.table(&table);
    sheet.gap();
    for class in &results.classes {
        sheet.item("- ", &format!("{}: {}", class.class, class.remedy), Tone::Plain);
    }
}

fn paths(sheet: &mut Sheet, results: &TraceLocksResults) {
    if results.paths.is_empty() {
        return;
    }
    sheet.heading("By path, the function that waits first");
    let mut table = Table::new(vec![
        Column::text("class", 0),
        Column::text("", 2),
        Column::number("waits", 0),
        Column::number("time", 0),
        Column::number("max", 1),
        Column::text("path", 0),
    ]);
    for path in results.paths.iter().take(ROWS) {
        table.row(vec![
            path.class.clone().into(),
            path.kind.clone().into(),
            count(path.waits).into(),
            duration(path.wait_ns).into(),
            duration(path.max_ns).into(),
            way(path).into(),
        ]);
    }
    sheet.table(&table);
    if let Some(more) = more(ROWS, results.paths.len(), "path") {
        sheet.item("", &more, Tone::Dim);
    }
}

fn ports(sheet: &mut Sheet, results: &TraceLocksResults) {
    if results.ports.is_empty() {
        return;
    }
    sheet.heading("Buckets of local ports");
    let mut table = Table::new(vec![
        Column::number("port", 0),
        Column::number("waits", 0),
        Column::number("time", 0),
        Column::number("max", 1),
    ]);
    for port in results.ports.iter().take(ROWS) {
        table.row(vec![
            port.port.to_string().into(),
            count(port.waits).into(),
            duration(port.wait_ns).into(),
            duration(port.max_ns).into(),
        ]);
    }
    sheet.table(&table);
    if let Some(more) = more(ROWS, results.ports.len(), "port") {
        sheet.item("", &more, Tone::Dim);
    }
}
