//! All three traces at once, for the snapshot that `doctor` examines.

use std::time::{Duration, Instant};

use fourtuple_measure::LogLinear;
use fourtuple_record::snapshot::{LockWaits, Owner, Traced, TracedConnects, Unavailable};
use fourtuple_record::{LockClass, TraceAcceptResults, TraceConnectResults, TraceTuple};

use crate::accept::Accept;
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
        })
    }

    /// Returns the durations of all events so far.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    pub fn times(&self) -> Result<SurveyTimes, TraceError> {
        Ok(SurveyTimes { search: self.connect.times()?, wait: self.accept.times()? })
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

    /// Detaches the traces and returns what they saw in a network namespace, by its inode. The lock waits are of the whole host.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    pub fn finish(self, namespace: u32) -> Result<Traced, TraceError> {
        let elapsed = self.began.elapsed();
        let connect = self.connect.finish(elapsed)?.results;
        let accept = self.accept.finish(elapsed)?.results;
        let locks = self.locks.map(|locks| locks.finish(elapsed)).transpose()?;
        let classes = locks.map(|locks| locks.results.classes).unwrap_or_default();
        Ok(traced(namespace, &connect, &accept, &classes))
    }
}

fn traced(
    namespace: u32,
    connect: &TraceConnectResults,
    accept: &TraceAcceptResults,
    classes: &[LockClass],
) -> Traced {
    let tuples: Vec<&TraceTuple> =
        connect.tuples.iter().filter(|tuple| tuple.namespace == namespace).collect();
    let listeners = || accept.listeners.iter().filter(|listener| listener.namespace == namespace);
    let wait =
        |class: &LockClass| (class.class.clone(), LockWaits { waits: class.waits, waited_ns: class.wait_ns });
    Traced {
        connects: tuples.iter().take(LISTED).filter_map(|tuple| connects(tuple)).collect(),
        unavailable: tuples.iter().filter_map(|tuple| unavailable(tuple)).take(LISTED).collect(),
        // The traces keep a histogram for each tuple, and one of all namespaces: the worst tuple stands for the namespace.
        search_p99_ns: tuples.iter().filter(|tuple| tuple.searches > 0).map(|tuple| tuple.p99_ns).max(),
        searches: tuples.iter().map(|tuple| tuple.searches).sum(),
        search_ns: tuples.iter().map(|tuple| tuple.mean_ns * tuple.searches).sum(),
        accept_wait_p99_ns: listeners().filter_map(|listener| Some(listener.wait_ns.as_ref()?.p99)).max(),
        accepts: listeners().map(|listener| listener.accepts).sum(),
        lock_waits: classes.iter().map(wait).collect(),
    }
}

fn owner(tuple: &TraceTuple, calls: u64) -> Owner {
    Owner { pid: tuple.process, name: tuple.name.clone(), sockets: u32::try_from(calls).unwrap_or(u32::MAX) }
}

fn connects(tuple: &TraceTuple) -> Option<TracedConnects> {
    Some(TracedConnects {
        owner: owner(tuple, tuple.searches + tuple.given_port + tuple.failed),
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
