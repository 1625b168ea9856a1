//! The state of the view, and its changes by keys. Draws nothing.

use fourtuple_observe::doctor::{explain, named};
use fourtuple_record::Finding;
use fourtuple_record::snapshot::Snapshot;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::commands::top::panel::{Panel, Row, sort};
use crate::watch;

/// A reading: the snapshot and its findings.
pub(super) struct Reading {
    /// The host, the time of the reading and the interval.
    pub(super) title: String,
    pub(super) snapshot: Snapshot,
    pub(super) findings: Vec<Finding>,
    /// Symptoms that no finding explains, each in one line.
    pub(super) unexplained: Vec<String>,
    /// Number of rules that could not be checked.
    pub(super) unchecked: usize,
    /// Quantiles of the traced port searches, or the reason why nothing is traced.
    pub(super) search: String,
}

/// The state of the view.
pub(super) struct View {
    pub(super) reading: Option<Reading>,
    pub(super) panel: Panel,
    /// Sorted column by panel, and whether the order is reversed.
    sorted: [(Option<usize>, bool); Panel::ALL.len()],
    /// Only rows that contain this text are shown.
    pub(super) filter: String,
    /// The user types a filter.
    pub(super) is_typing: bool,
    /// New readings are ignored.
    pub(super) is_frozen: bool,
    pub(super) selected: usize,
    /// The selected table alone is visible.
    pub(super) is_alone: bool,
    /// The explanation that covers the tables, and the first line that is visible.
    pub(super) page: Option<(Vec<String>, u16)>,
    pub(super) is_over: bool,
}

impl View {
    pub(super) fn new() -> View {
        View {
            reading: None,
            panel: Panel::Tuples,
            sorted: Panel::ALL.map(|panel| (panel.first_sort(), false)),
            filter: String::new(),
            is_typing: false,
            is_frozen: false,
            selected: 0,
            is_alone: false,
            page: None,
            is_over: false,
        }
    }

    /// Takes a new reading unless the view is frozen.
    pub(super) fn update(&mut self, reading: Reading) {
        if !self.is_frozen {
            self.reading = Some(reading);
        }
    }

    /// Returns the rows of a panel, filtered and sorted, or the reason why there are none.
    pub(super) fn rows(&self, panel: Panel) -> Result<Vec<Row>, String> {
        let Some(reading) = &self.reading else { return Ok(Vec::new()) };
        let mut rows = panel.rows(&reading.snapshot, &reading.findings)?;
        let filter = self.filter.to_lowercase();
        rows.retain(|row| row.cells.iter().any(|cell| cell.text.to_lowercase().contains(&filter)));
        if let (Some(column), reversed) = self.sorting(panel) {
            sort(&mut rows, panel, column, reversed);
        }
        Ok(rows)
    }

    /// Returns the sorted column of a panel and whether the order is reversed.
    pub(super) fn sorting(&self, panel: Panel) -> (Option<usize>, bool) {
        self.sorted[position(panel)]
    }

    pub(super) fn key(&mut self, key: KeyEvent) {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            self.is_over = true;
        } else if self.is_typing {
            self.type_filter(key.code);
        } else if self.page.is_some() {
            self.turn_page(key.code);
        } else {
            self.command(key.code);
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_typing = false;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
        self.selected = 0;
    }

    fn turn_page(&mut self, code: KeyCode) {
        let Some((_, top)) = &mut self.page else { return };
        match code {
            KeyCode::Down | KeyCode::Char('j') => *top = top.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => *top = top.saturating_sub(1),
            _ => self.page = None,
        }
    }

    fn command(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char('q') | KeyCode::Esc => self.is_over = true,
            KeyCode::Char(digit @ '1'..='5') => {
                let panel = digit as usize - '1' as usize;
                self.is_alone = !self.is_alone && panel == position(self.panel);
                self.open(panel);
            }
            KeyCode::Tab => self.open((position(self.panel) + 1) % Panel::ALL.len()),
            KeyCode::BackTab => self.open((position(self.panel) + Panel::ALL.len() - 1) % Panel::ALL.len()),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char(' ') => self.is_frozen = !self.is_frozen,
            KeyCode::Char('s') => {
                let columns = self.panel.columns().len();
                let (column, reversed) = &mut self.sorted[position(self.panel)];
                *column = Some(column.map_or(0, |column| (column + 1) % columns));
                *reversed = false;
            }
            KeyCode::Char('r') => {
                let reversed = &mut self.sorted[position(self.panel)].1;
                *reversed = !*reversed;
            }
            KeyCode::Down | KeyCode::Char('j') => self.selected = self.selected.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Enter => self.explain(),
            _ => {}
        }
        let rows = self.rows(self.panel).map_or(0, |rows| rows.len());
        self.selected = self.selected.min(rows.saturating_sub(1));
    }

    fn open(&mut self, panel: usize) {
        self.panel = Panel::ALL[panel];
        self.selected = 0;
    }

    /// Returns the selected finding, or the first one if another panel is open.
    pub(super) fn finding(&self) -> Option<&Finding> {
        let rows = self.rows(Panel::Findings).unwrap_or_default();
        let index = if self.panel == Panel::Findings { self.selected } else { 0 };
        let verdict = &rows.get(index)?.cells[2].text;
        self.reading.iter().flat_map(|reading| &reading.findings).find(|finding| finding.verdict == *verdict)
    }

    /// Opens the finding: its verdict, its remedies and its rule. A command has a line of its own, which can be copied.
    fn explain(&mut self) {
        let Some(finding) = self.finding() else { return };
        let mut lines = vec![finding.verdict.clone()];
        lines.extend(finding.evidence.iter().cloned());
        for (heading, advice) in [("do now", &finding.now), ("do properly", &finding.proper)] {
            for advice in advice {
                lines.extend([String::new(), format!("{heading}: {}", advice.effect), advice.action.clone()]);
                lines.extend(advice.undo.iter().flat_map(|undo| ["undo:".to_owned(), undo.clone()]));
            }
        }
        lines.push(String::new());
        lines.extend(named(&finding.id).map(|rule| explain(rule, &watch::here())).unwrap_or_default());
        self.page = Some((lines, 0));
    }
}

fn position(panel: Panel) -> usize {
    Panel::ALL.iter().position(|other| *other == panel).unwrap_or(0)
}
