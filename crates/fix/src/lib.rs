//! Mends the connections of programs from outside, without a change of the programs: [`Ports`] of programs that run already, without
//! a restart; [`Run`] of a program that it starts.
//!
//! [`Ports`] attaches BPF programs to a cgroup that give connect() a free source port where the kernel would search long. Nothing
//! is pinned: the kernel detaches the programs when this process ends. [`Accept`] attaches selectors to the SO_REUSEPORT groups of a
//! server; the kernel keeps them with the group, so a guard process and a heartbeat end them.
//!
//! [`mod@print`] has the settings of other programs against the same problem, for programs that can be changed.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod accept;
mod budget;
mod error;
pub mod guard;
mod namespaces;
mod ports;
pub mod print;
mod run;
mod target;
mod this_host;

pub use accept::{Accept, AcceptError, AcceptOutcome, AcceptProgress, AcceptRule, AcceptTarget};
pub use error::FixError;
pub use fourtuple_bpf::fix_accept::Selection;
pub use fourtuple_bpf::fix_ports::DestinationFilter;
pub use fourtuple_bpf::{Chooser, Control};
pub use ports::{Estimate, Pace, Ports, PortsOutcome, PortsProgress};
pub use run::{Choice, Notice, Run, RunError, RunOutcome, Way, Ways};
pub use target::{Programs, Target, TargetError};
pub use this_host::{DestinationError, PrintRequest, parse_destination};
