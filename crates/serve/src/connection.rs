//! The state of an accepted connection.

use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::decoder::{Answer, Position};

/// An accepted connection.
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// The position in the current request.
    pub(crate) position: Position,
    /// Number of responses begun.
    pub(crate) responses: u64,
    /// A response that did not fit into the send buffer, and the number of its bytes that were sent.
    pub(crate) sending: Option<(Answer, usize)>,
    /// Received bytes that cannot be used yet: an incomplete head, or requests after a response that did not fit. It is
    /// usually empty, so that a connection allocates nothing.
    pub(crate) kept: Vec<u8>,
    /// The last response was sent: further bytes are discarded, at most this many.
    pub(crate) draining: Option<u64>,
    /// The worker stopped reading although more may be there: epoll must report the connection again, after other connections.
    pub(crate) more: bool,
    /// epoll also reports when the socket is writable.
    pub(crate) watches_room: bool,
    /// When the worker last had an event of this connection.
    pub(crate) active_at: Instant,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Connection {
        Connection {
            socket,
            position: Position::Between,
            responses: 0,
            sending: None,
            kept: Vec::new(),
            draining: None,
            more: false,
            watches_room: false,
            active_at: Instant::now(),
        }
    }

    /// Returns whether an end of the stream now would truncate a request.
    pub(crate) fn is_within_a_request(&self) -> bool {
        self.draining.is_none() && (self.position != Position::Between || !self.kept.is_empty())
    }
}

/// The next action on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for the next epoll event.
    Wait,
    /// Close it.
    Close,
}
