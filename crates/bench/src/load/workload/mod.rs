//! Workloads: the bytes that the client and the server exchange on a connection; one protocol per file.
//!
//! A workload creates a [`ProtocolState`] for each connection. It provides the bytes to send and parses the response. Engines
//! move the bytes; the driver decides when.

#[doc(hidden)]
pub mod fuzzing;
mod http;
mod tls;

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

use crate::load::target::Scheme;

pub(crate) use self::http::Requests;
pub use self::http::{HttpRequest, Order, RequestList};
pub(crate) use self::tls::{Session, TlsSetup};
pub use self::tls::{TlsOptions, Trust};

/// The operations of each connection.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Opens and closes the connection without sending anything.
    Connect,
    /// Connect, request, response: sends `request` bytes and receives `response` bytes.
    Crr { request: usize, response: usize },
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

    /// Returns the sizes of a request (with HTTP its body) and of a response in bytes, 0 if they are not settings.
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

    /// Creates the protocol state of one connection. `requests`: those of HTTP, which all connections share.
    pub(crate) fn protocol(&self, requests: &Arc<Requests>) -> Box<dyn ProtocolState> {
        match self {
            Workload::Connect => Box::new(Bytes::new(0, 0)),
            Workload::Crr { request, response } => Box::new(Bytes::new(*request, *response)),
            Workload::Http(_) => Box::new(http::Http::new(Arc::clone(requests))),
            Workload::Udp { request } => Box::new(Datagram::new(*request)),
        }
    }
}

// The table of workloads.
//
// Names, parsing, help texts and checks derive from a workload's row.

/// The properties of one workload.
struct Row {
    /// The name on the command line and in records.
    name: &'static str,
    /// The workload with its default sizes.
    workload: Workload,
    /// The text of the help, if the name does not suffice.
    description: &'static str,
    /// The targets that it goes with.
    schemes: &'static [Scheme],
    /// Whether a connection stays open for further requests by default.
    keeps: bool,
}

static TABLE: [Row; 5] = [
    Row {
        name: "connect",
        workload: Workload::Connect,
        description: "open, close",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
    Row {
        name: "crr",
        workload: Workload::Crr { request: 1, response: 1 },
        description: "connect, request, response, close",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
    Row {
        name: "http",
        workload: Workload::Http(HttpRequest::EMPTY),
        description: "",
        schemes: &[Scheme::Http, Scheme::Https, Scheme::Unix],
        keeps: true,
    },
    Row {
        name: "udp",
        workload: Workload::Udp { request: 1 },
        description: "",
        schemes: &[Scheme::Udp],
        keeps: true,
    },
    // The workload connect, beside connections that the run keeps open: the name in records of such a run.
    Row {
        name: Workload::HOLD,
        workload: Workload::Connect,
        description: "keep --hold connections, open and close further connections",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
];

impl Workload {
    /// The name of the workload connect in a run that keeps connections open.
    pub const HOLD: &str = "hold";

    /// Returns all names, in the order of the table.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.name)
    }

    /// Returns the workload with this name and its default sizes.
    pub fn named(name: &str) -> Option<Workload> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.workload.clone())
    }

    /// Returns the names of the workloads with this property: `crr and udp`.
    pub fn names_of(has: impl Fn(&Workload) -> bool) -> Vec<&'static str> {
        TABLE.iter().filter(|row| has(&row.workload)).map(|row| row.name).collect()
    }

    /// Returns the names with their descriptions, for a help text.
    pub fn descriptions() -> String {
        let words = |row: &Row| match row.description {
            "" => row.name.to_owned(),
            text => format!("{} ({text})", row.name),
        };
        TABLE.iter().map(words).collect::<Vec<_>>().join(", ")
    }

    fn row(&self) -> &'static Row {
        let is_same = |row: &&Row| mem::discriminant(&row.workload) == mem::discriminant(self);
        TABLE.iter().find(is_same).expect("every workload has a row")
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        self.row().name
    }

    /// Whether a connection stays open for further requests by default.
    pub fn keeps_connections(&self) -> bool {
        self.row().keeps
    }

    /// Returns the targets that the workload goes with.
    pub fn schemes(&self) -> &'static [Scheme] {
        self.row().schemes
    }

    /// Returns the targets that each workload needs: `udp needs udp://`.
    pub(crate) fn needs() -> String {
        let needs = |row: &Row| {
            let schemes: Vec<_> = row.schemes.iter().map(|scheme| scheme.prefix()).collect();
            format!("{} needs {}", row.name, schemes.join(" or "))
        };
        TABLE.iter().map(needs).collect::<Vec<_>>().join(", ")
    }
}

/// The outcome of parsing received bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParseOutcome {
    /// The response is not complete.
    NeedMore,
    /// Bytes must be sent before more can arrive: a step of a TLS handshake.
    Send,
    Complete {
        /// The server closes the connection now.
        closing: bool,
        /// The status of an HTTP response.
        status: Option<Status>,
    },
    /// The stream ended before the first byte of a response.
    ClosedUnanswered,
    /// The bytes are not a response.
    Failed(Failure),
}

/// The status of an HTTP response.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) code: u16,
    /// The field Location of a redirection (3xx), printable.
    pub(crate) location: Option<String>,
}

/// The failure of an operation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The name under which it is counted.
    pub(crate) name: Cow<'static, str>,
    /// Bytes that came instead of a response, or the reason of the TLS library, printable. The record has the first of each name.
    pub(crate) detail: Option<String>,
}

impl<N: Into<Cow<'static, str>>> From<N> for Failure {
    fn from(name: N) -> Self {
        Failure { name: name.into(), detail: None }
    }
}

/// Maximum number of bytes of a peer that a detail quotes.
const MAX_QUOTED: usize = 64;

/// Quotes the first bytes of a peer; bytes other than printable ASCII are escaped.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    let more = if bytes.len() > MAX_QUOTED { "..." } else { "" };
    format!("\"{}\"{more}", bytes[..bytes.len().min(MAX_QUOTED)].escape_ascii())
}

impl ParseOutcome {
    /// A complete response after which the connection can be used again.
    const COMPLETE: ParseOutcome = ParseOutcome::Complete { closing: false, status: None };

    /// The stream ended within the response.
    const CLOSED_EARLY: ParseOutcome =
        ParseOutcome::Failed(Failure { name: Cow::Borrowed("closed-early"), detail: None });

    /// The bytes violate the protocol: `why`, and the first of them.
    fn malformed(why: &str, bytes: &[u8]) -> ParseOutcome {
        let detail = Some(format!("{why}: {}", quoted(bytes)));
        ParseOutcome::Failed(Failure { name: "malformed".into(), detail })
    }

    #[cfg(test)]
    fn is_malformed(&self) -> bool {
        matches!(self, ParseOutcome::Failed(failure) if failure.name == "malformed")
    }
}

/// The protocol state of one connection.
pub(crate) trait ProtocolState {
    /// Resets the state for a new connection.
    fn renew(&mut self) {}

    /// Begins a request. `last`: no other request follows on this connection.
    fn begin(&mut self, last: bool);

    /// The request that begins next is the current one again, on a new connection.
    fn repeat(&mut self) {}

    /// Returns the number of the current request in a list of requests.
    fn current(&self) -> usize {
        0
    }

    /// Returns whether the current request may be sent again if its connection was closed before the first byte of a response. The
    /// server may have processed it, so the method must be idempotent (RFC 9110, 9.2.2).
    fn may_be_sent_again(&self) -> bool {
        false
    }

    /// Returns the bytes to send. If there are none, no response follows either.
    fn outgoing(&self) -> &[u8];

    /// Parses received bytes. An empty slice is the end of the stream.
    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome;

    /// Returns whether a byte of the response was among the received bytes. Session tickets of TLS and late datagrams are no
    /// response.
    fn answered(&self) -> bool {
        true
    }

    /// Parses bytes that arrived between two requests, and returns whether the connection can still be used. In most
    /// protocols the server sends nothing then.
    fn idle(&mut self, _bytes: &[u8]) -> bool {
        false
    }

    /// Returns whether requests can be sent: false during a TLS handshake.
    fn established(&self) -> bool {
        true
    }

    /// Returns what an established TLS connection has negotiated.
    fn session(&self) -> Option<Session> {
        None
    }
}

/// A request and a response of fixed sizes. With size 0 this is the workload `connect`.
struct Bytes {
    request: Vec<u8>,
    response: usize,
    missing: usize,
}

impl Bytes {
    fn new(request: usize, response: usize) -> Self {
        Bytes { request: vec![b'x'; request], response, missing: 0 }
    }
}

impl ProtocolState for Bytes {
    fn begin(&mut self, _last: bool) {
        self.missing = self.response;
    }

    fn outgoing(&self) -> &[u8] {
        &self.request
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        if bytes.is_empty() {
            return ParseOutcome::CLOSED_EARLY;
        }
        match self.missing.checked_sub(bytes.len()) {
            Some(0) => ParseOutcome::COMPLETE,
            Some(missing) => {
                self.missing = missing;
                ParseOutcome::NeedMore
            }
            // The server sent more than the response.
            None => ParseOutcome::malformed("more bytes than the response has", &bytes[self.missing..]),
        }
    }
}

/// Length of the sequence number, which distinguishes a late response from the expected one.
const NUMBER: usize = 8;

/// Sends a datagram and waits for one in return. A datagram of at least 8 bytes carries a sequence number; a response with
/// another number is late and ignored.
struct Datagram {
    payload: Vec<u8>,
    number: u64,
    answered: bool,
}

impl Datagram {
    fn new(request: usize) -> Self {
        Datagram { payload: vec![b'x'; request.max(1)], number: 0, answered: false }
    }
}

impl ProtocolState for Datagram {
    fn begin(&mut self, _last: bool) {
        self.number += 1;
        self.answered = false;
        if let Some(number) = self.payload.get_mut(..NUMBER) {
            number.copy_from_slice(&self.number.to_be_bytes());
        }
    }

    fn outgoing(&self) -> &[u8] {
        &self.payload
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        match (bytes.get(..NUMBER), self.payload.get(..NUMBER)) {
            (Some(theirs), Some(ours)) if theirs != ours => ParseOutcome::NeedMore,
            _ => {
                self.answered = true;
                ParseOutcome::COMPLETE
            }
        }
    }

    fn answered(&self) -> bool {
        self.answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_ends_with_its_last_byte() {
        let mut protocol = Bytes::new(2, 3);
        protocol.begin(false);
        assert_eq!(protocol.outgoing().len(), 2);
        assert_eq!(protocol.receive(b"a"), ParseOutcome::NeedMore);
        assert_eq!(protocol.receive(b"bc"), ParseOutcome::COMPLETE);
        protocol.begin(true);
        assert_eq!(protocol.receive(b"ab"), ParseOutcome::NeedMore);
        assert_eq!(protocol.receive(b""), ParseOutcome::CLOSED_EARLY);
        protocol.begin(true);
        let ParseOutcome::Failed(failure) = protocol.receive(b"abcd") else { panic!("a byte too many") };
        let detail = "more bytes than the response has: \"d\"";
        assert_eq!((failure.name.as_ref(), failure.detail.as_deref()), ("malformed", Some(detail)));
    }

    #[test]
    fn a_late_response_is_ignored() {
        let mut protocol = Datagram::new(16);
        protocol.begin(false);
        let late = protocol.outgoing().to_vec();
        protocol.begin(false);
        assert_eq!(protocol.receive(&late), ParseOutcome::NeedMore);
        assert!(!protocol.answered());
        let now = protocol.outgoing().to_vec();
        assert_eq!(protocol.receive(&now), ParseOutcome::COMPLETE);
        assert!(protocol.answered());
        let mut short = Datagram::new(1);
        short.begin(false);
        assert_eq!(short.receive(b"x"), ParseOutcome::COMPLETE, "a short datagram has no sequence number");
    }
}
