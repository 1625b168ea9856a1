//! All three traces at once, for the snapshot that `doctor` examines.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fourtuple_measure::LogLinear;
use fourtuple_record::snapshot::{LockWaits, Owner, Traced, TracedConnects, Unavailable};
use fourtuple_record::{LockClass, TraceTuple};

use crate::accept::{Accept, Accepts};
use crate::connect::Connect;
use crate::error::TraceError;
use crate::instrument::{Instrument, Session};
use crate::locks::Locks;

/// The greatest number of pairs of process and destination in a snapshot.
const LISTED: usize = 100;

/// Running traces of connect(), accept() and, unless left out, lock waits.
#[derive(Debug)]
pub struct Survey {
    began: Instant,
    connect: <Connect as Instrument>::Session,
    accept: <Accept as Instrument>::Session,
    locks: Option<<Locks as Instrument>::Session>,
    /// The durations of traces that were replaced because a table was full.
    ended: SurveyTimes,
}

/// Durations of all events since the traces were attached, in all network namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SurveyTimes {
    /// Port searches that found a port.
    pub search: LogLinear,
    /// Waits from the end of the handshake to accept().
    pub wait: LogLinear,
}

impl Survey {
    /// The longest time between two calls of [`Survey::poll`].
    pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

    /// Attaches all traces.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: a missing capability, or a facility that the kernel lacks. Nothing stays attached.
    pub fn attach() -> Result<Survey, TraceError> {
        let locks = Some(Locks::default().attach()?);
        Ok(Survey { locks, ..Survey::without_locks()? })
    }

    /// Attaches the traces of connect() and accept().
    ///
    /// # Errors
    ///
    /// As [`Survey::attach`].
    pub fn without_locks() -> Result<Survey, TraceError> {
        Ok(Survey {
            connect: Connect::default().attach()?,
            accept: Accept::default().attach()?,
            locks: None,
            began: Instant::now(),
            ended: SurveyTimes::default(),
        })
    }

    /// Returns the durations of all events so far.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    pub fn times(&self) -> Result<SurveyTimes, TraceError> {
        let (mut search, mut wait) = (self.connect.times()?, self.accept.times()?);
        search.merge(&self.ended.search);
        wait.merge(&self.ended.wait);
        Ok(SurveyTimes { search, wait })
    }

    /// Drains what the kernel keeps for a short time only.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    pub fn poll(&mut self) -> Result<(), TraceError> {
        let elapsed = self.began.elapsed();
        self.connect.poll(elapsed)?;
        self.accept.poll(elapsed)?;
        self.locks.as_mut().map_or(Ok(()), |locks| locks.poll(elapsed))
    }

    /// Returns what the traces of connect() and accept() saw in a network namespace, by its inode, since the previous call. If a
    /// table of a trace is full, the trace is attached again.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps, and the errors of [`Survey::attach`].
    pub fn window(&mut self, namespace: u32) -> Result<Traced, TraceError> {
        let window = traced(namespace, self.connect.window()?, &self.accept.window()?, None);
        if self.connect.is_full()? || self.accept.is_full()? {
            self.ended = self.times()?;
            (self.connect, self.accept) = (Connect::default().attach()?, Accept::default().attach()?);
        }
        Ok(window)
    }

    /// Detaches the traces and returns what they saw in a network namespace, by its inode. The lock waits are of the whole host.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    pub fn finish(self, namespace: u32) -> Result<Traced, TraceError> {
        let elapsed = self.began.elapsed();
        let connect = self.connect.finish(elapsed)?.results;
        let accept = self.accept.finish(elapsed)?.results;
        let accepts = accept.listeners.iter().map(|listener| Accepts {
            namespace: listener.namespace,
            accepts: listener.accepts,
            wait_p99_ns: listener.wait_ns.as_ref().map(|wait| wait.p99),
        });
        let locks = self.locks.map(|locks| locks.finish(elapsed)).transpose()?;
        let lock_waits = locks.map(|locks| locks.results.classes.into_iter().map(lock_waits).collect());
        Ok(traced(namespace, connect.tuples, &accepts.collect::<Vec<_>>(), lock_waits))
    }
}

fn lock_waits(class: LockClass) -> (String, LockWaits) {
    (class.class, LockWaits { waits: class.waits, waited_ns: class.wait_ns })
}

fn traced(
    namespace: u32,
    mut tuples: Vec<TraceTuple>,
    accepts: &[Accepts],
    lock_waits: Option<BTreeMap<String, LockWaits>>,
) -> Traced {
    tuples.retain(|tuple| tuple.namespace == namespace && calls(tuple) > 0);
    tuples.sort_by_key(|tuple| Reverse(calls(tuple)));
    let listeners = || accepts.iter().filter(|listener| listener.namespace == namespace);
    Traced {
        connects: tuples.iter().take(LISTED).filter_map(connects).collect(),
        unavailable: tuples.iter().filter_map(unavailable).take(LISTED).collect(),
        // The traces keep a histogram for each tuple, and one of all namespaces: the worst tuple stands for the namespace.
        search_p99_ns: tuples.iter().filter(|tuple| tuple.searches > 0).map(|tuple| tuple.p99_ns).max(),
        searches: tuples.iter().map(|tuple| tuple.searches).sum(),
        search_ns: tuples.iter().map(|tuple| tuple.mean_ns * tuple.searches).sum(),
        accept_wait_p99_ns: listeners().filter_map(|listener| listener.wait_p99_ns).max(),
        accepts: listeners().map(|listener| listener.accepts).sum(),
        lock_waits,
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
        destination: tuple.destination.parse().ok()?,
        searches: tuple.searches,
        search_mean_ns: tuple.mean_ns,
        search_p99_ns: tuple.p99_ns,
        given_port: tuple.given_port,
    })
}

fn unavailable(tuple: &TraceTuple) -> Option<Unavailable> {
    let destination = tuple.destination.parse().ok()?;
    (tuple.no_port > 0).then(|| Unavailable {
        owner: owner(tuple, tuple.no_port),
        destination,
        failed: tuple.no_port,
    })
}
