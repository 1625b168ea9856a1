//! accept() that blocks: workers wait in the order in which they came (`prepare_to_wait_exclusive` puts each at the tail),
//! so they take turns. A worker then waits for nothing but its one connection until that is closed, as servers with a
//! process per connection do.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::{option, socket};

use crate::listen::connection::Connection;
use crate::listen::error::ListenError;
use crate::listen::lobby::Arrival;
use crate::listen::seats::Count;
use crate::listen::wait::{Accepted, Seat, Wait};

/// Nothing but time ends an accept() that blocks, so it gives up this often to look at the bell.
const LOOK: Duration = Duration::from_millis(50);

/// Limits accept() of the listener that all workers share.
pub(super) fn prepare(listener: &OwnedFd) -> io::Result<()> {
    option::set_receive_timeout(listener.as_fd(), LOOK)
}

struct Blocking {
    listener: Arc<OwnedFd>,
    own: Option<Connection>,
}

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Ok(Box::new(Blocking { listener: seat.group.listener()?, own: None }))
}

impl Blocking {
    /// Whoever left a connection in the lobby, else whom accept() gives before it gives up.
    fn somebody(&self, seat: &Seat) -> Result<Option<Connection>, ListenError> {
        let arrival = seat.group.0.lobby.take().map_err(seat.group.failed("recvmsg()"))?;
        if let Some(Arrival::Connection(passenger)) = arrival {
            return Ok(Some(passenger.settle(seat.place())));
        }
        let Accepted::Somebody(connection) = seat.accept(&self.listener)? else { return Ok(None) };
        seat.count(Count::Wakeups);
        Ok(Some(connection))
    }

    /// Whether its connection has something to read before the time is over.
    fn speaks(&self, seat: &Seat, slice: Duration) -> Result<bool, ListenError> {
        let Some(connection) = &self.own else { return Ok(false) };
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
            if self.own.is_none() {
                self.own = self.somebody(seat)?;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if self.speaks(seat, left.map_or(LOOK, |left| left.min(LOOK)))? {
                return Ok(self.own.take());
            }
            if seat.bell.silence() || left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
        }
    }

    fn keep(&mut self, _seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        self.own = Some(connection);
        Ok(())
    }

    /// The worker waits for this connection alone.
    fn misplaced(&self, _seat: &Seat, _kept: Instant) -> Duration {
        Duration::ZERO
    }

    /// Nothing watches it.
    fn forget(&mut self, _seat: &Seat, _connection: &mut Connection) -> Result<(), ListenError> {
        Ok(())
    }

    fn release(&mut self, _seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        Ok(self.own.take().into_iter().collect())
    }
}
