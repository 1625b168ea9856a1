//! The settings of a server that other modules need: the protocol, the side that closes, the stall.

use std::time::Duration;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Requests and responses of fixed sizes, until the client or the server closes.
    Crr {
        /// Size of a request in bytes, at least 1.
        request: u64,
        /// Size of a response in bytes, at least 1.
        response: usize,
    },
    /// HTTP/1.1 and 1.0, with the same response to each request.
    Http {
        /// Size of the body in bytes.
        body: usize,
    },
    /// UDP datagrams, which the server sends back.
    Udp {
        /// Minimum size in bytes. A shorter datagram is counted as an error and not sent back.
        request: usize,
    },
    /// Streams that the server reads without responding.
    Sink,
}

impl Protocol {
    /// Returns the name: `crr`, `http`, `udp` or `sink`.
    pub fn name(&self) -> &'static str {
        match self {
            Protocol::Crr { .. } => "crr",
            Protocol::Http { .. } => "http",
            Protocol::Udp { .. } => "udp",
            Protocol::Sink => "sink",
        }
    }
}

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
