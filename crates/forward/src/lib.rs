//! Forwards UDP on all cores: data planes that share nothing, and BFD, which watches the link for all of them.
//!
//! A [`Link`] is an address to listen at and where its packets go on to. Each plane has a socket of the link's group
//! (`fourtuple::spread`), sockets of its own towards the next hops, and counters of its own.
#![forbid(unsafe_code)]

pub mod bfd;
mod counters;
mod error;
mod handover;
mod in_band;
mod loops;
mod path;
mod plane;
mod route;
mod running;
mod settings;
mod target;
mod watch;
mod worker;

pub use counters::{Drop, PlaneCounts};
pub use error::ForwardError;
pub use handover::{Door, Handed, HandoverError, Predecessor, TakenOver};
pub use in_band::{CONTROL, InBand, Reception};
pub use plane::PlaneKind;
pub use route::{Prefix, Routes, RoutesError, Rule};
pub use running::Running;
pub use settings::{Forward, Link};
pub use watch::{Peer, Watched};
