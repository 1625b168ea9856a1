use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::bell::Bell;

use crate::listen::connection::{Connection, Place};
use crate::listen::error::ListenError;
use crate::listen::group::Group;
use crate::listen::seats::{Count, SeatStats};
use crate::listen::wait::{self, Seat, Wait};

/// A worker's end of a group. Dropping it leaves, as [`leave`](Acceptor::leave) does.
pub struct Acceptor {
    seat: Seat,
    wait: Box<dyn Wait>,
    /// Since when the worker has something to do.
    busy: Option<Instant>,
    random: fastrand::Rng,
    left: bool,
}

/// What became of what a worker had when it left.
#[derive(Debug, Default)]
pub struct Farewell {
    /// Idle connections that other workers have taken over, or will.
    pub handed_over: usize,
    /// Idle connections that nobody made room for within a second. To drop them is to close them: better wait for their next
    /// request, and say in the answer that it is the last.
    pub kept: Vec<Connection>,
}

/// Ends the waiting of an acceptor, from any thread.
#[derive(Clone, Debug)]
pub struct Waker(pub(crate) Arc<Bell>);

impl Waker {
    /// Makes [`Acceptor::next`] return `None`: at once, or within 50 ms where the policy waits in a call that nothing else
    /// ends (`Blocking`, `SharedOneshot`). A worker that is busy finds it the next time it asks.
    pub fn wake(&self) {
        self.0.ring();
    }
}

impl Acceptor {
    pub(crate) fn join(group: &Group) -> Result<Acceptor, ListenError> {
        let bell = Arc::new(Bell::new().map_err(group.failed("eventfd()"))?);
        let seats = &group.0.seats;
        let number = seats.take().ok_or(ListenError::Full { seats: seats.count() })?;
        let seat = Seat { group: group.clone(), number, bell };
        match wait::open(&seat) {
            Ok(wait) => Ok(Acceptor { seat, wait, busy: None, random: fastrand::Rng::new(), left: false }),
            Err(error) => {
                seats.free(number);
                Err(error)
            }
        }
    }

    /// Waits for a connection that has something to read: a new one with its first bytes, or one that was kept. `None`: the
    /// time is over, or it was [woken](Waker::wake).
    ///
    /// From when it returns a connection until it is called again the worker counts as busy.
    ///
    /// # Errors
    ///
    /// A call of the kernel that should not fail. What concerns one connection alone is counted, or found by reading it.
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let Seat { group, number, .. } = &self.seat;
        let seats = &group.0.seats;
        if let Some(since) = self.busy.take() {
            let busy = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            seats.add(*number, Count::Busy, busy);
        }
        seats.set(*number, Count::Idle, 1);
        let found = self.wait.next(&self.seat, timeout);
        seats.set(*number, Count::Idle, 0);
        let Some(mut connection) = found? else { return Ok(None) };
        self.busy = Some(Instant::now());
        connection.moves_to(seats, *number);
        let recycle = group.0.recycle;
        connection.last = recycle.is_last(connection.served, connection.age(), connection.chance());
        if group.is_measured() {
            connection.last = seats.scales().is_last(self.random.f64());
            connection.waited = connection.kept.take().map(|kept| self.wait.misplaced(&self.seat, kept));
        }
        Ok(Some(connection))
    }

    /// Waits for the connection's next request, which with some policies another worker will get.
    ///
    /// # Errors
    ///
    /// As [`next`](Acceptor::next).
    pub fn keep(&mut self, mut connection: Connection) -> Result<(), ListenError> {
        if self.seat.group.is_measured() {
            connection.kept = Some(Instant::now());
        }
        self.wait.keep(&self.seat, connection)
    }

    /// Takes a connection out of the group's hands, for a runtime that has its own ways to wait. While the place is held it
    /// counts as open.
    ///
    /// # Errors
    ///
    /// As [`next`](Acceptor::next).
    pub fn let_go(&mut self, mut connection: Connection) -> Result<(OwnedFd, Place), ListenError> {
        self.forget(&mut connection)?;
        Ok(connection.into_parts())
    }

    /// Watches a connection no longer, until it is kept again.
    pub(crate) fn forget(&mut self, connection: &mut Connection) -> Result<(), ListenError> {
        self.wait.forget(&self.seat, connection)
    }

    /// The group it belongs to.
    pub fn group(&self) -> &Group {
        &self.seat.group
    }

    /// Ends the waiting of this acceptor from elsewhere.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.seat.bell))
    }

    /// What has been done in its seat.
    pub fn stats(&self) -> SeatStats {
        self.seat.group.0.seats.stats_of(self.seat.number)
    }

    /// Its number, from 0.
    pub fn seat(&self) -> usize {
        self.seat.number
    }

    /// Accepts no more and hands over what it has: idle connections, and a listener of its own with everybody in its
    /// queue. Other workers take them, also one that joins later. Nobody is lost but where the whole group is closed.
    ///
    /// # Errors
    ///
    /// As [`next`](Acceptor::next).
    pub fn leave(mut self) -> Result<Farewell, ListenError> {
        self.go()
    }

    fn go(&mut self) -> Result<Farewell, ListenError> {
        let mut farewell = Farewell::default();
        if std::mem::replace(&mut self.left, true) {
            return Ok(farewell);
        }
        let group = &self.seat.group;
        // First: of two that leave at the same time one must see that nobody is left.
        group.0.seats.free(self.seat.number);
        for mut connection in self.wait.release(&self.seat)? {
            connection.watched = false;
            if group.0.lobby.put(&connection).map_err(group.failed("sendmsg()"))? {
                farewell.handed_over += 1;
            } else {
                farewell.kept.push(connection);
            }
        }
        group.0.lobby.announce_again().map_err(group.failed("sendmsg()"))?;
        Ok(farewell)
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // Nobody can be told here. What was not handed over is closed.
        let _ = self.go();
    }
}
