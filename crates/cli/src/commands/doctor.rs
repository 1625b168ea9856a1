use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_observe::doctor::{ALL, Diagnosis, Rule, about, explain, named};
use fourtuple_record::snapshot::{FailedCall, Part, Snapshot};
use fourtuple_record::{DoctorResults, DoctorSettings, Remark, Saved};
use fourtuple_report::terminal::{items, paragraphs};
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::line::Line;
use crate::output::{self, Output};
use crate::units::{self, nanoseconds};
use crate::watch::{self, Destination, TargetFlags, Thresholds, diagnose_in, host, read_thresholds};
use crate::{names, stop};

/// Find what is wrong with connections of this host, and what to type
///
/// Reads sockets, processes and counters twice, traces connect(), accept() and lock waits in between, and applies the rules that
/// `fourtuple explain` lists. Changes nothing. As root it sees all processes and traces; otherwise it names what it cannot see.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Examine connections to this destination only
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = watch::destination)]
    to: Option<Destination>,
    /// Time between the two readings
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, default_value = "2s", allow_hyphen_values = true)]
    time: Duration,
    /// Thresholds of rules, a TOML file
    ///
    /// With lines such as P01 = 80.
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Load no BPF program, and trace nothing
    #[arg(long)]
    no_trace: bool,
    /// Exit with 3 if a rule could not be checked
    ///
    /// Findings have precedence: exit code 1.
    #[arg(long)]
    strict: bool,
    /// Show all findings with all facts and remedies
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: Output,
}

impl DoctorFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Thresholds { limits, set } = read_thresholds(self.thresholds.as_deref())?;
        let namespace = self.target.open()?;
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        if line.is_visible() {
            line.set(&["reading sockets, processes and counters".to_owned()]);
        }
        let (mut snapshot, elapsed) =
            watch::once(&namespace, self.time, self.to.as_ref(), !self.no_trace, &stop)?;
        line.finish();
        if let Some(to) = &self.to {
            restrict(&mut snapshot, to);
        }
        let Diagnosis { findings, checked, unchecked, unexplained: _, symptoms: _, explained: _ } =
            diagnose_in(&namespace, &snapshot, &limits, &watch::try_cure);
        if let (Part::Hidden(why), Part::Hidden(_)) = (&snapshot.connections, &snapshot.listeners) {
            anyhow::ensure!(!findings.is_empty(), "cannot see the sockets of the namespace: {why}");
        }
        let validity = (elapsed < self.time).then(|| {
            Remark::new(
                "interrupted",
                "stopped before the end of --for; rates and traces cover a shorter time",
            )
        });
        let exit = match (findings.is_empty(), self.strict && !unchecked.is_empty()) {
            (false, _) => Exit::Findings,
            (true, true) => Exit::NotValid,
            (true, false) => Exit::Fine,
        };
        let settings = DoctorSettings {
            to: self.to.map(|to| to.text),
            thresholds: set,
            ..self.target.settings(nanoseconds(self.time))
        };
        let host = host(&snapshot);
        let limited = (!watch::here().is_root && !unchecked.is_empty()).then(|| counted(unchecked.len()));
        let results = DoctorResults { findings, checked, unchecked, snapshot, history: None };
        let validity = validity.into_iter().collect();
        let record = output::record("doctor", started, host, settings, validity, results);
        let text = if self.all { output::text_in_full } else { output::text };
        let printed = self.output.finish_with(&Saved::Doctor(record), text)?;
        if let Some(rules) = limited.filter(|_| !self.output.json) {
            let line = std::env::args().skip(1).map(|word| shell_word(&word)).collect::<Vec<_>>().join(" ");
            output::print(&format!(
                "{rules} not checked; root sees more: sudo {} {line}\n",
                watch::program()
            ))?;
        }
        Ok(if printed == Exit::Fine { exit } else { printed })
    }
}

fn shell_word(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,@%+".contains(letter);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

fn counted(rules: usize) -> String {
    if rules == 1 { "1 rule was".to_owned() } else { format!("{rules} rules were") }
}

/// Removes traced calls with other destinations; the reader has left out their connections.
fn restrict(snapshot: &mut Snapshot, to: &Destination) {
    if let Part::Seen(traced) = &mut snapshot.traced {
        traced.connects.retain(|connects| to.matches(connects.destination));
    }
    if let Part::Seen(failures) = &mut snapshot.failures {
        let is_of = |call: &FailedCall| {
            let address = call.address.as_ref().and_then(|address| address.parse().ok());
            // Of a row for many addresses only one is known.
            call.addresses > 1 || address.is_none_or(|address| call.call != "connect" || to.matches(address))
        };
        failures.calls.retain(is_of);
    }
}

/// Explain a rule of `doctor`: its cause in the kernel, and what helps
///
/// Without a rule, lists all rules. Needs no host and no privilege.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A rule: P02; or a word, which lists the rules about it: TIME_WAIT
    #[arg(value_parser = names::rule())]
    rule: Option<String>,
}

impl Explain {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let width = output::width();
        let text = match self.rule.as_deref().map(|text| (text, named(text), about(text))) {
            None => list(ALL.iter(), width),
            Some((_, Some(rule), _)) => paragraphs(&explain(rule, &watch::here()), width),
            Some((text, None, found)) if found.is_empty() => Err(UsageError(format!(
                "invalid value '{text}' for '[RULE]': no rule has this name or this word; `fourtuple explain` lists all rules"
            )))?,
            Some((_, None, found)) => list(found.into_iter(), width),
        };
        output::print(&text)?;
        Ok(Exit::Fine)
    }
}

/// Returns a line for each rule.
fn list(rules: impl Iterator<Item = &'static Rule>, width: usize) -> String {
    let lines: Vec<(String, &str)> = rules.map(|rule| (format!("{}  ", rule.id), rule.title)).collect();
    items(lines.iter().map(|(mark, title)| (mark.as_str(), *title)), width)
}
