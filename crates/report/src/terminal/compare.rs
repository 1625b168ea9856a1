use fourtuple_record::{CompareResults, CompareSettings};

use super::sheet::{Sheet, Tone};
use super::spark;
use super::table::{Cell, Column, Table};
use crate::comparison::{extent, interval, place, sample, saturation, sides};
use crate::number::{NOTHING, count};

/// Columns of the small picture.
const BINS: usize = 24;

pub(super) fn body(
    sheet: &mut Sheet,
    words: &[String],
    settings: &CompareSettings,
    results: &CompareResults,
) {
    sheet.heading("Is B faster than A?");
    sheet.list(words, Tone::Dim);
    let sides = sides(settings, results);
    for side in &sides {
        sheet.item(&format!("{}: ", side.name), side.command, Tone::Plain);
        if let Some(server) = side.server {
            sheet.item("   server: ", server, Tone::Plain);
        }
    }
    sheet.gap();
    sheet.item("", &results.verdict, Tone::Strong);
    let (ratio, interval) = interval(results);
    sheet.item("", &format!("ratio {ratio}, 95% interval {interval}"), Tone::Plain);
    if let Some(line) = saturation(results) {
        sheet.item("", &line, Tone::Dim);
    }
    sheet.gap();
    let Some(extent) = extent(&sides) else { return };
    let mut table = Table::new(vec![
        Column::text("", 0),
        Column::number("trials", 1),
        Column::number("median", 0),
        Column::number("lowest", 2),
        Column::number("highest", 2),
        Column::text("how the trials lie", 3),
    ]);
    let shown = |value: Option<f64>| {
        value.map_or_else(|| NOTHING.to_owned(), |value| sample(&settings.metric, value))
    };
    for side in &sides {
        let mut bins = [0_u32; BINS];
        for value in &side.samples {
            bins[((place(*value, extent) * BINS as f64) as usize).min(BINS - 1)] += 1;
        }
        let highest = bins.iter().copied().max().unwrap_or(0);
        table.row(vec![
            Cell::toned(side.name, Tone::Strong),
            count(side.samples.len() as u64).into(),
            shown(side.figures.map(|(_, median, _)| median)).into(),
            shown(side.figures.map(|(low, ..)| low)).into(),
            shown(side.figures.map(|(.., high)| high)).into(),
            spark::linear(bins.iter().map(|&bin| f64::from(bin)), f64::from(highest)).into(),
        ]);
    }
    sheet.table(&table);
}
