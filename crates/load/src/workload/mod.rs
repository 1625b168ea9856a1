//! What is said on a connection: one workload per file.
//!
//! A workload knows bytes and nothing else. It makes a [`Talk`] per connection, which says what to send and understands what
//! comes back; engines move the bytes, the driver decides when.

mod bytes;
mod chunked;
mod datagram;
mod http;
mod response;
mod tls;
mod trust;

use std::borrow::Cow;

pub use self::http::HttpRequest;
pub(crate) use self::tls::TlsSetup;
pub use self::trust::Trust;

/// What is done on every connection.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Open and close; nothing is said.
    Connect,
    /// Connect, request, response: `request` bytes out, `response` bytes back.
    Crr {
        /// Bytes of a request.
        request: usize,
        /// Bytes of a response.
        response: usize,
    },
    /// HTTP/1.1.
    Http(HttpRequest),
    /// A datagram out, a datagram back.
    Udp {
        /// Bytes of a datagram.
        request: usize,
    },
}

impl Workload {
    /// As it is typed.
    pub fn name(&self) -> &'static str {
        match self {
            Workload::Connect => "connect",
            Workload::Crr { .. } => "crr",
            Workload::Http(_) => "http",
            Workload::Udp { .. } => "udp",
        }
    }

    /// Whether connections are opened and closed, and nothing else.
    pub(crate) fn says_nothing(&self) -> bool {
        matches!(self, Workload::Connect | Workload::Crr { request: 0, .. })
    }

    /// The talk of one connection.
    pub(crate) fn talk(&self) -> Box<dyn Talk> {
        match self {
            Workload::Connect => Box::new(bytes::Bytes::new(0, 0)),
            Workload::Crr { request, response } => Box::new(bytes::Bytes::new(*request, *response)),
            Workload::Http(request) => Box::new(http::Http::new(request)),
            Workload::Udp { request } => Box::new(datagram::Datagram::new(*request)),
        }
    }
}

/// What came of bytes that were received.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The response is not whole yet.
    More,
    /// Something is to be sent before there can be more: a step of a TLS handshake.
    Send,
    /// The response is whole.
    Answer {
        /// The other side closes now.
        closing: bool,
        /// A response that says that something failed, by name.
        failure: Option<Cow<'static, str>>,
    },
    /// This will not become a response.
    Failed(Cow<'static, str>),
}

impl Heard {
    /// An answer after which the connection can go on.
    const ANSWER: Heard = Heard::Answer { closing: false, failure: None };

    /// The end of the stream came before the end of the response.
    const CLOSED_EARLY: Heard = Heard::Failed(Cow::Borrowed("closed-early"));

    /// Not what the protocol allows.
    const MALFORMED: Heard = Heard::Failed(Cow::Borrowed("malformed"));
}

/// One connection's part of a workload.
pub(crate) trait Talk {
    /// The connection is a new one.
    fn renew(&mut self) {}

    /// A request begins; `last` says that no other will follow on this connection.
    fn begin(&mut self, last: bool);

    /// What is to be sent now. Empty: there is nothing to say, and nothing to hear.
    fn outgoing(&self) -> &[u8];

    /// Understands bytes; none are the end of the stream.
    fn heard(&mut self, bytes: &[u8]) -> Heard;

    /// Whether requests can be sent yet: false while a TLS handshake is under way.
    fn established(&self) -> bool {
        true
    }
}
