use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket;

use crate::listen::seats::{Count, Seats};

/// A connection's place among those of its worker: while it is held the connection counts as open.
#[derive(Debug)]
pub struct Place {
    seats: Arc<Seats>,
    seat: usize,
}

impl Place {
    pub(crate) fn new(seats: &Arc<Seats>, seat: usize) -> Place {
        seats.add(seat, Count::Open, 1);
        Place { seats: Arc::clone(seats), seat }
    }

    /// Counts a request as answered, for a runtime that reads the further requests of a connection itself.
    pub fn answered(&self) {
        self.seats.add(self.seat, Count::Requests, 1);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.seats.less(self.seat, Count::Open);
    }
}

/// A connection with something to read: a request, a part of one, or its end. Dropping it closes it.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    place: Place,
    /// Bytes that were read and belong to the next request. They travel with the connection when it is kept, also to another
    /// worker; over a unix socket up to about 64 KiB of them.
    pub carry: Vec<u8>,
    /// The caller's own, 0 at first. It travels too.
    pub mark: u64,
    pub(crate) served: u32,
    /// Drawn once: which of the ages that [`Recycle::Age`](crate::listen::Recycle::Age) allows is its own.
    pub(crate) luck: u32,
    /// When it was accepted.
    pub(crate) born: Instant,
    pub(crate) last: bool,
    /// With `Recycle::Measured`: since when it waits for its next request.
    pub(crate) kept: Option<Instant>,
    /// With `Recycle::Measured`: how long the request that it comes with has waited in vain, where it was kept.
    pub(crate) waited: Option<Duration>,
    /// The epoll of its worker, or of all, knows it already.
    pub(crate) watched: bool,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, place: Place) -> Connection {
        Connection {
            socket,
            place,
            carry: Vec::new(),
            mark: 0,
            served: 0,
            luck: fastrand::u32(..),
            born: Instant::now(),
            last: false,
            kept: None,
            waited: None,
            watched: false,
        }
    }

    /// Counts a request as answered.
    pub fn answered(&mut self) {
        self.served = self.served.saturating_add(1);
        self.place.answered();
        if let Some(waited) = self.waited.take() {
            self.place.seats.scales().add_request(waited);
        }
    }

    /// Its luck as a number from 0 to 1.
    pub(crate) fn chance(&self) -> f64 {
        f64::from(self.luck) / f64::from(u32::MAX)
    }

    /// Requests answered on it so far, by whichever workers.
    pub fn served(&self) -> u32 {
        self.served
    }

    /// Time since it was accepted.
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Whether [`Recycle`](crate::listen::Recycle) wants it closed after the request that it comes with: say so in the
    /// answer, and drop it.
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// The socket, which no epoll of ours watches any more.
    pub(crate) fn into_parts(self) -> (OwnedFd, Place) {
        (self.socket, self.place)
    }

    /// Now it is the connection of `seat`.
    pub(crate) fn moves_to(&mut self, seats: &Arc<Seats>, seat: usize) {
        if self.place.seat != seat {
            self.place = Place::new(seats, seat);
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// recv(2), without waiting: [`io::ErrorKind::WouldBlock`] where there is nothing (more).
impl Read for Connection {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        socket::receive(self.socket.as_fd(), room)
    }
}

/// send(2). It waits for room, as a worker that serves one request at a time does; [`io::ErrorKind::TimedOut`] where the
/// client takes nothing for 10 s.
impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        const PATIENCE: Duration = Duration::from_secs(10);
        loop {
            match socket::send(self.socket.as_fd(), bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !socket::wait_writable(self.socket.as_fd(), Some(PATIENCE))? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
