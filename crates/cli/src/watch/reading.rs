//! Reads snapshots of a network namespace.

use std::env;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange, ProbeError};
use fourtuple_observe::host::namespace;
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_observe::trace::{Survey, SurveyTimes, Window};
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot};
use fourtuple_syscalls::netns;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::output;
use crate::watch::target::{Destination, Namespace};
use crate::watch::trial;

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
pub(super) enum Work {
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
pub(super) fn apart<T: DeserializeOwned>(work: Work) -> Result<T, String> {
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
