use fourtuple_record::TraceHeat;

use crate::heat::{HOTTEST, fold, least, level, most};
use crate::number::{count, duration};
use crate::terminal::sheet::{Line, Sheet, Style};

const SHADES: [&str; 5] = [" ", "░", "▒", "▓", "█"];
/// The width of the scale on the left: `178us ┤`.
const LABEL: usize = 6;

/// The time at the right end of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// The end of a trace, whose start is the left end of the map.
    Trace,
    /// The present.
    Now,
}

/// Returns the number of columns that fit a sheet of this width.
pub(super) fn columns(width: usize) -> usize {
    width.saturating_sub(LABEL + 2)
}

/// Draws the map: time from left to right, duration from bottom to top, with 1, 2 or 4 rows per factor of ten.
pub(super) fn map(sheet: &mut Sheet, heat: &TraceHeat, rows: usize, end: Ends) {
    let room = columns(sheet.width());
    let heat = fold(heat, room, rows);
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
