use fourtuple_record::PlanResults;

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::figures::key_figures;
use crate::number::{duration, quantity, share};

pub(super) fn body(sheet: &mut Sheet, settings: &[String], results: &PlanResults) {
    sheet.heading("How many connections fit, and what they cost");
    sheet.list(settings, Tone::Dim);
    sheet.gap();
    let mut figures = Table::new(vec![Column::text("", 0), Column::number("", 0)]);
    for (name, value) in key_figures(results) {
        figures.row(vec![name.into(), Cell::toned(value, Tone::Strong)]);
    }
    sheet.table(&figures);
    if results.by_fill.is_empty() {
        return;
    }
    sheet.heading("Cost of connect() along the fill");
    let means = || results.by_fill.iter().map(|point| point.mean_ns as f64);
    if let Some(extent) = spark::extent(means()) {
        sheet.item("", &format!("{} (log scale)", spark::log(means(), extent)), Tone::Plain);
    }
    let mut table =
        Table::new(vec![Column::number("fill", 0), Column::number("probes", 1), Column::number("mean", 0)]);
    for point in &results.by_fill {
        table.row(vec![
            share(point.fill).into(),
            quantity(point.probes).into(),
            duration(point.mean_ns).into(),
        ]);
    }
    sheet.table(&table);
}
