use fourtuple_record::{AcceptResults, Timeline};

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::accept::{
    Group, Lab, break_even, close_every, errors, groups, idle, index, interval, label, per, place, row_of,
    sight, skipped,
};
use crate::number::{NOTHING, duration, factor, quantity};

/// Jain's index above which nobody sees a ladder.
const EVEN: f64 = 0.97;
/// Below this the first workers have most of the work.
const LADDER: f64 = 0.75;

pub(super) fn body(sheet: &mut Sheet, lab: Lab, words: &[String], results: &AcceptResults) {
    sheet.heading(lab.question());
    sheet.list(words, Tone::Dim);
    let groups = groups(lab, results);
    if groups.is_empty() {
        sheet.gap();
        sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    for group in &groups {
        sheet.heading(&group.title);
        match lab {
            Lab::Accept => sheet.table(&accepts(group)),
            Lab::Keepalive => {
                sheet.item(
                    "",
                    "Every: after how many requests a connection is closed. Wait: latency less the service time; misplaced: while \
                     some worker idles.",
                    Tone::Dim,
                );
                sheet.table(&waits(group));
                sheet.gap();
                sheet.table(&work(group));
            }
        }
    }
    if results.cells.iter().any(|cell| !cell.errors.is_empty()) {
        sheet.heading("Errors");
    }
    for cell in results.cells.iter().filter(|cell| !cell.errors.is_empty()) {
        sheet.item("  ", &format!("{}: {}", place(cell), errors(cell)), Tone::Bad);
    }
    if !results.skipped.is_empty() {
        sheet.heading("Not run");
    }
    for (name, why) in skipped(&results.skipped) {
        sheet.item("  ", &format!("{name}: {why}"), Tone::Plain);
    }
    if let Some(timeline) = &results.timeline {
        picture(sheet, timeline);
    }
    if let Some(found) = &results.break_even {
        sheet.heading("Does closing pay?");
        sheet.item("", &break_even(found), Tone::Plain);
    }
}

fn accepts(group: &Group<'_>) -> Table {
    let mut table = Table::new(vec![
        Column::text("policy", 0),
        Column::text("share each", 1),
        Column::number("Jain", 0),
        Column::number("max/mean", 2),
        Column::number("wakeups/accept", 3),
        Column::number("empty/accept", 4),
        Column::text("open sockets each", 5),
        Column::text("accepts each", 6),
    ]);
    let most = highest(Lab::Accept, group);
    for cell in &group.cells {
        table.row(vec![
            Cell::toned(label(cell), Tone::Strong),
            bars(&Lab::Accept.shares(cell), most).into(),
            Cell::toned(index(cell.jain), tone(cell.jain)),
            factor(cell.max_over_mean).into(),
            per(cell.wakeups_per_accept).into(),
            per(cell.empty_accepts_per_accept).into(),
            row_of(&cell.sockets).into(),
            row_of(&cell.accepts).into(),
        ]);
    }
    table
}

fn waits(group: &Group<'_>) -> Table {
    let mut table = Table::new(vec![
        Column::text("policy", 0),
        Column::number("every", 0),
        Column::number("p50", 6),
        Column::number("p99", 2),
        Column::number("p99.9", 0),
        Column::number("(95%)", 5),
        Column::number("slow/10k", 1),
        Column::number("misplaced", 3),
    ]);
    for cell in &group.cells {
        table.row(vec![
            Cell::toned(label(cell), Tone::Strong),
            close_every(cell.close_every).into(),
            duration(cell.wait_ns.p50).into(),
            duration(cell.wait_ns.p99).into(),
            duration(cell.wait_ns.p999).into(),
            Cell::toned(interval(&cell.wait_ns).replace(" to ", ".."), Tone::Dim),
            quantity(cell.slow_per_10k).into(),
            duration(cell.misplaced_wait_ns).into(),
        ]);
    }
    table
}

/// What the workers had of it, and the probe.
fn work(group: &Group<'_>) -> Table {
    let mut table = Table::new(vec![
        Column::text("policy", 0),
        Column::number("every", 0),
        Column::text("share", 2),
        Column::number("Jain", 0),
        Column::number("max/mean", 5),
        Column::number("CPU/req", 1),
        Column::number("probe slow/10k", 4),
    ]);
    let most = highest(Lab::Keepalive, group);
    for cell in &group.cells {
        let probe = cell.probe.map_or_else(|| NOTHING.to_owned(), |probe| quantity(probe.slow_per_10k));
        table.row(vec![
            Cell::toned(label(cell), Tone::Strong),
            close_every(cell.close_every).into(),
            bars(&Lab::Keepalive.shares(cell), most).into(),
            Cell::toned(index(cell.jain), tone(cell.jain)),
            factor(cell.max_over_mean).into(),
            duration(cell.cpu_ns_per_request).into(),
            probe.into(),
        ]);
    }
    table
}

fn tone(jain: Option<f64>) -> Tone {
    match jain {
        Some(jain) if jain >= EVEN => Tone::Good,
        Some(jain) if jain < LADDER => Tone::Bad,
        _ => Tone::Plain,
    }
}

/// The greatest share of any worker in the group: its bars have one scale.
fn highest(lab: Lab, group: &Group<'_>) -> f64 {
    group.cells.iter().flat_map(|cell| lab.shares(cell)).fold(0.0, f64::max)
}

/// A bar per worker; a dot where there was nothing at all.
fn bars(shares: &[f64], most: f64) -> String {
    if shares.is_empty() {
        return NOTHING.to_owned();
    }
    let bar = |share: &f64| {
        if *share > 0.0 { spark::linear(std::iter::once(*share), most) } else { "·".to_owned() }
    };
    shares.iter().map(bar).collect()
}

/// Columns of the picture of a timeline.
const STEPS: u64 = 36;

fn picture(sheet: &mut Sheet, timeline: &Timeline) {
    sheet.heading("A request that waits while a worker idles");
    sheet.item("", &sight(timeline), Tone::Plain);
    let Some(length) = timeline.to_ns.checked_sub(timeline.from_ns).filter(|length| *length > 0) else {
        return;
    };
    // The middle of each column.
    let time = |halves: u64| {
        let since = u128::from(length) * u128::from(halves) / u128::from(2 * STEPS);
        timeline.from_ns.saturating_add(since as u64)
    };
    let times = || (0..STEPS).map(|step| time(2 * step + 1));
    let within = |at: u64, from: u64, to: u64| from <= at && at < to;
    let waiting = &timeline.waiting;
    // Shorter than a column, its service would not be seen.
    let served = |step: u64, at: u64| {
        within(waiting.begun_ns, time(2 * step), time(2 * step + 2))
            || within(at, waiting.begun_ns, waiting.ended_ns)
    };
    let wait = (0..STEPS).zip(times()).map(|(step, at)| match at {
        at if served(step, at) => '▓',
        at if within(at, waiting.sent_ns, waiting.begun_ns) => '░',
        _ => ' ',
    });
    let idle = idle(timeline);
    let mut table = Table::new(vec![Column::text("", 0), Column::text("", 0)]);
    for (number, spans) in timeline.workers.iter().enumerate() {
        if number == waiting.worker as usize {
            table.row(vec![
                Cell::toned("request", Tone::Bad),
                Cell::toned(wait.clone().collect::<String>(), Tone::Bad),
            ]);
        }
        let idles = number == waiting.idle_worker as usize;
        let busy = times().map(|at| {
            if spans.iter().any(|span| within(at, span.from_ns, span.to_ns)) {
                '█'
            } else if idles && idle.iter().any(|(from, to)| within(at, *from, *to)) {
                '_'
            } else {
                '·'
            }
        });
        let tone = if idles { Tone::Good } else { Tone::Plain };
        table.row(vec![
            Cell::toned(format!("worker {number}"), tone),
            Cell::toned(busy.collect::<String>(), tone),
        ]);
    }
    sheet.table(&table);
    sheet.item(
        "",
        &format!("░ waits · ▓ is served · █ busy · _ idle meanwhile; {} in all", duration(length)),
        Tone::Dim,
    );
}
