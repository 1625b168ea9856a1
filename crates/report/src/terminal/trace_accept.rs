use fourtuple_record::{TraceAcceptResults, TraceListener};

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::number::{count, duration};
use crate::trace_accept::{facts, figures, histogram, more, of_listener, overflow, times, title};

/// Listeners that are shown, and workers of each.
const LISTENERS: usize = 10;
const WORKERS: usize = 20;
/// Characters of the longest bar.
const BAR: u64 = 24;

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &TraceAcceptResults) {
    sheet.heading("How long connections waited for accept()");
    sheet.list(settings, Tone::Dim);
    sheet.list(&facts(results), Tone::Dim);
    sheet.gap();
    let mut sums = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in figures(results) {
        sums.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&sums);
    match results.overflows {
        0 => sheet.item("", "no queue overflowed", Tone::Good),
        some => sheet.item("", &format!("dropped at full queues: {}", count(some)), Tone::Bad),
    }
    all_times(sheet, results);
    steps(sheet, results);
    for listener in results.listeners.iter().take(LISTENERS) {
        one_listener(sheet, listener);
    }
    if let Some(more) = more(LISTENERS, results.listeners.len(), "listener") {
        sheet.gap();
        sheet.item("", &more, Tone::Dim);
    }
}

fn all_times(sheet: &mut Sheet, results: &TraceAcceptResults) {
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

/// What is there is seen.
fn bar(number: u64, most: u64) -> String {
    let length = (number as f64 / most.max(1) as f64 * BAR as f64).round() as usize;
    "▇".repeat(length.max(usize::from(number > 0)))
}

fn steps(sheet: &mut Sheet, results: &TraceAcceptResults) {
    let steps = histogram(results);
    if steps.is_empty() {
        return;
    }
    sheet.heading("Accepts by time of wait");
    let most = steps.iter().map(|(_, number)| *number).max().unwrap_or(0);
    let mut table =
        Table::new(vec![Column::number("from", 0), Column::number("accepts", 0), Column::text("", 1)]);
    for (from, number) in steps {
        table.row(vec![duration(from).into(), count(number).into(), bar(number, most).into()]);
    }
    sheet.table(&table);
}

fn one_listener(sheet: &mut Sheet, listener: &TraceListener) {
    sheet.heading(&title(listener));
    sheet.list(&of_listener(listener), Tone::Dim);
    if let Some(overflow) = overflow(listener) {
        sheet.item("", &overflow, Tone::Bad);
    }
    if listener.workers.is_empty() {
        return;
    }
    let mut table = Table::new(vec![
        Column::text("worker", 0),
        Column::number("accepts", 0),
        Column::text("", 2),
        Column::number("open", 1),
        Column::number("reads", 4),
        Column::number("p50", 3),
        Column::number("p99", 0),
        Column::number("max", 8),
        Column::number("for nothing", 5),
        Column::number("empty", 7),
        Column::number("closed first", 6),
    ]);
    let most = listener.workers.iter().map(|worker| worker.accepts).max().unwrap_or(0);
    for worker in listener.workers.iter().take(WORKERS) {
        table.row(vec![
            format!("{}/{} {}", worker.process, worker.thread, worker.name).into(),
            count(worker.accepts).into(),
            bar(worker.accepts, most).into(),
            count(worker.open).into(),
            count(worker.reads).into(),
            duration(worker.p50_ns).into(),
            duration(worker.p99_ns).into(),
            duration(worker.max_ns).into(),
            count(worker.woken_for_nothing).into(),
            count(worker.empty).into(),
            count(worker.closed_first).into(),
        ]);
    }
    sheet.table(&table);
    if let Some(more) = more(WORKERS, listener.workers.len(), "worker") {
        sheet.item("", &more, Tone::Dim);
    }
}
