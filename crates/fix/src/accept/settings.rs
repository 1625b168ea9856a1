//! Settings, figures and results of a fix of accept().

use std::net::SocketAddr;
use std::time::Duration;

use fourtuple_bpf::Control;
use fourtuple_bpf::fix_accept::Selection;
use fourtuple_record::{FixAcceptResults, Remark};

/// The server whose groups get a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptTarget {
    /// The sockets at this address in the network namespace of this process.
    Address(SocketAddr),
    /// The sockets of this process and its descendants, in the network namespace of the process.
    Process(u32),
}

/// A fix of accept() for the SO_REUSEPORT groups of a server.
#[derive(Clone, Copy, Debug)]
pub struct Accept {
    /// The server.
    pub target: AcceptTarget,
    /// The rule of the selector.
    pub selection: Selection,
    /// The control packets, which one socket of each UDP group gets and no other packets.
    pub control: Option<Control>,
    /// How long; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
    /// Whether to count only.
    pub dry_run: bool,
}

/// Figures of a running fix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptProgress {
    /// Time since the start.
    pub elapsed: Duration,
    pub groups: usize,
    /// Listeners, or UDP sockets.
    pub listeners: usize,
    /// Choices since the start; in a dry run the connections that the kernel distributed.
    pub chosen: u64,
    /// Choices per second since the previous progress.
    pub chosen_per_s: f64,
    pub open: u64,
    /// Packets for which the kernel's hash chose.
    pub left: u64,
    /// The longest queue at this moment: connections, or bytes for UDP.
    pub longest_queue: u32,
}

/// The results of a fix, and the limits of their validity.
#[derive(Clone, Debug)]
pub struct AcceptOutcome {
    pub results: FixAcceptResults,
    /// Reasons to doubt the results; empty for a valid run.
    pub validity: Vec<Remark>,
}
