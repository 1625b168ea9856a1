use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::fix_ports::{
    Destination, DestinationFilter, FixCounters, FixPortsSettings, FixTuple, FixTupleKey, LeftAlone, SOURCES,
};
use fourtuple_bpf::{BpfError, FixPorts};
use fourtuple_record::{FixNamespace, FixPortsResults, FixPortsTuple, Remark};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, netns, resource};
use ipnet::IpNet;

use crate::Budget;
use crate::FixError;
use crate::namespaces;
use crate::namespaces::Namespaces;

/// Interval at which the cgroup is looked at, and what could not be answered is asked again.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum share of a processor that repeats answers after changes of routes, and each kind of reading of the processes of the cgroup. A
/// routing daemon changes unrelated routes all the time, and the answers for thousands of destinations take tens of milliseconds.
const SHARE: f64 = 0.01;
/// Maximum number of tuples in a record.
const TUPLES: usize = 1_000;

/// A fix of connect() for the programs of a cgroup.
#[derive(Clone, Debug)]
pub struct Ports {
    /// Directory of the cgroup (version 2).
    pub cgroup: PathBuf,
    /// Share of the port range, 0 to 1, up to which connects proceed unchanged.
    pub past: f64,
    /// Whether draws leave a quarter of the ports to the kernel's search, which passes over bound ports: for programs without a fix.
    pub spares: bool,
    /// Prefix with additional source addresses.
    pub source: Option<IpNet>,
    /// Destinations to act on; `None` for all.
    pub destination: Option<DestinationFilter>,
    /// How long; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
    /// Whether to count only.
    pub dry_run: bool,
    /// Whether to measure the cost of the kernel's search, for the estimate of the time saved; once in a process.
    pub estimate: Estimate,
    pub pace: Pace,
}

/// When to measure the cost of the kernel's search. It takes thousands of connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimate {
    Never,
    /// Before the start: the whole run has an estimate.
    Before,
    /// Once the programs are attached: connects that need them do not wait for it. A fix that ends sooner has no estimate.
    Meanwhile,
}

/// How often a fix looks up from waiting for the kernel's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Maximum time from a stop request to the end.
    pub stop: Duration,
    pub progress: Duration,
    /// Interval at which port ranges and the processes of the cgroup are read again.
    pub reread: Duration,
}

impl Pace {
    /// For someone who watches.
    pub const LIVE: Pace = Pace {
        stop: Duration::from_millis(50),
        progress: Duration::from_millis(200),
        reread: Duration::from_secs(1),
    };
    /// For a process with many fixes.
    pub const SLOW: Pace = Pace {
        stop: Duration::from_secs(1),
        progress: Duration::from_secs(2),
        reread: Duration::from_secs(10),
    };
}

/// Figures of a running fix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortsProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Connects since the start.
    pub connects: u64,
    /// Connects per second since the previous progress.
    pub connects_per_s: f64,
    pub drawn: u64,
    /// Connects with an additional source address.
    pub spread: u64,
    /// Connects that a dry run would have changed.
    pub would_draw: u64,
    /// Connects for which no port was found.
    pub fallbacks: u64,
    /// Ports looked up.
    pub probes: u64,
    /// Connects that proceeded unchanged because the program had bound the socket.
    pub bound: u64,
    /// Estimated time saved, in nanoseconds; `None` if it cannot be estimated.
    pub saved_ns: Option<u64>,
}

/// The results of a fix, and the limits of their validity.
#[derive(Clone, Debug)]
pub struct PortsOutcome {
    pub results: FixPortsResults,
    /// Reasons to doubt the results; empty for a valid run.
    pub validity: Vec<Remark>,
}

impl Ports {
    /// Asks the kernel whether it runs the programs.
    ///
    /// # Errors
    ///
    /// [`FixError::Bpf`]: this host or this user cannot do it.
    pub fn verify() -> Result<(), FixError> {
        Ok(FixPorts::load(&FixPortsSettings::default())?.verify()?)
    }

    /// Fixes connects until the time has passed, `stop` is true or the cgroup is removed. Calls `attached` once, when the programs
    /// are attached, and `progress` at the pace of the fix.
    ///
    /// # Errors
    ///
    /// [`FixError`]
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(),
        mut progress: impl FnMut(&PortsProgress),
    ) -> Result<PortsOutcome, FixError> {
        let calibration = (self.estimate == Estimate::Before).then(|| calibrate(stop)).flatten();
        if stop.load(Ordering::Relaxed) {
            return Err(FixError::Interrupted);
        }
        let mut session = Session::attach(self, calibration)?;
        let start = Instant::now();
        attached();
        if self.estimate == Estimate::Meanwhile {
            static NEVER: AtomicBool = AtomicBool::new(false);
            // It serves later fixes of this process too. Without a thread there is no estimate.
            let _ = thread::Builder::new().name("calibrate".to_owned()).spawn(|| calibrate(&NEVER));
        }
        let (mut reported, mut refreshed, mut reread) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let mut is_removed = false;
        loop {
            let elapsed = start.elapsed();
            let remaining = self.time.map_or(self.pace.stop, |time| time.saturating_sub(elapsed));
            session.poll()?;
            if elapsed >= refreshed + REFRESH_INTERVAL {
                refreshed = elapsed;
                session.ask_again();
                if elapsed >= reread + self.pace.reread {
                    reread = elapsed;
                    session.refresh()?;
                }
                is_removed = session.is_removed();
            }
            if remaining.is_zero() || is_removed || stop.load(Ordering::Relaxed) {
                break;
            }
            if elapsed >= reported + self.pace.progress {
                progress(&session.progress(elapsed, elapsed - reported)?);
                reported = elapsed;
            }
            session.fix.wait(remaining.min(self.pace.stop))?;
        }
        let elapsed = start.elapsed();
        let mut validity = Vec::new();
        if is_removed {
            let message = format!(
                "the cgroup was removed after {:.1} s, and the programs with it: was the service restarted?",
                elapsed.as_secs_f64()
            );
            validity.push(Remark::new("cgroup-removed", message));
        } else if self.time.is_some_and(|time| elapsed < time) {
            let message =
                format!("stopped after {:.1} s; the figures cover that time", elapsed.as_secs_f64());
            validity.push(Remark::new("interrupted", message));
        }
        Ok(PortsOutcome { results: session.finish(elapsed)?, validity })
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An attached fix.
struct Session<'a> {
    settings: &'a Ports,
    fix: FixPorts,
    namespaces: Namespaces,
    sources: Vec<IpAddr>,
    calibration: Option<Calibration>,
    /// Inode of the cgroup's directory.
    inode: u64,
    /// Destinations whose source could not be asked: in a namespace that is not known yet, or without a descriptor or a thread.
    unresolved: Vec<Destination>,
    rerouted: Rerouted,
    /// Of readings of the processes of the cgroup for namespaces that are new, and for those that are gone: with one for both, the
    /// second would leave nothing for the first.
    discovery: Budget,
    release: Budget,
    connects: u64,
}

/// Namespaces whose routes have changed since their answers.
struct Rerouted {
    namespaces: BTreeSet<u64>,
    budget: Budget,
}

impl Rerouted {
    fn new() -> Rerouted {
        Rerouted { namespaces: BTreeSet::new(), budget: Budget::of(SHARE) }
    }

    /// Returns the namespaces if the budget allows to repeat their answers now.
    fn take(&mut self, now: Instant) -> Option<BTreeSet<u64>> {
        let is_due = !self.namespaces.is_empty() && self.budget.allows(now);
        is_due.then(|| std::mem::take(&mut self.namespaces))
    }
}

impl<'a> Session<'a> {
    fn attach(settings: &'a Ports, calibration: Option<Calibration>) -> Result<Session<'a>, FixError> {
        let open = |path: &PathBuf| {
            let directory = File::open(path)?;
            let inode = directory.metadata()?.ino();
            Ok((directory, inode))
        };
        let (directory, inode) = open(&settings.cgroup).map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => FixError::Removed,
            _ => FixError::Cgroup(error),
        })?;
        let mut namespaces = Namespaces::default();
        namespaces.discover(&settings.cgroup);
        let sources = match settings.source {
            Some(prefix) => {
                let local = namespaces.local_addresses(prefix, SOURCES);
                if local.is_empty() {
                    // A service that restarts: the network namespace in which the addresses are local has no process yet.
                    let is_empty =
                        namespaces::processes(&settings.cgroup).is_ok_and(|processes| processes.is_empty());
                    return Err(if is_empty {
                        FixError::Empty
                    } else {
                        FixError::NoSource(prefix.to_string())
                    });
                }
                local
            }
            None => Vec::new(),
        };
        namespaces.note_sources(&sources);
        let mut fix = FixPorts::load(&FixPortsSettings {
            past: settings.past,
            spares: settings.spares,
            dry_run: settings.dry_run,
            destination: settings.destination,
            sources: sources.clone(),
        })?;
        for (cookie, namespace) in namespaces.iter() {
            unless_full(fix.set_namespace(cookie, &namespace.ports))?;
        }
        let cookies: Vec<u64> = namespaces.iter().map(|(cookie, _)| cookie).collect();
        let mut session = Session {
            settings,
            fix,
            namespaces,
            sources,
            calibration,
            inode,
            unresolved: Vec::new(),
            rerouted: Rerouted::new(),
            discovery: Budget::of(SHARE),
            release: Budget::of(SHARE),
            connects: 0,
        };
        // A busy destination is known before the first connect.
        for cookie in cookies {
            let connected = session.namespaces.connected(cookie);
            let known = connected.into_iter().map(|address| Destination::new(cookie, address));
            session.answer(known.collect())?;
        }
        match session.fix.attach(directory.as_fd()) {
            Err(_) if session.is_removed() => Err(FixError::Removed),
            attached => Ok(attached.map(|()| session)?),
        }
    }

    /// Answers requests for source addresses, and repeats all answers of a namespace whose routes have changed, at once after a quiet
    /// time, otherwise as soon as the budget allows.
    fn poll(&mut self) -> Result<(), FixError> {
        let mut wanted = Vec::new();
        self.fix.requested(|destination| wanted.push(destination));
        if wanted.iter().any(|destination| !self.namespaces.contains(destination.namespace)) {
            self.discover()?;
        }
        self.answer(wanted)?;
        self.rerouted.namespaces.extend(self.namespaces.rerouted());
        let now = Instant::now();
        if let Some(rerouted) = self.rerouted.take(now) {
            let start = resource::thread_cpu_time();
            let known = self.fix.destinations();
            let is_of = |destination: &Destination| rerouted.contains(&destination.namespace);
            let used = self.answer(known.into_iter().filter(is_of).collect())?;
            self.rerouted.budget.spend(now, used + resource::thread_cpu_time().saturating_sub(start));
        }
        Ok(())
    }

    /// Looks up sources. Returns the processor time of the look-ups, which other threads make.
    fn answer(&mut self, wanted: Vec<Destination>) -> Result<Duration, FixError> {
        let mut used = Duration::ZERO;
        let mut by_namespace: BTreeMap<u64, Vec<Destination>> = BTreeMap::new();
        for destination in wanted {
            by_namespace.entry(destination.namespace).or_default().push(destination);
        }
        for (cookie, destinations) in by_namespace {
            let addresses: Vec<IpAddr> = destinations.iter().map(Destination::address).collect();
            // What cannot be answered now is left alone, and is requested again after the next refresh.
            match self.namespaces.sources(cookie, &addresses) {
                Ok((sources, time)) => {
                    used += time;
                    for (destination, source) in destinations.into_iter().zip(sources) {
                        match source {
                            Ok(source) => unless_full(self.fix.set_route(&destination, source))?,
                            Err(_) => self.unresolved.push(destination),
                        }
                    }
                }
                Err(_) => self.unresolved.extend(destinations),
            }
        }
        Ok(used)
    }

    /// Looks for the namespaces of new processes, unless the budget is spent: a namespace whose processes are gone stays unknown, and
    /// its requests repeat.
    fn discover(&mut self) -> Result<(), FixError> {
        let now = Instant::now();
        if !self.discovery.allows(now) {
            return Ok(());
        }
        let start = resource::process_cpu_time();
        let fresh = self.namespaces.discover(&self.settings.cgroup);
        self.discovery.spend(now, resource::process_cpu_time().saturating_sub(start));
        if !fresh.is_empty() {
            self.namespaces.note_sources(&self.sources);
            self.set_namespaces(&fresh)?;
        }
        Ok(())
    }

    fn set_namespaces(&mut self, cookies: &[u64]) -> Result<(), FixError> {
        for (cookie, namespace) in self.namespaces.iter() {
            if cookies.contains(&cookie) {
                unless_full(self.fix.set_namespace(cookie, &namespace.ports))?;
            }
        }
        Ok(())
    }

    /// Forgets destinations of unknown namespaces, so that they are requested again.
    fn ask_again(&mut self) {
        for destination in self.unresolved.drain(..) {
            self.fix.forget(&destination);
        }
    }

    /// Reads the port ranges again, and releases namespaces that are gone.
    fn refresh(&mut self) -> Result<(), FixError> {
        let now = Instant::now();
        if self.release.allows(now) {
            let start = resource::process_cpu_time();
            for cookie in self.namespaces.release(&self.settings.cgroup) {
                self.fix.forget_namespace(cookie);
            }
            self.release.spend(now, resource::process_cpu_time().saturating_sub(start));
        }
        let changed = self.namespaces.reread();
        self.set_namespaces(&changed)
    }

    fn is_removed(&self) -> bool {
        fs::metadata(&self.settings.cgroup).map_or(true, |directory| directory.ino() != self.inode)
    }

    fn progress(&mut self, elapsed: Duration, since: Duration) -> Result<PortsProgress, FixError> {
        let counters = self.fix.counters()?;
        let before = std::mem::replace(&mut self.connects, counters.connects);
        Ok(PortsProgress {
            elapsed,
            connects: counters.connects,
            connects_per_s: counters.connects.saturating_sub(before) as f64 / since.as_secs_f64(),
            drawn: counters.drawn,
            spread: counters.spread,
            would_draw: counters.would_draw,
            fallbacks: counters.fallbacks,
            probes: counters.probes,
            bound: LeftAlone::BOUND.into_iter().map(|reason| counters.left(reason)).sum(),
            saved_ns: saved_ns(&counters, self.calibration()),
        })
    }

    fn calibration(&self) -> Option<Calibration> {
        match self.settings.estimate {
            Estimate::Meanwhile => MEASURED.try_lock().ok().and_then(|measured| *measured),
            Estimate::Never | Estimate::Before => self.calibration,
        }
    }

    fn finish(mut self, elapsed: Duration) -> Result<FixPortsResults, FixError> {
        self.fix.detach();
        let counters = self.fix.counters()?;
        let mut tuples = self.fix.tuples();
        tuples
            .sort_by_key(|(key, tuple)| (std::cmp::Reverse(tuple.connects), key.source(), key.destination()));
        let listed: BTreeSet<u64> = tuples.iter().map(|(key, _)| key.namespace).collect();
        let namespaces = self.namespaces.ports().filter(|(cookie, _)| listed.contains(cookie));
        let namespaces = namespaces.map(|(cookie, ports)| FixNamespace {
            cookie,
            low: ports.low,
            high: ports.high,
            usable: namespaces::usable(ports),
        });
        Ok(results(&counters, self.calibration(), elapsed, namespaces.collect(), &tuples))
    }
}

/// Ignores that a table is full: what has no entry is left alone and counted.
fn unless_full(result: Result<(), BpfError>) -> Result<(), BpfError> {
    match result {
        Err(BpfError::Call { source, .. }) if Errno::of(&source) == Some(Errno::E2BIG) => Ok(()),
        other => other,
    }
}

/// Returns the estimate of the time saved: the ports that the kernel's search would have passed over, at the measured cost of one,
/// without the time of the draws themselves.
fn saved_ns(counters: &FixCounters, calibration: Option<Calibration>) -> Option<u64> {
    let avoided = counters.avoided as f64 * calibration?.probe_ns;
    Some((avoided as u64).saturating_sub(counters.hook_ns))
}

fn results(
    counters: &FixCounters,
    calibration: Option<Calibration>,
    elapsed: Duration,
    namespaces: Vec<FixNamespace>,
    tuples: &[(FixTupleKey, FixTuple)],
) -> FixPortsResults {
    let draws = counters.drawn + counters.fallbacks;
    let left = counters.left.iter().map(|(reason, number)| (reason.name().to_owned(), *number));
    FixPortsResults {
        elapsed_ns: elapsed.as_nanos() as u64,
        connects: counters.connects,
        connects_per_s: counters.connects as f64 / elapsed.as_secs_f64().max(1e-9),
        left: left.collect(),
        drawn: counters.drawn,
        spread: counters.spread,
        fallbacks: counters.fallbacks,
        would_draw: counters.would_draw,
        probes: counters.probes,
        probes_per_draw: (draws > 0).then(|| counters.probes as f64 / draws as f64),
        refused: counters.refused,
        in_order: counters.in_order,
        time_wait_used: counters.time_wait_used,
        hook_ns: counters.hook_ns,
        hook_ns_per_draw: counters.hook_ns.checked_div(draws),
        avoided_probes: counters.avoided,
        probe_ns: calibration.map(|calibration| calibration.probe_ns),
        floor_ns: calibration.map(|calibration| calibration.floor_ns),
        saved_ns: saved_ns(counters, calibration),
        namespaces,
        tuples: tuples.iter().take(TUPLES).map(|(key, tuple)| row(key, tuple)).collect(),
        tuples_left_out: tuples.len().saturating_sub(TUPLES) as u64,
    }
}

fn row(key: &FixTupleKey, tuple: &FixTuple) -> FixPortsTuple {
    FixPortsTuple {
        namespace: key.namespace,
        source: key.source().to_string(),
        destination: SocketAddr::new(key.destination(), key.port).to_string(),
        connects: tuple.connects,
        drawn: tuple.drawn,
        fallbacks: tuple.fallbacks,
        share: tuple.share(),
    }
}

/// Sizes of the range. Half of it is ports of one parity, which the search passes over first. More ports are nearer to the cost in
/// a large table, whose sockets are not in the caches.
const SIZES: [u16; 2] = [4_000, 1_000];

const FIRST: u16 = 20_000;
/// Connects in each mean.
const SAMPLES: usize = 100;

/// The costs of connect() over loopback, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Calibration {
    /// Median of a connect to a destination without other connections.
    pub(crate) floor_ns: u64,
    /// Additional time for each port in use that the search looks at.
    pub(crate) probe_ns: f64,
}

/// The calibration of this process.
static MEASURED: Mutex<Option<Calibration>> = Mutex::new(None);

/// Measures in a network namespace of its own, which ends with the measurement, unless this process has measured before. `None` where that is
/// not possible: without the right to make a namespace, or with too few descriptors; and when `stop` is set.
fn calibrate(stop: &AtomicBool) -> Option<Calibration> {
    // One at a time: the measurements of others would disturb it.
    let mut measured = lock(&MEASURED);
    if measured.is_none() {
        let builder = thread::Builder::new().name("calibrate".to_owned());
        *measured =
            thread::scope(|scope| builder.spawn_scoped(scope, || measure(stop)).ok()?.join().ok()?.ok());
    }
    *measured
}

fn measure(stop: &AtomicBool) -> io::Result<Calibration> {
    netns::enter_new()?;
    let limit = resource::raise_descriptor_limit()?;
    let fits = |ports: &u16| u64::from(*ports) + 256 < limit;
    let ports = SIZES.into_iter().find(fits).ok_or(io::ErrorKind::OutOfMemory)?;
    // Of this thread's namespace.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{FIRST} {}", FIRST + ports - 1))?;
    let at = SocketAddr::from(([127, 0, 0, 1], 4_000));
    let listener = socket::open(Transport::Tcp, at, false)?;
    socket::bind(listener.as_fd(), at)?;
    socket::listen(listener.as_fd(), i32::from(ports))?;
    let mut held: Vec<OwnedFd> = Vec::new();
    let mut times = Vec::new();
    // 3 of 4 ports, so that all ports of the first parity are in use.
    for _ in 0..ports / 4 * 3 {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let client = socket::open(Transport::Tcp, at, false)?;
        let began = Instant::now();
        socket::connect(client.as_fd(), at)?;
        times.push(began.elapsed().as_nanos() as u64);
        held.push(client);
    }
    let first = median(&times[..SAMPLES]);
    let last = median(&times[times.len() - SAMPLES..]);
    let probe_ns = last.saturating_sub(first) as f64 / f64::from(ports / 2);
    Ok(Calibration { floor_ns: first, probe_ns })
}

fn median(times: &[u64]) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_no_cgroup() -> Ports {
        Ports {
            spares: false,
            cgroup: PathBuf::from("/nonexistent"),
            past: 0.25,
            source: None,
            destination: None,
            time: None,
            dry_run: false,
            estimate: Estimate::Never,
            pace: Pace::LIVE,
        }
    }

    #[test]
    fn a_cgroup_that_is_gone_can_come_back() {
        let error = of_no_cgroup().run(&AtomicBool::new(false), || (), |_| ()).unwrap_err();
        assert!(matches!(error, FixError::Removed) && error.is_not_valid(), "{error}");
    }

    #[test]
    fn a_stop_before_the_start_attaches_nothing() {
        let ports = Ports { estimate: Estimate::Before, ..of_no_cgroup() };
        let error = ports.run(&AtomicBool::new(true), || unreachable!(), |_| ()).unwrap_err();
        assert!(matches!(error, FixError::Interrupted) && error.is_not_valid(), "{error}");
    }

    #[test]
    fn a_fix_of_a_service_waits_for_no_measurement() {
        let measured = lock(&MEASURED);
        let ports = Ports { estimate: Estimate::Meanwhile, ..of_no_cgroup() };
        let error = ports.run(&AtomicBool::new(false), || (), |_| ()).unwrap_err();
        assert!(matches!(error, FixError::Removed), "{error}");
        drop(measured);
    }

    /// A routing daemon changes a route ten times a second, and to repeat the answers takes 50 ms of processor time.
    #[test]
    fn answers_are_repeated_within_one_percent() {
        const COST: Duration = Duration::from_millis(50);
        let mut rerouted = Rerouted::new();
        let start = Instant::now();
        let mut repeated = Vec::new();
        for turn in 0..600 {
            let now = start + turn * Duration::from_millis(100);
            rerouted.namespaces.insert(u64::from(turn % 2));
            if let Some(namespaces) = rerouted.take(now) {
                repeated.push((now - start, namespaces.len()));
                rerouted.budget.spend(now, COST);
            }
        }
        let times: Vec<u64> = repeated.iter().map(|(at, _)| at.as_secs()).collect();
        assert_eq!(times, (0..60).step_by(5).collect::<Vec<_>>(), "50 ms each 5 s");
        // What changed meanwhile is not lost.
        assert!(repeated[1..].iter().all(|(_, namespaces)| *namespaces == 2));
        assert_eq!(rerouted.namespaces.len(), 2);
        // After a quiet time at once, and nothing without a change.
        assert!(rerouted.take(start + Duration::from_secs(100)).is_some());
        assert!(rerouted.take(start + Duration::from_secs(200)).is_none());
    }

    #[test]
    fn saved_time_is_the_search_without_the_draws() {
        let calibration = Some(Calibration { floor_ns: 10_000, probe_ns: 50.0 });
        let counters = FixCounters { avoided: 10_000, hook_ns: 100_000, ..FixCounters::default() };
        assert_eq!(saved_ns(&counters, calibration), Some(400_000));
        assert_eq!(saved_ns(&counters, None), None);
        let slower = FixCounters { avoided: 10, ..counters };
        assert_eq!(saved_ns(&slower, calibration), Some(0), "time is not lost in the estimate");
    }

    #[test]
    fn probes_per_draw_count_fallbacks() {
        let counters =
            FixCounters { drawn: 3, fallbacks: 1, probes: 40, hook_ns: 4_000, ..FixCounters::default() };
        let results = results(&counters, None, Duration::from_secs(2), Vec::new(), &[]);
        assert_eq!((results.probes_per_draw, results.hook_ns_per_draw), (Some(10.0), Some(1_000)));
        let idle = super::results(&FixCounters::default(), None, Duration::ZERO, Vec::new(), &[]);
        assert_eq!((idle.probes_per_draw, idle.hook_ns_per_draw, idle.connects_per_s), (None, None, 0.0));
    }
}
