//! Renders documents as text for a terminal, a log or an email.

mod heat;
mod sheet;
mod table;
mod timeline;

use fourtuple_record::{Common, Saved, TraceHeat};

use crate::document::{Block, Medium, Tone};
use crate::records::{document, host_facts};
use crate::table::{Cell, Table, more};
use heat::Ends;
use sheet::Sheet;
use table::Text;

/// Returns the record as lines of at most `width` columns (at least 20), with ANSI colours if `color` is true.
///
/// Remarks on validity come first. If a table is too wide, its less important columns are omitted and named below it.
/// Control characters of the record are replaced, so that a record from another host cannot control the terminal.
pub fn render(saved: &Saved, width: usize, color: bool) -> String {
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
    for (_, block) in document.blocks.iter().filter(|(medium, _)| medium.includes(Medium::Terminal)) {
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
        Block::HeatMap { heat, .. } => heat::map(sheet, heat, 4, Ends::Trace),
        Block::Timeline(timeline) => timeline::draw(sheet, timeline),
        Block::Verdict { verdict, detail } => {
            sheet.item("", verdict, Tone::Strong);
            if !detail.is_empty() {
                sheet.item("  ", detail, Tone::Dim);
            }
        }
        Block::Note(tone, text) => sheet.item("", text, *tone),
        Block::List(tone, items) => items.iter().for_each(|(name, text)| match name.as_str() {
            "" => sheet.item("- ", text, *tone),
            name => sheet.item("  ", &format!("{name}: {text}"), *tone),
        }),
        Block::Command { command, effect } => {
            sheet.unbroken("    ", command);
            sheet.item("      ", effect, Tone::Dim);
        }
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
    let first = heat.columns.len().saturating_sub(heat::columns(width));
    let last = TraceHeat { columns: heat.columns[first..].to_vec(), ..heat.clone() };
    heat::map(&mut sheet, &last, 2, Ends::Now);
    sheet.finish()
}
