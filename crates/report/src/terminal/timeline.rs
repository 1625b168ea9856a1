use crate::document::{StripKind, Timeline, TimelineRow, Tone};
use crate::number::duration;
use crate::table::{Cell, Table};
use crate::terminal::sheet::Sheet;
use crate::terminal::table::Text;

/// The number of columns of the picture.
const STEPS: u64 = 36;

/// Draws one row of characters per row of the timeline, with a legend below.
pub(super) fn draw(sheet: &mut Sheet, timeline: &Timeline) {
    let Some(length) = timeline.to_ns.checked_sub(timeline.from_ns).filter(|length| *length > 0) else {
        return;
    };
    let time = |halves: u64| {
        let since = u128::from(length) * u128::from(halves) / u128::from(2 * STEPS);
        timeline.from_ns.saturating_add(since as u64)
    };
    let columns: Vec<_> =
        (0..STEPS).map(|step| (time(2 * step), time(2 * step + 1), time(2 * step + 2))).collect();
    let name = |row: &TimelineRow| Cell::toned(row.name.clone(), row.tone);
    let picture = |row: &TimelineRow| {
        Cell::toned(columns.iter().map(|column| column_of(row, *column)).collect::<String>(), row.tone)
    };
    let table = Table::of(&timeline.rows).text("", 0, name).text("", 0, picture);
    sheet.table(&Text::new(&table.into()));
    let legend = StripKind::ALL.map(|kind| {
        let (_, glyph, meaning) = kind.look();
        format!("{glyph} {meaning}")
    });
    let legend = legend.join(" · ");
    sheet.item("", &format!("{legend}; {} in all", duration(length)), Tone::Dim);
}

/// Returns the character for the middle of a column. The service of a request is visible even if it is shorter than a
/// column.
fn column_of(row: &TimelineRow, (begin, middle, end): (u64, u64, u64)) -> char {
    let within = |at: u64, from: u64, to: u64| from <= at && at < to;
    let seen = row.strips.iter().rev().find(|strip| {
        let begins = strip.kind == StripKind::Served && within(strip.from_ns, begin, end);
        begins || within(middle, strip.from_ns, strip.to_ns)
    });
    match seen {
        Some(strip) => strip.kind.look().1,
        // Outside of its strips the row of the request is blank.
        None if row.tone == Tone::Bad => ' ',
        None => '·',
    }
}
