use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::host::namespace;
use crate::host::snapshot::counter_totals;
use fourtuple_bpf::accept_wait::{AcceptFilter, Listener, Totals, Worker, WorkerKey};
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_bpf::tracing::COARSE_BITS;
use fourtuple_bpf::{AcceptWait, BpfError};
use fourtuple_record::measure::words::counted;
use fourtuple_record::measure::{LogLinear, balance};
use fourtuple_record::snapshot::{Part, TracedAccepts, TurnedAway};
use fourtuple_record::{Depth, Remark, TraceAcceptResults, TraceListener, TraceWorker, WaitStep};
use fourtuple_syscalls::{errno_name, netns};

use crate::trace::blind_spots;
use crate::trace::blind_spots::{Judgement, Losses, MISSED};
use crate::trace::ended::{self, is_alive};
use crate::trace::error::TraceError;
use crate::trace::failed::{FailedSession, account};
use crate::trace::instrument::{Folded, Instrument, Outcome, Session};
use crate::trace::times::{distribution, merged, times};
use crate::trace::unix_queues::UnixQueues;

/// A trace of TCP connections from the handshake until accept() returns them: the wait in the accept queue, by listener and
/// by worker.
#[derive(Clone, Debug, Default)]
pub struct Accept {
    /// Process that calls accept(), as numbered in the PID namespace of this process.
    pub process: Option<u32>,
    /// Name of the process or thread that calls accept() (comm), at most 15 bytes.
    pub name: Option<String>,
    pub address: Option<IpAddr>,
    pub port: Option<u16>,
    /// Id of the cgroup (version 2) of the process that calls accept(): the inode of its directory.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the listener.
    pub network: Option<u32>,
    /// How long to trace; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
}

/// Figures of a running trace of accept().
#[derive(Clone, Copy, Debug, Default)]
pub struct AcceptProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Connections accepted since the start.
    pub accepts: u64,
    /// Accepts per second since the previous progress.
    pub accepts_per_s: f64,
    /// Median of all waits since the start, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of all waits since the start, in nanoseconds.
    pub p99_ns: u64,
    /// Greatest length of an accept queue since the start.
    pub depth_max: u32,
    /// SYNs and final ACKs that the kernel dropped because a queue was full, since the start.
    pub overflows: u64,
    /// Wakeups after which accept() returned EAGAIN, since the start.
    pub woken: u64,
    /// Events that were not counted because a table was full, and events that no program saw (`recursion_misses`).
    pub lost: u64,
}

/// A running trace of accept().
#[derive(Debug)]
pub struct AcceptSession {
    wait: AcceptWait,
    /// The filter tests the accepting thread, so a listener passes only after its first accept.
    by_acceptor: bool,
    last: AcceptProgress,
    /// The filter tests the listener.
    by_listener: bool,
    /// Drops in the network namespace of the calling thread when the trace began; `None`: the kernel does not tell.
    before: Option<Drops>,
    /// The waits of each listener at the end of the previous window, by its cookie.
    /// Waits and connections turned away at the previous window, by cookie of the listener.
    earlier: HashMap<u64, (LogLinear, u64)>,
    /// Failed calls, or why they are not counted.
    failed: Result<FailedSession, String>,
    /// The queues of unix listeners, or why they are not read.
    unix: Result<UnixQueues, String>,
    address: Option<IpAddr>,
    port: Option<u16>,
    tasks: TaskFilter,
}

/// Drops of all listeners of a network namespace.
#[derive(Clone, Copy, Debug)]
struct Drops {
    namespace: u32,
    /// TcpExt.ListenOverflows: a queue was full.
    overflows: u64,
    /// TcpExt.ListenDrops, overflows included.
    all: u64,
}

/// Returns the inode of the calling thread's network namespace.
fn own_namespace() -> Option<u32> {
    Some(fs::metadata("/proc/thread-self/ns/net").ok()?.ino() as u32)
}

impl Drops {
    /// Reads the counters of the calling thread's namespace.
    fn read() -> Option<Drops> {
        let totals = counter_totals(Path::new("/")).ok()?;
        let count = |name| totals.get(name).copied();
        Some(Drops {
            namespace: own_namespace()?,
            overflows: count("TcpExt.ListenOverflows")?,
            all: count("TcpExt.ListenDrops")?,
        })
    }

    fn since(self, before: Drops) -> Drops {
        Drops {
            overflows: self.overflows.saturating_sub(before.overflows),
            all: self.all.saturating_sub(before.all),
            ..self
        }
    }
}

/// Counters read from the kernel.
struct Counted {
    totals: Box<Totals>,
    losses: Losses,
    listeners: Vec<(u64, Listener)>,
    workers: Vec<(WorkerKey, Worker)>,
}

impl Instrument for Accept {
    type Session = AcceptSession;

    fn attach(&self) -> Result<AcceptSession, TraceError> {
        let failed = FailedSession::attach(&self.tasks());
        let session = self.attach_beside(failed.map_err(|error| error.to_string()))?;
        Ok(AcceptSession { unix: self.unix_queues(), ..session })
    }

    fn duration(&self) -> Option<Duration> {
        self.time
    }
}

impl Accept {
    fn tasks(&self) -> TaskFilter {
        let Accept { process, name, cgroup, network, .. } = self.clone();
        TaskFilter { process, name, cgroup, network }
    }

    /// Begins to read the queues of unix listeners, of which a filter by address or port selects none.
    fn unix_queues(&self) -> Result<UnixQueues, String> {
        if self.address.is_some() || self.port.is_some() {
            return Err("a filter by address or port selects TCP listeners".to_owned());
        }
        if self.network.is_some() && self.network != own_namespace() {
            return Err("the trace is in another network namespace".to_owned());
        }
        let mut queues = UnixQueues::default();
        queues.look().map(|()| queues)
    }

    /// Attaches the trace beside a count of failed calls; `Err`: why there is none.
    pub(crate) fn attach_beside(
        &self,
        failed: Result<FailedSession, String>,
    ) -> Result<AcceptSession, TraceError> {
        let filter = AcceptFilter {
            process: self.process,
            name: self.name.clone(),
            address: self.address,
            port: self.port,
            cgroup: self.cgroup,
            network: self.network,
        };
        let mut wait = AcceptWait::attach(&filter).map_err(TraceError::Accept)?;
        if wait.totals().map_err(TraceError::Accept)?.mptcp > 0 {
            seed_mptcp(&mut wait, self.network);
        }
        Ok(AcceptSession {
            wait,
            // Within the time of the trace, which therefore has seen all drops that these counters add.
            before: Drops::read(),
            by_listener: self.address.is_some() || self.port.is_some(),
            by_acceptor: self.process.is_some() || self.name.is_some() || self.cgroup.is_some(),
            last: AcceptProgress::default(),
            earlier: HashMap::new(),
            failed,
            unix: Err("not read".to_owned()),
            address: self.address,
            port: self.port,
            tasks: self.tasks(),
        })
    }
}

/// Maximum number of other network namespaces in which listeners of MPTCP are looked for.
const MAX_NAMESPACES: usize = 256;

/// Finds the listeners of MPTCP in a network namespace, or in all. Those that stay unseen until they queue a connection show in the counters
/// of the namespace.
fn seed_mptcp(wait: &mut AcceptWait, network: Option<u32>) {
    let own = namespace::of_this_thread().unwrap_or(0);
    let is_wanted = |other: u32| network.is_none_or(|network| network == other);
    if is_wanted(own) {
        let _ = wait.seed_namespace();
    }
    let others = namespace::others(own).into_iter().filter(|(other, _)| is_wanted(*other));
    for (_, process) in others.take(MAX_NAMESPACES) {
        if let Ok(file) = File::open(format!("/proc/{process}/ns/net")) {
            let _ = netns::within(file.as_fd(), || wait.seed_namespace());
        }
    }
}

impl Session for AcceptSession {
    type Progress = AcceptProgress;
    type Results = TraceAcceptResults;
    const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

    fn progress(&mut self, elapsed: Duration) -> Result<AcceptProgress, TraceError> {
        if let Ok(unix) = &mut self.unix
            && let Err(reason) = unix.look()
        {
            self.unix = Err(reason);
        }
        let counted = self.counted().map_err(TraceError::Accept)?;
        let all = times(&counted.totals.wait);
        let accepts = all.count();
        let since = (elapsed - self.last.elapsed).as_secs_f64();
        let listeners = || counted.listeners.iter().map(|(_, listener)| listener);
        self.last = AcceptProgress {
            elapsed,
            accepts,
            accepts_per_s: accepts.saturating_sub(self.last.accepts) as f64 / since,
            p50_ns: all.quantile(0.5),
            p99_ns: all.quantile(0.99),
            depth_max: listeners().map(|listener| listener.depth_max).max().unwrap_or_default(),
            overflows: listeners().map(overflows).sum(),
            woken: counted.workers.iter().map(|(_, worker)| worker.woken).sum(),
            lost: lost(&counted),
        };
        Ok(self.last)
    }

    fn finish(mut self, elapsed: Duration) -> Result<Outcome<TraceAcceptResults>, TraceError> {
        let drops = self.before.and_then(|before| Some(Drops::read()?.since(before)));
        self.wait.detach();
        let failed = std::mem::replace(&mut self.failed, Err(String::new()))
            .and_then(|mut failed| failed.end(self.address, self.port).map_err(|error| error.to_string()));
        let unix = std::mem::replace(&mut self.unix, Err(String::new())).and_then(|unix| {
            let failed = failed.as_ref().ok().map(|counted| counted.failed.as_slice());
            unix.finish(&self.tasks, failed, own_namespace().unwrap_or_default())
        });
        let of_32_bits = blind_spots::processes_of_32_bits(&self.tasks);
        let unseen = blind_spots::remark_of_32_bits(&of_32_bits);
        let calls = failed.map(|counted| account(counted.failed.iter(), counted.lost, of_32_bits));
        let counted = self.counted().map_err(TraceError::Accept)?;
        let mut results = results(&counted, elapsed);
        let Judgement { mut validity, mut notes } = counted.losses.judge(results.accepts);
        validity.extend(limits(&counted.totals, self.wait.absent()));
        validity.extend(unseen);
        if self.by_acceptor {
            let all = self.wait.listeners().map_err(TraceError::Accept)?;
            notes.extend(not_listed(&all, &counted.listeners));
        }
        if let Some(drops) = drops {
            leave_out_ignored(&mut results.listeners, drops);
            let all = self.wait.listeners().map_err(TraceError::Accept)?;
            match uncounted(&all, drops) {
                // They may be those of listeners that were not asked for.
                Some(remark) if self.by_listener => notes.push(remark.message),
                remark => validity.extend(remark),
            }
        }
        results.notes = notes;
        results.calls = calls.into();
        results.unix_listeners = unix.into();
        Ok(Outcome { results, validity, folded: Folded::new() })
    }
}

/// Maximum number of listeners that a window lists.
const MAX_TURNED_AWAY: usize = 20;

impl AcceptSession {
    /// Returns the waits of all accepted connections.
    pub(crate) fn times(&self) -> Result<LogLinear, TraceError> {
        Ok(times(&self.wait.totals().map_err(TraceError::Accept)?.wait))
    }

    /// Returns the accepts of a network namespace since the previous window.
    pub(crate) fn window(&mut self, namespace: u32) -> Result<TracedAccepts, TraceError> {
        self.wait.look().map_err(TraceError::Accept)?;
        let listeners = self.wait.listeners().map_err(TraceError::Accept)?;
        let (mut window, mut turned_away) = (Vec::new(), Vec::new());
        let mut now = HashMap::new();
        for (cookie, listener) in listeners {
            let sums = (times(&listener.wait), listener.turned_away);
            let before = self.earlier.get(&cookie);
            let waits = before.map_or_else(|| sums.0.clone(), |(waits, _)| sums.0.since(waits));
            let closed = sums.1 - before.map_or(0, |(_, closed)| *closed);
            if listener.network == namespace {
                if closed > 0 {
                    turned_away.push(TurnedAway { listener: cookie, accepts: waits.count(), closed });
                }
                if waits.count() > 0 {
                    window.push(waits);
                }
            }
            now.insert(cookie, sums);
        }
        self.earlier = now;
        turned_away.sort_by_key(|of| (Reverse(of.closed), of.listener));
        turned_away.truncate(MAX_TURNED_AWAY);
        let waits = merged(window);
        Ok(TracedAccepts {
            accepts: waits.as_ref().map_or(0, LogLinear::count),
            wait_p99_ns: waits.map(|times| times.quantile(0.99)),
            turned_away,
        })
    }

    /// Returns whether accepts were not counted, because the table of listeners is full.
    pub(crate) fn is_full(&self) -> Result<bool, TraceError> {
        Ok(self.wait.totals().map_err(TraceError::Accept)?.lost_listeners > 0)
    }

    fn counted(&self) -> Result<Counted, BpfError> {
        self.wait.look()?;
        let (mut listeners, workers) = (self.wait.listeners()?, self.wait.workers()?);
        if self.by_acceptor {
            let with_accepts: HashSet<u64> = workers.iter().map(|(key, _)| key.listener).collect();
            listeners.retain(|(cookie, _)| with_accepts.contains(cookie));
        }
        // Listeners that were there before the trace and have not been used.
        let has_workers: HashSet<u64> = workers.iter().map(|(key, _)| key.listener).collect();
        let is_used = |cookie: &u64, listener: &Listener| {
            listener.depth_max > 0
                || overflows(listener) + listener.other_drops() > 0
                || has_workers.contains(cookie)
        };
        listeners.retain(|(cookie, listener)| is_used(cookie, listener));
        let totals = self.wait.totals()?;
        let losses = losses(&totals, self.wait.missed()?);
        Ok(Counted { totals, losses, listeners, workers })
    }
}

fn lost(counted: &Counted) -> u64 {
    counted.losses.sum() + counted.totals.unseen
}

fn overflows(listener: &Listener) -> u64 {
    listener.refused_syns() + listener.refused_acks
}

fn results(counted: &Counted, elapsed: Duration) -> TraceAcceptResults {
    let mut by_listener: HashMap<u64, Vec<&(WorkerKey, Worker)>> = HashMap::new();
    for worker in &counted.workers {
        by_listener.entry(worker.0.listener).or_default().push(worker);
    }
    let mut listeners: Vec<TraceListener> = counted
        .listeners
        .iter()
        .map(|(cookie, listener)| {
            listener_result(*cookie, listener, by_listener.remove(cookie).unwrap_or_default())
        })
        .collect();
    // The cookie breaks ties, so that equal counters give the same order in every run.
    listeners.sort_by_key(|listener| (Reverse(listener.accepts), Reverse(listener.queued), listener.cookie));
    let wait = times(&counted.totals.wait);
    let accepts = wait.count();
    let of_workers =
        |number: fn(&Worker) -> u64| counted.workers.iter().map(|(_, worker)| number(worker)).sum();
    TraceAcceptResults {
        tier: AcceptWait::TIER.to_owned(),
        elapsed_ns: elapsed.as_nanos() as u64,
        accepts,
        accepts_per_s: accepts as f64 / elapsed.as_secs_f64().max(1e-9),
        wait_ns: distribution(&wait),
        handshake_ns: distribution(&times(&counted.totals.handshake)),
        overflows: listeners.iter().map(|listener| listener.overflows).sum(),
        empty: of_workers(|worker| worker.empty),
        woken_for_nothing: of_workers(|worker| worker.woken),
        lost: lost(counted),
        notes: Vec::new(),
        earlier: counted.totals.earlier,
        histogram: wait.steps().map(|(from_ns, count)| WaitStep { from_ns, count }).collect(),
        listeners,
        calls: Part::default(),
        symptoms: Part::default(),
        unix_listeners: Part::default(),
    }
}

/// Moves packets that are not losses from `other_drops` to `ignored`: sk_drops of a listener also counts SYNs that are sent again, RSTs of
/// handshakes, and last ACKs that TCP_DEFER_ACCEPT ignores. ListenDrops counts SYNs and last ACKs that were lost, of all listeners of the
/// namespace.
fn leave_out_ignored(listeners: &mut [TraceListener], drops: Drops) {
    let lost = drops.all.saturating_sub(drops.overflows);
    for listener in listeners.iter_mut().filter(|listener| listener.namespace == drops.namespace) {
        let ignored = listener.other_drops.saturating_sub(lost);
        listener.other_drops -= ignored;
        listener.ignored = Some(ignored);
    }
}

/// Says that queues of listeners overflowed from which the chosen threads accepted nothing: a server that hangs is such a one, and servers that
/// were not asked for.
fn not_listed(all: &[(u64, Listener)], listed: &[(u64, Listener)]) -> Option<String> {
    let here = own_namespace();
    let sum = |listeners: &[(u64, Listener)]| -> u64 {
        let own = listeners.iter().filter(|(_, listener)| Some(listener.network) == here);
        own.map(|(_, listener)| overflows(listener)).sum()
    };
    let others = sum(all).saturating_sub(sum(listed));
    (others > 0).then(|| {
        format!(
            "{} met full queues of listeners from which the chosen threads accepted nothing; without --pid, --comm and --cgroup the trace lists them",
            counted(others, "packet")
        )
    })
}

/// Remarks that the namespace counts more overflows than the trace.
fn uncounted(listeners: &[(u64, Listener)], drops: Drops) -> Option<Remark> {
    let own = listeners.iter().filter(|(_, listener)| listener.network == drops.namespace);
    let seen: u64 = own.map(|(_, listener)| overflows(listener)).sum();
    (drops.overflows > seen).then(|| {
        let message = format!(
            "the network namespace counts {} of accept queues during the trace (TcpExt.ListenOverflows), the trace {seen}",
            counted(drops.overflows, "overflow")
        );
        Remark::new("overflows-unseen", message)
    })
}

/// Builds a histogram from buckets of the coarse resolution.
fn coarse(buckets: &[u32], sum_ns: u64, max_ns: u64) -> LogLinear {
    LogLinear::new(COARSE_BITS, buckets.iter().map(|&number| u64::from(number)).collect(), sum_ns, max_ns)
}

fn listener_result(
    cookie: u64,
    listener: &Listener,
    mut workers: Vec<&(WorkerKey, Worker)>,
) -> TraceListener {
    workers.sort_by_key(|(key, worker)| (Reverse(worker.accepts), key.process, key.thread));
    let wait = times(&listener.wait);
    let shares: Vec<u64> = workers.iter().map(|(_, worker)| worker.accepts).collect();
    TraceListener {
        address: listener.address().to_string(),
        cookie,
        namespace: listener.network,
        group: listener.group.into(),
        closed: listener.is_closed(),
        queued: listener.queued,
        accepts: wait.count(),
        other_accepts: listener.accepted.saturating_sub(wait.count()),
        wait_ns: distribution(&wait),
        handshake_ns: distribution(&coarse(
            &listener.handshakes,
            listener.handshake_ns,
            listener.handshake_max_ns,
        )),
        retried_handshakes: listener.retried,
        depth: Depth {
            mean: listener.depth_sum as f64 / listener.queued.max(1) as f64,
            max: listener.depth_max,
            backlog: listener.backlog,
            full: listener.full,
        },
        overflows: overflows(listener),
        overflow_acks: listener.refused_acks,
        other_drops: listener.other_drops(),
        ignored: None,
        never_accepted: listener.never_accepted,
        closed_by_peer: listener.closed_by_peer,
        closed_first: workers.iter().map(|(_, worker)| worker.closed).sum(),
        reset: listener.reset,
        jain: balance::jain(&shares),
        workers: worker_results(&workers, is_alive),
    }
}

/// Returns the workers, most accepts first. Many processes of one name that have ended are one worker.
fn worker_results(workers: &[&(WorkerKey, Worker)], is_alive: impl Fn(u32) -> bool) -> Vec<TraceWorker> {
    let rows = ended::rows(workers, |(_, worker)| Some(worker.name()), |(key, _)| key.process, is_alive);
    let sum = |row: ended::Row| {
        let (key, first) = workers[row.items[0]];
        let sum = row.items[1..].iter().fold(*first, |sum, &other| sum.plus(&workers[other].1));
        TraceWorker { processes: row.processes, ..worker_result(key, &sum) }
    };
    let mut results: Vec<TraceWorker> = rows.into_iter().map(sum).collect();
    results.sort_by_key(|worker| (Reverse(worker.accepts), worker.process, worker.thread));
    results
}

fn worker_result(key: &WorkerKey, worker: &Worker) -> TraceWorker {
    let waits = coarse(&worker.waits, worker.wait_ns, worker.wait_max_ns);
    TraceWorker {
        process: key.process,
        processes: 1,
        thread: key.thread,
        name: worker.name(),
        accepts: worker.accepts,
        mean_ns: worker.wait_ns / worker.accepts.max(1),
        p50_ns: waits.quantile(0.5),
        p99_ns: waits.quantile(0.99),
        max_ns: worker.wait_max_ns,
        open: worker.open,
        reads: worker.reads,
        empty: worker.empty,
        woken_for_nothing: worker.woken,
        closed_first: worker.closed,
        failed: worker.failed,
        error: (worker.failed > 0)
            .then(|| errno_name(&io::Error::from_raw_os_error(worker.error as i32)).to_string()),
    }
}

/// Lists the losses; `missed` is the number of events that no program saw (`recursion_misses`).
fn losses(totals: &Totals, missed: u64) -> Losses {
    Losses::new([
        (totals.lost_connections, "connections were not followed: the table of connections was full"),
        (totals.lost_listeners, "connections were not counted: the table of listeners was full"),
        (totals.lost_workers, "events were not counted: the table of workers was full"),
        (totals.unmatched, "established connections were not followed: no listener was seen to queue them"),
        (missed, MISSED),
    ])
}

/// Remarks on accepts that no hook saw and on hooks that the kernel lacks.
fn limits(totals: &Totals, absent: &[&str]) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if totals.unseen > 0 {
        let message = format!(
            "accepted without a hook seeing it (io_uring with direct descriptors), so that the wait is unknown: {}",
            counted(totals.unseen, "connection")
        );
        remarks.push(Remark::new("accepts-unseen", message));
    }
    if !absent.is_empty() {
        let message =
            format!("this kernel lacks these hooks, or has them with other arguments: {}", absent.join(", "));
        remarks.push(Remark::new("hooks-missing", message));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::instrument::tests::attached;

    #[test]
    fn missed_events_are_part_of_lost() {
        let test = "accept::tests::missed_events_are_part_of_lost";
        let Some(session) = attached(test, Accept::default().attach()) else { return };
        let totals = session.wait.totals().unwrap();
        assert_eq!(losses(&totals, 3).sum(), losses(&totals, 0).sum() + 3);
    }
}
