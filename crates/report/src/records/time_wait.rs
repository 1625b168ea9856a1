use fourtuple_record::{TimeWaitRecord, TimeWaitResults, TimeWaitRun, TimeWaitSettings};

use crate::document::{Block, Document, Tone};
use crate::table;
use crate::table::{Cell, Table};
use crate::words::{count, duration, errors, maybe_count, plural, range, rate, total, typed};

pub(super) const TITLE: &str = "How long the ports last when the client closes every connection at once";

pub(super) fn document(record: &TimeWaitRecord) -> Document {
    let mut document = Document::new(TITLE, command_line(&record.settings), &record.results.advice);
    body(&mut document, &record.settings, &record.results);
    document
}

/// Adds the experiment to its own document or to the document of `lab`.
pub(super) fn body(document: &mut Document, settings: &TimeWaitSettings, results: &TimeWaitResults) {
    document.page_heading("TIME_WAIT: stalls and remedies");
    document.facts(vec![
        range(settings.low, settings.high),
        format!("waits {} at most for the end of a stall", duration(settings.patience_ns)),
    ]);
    let (rate, ports) = (rate(results.ceiling_per_s), plural(results.ports, "port"));
    let kept = duration(results.time_wait_ns);
    let ceiling = format!("One source address sustains {rate}: {ports} / {kept} of TIME_WAIT.");
    document.note(Tone::Plain, ceiling);
    if results.runs.is_empty() {
        return document.push(Block::Nothing);
    }
    document.table(runs(&results.runs));
    document.terminal(|document| {
        let failing = results.runs.iter().filter(|run| !run.errors.is_empty());
        document.items(Tone::Bad, failing.map(|run| (run.remedy.clone(), errors(&run.errors))));
    });
    if results.runs.iter().any(|run| !run.time_wait.is_empty()) {
        document.terminal(|document| curves(document, &results.runs));
        document.page_heading("Sockets in TIME_WAIT");
        document.chart(
            "time-wait",
            "Sockets in TIME_WAIT since the first connect() of each run. Shaded: the stall as predicted before the run. \
             Dotted: the ports of the range. A name in the legend shows or hides its run.",
        );
    }
    document.page(|page| page.items(Tone::Dim, meanings(&results.runs)));
}

fn command_line(settings: &TimeWaitSettings) -> String {
    let TimeWaitSettings { low, high, remedies, patience_ns } = settings;
    let (remedies, patience) = (remedies.join(","), typed(*patience_ns));
    format!("fourtuple lab time-wait --range {low}-{high} --remedy {remedies} --patience {patience}")
}

/// Explains the names of the remedies.
fn meanings(runs: &[TimeWaitRun]) -> Vec<(String, String)> {
    runs.iter()
        .filter_map(|run| Some((run.remedy.clone(), TimeWaitRun::meaning(&run.remedy)?.to_owned())))
        .collect()
}

fn runs(runs: &[TimeWaitRun]) -> Table {
    Table::of(runs)
        .name("remedy", |run| run.remedy.clone())
        .number("transactions", 2, transactions)
        .number("rate", 0, |run| rate(run.rate_per_s))
        .number("predicted at|Predicted stall at", 4, |run| maybe_count(run.predicted_stall_at))
        .number("stalled at", 3, |run| maybe_count(run.stalled_at))
        .number("predicted|Predicted stall", 1, |run| none_or(run.predicted_stall_ns))
        .number("stall", 0, |run| {
            // The patience may end before the stall.
            let cut = if run.cut { "> " } else { "" };
            let tone = if run.stall_ns > 0 { Tone::Bad } else { Tone::Good };
            Cell::toned(format!("{cut}{}", none_or(run.stall_ns)), tone)
        })
        .number("errors", 5, |run| Cell::count(total(run.errors.values())).errors(&run.errors))
        .number("elapsed", 6, |run| duration(run.elapsed_ns))
        .into()
}

/// Formats `16,384`, or `12,000/16,384` when the run was cut.
fn transactions(run: &TimeWaitRun) -> String {
    if run.completed == run.transactions {
        count(run.completed)
    } else {
        format!("{}/{}", count(run.completed), count(run.transactions))
    }
}

/// Formats the length of a stall: `none`, `58.9s`.
fn none_or(stall_ns: u64) -> String {
    if stall_ns == 0 { "none".to_owned() } else { duration(stall_ns) }
}

/// The columns of a sparkline.
const STEPS: usize = 24;

fn curves(document: &mut Document, runs: &[TimeWaitRun]) {
    let peak = |run: &TimeWaitRun| run.time_wait.iter().map(|point| point.count).max();
    let highest = runs.iter().filter_map(peak).max().unwrap_or(0);
    document.heading("Sockets in TIME_WAIT over each run");
    document.table(
        Table::of(runs)
            .name("remedy", |run| run.remedy.clone())
            .text("start to end", 1, |run| table::linear(steps(run), highest as f64))
            .number("highest", 0, |run| maybe_count(peak(run)))
            .number("elapsed", 2, |run| duration(run.elapsed_ns)),
    );
}

/// Returns the count at evenly spaced times, as last read before each.
fn steps(run: &TimeWaitRun) -> impl Iterator<Item = f64> {
    let end = run.time_wait.iter().map(|point| point.at_ns).max().unwrap_or(0);
    let steps = if run.time_wait.is_empty() { 0 } else { STEPS };
    (1..=steps).map(move |step| {
        let at = u128::from(end) * step as u128 / STEPS as u128;
        let read = run.time_wait.iter().take_while(|point| u128::from(point.at_ns) <= at).last();
        read.map_or(0.0, |point| point.count as f64)
    })
}
