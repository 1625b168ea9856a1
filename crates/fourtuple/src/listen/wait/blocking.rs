//! Blocking accept(2): waiting workers are in the order in which they called it (`prepare_to_wait_exclusive` appends each), so
//! they take turns. A worker then serves only its connection until that is closed, like a server with a process per
//! connection. A call ends after [`CHECK_INTERVAL`] and the next one is the last in the order, so the turns are mixed when
//! connections are rare.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::{option, socket};

use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::group::Listeners;
use crate::listen::handoff::Arrival;
use crate::listen::seats::Count;
use crate::listen::wait::{AcceptOutcome, Preparation, Released, Seat, SharedState, Wait};

/// The interval at which a worker checks its waker: only a timeout ends a blocking accept(2).
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The pause in accepting after accept(2) found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// Sets the receive timeout of the shared listener, which bounds accept(2).
pub(crate) fn prepare(preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    if let Listeners::Shared(listener) = preparation.listeners {
        let set = option::set_receive_timeout(listener.as_fd(), CHECK_INTERVAL);
        set.map_err(ListenError::call("setsockopt(SO_RCVTIMEO)", preparation.endpoint))?;
    }
    Ok(SharedState::None)
}

struct Blocking {
    listener: Arc<OwnedFd>,
    connection: Option<Connection>,
    /// The time at which the connection became idle.
    since: Instant,
    /// Whether the worker has stopped accepting because its group hands over.
    handed_over: bool,
}

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let listener = seat.group.listener()?;
    Ok(Box::new(Blocking { listener, connection: None, since: Instant::now(), handed_over: false }))
}

impl Blocking {
    /// Returns a connection from the handoff queue, or one from accept(2) unless its timeout expires.
    fn accept(&self, seat: &Seat) -> Result<Option<Connection>, ListenError> {
        let arrival = seat.take_handoff()?;
        if let Some(Arrival::Connection(received)) = arrival {
            return Ok(Some(received.settle(seat.open_guard())));
        }
        let begun = Instant::now();
        match seat.accept(&self.listener)? {
            AcceptOutcome::Connection(connection) => {
                seat.count(Count::Wakeups);
                return Ok(Some(connection));
            }
            // accept(2) does not wait if another process, which takes the address over with another policy, has set O_NONBLOCK.
            AcceptOutcome::Empty => {
                let left = CHECK_INTERVAL.saturating_sub(begun.elapsed());
                let readable = socket::wait_readable(self.listener.as_fd(), Some(left));
                readable.map_err(seat.group.failed("poll()"))?;
            }
            AcceptOutcome::Pause => thread::sleep(BACK_OFF),
        }
        Ok(None)
    }

    /// Waits for at most `slice` until the connection is readable.
    fn is_readable(&self, seat: &Seat, slice: Duration) -> Result<bool, ListenError> {
        let Some(connection) = &self.connection else { return Ok(false) };
        if socket::has_something(connection.as_fd()) {
            return Ok(true);
        }
        let readable = socket::wait_readable(connection.as_fd(), Some(slice));
        let readable = readable.map_err(seat.group.failed("poll()"))?;
        if readable {
            seat.count(Count::Wakeups);
        }
        Ok(readable)
    }
}

impl Wait for Blocking {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if self.connection.is_none() && !self.handed_over {
                self.connection = self.accept(seat)?;
                self.since = Instant::now();
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(CHECK_INTERVAL, |left| left.min(CHECK_INTERVAL));
            if self.connection.is_none() && self.handed_over {
                thread::sleep(slice);
            } else if self.is_readable(seat, slice)? {
                return Ok(self.connection.take());
            }
            if self.since.elapsed() >= seat.group.0.idle {
                seat.close_idle(self.connection.take().into_iter().collect());
            }
            if seat.waker.clear() || left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
        }
    }

    fn keep(&mut self, _seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        self.connection = Some(connection);
        self.since = Instant::now();
        Ok(())
    }

    /// No connection is queued for this worker alone: accept(2) takes a connection before it returns.
    fn hand_over(&mut self, _seat: &Seat) -> Result<(), ListenError> {
        self.handed_over = true;
        Ok(())
    }

    fn release(&mut self, _seat: &Seat, _until: Instant) -> Released {
        Released::from(Vec::from_iter(self.connection.take()))
    }
}
