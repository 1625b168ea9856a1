//! One run on many machines: agents and a coordinator on NATS, and the merge of their intervals.
//!
//! The decisions are pure: how a run is split over slots ([`split`]), the offset of a clock and replayed requests ([`protocol`]),
//! intervals and their merge ([`interval`], [`summary`], [`merge`]), the verdict, the order of hosts and their differences
//! ([`overview`]) and permissions ([`permission`]). They use no clock and no socket.
//! [`agent`] and [`coordinator`] move messages over NATS.
//!
//! Histograms are added, never averaged, and no interval counts twice, in any order of arrival. Each worker starts at the same time on its own
//! clock, whose offset the coordinator has estimated. A generating thread never waits for NATS or for the disk: it hands each complete second
//! to a bounded queue, from which one thread writes the journal and a task publishes to JetStream.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod agent;
mod children;
pub mod coordinator;
mod follow;
pub mod interval;
pub mod merge;
pub mod nats;
pub mod overview;
pub mod permission;
pub mod protocol;
mod request;
pub mod split;
pub mod summary;
mod worker;

use std::io;
use std::path::PathBuf;

use crate::split::SplitError;

pub use request::{LoadRequest, RequestError};

/// The reason why a command on the fleet failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// The connection to NATS failed.
    #[error("cannot connect to NATS at {url}: {why}")]
    Connect {
        /// The server.
        url: String,
        /// The reason.
        why: String,
    },
    /// A file with credentials cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    /// A call of NATS failed.
    #[error("NATS: cannot {what}: {why}")]
    Nats {
        /// The attempted operation.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// A system call failed.
    #[error("cannot {what}: {error}")]
    Call {
        /// The attempted operation.
        what: &'static str,
        #[source]
        error: io::Error,
    },
    /// Settings that contradict each other, or the hosts.
    #[error("{0}")]
    Setting(String),
    /// The run cannot be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The load cannot be requested.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The name of an agent is taken.
    #[error("the name {name} is taken by another agent on this NATS: give another one with --name")]
    NameTaken { name: String },
    /// There are too few agents.
    #[error(
        "{found} of {wanted} workers answered ({names}): start more with fourtuple agent{}",
        if *found > 0 { format!(", or use --workers {found}") } else { String::new() }
    )]
    TooFew {
        /// Number of fitting agents.
        found: usize,
        /// Number of workers.
        wanted: u32,
        names: String,
    },
    /// Hosts do not fit together, or refuse.
    #[error("{0}")]
    Refused(String),
    /// A request got no answer, or none that can be read.
    #[error("{0}")]
    NoAnswer(String),
    /// There is no such run in the stream.
    #[error("there is no run {run} in NATS: its messages are kept for a day")]
    NoRun { run: String },
    /// NATS was unreachable until the end of the run.
    #[error(
        "NATS was unreachable until the run had ended: fourtuple fleet collect {run} fetches the results"
    )]
    Gone { run: String },
}

impl FleetError {
    pub(crate) fn nats<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> FleetError {
        move |error| FleetError::Nats { what, why: error.to_string() }
    }

    pub(crate) fn call(what: &'static str) -> impl FnOnce(io::Error) -> FleetError {
        move |error| FleetError::Call { what, error }
    }

    /// Returns whether other flags would avoid the error.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            FleetError::Setting(_)
                | FleetError::Split(_)
                | FleetError::Request(_)
                | FleetError::NameTaken { .. }
                | FleetError::NoRun { .. }
        )
    }

    /// Returns whether the run has no valid result.
    pub fn is_not_valid(&self) -> bool {
        matches!(
            self,
            FleetError::Refused(_)
                | FleetError::NoAnswer(_)
                | FleetError::TooFew { .. }
                | FleetError::Gone { .. }
        )
    }
}
