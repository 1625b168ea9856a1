use crate::document::{Medium, Tone};
use crate::table::{Align, Cell, Column, Table};
use fourtuple_record::printable;

use crate::terminal::sheet::{Line, Style};

const BETWEEN: usize = 2;

/// A table as text, with the columns that the terminal shows.
pub(super) struct Text {
    columns: Vec<Column>,
    rows: Vec<Vec<(String, Tone)>>,
}

impl Text {
    pub(super) fn new(table: &Table) -> Text {
        let most = table.limit.map_or(usize::MAX, |limit| limit.terminal);
        let shown = |at: &usize| table.columns[*at].medium.includes(Medium::Terminal);
        let kept: Vec<usize> = (0..table.columns.len()).filter(shown).collect();
        let cell = |row: &[Cell], at: usize| (printable(&row[at].text), row[at].tone);
        let columns = kept.iter().map(|&at| table.columns[at]).collect();
        let rows = table.rows.iter().take(most).map(|row| kept.iter().map(|&at| cell(row, at)).collect());
        Text { columns, rows: rows.collect() }
    }

    /// Returns the lines of the table within `width`, and the titles of the omitted columns.
    pub(super) fn fit(&self, width: usize) -> (Vec<Line>, Vec<&'static str>) {
        let mut widths: Vec<usize> =
            self.columns.iter().enumerate().map(|(at, _)| self.column_width(at)).collect();
        // A long name must not cause columns of numbers to be omitted.
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
        // Columns that may not be omitted shrink from the left: names can be cut, numbers cannot.
        for &at in &kept {
            let excess = total(&kept, &widths).saturating_sub(width);
            widths[at] -= excess.min(widths[at].saturating_sub(3));
        }
        dropped.sort_unstable();
        let mut lines = Vec::with_capacity(self.rows.len() + 1);
        if kept.iter().any(|&at| !self.columns[at].terminal_title().is_empty()) {
            lines.push(self.line(&kept, &widths, |at| (self.columns[at].terminal_title(), Tone::Dim)));
        }
        for row in &self.rows {
            lines.push(self.line(&kept, &widths, |at| (row[at].0.as_str(), row[at].1)));
        }
        (lines, dropped.into_iter().map(|at| self.columns[at].terminal_title()).collect())
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
                Style::Tone(tone),
            ));
        }
        pieces
    }

    fn column_width(&self, at: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[at].0.chars().count());
        cells.max().unwrap_or(0).max(self.columns[at].terminal_title().chars().count())
    }

    /// Returns whether all cells of a column are empty.
    fn is_empty_column(&self, at: usize) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row[at].0.is_empty())
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
        let (lines, dropped) = Text::new(table).fit(width);
        (lines.into_iter().map(|line| line.into_iter().map(|(text, _)| text).collect()).collect(), dropped)
    }

    fn sample() -> Table {
        Table::of(&[("full-range", "1", "49.3k/s"), ("a", "22", "9/s")])
            .text("name", 0, |row| row.0)
            .number("p50", 9, |row| row.1)
            .number("rate", 0, |row| row.2)
            .into()
    }

    #[test]
    fn numbers_are_right_aligned_and_names_left_aligned() {
        let (lines, dropped) = lines(&sample(), 80);
        assert_eq!(
            lines,
            ["name        p50     rate", "full-range    1  49.3k/s", "a            22      9/s"]
        );
        assert!(dropped.is_empty());
    }

    #[test]
    fn narrow_tables_omit_columns_and_then_cut_names() {
        assert_eq!(lines(&sample(), 20).1, ["p50"]);
        assert_eq!(lines(&sample(), 20).0[1], "full-range  49.3k/s");
        assert_eq!(lines(&sample(), 16).0[1], "full-r…  49.3k/s");
        assert_eq!(lines(&sample(), 18).0[1], "full-ran…  49.3k/s");
    }

    #[test]
    fn an_empty_column_is_not_shown() {
        let table = Table::of(&["a"]).text("name", 0, |row| *row).text("note", 0, |_| "");
        assert_eq!(lines(&table.into(), 80).0, ["name", "a   "]);
    }
}
