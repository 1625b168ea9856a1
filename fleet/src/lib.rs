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
mod error;
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

pub use error::FleetError;
pub use request::{LoadRequest, RequestError};
