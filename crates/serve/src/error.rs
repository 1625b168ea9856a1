use std::io;

use fourtuple::listen::ListenError;

/// The reason why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A setting has an invalid value.
    #[error("{setting} is {value}: {accepted}")]
    Setting {
        /// Name of the setting, which is also the name of the flag.
        setting: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        accepted: String,
    },
    /// The path or the accept policy is not available.
    #[error(transparent)]
    Group(#[from] ListenError),
    /// A system call that sets up a listening socket failed.
    #[error("cannot listen on {address}: {call}: {source}{hint}")]
    Listen {
        /// The call, or the socket option.
        call: &'static str,
        /// The address.
        address: String,
        /// The errno.
        source: io::Error,
        /// Advice, after a semicolon; may be empty.
        hint: &'static str,
    },
    /// A worker could not be set up.
    #[error("cannot start worker {worker}: {call}: {source}")]
    Worker {
        /// Number of the worker, from 0.
        worker: usize,
        /// The call that failed.
        call: &'static str,
        /// The errno.
        source: io::Error,
    },
}

impl ServeError {
    /// Returns whether the settings are at fault, and not the environment.
    pub fn is_usage(&self) -> bool {
        match self {
            ServeError::Setting { .. } => true,
            ServeError::Group(error) => error.is_usage(),
            ServeError::Listen { .. } | ServeError::Worker { .. } => false,
        }
    }
}
