//! The table of protocols.
//!
//! Names, parsing, help texts and checks derive from a protocol's row.

use std::mem;
use std::str::FromStr;

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

/// The properties of one protocol.
struct Row {
    /// The protocol with its default sizes.
    protocol: Protocol,
    /// The name on the command line and in records.
    name: &'static str,
    /// The text of the help.
    description: &'static str,
    /// Whether clients open connections.
    connections: bool,
    /// Whether the server responds to requests.
    responses: bool,
}

static TABLE: [Row; 4] = [
    Row {
        protocol: Protocol::Crr { request: 1, response: 1 },
        name: "crr",
        description: "fixed sizes of request and response",
        connections: true,
        responses: true,
    },
    Row {
        protocol: Protocol::Http { body: 2 },
        name: "http",
        description: "1.1 and 1.0",
        connections: true,
        responses: true,
    },
    Row {
        protocol: Protocol::Udp { request: 1 },
        name: "udp",
        description: "echo",
        connections: false,
        responses: true,
    },
    Row {
        protocol: Protocol::Sink,
        name: "sink",
        description: "reads, never responds",
        connections: true,
        responses: false,
    },
];

impl Protocol {
    /// Returns all protocols with their default sizes, in the order of the table.
    pub fn all() -> impl Iterator<Item = Protocol> {
        TABLE.iter().map(|row| row.protocol)
    }

    fn row(self) -> &'static Row {
        let is_same = |row: &&Row| mem::discriminant(&row.protocol) == mem::discriminant(&self);
        TABLE.iter().find(is_same).expect("every protocol has a row")
    }

    /// Returns the name: `crr`, `http`, `udp` or `sink`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns what a help text says in addition to the name.
    pub fn description(self) -> &'static str {
        self.row().description
    }

    /// Whether clients open connections; with UDP they do not.
    pub fn has_connections(self) -> bool {
        self.row().connections
    }

    /// Whether the server responds to requests.
    pub(crate) fn has_responses(self) -> bool {
        self.row().responses
    }

    /// Returns the protocol with requests of this size in bytes; `None` if it has no such setting.
    pub fn with_request(self, bytes: u32) -> Option<Protocol> {
        match self {
            Protocol::Crr { response, .. } => Some(Protocol::Crr { request: bytes.into(), response }),
            Protocol::Udp { .. } => Some(Protocol::Udp { request: bytes as usize }),
            _ => None,
        }
    }

    /// Returns the protocol with responses of this size in bytes; `None` if it has no such setting.
    pub fn with_response(self, bytes: u32) -> Option<Protocol> {
        match self {
            Protocol::Crr { request, .. } => Some(Protocol::Crr { request, response: bytes as usize }),
            _ => None,
        }
    }

    /// Returns the protocol with bodies of this size in bytes; `None` if it has no such setting.
    pub fn with_body(self, bytes: u32) -> Option<Protocol> {
        match self {
            Protocol::Http { .. } => Some(Protocol::Http { body: bytes as usize }),
            _ => None,
        }
    }

    /// Returns the sizes of a request and of a response (with HTTP its body) in bytes, if they are settings.
    pub fn sizes(self) -> (Option<u64>, Option<u64>) {
        match self {
            Protocol::Crr { request, response } => (Some(request), Some(response as u64)),
            Protocol::Http { body } => (None, Some(body as u64)),
            Protocol::Udp { request } => (Some(request as u64), None),
            Protocol::Sink => (None, None),
        }
    }
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(text: &str) -> Result<Protocol, String> {
        Protocol::all().find(|protocol| protocol.name() == text).ok_or_else(|| {
            let names: Vec<_> = Protocol::all().map(Protocol::name).collect();
            format!("{text:?} is not a protocol: expected {}", names.join(", "))
        })
    }
}
