//! Distribution of connections, and of the requests on kept connections, among the workers of a server.
//!
//! The workers of a [`ListenerGroup`] share an address. Its [`AcceptPolicy`] determines which worker gets the next connection:
//! the kernel wakes workers in the order in which they wait, regardless of their load. A worker holds one of the group's
//! *seats*: worker slots, numbered from 0, with counters that forked workers share. The code of a worker is the same with every
//! policy:
//!
//! ```no_run
#![doc = include_str!("../../examples/listen.rs")]
//! ```
//!
//! The module starts no thread (except one per worker in the adapter for tokio), implements no protocol and changes no sysctl.
//! Reading from a connection never waits. Writing waits for space in the send buffer, for as long as
//! [`ListenerGroupBuilder::write_timeout`] permits.
//!
//! A connection has one owner at every moment: the worker that serves it, the policy's `Wait` that watches it, or the handoff queue. Its
//! seat counts it as open until it is dropped, which closes its socket. An impossible policy is an error; no other policy replaces it.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use fourtuple_syscalls::{Errno, errno_name};

use crate::errors::{has_temporary_cause, is_temporary_for_server};

mod acceptor;
#[cfg(feature = "tokio")]
mod async_connection;
#[cfg(feature = "axum")]
mod axum;
mod builder;
mod connection;
mod dispatcher;
mod drain;
mod group;
mod handoff;
mod policy;
mod seats;
#[cfg(feature = "tokio")]
mod tokio;
mod wait;

pub use acceptor::{AcceptWaker, Acceptor, LeaveReport};
#[cfg(feature = "tokio")]
pub use async_connection::{AsyncConnection, ConnectionHandle, StreamAddr};
#[cfg(feature = "axum")]
pub use axum::{ByRequest, by_request};
pub use builder::ListenerGroupBuilder;
pub use connection::{BreakEven, Connection, OpenGuard, Recycle};
pub use dispatcher::{Dispatcher, DispatcherStats};
pub use drain::DrainReport;
pub use fourtuple_syscalls::{Endpoint, EndpointParseError};
pub use group::{ListenerGroup, SocketPath, WorkerProcess, bind_path};
pub use policy::{AcceptPolicy, AcceptPolicyError, Family, PolicyChoice, UnknownFamily, Workers};
pub use seats::SeatStats;
#[cfg(feature = "tokio")]
pub use tokio::{AsyncAcceptor, Incoming};

const FREE: &str = "a path that does not exist, or a socket on which no process listens";

/// An error of a listener group or of one of its workers.
///
/// ```
/// use std::io;
/// use fourtuple::listen::{ListenError, ListenerGroupBuilder};
///
/// let error = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080)).max_workers(0).open().unwrap_err();
/// assert!(matches!(error, ListenError::Setting { setting: "max_workers", .. }));
/// assert!(error.is_usage() && error.kind() == io::ErrorKind::InvalidInput);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// No kernel supports the policy for this family and these workers.
    #[error("{policy} is not possible over {family}: {why}")]
    #[non_exhaustive]
    Impossible {
        /// The requested policy.
        policy: AcceptPolicy,
        /// The family of the address.
        family: Family,
        /// The reason.
        why: &'static str,
    },
    /// This process lacks a permission.
    #[error("{policy} is not permitted here: {call}: {}; {needs}", errno_name(.error))]
    #[non_exhaustive]
    NotPermitted {
        /// The requested policy.
        policy: AcceptPolicy,
        /// The refused system call.
        call: &'static str,
        /// The required permission.
        needs: &'static str,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// This kernel lacks a facility.
    #[error("{policy} is not possible here: {what}: {}", errno_name(.error))]
    #[non_exhaustive]
    Absent {
        /// The requested policy.
        policy: AcceptPolicy,
        /// The missing facility.
        what: &'static str,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// The group has no dispatcher to return.
    #[error("a group with {policy} has no dispatcher to return: {why}")]
    #[non_exhaustive]
    NoDispatcher {
        /// The policy of the group.
        policy: AcceptPolicy,
        /// The reason.
        why: &'static str,
    },
    /// The crate was built without a cargo feature.
    #[error("{policy} is not in this build: the crate fourtuple needs its feature {feature}")]
    #[non_exhaustive]
    NotBuilt {
        /// The requested policy.
        policy: AcceptPolicy,
        /// The feature.
        feature: &'static str,
    },
    /// The BPF program that chooses a listener was not loaded or attached. Occurs only with the feature `bpf`.
    #[error("{policy}: the BPF program that chooses a listener failed")]
    #[non_exhaustive]
    Bpf {
        /// The requested policy.
        policy: AcceptPolicy,
        /// The failed step of the program and the required permission.
        #[source]
        error: Box<dyn Error + Send + Sync>,
    },
    /// A setting is out of range.
    #[error("{setting} is {value}: expected {accepted}")]
    #[non_exhaustive]
    Setting {
        /// The name of the method or field.
        setting: &'static str,
        /// The requested value.
        value: String,
        /// The accepted values.
        accepted: &'static str,
    },
    /// The group was drained and returns no further connection.
    #[error("the group was drained: there are no further connections")]
    Drained,
    /// Every seat has a worker.
    #[error("all {seats} seats of the group are taken")]
    #[non_exhaustive]
    Full {
        /// The number of seats of the group.
        seats: usize,
    },
    /// The path exists and is not a socket, so it was not removed.
    #[error("{path:?}: there is something else than a socket; expected {FREE}")]
    #[non_exhaustive]
    NotASocket {
        /// The path of the unix socket.
        path: PathBuf,
    },
    /// Another process listens on this path.
    #[error("{path:?}: another program listens there; expected {FREE}")]
    #[non_exhaustive]
    PathInUse {
        /// The path of the unix socket.
        path: PathBuf,
    },
    /// `Recycle::Measured` cannot be used with a runtime, which keeps the connections itself.
    #[error(
        "Recycle::Measured needs workers without a runtime: the wait of a kept connection for its runtime is not measured; \
         choose another Recycle"
    )]
    NotMeasurable,
    /// The given listeners form no group.
    #[error("these listeners form no group: {why}")]
    #[non_exhaustive]
    Adopted {
        /// The reason.
        why: &'static str,
        /// The error of a system call, if there was one.
        #[source]
        error: Option<io::Error>,
    },
    /// Another system call failed.
    #[error("{call} for {endpoint}: {}{}", errno_name(.error), hint(.error))]
    #[non_exhaustive]
    Call {
        /// The system call.
        call: &'static str,
        /// The address of the group.
        endpoint: Endpoint,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
}

impl ListenError {
    /// Returns a function that makes a [`ListenError::Call`] of a failed system call.
    pub(crate) fn call(call: &'static str, endpoint: &Endpoint) -> impl Fn(io::Error) -> ListenError {
        move |error| ListenError::Call { call, endpoint: endpoint.clone(), error }
    }

    /// Returns whether the settings are at fault, rather than the environment.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            ListenError::Impossible { .. }
                | ListenError::NotASocket { .. }
                | ListenError::PathInUse { .. }
                | ListenError::NotMeasurable
                | ListenError::Setting { .. }
                | ListenError::Adopted { .. }
        )
    }

    /// Returns whether all seats were taken ([`ListenError::Full`]), or no port was free for port 0 (bind(2) failed with EADDRINUSE). More
    /// seats or a wider port range avoid the error; a retry helps when workers leave or sockets close.
    ///
    /// ```
    /// use fourtuple::listen::ListenerGroupBuilder;
    ///
    /// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).max_workers(1).open()?;
    /// let _acceptor = group.join()?;
    /// assert!(group.join().unwrap_err().is_exhausted());
    /// # Ok::<(), fourtuple::listen::ListenError>(())
    /// ```
    pub fn is_exhausted(&self) -> bool {
        match self {
            ListenError::Full { .. } => true,
            ListenError::Call { call: "bind()", endpoint, error } => {
                error.kind() == io::ErrorKind::AddrInUse
                    && endpoint.inet().is_some_and(|address| address.port() == 0)
            }
            _ => false,
        }
    }

    /// Returns whether the same call may succeed later without a change of the settings or of the host's configuration: a worker may leave,
    /// another process may end and free the address, or the host may get descriptors, memory or watches.
    ///
    /// ```
    /// use fourtuple::listen::{ListenError, ListenerGroup, ListenerGroupBuilder};
    /// # struct Backoff;
    /// # impl Backoff { fn wait(&mut self) {} }
    ///
    /// # fn example(mut backoff: Backoff) -> Result<ListenerGroup, ListenError> {
    /// let builder = ListenerGroupBuilder::at(([0, 0, 0, 0], 8080));
    /// loop {
    ///     match builder.clone().open() {
    ///         Err(error) if error.is_retryable() => backoff.wait(),
    ///         opened => return opened,
    ///     }
    /// }
    /// # }
    /// ```
    pub fn is_retryable(&self) -> bool {
        match self {
            ListenError::Full { .. } | ListenError::PathInUse { .. } => true,
            // The group may lose its dispatcher and then returns another one.
            ListenError::NoDispatcher { policy, .. } => *policy == AcceptPolicy::Dispatcher,
            ListenError::Bpf { error, .. } => has_temporary_cause(&**error),
            ListenError::Call { error, .. } => is_temporary_for_server(error),
            _ => false,
        }
    }

    /// Returns the kind of [`io::Error`] that fits.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            ListenError::Impossible { .. }
            | ListenError::Absent { .. }
            | ListenError::NoDispatcher { .. }
            | ListenError::NotBuilt { .. }
            | ListenError::NotMeasurable => io::ErrorKind::Unsupported,
            ListenError::NotPermitted { error, .. } | ListenError::Call { error, .. } => error.kind(),
            ListenError::Setting { .. } | ListenError::Adopted { .. } => io::ErrorKind::InvalidInput,
            ListenError::NotASocket { .. } => io::ErrorKind::AlreadyExists,
            ListenError::PathInUse { .. } => io::ErrorKind::AddrInUse,
            ListenError::Bpf { .. } | ListenError::Drained | ListenError::Full { .. } => io::ErrorKind::Other,
        }
    }
}

/// Keeps the [`ListenError`]: [`io::Error::downcast`] returns it.
impl From<ListenError> for io::Error {
    fn from(error: ListenError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

fn hint(error: &io::Error) -> &'static str {
    match Errno::of(error) {
        Some(Errno::EADDRINUSE) => "; stop the process that uses the address, or choose another port",
        Some(Errno::EADDRNOTAVAIL) => "; choose an address of this host",
        Some(Errno::EACCES) => {
            "; a port below net.ipv4.ip_unprivileged_port_start (1024) needs root, and a path needs write permission on its directory"
        }
        _ => "",
    }
}
