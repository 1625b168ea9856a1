//! The settings of a server that other modules need: the side that closes, the stall.

use std::time::Duration;

/// The side that closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The client. With HTTP the server still closes after `Connection: close` and after HTTP/1.0 requests.
    Client,
    /// The server, with FIN, after this many responses. The server has the TIME_WAIT socket.
    Server {
        /// Number of responses, at least 1.
        every: u64,
    },
    /// The server, with RST, after this many responses. Neither side has a TIME_WAIT socket. Applications do not close like this.
    Reset {
        /// Number of responses, at least 1.
        every: u64,
    },
}

impl Close {
    /// Returns the name: `client`, `server` or `rst`.
    pub fn name(self) -> &'static str {
        match self {
            Close::Client => "client",
            Close::Server { .. } => "server",
            Close::Reset { .. } => "rst",
        }
    }

    /// Returns the number of responses after which the server closes.
    pub fn every(self) -> Option<u64> {
        match self {
            Close::Client => None,
            Close::Server { every } | Close::Reset { every } => Some(every),
        }
    }
}

/// A single period in which no worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Time from the start of the server to the start of the stall.
    pub at: Duration,
    /// Length of the stall.
    pub length: Duration,
}
