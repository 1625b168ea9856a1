//! Renders documents as text for a terminal, a log or an email.

use fourtuple_record::{Common, Saved, TraceHeat, printable};

use crate::document::{Block, Medium, StripKind, Timeline, TimelineRow, Tone};
use crate::records::{document, host_facts};
use crate::table::{Align, Cell, Column, Table, more};
use crate::words::{count, duration};

/// Returns the record as lines of at most `width` columns (at least 20), with ANSI colours if `color` is true.
///
/// Remarks on validity come first. If a table is too wide, its less important columns are omitted and named below it.
/// Control characters of the record are replaced, so that a record from another host cannot control the terminal.
pub fn render(saved: &Saved, width: usize, color: bool) -> String {
    render_for(Medium::Brief, saved, width, color)
}

/// Returns all facts and remedies, where [`render`] shows the first of them.
pub fn render_in_full(saved: &Saved, width: usize, color: bool) -> String {
    render_for(Medium::Full, saved, width, color)
}

fn render_for(medium: Medium, saved: &Saved, width: usize, color: bool) -> String {
    let common = saved.common();
    let document = document(saved);
    let mut sheet = Sheet::new(width, color);
    for remark in common.validity {
        sheet.item("! ", &format!("{}: {}", remark.id, remark.message), Tone::Bad);
    }
    if !common.validity.is_empty() {
        sheet.gap();
    }
    if !document.leads {
        show_origin(&mut sheet, &common);
        sheet.gap();
    }
    let mut last: Option<&Block> = None;
    for (_, block) in document.blocks.iter().filter(|(shown, _)| shown.includes(medium)) {
        // Blank lines separate tables from text, except from their own heading.
        let heading = matches!(last, Some(Block::Heading(_)));
        if !heading && (is_table(block) || last.is_some_and(is_table)) {
            sheet.gap();
        }
        show(&mut sheet, block);
        last = Some(block);
    }
    if !document.advice.is_empty() {
        sheet.heading("In plain words");
        for line in &document.advice {
            sheet.item("- ", line, Tone::Plain);
        }
    }
    if document.leads {
        sheet.gap();
        show_origin(&mut sheet, &common);
    }
    sheet.finish()
}

fn show_origin(sheet: &mut Sheet, common: &Common<'_>) {
    sheet.list(&host_facts(common.host), Tone::Dim);
    sheet.list(&[format!("fourtuple {}", common.command), common.started.to_owned()], Tone::Dim);
}

/// Returns lines of at most `width` columns (at least 20); each given line is a paragraph.
pub fn paragraphs(lines: &[String], width: usize) -> String {
    items(lines.iter().map(|line| ("", line.as_str())), width)
}

/// Returns lines of at most `width` columns (at least 20): the paragraphs of a list, each indented by its mark.
pub fn items<'a>(items: impl Iterator<Item = (&'a str, &'a str)>, width: usize) -> String {
    let mut sheet = Sheet::new(width, false);
    items.for_each(|(mark, text)| sheet.item(mark, text, Tone::Plain));
    sheet.finish()
}

fn is_table(block: &Block) -> bool {
    matches!(block, Block::Figures(_) | Block::Table(_) | Block::Timeline(_))
}

fn show(sheet: &mut Sheet, block: &Block) {
    match block {
        Block::Heading(text) => sheet.heading(text),
        Block::Facts(facts) => sheet.list(facts, Tone::Dim),
        Block::Figures(figures) => {
            let table = Table::of(figures)
                .text("", 0, |(name, _)| *name)
                .number("", 0, |(_, value)| Cell::toned(value.as_str(), Tone::Strong));
            sheet.table(&Text::new(&table.into()));
        }
        Block::Table(table) => {
            sheet.table(&Text::new(table));
            let cut = table.limit.and_then(|limit| more(table.rows.len(), limit.terminal, limit.noun));
            if let Some(more) = cut {
                sheet.item("", &more, Tone::Dim);
            }
        }
        Block::HeatMap { heat, .. } => map(sheet, heat, 4, Ends::Trace),
        Block::Timeline(timeline) => draw_timeline(sheet, timeline),
        Block::Verdict { verdict, detail } => {
            sheet.item("", verdict, Tone::Strong);
            if !detail.is_empty() {
                sheet.item("  ", detail, Tone::Dim);
            }
        }
        Block::Finding(tone, text) | Block::Note(tone, text) => sheet.item("", text, *tone),
        Block::List(tone, items) => items.iter().for_each(|(name, text)| match name.as_str() {
            "" => sheet.item("- ", text, *tone),
            name => sheet.item("  ", &format!("{name}: {text}"), *tone),
        }),
        Block::Command { command, effect } => {
            sheet.unbroken("    ", command);
            if !effect.is_empty() {
                sheet.item("      ", effect, Tone::Dim);
            }
        }
        Block::Gap => sheet.gap(),
        Block::Nothing => {
            sheet.gap();
            sheet.item("", "Nothing was measured.", Tone::Bad);
        }
        // The tables next to these blocks have the same figures.
        Block::Ladder { .. } | Block::Bars { .. } | Block::Dots { .. } | Block::Chart(_) => {}
    }
}

/// Returns the heat map of the most recent searches for the live view of a trace: its last columns, in lines of at
/// most `width` columns, with two rows per factor of ten. Empty without searches.
pub fn moving_heat(heat: &TraceHeat, width: usize, color: bool) -> String {
    let mut sheet = Sheet::new(width, color);
    let first = heat.columns.len().saturating_sub(columns(width));
    let last = TraceHeat { columns: heat.columns[first..].to_vec(), ..heat.clone() };
    map(&mut sheet, &last, 2, Ends::Now);
    sheet.finish()
}

const SHADES: [&str; 5] = [" ", "░", "▒", "▓", "█"];

/// The width of the scale on the left: `178us ┤`.
const LABEL: usize = 6;

/// The time at the right end of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// The end of a trace, whose start is the left end of the map.
    Trace,
    /// The present.
    Now,
}

/// Returns the number of columns that fit a sheet of this width.
fn columns(width: usize) -> usize {
    width.saturating_sub(LABEL + 2)
}

/// Draws the map: time from left to right, duration from bottom to top, with 1, 2 or 4 rows per factor of ten.
fn map(sheet: &mut Sheet, heat: &TraceHeat, rows: usize, end: Ends) {
    let heat = fold(heat, columns(sheet.width()), rows);
    let most = most(&heat);
    if most == 0 {
        return;
    }
    for (row, &from_ns) in heat.from_ns.iter().enumerate().rev() {
        let mut line: Line = vec![(format!("{:>LABEL$} ┤", duration(from_ns)), Style::DIM)];
        for column in &heat.columns {
            let level = level(column.get(row).copied().unwrap_or(0), most);
            let shade = SHADES[usize::from(level.min(HOTTEST))];
            let style = if level == 0 { Style::PLAIN } else { Style::Heat(level) };
            match line.last_mut() {
                Some((text, last)) if *last == style => text.push_str(shade),
                _ => line.push((shade.to_owned(), style)),
            }
        }
        sheet.line(&line);
    }
    sheet.line(&[(format!("{:LABEL$} └{}", "", ends(&heat, end)), Style::DIM)]);
    let mut key: Line = vec![(" ".repeat(LABEL + 2), Style::PLAIN)];
    let mut shown = 0;
    for step in 1..=HOTTEST {
        let from = least(step, most);
        // For small counts two shades stand for the same count: the lighter one is not used.
        if level(from, most) == step && from > shown {
            key.push((SHADES[usize::from(step)].to_owned(), Style::Heat(step)));
            key.push((format!(" {}  ", count(from)), Style::DIM));
            shown = from;
        }
    }
    let length: usize = key.iter().map(|(text, _)| text.chars().count()).sum();
    let words = format!("searches or more in {}", duration(heat.column_ns));
    if length + words.chars().count() <= sheet.width() {
        key.push((words, Style::DIM));
    }
    if length <= sheet.width() {
        sheet.line(&key);
    }
}

/// Writes the start and the end of the map below its two ends.
fn ends(heat: &TraceHeat, end: Ends) -> String {
    let width = heat.columns.len();
    let all = duration(heat.column_ns.saturating_mul(width as u64));
    let (left, right) = match end {
        Ends::Trace => ("0".to_owned(), all),
        Ends::Now => (format!("-{all}"), "now".to_owned()),
    };
    let between = width.saturating_sub(left.chars().count() + right.chars().count());
    if between == 0 { String::new() } else { format!("{left}{}{right}", " ".repeat(between)) }
}

/// The number of columns of the picture.
const STEPS: u64 = 36;

/// Draws one row of characters per row of the timeline, with a legend below.
fn draw_timeline(sheet: &mut Sheet, timeline: &Timeline) {
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

const BETWEEN: usize = 2;

/// A table as text, with the columns that the terminal shows.
struct Text {
    columns: Vec<Column>,
    rows: Vec<Vec<(String, Tone)>>,
}

impl Text {
    fn new(table: &Table) -> Text {
        let most = table.limit.map_or(usize::MAX, |limit| limit.terminal);
        let shown = |at: &usize| table.columns[*at].medium.includes(Medium::Brief);
        let kept: Vec<usize> = (0..table.columns.len()).filter(shown).collect();
        let cell = |row: &[Cell], at: usize| (printable(&row[at].text), row[at].tone);
        let columns = kept.iter().map(|&at| table.columns[at]).collect();
        let rows = table.rows.iter().take(most).map(|row| kept.iter().map(|&at| cell(row, at)).collect());
        Text { columns, rows: rows.collect() }
    }

    /// Returns the lines of the table within `width`, and the titles of the omitted columns.
    fn fit(&self, width: usize) -> (Vec<Line>, Vec<&'static str>) {
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

/// The style of a text when colours are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Tone(Tone),
    /// Intensity in a heat map, from 1 (few) to 4 (many).
    Heat(u8),
}

impl Style {
    const PLAIN: Style = Style::Tone(Tone::Plain);
    const DIM: Style = Style::Tone(Tone::Dim);

    fn code(self) -> &'static str {
        match self {
            Style::Tone(Tone::Plain) => "",
            Style::Tone(Tone::Strong) => "\x1b[1m",
            Style::Tone(Tone::Dim) => "\x1b[2m",
            Style::Tone(Tone::Good) => "\x1b[32m",
            Style::Tone(Tone::Bad) => "\x1b[31m",
            Style::Heat(..=1) => "\x1b[34m",
            Style::Heat(2) => "\x1b[36m",
            Style::Heat(3) => "\x1b[33m",
            Style::Heat(4..) => "\x1b[91m",
        }
    }
}

/// A line: texts side by side, each with its style.
type Line = Vec<(String, Style)>;

/// Lines of limited width.
struct Sheet {
    width: usize,
    color: bool,
    text: String,
}

impl Sheet {
    fn new(width: usize, color: bool) -> Sheet {
        // Below this width a name and its number do not fit side by side.
        Sheet { width: width.max(20), color, text: String::new() }
    }

    /// Adds an empty line unless the last line is empty.
    fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    fn heading(&mut self, text: &str) {
        self.gap();
        self.item("", text, Tone::Strong);
    }

    /// Adds a wrapped paragraph; `mark` precedes its first line, and further lines are indented by the same width.
    fn item(&mut self, mark: &str, text: &str, tone: Tone) {
        let indent = mark.chars().count();
        let lines = wrap(&printable(text), self.width - indent);
        for (number, line) in lines.iter().enumerate() {
            let before = if number == 0 { mark.to_owned() } else { " ".repeat(indent) };
            self.line(&[(before + line, Style::Tone(tone))]);
        }
    }

    /// Adds a line that is never wrapped, because a terminal copies a wrapped command as several lines.
    fn unbroken(&mut self, mark: &str, text: &str) {
        self.line(&[(mark.to_owned() + &printable(text), Style::PLAIN)]);
    }

    /// Adds short facts separated by dots; lines break between two facts if possible.
    fn list(&mut self, facts: &[String], tone: Tone) {
        let mut line = String::new();
        for fact in facts.iter().map(|fact| printable(fact)) {
            if !line.is_empty() && line.chars().count() + 3 + fact.chars().count() > self.width {
                self.item("", &std::mem::take(&mut line), tone);
            }
            if !line.is_empty() {
                line.push_str(" · ");
            }
            line.push_str(&fact);
        }
        self.item("", &line, tone);
    }

    /// Returns the number of columns of a line.
    fn width(&self) -> usize {
        self.width
    }

    fn table(&mut self, table: &Text) {
        let (lines, dropped) = table.fit(self.width);
        for line in &lines {
            self.line(line);
        }
        // A column of marks beside another has no title.
        let dropped: Vec<_> = dropped.into_iter().filter(|title| !title.trim().is_empty()).collect();
        if !dropped.is_empty() {
            self.item("", &format!("(left out at this width: {})", dropped.join(", ")), Tone::Dim);
        }
    }

    /// Adds one line, which must fit the width.
    fn line(&mut self, pieces: &[(String, Style)]) {
        let start = self.text.len();
        for (text, style) in pieces {
            if self.color && *style != Style::PLAIN && !text.trim().is_empty() {
                self.text.extend([style.code(), text, "\x1b[0m"]);
            } else {
                self.text.push_str(text);
            }
        }
        let end = start + self.text[start..].trim_end().len();
        self.text.truncate(end);
        self.text.push('\n');
    }

    fn finish(self) -> String {
        self.text
    }
}

/// Breaks at spaces; cuts a word that is longer than a line.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + letters.len() > width {
            lines.push(String::new());
            used = 0;
        }
        if used > 0 {
            lines.last_mut().expect("there is a line from the start").push(' ');
            used += 1;
        }
        for letter in letters {
            if used == width {
                lines.push(String::new());
                used = 0;
            }
            lines.last_mut().expect("there is a line from the start").push(letter);
            used += 1;
        }
    }
    lines
}

/// The rows of a record per factor of ten.
const ROWS_TO_TEN: usize = 4;

/// The highest intensity of a cell; 0 is empty.
const HOTTEST: u8 = 4;

/// Merges columns and rows to at most `columns` columns and `rows` rows per factor of ten; `rows` divides four. Rows
/// start at powers of ten.
pub(crate) fn fold(heat: &TraceHeat, columns: usize, rows: usize) -> TraceHeat {
    let together = heat.columns.len().div_ceil(columns.max(1)).max(1);
    let steps = ROWS_TO_TEN / rows.clamp(1, ROWS_TO_TEN);
    // The merged row that contains a row of the record.
    let merged_row =
        |from_ns: u64| ((from_ns.max(1) as f64).log10() * ROWS_TO_TEN as f64).round() as usize / steps;
    let merged_rows: Vec<usize> = heat.from_ns.iter().map(|&from_ns| merged_row(from_ns)).collect();
    let (Some(&first), Some(&last)) = (merged_rows.iter().min(), merged_rows.iter().max()) else {
        return TraceHeat::default();
    };
    let begin =
        |merged_row: usize| 10_f64.powf((merged_row * steps) as f64 / ROWS_TO_TEN as f64).round() as u64;
    let folded = heat.columns.chunks(together).map(|columns| {
        let mut sum = vec![0_u64; last - first + 1];
        for column in columns {
            for (merged_row, number) in merged_rows.iter().zip(column) {
                sum[merged_row - first] = sum[merged_row - first].saturating_add(*number);
            }
        }
        sum
    });
    TraceHeat {
        column_ns: heat.column_ns.saturating_mul(together as u64),
        from_ns: (first..=last).map(begin).collect(),
        columns: folded.collect(),
    }
}

/// Returns the largest count of a cell.
pub(crate) fn most(heat: &TraceHeat) -> u64 {
    heat.columns.iter().flatten().copied().max().unwrap_or(0)
}

/// Returns the intensity of a cell relative to the largest count, on a log scale; a count above 0 is at least 1.
pub(crate) fn level(number: u64, most: u64) -> u8 {
    if number == 0 {
        return 0;
    }
    (1..=HOTTEST).rev().find(|&level| number >= least(level, most)).unwrap_or(1)
}

/// Returns the smallest count of an intensity.
pub(crate) fn least(level: u8, most: u64) -> u64 {
    let share = f64::from(level.saturating_sub(1)) / f64::from(HOTTEST);
    (most.max(1) as f64).powf(share).ceil() as u64
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

    #[test]
    fn text_wraps_at_spaces_and_long_words_are_cut() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn only_text_is_coloured() {
        let mut sheet = Sheet::new(40, true);
        sheet.item("! ", "bad", Tone::Bad);
        assert_eq!(sheet.finish(), "\x1b[31m! bad\x1b[0m\n");
    }

    #[test]
    fn folding_keeps_the_sum_and_rows_begin_at_decades() {
        let heat = TraceHeat {
            column_ns: 10,
            from_ns: vec![562, 1_000, 1_778, 3_162, 5_623, 10_000],
            columns: (0..7).map(|column| vec![1, column, 0, 2, 0, 3]).collect(),
        };
        let narrow = fold(&heat, 3, 2);
        assert_eq!((narrow.column_ns, narrow.columns.len()), (30, 3));
        assert_eq!(narrow.from_ns, [316, 1_000, 3_162, 10_000]);
        assert_eq!(narrow.columns[1], [3, 3 + 4 + 5, 6, 9]);
        assert_eq!(fold(&heat, 100, 4), heat);
        assert_eq!(fold(&TraceHeat::default(), 10, 2), TraceHeat::default());
    }

    #[test]
    fn levels_are_logarithmic() {
        assert_eq!(
            [0, 1, 9, 10, 99, 100, 999, 1_000, 10_000].map(|number| level(number, 10_000)),
            [0, 1, 1, 2, 2, 3, 3, 4, 4]
        );
        assert_eq!((level(1, 1), level(0, 0), level(2, 2)), (4, 0, 4));
    }
}
