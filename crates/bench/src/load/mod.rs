//! A load generator for connections, which reports what limited its own measurement.
//!
//! A run combines an engine (system calls), a workload (the protocol of a connection) and an arrival process (when operations
//! begin). [`Load::run`] executes it. [`preflight`] checks before the run whether this host has the ports, descriptors and
//! queues that the run needs, and explains the results after it.

mod arrival;
mod driver;
mod engine;
mod origin;
pub mod preflight;
mod prepared;
mod run;
mod settings;
mod tally;
mod target;
mod workload;
#[doc(hidden)]
pub use workload::fuzzing;

use std::io;

use fourtuple::dial::BuildError;
use fourtuple_syscalls::{Errno, errno_name};

use crate::load::preflight::ReadError;

pub use arrival::{Arrival, Ramp};
pub use engine::EngineChoice;
pub use prepared::{Measured, Prepared, SYSCTLS};
pub use run::{Outcome, RunProgress};
pub use settings::{
    Close, Load, MAX_BODY, MAX_BYTES, MAX_CONNECTIONS, MAX_COUNT, MAX_HELD, MAX_RATE, MAX_STREAMS,
    MAX_THREADS, MAX_TIME,
};
pub use tally::{Coordination, Interval, IntervalSink};
pub use target::{HostAddresses, Scheme, Target, TargetError};
pub use workload::{HttpRequest, Order, RequestList, TlsOptions, Trust, Workload};

/// The reason why a run did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The name of the target does not resolve.
    #[error("{target}: the name does not resolve: {error}")]
    Resolve {
        target: String,
        /// The error of the resolver.
        #[source]
        error: io::Error,
    },
    #[error("{0}")]
    Setting(String),
    /// The source ports could not be prepared.
    #[error(transparent)]
    Dialer(#[from] BuildError),
    /// The requested engine does not work on this host.
    #[error("the engine uring does not work here: {0}; use --engine epoll")]
    Engine(String),
    /// A thread of the run cannot be created.
    #[error("cannot create a thread: {}{}", errno_name(.0), more_threads(.0))]
    Thread(#[source] io::Error),
    /// TLS cannot be set up.
    #[error("TLS: {0}")]
    Tls(String),
    /// The resources of this host cannot be read.
    #[error(transparent)]
    Preflight(#[from] ReadError),
    /// A system call that the run needs has failed.
    #[error("{call}: {} ({error})", errno_name(.error))]
    Call {
        call: &'static str,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
}

impl LoadError {
    pub(crate) fn call(call: &'static str) -> impl FnOnce(io::Error) -> LoadError {
        move |error| LoadError::Call { call, error }
    }
}

/// Returns what to do about an error of clone(2), if that is known.
fn more_threads(error: &io::Error) -> &'static str {
    match Errno::of(error) {
        Some(Errno::EAGAIN) => "; raise RLIMIT_NPROC (ulimit -u) or the pids.max of the cgroup",
        _ => "",
    }
}
