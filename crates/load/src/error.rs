use std::io;

use fourtuple::dial::BuildError;
use fourtuple_syscalls::errno_name;

/// Why a run could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The name of the target leads nowhere.
    #[error("{target}: the name does not resolve: {error}")]
    Resolve {
        /// The target.
        target: String,
        /// What the resolver said.
        #[source]
        error: io::Error,
    },
    /// Settings that do not go together.
    #[error("{0}")]
    Setting(String),
    /// The source ports could not be prepared.
    #[error(transparent)]
    Dialer(#[from] BuildError),
    /// The engine that was asked for does not work here.
    #[error("the engine uring does not work here: {0}; use --engine epoll")]
    Engine(String),
    /// TLS cannot be set up.
    #[error("TLS: {0}")]
    Tls(String),
    /// A system call that the run cannot do without.
    #[error("{call}: {} ({error})", errno_name(.error))]
    Call {
        /// Which.
        call: &'static str,
        /// What it said.
        #[source]
        error: io::Error,
    },
}

impl LoadError {
    pub(crate) fn call(call: &'static str) -> impl FnOnce(io::Error) -> LoadError {
        move |error| LoadError::Call { call, error }
    }
}
