//! The engine of `fourtuple compare`: trials of two commands in turn, or records that earlier runs saved.
//!
//! A trial is one run of a fourtuple command in a child process, and gives one number (a [`Metric`]). [`Trials`] runs A and
//! B in the order A B B A B A A B until the interval of their ratio is narrow enough or the time is over. Each trial of a
//! load may have a [`ServerCommand`], which runs beside it in a network namespace of its own. [`SavedTrials`] takes the
//! numbers from saved records instead. The crate prints nothing: both return an [`Outcome`].
//!
//! The server of a trial ends with the trial, also if `compare` is killed by SIGKILL.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod error;
mod likeness;
mod metric;
mod outcome;
mod saved;
mod server;
mod side;
mod testbed;
mod trial;
mod trials;

pub use address::ServerAddress;
pub use error::CompareError;
pub use metric::{Metric, needs_one_name, only_rate};
pub use outcome::Outcome;
pub use saved::SavedTrials;
pub use server::ServerCommand;
pub use side::{Side, SideCommand};
pub use testbed::{CpuSplit, Servers};
pub use trials::Trials;
