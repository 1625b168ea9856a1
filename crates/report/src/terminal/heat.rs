use fourtuple_record::TraceHeat;

use super::sheet::{Line, Sheet, Tone};
use crate::heat::{HOTTEST, fold, least, level, most};
use crate::number::{count, duration};

const SHADES: [&str; 5] = [" ", "░", "▒", "▓", "█"];
/// Of the scale on the left: `178us ┤`.
const LABEL: usize = 6;

/// Which time the map ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// That of the trace, which began where the map does.
    Trace,
    /// The present.
    Now,
}

/// Columns that a sheet of this width has room for.
pub(super) fn columns(width: usize) -> usize {
    width.saturating_sub(LABEL + 2)
}

/// Time from left to right, length from the bottom to the top; so many rows to a factor of ten: 1, 2 or 4.
pub(super) fn map(sheet: &mut Sheet, heat: &TraceHeat, rows: usize, end: Ends) {
    let room = columns(sheet.width());
    let heat = fold(heat, room, rows);
    let most = most(&heat);
    if most == 0 {
        return;
    }
    for (row, &from_ns) in heat.from_ns.iter().enumerate().rev() {
        let mut line: Line = vec![(format!("{:>LABEL$} ┤", duration(from_ns)), Tone::Dim)];
        for column in &heat.columns {
            let level = level(column.get(row).copied().unwrap_or(0), most);
            let shade = SHADES[usize::from(level.min(HOTTEST))];
            let tone = if level == 0 { Tone::Plain } else { Tone::Heat(level) };
            match line.last_mut() {
                Some((text, last)) if *last == tone => text.push_str(shade),
                _ => line.push((shade.to_owned(), tone)),
            }
        }
        sheet.line(&line);
    }
    sheet.line(&[(format!("{:LABEL$} └{}", "", ends(&heat, end)), Tone::Dim)]);
    let mut key: Line = vec![(" ".repeat(LABEL + 2), Tone::Plain)];
    let mut shown = 0;
    for step in 1..=HOTTEST {
        let from = least(step, most);
        // Where there are few, two shades are the same number: the lighter one does not occur.
        if level(from, most) == step && from > shown {
            key.push((SHADES[usize::from(step)].to_owned(), Tone::Heat(step)));
            key.push((format!(" {}  ", count(from)), Tone::Dim));
            shown = from;
        }
    }
    let length: usize = key.iter().map(|(text, _)| text.chars().count()).sum();
    let words = format!("searches or more in {}", duration(heat.column_ns));
    if length + words.chars().count() <= sheet.width() {
        key.push((words, Tone::Dim));
    }
    if length <= sheet.width() {
        sheet.line(&key);
    }
}

/// When the map begins and ends, below its two ends.
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
