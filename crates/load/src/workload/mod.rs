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
mod table;
mod tls;
mod trust;

pub use self::http::HttpRequest;
pub(crate) use self::protocol::{Failure, ParseOutcome, ProtocolState, Status};
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
    /// Whether the workload sends nothing: it opens and closes connections.
    pub fn sends_nothing(&self) -> bool {
        matches!(self, Workload::Connect | Workload::Crr { request: 0, .. })
    }

    /// Returns whether a request may be sent again if its connection was closed before the first byte of a response.
    /// The server may have processed the first request, so the method must be idempotent (RFC 9110, 9.2.2).
    pub(crate) fn may_be_sent_again(&self) -> bool {
        matches!(self, Workload::Http(request) if request.is_idempotent())
    }

    /// Returns the sizes of a request (with HTTP its body) and of a response in bytes, 0 if they are no settings.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        match self {
            Workload::Connect => (0, 0),
            Workload::Crr { request, response } => (*request, *response),
            Workload::Http(request) => (request.body.len(), 0),
            Workload::Udp { request } => (*request, 0),
        }
    }

    /// Returns the workload with requests of this size in bytes; `None` if it has no such setting.
    pub fn with_request(&self, bytes: usize) -> Option<Workload> {
        match *self {
            Workload::Crr { response, .. } => Some(Workload::Crr { request: bytes, response }),
            Workload::Udp { .. } => Some(Workload::Udp { request: bytes }),
            _ => None,
        }
    }

    /// Returns the workload with responses of this size in bytes; `None` if it has no such setting.
    pub fn with_response(&self, bytes: usize) -> Option<Workload> {
        match *self {
            Workload::Crr { request, .. } => Some(Workload::Crr { request, response: bytes }),
            _ => None,
        }
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
