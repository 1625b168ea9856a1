//! Commands that every host performs by itself, as one table.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use clap::{Args, Subcommand};
use fourtuple::ports::PortRange;
use fourtuple_fleet::coordinator::{Coordinator, HostReply, Selection};
use fourtuple_fleet::protocol::Request;
use fourtuple_record::format_duration;
use serde_json::{Value, json};

use crate::commands::fleet::connect::{ConnectFlags, SelectFlags};
use crate::commands::serve::ServeFlags;
use crate::exit::{Exit, UsageError};
use crate::{output, stop, units};

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

/// Diagnose all hosts: `doctor` on each, one table, worst host first
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
    /// Port range of the experiment, in a namespace of its own on each host
    #[arg(long, value_name = "FIRST-LAST", default_value = "32768-33791")]
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
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = units::duration, allow_hyphen_values = true)]
    time: Duration,
    #[command(flatten)]
    common: Common,
}

/// Parses a command line of `serve`.
pub(crate) type ParseServe = fn(&[String]) -> Result<Box<ServeFlags>, String>;

/// Calibrate the port search of each host and plan its ports: `plan` on each, one table, slowest host first
#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    /// New connections per second of each host over all destinations
    #[arg(long, value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    rate: Option<f64>,
    /// Lifetime of a connection
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = units::duration, allow_hyphen_values = true)]
    hold: Duration,
    /// Source addresses of each host
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    sources: u64,
    /// Destinations (address and port), equally loaded
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    destinations: u64,
    #[command(flatten)]
    common: Common,
}

/// Run a server on each host until its deadline, then print the counts of each
///
/// What follows -- is a command line of `serve` with --for. A line on stderr reports the address of each server when it is ready.
/// Ctrl-C stops all servers; they also stop 10 s after this command has been killed.
#[derive(Debug, Args)]
pub(crate) struct FleetServeFlags {
    #[command(flatten)]
    common: Common,
    /// The command: serve PROTOCOL --listen ADDR --for TIME ...
    #[arg(last = true, required = true, value_name = "serve PROTOCOL ...")]
    command: Vec<String>,
}

#[derive(Debug, Args)]
struct Common {
    #[command(flatten)]
    connect: ConnectFlags,
    #[command(flatten)]
    select: SelectFlags,
    /// Print the records of all hosts as JSON
    #[arg(long)]
    json: bool,
}

/// A row of the table: a larger badness is worse.
struct Row {
    name: String,
    kernel: String,
    badness: f64,
    cells: Vec<String>,
}

/// The columns that the table shows of the records of one command.
struct View {
    columns: &'static [&'static str],
    /// Returns the badness and the cells of a record.
    row: fn(&Value) -> (f64, Vec<String>),
}

impl AgentsFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let agents = Coordinator::connect(&self.connect.connection())?.agents()?;
        if self.json {
            output::print(&format!("{}\n", serde_json::to_string(&agents)?))?;
            return Ok(Exit::Fine);
        }
        let rows = agents.iter().map(|agent| {
            let labels: Vec<String> =
                agent.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            vec![
                agent.name.clone(),
                agent.kernel.clone(),
                agent.cpus.to_string(),
                agent.allow.clone(),
                labels.join(" "),
            ]
        });
        output::print(&table(&["host", "kernel", "cpus", "allows", "labels"], rows.collect()))?;
        Ok(Exit::Fine)
    }
}

impl DoctorFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let view = View { columns: &["worst", "findings", "of them"], row: doctor_row };
        self.common.run(&Request::Doctor, WAIT, &view)
    }
}

impl Lab {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Lab::Ports(PortsFlags { repeats, range, common }) = self;
        let request = Request::LabPorts { repeats, first: range.low(), last: range.high() };
        let view = View { columns: &["strategy", "p99 when full"], row: ports_row };
        common.run(&request, 10 * WAIT, &view)
    }
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Trace::Connect(ConnectTraceFlags { time, common }) = self;
        let view = View { columns: &["searches", "search p99", "handshake p99", "failed"], row: trace_row };
        let request = Request::TraceConnect { for_ns: units::nanoseconds(time) };
        common.run(&request, time + WAIT, &view)
    }
}

impl PlanFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let PlanFlags { rate, hold, sources, destinations, common } = self;
        let hold_ns = units::nanoseconds(hold);
        let request = Request::Plan { rate_per_s: rate, hold_ns, sources, destinations };
        let view = View {
            columns: &["range", "connect, empty", "connect, full", "ports run out", "sources needed"],
            row: plan_row,
        };
        common.run(&request, 3 * WAIT, &view)
    }
}

impl FleetServeFlags {
    pub(crate) fn run(self, parse: ParseServe) -> anyhow::Result<Exit> {
        let refuse = |why: String| UsageError(format!("'{}': {why}", self.command.join(" ")));
        let settings = parse(&self.command).map_err(refuse)?.for_hosts()?;
        let stop = stop::flag()?;
        let Common { connect, select, .. } = &self.common;
        let coordinator = Coordinator::connect(&connect.connection())?;
        let replies = coordinator.serve(&select.selection(None), &settings, &stop, |agent, listen| {
            // Written even if stderr is no terminal: a script waits for these lines. The write fails if the reader is gone.
            let _ = writeln!(io::stderr(), "{}: listening on {listen}", agent.name);
        })?;
        let view =
            View { columns: &["listened on", "accepted", "requests", "rate", "failed"], row: serve_row };
        self.common.show(&replies, &view)
    }
}

impl Common {
    fn run(&self, request: &Request, wait: Duration, view: &View) -> anyhow::Result<Exit> {
        let coordinator = Coordinator::connect(&self.connect.connection())?;
        let selection: Selection = self.select.selection(None);
        self.show(&coordinator.on_each(&selection, request, wait)?, view)
    }

    fn show(&self, replies: &[HostReply], view: &View) -> anyhow::Result<Exit> {
        let failed = replies.iter().any(|(_, reply)| reply.is_err());
        if self.json {
            let hosts: Vec<Value> = replies
                .iter()
                .map(|(agent, reply)| match reply {
                    Ok(record) => json!({ "name": agent.name, "kernel": agent.kernel, "record": record }),
                    Err(reason) => json!({ "name": agent.name, "kernel": agent.kernel, "failed": reason }),
                })
                .collect();
            let all = json!({ "hosts": hosts, "differences": differences(replies) });
            output::print(&format!("{all}\n"))?;
        } else {
            output::print(&text(replies, view))?;
        }
        let found = replies.iter().any(|(_, reply)| reply.as_ref().is_ok_and(has_findings));
        Ok(match (failed, found) {
            (true, _) => Exit::NotValid,
            (false, true) => Exit::Findings,
            (false, false) => Exit::Fine,
        })
    }
}

fn has_findings(record: &Value) -> bool {
    record["command"] == "doctor"
        && record["results"]["findings"].as_array().is_some_and(|list| !list.is_empty())
}

/// Returns the table, the worst host first, and the differences between the hosts.
fn text(replies: &[HostReply], view: &View) -> String {
    let mut rows: Vec<Row> = replies
        .iter()
        .map(|(agent, reply)| {
            let (badness, cells) = match reply {
                Ok(record) => (view.row)(record),
                Err(reason) => (f64::INFINITY, vec![reason.lines().collect::<Vec<_>>().join(" ")]),
            };
            Row { name: agent.name.clone(), kernel: agent.kernel.clone(), badness, cells }
        })
        .collect();
    rows.sort_by(|one, two| two.badness.total_cmp(&one.badness).then_with(|| one.name.cmp(&two.name)));
    let columns: Vec<&str> = ["host", "kernel"].iter().chain(view.columns).copied().collect();
    let lines = rows.iter().map(|row| {
        [row.name.clone(), row.kernel.clone()].into_iter().chain(row.cells.iter().cloned()).collect()
    });
    let mut text = table(&columns, lines.collect());
    for difference in differences(replies) {
        text.push_str(&format!("{difference}\n"));
    }
    text
}

/// Names the kernels that differ, and the findings that some hosts have and others do not.
fn differences(replies: &[HostReply]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut kernels: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (agent, _) in replies {
        kernels.entry(&agent.kernel).or_default().push(&agent.name);
    }
    if kernels.len() > 1 {
        let parts: Vec<String> =
            kernels.iter().map(|(kernel, hosts)| format!("{kernel} on {}", hosts.join(", "))).collect();
        lines.push(format!("The kernels differ: {}.", parts.join("; ")));
    }
    let mut findings: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (agent, reply) in replies {
        let found = reply.as_ref().ok().and_then(|record| record["results"]["findings"].as_array());
        for id in found.into_iter().flatten().filter_map(|finding| finding["id"].as_str()) {
            let hosts = findings.entry(id.to_owned()).or_default();
            if hosts.last() != Some(&agent.name.as_str()) {
                hosts.push(&agent.name);
            }
        }
    }
    for (id, hosts) in findings.iter().filter(|(_, hosts)| hosts.len() < replies.len()) {
        lines.push(format!("{id} on {} only.", hosts.join(", ")));
    }
    lines
}

fn doctor_row(record: &Value) -> (f64, Vec<String>) {
    let findings = record["results"]["findings"].as_array().map_or(&[][..], Vec::as_slice);
    let rank = |finding: &Value| match finding["severity"].as_str() {
        Some("critical") => 3.0,
        Some("warning") => 2.0,
        _ => 1.0,
    };
    let worst = findings.iter().map(rank).fold(0.0, f64::max);
    let badness = worst * 1e6 + findings.len() as f64;
    let word = findings.iter().max_by(|one, two| rank(one).total_cmp(&rank(two)));
    let word = word.and_then(|finding| finding["severity"].as_str()).unwrap_or("fine");
    let ids: Vec<&str> = findings.iter().filter_map(|finding| finding["id"].as_str()).collect();
    (badness, vec![word.to_owned(), findings.len().to_string(), ids.join(" ")])
}

fn ports_row(record: &Value) -> (f64, Vec<String>) {
    let strategies = record["results"]["strategies"].as_array().map_or(&[][..], Vec::as_slice);
    let p99 = |strategy: &Value| strategy["connect_ns"]["all"]["p99"].as_f64().unwrap_or(0.0);
    let Some(worst) = strategies.iter().max_by(|one, two| p99(one).total_cmp(&p99(two))) else {
        return (0.0, vec!["none".to_owned(), String::new()]);
    };
    let name = worst["strategy"].as_str().unwrap_or("").to_owned();
    (p99(worst), vec![name, format_duration(p99(worst) as u64)])
}

fn trace_row(record: &Value) -> (f64, Vec<String>) {
    let results = &record["results"];
    let time = |field: &str| results[field]["p99"].as_u64().unwrap_or(0);
    let number = |field: &str| results[field].as_u64().unwrap_or(0).to_string();
    let cells = vec![
        number("searches"),
        format_duration(time("search_ns")),
        format_duration(time("handshake_ns")),
        number("failed"),
    ];
    (time("search_ns") as f64, cells)
}

fn plan_row(record: &Value) -> (f64, Vec<String>) {
    let (settings, results) = (&record["settings"], &record["results"]);
    let steps = results["by_fill"].as_array().map_or(&[][..], Vec::as_slice);
    let mean = |step: Option<&Value>| step.and_then(|step| step["mean_ns"].as_u64()).unwrap_or(0);
    let (empty, full) = (mean(steps.first()), mean(steps.last()));
    let out = results["exhausted_after_ns"].as_u64();
    let cells = vec![
        format!("{}-{}", settings["low"], settings["high"]),
        format_duration(empty),
        format_duration(full),
        out.map_or("never".to_owned(), |after| format!("after {}", format_duration(after))),
        results["sources_needed"].to_string(),
    ];
    (full as f64, cells)
}

fn serve_row(record: &Value) -> (f64, Vec<String>) {
    let results = &record["results"];
    let workers = results["workers"].as_array().map_or(&[][..], Vec::as_slice);
    let sum = |field: &str| workers.iter().filter_map(|worker| worker[field].as_u64()).sum::<u64>();
    let errors =
        workers.iter().filter_map(|worker| worker["errors"].as_object()).flat_map(|errors| errors.values());
    let failed = errors.filter_map(Value::as_u64).sum::<u64>();
    let cells = vec![
        results["listen"].as_str().unwrap_or("").to_owned(),
        sum("accepted").to_string(),
        sum("requests").to_string(),
        format!("{:.0}/s", results["requests_per_s"].as_f64().unwrap_or(0.0)),
        failed.to_string(),
    ];
    (failed as f64, cells)
}

/// Aligns the columns of a table.
fn table(columns: &[&str], rows: Vec<Vec<String>>) -> String {
    let header = columns.iter().map(|column| (*column).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let width = |at: usize| {
        // The reason of a host without a record is as long as it is.
        let cells = lines.iter().filter(|line| at + 1 < line.len() || line.len() == columns.len());
        let cells = cells.filter_map(|line| line.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> = line
            .iter()
            .enumerate()
            .map(|(at, cell)| format!("{cell:<width$}", width = widths.get(at).copied().unwrap_or(0)))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}
