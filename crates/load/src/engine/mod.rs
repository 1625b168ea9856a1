//! How bytes get to the kernel and back: one engine per file.

mod epoll;
mod uring;

use std::io;
use std::time::Duration;

use fourtuple::dial::Wanted;

pub(crate) use epoll::EpollEngine;
pub(crate) use uring::{UringEngine, self_test};

/// Which engine is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring where it passes its self-test, else epoll; which one and why is in the record.
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Non-blocking sockets and epoll.
    Epoll,
}

impl EngineChoice {
    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Uring => "uring",
            EngineChoice::Epoll => "epoll",
        }
    }
}

/// What every socket is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Closing sends RST.
    pub(crate) reset_on_close: bool,
    /// The last ACK of the handshake waits for the request, which follows at once.
    pub(crate) ack_with_request: bool,
}

/// Where a connection was when something failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Opening: a port may have been taken.
    Connect,
    /// Sending or receiving.
    Talk,
}

/// What came of what an engine was asked to do.
#[derive(Debug)]
pub(crate) enum Event {
    /// The connection is there. What was given to `open` is on its way, and the first bytes of the answer are awaited.
    Connected {
        slot: u32,
        /// How long connect() took, where it was measured.
        search_ns: Option<u64>,
    },
    /// So many bytes are there; none: the other side has closed.
    Received { slot: u32, count: usize },
    /// Nothing of the slot is under way any more.
    Failed { slot: u32, stage: Stage, error: io::Error },
    /// A watched connection was closed by the other side.
    Lost { slot: u32 },
}

/// Moves bytes for the connections of one thread. Slots are numbered from 0 and do one thing at a time.
pub(crate) trait Engine {
    /// Opens a connection, sends `bytes` and receives; without bytes it only opens.
    fn open(&mut self, slot: u32, wanted: Wanted, bytes: &[u8]) -> io::Result<()>;

    /// Sends `bytes`, if there are any, and receives.
    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()>;

    /// Waits for the other side to close.
    fn watch(&mut self, slot: u32) -> io::Result<()>;

    /// Closes at once; no event follows.
    fn close(&mut self, slot: u32) -> io::Result<()>;

    /// Ends what is under way: a [`Event::Failed`] with ECANCELED follows, unless another event is quicker.
    fn cancel(&mut self, slot: u32) -> io::Result<()>;

    /// Waits until there are events, or `timeout` is over.
    fn wait(&mut self, timeout: Duration) -> io::Result<()>;

    /// The next event.
    fn event(&mut self) -> Option<Event>;

    /// What was received last: `count` bytes of it.
    fn received(&self, slot: u32, count: usize) -> &[u8];

    /// System calls made so far.
    fn system_calls(&self) -> u64;
}
