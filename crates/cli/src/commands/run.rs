use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple_fix::{Choice, Notice, Run, RunOutcome, Way, Ways};
use fourtuple_record::{RunSettings, Saved};
use fourtuple_report::html;
use fourtuple_syscalls::fork::End;
use time::OffsetDateTime;

use crate::exit::{self, Exit};
use crate::output;
use crate::save::{self, save};
use crate::watch;

/// Run a program whose connect() finds a free source port quickly
///
/// However many are in use. Chooses the first way that fits the program and the host: cgroup (BPF, needs CAP_BPF and CAP_NET_ADMIN),
/// preload (a library for dynamic programs), supervise (seccomp user notification, also for static programs); the last two need
/// Linux 6.8 and no privilege. Signals, exit code, standard streams and the terminal belong to the program. After any failure, a
/// call proceeds unchanged.
#[derive(Debug, Args)]
pub(crate) struct RunFlags {
    /// cgroup, preload, supervise, bound [default: first to fit]
    ///
    /// bound is a way that covers sockets which the program binds before connect(). By default the first of cgroup, preload and
    /// supervise that fits is used.
    #[arg(long, value_name = "WAY", value_parser = ways())]
    via: Option<Ways>,
    /// Print on stderr at the end what was done
    #[arg(long)]
    report: bool,
    /// Write the record as JSON; stdout belongs to the program
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    json: Option<PathBuf>,
    /// Write the record as one self-contained HTML page
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    html: Option<PathBuf>,
    /// Do not name the way on stderr
    ///
    /// Nor say that it leaves bound sockets alone.
    #[arg(long)]
    quiet: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

fn ways() -> impl TypedValueParser<Value = Ways> {
    PossibleValuesParser::new(Way::ALL.map(Way::name).into_iter().chain([Ways::BOUND]))
        .try_map(|name| Ways::named(&name).ok_or_else(|| format!("{name:?} is not a way")))
}

impl RunFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let started = OffsetDateTime::now_utc();
        let via = self.via.unwrap_or_default();
        let run = Run { command: self.command.clone(), via, search: search(via) };
        let is_quiet = self.quiet;
        let name = self.command.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let outcome = run.run(|notice| {
            if !is_quiet {
                output::say(&match notice {
                    Notice::Chosen(choice) => announcement(&name, &choice),
                    Notice::LeftBound { connects, covered } => left_bound(&name, connects, &covered),
                });
            }
        })?;
        let code = exit_code(outcome.end);
        // The exit code is the program's, also if its record cannot be written.
        if let Err(error) = self.write(started, outcome) {
            output::say(&format!("fourtuple: {}", exit::message(&error)));
        }
        Ok(Exit::Program(code))
    }

    fn write(&self, started: OffsetDateTime, outcome: RunOutcome) -> anyhow::Result<()> {
        if !self.report && self.json.is_none() && self.html.is_none() {
            return Ok(());
        }
        let host = output::host(&["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"], &[]);
        let settings = RunSettings {
            command: self.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            via: self.via.and_then(Ways::name).map(str::to_owned),
        };
        let saved =
            Saved::Run(output::record("run", started, host, settings, outcome.validity, outcome.results));
        if self.report {
            output::say_record(&saved);
        }
        if let Some(path) = &self.json {
            save(path, &format!("{}\n", output::json(&saved)?))?;
        }
        if let Some(path) = &self.html {
            save(path, &html::page(std::slice::from_ref(&saved)))?;
        }
        Ok(())
    }
}

/// `fourtuple: curl runs via preload (cgroup: needs CAP_BPF)`.
fn announcement(name: &str, choice: &Choice) -> String {
    let reasons: Vec<String> =
        choice.passed_over.iter().map(|(way, reason)| format!("not {way}: {reason}")).collect();
    let more = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) };
    format!("fourtuple: {name} runs via {}{more}", choice.way.name())
}

/// `fourtuple: squid: 12 connects of sockets that it had bound proceeded unchanged: ...`.
fn left_bound(name: &str, connects: u64, covered: &Result<(), String>) -> String {
    let remedy = match covered {
        Ok(()) => format!("`{} run --via bound` covers sockets bound to port 0", watch::program()),
        Err(reason) => format!("no way covers them: {reason}"),
    };
    let calls = if connects == 1 { "connect" } else { "connects" };
    format!(
        "fourtuple: {name}: {connects} {calls} of sockets that it had bound proceeded unchanged: {remedy}"
    )
}

/// Returns why this kernel does not search a port range port by port. Does not probe for the way `cgroup`, which does not need it.
fn search(via: Ways) -> Result<(), String> {
    if via == Ways::Only(Way::Cgroup) {
        return Ok(());
    }
    match capabilities::probe().map_err(|error| error.to_string())?.local_port_range {
        // Unproven: loopback is down, or no port is free now. Without a linear search, the option changes nothing.
        LocalPortRange::Linear | LocalPortRange::Unproven => Ok(()),
        LocalPortRange::Absent => Err("this kernel lacks IP_LOCAL_PORT_RANGE (Linux 6.3); use --via cgroup".to_owned()),
        _ => Err(
            "with IP_LOCAL_PORT_RANGE this kernel still searches one parity first (before Linux 6.8); use --via cgroup".to_owned(),
        ),
    }
}

/// Returns the exit code of the program; after a signal 128 and its number, as shells do.
fn exit_code(end: End) -> u8 {
    match end {
        End::Exited(code) => code as u8,
        End::Killed(signal) => 128u8.saturating_add(signal as u8),
    }
}
