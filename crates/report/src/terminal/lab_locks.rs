use fourtuple_record::{LabLocksResults, LocksPair};

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::envelope::plural;
use crate::lab_locks::{caveats, classes, cpu_times, rates, ratio, sides, title, wait_time, waits};
use crate::number::{count, total};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &LabLocksResults) {
    sheet.heading("What short-lived connections gain where fewer of them meet at a lock");
    sheet.list(settings, Tone::Dim);
    if results.pairs.is_empty() {
        return sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    for pair in &results.pairs {
        one(sheet, pair);
    }
    let caveats = caveats(results);
    if !caveats.is_empty() {
        sheet.gap();
    }
    for line in caveats {
        sheet.item("! ", &line, Tone::Dim);
    }
}

fn one(sheet: &mut Sheet, pair: &LocksPair) {
    sheet.heading(title(&pair.change));
    let mut table = Table::new(vec![
        Column::text("", 0),
        Column::number("queries", 0),
        Column::number("95% interval", 3),
        Column::number("CPU per query", 1),
        Column::number("95% interval", 4),
        Column::number("lock waits per 1,000", 2),
        Column::number("wait per query", 5),
    ]);
    for (name, side) in sides(pair) {
        let (rate, rates) = rates(side);
        let (time, times) = cpu_times(side);
        table.row(vec![
            Cell::toned(name, Tone::Strong),
            rate.into(),
            rates.into(),
            time.into(),
            times.into(),
            waits(side).into(),
            wait_time(side).into(),
        ]);
    }
    sheet.table(&table);
    sheet.item("", &pair.verdict, Tone::Strong);
    sheet.item("  ", &format!("{}, {}", ratio(&pair.ratio), plural(pair.pairs, "pair")), Tone::Dim);
    sheet.item("", &pair.cpu_verdict, Tone::Strong);
    sheet.item("  ", &ratio(&pair.cpu_ratio), Tone::Dim);
    for (name, side) in sides(pair) {
        if let Some(classes) = classes(side) {
            sheet.item("", &format!("lock waits per 1,000, {name}: {classes}"), Tone::Plain);
        }
        let failed: Vec<String> =
            side.errors.iter().map(|(errno, number)| format!("{} {errno}", count(*number))).collect();
        if total(side.errors.values()) > 0 {
            sheet.item("", &format!("{name} failed: {}", failed.join(", ")), Tone::Bad);
        }
    }
}
