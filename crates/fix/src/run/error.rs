use std::io;
use std::path::Path;

use crate::error::FixError;
use crate::run::program::shown;
use crate::run::way::Way;

/// The reason why a program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No file has the name of the program.
    #[error("cannot run {0}: no such program")]
    NotFound(String),
    /// The kernel refused to execute the program.
    #[error("cannot run {program}: {error}")]
    CannotExecute {
        program: String,
        /// Why it cannot be executed.
        error: io::Error,
    },
    /// The way does not fit the program or the host.
    #[error("cannot run the program via {}: {reason}", way.name())]
    Way {
        way: Way,
        /// The missing part, and the remedy.
        reason: String,
    },
    /// No way fits the program and the host.
    #[error("cannot run the program: {0}")]
    NoWay(String),
    /// A fix of the cgroup failed.
    #[error(transparent)]
    Fix(#[from] FixError),
    /// A call that a supervised program needs failed.
    #[error("cannot run the program: {call}: {error}")]
    Call {
        /// The call, and what it is for.
        call: &'static str,
        /// The error of the call.
        error: io::Error,
    },
}

impl RunError {
    pub(super) fn cannot_execute(path: &Path, error: io::Error) -> RunError {
        RunError::CannotExecute { program: shown(path), error }
    }

    pub(super) fn way(way: Way, reason: impl Into<String>) -> RunError {
        RunError::Way { way, reason: reason.into() }
    }

    /// Returns the exit code, as of env(1) for programs that do not start: 127 not found, 126 cannot be executed; else 4.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::NotFound(_) => 127,
            RunError::CannotExecute { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            RunError::CannotExecute { .. } => 126,
            _ => 4,
        }
    }
}

/// Names the call of an error.
pub(super) fn at(call: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |error| RunError::Call { call, error }
}
