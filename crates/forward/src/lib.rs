//! Forwards UDP on all CPUs with data planes that share nothing, and monitors links with BFD.
//!
//! A [`Link`] is an address to listen on and the next hops of its packets. Each plane is a thread with its own socket of the link's
//! SO_REUSEPORT group (`fourtuple::spread`), its own sockets towards the next hops, and its own counters.
//!
//! Planes share nothing on the path of a packet: each has a copy of the routes, which it renews when their version number changes, and each
//! counter has one writer. The state of a BFD session is an atomic variable that planes only read.
//!
//! A takeover (`handover`) moves the sockets to another process. Until the new process has sent `taken`, it changes no socket, and the old
//! one can continue to forward.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod bfd;
mod clients;
mod counters;
mod handover;
mod path;
mod plane;
mod route;
mod running;
mod settings;
mod target;
mod watch;
mod worker;

pub use clients::ClientLimit;
pub use counters::{Drop, PlaneCounts};
#[doc(hidden)]
pub use handover::fuzzing;
pub use handover::{HandoverError, Predecessor, TakenOver, TakeoverOutcome, TakeoverSocket};
pub use plane::PlaneKind;
pub use route::{Prefix, Routes, RoutesError, Rule};
pub use running::Running;
pub use settings::{Forward, ForwardError, InBand, Link, Peer};
pub use watch::{CONTROL, Reception, SessionReport};
