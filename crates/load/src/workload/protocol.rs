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
        /// The name of the failure that the response reports, such as `status-500`.
        failure: Option<Cow<'static, str>>,
    },
    /// The stream ended before the first byte of a response.
    ClosedUnanswered,
    /// The bytes are not a response; the name of the error.
    Failed(Cow<'static, str>),
}

impl ParseOutcome {
    /// A complete response after which the connection can be used again.
    pub(super) const COMPLETE: ParseOutcome = ParseOutcome::Complete { closing: false, failure: None };

    /// The stream ended within the response.
    pub(super) const CLOSED_EARLY: ParseOutcome = ParseOutcome::Failed(Cow::Borrowed("closed-early"));

    /// The bytes violate the protocol.
    pub(super) const MALFORMED: ParseOutcome = ParseOutcome::Failed(Cow::Borrowed("malformed"));
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
