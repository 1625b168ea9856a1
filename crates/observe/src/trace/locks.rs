use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::host::processors;
use fourtuple_bpf::BpfError;
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_bpf::lock_waits::{LockFilter, LockWaits, PATHS, Totals, WaitKey};
use fourtuple_record::snapshot::{self, Part, TracedLocks};
use fourtuple_record::{LockClass, Remark, TraceLocksResults};
use fourtuple_syscalls::resource::thread_cpu_time;

use crate::trace::blind_spots::{Coverage, Judgement, Losses, MISSED, is_realtime};
use crate::trace::error::TraceError;
use crate::trace::instrument::{Instrument, Outcome, Session};
use crate::trace::lock_sums::Sums;
use crate::trace::symbols::Stacks;
use crate::trace::symbols::Symbols;

/// A trace of waits for TCP's locks.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    /// Process, as numbered in the PID namespace of this process.
    pub process: Option<u32>,
    /// Name of the process or waiting thread (comm), at most 15 bytes.
    pub name: Option<String>,
    /// Id of a cgroup (version 2): the inode of its directory.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the waiting thread, and of the connections to count. A lock has no namespace.
    pub network: Option<u32>,
    /// How long to trace; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
}

/// Figures of a running trace of locks.
#[derive(Clone, Debug, Default)]
pub struct LocksProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Waits on TCP's paths since the start.
    pub waits: u64,
    /// Sum of these waits, in nanoseconds.
    pub wait_ns: u64,
    /// Connections since the start.
    pub connections: u64,
    /// The lock class with the longest time of waiting.
    pub worst: Option<&'static str>,
    /// Waits that were not counted or lost their stack, and events that no program saw (`recursion_misses`).
    pub lost: u64,
}

/// A running trace of locks.
#[derive(Debug)]
pub struct LocksSession {
    locks: Locks,
    waits: LockWaits,
    stacks: Stacks,
    /// The settings restrict the trace to some tasks.
    by_task: bool,
    /// The settings restrict the trace to some tasks or to a network namespace.
    filtered: bool,
    /// The address range of `__lock_sock` is known, so that sleeps in it are counted.
    counts_sleeps: bool,
    window: Window,
}

/// Minimum time of a window: in a shorter one, a single wait is a large share.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Number and time in nanoseconds of the waits, by lock and path.
type Counts = HashMap<WaitKey, (u64, u64)>;

/// The latest reading of all waits, for a live view.
#[derive(Debug)]
struct Window {
    read: Instant,
    /// CPU time of the reading.
    used: Duration,
    /// Since the start.
    earlier: Counts,
    seen: TracedLocks,
}

impl Window {
    fn begin() -> Window {
        Window {
            read: Instant::now(),
            used: Duration::ZERO,
            earlier: HashMap::new(),
            seen: TracedLocks::default(),
        }
    }
}

impl Instrument for Locks {
    type Session = LocksSession;

    fn attach(&self) -> Result<LocksSession, TraceError> {
        // Without /proc/kallsyms the record has no paths; a blind spot names that.
        self.attach_with(Stacks::new(Symbols::read().unwrap_or_default()), PATHS as u32)
    }

    fn duration(&self) -> Option<Duration> {
        self.time
    }
}

impl Locks {
    fn attach_with(&self, stacks: Stacks, paths: u32) -> Result<LocksSession, TraceError> {
        let lock_sock = stacks.symbols().range("__lock_sock");
        let Locks { process, name, cgroup, network, .. } = self.clone();
        let by_task = process.is_some() || name.is_some() || cgroup.is_some();
        let filter = LockFilter { tasks: TaskFilter { process, name, cgroup, network }, lock_sock };
        Ok(LocksSession {
            locks: self.clone(),
            waits: LockWaits::attach_with_paths(&filter, paths).map_err(TraceError::Locks)?,
            stacks,
            by_task,
            filtered: by_task || network.is_some(),
            counts_sleeps: lock_sock.is_some(),
            window: Window::begin(),
        })
    }
}

impl Session for LocksSession {
    type Progress = LocksProgress;
    type Results = TraceLocksResults;
    /// Each progress reads all locks, so the interval is longer than for other traces.
    const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

    fn progress(&mut self, elapsed: Duration) -> Result<LocksProgress, TraceError> {
        let (totals, sums, losses) = self.counted().map_err(TraceError::Locks)?;
        Ok(LocksProgress {
            elapsed,
            waits: sums.waits(),
            wait_ns: sums.wait_ns(),
            connections: connections(&totals, self.by_task),
            worst: sums.worst().map(|class| class.name()),
            lost: losses.sum(),
        })
    }

    fn finish(mut self, elapsed: Duration) -> Result<Outcome<TraceLocksResults>, TraceError> {
        self.waits.detach();
        let (totals, sums, losses) = self.counted().map_err(TraceError::Locks)?;
        let coverage = Coverage {
            spun: sums.spun,
            paravirtual: self.stacks.paravirtual(),
            symbols: !self.stacks.symbols().is_empty(),
            sleeps: self.counts_sleeps,
            filtered: self.filtered,
            tables: totals.tables.bhash != 0,
            bucket_per_port: totals.tables.bhash_size > u32::from(u16::MAX),
            ..Coverage::of_host()
        };
        let hidden = coverage.hides_most_waits();
        let Judgement { mut validity, notes } = losses.judge(sums.waits() + sums.elsewhere.waits);
        let results = TraceLocksResults {
            lost: losses.sum(),
            notes,
            ..results(&totals, &sums, coverage, self.by_task, elapsed)
        };
        validity.extend(
            hidden.filter(|_| results.classes.is_empty()).map(|reason| Remark::new("waits-hidden", reason)),
        );
        Ok(Outcome { folded: sums.folded(), validity, results })
    }
}

impl LocksSession {
    /// Returns the waits since the previous window, by class. Returns the previous window again if it is
    /// younger than [`MIN_INTERVAL`], or if another reading of all waits now would use more than `share` of a processor.
    pub(crate) fn window(&mut self, share: f64) -> Result<TracedLocks, TraceError> {
        let interval = self.window.read.elapsed();
        if interval < MIN_INTERVAL || interval.mul_f64(share) < self.window.used {
            return Ok(self.window.seen.clone());
        }
        let (read, begun) = (Instant::now(), thread_cpu_time());
        let (sums, earlier) = self.since_window().map_err(TraceError::Locks)?;
        let seen = TracedLocks { interval_ns: interval.as_nanos() as u64, classes: by_class(sums.classes()) };
        if self.is_full().map_err(TraceError::Locks)? {
            *self = self.locks.clone().attach_with(mem::take(&mut self.stacks), PATHS as u32)?;
        } else {
            self.window.earlier = earlier;
        }
        let used = thread_cpu_time().saturating_sub(begun);
        self.window = Window { read, used, seen: seen.clone(), earlier: mem::take(&mut self.window.earlier) };
        Ok(seen)
    }

    /// Returns why a trace without waits says nothing on this host.
    pub(crate) fn blind_spot(&self) -> Option<&'static str> {
        let symbols = !self.stacks.symbols().is_empty();
        Coverage { symbols, realtime: is_realtime(), ..Coverage::default() }.hides_most_waits()
    }

    /// Returns the waits since the previous window, and the counts for the next one. Removes locks without a wait since the previous
    /// window from the table, whose size would otherwise grow with every socket.
    fn since_window(&mut self) -> Result<(Sums, Counts), BpfError> {
        let tables = self.waits.totals()?.tables;
        let (mut sums, mut counts) = (Sums::default(), Counts::new());
        for (key, mut wait) in self.waits.waits()? {
            let all = (wait.waits, wait.wait_ns);
            let before = self.window.earlier.get(&key).copied().unwrap_or_default();
            wait.waits = wait.waits.saturating_sub(before.0);
            wait.wait_ns = wait.wait_ns.saturating_sub(before.1);
            if wait.waits > 0 {
                let path = self.stacks.path(&self.waits, key.path, key.lock == 0)?;
                sums.add(&tables, &key, &wait, path);
            } else if key.lock != 0 && all.0 > 0 {
                self.waits.forget(&key)?;
                continue;
            }
            counts.insert(key, all);
        }
        Ok((sums, counts))
    }

    /// Returns whether waits were not counted, or not with their path, because a table is full.
    fn is_full(&self) -> Result<bool, BpfError> {
        let totals = self.waits.totals()?;
        Ok(totals.lost_waits > 0 || totals.lost_paths > 0)
    }

    fn counted(&mut self) -> Result<(Totals, Sums, Losses), BpfError> {
        let totals = self.waits.totals()?;
        let losses = losses(&totals, self.waits.missed()?);
        let sums = Sums::read(&self.waits, &mut self.stacks, &totals.tables)?;
        Ok((totals, sums, losses))
    }
}

/// Returns the waits of each class for a snapshot.
pub(crate) fn by_class(classes: Vec<LockClass>) -> BTreeMap<String, snapshot::LockWaits> {
    let waits = |class: &LockClass| snapshot::LockWaits { waits: class.waits, waited_ns: class.wait_ns };
    classes.into_iter().map(|class| (class.class.clone(), waits(&class))).collect()
}

/// Lists the losses; `missed` is the number of events that no program saw (`recursion_misses`).
fn losses(totals: &Totals, missed: u64) -> Losses {
    Losses::new([
        (
            totals.lost_waits,
            "waits were not counted: the table of locks and paths, or of sleeping tasks, was full",
        ),
        (totals.lost_paths, "waits were counted without their path: the table of paths was full"),
        (totals.lost_stacks, "waits were counted without their path: the stack could not be read or kept"),
        (
            totals.lost_busy,
            "waits were not counted: they began while the same processor was changing the table of waits",
        ),
        (totals.lost_nested, "waits were not counted: their end was not seen"),
        (missed, MISSED),
    ])
}

/// Counts connections. A connection over loopback is both opened and accepted on this host and counts once, so the larger
/// number is taken. With a filter of tasks only opening and closing can be assigned to a task: the count is then connections that the
/// traced tasks opened, or connections that they closed without having opened them, whichever is larger.
fn connections(totals: &Totals, by_task: bool) -> u64 {
    match by_task {
        true => totals.opened.max(totals.closed.saturating_sub(totals.opened)),
        false => totals.opened.max(totals.accepted),
    }
}

fn results(
    totals: &Totals,
    sums: &Sums,
    coverage: Coverage,
    by_task: bool,
    elapsed: Duration,
) -> TraceLocksResults {
    let connections = connections(totals, by_task);
    let each = |sum: u64| (connections > 0).then(|| sum as f64 / connections as f64);
    let processors_ns = elapsed.as_nanos() as f64 * f64::from(processors(Path::new("/")));
    TraceLocksResults {
        tier: LockWaits::TIER.to_owned(),
        elapsed_ns: elapsed.as_nanos() as u64,
        connections,
        waits: sums.waits(),
        wait_ns: sums.wait_ns(),
        waits_per_connection: each(sums.waits()),
        wait_ns_per_connection: each(sums.wait_ns()),
        cpu_share: (sums.spin_ns() as f64 / processors_ns.max(1.0)).min(1.0),
        lost: 0,
        notes: Vec::new(),
        elsewhere_waits: sums.elsewhere.waits,
        elsewhere_wait_ns: sums.elsewhere.wait_ns,
        classes: sums.classes(),
        paths: sums.paths(),
        ports: sums.ports(),
        blind_spots: coverage.blind_spots(),
        symptoms: Part::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::os::fd::AsFd;
    use std::thread;

    use fourtuple_bpf::lock_waits::NO_PATH;
    use fourtuple_syscalls::socket::{self, Transport};
    use fourtuple_testing::{in_namespace, set_sysctl, skip};

    use super::*;
    use crate::trace::instrument::tests::attached;

    /// Refused dials of one round.
    const DIALS: u32 = 2_000;
    /// Contention depends on timing, so the test repeats at most this many rounds.
    const ROUNDS: u32 = 100;

    /// Dials a port without a listener from 4 threads, whose searches for a source port wait for the same buckets.
    fn contend() {
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 9_000));
        let dial = || {
            for _ in 0..DIALS {
                let client = socket::open(Transport::Tcp, to, false).unwrap();
                let _ = socket::connect(client.as_fd(), to);
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(dial))));
    }

    /// Traces with room for one path, the one of waits without a path, until a wait lost its path. Returns `None` and reports a skipped
    /// test where the host does not show waits.
    fn full(test: &str) -> Option<LocksSession> {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20029");
        let stacks = Stacks::new(Symbols::read().unwrap_or_default());
        let session = attached(test, Locks::default().attach_with(stacks, 1))?;
        let lost_paths = || session.waits.totals().unwrap().lost_paths;
        (0..ROUNDS).take_while(|_| lost_paths() == 0).for_each(|_| contend());
        let waits = session.waits.waits().unwrap();
        if waits.is_empty() {
            skip(test, "lock-waits", "no task waited, or the kernel does not report waits");
            return None;
        }
        assert!(lost_paths() > 0, "{} locks with waits", waits.len());
        Some(session)
    }

    #[test]
    fn waits_beyond_the_table_of_paths_are_reported() {
        in_namespace(|| {
            let test = "locks::tests::waits_beyond_the_table_of_paths_are_reported";
            let Some(mut session) = full(test) else { return };
            session.waits.detach();
            let lost = session.waits.totals().unwrap().lost_paths;
            let waits = session.waits.waits().unwrap();
            assert!(waits.iter().all(|(key, _)| key.path == NO_PATH), "{waits:?}");
            assert!(session.progress(Duration::from_secs(1)).unwrap().lost >= lost);
            let Outcome { results, validity, .. } = session.finish(Duration::from_secs(1)).unwrap();
            assert!(results.lost >= lost, "{results:?}");
            let line = format!("{lost} waits were counted without their path: the table of paths was full");
            assert!(validity.iter().any(|remark| remark.message == line), "{validity:?}");
        });
    }

    #[test]
    fn a_window_replaces_a_full_table_of_paths() {
        in_namespace(|| {
            let Some(mut session) = full("locks::tests::a_window_replaces_a_full_table_of_paths") else {
                return;
            };
            let begun = session.window.read;
            while session.window.read == begun {
                session.window(f64::from(u16::MAX)).unwrap();
                thread::sleep(Duration::from_millis(10));
            }
            assert!(!session.is_full().unwrap());
        });
    }

    #[test]
    fn missed_events_are_part_of_lost() {
        let test = "locks::tests::missed_events_are_part_of_lost";
        let Some(session) = attached(test, Locks::default().attach()) else { return };
        let totals = session.waits.totals().unwrap();
        assert_eq!(losses(&totals, 3).sum(), losses(&totals, 0).sum() + 3);
    }
}
