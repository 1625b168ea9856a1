use fourtuple_record::{PlanesCell, PlanesResults};

use super::sheet::{Sheet, Tone};
use super::table::{Cell, Column, Table};
use crate::number::{count, rate};
use crate::planes::{QUESTION, cpu, cpu_interval, gbit, groups, lost, part, ratio, shares, tuples};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &PlanesResults) {
    sheet.heading(QUESTION);
    sheet.list(settings, Tone::Dim);
    let groups = groups(&results.cells);
    if groups.is_empty() {
        sheet.gap();
        return sheet.item("", "Nothing was measured.", Tone::Bad);
    }
    for group in &groups {
        sheet.heading(&group.title);
        sheet.table(&table(&group.cells));
    }
    sheet.gap();
    sheet.item(
        "",
        "CPU: processor time of the planes a packet; x1by1: over that of one-by-one. Counted: what the planes would do with a \
         processor each, by their CPU time; x1: over one plane. * the generator set the pace.",
        Tone::Dim,
    );
    for cell in results.cells.iter().filter(|cell| cell.lost > 0 || !cell.dropped.is_empty()) {
        let place = format!("{} x{}, {}, {}: ", cell.plane, cell.planes, cell.spread, tuples(cell));
        sheet.item("  ", &format!("{place}lost {}", lost(cell)), Tone::Bad);
    }
}

fn table(cells: &[&PlanesCell]) -> Table {
    let mut table = Table::new(vec![
        Column::text("plane", 0),
        Column::number("planes", 0),
        Column::text("spread", 1),
        Column::number("4-tuples", 4),
        Column::number("CPU", 0),
        Column::number("(95%)", 7),
        Column::number("x1by1", 2),
        Column::number("packets", 0),
        Column::number("Gbit/s", 6),
        Column::number("x1", 3),
        Column::number("counted", 1),
        Column::number("x1 ", 3),
        Column::text("share", 5),
        Column::number("reordered", 4),
    ]);
    for cell in cells {
        let paced = if cell.limited_by == "generator" { "*" } else { "" };
        let bad = |bad: bool| if bad { Tone::Bad } else { Tone::Plain };
        table.row(vec![
            Cell::toned(cell.plane.as_str(), Tone::Strong),
            cell.planes.to_string().into(),
            cell.spread.as_str().into(),
            count(cell.flows.into()).into(),
            Cell::toned(cpu(cell), Tone::Strong),
            Cell::toned(cpu_interval(cell).replace(" to ", ".."), Tone::Dim),
            ratio(cell.cpu_to_one_by_one).into(),
            format!("{}{paced}", rate(cell.pps)).into(),
            gbit(cell, cell.pps).into(),
            ratio(cell.pps_to_one_plane).into(),
            rate(cell.capacity_pps).into(),
            ratio(cell.capacity_to_one_plane).into(),
            shares(cell).into(),
            Cell::toned(part(cell.reordered, cell.packets), bad(cell.reordered > 0)),
        ]);
    }
    table
}
