//! Engines, which make the system calls of connections: one per file.

mod epoll;
mod http2;
mod uring;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fourtuple::dial::ConnectRequest;

use crate::load::tally::Streams;
use crate::load::workload::{ParseOutcome, Session};

pub(crate) use epoll::EpollEngine;
pub(crate) use http2::{Http2Engine, Setup};
pub(crate) use uring::{UringEngine, self_test};

/// The engine of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring if it passes its self-test, else epoll. The record names the engine and the reason.
    Auto,
    /// io_uring; an error if its self-test fails.
    Uring,
    /// Non-blocking sockets and epoll.
    Epoll,
}

impl EngineChoice {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Uring => "uring",
            EngineChoice::Epoll => "epoll",
        }
    }
}

/// The options of each socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// close() sends RST (SO_LINGER with 0).
    pub(crate) reset_on_close: bool,
    /// The last ACK of the handshake goes with the request, which follows at once (TCP_QUICKACK off).
    pub(crate) ack_with_request: bool,
}

/// The kind of call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// bind() to the source address, with a port or without one.
    Bind,
    /// socket(), setsockopt() or connect().
    Connect,
    /// send() or recv().
    Exchange,
}

/// The outcome of a call to an engine.
#[derive(Debug)]
pub(crate) enum Event {
    /// The connection is established. The engine sends the bytes given to `open` and then receives.
    Connected {
        slot: u32,
        /// Duration of connect() in nanoseconds, if it was measured.
        search_ns: Option<u64>,
    },
    /// Bytes were received; 0 is the end of the stream.
    Received { slot: u32, count: usize },
    /// A call failed, and no other call of the slot is in progress.
    Failed { slot: u32, stage: Stage, error: io::Error },
    /// The peer closed a watched connection.
    Lost { slot: u32 },
    /// What happened to the stream of a slot, if connections are shared.
    Stream { slot: u32, event: StreamEvent },
    /// A shared connection was closed, and its port is not in TIME_WAIT here.
    Free { to: usize, local: SocketAddr },
}

/// What happened to the operation of a slot that shares its connection.
#[derive(Debug)]
pub(crate) enum StreamEvent {
    /// The connection that the slot opened takes requests; `session`: of TLS.
    Ready { session: Option<Session> },
    /// The request was sent: the request of this number on its connection.
    Sent { request: u64 },
    /// A part of the response was received.
    Answer,
    /// The operation has ended.
    Ended(ParseOutcome),
    /// The server did not process the request (RFC 9113, 6.8): it may be sent again.
    Unprocessed,
    /// The connection that the slot waited for has ended: it joins another, or opens one.
    Again,
}

/// Opens, uses and closes the connections of one thread. Each connection has a slot, numbered from 0, with one call in progress
/// at a time.
pub(crate) trait Engine {
    /// Whether slots share connections: they are streams. Requests are then begun by `join`.
    const SHARES_CONNECTIONS: bool = false;

    /// Opens a connection to a destination of the engine, given by its number, sends `bytes` and receives. If `bytes` is empty,
    /// it only opens the connection.
    fn open(&mut self, slot: u32, to: usize, request: ConnectRequest, bytes: &[u8]) -> io::Result<()>;

    /// Sends `bytes`, if it is not empty, and receives.
    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()>;

    /// Receives without waiting: [`Event::Received`], or [`Event::Failed`] with EAGAIN if nothing has arrived.
    fn probe(&mut self, slot: u32) -> io::Result<()>;

    /// Watches a connection: [`Event::Lost`] when the peer closes it.
    fn watch(&mut self, slot: u32) -> io::Result<()>;

    /// Closes the connection. No event of the slot follows.
    fn close(&mut self, slot: u32) -> io::Result<()>;

    /// Cancels the call in progress: [`Event::Failed`] with ECANCELED follows, unless another event comes first.
    fn cancel(&mut self, slot: u32) -> io::Result<()>;

    /// Waits for events, at most `timeout`.
    fn wait(&mut self, timeout: Duration) -> io::Result<()>;

    fn event(&mut self) -> Option<Event>;

    /// Returns the first `count` bytes that the slot received last.
    fn received(&self, slot: u32, count: usize) -> &[u8];

    /// Returns the number of system calls so far.
    fn system_calls(&self) -> u64;

    /// Sends the request with this number on a shared connection, at once or when one has a free stream. Returns false if the slot must open a
    /// connection, on which the request is then sent.
    fn join(&mut self, _slot: u32, _request: usize) -> bool {
        false
    }

    /// Names the local address of the shared connection that the slot has opened, for [`Event::Free`].
    fn lend(&mut self, _slot: u32, _local: SocketAddr) {}

    /// Returns the slots that wait for a stream, which they do no more.
    fn withdraw(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the counts of HTTP/2.
    fn streams(&self) -> Option<Streams> {
        None
    }
}
