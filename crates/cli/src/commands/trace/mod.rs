mod accept;
mod connect;
mod locks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use fourtuple_observe::doctor::{Limits, causes, diagnose};
use fourtuple_observe::host::cgroup;
use fourtuple_observe::host::namespace::{self, is_initial};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_observe::trace::{Folded, Instrument, Progress, Protocol, Results, Tier};
use fourtuple_record::snapshot::{FailedCall, Failures, Part, Snapshot};
use fourtuple_record::{Record, TraceHeat, TraceSymptom};
use fourtuple_report::flame::{self, Caption};
use fourtuple_report::terminal;
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::line::Line;
use crate::output::{self, Output};
use crate::save::save;
use crate::stop;
use crate::watch::{TargetFlags, network};

/// Trace where connect(), accept() and locks of programs spend time
///
/// The programs run on, and are not changed.
#[derive(Debug, Args)]
pub(crate) struct Trace {
    #[command(subcommand)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum Target {
    Accept(accept::AcceptFlags),
    Connect(connect::ConnectFlags),
    Locks(locks::LocksFlags),
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.target {
            Target::Accept(flags) => flags.run(),
            Target::Connect(flags) => flags.run(),
            Target::Locks(flags) => flags.run(),
        }
    }
}

// `--flame FILE`, which the trace commands share.

/// Writes the flame graph of the stacks to a file. Without stacks it writes no file but one line on stderr.
fn write_flame(
    path: &Path,
    folded: &[(String, u64)],
    caption: &Caption<'_>,
    output: &Output,
) -> anyhow::Result<()> {
    let Some(svg) = flame::graph(folded, caption) else {
        output::say(&format!("no stacks for a flame graph: {} was not written", path.display()));
        return Ok(());
    };
    save(path, &svg)?;
    if !output.json && !output.quiet {
        output::say(&format!("wrote {}", path.display()));
    }
    Ok(())
}

// Runs an instrument: signals, the ready line, the live line and the record.

/// Texts and sysctls that differ between traces.
struct Description<'a> {
    /// The command of the record: `trace connect`.
    command: &'a str,
    /// The object of the ready line: `connect()`.
    target: &'a str,
    /// Sysctls of the host that the record contains.
    sysctls: &'a [&'a str],
}

/// Traces until the end of `--for` or a signal, and shows progress on the live line with `show`. Returns the record and
/// the stacks for a flame graph.
///
/// The ready line goes to stderr also when stderr is not a terminal, because scripts wait for it.
fn run_instrument<I: Instrument, S>(
    description: &Description<'_>,
    instrument: &I,
    settings: S,
    output: &Output,
    mut show: impl FnMut(&Line, &Progress<I>),
) -> anyhow::Result<(Record<S, Results<I>>, Folded)> {
    let stop = stop::flag()?;
    let started = OffsetDateTime::now_utc();
    let line = Line::new(output.quiet);
    let attached = || {
        if !output.quiet {
            output::say(&format!("tracing {}", description.target));
        }
    };
    let outcome = instrument.run(&stop, attached, |progress| {
        if line.is_visible() {
            show(&line, progress);
        }
    })?;
    line.finish();
    let host = output::host(description.sysctls, &[]);
    let record =
        output::record(description.command, started, host, settings, outcome.validity, outcome.results);
    Ok((record, outcome.folded))
}

/// Number of columns of 200 ms each.
const COLUMNS: usize = 120;
const COLUMN_NS: u64 = 200_000_000;

/// A heat map of the last 24 seconds, for the live display.
#[derive(Default)]
struct LiveHeat {
    seen: BTreeMap<u64, u64>,
    columns: VecDeque<BTreeMap<u64, u64>>,
}

impl LiveHeat {
    /// Appends a column with the searches since the previous call, and renders the map. `steps` is the histogram since the
    /// start.
    fn next(&mut self, steps: &[(u64, u64)]) -> String {
        let column = steps.iter().map(|&(from_ns, number)| {
            let seen = self.seen.insert(from_ns, number).unwrap_or(0);
            (from_ns, number.saturating_sub(seen))
        });
        let column = column.collect();
        self.columns.push_back(column);
        if self.columns.len() > COLUMNS {
            self.columns.pop_front();
        }
        terminal::moving_heat(&self.heat(), output::terminal_width(), output::has_colour(&std::io::stderr()))
    }

    /// Builds a map with a row for each step that ever had a search, so that rows stay in place.
    fn heat(&self) -> TraceHeat {
        let from_ns: Vec<u64> = self.seen.keys().copied().collect();
        let column = |column: &BTreeMap<u64, u64>| {
            from_ns.iter().map(|from_ns| column.get(from_ns).copied().unwrap_or(0)).collect()
        };
        TraceHeat { column_ns: COLUMN_NS, columns: self.columns.iter().map(column).collect(), from_ns }
    }
}

// Values of the filter flags and of `--tier`, which the trace commands share.

/// The network namespace of a trace.
#[derive(Debug, Args)]
struct NetworkFlags {
    /// Network namespace by name, file or process
    ///
    /// The default is all; in a container or under nsenter its own, unless --pid or --cgroup is given.
    #[arg(long, value_name = "NETNS", value_parser = network)]
    netns: Option<PathBuf>,
}

/// The network namespace of this process.
const OWN: &str = "/proc/self/ns/net";

impl NetworkFlags {
    /// Sets the default: a command that is typed in a container or under `nsenter` is about its network namespace, unless it names a process or
    /// a cgroup.
    fn or_own(&mut self, process: Option<u32>, cgroup: Option<&Path>) {
        if self.netns.is_none() && process.is_none() && cgroup.is_none() && !is_initial() {
            self.netns = Some(OWN.into());
        }
    }

    /// Returns the path of the namespace for a record.
    fn path(&self) -> Option<String> {
        self.netns.as_ref().map(|path| path.display().to_string())
    }

    /// Runs a trace with the inode of the namespace, `None` without the flag. The trace is in the namespace, so that it reads the
    /// namespace's counters and sysctls.
    fn within<T: Send>(
        &self,
        trace: impl FnOnce(Option<u32>) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let Some(path) = self.netns.clone() else { return trace(None) };
        let namespace = TargetFlags { pid: None, netns: Some(path), container: None }.open()?;
        namespace.within(|| trace(Some(namespace.inode)))
    }
}

/// Parses `--comm`.
fn comm(text: &str) -> Result<String, String> {
    match text.len() {
        1..=15 => Ok(text.to_owned()),
        _ => Err(format!(
            "{text:?} is not the name of a process or thread: expected 1 to 15 bytes, as in /proc/PID/comm"
        )),
    }
}

/// Parses an IP address.
fn address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an address: expected one such as 192.0.2.1 or 2001:db8::1"))
}

/// Parses `--protocol`.
fn protocol(text: &str) -> Result<Protocol, String> {
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .find(|protocol| protocol.name() == text)
        .ok_or_else(|| format!("{text:?} is not a protocol: expected tcp or udp"))
}

/// A value of `--tier`; `None` is `auto`.
#[derive(Clone, Copy, Debug)]
struct TierChoice(Option<Tier>);

/// Parses `--tier`.
fn tier(text: &str) -> Result<TierChoice, String> {
    if text == "auto" {
        return Ok(TierChoice(None));
    }
    let known = Tier::ALL.into_iter().find(|tier| tier.name() == text);
    known.map(|tier| TierChoice(Some(tier))).ok_or_else(|| {
        format!("{text:?} is not a tier: expected auto, {}", Tier::ALL.map(Tier::name).join(", "))
    })
}

/// Checks that the process of `--pid` exists and is not a thread.
fn process(number: u32) -> anyhow::Result<u32> {
    let refuse = |why: &str| UsageError(format!("invalid value '{number}' for '--pid': {why}"));
    let Ok(status) = fs::read_to_string(format!("/proc/{number}/status")) else {
        // Without procfs the process cannot be checked.
        let is_known = Path::new("/proc/self/status").exists();
        return if is_known { Err(refuse("there is no such process").into()) } else { Ok(number) };
    };
    // /proc/TID exists for a thread as well, although a listing of /proc omits it.
    let mut lines = status.lines();
    let process: Option<u32> = lines.find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    match process {
        Some(process) if process != number => {
            Err(refuse(&format!("it is a thread of process {process}")).into())
        }
        _ => Ok(number),
    }
}

/// Returns the id of a cgroup: the inode of its directory.
fn cgroup_id(path: &Path) -> Result<u64, UsageError> {
    let directory = cgroup::directory(path)
        .map_err(|why| UsageError(format!("invalid value '{}' for '--cgroup': {why}", path.display())))?;
    Ok(directory.ino())
}

// The causes of failed calls, each in the situation of its network namespace.

/// Most namespaces that are read; calls in further ones have the causes of the errno in general.
const NAMESPACES: usize = 8;

/// The network namespace of the calling thread at the start of a trace.
struct Before {
    /// Inode.
    namespace: Option<u32>,
    reader: Reader,
}

impl Before {
    fn read() -> Before {
        let mut reader = Reader::new(Path::new("/"));
        reader.read();
        Before { namespace: namespace::of_this_thread(), reader }
    }

    /// Adds the causes to the calls, as their namespaces are now, and returns the other symptoms since the start. A finding that explains calls is
    /// their cause.
    fn explain(mut self, calls: &mut Part<Failures>) -> Part<Vec<TraceSymptom>> {
        let mut snapshot = self.reader.read();
        let calls = match calls {
            Part::Seen(Failures { calls, .. }) => calls.as_mut_slice(),
            _ => &mut [],
        };
        let namespace = self.namespace;
        let is_own = |call: &FailedCall| Some(call.namespace) == namespace;
        self.reader.look_up(calls.iter_mut().filter(|call| is_own(call)));
        let own = calls.iter().filter(|call| is_own(call)).cloned().collect();
        snapshot.failures = Part::Seen(Failures { calls: own, ..Failures::default() });
        let diagnosis = diagnose(&snapshot, &Limits::default());
        let namespaces: BTreeSet<u32> = calls.iter().map(|call| call.namespace).collect();
        for (at, namespace) in namespaces.into_iter().enumerate() {
            let mut own: Vec<_> = calls.iter_mut().filter(|call| call.namespace == namespace).collect();
            let other = (Some(namespace) != self.namespace).then(|| {
                let processes: Vec<u32> = own.iter().map(|call| call.owner.pid).collect();
                let mut processes = processes.into_iter().filter(|_| at < NAMESPACES);
                processes.find_map(|process| foreign(process, namespace, &mut own)).unwrap_or_default()
            });
            for call in own {
                let findings = diagnosis.explained.iter().filter(|(explained, _)| *explained == *call);
                let found: Vec<String> =
                    findings.map(|(_, verdict)| format!("the cause here: {verdict}")).collect();
                let judged = || causes(other.as_ref().unwrap_or(&snapshot), call);
                call.causes = if found.is_empty() { judged() } else { found };
            }
        }
        snapshot.counters.seen().map(|_| diagnosis.symptoms).into()
    }
}

/// Reads the namespace of the calling thread, and adds what it has at the addresses of the calls.
fn read(calls: &mut [&mut FailedCall]) -> Snapshot {
    let mut reader = Reader::new(Path::new("/"));
    let snapshot = reader.read();
    reader.look_up(calls.iter_mut().map(|call| &mut **call));
    snapshot
}

/// Returns the namespace of a process, if the process lives and still is in it, and adds what it has at the addresses of the calls.
fn foreign(process: u32, namespace: u32, calls: &mut [&mut FailedCall]) -> Option<Snapshot> {
    let target = TargetFlags { pid: Some(process), netns: None, container: None }.open().ok()?;
    if target.inode == namespace { target.within(|| Ok(read(calls))).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_has_new_searches_and_rows_stay() {
        let mut live = LiveHeat::default();
        live.next(&[(1_000, 5)]);
        live.next(&[(1_000, 7), (100_000, 1)]);
        live.next(&[(1_000, 7), (100_000, 4)]);
        let heat = live.heat();
        assert_eq!(heat.from_ns, [1_000, 100_000]);
        assert_eq!(heat.columns, [[5, 0], [2, 1], [0, 3]]);
        (0..COLUMNS).for_each(|_| drop(live.next(&[(1_000, 7), (100_000, 4)])));
        let heat = live.heat();
        assert_eq!((heat.columns.len(), heat.columns.iter().flatten().sum::<u64>()), (COLUMNS, 0));
        assert_eq!(heat.from_ns.len(), 2, "a step keeps its row");
    }
}
