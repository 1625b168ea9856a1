//! Readings of a network namespace, for `doctor`, `top` and `export`.

mod target;
mod trial;

use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange, ProbeError};
use fourtuple_observe::doctor::{Budget, Cure, Diagnosis, Limits, Place, diagnose_at};
use fourtuple_observe::host::namespace;
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_observe::trace::{Survey, SurveyTimes, Window};
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot, Tuple};
use fourtuple_record::{History, Moment};
use fourtuple_syscalls::netns;
use fourtuple_syscalls::unix_socket::own_user;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::exit::UsageError;
use crate::units::nanoseconds;
use crate::{input, output};
pub(crate) use target::{Destination, Namespace, TargetFlags, destination, network};
pub(crate) use trial::try_cure;

/// Applies all rules. The commands can be pasted by the user of this process, and act on the examined namespace. `try_cure` tries cures
/// that findings propose.
pub(crate) fn diagnose_in(
    namespace: &Namespace,
    snapshot: &Snapshot,
    limits: &Limits,
    try_cure: &dyn Fn(Cure) -> Option<bool>,
) -> Diagnosis {
    let place = Place {
        prefix: namespace.prefix().to_owned(),
        path: namespace.path().to_owned(),
        has_sysctl: &|name| namespace.has_sysctl(name),
        try_cure,
        ..here()
    };
    diagnose_at(snapshot, limits, &place)
}

/// Returns the place of commands for the user of this process, in the network namespace of this process.
pub(crate) fn here() -> Place<'static> {
    Place { program: program(), is_root: own_user() == 0, ..Place::default() }
}

/// Returns this program: its name where each shell and `sudo` finds it, else its path.
pub(crate) fn program() -> String {
    /// `secure_path` of sudoers(5) as distributions have it.
    const PLACES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    const NAME: &str = "fourtuple";
    let Ok(path) = env::current_exe() else { return NAME.to_owned() };
    let is_found = path.file_name().is_some_and(|name| name == NAME)
        && path.parent().is_some_and(|parent| PLACES.iter().any(|place| parent == Path::new(place)));
    if is_found { NAME.to_owned() } else { path.display().to_string() }
}

/// Returns the host with the sysctls of the namespace, which the snapshot has.
pub(crate) fn host(snapshot: &Snapshot) -> fourtuple_record::Host {
    let search = snapshot.search.seen().ok();
    let capabilities: Vec<(&str, &str)> =
        search.map(|search| ("ip_local_port_range", search.option.as_str())).into_iter().collect();
    let mut host = output::host(&[], &capabilities);
    host.sysctls = BTreeMap::clone(&snapshot.sysctls);
    host
}

// The readings of the last minutes.

/// The number of readings that are kept: ten minutes at one per second.
const KEPT: usize = 600;
/// The number of tuples in a chart.
const CHARTED: usize = 5;

/// A reading, reduced to what charts show.
#[derive(Clone, Debug)]
struct Reading {
    at: Duration,
    /// Ports in use by tuple, the most first.
    tuples: Vec<(String, u32)>,
    time_wait: u64,
    queued: u64,
}

/// The readings of the last minutes.
#[derive(Debug)]
pub(crate) struct Past {
    began: Instant,
    readings: VecDeque<Reading>,
}

impl Past {
    pub(crate) fn new() -> Past {
        Past { began: Instant::now(), readings: VecDeque::with_capacity(KEPT) }
    }

    pub(crate) fn add(&mut self, snapshot: &Snapshot) {
        if self.readings.len() == KEPT {
            self.readings.pop_front();
        }
        let connections = snapshot.connections.seen().ok();
        let tuples = connections.into_iter().flat_map(|connections| &connections.tuples).take(4 * CHARTED);
        let queued = match &snapshot.listeners {
            Part::Seen(listeners) => listeners.iter().map(|listener| u64::from(listener.waiting)).sum(),
            Part::Hidden(_) => 0,
        };
        self.readings.push_back(Reading {
            at: self.began.elapsed(),
            tuples: tuples.map(|tuple| (tuple.to_string(), tuple.in_use)).collect(),
            time_wait: connections
                .and_then(|connections| connections.states.get("time-wait").copied())
                .unwrap_or(0),
            queued,
        });
    }

    /// Returns the readings with the tuples that have the most ports in use now.
    pub(crate) fn history(&self) -> History {
        let latest = self.readings.back().into_iter().flat_map(|reading| &reading.tuples);
        let tuples: Vec<String> = latest.take(CHARTED).map(|(name, _)| name.clone()).collect();
        let in_use = |reading: &Reading, wanted: &String| {
            reading.tuples.iter().find(|(name, _)| name == wanted).map_or(0, |(_, in_use)| *in_use)
        };
        let moment = |reading: &Reading| Moment {
            at_ns: nanoseconds(reading.at),
            in_use: tuples.iter().map(|tuple| in_use(reading, tuple)).collect(),
            time_wait: reading.time_wait,
            queued: reading.queued,
        };
        History { moments: self.readings.iter().map(moment).collect(), tuples: tuples.clone() }
    }
}

/// Returns the time in seconds until a tuple has no free port at the present growth; `None` without growth.
pub(crate) fn time_to_exhaustion(tuple: &Tuple, budget: &Budget) -> Option<f64> {
    (tuple.growth_per_s > 0.0).then(|| f64::from(budget.free()) / tuple.growth_per_s)
}

// The file of `--thresholds`.

/// Thresholds that the user has set.
#[derive(Debug, Default)]
pub(crate) struct Thresholds {
    pub(crate) limits: Limits,
    /// The thresholds as written, by rule.
    pub(crate) set: BTreeMap<String, f64>,
}

/// Reads a file of thresholds; without a file, all rules have their defaults.
pub(crate) fn read_thresholds(path: Option<&Path>) -> Result<Thresholds, UsageError> {
    let Some(path) = path else { return Ok(Thresholds::default()) };
    let refuse = |why: &dyn std::fmt::Display| UsageError(format!("--thresholds {}: {why}", path.display()));
    let text = input::settings(path).map_err(|error| refuse(&error))?;
    parse(&text).map_err(|why| refuse(&why))
}

fn parse(text: &str) -> Result<Thresholds, String> {
    let set: BTreeMap<String, f64> = toml::from_str(text).map_err(|error| {
        format!("{}; expected lines of a rule and a number, such as P01 = 80", error.message())
    })?;
    let mut limits = Limits::default();
    for (id, value) in &set {
        limits.set(id, *value).map_err(|error| error.to_string())?;
    }
    Ok(Thresholds { limits, set })
}

/// The share of a processor for the pass over all sockets in a live view.
pub(crate) const SHARE: f64 = 0.01;

/// The source of snapshots of one namespace. It stays on the thread that created it, which is in the namespace.
#[derive(Debug)]
pub(crate) struct Watch {
    reader: Reader,
    search: Part<PortSearch>,
    survey: Survey,
}

impl Watch {
    /// Probes the port search, attaches the traces if `trace`, and takes the first of many readings. `share`: of a processor, for the passes
    /// over all sockets.
    pub(crate) fn begin(namespace: &Namespace, trace: bool, share: f64) -> Watch {
        let mut reader = Reader::new(Path::new("/")).limited_to(share);
        let search = search();
        // After the probe of the search, whose connects would count.
        let survey = attach(namespace, trace);
        reader.read();
        Watch { reader, search, survey }
    }

    /// Returns the longest time until the next [`Watch::poll`]: often enough for a signal, and for the traces if there are any.
    pub(crate) fn poll_interval(&self) -> Duration {
        if self.survey.is_attached() { Survey::POLL_INTERVAL } else { Duration::from_millis(200) }
    }

    /// Drains what the kernel keeps for a short time only.
    pub(crate) fn poll(&mut self) {
        self.survey.poll();
    }

    /// Returns the durations of all traced events since the start.
    pub(crate) fn times(&mut self) -> SurveyTimes {
        self.survey.times()
    }

    /// Returns a snapshot with the events since the previous reading.
    pub(crate) fn read(&mut self) -> Snapshot {
        let window = self.survey.window();
        Snapshot { search: self.search.clone(), ..with_traces(&mut self.reader, window) }
    }
}

fn attach(namespace: &Namespace, trace: bool) -> Survey {
    if trace { Survey::attach(namespace.inode) } else { Survey::absent("--no-trace") }
}

/// Reads the namespace, and adds what was traced since the reading before.
fn with_traces(reader: &mut Reader, window: Window) -> Snapshot {
    let snapshot = reader.read();
    let Window { connects, accepts, locks, mut failures } = window;
    if let Ok(failures) = &mut failures {
        reader.look_up(&mut failures.calls);
    }
    Snapshot {
        traced: connects.into(),
        accepts: accepts.into(),
        locks: locks.into(),
        failures: failures.into(),
        ..snapshot
    }
}

/// Time between the last look for DNS queries and the end: a resolver waits longer for an answer (glibc: 5 s).
const LAST_LOOK: Duration = Duration::from_secs(1);

/// Reads the namespace twice and traces in between. Returns the snapshot and the time between the readings, which is shorter than
/// `time` if `stop` was set.
pub(crate) fn once(
    namespace: &Namespace,
    time: Duration,
    to: Option<&Destination>,
    trace: bool,
    stop: &AtomicBool,
) -> anyhow::Result<(Snapshot, Duration)> {
    namespace.within(|| {
        let search = search();
        // After the probe of the search, whose connects would count.
        let mut survey = attach(namespace, trace);
        let reader = Reader::new(Path::new("/"));
        let mut reader = match to {
            Some(to) => reader.only(to.address(), to.port()),
            None => reader,
        };
        reader.read();
        let began = Instant::now();
        let mut look_at = time.checked_sub(LAST_LOOK).filter(|first| *first >= LAST_LOOK);
        while began.elapsed() < time && !stop.load(Ordering::Relaxed) {
            survey.poll();
            if look_at.take_if(|at| *at <= began.elapsed()).is_some() {
                reader.look_for_queries();
            }
            thread::sleep(Survey::POLL_INTERVAL.min(time.saturating_sub(began.elapsed())));
        }
        let elapsed = began.elapsed();
        let window = survey.finish();
        let is_of_host = namespace::is_of_host(namespace.inode);
        let other_namespaces = if is_of_host { namespace::others(namespace.inode).len() as u32 } else { 0 };
        let snapshot = Snapshot { search, other_namespaces, ..with_traces(&mut reader, window) };
        Ok((snapshot, elapsed))
    })
}

/// Probes the search in a network namespace of its own, so that the probe leaves no trace in the namespace under examination and does
/// not depend on its free ports.
fn search() -> Part<PortSearch> {
    apart(Work::Search).into()
}

/// Work in a network namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// The probe of the port search.
    Search,
    /// The trial of net.ipv4.tcp_tw_reuse.
    Reuse,
    /// The trial of a wider range.
    Range,
}

impl Work {
    const ALL: [Work; 3] = [Work::Search, Work::Reuse, Work::Range];

    /// Returns the argument with which this program does the work for itself. It is not a subcommand, because pages and completions would
    /// list it.
    fn argument(self) -> &'static str {
        match self {
            Work::Search => "probe-port-search",
            Work::Reuse => "try-reuse",
            Work::Range => "try-range",
        }
    }

    /// Does the work in the network namespace of this thread, and returns the result as JSON.
    fn here(self) -> Result<Value, String> {
        let json = match self {
            Work::Search => serde_json::to_value(probe()?),
            Work::Reuse => serde_json::to_value(trial::reuse(true)?),
            Work::Range => serde_json::to_value(trial::range()?),
        };
        json.map_err(|error| error.to_string())
    }
}

/// Does work in a network namespace made for it.
fn apart<T: DeserializeOwned>(work: Work) -> Result<T, String> {
    let thread = thread::Builder::new().name("probe".to_owned()).spawn(move || match netns::enter_new() {
        Ok(()) => work.here(),
        // A thread cannot enter a user namespace, which gives the right to make the other one.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => in_child(work),
        Err(error) => Err(no_namespace(&error)),
    });
    let done = thread
        .map_err(|error| format!("cannot start a thread: {error}"))
        .and_then(|thread| thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload)));
    serde_json::from_value(done?).map_err(|error| error.to_string())
}

fn no_namespace(error: &io::Error) -> String {
    format!("the probe needs a network namespace of its own: {}", fourtuple_syscalls::errno_name(error))
}

/// Probes the search in the network namespace of this thread.
fn probe() -> Result<PortSearch, String> {
    let failed = |error: ProbeError| error.to_string();
    let name = |found: LocalPortRange| match found {
        LocalPortRange::Unproven => Err("the probe could not connect on loopback".to_owned()),
        found => Ok(found.name().to_owned()),
    };
    Ok(PortSearch {
        default: name(capabilities::probe_default_search().map_err(failed)?)?,
        option: name(capabilities::probe().map_err(failed)?.local_port_range)?,
    })
}

/// Does work in a child process, as root of a user namespace.
fn in_child(work: Work) -> Result<Value, String> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(work.argument()).stderr(Stdio::null());
    netns::start_in_new(&mut command);
    let output = command.output().map_err(|error| no_namespace(&error))?;
    serde_json::from_slice(&output.stdout).map_err(|error| format!("the probe has failed: {error}"))?
}

/// Does work if the first argument says so, and writes the result for [`in_child`].
pub(crate) fn probe_if_requested() -> bool {
    let argument = env::args_os().nth(1);
    let work =
        Work::ALL.into_iter().find(|work| argument.as_ref().is_some_and(|text| text == work.argument()));
    if let Some(work) = work {
        // The work changes the namespace of this thread, which is not new if a user has typed the argument.
        let done = netns::enter_new().map_err(|error| no_namespace(&error)).and_then(|()| work.here());
        // The parent reports a result that it cannot read.
        let _ = output::print_json(&done);
    }
    work.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_needs_a_rule_and_a_number() {
        assert_eq!(parse("P01 = 80\n").unwrap().set, [("P01".to_owned(), 80.0)].into());
        for (text, why) in
            [("X99 = 1", "no such rule"), ("P01 = \"high\"", "such as P01"), ("P01 = -1", "positive")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
