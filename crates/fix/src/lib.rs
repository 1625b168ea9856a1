//! Mends the connections of programs from outside, without a change of the programs: [`Ports`] of programs that run already, without
//! a restart; [`Run`] of a program that it starts.
//!
//! [`Ports`] attaches BPF programs to a cgroup that give connect() a free source port where the kernel would search long. Nothing
//! is pinned: the kernel detaches the programs when this process ends.
#![forbid(unsafe_code)]

mod calibrate;
mod connected;
mod destination;
mod error;
mod namespaces;
mod ports;
mod ranges;
mod run;
mod target;

pub use destination::{DestinationError, parse_destination};
pub use error::FixError;
pub use fourtuple_bpf::fix_ports::DestinationFilter;
pub use ports::{Ports, PortsOutcome, PortsProgress};
pub use run::{Choice, Run, RunError, RunOutcome, Way};
pub use target::{Target, TargetError};
