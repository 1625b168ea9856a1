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
pub mod guard;
mod namespaces;
mod ports;
pub mod print;
mod run;
mod target;
mod this_host;

use std::io;
use std::time::{Duration, Instant};

use fourtuple_bpf::BpfError;

pub use accept::{Accept, AcceptError, AcceptOutcome, AcceptProgress, AcceptRule, AcceptTarget};
pub use fourtuple_bpf::fix_accept::Selection;
pub use fourtuple_bpf::fix_ports::DestinationFilter;
pub use fourtuple_bpf::{Chooser, Control};
pub use ports::{Estimate, Pace, Ports, PortsOutcome, PortsProgress};
pub use run::{Choice, Notice, Run, RunError, RunOutcome, Way, Ways};
pub use target::{Programs, Target, TargetError};
pub use this_host::{DestinationError, PrintRequest, parse_destination};

/// The reason why a fix could not start, or could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FixError {
    /// The BPF programs could not be loaded or attached, or their maps could not be read.
    #[error("cannot fix ports: {0}")]
    Bpf(#[from] BpfError),
    /// The programs to fix were not found.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// No address of `--source` is an address of this host.
    #[error(
        "invalid value '{0}' for '--source': no address of it is local in the network namespace of the programs; expected a \
         prefix with addresses of this host, such as 192.0.2.0/28"
    )]
    NoSource(String),
    /// The addresses of `--source` and `--to` have different IP versions.
    #[error(
        "invalid value '{prefix}' for '--source': expected addresses of the IP version of --to {destination}"
    )]
    Version {
        /// The value of `--source`.
        prefix: String,
        /// The value of `--to`.
        destination: String,
    },
    /// net.ipv4.ip_local_port_range could not be read.
    #[error("cannot print a setting: {0}")]
    Sysctl(io::Error),
    /// The directory of the cgroup could not be opened.
    #[error("cannot fix ports: the directory of the cgroup: {0}")]
    Cgroup(io::Error),
    /// The cgroup was removed before the programs were attached, as systemd does when it stops a unit.
    #[error(
        "cannot fix ports: the cgroup was removed before the programs were attached: was the service restarted?"
    )]
    Removed,
    /// With source addresses, and no process in the cgroup: its network namespace is not known.
    #[error(
        "cannot fix ports: the cgroup has no process, whose network namespace would have the addresses of --source: is the service \
         being restarted?"
    )]
    Empty,
    /// The caller stopped the fix before the programs were attached.
    #[error("cannot fix ports: interrupted before the programs were attached")]
    Interrupted,
}

impl FixError {
    /// Returns whether other flags would avoid the error.
    pub fn is_usage(&self) -> bool {
        match self {
            FixError::Target(error) => error.is_usage(),
            FixError::NoSource(_) | FixError::Version { .. } => true,
            _ => false,
        }
    }

    /// Returns whether the same command can succeed on the same host later.
    pub fn is_not_valid(&self) -> bool {
        matches!(self, FixError::Removed | FixError::Empty | FixError::Interrupted)
    }
}

/// Allows work again when the processor time of its last turn is at most a share of the time since then.
#[derive(Debug)]
pub(crate) struct Budget {
    share: f64,
    from: Instant,
}

impl Budget {
    /// Limits the work to this share of a processor.
    pub(crate) fn of(share: f64) -> Budget {
        Budget { share, from: Instant::now() }
    }

    pub(crate) fn allows(&self, now: Instant) -> bool {
        now >= self.from
    }

    /// Notes the processor time of work that began at `now`.
    pub(crate) fn spend(&mut self, now: Instant, used: Duration) {
        self.from = now + used.div_f64(self.share);
    }
}
