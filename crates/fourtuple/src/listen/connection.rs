//! A connection of a worker.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket;

use crate::listen::seats::{Count, Phase, Seats};

/// A guard that counts a connection as open in a worker's seat while it exists.
///
/// Example: [`Acceptor::detach`](crate::listen::Acceptor::detach).
#[derive(Debug)]
pub struct OpenGuard {
    seats: Arc<Seats>,
    seat: usize,
}

impl OpenGuard {
    pub(crate) fn new(seats: &Arc<Seats>, seat: usize) -> OpenGuard {
        seats.add(seat, Count::Open, 1);
        OpenGuard { seats: Arc::clone(seats), seat }
    }

    /// Returns whether the group closes every connection after its next response.
    pub(crate) fn is_draining(&self) -> bool {
        self.seats.phase() != Phase::Serving
    }

    /// Returns a second guard of the connection, before the first one is dropped.
    #[cfg(feature = "tokio")]
    pub(crate) fn again(&self) -> OpenGuard {
        OpenGuard::new(&self.seats, self.seat)
    }

    /// Counts a connection that could not be watched.
    #[cfg(feature = "tokio")]
    pub(crate) fn unwatched(&self) {
        self.seats.add(self.seat, Count::Unwatched, 1);
    }

    /// Counts a request as answered, for a runtime that reads the further requests of a connection by itself.
    pub fn response_sent(&self) {
        self.seats.add(self.seat, Count::Requests, 1);
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.seats.subtract(self.seat, Count::Open);
    }
}

/// Returns a random number as a fraction from 0 to 1.
pub(crate) fn chance(draw: u32) -> f64 {
    f64::from(draw) / f64::from(u32::MAX)
}

/// A readable connection: it has a request, a part of a request, or an end of file. Dropping it closes the connection.
///
/// Example: [`Acceptor`](crate::listen::Acceptor).
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    guard: OpenGuard,
    /// Bytes that were read and belong to the next request. They stay with the connection when it is kept, even if another
    /// worker gets it. A connection with more than about 64 KiB of them cannot go to another process or to the dispatcher.
    pub carry: Vec<u8>,
    /// A value for the caller's use, 0 at first. It stays with the connection like `carry`.
    pub mark: u64,
    pub(crate) served: Cell<u32>,
    /// A random number, drawn once per connection, that selects its age limit within the jitter of
    /// [`Recycle::Age`](crate::listen::Recycle::Age).
    pub(crate) draw: u32,
    /// The time of the accept.
    pub(crate) born: Instant,
    /// Whether [`Recycle`](crate::listen::Recycle) closes the connection after its next response.
    pub(crate) last: bool,
    /// With `Recycle::Measured`: the time at which the connection was kept.
    pub(crate) kept: Option<Instant>,
    /// With `Recycle::Measured`: how long the current request waited for its worker while another worker was idle.
    pub(crate) waited: Cell<Option<Duration>>,
    /// Whether an epoll watches the connection.
    pub(crate) watched: bool,
    /// Whether the connection has exceeded the idle limit while the ring of its worker still polls it.
    #[cfg(feature = "uring")]
    pub(crate) expired: bool,
    /// The remaining time for which its writes may wait for room until the next call of `Acceptor::next`.
    pub(crate) write_left: Duration,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, guard: OpenGuard) -> Connection {
        Connection {
            socket,
            guard,
            carry: Vec::new(),
            mark: 0,
            served: Cell::new(0),
            draw: fastrand::u32(..),
            born: Instant::now(),
            last: false,
            kept: None,
            waited: Cell::new(None),
            watched: false,
            #[cfg(feature = "uring")]
            expired: false,
            write_left: Duration::ZERO,
        }
    }

    /// Counts a request as answered.
    pub fn response_sent(&self) {
        self.served.set(self.served().saturating_add(1));
        self.guard.response_sent();
        if let Some(waited) = self.waited.take() {
            self.guard.seats.comparison().add_request(waited);
        }
    }

    pub(crate) fn seats(&self) -> &Arc<Seats> {
        &self.guard.seats
    }

    /// Returns the connection's random number as a fraction from 0 to 1.
    pub(crate) fn chance(&self) -> f64 {
        chance(self.draw)
    }

    /// Returns the number of requests answered on this connection so far, by any worker.
    pub fn served(&self) -> u32 {
        self.served.get()
    }

    /// Returns the time since the connection was accepted.
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Returns whether the server must close the connection after the current response: announce this in the response and drop the
    /// connection. [`Recycle`](crate::listen::Recycle) requires it, or the group is
    /// [draining](crate::listen::ListenerGroup::drain).
    pub fn should_close(&self) -> bool {
        self.last || self.guard.is_draining()
    }

    /// Returns the socket, which no epoll of the group watches, and its guard.
    pub(crate) fn into_parts(self) -> (OwnedFd, OpenGuard) {
        (self.socket, self.guard)
    }

    /// Counts the connection as open in `seat` instead of its previous seat.
    pub(crate) fn moves_to(&mut self, seats: &Arc<Seats>, seat: usize) {
        if self.guard.seat != seat {
            self.guard = OpenGuard::new(seats, seat);
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads with recv(2) without waiting: returns [`io::ErrorKind::WouldBlock`] when there is no data.
impl Read for Connection {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        socket::receive(self.socket.as_fd(), room)
    }
}

/// Writes with send(2), which waits for room in the send buffer. The worker serves no other connection meanwhile.
///
/// Returns [`io::ErrorKind::TimedOut`] when the writes since [`next`](crate::listen::Acceptor::next) returned the connection have
/// waited for longer than [`ListenerGroupBuilder::write_timeout`](crate::listen::ListenerGroupBuilder::write_timeout) in total, even
/// if the client reads slowly.
impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match socket::send(self.socket.as_fd(), bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_room()?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection {
    fn wait_for_room(&mut self) -> io::Result<()> {
        let begun = Instant::now();
        let writable = socket::wait_writable(self.socket.as_fd(), Some(self.write_left));
        self.write_left = self.write_left.saturating_sub(begun.elapsed());
        if writable? { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}
