use std::io;
use std::path::PathBuf;

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A setting that cannot be met.
    #[error("{setting} is {value}: {accepted}")]
    Setting {
        /// Its name, that of the flag of the command as well.
        setting: &'static str,
        /// What was asked.
        value: String,
        /// What is accepted.
        accepted: String,
    },
    /// Somebody accepts on this path already.
    #[error(
        "{path:?}: another program listens there; accepted is a path that is free, or a socket that nobody listens on"
    )]
    PathInUse {
        /// The path of the unix socket.
        path: PathBuf,
    },
    /// There is something at this path that is not a socket, and which is therefore not removed.
    #[error(
        "{path:?}: there is something else than a socket; accepted is a path that is free, or a socket that nobody listens on"
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A call on the way to a listening socket failed.
    #[error("cannot listen on {address}: {call}: {source}{hint}")]
    Listen {
        /// The call, or the option set.
        call: &'static str,
        /// The address.
        address: String,
        /// The errno.
        source: io::Error,
        /// What to do about it, after a semicolon; or nothing.
        hint: &'static str,
    },
    /// A worker could not be set up.
    #[error("cannot start worker {worker}: {call}: {source}")]
    Worker {
        /// Its number, from 0.
        worker: usize,
        /// What failed.
        call: &'static str,
        /// The errno.
        source: io::Error,
    },
}

impl ServeError {
    /// Whether other settings would have helped, and not another environment.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            ServeError::Setting { .. } | ServeError::PathInUse { .. } | ServeError::NotASocket { .. }
        )
    }
}
