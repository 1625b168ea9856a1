//! All traces at once, for the snapshot that `doctor` examines.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fourtuple_bpf::failed_calls::Failed;
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::TraceTuple;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::snapshot::{
    FailedElsewhere, Failures, Owner, Traced, TracedAccepts, TracedConnects, TracedLocks,
};

use crate::host::namespace;
use crate::trace::accept::Accept;
use crate::trace::blind_spots;
use crate::trace::connect::Connect;
use crate::trace::error::TraceError;
use crate::trace::failed::{Counted, FailedSession, account};
use crate::trace::instrument::{Instrument, Session};
use crate::trace::locks::{Locks, by_class};

/// Maximum number of pairs of process and destination in a snapshot.
const LISTED: usize = 100;
/// The share of a processor for reading lock waits in windows.
const SHARE: f64 = 0.001;
/// Interval of looking for programs of 32 bits, which takes a look at each process of the host.
const LOOK_INTERVAL: Duration = Duration::from_mins(1);

/// Time after which a trace that failed is attached again: the kernel refuses a program for the moment when it has no memory, or when a
/// signal is pending (EAGAIN).
const AGAIN_INTERVAL: Duration = Duration::from_secs(10);

/// A value of a trace, or the reason why there is none: the error of the trace, as text for the snapshot.
type Seen<T> = Result<T, String>;

/// A trace that may have failed.
#[derive(Debug)]
struct Trace<S> {
    session: Seen<S>,
    /// When it failed last. A trace that could not be attached at the start has not failed: it may not be attached on this host.
    failed: Option<Instant>,
}

impl<S> Trace<S> {
    fn new(session: Result<S, TraceError>) -> Trace<S> {
        Trace { session: seen(session), failed: None }
    }

    fn absent(reason: &str) -> Trace<S> {
        Trace { session: Err(reason.to_owned()), failed: None }
    }

    /// Reads from the trace, and detaches it if that fails.
    fn read<T>(&mut self, read: impl FnOnce(&mut S) -> Result<T, TraceError>) -> Seen<T> {
        let session = self.session.as_mut().map_err(|reason| reason.clone())?;
        let result = seen(read(session));
        if let Err(reason) = &result {
            (self.session, self.failed) = (Err(reason.clone()), Some(Instant::now()));
        }
        result
    }

    /// Attaches the trace again if it failed some time ago.
    fn renew(&mut self, attach: impl FnOnce() -> Result<S, TraceError>) {
        if self.session.is_err() && self.failed.is_some_and(|at| at.elapsed() >= AGAIN_INTERVAL) {
            (self.session, self.failed) = (seen(attach()), Some(Instant::now()));
        }
    }
}

/// Running traces of connect(), accept() and lock waits. Each trace may be absent: a kernel or a host may permit one and refuse another.
#[derive(Debug)]
pub struct Survey {
    /// Inode of the network namespace whose calls and waits the windows have.
    namespace: u32,
    began: Instant,
    connect: Trace<<Connect as Instrument>::Session>,
    accept: Trace<<Accept as Instrument>::Session>,
    locks: Trace<<Locks as Instrument>::Session>,
    failed: Trace<FailedSession>,
    /// The port searches and accept waits of traces that were replaced because a table was full.
    ended: (LogLinear, LogLinear),
    /// Programs of 32 bits, and when they were looked for.
    of_32_bits: Option<(Instant, Vec<Owner>)>,
}

/// Durations of all events since the traces were attached, in all network namespaces.
#[derive(Clone, Debug)]
pub struct SurveyTimes {
    /// Port searches that found a port.
    pub search: Seen<LogLinear>,
    /// Waits from the end of the handshake to accept().
    pub wait: Seen<LogLinear>,
}

/// The calls and lock waits of a time window in a network namespace.
#[derive(Clone, Debug)]
pub struct Window {
    pub connects: Seen<Traced>,
    pub accepts: Seen<TracedAccepts>,
    pub locks: Seen<TracedLocks>,
    pub failures: Seen<Failures>,
}

impl Survey {
    /// Maximum time between two calls of [`Survey::poll`].
    pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

    /// Attaches all traces that this process may attach. `namespace`: inode of the network namespace of the windows.
    pub fn attach(namespace: u32) -> Survey {
        // First, because the other traces take seconds to load on a busy host.
        let failed = Trace::new(failures_of_all());
        Survey {
            failed,
            connect: Trace::new(connect()),
            accept: Trace::new(accept()),
            locks: Trace::new(locks(namespace)),
            namespace,
            ..Survey::absent("")
        }
    }

    /// Returns a survey without a trace; `reason` says why.
    pub fn absent(reason: &str) -> Survey {
        Survey {
            namespace: 0,
            began: Instant::now(),
            connect: Trace::absent(reason),
            accept: Trace::absent(reason),
            locks: Trace::absent(reason),
            failed: Trace::absent(reason),
            ended: (LogLinear::default(), LogLinear::default()),
            of_32_bits: None,
        }
    }

    /// Returns whether a trace is attached, which needs [`Survey::poll`].
    pub fn is_attached(&self) -> bool {
        self.connect.session.is_ok()
            || self.accept.session.is_ok()
            || self.locks.session.is_ok()
            || self.failed.session.is_ok()
    }

    /// Returns the durations of all events so far.
    pub fn times(&mut self) -> SurveyTimes {
        let mut search = self.connect.read(|connect| connect.times());
        let mut wait = self.accept.read(|accept| accept.times());
        for (times, ended) in [(&mut search, &self.ended.0), (&mut wait, &self.ended.1)] {
            if let Ok(times) = times {
                times.merge(ended);
            }
        }
        SurveyTimes { search, wait }
    }

    /// Drains what the kernel keeps for a short time only. A trace that fails is detached, its next value is the error, and a later
    /// window attaches it again.
    pub fn poll(&mut self) {
        let elapsed = self.began.elapsed();
        let _ = self.connect.read(|connect| connect.poll(elapsed));
        let _ = self.accept.read(|accept| accept.poll(elapsed));
        let _ = self.locks.read(|locks| locks.poll(elapsed));
    }

    /// Returns what the traces saw since the previous call. A trace whose table is full is attached again. Lock waits are of an earlier
    /// time if reading them took long.
    pub fn window(&mut self) -> Window {
        let namespace = self.namespace;
        let known = self.of_32_bits.take().filter(|(at, _)| at.elapsed() < LOOK_INTERVAL);
        let (at, of_32_bits) = known.unwrap_or_else(|| (Instant::now(), of_32_bits(namespace)));
        self.of_32_bits = Some((at, of_32_bits.clone()));
        self.failed.renew(failures_of_all);
        self.connect.renew(connect);
        self.accept.renew(accept);
        self.locks.renew(|| locks(namespace));
        let (search, wait) = (&mut self.ended.0, &mut self.ended.1);
        let connects = self.connect.read(|connect| {
            let window = connect.window(namespace)?;
            if connect.is_full()? {
                search.merge(&connect.times()?);
                *connect = self::connect()?;
            }
            Ok(traced(window))
        });
        let accepts = self.accept.read(|accept| {
            let window = accept.window(namespace)?;
            if accept.is_full()? {
                wait.merge(&accept.times()?);
                *accept = self::accept()?;
            }
            Ok(window)
        });
        let failures = self.failed.read(|session| {
            let window = session.window()?;
            if window.lost > 0 {
                *session = failures_of_all()?;
            }
            Ok(failures(namespace, &window, of_32_bits))
        });
        let locks = self.locks.read(|locks| Ok((locks.window(SHARE)?, locks.blind_spot())));
        Window { connects, accepts, locks: locks.and_then(|(locks, blind)| visible(locks, blind)), failures }
    }

    /// Detaches the traces and returns what they saw.
    pub fn finish(self) -> Window {
        let namespace = self.namespace;
        let elapsed = self.began.elapsed();
        let connects = self.connect.session.and_then(|mut connect| seen(connect.window(namespace)));
        let accepts = self.accept.session.and_then(|mut accept| seen(accept.window(namespace)));
        let locks = self.locks.session.and_then(|locks| {
            let blind = locks.blind_spot();
            let results = seen(locks.finish(elapsed))?.results;
            let (interval_ns, classes) = (results.elapsed_ns, by_class(results.classes));
            visible(TracedLocks { interval_ns, classes }, blind)
        });
        let failed = self.failed.session.and_then(|mut session| seen(session.window()));
        Window {
            connects: connects.map(traced),
            accepts,
            locks,
            failures: failed.map(|failed| failures(namespace, &failed, of_32_bits(namespace))),
        }
    }
}

/// Why the traces of a survey count no failed calls of their own.
const COUNTED: &str = "the survey counts failed calls";

fn connect() -> Result<<Connect as Instrument>::Session, TraceError> {
    Connect::default().attach_beside(Err(COUNTED.to_owned()))
}

fn failures_of_all() -> Result<FailedSession, TraceError> {
    FailedSession::attach(&TaskFilter::default())
}

fn accept() -> Result<<Accept as Instrument>::Session, TraceError> {
    Accept::default().attach_beside(Err(COUNTED.to_owned()))
}

fn locks(namespace: u32) -> Result<<Locks as Instrument>::Session, TraceError> {
    Locks { network: Some(namespace), ..Locks::default() }.attach()
}

fn seen<T>(result: Result<T, TraceError>) -> Seen<T> {
    result.map_err(|error| error.to_string())
}

/// Returns the waits, or why there are none where this host hides most of them.
fn visible(locks: TracedLocks, blind: Option<&str>) -> Seen<TracedLocks> {
    match blind {
        Some(reason) if locks.classes.is_empty() => Err(reason.to_owned()),
        _ => Ok(locks),
    }
}

fn traced((tuples, searches): (Vec<TraceTuple>, Option<LogLinear>)) -> Traced {
    Traced {
        connects: listed(&tuples).into_iter().filter_map(connects).collect(),
        search_p99_ns: searches.map(|times| times.quantile(0.99)),
        searches: tuples.iter().map(|tuple| tuple.searches).sum(),
        search_ns: tuples.iter().map(|tuple| tuple.mean_ns * tuple.searches).sum(),
        established: tuples.iter().map(|tuple| tuple.established).sum(),
    }
}

/// Returns the pairs of a snapshot, those with the most calls first.
fn listed(tuples: &[TraceTuple]) -> Vec<&TraceTuple> {
    let mut all: Vec<&TraceTuple> = tuples.iter().collect();
    all.sort_by_key(|tuple| Reverse(calls(tuple)));
    // A destination that does not answer gets few calls, because each of them waits for long: up to half of the places are for these.
    let is_silent = |tuple: &&TraceTuple| tuple.failed > 0 && tuple.established == 0;
    let (mut silent, others): (Vec<&TraceTuple>, Vec<&TraceTuple>) = all.into_iter().partition(is_silent);
    let further = silent.split_off(silent.len().min(LISTED / 2));
    let mut listed: Vec<&TraceTuple> = silent.into_iter().chain(others).chain(further).take(LISTED).collect();
    listed.sort_by_key(|tuple| Reverse(calls(tuple)));
    listed
}

fn calls(tuple: &TraceTuple) -> u64 {
    tuple.searches + tuple.given_port + tuple.failed
}

fn owner(tuple: &TraceTuple, calls: u64) -> Owner {
    Owner { pid: tuple.process, name: tuple.name.clone(), sockets: u32::try_from(calls).unwrap_or(u32::MAX) }
}

fn connects(tuple: &TraceTuple) -> Option<TracedConnects> {
    Some(TracedConnects {
        owner: owner(tuple, calls(tuple)),
        processes: tuple.processes,
        destination: tuple.destination.parse().ok()?,
        searches: tuple.searches,
        search_mean_ns: tuple.mean_ns,
        search_p99_ns: tuple.p99_ns,
        given_port: tuple.given_port,
        established: tuple.established,
        failed: tuple.failed,
    })
}

fn failures(namespace: u32, Counted { failed, lost }: &Counted, of_32_bits: Vec<Owner>) -> Failures {
    let of = |namespace| failed.iter().filter(move |failed| failed.failure.namespace == namespace);
    let elsewhere = if namespace::is_of_host(namespace) { elsewhere(namespace, failed) } else { Vec::new() };
    Failures { elsewhere, ..account(of(namespace), *lost, of_32_bits) }
}

/// Returns the failed calls of other network namespaces of which a process is visible.
fn elsewhere(namespace: u32, failed: &[Failed]) -> Vec<FailedElsewhere> {
    let mut calls: BTreeMap<u32, u64> = BTreeMap::new();
    for failed in failed.iter().filter(|failed| failed.failure.namespace != namespace) {
        *calls.entry(failed.failure.namespace).or_default() += failed.calls;
    }
    if calls.is_empty() {
        return Vec::new();
    }
    let processes = namespace::others(namespace);
    let mut most: Vec<(u64, u32)> = calls.into_iter().map(|(namespace, calls)| (calls, namespace)).collect();
    most.sort_by_key(|of| Reverse(*of));
    let seen = most.into_iter().filter_map(|(_, of)| Some((of, *processes.get(&of)?)));
    seen.take(LISTED)
        .map(|(of, pid)| {
            let its = failed.iter().filter(|failed| failed.failure.namespace == of);
            let mut calls = account(its, 0, Vec::new()).calls;
            calls.truncate(LISTED);
            FailedElsewhere { pid, calls }
        })
        .collect()
}

/// Returns the programs of 32 bits of a network namespace.
fn of_32_bits(namespace: u32) -> Vec<Owner> {
    blind_spots::processes_of_32_bits(&TaskFilter { network: Some(namespace), ..TaskFilter::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_failed_is_attached_again_after_a_time() {
        let fails = |_: &mut u32| Err::<(), _>(TraceError::NoTier { reasons: "for now".to_owned() });
        let mut trace = Trace::new(Ok(1));
        assert!(trace.read(fails).is_err() && trace.session.is_err());
        trace.renew(|| panic!("too soon"));
        trace.failed = trace.failed.and_then(|at| at.checked_sub(AGAIN_INTERVAL));
        trace.renew(|| Err(TraceError::NoTier { reasons: "still".to_owned() }));
        trace.renew(|| panic!("too soon after an attempt"));
        trace.failed = trace.failed.and_then(|at| at.checked_sub(AGAIN_INTERVAL));
        trace.renew(|| Ok(2));
        assert_eq!(trace.read(|session| Ok(*session)), Ok(2));
        // What this host does not permit is not tried again.
        let mut never = Trace::<u32>::absent("no BTF");
        never.renew(|| panic!("it never ran"));
        assert_eq!(never.read(|session| Ok(*session)), Err("no BTF".to_owned()));
    }

    #[test]
    fn silence_on_a_host_that_hides_waits_is_not_health() {
        let some = TracedLocks { interval_ns: 1, classes: [("bhash".to_owned(), Default::default())].into() };
        assert_eq!(visible(TracedLocks::default(), Some("hidden")), Err("hidden".to_owned()));
        assert_eq!(visible(TracedLocks::default(), None), Ok(TracedLocks::default()));
        assert_eq!(visible(some.clone(), Some("hidden")), Ok(some));
    }

    #[test]
    fn destinations_that_do_not_answer_are_listed() {
        let tuple = |searches, failed, established| TraceTuple {
            process: 7,
            processes: 1,
            name: "proxy".to_owned(),
            destination: "10.0.0.2:80".to_owned(),
            namespace: 1,
            searches,
            even: 0,
            odd: 0,
            mean_ns: 0,
            p99_ns: 0,
            even_p50_ns: None,
            odd_p50_ns: None,
            failed,
            no_port: 0,
            given_port: 0,
            established,
            retries: 0,
            syn_retries: 0,
            closed_first: 0,
            closed_by_peer: 0,
            in_use: None,
            range: None,
            fill: None,
        };
        let busy = |number: u64| tuple(1_000 + number, 0, 1_000);
        let tuples: Vec<TraceTuple> =
            (0..200).map(busy).chain([tuple(2, 1, 0)]).chain((0..80).map(|_| tuple(1, 1, 0))).collect();
        let listed: Vec<u64> = listed(&tuples).into_iter().map(calls).collect();
        assert_eq!((listed.len(), listed[0], listed[49], listed[50], listed[51]), (100, 1_199, 1_150, 3, 2));
    }
}
