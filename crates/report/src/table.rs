//! Tables of a document: columns, cells, and the parts that each renderer shows.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::document::{Medium, Tone, Workers};
use crate::words::{count, plural};

/// The alignment of a column on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    /// Title on the terminal; the page capitalises it. `conns|Connections` has one title for each.
    title: &'static str,
    pub(crate) align: Align,
    /// Priority for omission on a narrow terminal: 0 never, 1 last, 9 first.
    pub(crate) expendable: u8,
    pub(crate) medium: Medium,
}

impl Column {
    pub(crate) const fn text(title: &'static str, expendable: u8) -> Column {
        Column { title, align: Align::Left, expendable, medium: Medium::Both }
    }

    pub(crate) const fn number(title: &'static str, expendable: u8) -> Column {
        Column { title, align: Align::Right, expendable, medium: Medium::Both }
    }

    pub(crate) fn terminal_title(&self) -> &'static str {
        self.title.split_once('|').map_or(self.title, |(terminal, _)| terminal)
    }

    pub(crate) fn page_title(&self) -> String {
        if let Some((_, page)) = self.title.split_once('|') {
            return page.to_owned();
        }
        let mut letters = self.title.chars();
        match (letters.next(), letters.clone().next()) {
            // `p50` stays in lower case.
            (Some('p'), Some('0'..='9')) => self.title.to_owned(),
            (Some(first), _) => first.to_uppercase().chain(letters).collect(),
            _ => String::new(),
        }
    }
}

/// A picture that replaces a cell's text on the page.
pub(crate) enum Picture {
    /// A bar whose length is `value` out of `most`.
    Meter { value: u64, most: u64 },
    /// A bar per worker.
    Workers(Workers),
    /// A line over values between 0 and `most`; the label says the values.
    Spark { values: Vec<f64>, most: f64, label: String },
}

/// A cell: its text and style.
pub(crate) struct Cell {
    /// Text on the terminal, and on the page unless `page` is set.
    pub(crate) text: String,
    pub(crate) page: Option<String>,
    pub(crate) tone: Tone,
    /// Small lines below the text, on the page only.
    pub(crate) notes: Vec<String>,
    pub(crate) picture: Option<Picture>,
}

/// The length of the longest bar on a terminal, in characters.
const BAR: u64 = 24;

impl Cell {
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: text.into(), page: None, tone, notes: Vec::new(), picture: None }
    }

    /// Creates a cell with a count, with separators.
    pub(crate) fn count(number: u64) -> Cell {
        count(number).into()
    }

    /// Creates a cell with a count that should be 0.
    pub(crate) fn bad_count(number: u64) -> Cell {
        Cell::toned(count(number), Tone::bad_if(number > 0))
    }

    /// Creates a bar whose length is `value` out of `most`. A value above zero has at least one character.
    pub(crate) fn bar(value: u64, most: u64) -> Cell {
        let length = (value as f64 / most.max(1) as f64 * BAR as f64).round() as usize;
        let mut cell = Cell::from("▇".repeat(length.max(usize::from(value > 0))));
        cell.picture = Some(Picture::Meter { value, most });
        cell
    }

    /// Creates a small bar per worker; a dot for a worker without work.
    pub(crate) fn workers(workers: Workers) -> Cell {
        if workers.shares.is_empty() {
            return crate::words::NOTHING.into();
        }
        let bar = |share: &f64| match *share {
            share if share > 0.0 => linear(std::iter::once(share), workers.most),
            _ => "·".to_owned(),
        };
        let mut cell = Cell::from(workers.shares.iter().map(bar).collect::<String>());
        cell.picture = Some(Picture::Workers(workers));
        cell
    }

    /// Creates a small picture of `values` between 0 and `most`: block characters on a terminal, a line on the page.
    pub(crate) fn spark(text: String, values: &[f64], most: f64) -> Cell {
        if values.is_empty() {
            return crate::words::NOTHING.into();
        }
        let mut cell = Cell::from(text.clone());
        cell.picture = Some(Picture::Spark { values: values.to_vec(), most, label: text });
        cell
    }

    /// Adds the names of errors as notes, with counts if there are several.
    pub(crate) fn errors<N: Display>(mut self, errors: &BTreeMap<N, u64>) -> Cell {
        self.notes.extend(errors.iter().map(|(name, number)| match errors.len() {
            1 => name.to_string(),
            _ => format!("{} {name}", count(*number)),
        }));
        self
    }

    /// Sets the text on the page.
    pub(crate) fn on_page(mut self, text: impl Into<String>) -> Cell {
        self.page = Some(text.into());
        self
    }

    /// Adds `note` below the text unless it is empty.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Cell {
        self.notes.extend(Some(note.into()).filter(|note| !note.is_empty()));
        self
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::toned(text, Tone::Plain)
    }
}

/// Returns the rows with their numbers, from 0.
pub(crate) fn numbered<T>(rows: &[T]) -> Vec<(usize, &T)> {
    rows.iter().enumerate().collect()
}

/// The maximum number of rows shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) terminal: usize,
    pub(crate) page: usize,
    /// Noun for a row: `pair`.
    pub(crate) noun: &'static str,
}

/// Returns the line below a table whose rows were cut.
pub(crate) fn more(all: usize, shown: usize, noun: &str) -> Option<String> {
    let more = plural(all.saturating_sub(shown) as u64, noun);
    (all > shown).then(|| format!("and {more} more, which the JSON has"))
}

/// A table: rows of cells below column titles.
pub(crate) struct Table {
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Vec<Cell>>,
    pub(crate) limit: Option<Limit>,
    /// Summary line that opens the table on the page, and whether it starts open.
    pub(crate) folded: Option<(&'static str, bool)>,
}

impl Table {
    /// Creates a table from `rows` with one cell per column.
    pub(crate) fn new(columns: Vec<Column>, rows: Vec<Vec<Cell>>) -> Table {
        debug_assert!(rows.iter().all(|row| row.len() == columns.len()));
        Table { columns, rows, limit: None, folded: None }
    }

    /// Starts a table with one row per item of `rows`.
    pub(crate) fn of<T>(rows: &[T]) -> TableOf<'_, T> {
        TableOf { rows, table: Table::new(Vec::new(), rows.iter().map(|_| Vec::new()).collect()) }
    }
}

/// The title of a column, see [`Column`].
type Title = &'static str;

/// A table under construction, column by column, each with a function from row to cell.
pub(crate) struct TableOf<'a, T> {
    rows: &'a [T],
    table: Table,
}

impl<T> TableOf<'_, T> {
    fn column<C: Into<Cell>>(mut self, column: Column, cell: impl Fn(&T) -> C) -> Self {
        self.table.columns.push(column);
        for (cells, row) in self.table.rows.iter_mut().zip(self.rows) {
            cells.push(cell(row).into());
        }
        self
    }

    /// Adds the column of names, which is never omitted.
    pub(crate) fn name<C: Into<Cell>>(self, title: Title, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column::text(title, 0), |row| Cell { tone: Tone::Strong, ..cell(row).into() })
    }

    /// Adds a column of text.
    pub(crate) fn text<C: Into<Cell>>(self, title: Title, expendable: u8, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column::text(title, expendable), cell)
    }

    /// Adds a column of numbers.
    pub(crate) fn number<C: Into<Cell>>(self, title: Title, expendable: u8, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column::number(title, expendable), cell)
    }

    /// Adds a column for the terminal only.
    pub(crate) fn terminal<C: Into<Cell>>(self, column: Column, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column { medium: Medium::Terminal, ..column }, cell)
    }

    /// Adds a column of text for the page only.
    pub(crate) fn page_text<C: Into<Cell>>(self, title: Title, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column { medium: Medium::Page, ..Column::text(title, 0) }, cell)
    }

    /// Adds a column of numbers for the page only.
    pub(crate) fn page<C: Into<Cell>>(self, title: Title, cell: impl Fn(&T) -> C) -> Self {
        self.column(Column { medium: Medium::Page, ..Column::number(title, 0) }, cell)
    }

    /// Limits the rows shown; a line below says how many were cut.
    pub(crate) fn limit(mut self, terminal: usize, page: usize, noun: &'static str) -> Self {
        self.table.limit = Some(Limit { terminal, page, noun });
        self
    }

    /// Folds the table on the page behind a summary line.
    pub(crate) fn folded(mut self, summary: &'static str, open: bool) -> Self {
        self.table.folded = Some((summary, open));
        self
    }
}

impl<T> From<TableOf<'_, T>> for Table {
    fn from(table: TableOf<'_, T>) -> Table {
        table.table
    }
}

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns the minimum and the maximum of the positive `values`; `None` without any.
pub(crate) fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| *value > 0.0 && value.is_finite()).fold(None, |extent, value| match extent {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

/// Returns the position of `value` between the ends of `extent`, 0 to 1; 0.5 if the ends are equal.
pub(crate) fn position(value: f64, (low, high): (f64, f64)) -> f64 {
    // The values are halved because the difference of two floats may overflow.
    if high > low { (value / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0) } else { 0.5 }
}

/// Draws blocks between `low` and `high` on a log scale; values that are not positive are gaps.
pub(crate) fn log(values: impl Iterator<Item = f64>, (low, high): (f64, f64)) -> String {
    // At least one octave from bottom to top: noise of some percent looks flat.
    let span = (high / low).log2().max(1.0);
    values.map(|value| if value > 0.0 { block((value / low).log2() / span) } else { ' ' }).collect()
}

/// Draws blocks between 0 and `high` on a linear scale.
pub(crate) fn linear(values: impl Iterator<Item = f64>, high: f64) -> String {
    values.map(|value| block(if high > 0.0 { value / high } else { 0.0 })).collect()
}

fn block(share: f64) -> char {
    // NaN casts to 0; only the upper end has the last block, hence 7 steps.
    BLOCKS[(share.clamp(0.0, 1.0) * 7.0).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_titles_differ_from_terminal_titles() {
        let title = |title| Column::number(title, 0).page_title();
        assert_eq!(["p99.9", "mean", "", "x|Over one"].map(title), ["p99.9", "Mean", "", "Over one"]);
        assert_eq!(Column::number("x|Over one", 0).terminal_title(), "x");
    }

    #[test]
    fn log_pictures_show_factors_and_flatten_noise() {
        let steep = [1.0, 10.0, 0.0, 1000.0];
        assert_eq!(log(steep.into_iter(), extent(steep.into_iter()).unwrap()), "▁▃ █");
        let flat = [1.0, 1.05, 1.02];
        assert_eq!(log(flat.into_iter(), extent(flat.into_iter()).unwrap()), "▁▁▁");
        assert_eq!(extent([0.0, f64::NAN].into_iter()), None);
        assert_eq!(linear([0.0, 50.0, 100.0].into_iter(), 100.0), "▁▅█");
        assert_eq!(linear([0.0].into_iter(), 0.0), "▁");
    }
}
