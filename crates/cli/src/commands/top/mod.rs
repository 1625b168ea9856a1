mod draw;
mod panel;

use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use fourtuple_observe::doctor::{explain, named, with_callers};
use fourtuple_record::Finding;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_report::duration;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::watch::{self, Namespace, SHARE, TargetFlags, Thresholds, Watch, diagnose_in, read_thresholds};
use crate::{output, stop, units};
use draw::{Look, draw};
use panel::{Panel, Row, sort};

/// Watch ports, accept queues, workers and findings live
///
/// Keys: 1 to 5 or Tab select a table, its number again shows it alone, s and r sort, / filters, space freezes, Enter opens the
/// explanation of a finding, q ends.
#[derive(Debug, Args)]
pub(crate) struct TopFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Time between two readings
    ///
    /// At least 100ms.
    #[arg(long, value_name = "TIME", value_parser = units::interval, default_value = "1s", allow_hyphen_values = true)]
    every: Duration,
    /// Thresholds of rules, a TOML file
    ///
    /// With lines such as P01 = 80.
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Load no BPF program, and trace nothing
    #[arg(long)]
    no_trace: bool,
}

impl TopFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let thresholds = read_thresholds(self.thresholds.as_deref())?;
        let namespace = self.target.open()?;
        ensure!(
            io::stdout().is_terminal(),
            "stdout is not a terminal; `fourtuple doctor` prints the same once"
        );
        let is_dumb = env::var_os("TERM").is_none_or(|name| name.is_empty() || name == "dumb");
        ensure!(
            !is_dumb,
            "the terminal cannot move the cursor (TERM); `fourtuple doctor` prints the same once"
        );
        let stop = stop::flag()?;
        namespace.within(|| {
            let mut watch = Watch::begin(&namespace, !self.no_trace, SHARE);
            let mut terminal = ratatui::try_init().context("cannot set up the terminal")?;
            let result = self.show(&mut terminal, &mut watch, &namespace, &thresholds, &stop);
            ratatui::restore();
            result
        })
    }

    fn show(
        &self,
        terminal: &mut DefaultTerminal,
        watch: &mut Watch,
        namespace: &Namespace,
        thresholds: &Thresholds,
        stop: &AtomicBool,
    ) -> anyhow::Result<Exit> {
        let mut view = View::new();
        let look = Look { has_color: output::has_colour(&io::stdout()), is_ascii: output::is_ascii() };
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mut next = Instant::now();
        while !view.is_over && !stop.load(Ordering::Relaxed) {
            watch.poll();
            let now = Instant::now();
            let is_due = now >= next;
            if is_due {
                next = now + self.every;
                let snapshot = watch.read();
                let diagnosis = diagnose_in(namespace, &snapshot, &thresholds.limits, &|_| None);
                let unexplained = diagnosis.unexplained.into_iter().map(|symptom| symptom.sentence);
                let taken = OffsetDateTime::now_utc().time();
                view.update(Reading {
                    title: format!(
                        "{} {:02}:{:02}:{:02} UTC, every {}",
                        host.trim(),
                        taken.hour(),
                        taken.minute(),
                        taken.second(),
                        duration(self.every.as_nanos() as u64)
                    ),
                    // The processes that the verdicts name.
                    snapshot: with_callers(&snapshot).unwrap_or(snapshot),
                    findings: diagnosis.findings,
                    unexplained: unexplained.collect(),
                    unchecked: diagnosis.unchecked.len(),
                    search: search(watch),
                });
            }
            let timeout = next.saturating_duration_since(Instant::now()).min(watch.poll_interval());
            let is_input = event::poll(timeout).context("cannot read the terminal")?;
            if is_input
                && let Event::Key(key) = event::read().context("cannot read the terminal")?
                && key.kind == KeyEventKind::Press
            {
                view.key(key);
            }
            if is_due || is_input {
                terminal.draw(|frame| draw(frame, &view, look)).context("cannot write to the terminal")?;
            }
        }
        Ok(Exit::Fine)
    }
}

/// Returns the time of the port searches so far.
fn search(watch: &mut Watch) -> String {
    match watch.times().search {
        Ok(search) if search.count() > 0 => {
            let quantile = |share| duration(search.quantile(share));
            format!("port search p50 {}, p99 {}", quantile(0.5), quantile(0.99))
        }
        Ok(_) => "no port search yet".to_owned(),
        Err(reason) => format!("port search not traced: {reason}"),
    }
}

/// A reading: the snapshot and its findings.
struct Reading {
    /// The host, the time of the reading and the interval.
    title: String,
    snapshot: Snapshot,
    findings: Vec<Finding>,
    /// Symptoms that no finding explains, each in one line.
    unexplained: Vec<String>,
    /// Number of rules that could not be checked.
    unchecked: usize,
    /// Quantiles of the traced port searches, or the reason why nothing is traced.
    search: String,
}

/// The state of the view.
struct View {
    reading: Option<Reading>,
    panel: Panel,
    /// Sorted column by panel, and whether the order is reversed.
    sorted: [(Option<usize>, bool); Panel::ALL.len()],
    /// Only rows that contain this text are shown.
    filter: String,
    /// The user types a filter.
    is_typing: bool,
    /// New readings are ignored.
    is_frozen: bool,
    selected: usize,
    /// The selected table alone is visible.
    is_alone: bool,
    /// The explanation that covers the tables, and the first line that is visible.
    page: Option<(Vec<String>, u16)>,
    is_over: bool,
}

impl View {
    fn new() -> View {
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
    fn update(&mut self, reading: Reading) {
        if !self.is_frozen {
            self.reading = Some(reading);
        }
    }

    /// Returns the rows of a panel, filtered and sorted, or the reason why there are none. A filter hides no finding.
    fn rows(&self, panel: Panel) -> Result<Vec<Row>, String> {
        let Some(reading) = &self.reading else { return Ok(Vec::new()) };
        let mut rows = panel.rows(&reading.snapshot, &reading.findings)?;
        let filter = self.filter.to_lowercase();
        let has = |row: &Row| row.cells.iter().any(|cell| cell.text.to_lowercase().contains(&filter));
        rows.retain(|row| panel == Panel::Findings || has(row));
        if let (Some(column), reversed) = self.sorting(panel) {
            sort(&mut rows, panel, column, reversed);
        }
        Ok(rows)
    }

    /// Returns whether all rules were checked: without a finding the host is well.
    fn is_checked(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| reading.unchecked == 0)
    }

    /// Returns the sorted column of a panel and whether the order is reversed.
    fn sorting(&self, panel: Panel) -> (Option<usize>, bool) {
        self.sorted[position(panel)]
    }

    fn key(&mut self, key: KeyEvent) {
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
    fn finding(&self) -> Option<&Finding> {
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
