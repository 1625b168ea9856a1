use fourtuple_record::{LoadResults, LoadSettings, Second, Slow};

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::envelope::plural;
use crate::load::{achieved, asked, errors, held, key_figures, moment, parts, ports_words, rates, stall};
use crate::number::{count, duration, rate};

pub(super) fn body(sheet: &mut Sheet, details: &[String], settings: &LoadSettings, results: &LoadResults) {
    sheet.gap();
    sheet.item("", &asked(settings), Tone::Strong);
    sheet.list(details, Tone::Dim);
    sheet.gap();
    sheet.item("", &achieved(settings, results), Tone::Strong);
    let errors = errors(results);
    if errors.is_empty() {
        sheet.item("", "no errors", Tone::Good);
    } else {
        sheet.item("", &format!("errors: {}", errors.join(", ")), Tone::Bad);
    }
    let mut figures = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in key_figures(settings, results) {
        figures.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&figures);
    if let Some(reason) = &results.engine_reason {
        sheet.item("", &format!("{} because {reason}", results.engine), Tone::Dim);
    }
    latency(sheet, results);
    seconds(sheet, results);
    if let Some(ports) = &results.ports {
        sheet.heading("Ports");
        sheet.list(&ports_words(ports), Tone::Plain);
        let tone = if ports.stalled_ns.is_some() { Tone::Bad } else { Tone::Good };
        sheet.item("", &stall(ports), tone);
    }
    if let Some(hold) = &results.hold {
        sheet.heading("Held connections");
        sheet.item("", &held(hold), if hold.lost > 0 { Tone::Bad } else { Tone::Plain });
    }
    slow(sheet, settings, results);
}

fn latency(sheet: &mut Sheet, results: &LoadResults) {
    sheet.heading("Latency");
    let parts = parts(results);
    if parts.is_empty() {
        return sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    let mut table = Table::new(vec![
        Column::text("", 0),
        Column::number("samples", 4),
        Column::number("mean", 3),
        Column::number("p50", 0),
        Column::number("p99", 0),
        Column::number("p99.9", 1),
        Column::number("max", 2),
    ]);
    for (name, times) in parts {
        table.row(vec![
            Cell::toned(name, if name == "total" { Tone::Strong } else { Tone::Plain }),
            count(times.samples).into(),
            duration(times.mean).into(),
            duration(times.p50).into(),
            duration(times.p99).into(),
            duration(times.p999).into(),
            duration(times.max).into(),
        ]);
    }
    sheet.table(&table);
}

/// Columns of the small pictures.
const STEPS: usize = 20;

fn seconds(sheet: &mut Sheet, results: &LoadResults) {
    let seconds: Vec<(&Second, f64)> = rates(results).collect();
    if seconds.len() < 2 {
        return;
    }
    sheet.heading("Second by second");
    let mut table = Table::new(vec![
        Column::text("", 0),
        Column::text("start to end", 0),
        Column::number("lowest", 2),
        Column::number("highest", 1),
    ]);
    // Of the seconds in a step: the mean rate, and the worst of everything else.
    let highest = seconds.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let lowest = seconds.iter().map(|(_, rate)| *rate).fold(highest, f64::min);
    let means =
        steps(&seconds, |step| step.iter().map(|(_, rate)| rate).sum::<f64>() / step.len().max(1) as f64);
    table.row(vec![
        Cell::toned("rate", Tone::Strong),
        spark::linear(means.into_iter(), highest).into(),
        rate(lowest).into(),
        rate(highest).into(),
    ]);
    let worst = |field: fn(&Second) -> u64| {
        steps(&seconds, |step| step.iter().map(|(second, _)| field(second)).max().unwrap_or(0) as f64)
    };
    // Seconds in which nothing ended have no percentiles.
    let p99s = || seconds.iter().map(|(second, _)| second.p99_ns).filter(|&ns| ns > 0);
    if let (Some(low), Some(high)) = (p99s().min(), p99s().max()) {
        table.row(vec![
            Cell::toned("p99 (log)", Tone::Strong),
            spark::log(worst(|second| second.p99_ns).into_iter(), (low as f64, high as f64)).into(),
            duration(low).into(),
            duration(high).into(),
        ]);
    }
    let errors = || seconds.iter().map(|(second, _)| second.errors);
    if let (Some(low), Some(high @ 1..)) = (errors().min(), errors().max()) {
        table.row(vec![
            Cell::toned("errors", Tone::Strong),
            Cell::toned(spark::linear(worst(|second| second.errors).into_iter(), high as f64), Tone::Bad),
            count(low).into(),
            count(high).into(),
        ]);
    }
    let left = || seconds.iter().filter_map(|(second, _)| second.ports_left);
    if let (Some(low), Some(high)) = (left().min(), left().max()) {
        let fewest = steps(&seconds, |step| {
            step.iter().filter_map(|(second, _)| second.ports_left).min().unwrap_or(0) as f64
        });
        table.row(vec![
            Cell::toned("ports left", Tone::Strong),
            spark::linear(fewest.into_iter(), high as f64).into(),
            count(low).into(),
            count(high).into(),
        ]);
    }
    sheet.table(&table);
}

/// At most [`STEPS`] runs of seconds of about the same length, each as one value.
fn steps<'a>(seconds: &[(&'a Second, f64)], value: impl Fn(&[(&'a Second, f64)]) -> f64) -> Vec<f64> {
    let steps = seconds.len().min(STEPS);
    let edge = |step: usize| step * seconds.len() / steps;
    (0..steps).map(|step| value(&seconds[edge(step)..edge(step + 1)])).collect()
}

/// Slow operations that are listed; the record and the page have more.
const LISTED: usize = 10;

fn slow(sheet: &mut Sheet, settings: &LoadSettings, results: &LoadResults) {
    let Some(threshold) = settings.threshold_ns else { return };
    sheet.heading("Slow operations");
    let over = format!("{} over {}", plural(results.slow_count, "operation"), duration(threshold));
    let more =
        if results.slow_count > LISTED as u64 { format!("; the first {LISTED}:") } else { String::new() };
    let tone = if results.slow_count > 0 { Tone::Bad } else { Tone::Good };
    sheet.item("", &(over + &more), tone);
    if results.slow.is_empty() {
        return;
    }
    let mut table = Table::new(vec![
        Column::number("at", 0),
        Column::number("took", 0),
        Column::text("longest", 0),
        Column::number("request no.", 1),
    ]);
    for Slow { at_ns, total_ns, longest, request } in results.slow.iter().take(LISTED) {
        table.row(vec![
            moment(*at_ns).into(),
            duration(*total_ns).into(),
            longest.as_str().into(),
            count(*request).into(),
        ]);
    }
    sheet.table(&table);
}
