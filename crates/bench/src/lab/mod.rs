//! Experiments on this kernel: each answers a question, and compares the answer with published results.
//!
//! Every experiment makes real connections in a network namespace of its own, so it neither sees nor changes the host. The
//! module prints nothing: results are records, and progress goes to the [`Watch`].
//!
//! `accept`, `keepalive` and `locks` share the workers and clients of `pool` and use neither `load` nor `serve`: a misplaced wait needs the
//! worker, the start and the end of every request, which each response of the pool contains, and each request names its service time, so
//! that a seed gives the same requests under every policy.
//!
//! A lab that ends in any way leaves nothing to restore: it changes only the namespaces that it made. A stop flag ends it early, with the
//! results so far.

pub mod accept;
mod calibrate;
pub mod keepalive;
pub mod locks;
mod namespace;
pub mod planes;
pub mod pool;
pub mod ports;
pub mod time_wait;

use std::fmt::Display;
use std::io;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use fourtuple::dial::{BuildError, DialError};
use fourtuple::listen::ListenError;
use fourtuple_forward::ForwardError;
use fourtuple_observe::plan::CostError;
use fourtuple_syscalls::netns;

pub use calibrate::calibrate;
pub use namespace::{Family, Namespace, prepare_process};

/// Receives the progress of an experiment, and may end it early.
pub struct Watch<'a> {
    /// Set by another thread to end the experiment; results so far are kept.
    pub stop: &'a AtomicBool,
    pub progress: &'a dyn Progress,
}

impl Watch<'_> {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub trait Progress: Sync {
    /// Reports that a part of `total` steps begins.
    fn begin(&self, part: &str, total: u64);
    /// Reports that `done` steps of the current part are done.
    fn at(&self, done: u64);
}

/// A display that shows nothing.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _part: &str, _total: u64) {}
    fn at(&self, _done: u64) {}
}

/// The reason why an experiment failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A setting is out of range.
    #[error("invalid {setting} {value}: {accepted}")]
    Setting {
        /// The name of the setting in records, such as `range`.
        setting: &'static str,
        /// The value that was given.
        value: String,
        /// The accepted values, and the reason.
        accepted: String,
    },
    /// The measured costs do not fit the cost model.
    #[error(transparent)]
    Costs(#[from] CostError),
    /// A network namespace could not be created.
    #[error("cannot make a network namespace: {0}{remedy}", remedy = netns::remedy(.0))]
    Namespace(#[source] io::Error),
    /// A sysctl of the experiment's own namespace could not be set.
    #[error("cannot set {name} = {value} in the experiment's namespace: {error}{}", way_out(error))]
    Sysctl {
        /// Dotted name.
        name: String,
        /// The value that was to be set.
        value: String,
        /// The error of the write.
        #[source]
        error: io::Error,
    },
    /// A system call that the experiment needs has failed.
    #[error("{what}: {error}")]
    Call {
        /// The purpose of the call.
        what: String,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// RLIMIT_NOFILE is too low for the experiment's own descriptors.
    #[error(
        "the limit on descriptors (RLIMIT_NOFILE) is {limit}; at least {needed} are needed: ulimit -n {needed}"
    )]
    Descriptors {
        limit: u64,
        /// The limit that the experiment needs.
        needed: u64,
    },
    /// The watcher ended the experiment before the first result.
    #[error("interrupted before there was a result")]
    Interrupted,
    /// The machine is too slow for the calibration: it was not done after this time.
    #[error("not done after {} s on this machine", .0.as_secs())]
    TooSlow(Duration),
    /// A dialer could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A dial failed with an error that is not a result.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// Workers could not join a listener group, or failed in it.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Data planes could not be started, or failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

impl LabError {
    pub(crate) fn setting(
        setting: &'static str,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> LabError {
        LabError::Setting { setting, value: value.to_string(), accepted: accepted.into() }
    }

    /// Refuses a value outside of its range.
    pub(crate) fn unless_within<T: PartialOrd + Display>(
        setting: &'static str,
        value: T,
        accepted: RangeInclusive<T>,
    ) -> Result<(), LabError> {
        if accepted.contains(&value) {
            return Ok(());
        }
        let accepted = format!("accepted are {} to {}", accepted.start(), accepted.end());
        Err(LabError::setting(setting, value, accepted))
    }

    /// Refuses an empty list.
    pub(crate) fn if_empty<T>(setting: &'static str, values: &[T]) -> Result<(), LabError> {
        match values {
            [] => Err(LabError::setting(setting, "(none)", "at least one is needed")),
            _ => Ok(()),
        }
    }

    /// Returns the values that the texts name; refuses an unknown name, and an empty list.
    pub(crate) fn named<T>(
        setting: &'static str,
        names: &[String],
        value: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, LabError> {
        LabError::if_empty(setting, names)?;
        let unknown = |name| LabError::setting(setting, name, "nothing has this name");
        names.iter().map(|name| value(name).ok_or_else(|| unknown(name))).collect()
    }

    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(io::Error) -> LabError {
        let what = what.into();
        move |error| LabError::Call { what, error }
    }

    /// Returns whether different settings would avoid the error, as opposed to a different environment.
    pub fn is_usage(&self) -> bool {
        matches!(self, LabError::Setting { .. } | LabError::Listen(ListenError::Impossible { .. }))
    }
}

/// Returns what to do about a sysctl that is missing.
fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        // Linux 6.1 hides net.core.somaxconn there.
        io::ErrorKind::NotFound => "; some kernels hide it in user namespaces: run as root",
        _ => "",
    }
}

/// Starts a thread of `scope`.
///
/// # Errors
///
/// [`LabError::Call`] if the thread cannot be created: EAGAIN at RLIMIT_NPROC or at pids.max of the cgroup.
pub(crate) fn start_thread<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, R>, LabError> {
    thread::Builder::new().spawn_scoped(scope, work).map_err(LabError::call("start a thread"))
}

/// A common start for several threads. Unlike a barrier, the start can be cancelled if one of the threads cannot be
/// created.
#[derive(Debug, Default)]
pub(crate) struct Start {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Whether to begin; `None` until this is decided.
    begins: Option<bool>,
}

impl Start {
    /// Waits for the start. Returns false if the start was cancelled.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state();
        state.waiting += 1;
        self.changed.notify_all();
        loop {
            if let Some(begins) = state.begins {
                return begins;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `threads` threads wait, and lets them begin.
    pub(crate) fn begin(&self, threads: usize) {
        let mut state = self.state();
        while state.waiting < threads {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.begins = Some(true);
        self.changed.notify_all();
    }

    /// Cancels the start: threads that wait now, or that arrive later, return without running.
    pub(crate) fn cancel(&self) {
        self.state().begins = Some(false);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use fourtuple_record::Saved;
    use fourtuple_syscalls::socket::Transport;

    use super::*;

    #[test]
    fn threads_begin_together_or_not_at_all() {
        for begins in [true, false] {
            let start = Start::default();
            let begun: Vec<bool> = thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| start_thread(scope, || start.wait()).unwrap()).collect();
                if begins {
                    start.begin(3)
                } else {
                    start.cancel()
                }
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(begun, [begins; 3]);
        }
    }

    /// Returns the advice in a record and the advice for its results today, or `None` for an experiment whose advice needs more than the
    /// record.
    fn advice(record: Saved) -> Option<(Vec<String>, Vec<String>)> {
        Some(match record {
            Saved::Ports(record) => {
                // The record lacks the single dials, from which the line about IP_LOCAL_PORT_RANGE follows.
                let of_means = |lines: Vec<String>| {
                    lines.into_iter().filter(|line| !line.contains("IP_LOCAL_PORT_RANGE")).collect()
                };
                let fresh = ports::advice(&record.results, Transport::Tcp);
                (of_means(record.results.advice), of_means(fresh))
            }
            Saved::TimeWait(record) => {
                let fresh = time_wait::advice(&record.results);
                (record.results.advice, fresh)
            }
            Saved::LabAccept(record) => {
                let fresh = accept::advice(&record.results);
                (record.results.advice, fresh)
            }
            Saved::LabKeepalive(record) => {
                let fresh = keepalive::advice(&record.results, record.settings.slow_ns);
                let mut found = record.results.advice;
                // The break-even point is the last line.
                found.truncate(fresh.len());
                (found, fresh)
            }
            Saved::LabPlanes(record) => {
                let fresh = planes::advice(&record.results);
                (record.results.advice, fresh)
            }
            _ => return None,
        })
    }

    #[test]
    fn the_advice_of_documented_records_is_todays() {
        let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/records");
        let mut compared = 0;
        for entry in fs::read_dir(records).unwrap() {
            let path = entry.unwrap().path();
            let record = Saved::parse(&fs::read_to_string(&path).unwrap()).unwrap();
            let Some((found, today)) = advice(record) else { continue };
            assert_eq!(found, today, "{}", path.display());
            compared += 1;
        }
        assert_eq!(compared, 5);
    }
}
