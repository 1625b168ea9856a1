//! The seat of a worker, and the trait by which a policy waits for it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::event_fd::EventFd;
use fourtuple_syscalls::socket::AcceptFailure;
use fourtuple_syscalls::{Errno, epoll, socket};

use crate::listen::connection::{Connection, OpenGuard};
use crate::listen::error::ListenError;
use crate::listen::group::ListenerGroup;
use crate::listen::handoff::Arrival;
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::{Count, Phase};

/// A worker's implementation of an accept policy.
pub(crate) trait Wait: Send {
    /// Returns a connection that has something to read, or `None` after `timeout` or a wakeup through the waker.
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError>;

    /// Waits for the next request of a connection.
    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError>;

    /// Returns how long the request that `next` has just returned waited for this worker while another worker was idle. The
    /// connection has been kept since `kept`, and `next` was called at `asked`. Zero where an idle worker takes the next request.
    fn misplaced(&self, seat: &Seat, kept: Instant, asked: Instant) -> Duration;

    /// Stops watching a connection that `next` returned. Another epoll will watch it, and both would report its events.
    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError>;

    /// Stops accepting, for another process that accepts from the same listeners, and takes the connection for which the kernel may
    /// have woken only this worker. Called between two calls of `next`, at most once.
    fn retire(&mut self, seat: &Seat) -> Result<(), ListenError>;

    /// Stops accepting. Returns the connections that other workers must take over; a listener of the worker's own goes into
    /// the handoff queue, which it waits for until the deadline.
    fn release(&mut self, seat: &Seat, until: Instant) -> Result<Vec<Connection>, ListenError>;
}

/// A worker slot of a group, held by the worker that joined.
pub(crate) struct Seat {
    pub(crate) group: ListenerGroup,
    pub(crate) number: usize,
    pub(crate) waker: Arc<EventFd>,
}

/// The outcome of accept4(2).
pub(crate) enum AcceptOutcome {
    Connection(Connection),
    /// Another worker was faster, or the error was of a connection that is gone.
    Empty,
    /// An immediate retry would fail too: the kernel had no descriptor or no memory, a filter forbids the call, or a drain has shut the
    /// unix listener down.
    Pause,
}

impl Seat {
    /// Adds one to a counter of this seat.
    pub(crate) fn count(&self, count: Count) {
        self.group.0.seats.add(self.number, count, 1);
    }

    /// Calls accept4(2) and counts the outcome.
    pub(crate) fn accept(&self, listener: &OwnedFd) -> Result<AcceptOutcome, ListenError> {
        match socket::accept_nonblocking(listener.as_fd()) {
            Ok(socket) => Ok(AcceptOutcome::Connection(self.new_connection(socket))),
            Err(error) => self.not_accepted(error),
        }
    }

    /// Counts a failure of accept(2), and decides what follows.
    pub(crate) fn not_accepted(&self, error: io::Error) -> Result<AcceptOutcome, ListenError> {
        match AcceptFailure::of(&error) {
            AcceptFailure::Wait => {
                // A blocking listener returns EAGAIN when its timeout expires.
                if Errno::of(&error) == Some(Errno::EAGAIN) && self.group.policy() != AcceptPolicy::Blocking {
                    self.count(Count::EmptyAccepts);
                }
                Ok(AcceptOutcome::Empty)
            }
            AcceptFailure::Retry => {
                self.count(Count::OtherAccepts);
                Ok(AcceptOutcome::Empty)
            }
            AcceptFailure::Pause => {
                self.count(cause_of(&error));
                Ok(AcceptOutcome::Pause)
            }
            // A drain has shut the unix listener down.
            AcceptFailure::Fatal
                if Errno::of(&error) == Some(Errno::EINVAL)
                    && self.group.0.seats.phase() != Phase::Serving =>
            {
                Ok(AcceptOutcome::Pause)
            }
            AcceptFailure::Fatal => Err(self.group.failed("accept()")(error)),
        }
    }

    /// Counts the connection of a failed epoll_ctl(2) as unwatched if the kernel refused only this watch. Returns `Ok(None)` then: the caller drops this connection, and other connections are unaffected.
    pub(crate) fn watched<T>(&self, added: io::Result<T>) -> Result<Option<T>, ListenError> {
        match added {
            Ok(value) => Ok(Some(value)),
            Err(error) if epoll::is_watch_refused(&error) => {
                self.count(Count::Unwatched);
                Ok(None)
            }
            Err(error) => Err(self.group.failed("epoll_ctl()")(error)),
        }
    }

    /// Takes the next message of the handoff queue. Without a free descriptor the kernel closes the connection in the message.
    pub(crate) fn take_handoff(&self) -> Result<Option<Arrival>, ListenError> {
        match self.group.0.handoff.take() {
            Err(error) if Errno::of(&error) == Some(Errno::EMFILE) => {
                self.count(Count::ProcessDescriptors);
                Ok(None)
            }
            taken => taken.map_err(self.group.failed("recvmsg()")),
        }
    }

    /// Wakes another worker if the accept queue has a connection. The kernel may have woken only this worker for it.
    pub(crate) fn nudge_if_queued(&self, listener: &OwnedFd) -> Result<(), ListenError> {
        let waiting = socket::wait_readable(listener.as_fd(), Some(Duration::ZERO));
        if waiting.map_err(self.group.failed("poll()"))? {
            self.group.0.handoff.nudge().map_err(self.group.failed("sendmsg()"))?;
        }
        Ok(())
    }

    /// Counts a socket that was accepted for this worker and returns it as a connection.
    pub(crate) fn new_connection(&self, socket: OwnedFd) -> Connection {
        self.count(Count::Accepts);
        Connection::new(socket, self.open_guard())
    }

    /// Closes connections that have exceeded the idle limit, and counts them.
    pub(crate) fn close_idle(&self, connections: Vec<Connection>) {
        self.group.0.seats.add(self.number, Count::IdleClosed, connections.len() as u64);
    }

    /// Returns a guard that counts a connection as open in this seat.
    pub(crate) fn open_guard(&self) -> OpenGuard {
        OpenGuard::new(&self.group.0.seats, self.number)
    }
}

/// Returns the counter for an error of accept(2).
pub(crate) fn cause_of(error: &io::Error) -> Count {
    match Errno::of(error) {
        Some(Errno::EMFILE) => Count::ProcessDescriptors,
        Some(Errno::ENFILE) => Count::HostDescriptors,
        Some(Errno::ENOBUFS | Errno::ENOMEM) => Count::SocketMemory,
        _ => Count::OtherAccepts,
    }
}
