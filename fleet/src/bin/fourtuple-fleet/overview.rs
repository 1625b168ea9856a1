//! Commands that every host performs by itself, as one record.

use std::time::Duration;

use clap::{Args, Subcommand};
use fourtuple::ports::PortRange;
use fourtuple_fleet::coordinator::Coordinator;
use fourtuple_fleet::overview::{HostReply, overview};
use fourtuple_fleet::protocol::{MAX_TRACE, Request};
use fourtuple_record::{FleetSettings, Saved, printable};
use time::OffsetDateTime;

use crate::{ConnectFlags, SelectFlags};
use fourtuple_cli::exit::{Exit, UsageError};
use fourtuple_cli::output::{self, Output};
use fourtuple_cli::{serve_flags, stop, units};

/// Time that a host has for its command beside the length of a measurement.
const WAIT: Duration = Duration::from_secs(60);

/// List the agents that answer
#[derive(Debug, Args)]
pub(crate) struct AgentsFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

/// Diagnose all hosts: one table, worst host first
///
/// `doctor` on each host.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    #[command(flatten)]
    common: Common,
}

/// Run an experiment on all hosts
#[derive(Debug, Subcommand)]
pub(crate) enum Lab {
    /// Measure the port search on each host: `lab ports`
    Ports(PortsFlags),
}

#[derive(Debug, Args)]
pub(crate) struct PortsFlags {
    /// Repeats of each strategy
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
    /// Ephemeral range
    ///
    /// In a namespace of its own on each host.
    #[arg(long, value_name = "LOW-HIGH", default_value = "32768-33791")]
    range: PortRange,
    #[command(flatten)]
    common: Common,
}

/// Trace all hosts at the same time
#[derive(Debug, Subcommand)]
pub(crate) enum Trace {
    /// Measure the connects of all programs of each host: `trace connect`
    Connect(ConnectTraceFlags),
}

#[derive(Debug, Args)]
pub(crate) struct ConnectTraceFlags {
    /// Length of the measurement
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = trace_time, allow_hyphen_values = true)]
    time: Duration,
    #[command(flatten)]
    common: Common,
}

fn trace_time(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        time if time > MAX_TRACE => {
            Err(format!("{text:?} is not accepted: expected at most 1h, such as 10s"))
        }
        time => Ok(time),
    }
}

/// Plan the ports of all hosts: one table, slowest host first
///
/// Calibrates the port search of each host; `plan` on each.
#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    /// New connections of a host
    ///
    /// Over all destinations.
    #[arg(long, value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    rate: Option<f64>,
    /// Lifetime of a connection
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = units::duration, allow_hyphen_values = true)]
    hold: Duration,
    /// Source addresses of each host
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    sources: u64,
    /// Destinations (address and port)
    ///
    /// Equally loaded.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    destinations: u64,
    #[command(flatten)]
    common: Common,
}

/// Run a server on each host until its deadline
///
/// Then prints the counts of each. What follows -- is a command line of `serve` with --for. A line on stderr reports the address of each server when it is ready.
/// Ctrl-C stops all servers; they also stop 10 s after this command has been killed.
#[derive(Debug, Args)]
pub(crate) struct FleetServeFlags {
    #[command(flatten)]
    common: Common,
    /// serve PROTOCOL --listen ADDR:PORT --for TIME ...
    #[arg(last = true, required = true, value_name = "serve PROTOCOL ...")]
    command: Vec<String>,
}

#[derive(Debug, Args)]
struct Common {
    #[command(flatten)]
    connect: ConnectFlags,
    #[command(flatten)]
    select: SelectFlags,
    #[command(flatten)]
    output: Output,
}

impl AgentsFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let agents = Coordinator::connect(&self.connect.connection())?.agents()?;
        if self.json {
            output::print_json(&agents)?;
            return Ok(Exit::Fine);
        }
        let rows = agents.iter().map(|agent| {
            let labels: Vec<String> =
                agent.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            [
                agent.name.clone(),
                agent.kernel.clone(),
                agent.cpus.to_string(),
                agent.allow.clone(),
                labels.join(" "),
            ]
        });
        output::print(&table(["host", "kernel", "cpus", "allows", "labels"], rows))?;
        Ok(Exit::Fine)
    }
}

impl DoctorFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        self.common.run("fleet doctor", &Request::Doctor, WAIT)
    }
}

impl Lab {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Lab::Ports(PortsFlags { repeats, range, common }) = self;
        let request = Request::LabPorts { repeats, first: range.low(), last: range.high() };
        common.run("fleet lab ports", &request, 10 * WAIT)
    }
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Trace::Connect(ConnectTraceFlags { time, common }) = self;
        let request = Request::TraceConnect { for_ns: units::nanoseconds(time) };
        common.run("fleet trace connect", &request, time + WAIT)
    }
}

impl PlanFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let PlanFlags { rate, hold, sources, destinations, common } = self;
        let hold_ns = units::nanoseconds(hold);
        let request = Request::Plan { rate_per_s: rate, hold_ns, sources, destinations };
        common.run("fleet plan", &request, 3 * WAIT)
    }
}

impl FleetServeFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let refuse = |why: String| UsageError(format!("'{}': {why}", self.command.join(" ")));
        let settings = serve_flags(&self.command).map_err(refuse)?.for_hosts()?;
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let Common { connect, select, .. } = &self.common;
        let coordinator = Coordinator::connect(&connect.connection())?;
        let replies = coordinator.serve(&select.selection(None), &settings, &stop, |agent, listen| {
            // Written even if stderr is not a terminal: a script waits for these lines. The write fails if the reader is gone.
            output::say(&format!("{}: listening on {listen}", agent.name));
        })?;
        self.common.finish("fleet serve", started, self.command.clone(), replies)
    }
}

impl Common {
    fn run(&self, name: &str, request: &Request, wait: Duration) -> anyhow::Result<Exit> {
        let started = OffsetDateTime::now_utc();
        let coordinator = Coordinator::connect(&self.connect.connection())?;
        let stop = stop::flag()?;
        let replies = coordinator.on_each(&self.select.selection(None), request, wait, &stop)?;
        self.finish(name, started, request.command().unwrap_or_default(), replies)
    }

    fn finish(
        &self,
        name: &str,
        started: OffsetDateTime,
        command: Vec<String>,
        replies: Vec<HostReply>,
    ) -> anyhow::Result<Exit> {
        let (results, validity) = overview(replies);
        let has_findings = results.hosts.iter().any(|host| match &host.record {
            Some(Saved::Doctor(record)) => !record.results.findings.is_empty(),
            _ => false,
        });
        let settings = FleetSettings { labels: self.select.labels(), command };
        let record = output::record(name, started, output::host(&[], &[]), settings, validity, results);
        Ok(match self.output.finish(&Saved::Fleet(record))? {
            Exit::Fine if has_findings => Exit::Findings,
            exit => exit,
        })
    }
}

/// Aligns the columns of a table. Each row has a cell per column.
fn table(columns: [&str; 5], rows: impl Iterator<Item = [String; 5]>) -> String {
    // A line end in a cell would be a row of its own.
    let rows = rows.map(|row| row.map(|cell| printable(&cell)));
    let lines: Vec<[String; 5]> = std::iter::once(columns.map(str::to_owned)).chain(rows).collect();
    let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> =
            line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}
