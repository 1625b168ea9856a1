use fourtuple_record::ServeResults;

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::number::count;
use crate::serve::{errors, facts, figures};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &ServeResults) {
    sheet.heading("What each worker of the server did");
    sheet.list(settings, Tone::Dim);
    sheet.list(&facts(results), Tone::Dim);
    sheet.gap();
    let mut sums = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in figures(results) {
        sums.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&sums);
    sheet.gap();
    let mut table = Table::new(vec![
        Column::text("worker", 0),
        Column::number("accepted", 1),
        Column::number("requests", 0),
        Column::number("received", 4),
        Column::number("sent", 3),
        Column::text("errors", 2),
    ]);
    for (number, worker) in results.workers.iter().enumerate() {
        table.row(vec![
            number.to_string().into(),
            count(worker.accepted).into(),
            count(worker.requests).into(),
            count(worker.received_bytes).into(),
            count(worker.sent_bytes).into(),
            Cell::toned(errors(&worker.errors), Tone::Bad),
        ]);
    }
    sheet.table(&table);
}
