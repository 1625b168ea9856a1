//! Workloads: the bytes that the client and the server exchange on a connection; one protocol per file.
//!
//! A workload creates a [`ProtocolState`] for each connection. It provides the bytes to send and parses the response. Engines
//! move the bytes; the driver decides when.

mod bytes;
mod chunked;
mod datagram;
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod protocol;
mod response;
mod tls;
mod trust;

pub use self::http::HttpRequest;
pub(crate) use self::protocol::{ParseOutcome, ProtocolState};
pub(crate) use self::tls::TlsSetup;
pub use self::trust::Trust;

/// The operations of each connection.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Opens and closes the connection without sending anything.
    Connect,
    /// Connect, request, response: sends `request` bytes and receives `response` bytes.
    Crr {
        /// Bytes of a request.
        request: usize,
        /// Bytes of a response.
        response: usize,
    },
    /// HTTP/1.1.
    Http(HttpRequest),
    /// Sends a datagram and waits for one in return.
    Udp {
        /// Bytes of a datagram.
        request: usize,
    },
}

impl Workload {
    /// Returns the name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Connect => "connect",
            Workload::Crr { .. } => "crr",
            Workload::Http(_) => "http",
            Workload::Udp { .. } => "udp",
        }
    }

    /// Returns whether the workload sends nothing: it opens and closes connections.
    pub(crate) fn sends_nothing(&self) -> bool {
        matches!(self, Workload::Connect | Workload::Crr { request: 0, .. })
    }

    /// Returns whether a request may be sent again if its connection was closed before the first byte of a response.
    /// The server may have processed the first request, so the method must be idempotent (RFC 9110, 9.2.2).
    pub(crate) fn may_be_sent_again(&self) -> bool {
        matches!(self, Workload::Http(request) if request.is_idempotent())
    }

    /// Creates the protocol state of one connection.
    pub(crate) fn protocol(&self) -> Box<dyn ProtocolState> {
        match self {
            Workload::Connect => Box::new(bytes::Bytes::new(0, 0)),
            Workload::Crr { request, response } => Box::new(bytes::Bytes::new(*request, *response)),
            Workload::Http(request) => Box::new(http::Http::new(request)),
            Workload::Udp { request } => Box::new(datagram::Datagram::new(*request)),
        }
    }
}
