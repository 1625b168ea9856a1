use fourtuple_record::ForwardResults;

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::forward::{facts, figures, reasons, session};
use crate::number::{count, share};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &ForwardResults) {
    sheet.heading("What each plane of the forwarder did");
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
        Column::text("plane", 0),
        Column::number("received", 0),
        Column::number("share", 1),
        Column::number("sent", 0),
        Column::number("returned", 3),
        Column::number("clients", 4),
        Column::text("dropped", 2),
    ]);
    for (number, plane) in results.planes.iter().enumerate() {
        table.row(vec![
            number.to_string().into(),
            count(plane.received).into(),
            share(plane.share).into(),
            count(plane.sent).into(),
            count(plane.returned).into(),
            count(plane.clients).into(),
            Cell::toned(reasons(&plane.dropped), Tone::Bad),
        ]);
    }
    sheet.table(&table);
    for bfd in &results.bfd {
        sheet.gap();
        sheet.item("BFD ", &format!("{}: {}", bfd.peer, session(bfd)), Tone::Plain);
    }
}
