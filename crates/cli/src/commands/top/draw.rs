//! Draws the view with ratatui.

use fourtuple_record::Severity;
use fourtuple_record::measure::words::counted;
use fourtuple_record::printable;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Paragraph, Row as TableRow, Table, TableState, Wrap};

use crate::commands::top::panel::{Column, Panel};
use crate::commands::top::view::View;

/// From this size on, all panels are visible at the same time.
const LARGE: (u16, u16) = (160, 40);

/// From this width on, a table shows all its columns.
const ROOMY: u16 = 95;

/// Minimum width of the column that takes the rest: an IPv4 address with its port.
const MIN_REST_WIDTH: u16 = 21;

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
    let unexplained = unexplained(view);
    let head = 2 + u16::from(unexplained.is_some());
    let areas = Layout::vertical([Constraint::Length(head), Constraint::Min(3), Constraint::Length(1)])
        .areas(frame.area());
    let [head, body, foot] = areas;
    draw_head(frame, head, view, look, unexplained);
    match &view.page {
        Some((lines, top)) => draw_page(frame, body, lines, *top),
        None if frame.area().width >= LARGE.0 && frame.area().height >= LARGE.1 => {
            draw_all(frame, body, view, look);
        }
        None => draw_panel(frame, body, view, view.panel, look),
    }
    frame.render_widget(Line::styled(keys(view), look.tone(Color::DarkGray)), foot);
}

/// Returns the line about symptoms that no finding explains, if there are some.
fn unexplained(view: &View) -> Option<String> {
    let unexplained = &view.reading.as_ref()?.unexplained;
    let number = counted(unexplained.len() as u64, "symptom");
    (!unexplained.is_empty()).then(|| format!("unexplained, {number}: {}", unexplained.join("; ")))
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, view: &View, look: Look, unexplained: Option<String>) {
    let Some(reading) = &view.reading else {
        frame.render_widget(Line::raw("reading sockets, processes and counters"), area);
        return;
    };
    let verdict = match reading.findings.split_first() {
        None => Line::styled("no finding", look.tone(Color::Green)),
        Some((first, _)) => Line::styled(printable(&first.verdict), look.severity(first.severity)),
    };
    let mut facts = vec![sockets(view)];
    let findings = reading.findings.len() as u64;
    facts.extend((findings > 1).then(|| counted(findings, "finding")));
    facts.extend(view.is_frozen.then(|| "FROZEN".to_owned()));
    facts.extend((!view.filter.is_empty()).then(|| format!("filter: {}", view.filter)));
    // The reason why nothing is traced may be longer than the line.
    let unchecked = reading.unchecked as u64;
    facts.extend((unchecked > 0).then(|| format!("{} not checked", counted(unchecked, "rule"))));
    facts.push(reading.search.clone());
    let mut lines = vec![verdict, Line::raw(printable(&facts.join(" · ")))];
    lines.extend(unexplained.map(|line| Line::styled(printable(&line), look.tone(Color::Yellow))));
    frame.render_widget(Paragraph::new(lines), area);
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
    let shown = shown(columns, area.width);
    let (sorted, reversed) = view.sorting(panel);
    let title = |(index, column): (usize, &Column)| {
        let mark = match (sorted == Some(index), reversed) {
            (true, false) => "▾",
            (true, true) => "▴",
            _ => "",
        };
        aligned(format!("{}{mark}", column.title), column)
    };
    let header = TableRow::new(shown.iter().map(|index| title((*index, &columns[*index]))))
        .style(look.tone(Color::Cyan));
    let body = rows.iter().map(|row| {
        let cell = |index: &usize| aligned(printable(&row.cells[*index].text), &columns[*index]);
        TableRow::new(shown.iter().map(cell))
    });
    let widths = shown.iter().map(|index| match columns[*index].width {
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

/// Returns the indexes of the columns that a table of `width` characters shows: without extra columns below [`ROOMY`], and without the
/// last columns as far as the column that takes the rest would be narrower than [`MIN_REST_WIDTH`].
fn shown(columns: &[Column], width: u16) -> Vec<usize> {
    let fits = |index: &usize| !columns[*index].is_extra || width >= ROOMY;
    let mut shown: Vec<usize> = (0..columns.len()).filter(fits).collect();
    let taken = |shown: &[usize]| shown.iter().map(|index| columns[*index].width + 1).sum::<u16>();
    while shown.len() > 2 && taken(&shown) + MIN_REST_WIDTH > width {
        shown.pop();
    }
    shown
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
    // A narrow terminal cuts the end.
    "q end · 1-5 table · s sort · r reverse · / filter · space freeze · Enter explain".to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fourtuple_record::Finding;
    use fourtuple_record::snapshot::{Connections, EphemeralPorts, Owner, Part, Snapshot, Tuple};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    use super::*;
    use crate::commands::top::view::Reading;

    fn tuple(last: u8, in_use: u32, growth_per_s: f64) -> Tuple {
        Tuple {
            source: [10, 0, 0, 9].into(),
            destination: ([10, 1, 2, last], 443).into(),
            in_use,
            low_parity: in_use / 2,
            states: BTreeMap::from([("time-wait".to_owned(), u64::from(in_use) / 2)]),
            closes_per_s: 0.0,
            closed_last_s: 0,
            growth_per_s,
            time_wait_plain: None,
            idle: None,
            fix: None,
            owners: vec![Owner { pid: 812, name: "envoy".to_owned(), sockets: in_use / 2 }],
        }
    }

    fn view() -> View {
        let connections = Connections {
            tuples: vec![tuple(3, 900, 10.0), tuple(4, 20, 0.0), tuple(5, 950, 0.0)],
            ..Connections::default()
        };
        let snapshot = Snapshot {
            ports: Part::Seen(EphemeralPorts { low: 20_000, high: 20_999, reserved: Vec::new() }),
            connections: Part::Seen(connections),
            ..Snapshot::default()
        };
        let finding = Finding {
            id: "P01".to_owned(),
            severity: Severity::Critical,
            subject: String::new(),
            verdict: "10.0.0.9 → 10.1.2.5:443 uses 950 of 1,000 ports".to_owned(),
            evidence: Vec::new(),
            now: Vec::new(),
            proper: Vec::new(),
            same_cause_as: None,
        };
        let mut view = View::new();
        view.update(Reading {
            snapshot,
            findings: vec![finding.clone(), finding],
            unexplained: Vec::new(),
            unchecked: 3,
            search: "no port search yet".to_owned(),
        });
        view
    }

    /// Returns the lines of the terminal.
    fn lines(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view, Look { has_color: true })).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |row| (0..width).map(|column| buffer[(column, row)].symbol()).collect::<String>();
        (0..height).map(|row| line(row).trim_end().to_owned()).collect()
    }

    fn press(view: &mut View, keys: &str) {
        keys.chars().for_each(|key| view.key(KeyEvent::from(KeyCode::Char(key))));
    }

    #[test]
    fn a_small_terminal_shows_the_verdict_and_one_table() {
        let mut view = view();
        let shown = lines(&view, 80, 24);
        assert!(shown[0].starts_with("10.0.0.9 → 10.1.2.5:443 uses 950 of 1,000 ports"), "{shown:#?}");
        assert!(shown[1].contains("2 findings · 3 rules not checked · no port search yet"), "{shown:#?}");
        // Sorted by ports in use; the second tuple has 100 free ports and grows by 10 per second.
        assert!(shown[4].contains("10.1.2.5:443") && shown[4].contains("950"), "{shown:#?}");
        assert!(shown[5].contains("10.1.2.3:443") && shown[5].contains("10.0s"), "{shown:#?}");
        assert!(shown[5].contains("envoy[812]") && !shown.join("\n").contains("backlog"), "{shown:#?}");
        assert!(shown[23].contains("q end"), "{shown:#?}");
        press(&mut view, "3");
        assert!(lines(&view, 80, 24)[3].starts_with("not visible:"), "the listeners are hidden");
    }

    #[test]
    fn symptoms_without_an_explanation_are_a_line() {
        let mut view = view();
        let above = lines(&view, 80, 24);
        let reading = view.reading.as_mut().unwrap();
        reading.unexplained = vec!["Udp.MemErrors grew by 4".to_owned(), "7 connect() failed".to_owned()];
        let shown = lines(&view, 80, 24);
        assert_eq!(shown[2], "unexplained, 2 symptoms: Udp.MemErrors grew by 4; 7 connect() failed");
        assert_eq!((&shown[..2], &shown[3..6]), (&above[..2], &above[2..5]));
    }

    #[test]
    fn a_narrow_table_has_whole_columns() {
        let shown = lines(&view(), 40, 24);
        assert_eq!(shown[3], "source → destination             in use▾", "{shown:#?}");
        assert!(shown[4].starts_with("10.0.0.9 → 10.1.2.5:443") && shown[4].ends_with(" 950"), "{shown:#?}");
        assert!(shown[23].starts_with("q end"), "{shown:#?}");
    }

    #[test]
    fn a_title_has_room_for_the_mark_of_the_sort() {
        for panel in Panel::ALL {
            for column in panel.columns().iter().filter(|column| column.is_number) {
                assert!(usize::from(column.width) > column.title.len(), "{}", column.title);
            }
        }
    }

    #[test]
    fn a_large_terminal_shows_all_tables() {
        let shown = lines(&view(), 200, 60).join("\n");
        for title in Panel::ALL.map(Panel::title) {
            assert!(shown.contains(title), "{title}: {shown}");
        }
        assert!(shown.contains("P01") && shown.contains("critical") && shown.contains("95%"), "{shown}");
    }

    #[test]
    fn keys_filter_sort_freeze_and_explain() {
        let mut view = view();
        press(&mut view, "/2.4");
        view.key(KeyEvent::from(KeyCode::Enter));
        let shown = lines(&view, 80, 24);
        assert!(shown[4].contains("10.1.2.4:443") && shown[5].is_empty(), "{shown:#?}");
        press(&mut view, "/");
        view.key(KeyEvent::from(KeyCode::Esc));
        press(&mut view, "r");
        assert!(lines(&view, 80, 24)[4].contains("10.1.2.4:443"), "the fewest ports first");
        press(&mut view, " ");
        let empty = Reading {
            snapshot: Snapshot::default(),
            findings: Vec::new(),
            unexplained: Vec::new(),
            unchecked: 0,
            search: String::new(),
        };
        view.update(empty);
        let shown = lines(&view, 80, 24);
        assert!(shown[1].contains("FROZEN") && shown[4].contains("10.1.2.4:443"), "{shown:#?}");
        view.key(KeyEvent::from(KeyCode::Enter));
        let page = lines(&view, 80, 24).join("\n");
        assert!(page.contains("__inet_hash_connect") || page.contains("EADDRNOTAVAIL"), "{page}");
        press(&mut view, "x");
        assert!(view.page.is_none() && !view.is_over);
        press(&mut view, "q");
        assert!(view.is_over);
    }

    #[test]
    fn a_terminal_of_a_few_characters_is_no_panic() {
        for (width, height) in [(1, 1), (10, 3), (80, 4)] {
            lines(&view(), width, height);
        }
    }
}
