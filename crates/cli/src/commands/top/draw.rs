//! Draws the view with ratatui.

use fourtuple_record::Severity;
use fourtuple_record::measure::words::counted;
use fourtuple_record::printable;
use fourtuple_report::terminal::paragraphs;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::border;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Borders, Paragraph, Row as TableRow, Table, TableState, Wrap};

use crate::commands::top::View;
use crate::commands::top::panel::{Column, Panel};
use crate::output::ascii;

/// From this size on, all panels are visible at the same time.
const LARGE: (u16, u16) = (160, 40);

/// From this width on, a table shows all its columns.
const WIDE: u16 = 95;

/// Minimum width of the column that takes the rest: an IPv4 address with its port.
const MIN_REST_WIDTH: u16 = 21;

/// From this height on, findings, tuples and accept queues are visible at the same time.
const MIN_STACKED: u16 = 20;

/// Lines of the findings among other tables.
const FINDINGS: u16 = 6;

/// How the terminal is used: no colours if NO_COLOR is set, ASCII with the locale C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) has_color: bool,
    pub(super) is_ascii: bool,
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

    /// Returns a text without control characters, as the terminal can show it.
    fn text(self, text: &str) -> String {
        let text = printable(text);
        if self.is_ascii { ascii(&text) } else { text }
    }

    /// Returns a line over a table.
    fn rule(self) -> Block<'static> {
        let dashes = border::Set { horizontal_top: "-", ..border::PLAIN };
        Block::new().borders(Borders::TOP).border_set(if self.is_ascii { dashes } else { border::PLAIN })
    }
}

/// Which tables are visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    All,
    /// Findings, tuples and accept queues, one above the other.
    Stacked,
    One,
}

impl Tables {
    fn of(view: &View, area: Rect) -> Tables {
        let is_stacked = !matches!(view.panel, Panel::Workers | Panel::TimeWait);
        match (area.width, area.height) {
            _ if view.is_alone => Tables::One,
            (width, height) if width >= LARGE.0 && height >= LARGE.1 => Tables::All,
            (_, height) if is_stacked && height >= MIN_STACKED => Tables::Stacked,
            _ => Tables::One,
        }
    }
}

/// Draws the view over the whole terminal.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, look: Look) {
    let tables = Tables::of(view, frame.area());
    let head = head(view, look, frame.area().width, tables == Tables::One);
    let areas =
        Layout::vertical([Constraint::Length(head.len() as u16), Constraint::Min(3), Constraint::Length(1)])
            .areas(frame.area());
    let [top, body, foot] = areas;
    frame.render_widget(Paragraph::new(head), top);
    match (&view.page, tables) {
        (Some((lines, top)), _) => draw_page(frame, body, lines, *top, look),
        (None, Tables::All) => draw_all(frame, body, view, look),
        (None, Tables::Stacked) => {
            let rest = [Constraint::Length(FINDINGS), Constraint::Fill(1), Constraint::Fill(1)];
            let areas: [Rect; 3] = Layout::vertical(rest).areas(body);
            for (panel, area) in Panel::ALL.into_iter().zip(areas) {
                draw_panel(frame, area, view, panel, look);
            }
        }
        (None, Tables::One) => draw_panel(frame, body, view, view.panel, look),
    }
    frame.render_widget(Line::styled(look.text(&keys(view)), look.tone(Color::DarkGray)), foot);
}

/// Returns the lines above the tables: host and time, the verdict unless a table shows it, the command to paste, what else was read, and
/// symptoms that no finding explains.
fn head(view: &View, look: Look, width: u16, with_verdict: bool) -> Vec<Line<'static>> {
    let Some(reading) = &view.reading else {
        return vec![Line::raw("reading sockets, processes and counters")];
    };
    let mut title = vec![format!("fourtuple top  {}", reading.title)];
    title.extend(view.is_frozen.then(|| "FROZEN".to_owned()));
    title.extend((!view.filter.is_empty()).then(|| format!("filter: {}", view.filter)));
    let mut lines = vec![Line::styled(look.text(&title.join(" · ")), look.tone(Color::Cyan))];
    let finding = view.finding();
    if with_verdict {
        lines.extend(match finding {
            None => vec![Line::styled("no finding", nothing_found(view, look))],
            Some(finding) => wrapped(&look.text(&finding.verdict), width)
                .into_iter()
                .map(|line| Line::styled(line, look.severity(finding.severity)))
                .collect(),
        });
    }
    let command = finding.and_then(|finding| finding.now.iter().find(|advice| advice.is_command));
    // Part of a command would be another command.
    let command = command.map(|advice| look.text(&advice.action)).unwrap_or_default();
    let command: Vec<char> = command.chars().collect();
    lines.extend(command.chunks(width.max(1).into()).map(|part| {
        Line::styled(part.iter().collect::<String>(), Style::new().add_modifier(Modifier::BOLD))
    }));
    let mut facts = vec![sockets(view)];
    let findings = reading.findings.len() as u64;
    facts.extend((findings > 1).then(|| counted(findings, "finding")));
    // The reason why nothing is traced may be longer than the line.
    let unchecked = reading.unchecked as u64;
    facts.extend((unchecked > 0).then(|| format!("{} not checked", counted(unchecked, "rule"))));
    facts.push(reading.search.clone());
    lines.push(Line::raw(look.text(&facts.join(" · "))));
    let unexplained = unexplained(view);
    lines.extend(unexplained.map(|line| Line::styled(look.text(&line), look.tone(Color::Yellow))));
    lines
}

/// Returns the style of `no finding` and `none`: silence is good only if all rules were checked.
fn nothing_found(view: &View, look: Look) -> Style {
    if view.is_checked() { look.tone(Color::Green) } else { Style::new() }
}

/// Returns the lines of a text.
fn wrapped(text: &str, width: u16) -> Vec<String> {
    paragraphs(&[text.to_owned()], width.into()).lines().map(str::to_owned).collect()
}

/// Returns the line about symptoms that no finding explains, if there are some.
fn unexplained(view: &View) -> Option<String> {
    let unexplained = &view.reading.as_ref()?.unexplained;
    let number = counted(unexplained.len() as u64, "symptom");
    (!unexplained.is_empty()).then(|| format!("unexplained, {number}: {}", unexplained.join("; ")))
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
    let block = look.rule().title(title).border_style(style);
    let rows = match view.rows(panel) {
        Ok(rows) if rows.is_empty() => {
            let none = if panel == Panel::Findings { nothing_found(view, look) } else { Style::new() };
            frame.render_widget(Paragraph::new(Line::styled("none", none)).block(block), area);
            return;
        }
        Ok(rows) => rows,
        Err(reason) => {
            let text = look.text(&format!("not visible: {reason}"));
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
        aligned(look.text(&format!("{}{mark}", column.title)), column)
    };
    let header = TableRow::new(shown.iter().map(|index| title((*index, &columns[*index]))))
        .style(look.tone(Color::Cyan));
    let rest = MIN_REST_WIDTH.max(area.width.saturating_sub(taken(columns, &shown)));
    let body = rows.iter().map(|row| {
        // A verdict is never cut.
        let cell =
            |index: &usize| match (look.text(&row.cells[*index].text), row.severity, columns[*index].width) {
                (text, Some(_), 0) => Text::from_iter(wrapped(&text, rest)),
                (text, ..) => Text::from(aligned(text, &columns[*index])),
            };
        let cells: Vec<Text<'_>> = shown.iter().map(cell).collect();
        let height = cells.iter().map(Text::height).max().unwrap_or(1);
        let style = row.severity.map_or_else(Style::new, |severity| look.severity(severity));
        TableRow::new(cells).height(height as u16).style(style)
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

/// Returns the indexes of the columns that a table of `width` characters shows: without extra columns below [`WIDE`], and without the
/// last columns as far as the column that takes the rest would be narrower than [`MIN_REST_WIDTH`].
fn shown(columns: &[Column], width: u16) -> Vec<usize> {
    let fits = |index: &usize| !columns[*index].is_extra || width >= WIDE;
    let mut shown: Vec<usize> = (0..columns.len()).filter(fits).collect();
    while shown.len() > 2 && taken(columns, &shown) + MIN_REST_WIDTH > width {
        shown.pop();
    }
    shown
}

/// Returns the width of all columns except the one that takes the rest, with the spaces between them.
fn taken(columns: &[Column], shown: &[usize]) -> u16 {
    shown.iter().map(|index| columns[*index].width + 1).sum()
}

fn aligned(text: String, column: &Column) -> Line<'static> {
    if column.is_number { Line::raw(text).right_aligned() } else { Line::raw(text) }
}

fn draw_page(frame: &mut Frame<'_>, area: Rect, lines: &[String], top: u16, look: Look) {
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::raw(look.text(line))).collect();
    let page = Paragraph::new(lines).wrap(Wrap { trim: false }).scroll((top, 0));
    frame.render_widget(page.block(look.rule()), area);
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

    use fourtuple_record::snapshot::{Connections, EphemeralPorts, Owner, Part, Snapshot, Tuple};
    use fourtuple_record::{Advice, Finding, Proof};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    use super::*;
    use crate::commands::top::Reading;

    const VERDICT: &str =
        "10.0.0.9 → 10.1.2.5:443 uses 950 of 1,000 ports, 50% of them in TIME_WAIT; envoy[812] closes first";

    fn tuple(last: u8, in_use: u32, growth_per_s: f64) -> Tuple {
        Tuple {
            source: [10, 0, 0, 9].into(),
            destination: ([10, 1, 2, last], 443).into(),
            in_use,
            low_parity: in_use / 2,
            states: BTreeMap::from([("time-wait".to_owned(), u64::from(in_use) / 2)]),
            growth_per_s,
            owners: vec![Owner { pid: 812, name: "envoy".to_owned(), sockets: in_use / 2 }],
            ..Tuple::default()
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
            verdict: VERDICT.to_owned(),
            evidence: Vec::new(),
            now: vec![Advice {
                action: "sudo fourtuple fix ports --pid 812".to_owned(),
                is_command: true,
                effect: "a port at once".to_owned(),
                condition: None,
                proof: Proof::None,
                remains: None,
                needs_root: true,
                until: None,
                undo: None,
                lasting: None,
            }],
            proper: Vec::new(),
            same_cause_as: None,
        };
        let mut view = View::new();
        view.update(Reading {
            snapshot,
            title: "proxy7 03:52:07 UTC, every 1.0s".to_owned(),
            findings: vec![finding.clone(), finding],
            unexplained: Vec::new(),
            unchecked: 3,
            search: "no port search yet".to_owned(),
        });
        view
    }

    /// The width of the terminal that shows only ASCII.
    const ASCII: u16 = 81;

    /// Returns the lines of the terminal.
    fn lines(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let look = Look { has_color: true, is_ascii: width == ASCII };
        terminal.draw(|frame| draw(frame, view, look)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |row| (0..width).map(|column| buffer[(column, row)].symbol()).collect::<String>();
        (0..height).map(|row| line(row).trim_end().to_owned()).collect()
    }

    fn press(view: &mut View, keys: &str) {
        keys.chars().for_each(|key| view.key(KeyEvent::from(KeyCode::Char(key))));
    }

    /// Returns the first line that has this text.
    #[track_caller]
    fn line<'a>(shown: &'a [String], text: &str) -> &'a str {
        shown.iter().find(|line| line.contains(text)).unwrap_or_else(|| panic!("{text}: {shown:#?}"))
    }

    #[test]
    fn a_small_terminal_shows_findings_tuples_and_queues() {
        let mut view = view();
        let shown = lines(&view, 80, 24);
        assert_eq!(shown[0], "fourtuple top  proxy7 03:52:07 UTC, every 1.0s");
        assert_eq!(shown[1], "sudo fourtuple fix ports --pid 812", "a line of its own");
        assert!(shown[2].contains("2 findings · 3 rules not checked · no port search yet"), "{shown:#?}");
        for title in ["1 findings", "2 ports by source and destination", "3 accept queues", "not visible:"] {
            line(&shown, title);
        }
        // The verdict has two lines.
        let whole: Vec<&str> = shown[5..7].iter().flat_map(|line| line.split_whitespace()).collect();
        assert_eq!(whole.join(" "), format!("P01 critical {VERDICT}"), "{shown:#?}");
        // Sorted by ports in use; the second tuple has 100 free ports and grows by 10 per second.
        let tuples: Vec<&String> = shown.iter().filter(|line| line.starts_with("10.0.0.9")).collect();
        assert!(tuples[0].contains("10.1.2.5:443") && tuples[0].contains(" 950"), "{shown:#?}");
        assert!(tuples[1].contains("10.1.2.3:443") && tuples[1].contains("↑900"), "{shown:#?}");
        assert!(tuples[1].contains("10.0s") && tuples[1].contains("envoy[812]"), "{shown:#?}");
        assert!(shown[23].contains("q end"), "{shown:#?}");
        press(&mut view, "3");
        line(&lines(&view, 80, 24), "1 findings");
        press(&mut view, "3");
        let alone = lines(&view, 80, 24);
        assert!(!alone.join("\n").contains("1 findings"), "{alone:#?}");
        assert!(alone[1].starts_with("10.0.0.9 → 10.1.2.5:443 uses 950"), "the verdict is above: {alone:#?}");
    }

    #[test]
    fn a_long_command_is_whole() {
        let mut view = view();
        let command = &mut view.reading.as_mut().unwrap().findings[0].now[0].action;
        *command =
            format!("sudo sysctl -w {}", "net.ipv4.ip_local_reserved_ports=4000 ".repeat(4).trim_end());
        let expected = command.clone();
        let shown = lines(&view, 80, 24);
        let whole: String = shown[1..4].iter().map(|line| format!("{line:80}")).collect();
        assert!(whole.starts_with(&expected), "{shown:#?}");
    }

    #[test]
    fn a_terminal_of_ascii_gets_ascii() {
        let shown = lines(&view(), ASCII, 24);
        assert!(shown.iter().all(|line| line.is_ascii()), "{shown:#?}");
        line(&shown, "10.0.0.9 > 10.1.2.3:443");
        assert!(line(&shown, "1 findings").ends_with("--"), "{shown:#?}");
    }

    #[test]
    fn symptoms_without_an_explanation_are_a_line() {
        let mut view = view();
        let above = lines(&view, 80, 24);
        let reading = view.reading.as_mut().unwrap();
        reading.unexplained = vec!["Udp.MemErrors grew by 4".to_owned(), "7 connect() failed".to_owned()];
        let shown = lines(&view, 80, 24);
        assert_eq!(shown[3], "unexplained, 2 symptoms: Udp.MemErrors grew by 4; 7 connect() failed");
        assert_eq!((&shown[..3], &shown[4..7]), (&above[..3], &above[3..6]));
    }

    #[test]
    fn a_narrow_table_has_whole_columns() {
        let mut view = view();
        press(&mut view, "2");
        let shown = lines(&view, 40, 24);
        line(&shown, "source → destination             in use▾");
        let tuple = line(&shown, "10.1.2.5:443   ");
        assert!(tuple.starts_with("10.0.0.9 → 10.1.2.5:443") && tuple.ends_with(" 950"), "{shown:#?}");
        assert!(shown[23].starts_with("q end"), "{shown:#?}");
    }

    #[test]
    fn a_title_leaves_space_for_the_mark_of_the_sort() {
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
        let tuples = |view: &View| -> Vec<String> {
            lines(view, 80, 24).into_iter().filter(|line| line.starts_with("10.0.0.9")).collect()
        };
        assert!(
            tuples(&view).len() == 1 && tuples(&view)[0].contains("10.1.2.4:443"),
            "{:#?}",
            tuples(&view)
        );
        let shown = lines(&view, 80, 24).join("\n");
        assert!(shown.contains("P01") && !shown.contains("none"), "a filter hides no finding: {shown}");
        press(&mut view, "/");
        view.key(KeyEvent::from(KeyCode::Esc));
        press(&mut view, "r");
        assert!(tuples(&view)[0].contains("10.1.2.4:443"), "the fewest ports first");
        press(&mut view, " ");
        let empty = Reading {
            title: String::new(),
            snapshot: Snapshot::default(),
            findings: Vec::new(),
            unexplained: Vec::new(),
            unchecked: 0,
            search: String::new(),
        };
        view.update(empty);
        let shown = lines(&view, 80, 24);
        assert!(shown[0].contains("FROZEN") && tuples(&view)[0].contains("10.1.2.4:443"), "{shown:#?}");
        view.key(KeyEvent::from(KeyCode::Enter));
        let page = lines(&view, 80, 24).join("\n");
        assert!(page.contains("__inet_hash_connect") || page.contains("EADDRNOTAVAIL"), "{page}");
        assert!(page.lines().any(|line| line == "sudo fourtuple fix ports --pid 812"), "{page}");
        press(&mut view, "x");
        assert!(view.page.is_none() && !view.is_over);
        press(&mut view, "q");
        assert!(view.is_over);
    }

    #[test]
    fn only_a_checked_host_is_green() {
        let mut view = view();
        let look = Look { has_color: true, is_ascii: false };
        assert_eq!(nothing_found(&view, look), Style::new(), "three rules were not checked");
        view.reading.as_mut().unwrap().unchecked = 0;
        assert_eq!(nothing_found(&view, look), look.tone(Color::Green));
    }

    #[test]
    fn a_terminal_of_a_few_characters_is_no_panic() {
        for (width, height) in [(1, 1), (10, 3), (80, 4)] {
            lines(&view(), width, height);
        }
    }
}
