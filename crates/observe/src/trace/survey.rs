//! All traces at once, for the snapshot that `doctor` examines.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use fourtuple_bpf::failed_calls::Failed;
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::TraceTuple;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::snapshot::{Failures, Owner, Traced, TracedAccepts, TracedConnects, TracedLocks};

use crate::trace::accept::Accept;
use crate::trace::blind_spots;
use crate::trace::connect::Connect;
use crate::trace::error::TraceError;
use crate::trace::failed::{FailedSession, account};
use crate::trace::instrument::{Instrument, Session};
use crate::trace::locks::{Locks, by_class};

/// Maximum number of pairs of process and destination in a snapshot.
const LISTED: usize = 100;
/// The share of a processor for reading lock waits in windows.
const SHARE: f64 = 0.001;
/// Interval of looking for programs of 32 bits, which takes a look at each process of the host.
const LOOK_INTERVAL: Duration = Duration::from_mins(1);

/// A value of a trace, or the reason why there is none: the error of the trace, as text for the snapshot.
type Seen<T> = Result<T, String>;

/// Running traces of connect(), accept() and lock waits. Each trace may be absent: a kernel or a host may permit one and refuse another.
#[derive(Debug)]
pub struct Survey {
    began: Instant,
    connect: Seen<<Connect as Instrument>::Session>,
    accept: Seen<<Accept as Instrument>::Session>,
    locks: Seen<<Locks as Instrument>::Session>,
    failed: Seen<FailedSession>,
    /// The port searches and accept waits of traces that were replaced because a table was full.
    ended: (LogLinear, LogLinear),
    /// Programs of 32 bits of a network namespace, and when they were looked for.
    of_32_bits: Option<(Instant, u32, Vec<Owner>)>,
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
    /// Lock waits, of the whole host.
    pub locks: Seen<TracedLocks>,
    pub failures: Seen<Failures>,
}

impl Survey {
    /// Maximum time between two calls of [`Survey::poll`].
    pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

    /// Attaches all traces that this process may attach.
    pub fn attach() -> Survey {
        // First, because the other traces take seconds to load on a busy host.
        let failed = seen(FailedSession::attach(&TaskFilter::default()));
        Survey {
            failed,
            connect: seen(connect()),
            accept: seen(accept()),
            locks: seen(Locks::default().attach()),
            ..Survey::absent("")
        }
    }

    /// Returns a survey without a trace; `reason` says why.
    pub fn absent(reason: &str) -> Survey {
        Survey {
            began: Instant::now(),
            connect: Err(reason.to_owned()),
            accept: Err(reason.to_owned()),
            locks: Err(reason.to_owned()),
            failed: Err(reason.to_owned()),
            ended: (LogLinear::default(), LogLinear::default()),
            of_32_bits: None,
        }
    }

    /// Returns whether a trace is attached, which needs [`Survey::poll`].
    pub fn is_attached(&self) -> bool {
        self.connect.is_ok() || self.accept.is_ok() || self.locks.is_ok() || self.failed.is_ok()
    }

    /// Returns the durations of all events so far.
    pub fn times(&mut self) -> SurveyTimes {
        let mut search = read(&mut self.connect, |connect| connect.times());
        let mut wait = read(&mut self.accept, |accept| accept.times());
        for (times, ended) in [(&mut search, &self.ended.0), (&mut wait, &self.ended.1)] {
            if let Ok(times) = times {
                times.merge(ended);
            }
        }
        SurveyTimes { search, wait }
    }

    /// Drains what the kernel keeps for a short time only. A trace that fails is detached, and its next value is the error.
    pub fn poll(&mut self) {
        let elapsed = self.began.elapsed();
        let _ = read(&mut self.connect, |connect| connect.poll(elapsed));
        let _ = read(&mut self.accept, |accept| accept.poll(elapsed));
        let _ = read(&mut self.locks, |locks| locks.poll(elapsed));
    }

    /// Returns what the traces saw in a network namespace, by its inode, since the previous call. A trace whose table is full is
    /// attached again. Lock waits are of an earlier time if reading them took long.
    pub fn window(&mut self, namespace: u32) -> Window {
        let is_known = |(at, of, _): &(Instant, u32, _)| *of == namespace && at.elapsed() < LOOK_INTERVAL;
        let known = self.of_32_bits.take().filter(is_known);
        let (at, _, of_32_bits) = known.unwrap_or_else(|| (Instant::now(), namespace, of_32_bits(namespace)));
        self.of_32_bits = Some((at, namespace, of_32_bits.clone()));
        let (search, wait) = (&mut self.ended.0, &mut self.ended.1);
        let connects = read(&mut self.connect, |connect| {
            let window = connect.window(namespace)?;
            if connect.is_full()? {
                search.merge(&connect.times()?);
                *connect = self::connect()?;
            }
            Ok(traced(window))
        });
        let accepts = read(&mut self.accept, |accept| {
            let window = accept.window(namespace)?;
            if accept.is_full()? {
                wait.merge(&accept.times()?);
                *accept = self::accept()?;
            }
            Ok(accepted(window))
        });
        let failures = read(&mut self.failed, |session| {
            let window = session.window()?;
            if session.lost()? > 0 {
                *session = FailedSession::attach(&TaskFilter::default())?;
            }
            Ok(failures(namespace, &window, of_32_bits))
        });
        Window { connects, accepts, locks: read(&mut self.locks, |locks| locks.window(SHARE)), failures }
    }

    /// Detaches the traces and returns what they saw in a network namespace, by its inode.
    pub fn finish(self, namespace: u32) -> Window {
        let elapsed = self.began.elapsed();
        let connects = self.connect.and_then(|mut connect| seen(connect.window(namespace)));
        let accepts = self.accept.and_then(|mut accept| seen(accept.window(namespace)));
        let locks = self.locks.and_then(|locks| seen(locks.finish(elapsed)));
        let failed = self.failed.and_then(|mut session| seen(session.window()));
        Window {
            connects: connects.map(traced),
            accepts: accepts.map(accepted),
            locks: locks.map(|locks| TracedLocks {
                interval_ns: locks.results.elapsed_ns,
                classes: by_class(locks.results.classes),
            }),
            failures: failed.map(|failed| failures(namespace, &failed, of_32_bits(namespace))),
        }
    }
}

/// Why the traces of a survey count no failed calls of their own.
const COUNTED: &str = "the survey counts failed calls";

fn connect() -> Result<<Connect as Instrument>::Session, TraceError> {
    Connect::default().attach_beside(Err(COUNTED.to_owned()))
}

fn accept() -> Result<<Accept as Instrument>::Session, TraceError> {
    Accept::default().attach_beside(Err(COUNTED.to_owned()))
}

fn seen<T>(result: Result<T, TraceError>) -> Seen<T> {
    result.map_err(|error| error.to_string())
}

/// Reads from a trace, and gives it up if that fails.
fn read<S, T>(trace: &mut Seen<S>, read: impl FnOnce(&mut S) -> Result<T, TraceError>) -> Seen<T> {
    let result = trace.as_mut().map_err(|reason| reason.clone()).and_then(|session| seen(read(session)));
    if let (Err(reason), Ok(_)) = (&result, &trace) {
        *trace = Err(reason.clone());
    }
    result
}

fn traced((mut tuples, searches): (Vec<TraceTuple>, Option<LogLinear>)) -> Traced {
    tuples.sort_by_key(|tuple| Reverse(calls(tuple)));
    Traced {
        connects: tuples.iter().take(LISTED).filter_map(connects).collect(),
        search_p99_ns: searches.map(|times| times.quantile(0.99)),
        searches: tuples.iter().map(|tuple| tuple.searches).sum(),
        search_ns: tuples.iter().map(|tuple| tuple.mean_ns * tuple.searches).sum(),
    }
}

fn accepted(waits: Option<LogLinear>) -> TracedAccepts {
    TracedAccepts {
        accepts: waits.as_ref().map_or(0, LogLinear::count),
        wait_p99_ns: waits.map(|times| times.quantile(0.99)),
    }
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
    })
}

fn failures(namespace: u32, failed: &[Failed], of_32_bits: Vec<Owner>) -> Failures {
    account(failed.iter().filter(|failed| failed.failure.namespace == namespace), of_32_bits)
}

/// Returns the programs of 32 bits of a network namespace.
fn of_32_bits(namespace: u32) -> Vec<Owner> {
    blind_spots::processes_of_32_bits(&TaskFilter { network: Some(namespace), ..TaskFilter::default() })
}
