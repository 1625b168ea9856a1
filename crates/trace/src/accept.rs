use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::accept_wait::{Listener, Totals, Wanted, Worker, WorkerKey};
use fourtuple_bpf::tracing::COARSE_BITS;
use fourtuple_bpf::{AcceptWait, BpfError};
use fourtuple_measure::{LogLinear, balance};
use fourtuple_record::{Depth, Remark, TraceAcceptResults, TraceListener, TraceWorker, WaitStep};

use crate::TraceError;
use crate::times::{spread, times};

/// How soon a stop is heard.
const LOOK: Duration = Duration::from_millis(50);
/// How often the one who waits hears something, and the drops of listeners are looked at.
const TELL: Duration = Duration::from_millis(200);

/// What becomes of TCP connections until accept() has them: the wait in the queue by listener and worker, of programs that
/// know nothing of it.
#[derive(Clone, Debug, Default)]
pub struct Accept {
    /// Process that accepts, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that accepts (comm), 15 bytes at most.
    pub name: Option<String>,
    /// Address of the listener.
    pub address: Option<IpAddr>,
    /// Port of the listener.
    pub port: Option<u16>,
    /// Id of a cgroup (version 2) of who accepts: the inode of its directory.
    pub cgroup: Option<u64>,
    /// For how long; absent: until told to stop.
    pub time: Option<Duration>,
}

/// How it goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AcceptNews {
    /// Since the beginning.
    pub elapsed: Duration,
    /// Connections accepted so far.
    pub accepts: u64,
    /// These per second, of the time since the last news.
    pub accepts_per_s: f64,
    /// Median and 99th percentile of all waits so far, in nanoseconds.
    pub p50_ns: u64,
    /// See `p50_ns`.
    pub p99_ns: u64,
    /// The deepest queue so far.
    pub depth_max: u32,
    /// SYNs and final ACKs dropped so far because a queue was full.
    pub overflows: u64,
    /// Threads woken for nothing so far.
    pub woken: u64,
    /// What was lost so far.
    pub lost: u64,
}

/// What was seen, and what limits it.
#[derive(Clone, Debug)]
pub struct AcceptOutcome {
    /// For the record.
    pub results: TraceAcceptResults,
    /// Why it is not to be believed wholly.
    pub validity: Vec<Remark>,
}

/// What the kernel has counted until now.
struct Counted {
    totals: Box<Totals>,
    listeners: Vec<(u64, Listener)>,
    workers: Vec<(WorkerKey, Worker)>,
}

impl Accept {
    /// Traces until the time is up or `stop` is set. `attached` is called once, as soon as connections are counted; `news`
    /// every 200 ms.
    ///
    /// # Errors
    ///
    /// [`TraceError::Accept`] where the programs cannot be attached.
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(),
        mut news: impl FnMut(&AcceptNews),
    ) -> Result<AcceptOutcome, TraceError> {
        let mut wait = AcceptWait::attach(&self.wanted()).map_err(TraceError::Accept)?;
        let begun = Instant::now();
        attached();
        let mut last = AcceptNews::default();
        loop {
            let elapsed = begun.elapsed();
            let left = self.time.map_or(LOOK, |time| time.saturating_sub(elapsed));
            if left.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            if elapsed >= last.elapsed + TELL {
                last = self.look(&wait, elapsed, &last).map_err(TraceError::Accept)?;
                news(&last);
            }
            thread::sleep(left.min(LOOK));
        }
        let elapsed = begun.elapsed();
        wait.detach();
        let counted = self.counted(&wait).map_err(TraceError::Accept)?;
        let early = self.time.is_some_and(|time| elapsed < time);
        let validity = validity(&counted.totals, wait.absent(), early.then_some(elapsed));
        Ok(AcceptOutcome { results: results(&counted, elapsed), validity })
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            process: self.process,
            name: self.name.clone(),
            address: self.address,
            port: self.port,
            cgroup: self.cgroup,
        }
    }

    fn counted(&self, wait: &AcceptWait) -> Result<Counted, BpfError> {
        wait.look()?;
        let (mut listeners, workers) = (wait.listeners()?, wait.workers()?);
        if self.process.is_some() || self.name.is_some() || self.cgroup.is_some() {
            // Whose listener it is shows with the first accept only.
            let theirs: HashSet<u64> = workers.iter().map(|(key, _)| key.listener).collect();
            listeners.retain(|(cookie, _)| theirs.contains(cookie));
        }
        Ok(Counted { totals: wait.totals()?, listeners, workers })
    }

    fn look(&self, wait: &AcceptWait, elapsed: Duration, last: &AcceptNews) -> Result<AcceptNews, BpfError> {
        let counted = self.counted(wait)?;
        let all = times(&counted.totals.wait);
        let accepts = all.count();
        let since = (elapsed - last.elapsed).as_secs_f64();
        let listeners = || counted.listeners.iter().map(|(_, listener)| listener);
        Ok(AcceptNews {
            elapsed,
            accepts,
            accepts_per_s: accepts.saturating_sub(last.accepts) as f64 / since,
            p50_ns: all.quantile(0.5),
            p99_ns: all.quantile(0.99),
            depth_max: listeners().map(|listener| listener.depth_max).max().unwrap_or_default(),
            overflows: listeners().map(overflows).sum(),
            woken: counted.workers.iter().map(|(_, worker)| worker.woken).sum(),
            lost: lost(&counted.totals),
        })
    }
}

fn lost(totals: &Totals) -> u64 {
    totals.lost_connections + totals.lost_listeners + totals.lost_workers + totals.unmatched + totals.unseen
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
    // The cookie decides among equals, so that the order is the same each time.
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
        wait_ns: spread(&wait),
        handshake_ns: spread(&times(&counted.totals.handshake)),
        overflows: listeners.iter().map(|listener| listener.overflows).sum(),
        empty: of_workers(|worker| worker.empty),
        woken_for_nothing: of_workers(|worker| worker.woken),
        lost: lost(&counted.totals),
        earlier: counted.totals.earlier,
        histogram: wait.steps().map(|(from_ns, count)| WaitStep { from_ns, count }).collect(),
        listeners,
    }
}

/// Of a histogram of coarse steps.
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
        wait_ns: spread(&wait),
        handshake_ns: spread(&coarse(&listener.handshakes, listener.handshake_ns, listener.handshake_max_ns)),
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
        never_accepted: listener.never_accepted,
        closed_by_peer: listener.closed_by_peer,
        closed_first: workers.iter().map(|(_, worker)| worker.closed).sum(),
        reset: listener.reset,
        jain: balance::jain(&shares),
        workers: workers.into_iter().map(|(key, worker)| worker_result(key, worker)).collect(),
    }
}

fn worker_result(key: &WorkerKey, worker: &Worker) -> TraceWorker {
    let waits = coarse(&worker.waits, worker.wait_ns, worker.wait_max_ns);
    TraceWorker {
        process: key.process,
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
    }
}

fn validity(totals: &Totals, absent: &[&str], stopped: Option<Duration>) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if let Some(elapsed) = stopped {
        let message =
            format!("stopped after {:.1} s; what was seen until then is below", elapsed.as_secs_f64());
        remarks.push(Remark::new("interrupted", message));
    }
    let losses = [
        (totals.lost_connections, "connections were not followed: too many at the same time"),
        (totals.lost_listeners, "connections belong to listeners that had no room in the table"),
        (totals.lost_workers, "events belong to workers that had no room in the table"),
        (totals.unmatched, "connections were established and no listener said that it had them"),
    ];
    for (number, what) in losses {
        if number > 0 {
            remarks.push(Remark::new("events-lost", format!("{number} {what}")));
        }
    }
    if totals.unseen > 0 {
        let message = format!(
            "{} connections were accepted in a way that no hook tells (io_uring without a descriptor); their wait is not \
             known",
            totals.unseen
        );
        remarks.push(Remark::new("accepts-unseen", message));
    }
    if !absent.is_empty() {
        let message = format!("this kernel has not got, or has otherwise: {}", absent.join(", "));
        remarks.push(Remark::new("hooks-missing", message));
    }
    remarks
}
