use super::sheet::{Line, Tone, printable};

/// Where a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A column and how soon it goes when there is no room: 0 never, 1 last, 9 first.
pub(crate) struct Column {
    pub(crate) title: &'static str,
    pub(crate) align: Align,
    pub(crate) expendable: u8,
}

impl Column {
    /// A column of text.
    pub(crate) const fn text(title: &'static str, expendable: u8) -> Column {
        Column { title, align: Align::Left, expendable }
    }

    /// A column of numbers.
    pub(crate) const fn number(title: &'static str, expendable: u8) -> Column {
        Column { title, align: Align::Right, expendable }
    }
}

/// Text of a cell and its tone.
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Cell {
        Cell { text: printable(&text.into()), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::toned(text, Tone::Plain)
    }
}

/// Rows of cells under titles, two spaces between the columns.
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

const BETWEEN: usize = 2;

impl Table {
    pub(crate) fn new(columns: Vec<Column>) -> Table {
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row, one cell per column.
    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// The lines of the table within `width`, and the titles of the columns that had to go.
    pub(crate) fn fit(&self, width: usize) -> (Vec<Line>, Vec<&'static str>) {
        let mut widths: Vec<usize> =
            self.columns.iter().enumerate().map(|(at, _)| self.column_width(at)).collect();
        // A long name is no reason to leave out numbers.
        if let Some(name) = widths.first_mut() {
            *name = (*name).min(width / 2);
        }
        let mut kept: Vec<usize> = (0..self.columns.len()).filter(|&at| !self.is_empty_column(at)).collect();
        let mut dropped = Vec::new();
        let total = |kept: &[usize], widths: &[usize]| {
            kept.iter().map(|&at| widths[at]).sum::<usize>() + BETWEEN * kept.len().saturating_sub(1)
        };
        while total(&kept, &widths) > width {
            let Some(position) = (0..kept.len())
                .filter(|&position| self.columns[kept[position]].expendable > 0)
                .max_by_key(|&position| (self.columns[kept[position]].expendable, position))
            else {
                break;
            };
            dropped.push(kept.remove(position));
        }
        // What may not go gives way from the left: names can be cut, numbers cannot.
        for &at in &kept {
            let excess = total(&kept, &widths).saturating_sub(width);
            widths[at] -= excess.min(widths[at].saturating_sub(3));
        }
        dropped.sort_unstable();
        let mut lines = Vec::with_capacity(self.rows.len() + 1);
        if kept.iter().any(|&at| !self.columns[at].title.is_empty()) {
            lines.push(self.line(&kept, &widths, |at| (self.columns[at].title, Tone::Dim)));
        }
        for row in &self.rows {
            lines.push(self.line(&kept, &widths, |at| (row[at].text.as_str(), row[at].tone)));
        }
        (lines, dropped.into_iter().map(|at| self.columns[at].title).collect())
    }

    fn line<'a>(&self, kept: &[usize], widths: &[usize], cell: impl Fn(usize) -> (&'a str, Tone)) -> Line {
        let mut pieces = Vec::with_capacity(kept.len());
        for (position, &at) in kept.iter().enumerate() {
            let (text, tone) = cell(at);
            let text = cut(text, widths[at]);
            let padding = " ".repeat(widths[at] - text.chars().count());
            let between = " ".repeat(if position == 0 { 0 } else { BETWEEN });
            pieces.push((
                match self.columns[at].align {
                    Align::Left => between + &text + &padding,
                    Align::Right => between + &padding + &text,
                },
                tone,
            ));
        }
        pieces
    }

    fn column_width(&self, at: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[at].text.chars().count());
        cells.max().unwrap_or(0).max(self.columns[at].title.chars().count())
    }

    /// A column with nothing in it says nothing.
    fn is_empty_column(&self, at: usize) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row[at].text.is_empty())
    }
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(table: &Table, width: usize) -> (Vec<String>, Vec<&'static str>) {
        let (lines, dropped) = table.fit(width);
        (lines.into_iter().map(|line| line.into_iter().map(|(text, _)| text).collect()).collect(), dropped)
    }

    fn sample() -> Table {
        let mut table =
            Table::new(vec![Column::text("name", 0), Column::number("p50", 9), Column::number("rate", 0)]);
        table.row(vec!["full-range".into(), "1".into(), "49.3k/s".into()]);
        table.row(vec!["a".into(), "22".into(), "9/s".into()]);
        table
    }

    #[test]
    fn numbers_stand_right_and_names_left() {
        let (lines, dropped) = lines(&sample(), 80);
        assert_eq!(
            lines,
            ["name        p50     rate", "full-range    1  49.3k/s", "a            22      9/s"]
        );
        assert!(dropped.is_empty());
    }

    #[test]
    fn without_room_the_expendable_goes_and_then_names_are_cut() {
        assert_eq!(lines(&sample(), 20).1, ["p50"]);
        assert_eq!(lines(&sample(), 20).0[1], "full-range  49.3k/s");
        assert_eq!(lines(&sample(), 16).0[1], "full-r…  49.3k/s");
        assert_eq!(lines(&sample(), 18).0[1], "full-ran…  49.3k/s");
    }

    #[test]
    fn an_empty_column_is_not_shown() {
        let mut table = Table::new(vec![Column::text("name", 0), Column::text("note", 0)]);
        table.row(vec!["a".into(), "".into()]);
        assert_eq!(lines(&table, 80).0, ["name", "a   "]);
    }
}
