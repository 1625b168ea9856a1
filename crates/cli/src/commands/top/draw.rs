//! Draws the view with ratatui.

use fourtuple_record::Severity;
use fourtuple_report::terminal::printable;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Row as TableRow, Table, TableState, Wrap};

use crate::commands::top::panel::{Column, Panel};
use crate::commands::top::view::View;

/// From this size on, all panels are visible at the same time.
const LARGE: (u16, u16) = (160, 40);

/// The colours; none if NO_COLOR is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) has_color: bool,
}

impl Look {
    fn tone(self, color: Color) -> Style {
        if self.has_color { Style::new().fg(color) } else { Style::new() }
    }

    fn severity(self, severity: Severity) -> Style {
        match severity {
            Severity::Critical => self.tone(Color::Red).add_modifier(Modifier::BOLD),
            Severity::Warning => self.tone(Color::Yellow),
            Severity::Notice => Style::new(),
        }
    }
}

/// Draws the view over the whole terminal.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, look: Look) {
    let areas = Layout::vertical([Constraint::Length(2), Constraint::Min(3), Constraint::Length(1)])
        .areas(frame.area());
    let [head, body, foot] = areas;
    draw_head(frame, head, view, look);
    match &view.page {
        Some((lines, top)) => draw_page(frame, body, lines, *top),
        None if frame.area().width >= LARGE.0 && frame.area().height >= LARGE.1 => {
            draw_all(frame, body, view, look);
        }
        None => draw_panel(frame, body, view, view.panel, look),
    }
    frame.render_widget(Line::styled(keys(view), look.tone(Color::DarkGray)), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, view: &View, look: Look) {
    let Some(reading) = &view.reading else {
        frame.render_widget(Line::raw("reading sockets, processes and counters"), area);
        return;
    };
    let verdict = match reading.findings.split_first() {
        None => Line::styled("no finding", look.tone(Color::Green)),
        Some((first, others)) => {
            let more = if others.is_empty() { String::new() } else { format!("  (+{})", others.len()) };
            Line::from(vec![
                Span::styled(printable(&first.verdict), look.severity(first.severity)),
                Span::raw(more),
            ])
        }
    };
    let mut facts = vec![sockets(view), reading.search.clone()];
    facts.extend(view.is_frozen.then(|| "FROZEN".to_owned()));
    facts.extend((!view.filter.is_empty()).then(|| format!("filter: {}", view.filter)));
    frame.render_widget(Paragraph::new(vec![verdict, Line::raw(printable(&facts.join(" · ")))]), area);
}

/// Returns the number of sockets by state, most sockets first.
fn sockets(view: &View) -> String {
    let snapshot = view.reading.as_ref().map(|reading| &reading.snapshot);
    let Some(Ok(connections)) = snapshot.map(|snapshot| snapshot.connections.seen()) else {
        return "sockets are not visible".to_owned();
    };
    let mut states: Vec<(&String, &u64)> = connections.states.iter().collect();
    states.sort_by_key(|(_, number)| std::cmp::Reverse(**number));
    let words: Vec<String> = states
        .iter()
        .take(3)
        .map(|(name, number)| format!("{} {name}", indicatif::HumanCount(**number)))
        .collect();
    if words.is_empty() { "no connections".to_owned() } else { words.join(", ") }
}

fn draw_all(frame: &mut Frame<'_>, area: Rect, view: &View, look: Look) {
    let [findings, middle, lower] =
        Layout::vertical([Constraint::Length(10), Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let halves = |area| Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas::<2>(area);
    let ([one, two], [three, four]) = (halves(middle), halves(lower));
    for (panel, area) in Panel::ALL.into_iter().zip([findings, one, two, three, four]) {
        draw_panel(frame, area, view, panel, look);
    }
}

fn draw_panel(frame: &mut Frame<'_>, area: Rect, view: &View, panel: Panel, look: Look) {
    let is_open = panel == view.panel;
    let number = Panel::ALL.iter().position(|other| *other == panel).unwrap_or(0) + 1;
    let title = format!(" {number} {} ", panel.title());
    let style = if is_open { Style::new().add_modifier(Modifier::BOLD) } else { look.tone(Color::DarkGray) };
    let block = Block::new().borders(Borders::TOP).title(title).border_style(style);
    let rows = match view.rows(panel) {
        Ok(rows) if rows.is_empty() => {
            frame.render_widget(Paragraph::new("none").block(block), area);
            return;
        }
        Ok(rows) => rows,
        Err(reason) => {
            let text = printable(&format!("not visible: {reason}"));
            frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }).block(block), area);
            return;
        }
    };
    let columns = panel.columns();
    let (sorted, reversed) = view.sorting(panel);
    let title = |(index, column): (usize, &Column)| {
        let mark = match (sorted == Some(index), reversed) {
            (true, false) => "▾",
            (true, true) => "▴",
            _ => "",
        };
        aligned(format!("{}{mark}", column.title), column)
    };
    let header = TableRow::new(columns.iter().enumerate().map(title)).style(look.tone(Color::Cyan));
    let body = rows.iter().map(|row| {
        let cells = row.cells.iter().zip(columns);
        TableRow::new(cells.map(|(cell, column)| aligned(printable(&cell.text), column)))
    });
    let widths = columns.iter().map(|column| match column.width {
        0 => Constraint::Fill(1),
        width => Constraint::Length(width),
    });
    let table = Table::new(body, widths)
        .header(header)
        .block(block)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(is_open.then_some(view.selected));
    frame.render_stateful_widget(table, area, &mut state);
}

fn aligned(text: String, column: &Column) -> Line<'static> {
    if column.is_number { Line::raw(text).right_aligned() } else { Line::raw(text) }
}

fn draw_page(frame: &mut Frame<'_>, area: Rect, lines: &[String], top: u16) {
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::raw(printable(line))).collect();
    let page = Paragraph::new(lines).wrap(Wrap { trim: false }).scroll((top, 0));
    frame.render_widget(page.block(Block::new().borders(Borders::TOP)), area);
}

fn keys(view: &View) -> String {
    if view.is_typing {
        return format!("filter: {}_   Enter keep · Esc clear", view.filter);
    }
    if view.page.is_some() {
        return "up/down scroll · any other key closes".to_owned();
    }
    "1-5 panel · s sort · r reverse · / filter · space freeze · Enter explain · q quit".to_owned()
}
