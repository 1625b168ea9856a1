use std::time::Duration;

use fourtuple::dial::{SourcePool, Strategy};

use crate::Target;
use crate::arrival::Arrival;
use crate::engine::EngineChoice;
use crate::workload::{Trust, Workload};

/// Who closes a connection first, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// We, with FIN, as applications do: TIME_WAIT is ours.
    Client,
    /// We, with RST: no TIME_WAIT. No application closes like this.
    Reset,
    /// The server: we wait for its FIN, and TIME_WAIT is its own.
    Server,
}

impl Close {
    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Close::Client => "client",
            Close::Reset => "rst",
            Close::Server => "server",
        }
    }
}

/// A run, as asked for.
#[derive(Clone, Debug)]
pub struct Load {
    /// What is loaded.
    pub target: Target,
    /// What is done on a connection.
    pub workload: Workload,
    /// When operations begin.
    pub arrival: Arrival,
    /// Connections that may be open at once, beside those that are held.
    pub connections: u32,
    /// Rest between two operations of a connection, in a closed loop.
    pub pause: Duration,
    /// Requests after which a connection is closed; 0: never.
    pub close_every: u64,
    /// How.
    pub close: Close,
    /// Connections that are opened first and kept.
    pub hold: u32,
    /// Operations after which the run ends.
    pub operations: Option<u64>,
    /// Time after which the run ends.
    pub length: Option<Duration>,
    /// An operation that takes longer has failed.
    pub timeout: Duration,
    /// An operation that takes longer is listed.
    pub threshold: Option<Duration>,
    /// How bytes get to the kernel.
    pub engine: EngineChoice,
    /// Threads that generate.
    pub threads: usize,
    /// Each thread stays on a processor of its own.
    pub pinned: bool,
    /// How a source port is chosen.
    pub strategy: Strategy,
    /// Where connections come from.
    pub sources: SourcePool,
    /// Whose certificates are taken, of https.
    pub trust: Trust,
    /// The handshake's last ACK goes by itself. Else it goes with the request, where one follows at once: TCP_QUICKACK is
    /// off, which spares both sides a segment per connection.
    pub separate_ack: bool,
    /// Seed of arrivals.
    pub seed: u64,
    /// Whether a log of histograms is wanted.
    pub log: bool,
}
