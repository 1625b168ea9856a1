use fourtuple_record::{TimeWaitResults, TimeWaitRun};

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::envelope::plural;
use crate::figures::{none_or, stall, transactions};
use crate::number::{NOTHING, count, duration, maybe_count, rate, total};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &TimeWaitResults) {
    sheet.heading("How long the ports last when every connection is closed at once");
    sheet.list(settings, Tone::Dim);
    sheet.item(
        "",
        &format!(
            "One source can keep up {} for ever: {} / {} of TIME_WAIT.",
            rate(results.ceiling_per_s),
            plural(results.ports, "port"),
            duration(results.time_wait_ns)
        ),
        Tone::Plain,
    );
    sheet.gap();
    if results.runs.is_empty() {
        return sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    sheet.table(&runs(&results.runs));
    errors(sheet, &results.runs);
    curve(sheet, &results.runs);
}

fn runs(runs: &[TimeWaitRun]) -> Table {
    let mut table = Table::new(vec![
        Column::text("remedy", 0),
        Column::number("transactions", 2),
        Column::number("rate", 0),
        Column::number("predicted at", 4),
        Column::number("stalled at", 3),
        Column::number("predicted", 1),
        Column::number("stall", 0),
        Column::number("errors", 5),
        Column::number("elapsed", 6),
    ]);
    for run in runs {
        let errors = total(run.errors.values());
        table.row(vec![
            Cell::toned(run.remedy.as_str(), Tone::Strong),
            transactions(run).into(),
            rate(run.rate_per_s).into(),
            maybe_count(run.predicted_stall_at).into(),
            maybe_count(run.stalled_at).into(),
            none_or(run.predicted_stall_ns).into(),
            Cell::toned(stall(run), if run.stall_ns > 0 { Tone::Bad } else { Tone::Good }),
            count(errors).into(),
            duration(run.elapsed_ns).into(),
        ]);
    }
    table
}

fn errors(sheet: &mut Sheet, runs: &[TimeWaitRun]) {
    if runs.iter().any(|run| !run.errors.is_empty()) {
        sheet.gap();
    }
    for run in runs.iter().filter(|run| !run.errors.is_empty()) {
        let errors: Vec<String> =
            run.errors.iter().map(|(errno, number)| format!("{} {errno}", count(*number))).collect();
        sheet.item("  ", &format!("{}: {}", run.remedy, errors.join(", ")), Tone::Bad);
    }
}

/// Points of the small curve.
const STEPS: usize = 24;

fn curve(sheet: &mut Sheet, runs: &[TimeWaitRun]) {
    let Some(highest) = runs.iter().flat_map(|run| &run.time_wait).map(|point| point.count).max() else {
        return;
    };
    sheet.heading("Sockets in TIME_WAIT over each run");
    let mut table = Table::new(vec![
        Column::text("remedy", 0),
        Column::text("start to end", 1),
        Column::number("highest", 0),
        Column::number("elapsed", 2),
    ]);
    for run in runs {
        let peak = run.time_wait.iter().map(|point| point.count).max();
        table.row(vec![
            Cell::toned(run.remedy.as_str(), Tone::Strong),
            spark::linear(steps(run), highest as f64).into(),
            peak.map_or_else(|| NOTHING.to_owned(), count).into(),
            duration(run.elapsed_ns).into(),
        ]);
    }
    sheet.table(&table);
}

/// The count at evenly spaced times, each as last read.
fn steps(run: &TimeWaitRun) -> impl Iterator<Item = f64> {
    let end = run.time_wait.iter().map(|point| point.at_ns).max().unwrap_or(0);
    let steps = if run.time_wait.is_empty() { 0 } else { STEPS };
    (1..=steps).map(move |step| {
        let at = u128::from(end) * step as u128 / STEPS as u128;
        let read = run.time_wait.iter().take_while(|point| u128::from(point.at_ns) <= at).last();
        read.map_or(0.0, |point| point.count as f64)
    })
}
