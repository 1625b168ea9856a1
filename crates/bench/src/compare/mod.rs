//! The engine of `fourtuple compare`: trials of two commands in turn, or records that earlier runs saved.
//!
//! A trial is one run of a fourtuple command in a child process, and gives one number (a [`Metric`]). [`Trials`] runs A and
//! B in the order A B B A B A A B until the interval of their ratio is narrow enough or the time is over. Each trial of a
//! load may have a [`ServerCommand`], which runs beside it in a network namespace of its own. [`SavedTrials`] takes the
//! numbers from saved records instead. The module prints nothing: both return an [`Outcome`].
//!
//! The server of a trial ends with the trial, also if `compare` is killed by SIGKILL.

mod metric;
mod saved;
mod server;
mod trials;

use std::io;

use fourtuple_syscalls::netns;

pub use metric::{Metric, needs_one_name, only_rate};
pub use saved::SavedTrials;
pub use server::{CpuSplit, ServerAddress, ServerCommand, Servers};
pub use trials::{Outcome, Side, SideCommand, Trials};

/// The reason why a comparison has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The flags, commands or files cannot be compared; other ones can.
    #[error("{0}")]
    Usage(String),
    /// No trial and no record of one side was valid.
    #[error("{0}")]
    NotValid(String),
    /// The stop flag was set before the first pair of trials was complete.
    #[error("interrupted before there was a result")]
    Interrupted,
    /// A trial or its server failed for a reason that repeats in every trial.
    #[error("{0}")]
    Environment(String),
    /// The kernel refused a network namespace for a trial.
    #[error("cannot make a network namespace: {0}{remedy}", remedy = netns::remedy(.0))]
    Namespace(#[source] io::Error),
    /// A system call that the comparison needs failed.
    #[error("{what}: {error}")]
    Call {
        /// The purpose of the call: `cannot start a thread to wait for a trial`.
        what: String,
        #[source]
        error: io::Error,
    },
}

impl CompareError {
    /// Returns a function for `map_err` that adds the purpose of a call to its error.
    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(io::Error) -> CompareError {
        let what = what.into();
        move |error| CompareError::Call { what, error }
    }
}
