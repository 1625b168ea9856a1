//! An accepted connection, and what became of it.

use std::os::fd::OwnedFd;

use crate::talk::{Answer, Place};

/// An accepted connection.
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// Where in a request it is.
    pub(crate) place: Place,
    /// Responses begun.
    pub(crate) responses: u64,
    /// An answer for which there was no room, and how much of it is gone.
    pub(crate) sending: Option<(Answer, usize)>,
    /// Bytes that came and cannot be used yet: a head that has not ended, requests behind an answer without room.
    /// Seldom any, so that a connection allocates nothing.
    pub(crate) kept: Vec<u8>,
    /// Both sides have said all: what still comes is discarded up to this many bytes.
    pub(crate) draining: Option<u64>,
    /// It had its share of reading and has more: epoll is to tell of it again, behind the others.
    pub(crate) more: bool,
    /// epoll tells of room to write as well.
    pub(crate) watches_room: bool,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Connection {
        Connection {
            socket,
            place: Place::Between,
            responses: 0,
            sending: None,
            kept: Vec::new(),
            draining: None,
            more: false,
            watches_room: false,
        }
    }

    /// Whether an end of the stream now would cut a request short.
    pub(crate) fn is_within_a_request(&self) -> bool {
        self.draining.is_none() && (self.place != Place::Between || !self.kept.is_empty())
    }
}

/// What is next for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It goes on when epoll says so.
    Wait,
    /// It is over.
    Close,
}
