mod draw;
mod panel;
mod view;

use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use fourtuple_observe::doctor::with_callers;
use fourtuple_report::duration;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::units;
use crate::watch::{Namespace, SHARE, TargetFlags, Thresholds, Watch, diagnose_in, read_thresholds};
use crate::{output, stop};
use draw::{Look, draw};
use view::{Reading, View};

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
