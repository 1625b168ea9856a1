//! The interface between the driver and a protocol: bytes to send, and the outcome of parsing received bytes.

use std::borrow::Cow;

/// The outcome of parsing received bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParseOutcome {
    /// The response is not complete.
    NeedMore,
    /// Bytes must be sent before more can arrive: a step of a TLS handshake.
    Send,
    /// The response is complete.
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
#[derive(Debug, PartialEq, Eq)]
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
pub(super) fn quoted(bytes: &[u8]) -> String {
    let more = if bytes.len() > MAX_QUOTED { "..." } else { "" };
    format!("\"{}\"{more}", bytes[..bytes.len().min(MAX_QUOTED)].escape_ascii())
}

impl ParseOutcome {
    /// A complete response after which the connection can be used again.
    pub(super) const COMPLETE: ParseOutcome = ParseOutcome::Complete { closing: false, status: None };

    /// The stream ended within the response.
    pub(super) const CLOSED_EARLY: ParseOutcome =
        ParseOutcome::Failed(Failure { name: Cow::Borrowed("closed-early"), detail: None });

    /// The bytes violate the protocol: `why`, and the first of them.
    pub(super) fn malformed(why: &str, bytes: &[u8]) -> ParseOutcome {
        let detail = Some(format!("{why}: {}", quoted(bytes)));
        ParseOutcome::Failed(Failure { name: "malformed".into(), detail })
    }

    #[cfg(test)]
    pub(super) fn is_malformed(&self) -> bool {
        matches!(self, ParseOutcome::Failed(failure) if failure.name == "malformed")
    }
}

/// The protocol state of one connection.
pub(crate) trait ProtocolState {
    /// Resets the state for a new connection.
    fn renew(&mut self) {}

    /// Begins a request. `last`: no other request follows on this connection.
    fn begin(&mut self, last: bool);

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
}
