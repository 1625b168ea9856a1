use std::io;

use fourtuple::listen::ListenError;

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
    /// The path, or the policy, cannot be had.
    #[error(transparent)]
    Group(#[from] ListenError),
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
        match self {
            ServeError::Setting { .. } => true,
            ServeError::Group(error) => error.is_usage(),
            ServeError::Listen { .. } | ServeError::Worker { .. } => false,
        }
    }
}
