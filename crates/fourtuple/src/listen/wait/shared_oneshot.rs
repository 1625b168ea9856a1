//! One epoll that all workers wait in, with the listener and every connection in it.
//!
//! Each socket reports one event (EPOLLONESHOT) and then none until a worker arms it again. The epoll is thus a queue of ready
//! sockets, from which an idle worker takes the next: no request waits behind a busy worker while another worker is idle, on
//! kept connections too.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::socket;

use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::group::Listeners;
use crate::listen::seats::Count;
use crate::listen::wait::{AcceptOutcome, Idle, Preparation, Released, Seat, SharedState, Wait};

/// The interval at which a worker checks its waker. A waker in the shared epoll could wake the wrong worker.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

struct SharedOneshot;

/// Creates the shared epoll.
pub(crate) fn prepare(preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    let Listeners::Shared(listener) = preparation.listeners else {
        unreachable!("a policy without listener_each has a shared listener")
    };
    let shared = SharedEpoll::new(listener, preparation.idle).map(SharedState::Epoll);
    shared.map_err(ListenError::call("epoll_ctl()", preparation.endpoint))
}

pub(crate) fn open(_seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Ok(Box::new(SharedOneshot))
}

fn shared(seat: &Seat) -> &SharedEpoll {
    seat.group.0.shared.epoll().expect("the group was opened with this policy")
}

/// Arms the listener. A group that hands over has removed it, perhaps since its event.
fn arm_listener(seat: &Seat) -> Result<(), ListenError> {
    match shared(seat).arm_listener() {
        Err(_not_in_the_epoll) if seat.group.0.seats.is_handed_over() => Ok(()),
        armed => armed.map_err(seat.group.failed("epoll_ctl()")),
    }
}

/// Handles an event; returns a connection if one is ready to be served.
fn take(seat: &Seat, shared: &SharedEpoll, event: Ready) -> Result<Option<Connection>, ListenError> {
    seat.count(Count::Wakeups);
    if event.token() != LISTENER {
        // `None` if another worker has closed it.
        return Ok(shared.idle().take(event.token() as usize));
    }
    let accepted = seat.accept(&shared.listener)?;
    // The listener is armed before the request is served, so that another worker gets the next connection.
    if matches!(accepted, AcceptOutcome::Pause) {
        shared.pause();
    } else {
        arm_listener(seat)?;
    }
    match accepted {
        AcceptOutcome::Connection(connection) if socket::has_something(connection.as_fd()) => {
            Ok(Some(connection))
        }
        AcceptOutcome::Connection(connection) => seat.watched(shared.put(connection)).map(|_| None),
        AcceptOutcome::Empty | AcceptOutcome::Pause => Ok(None),
    }
}

impl Wait for SharedOneshot {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let shared = shared(seat);
        loop {
            // A unix listener that a drain has shut down stays ready.
            if seat.group.is_drained() {
                return Ok(None);
            }
            let expired = shared.idle().sweep();
            seat.close_idle(expired);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // One event per call: another worker can take every further ready socket.
            let mut events = [Ready::NONE; 1];
            let mut slice = left.map_or(CHECK_INTERVAL, |left| left.min(CHECK_INTERVAL));
            if let Some(rest) = shared.rest_of_pause() {
                if rest.is_zero() {
                    arm_listener(seat)?;
                } else {
                    slice = slice.min(rest);
                }
            }
            let ready =
                shared.epoll.wait(&mut events, Some(slice)).map_err(seat.group.failed("epoll_wait()"))?;
            let found = match ready.first() {
                Some(event) => take(seat, shared, *event)?,
                None => None,
            };
            // Also if events arrive again and again, as from clients that connect and send nothing.
            if found.is_some() || seat.waker.clear() || left.is_some_and(|left| left.is_zero()) {
                return Ok(found);
            }
        }
    }

    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        seat.watched(shared(seat).put(connection)).map(drop)
    }

    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError> {
        if std::mem::take(&mut connection.watched) {
            shared(seat).epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(())
    }

    /// The first worker removes the listener for all. A worker that has its event accepts first.
    fn hand_over(&mut self, seat: &Seat) -> Result<(), ListenError> {
        shared(seat).stop_listening().map_err(seat.group.failed("epoll_ctl()"))
    }

    /// Returns nothing unless the group was drained: the remaining workers share all connections.
    fn release(&mut self, seat: &Seat, _until: Instant) -> Released {
        let is_drained = seat.group.is_drained();
        Released::from(if is_drained { shared(seat).idle().drain() } else { Vec::new() })
    }
}

/// The token of the listener; the token of a connection is its descriptor.
pub(crate) const LISTENER: u64 = u64::MAX;

/// The pause in accepting after accept(2) found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// An epoll with the shared listener and every connection of the group, each with EPOLLONESHOT.
#[derive(Debug)]
pub(crate) struct SharedEpoll {
    pub(crate) epoll: Epoll,
    pub(crate) listener: Arc<OwnedFd>,
    /// Connections that are idle, or ready and not yet taken by a worker.
    idle: Mutex<Idle<Connection>>,
    /// The end of a pause in accepting, in which the listener is not armed.
    accept_after: Mutex<Option<Instant>>,
}

impl SharedEpoll {
    pub(crate) fn new(listener: &Arc<OwnedFd>, limit: Duration) -> io::Result<SharedEpoll> {
        let epoll = Epoll::new()?;
        epoll.add(listener.as_fd(), LISTENER, Interest::ACCEPT.and(Interest::ONESHOT))?;
        let idle = Mutex::new(Idle::new(limit));
        Ok(SharedEpoll { epoll, listener: Arc::clone(listener), idle, accept_after: Mutex::default() })
    }

    pub(crate) fn idle(&self) -> MutexGuard<'_, Idle<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn idle_connections(&self) -> usize {
        self.idle().iter().count()
    }

    /// Stores an idle connection and arms it in the epoll.
    pub(crate) fn put(&self, mut connection: Connection) -> io::Result<()> {
        let descriptor = connection.as_fd().as_raw_fd();
        let interest = Interest::READ.and(Interest::ONESHOT);
        // The connection is armed before it is stored. A worker that is woken in between waits for the lock.
        let mut idle = self.idle();
        if connection.watched {
            self.epoll.modify(connection.as_fd(), descriptor as u64, interest)?;
        } else {
            self.epoll.add(connection.as_fd(), descriptor as u64, interest)?;
            connection.watched = true;
        }
        idle.put(connection);
        Ok(())
    }

    /// Removes the listener from the epoll, unless another worker has removed it.
    pub(crate) fn stop_listening(&self) -> io::Result<()> {
        match self.epoll.remove(self.listener.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    fn accept_after(&self) -> MutexGuard<'_, Option<Instant>> {
        self.accept_after.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a pause in accepting instead of [`arm_listener`](SharedEpoll::arm_listener).
    pub(crate) fn pause(&self) {
        *self.accept_after() = Some(Instant::now() + BACK_OFF);
    }

    /// Returns the rest of a pause in accepting, if there is one. The worker for which it is zero arms the listener.
    pub(crate) fn rest_of_pause(&self) -> Option<Duration> {
        let mut accept_after = self.accept_after();
        let rest = (*accept_after)?.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            *accept_after = None;
        }
        Some(rest)
    }

    pub(crate) fn arm_listener(&self) -> io::Result<()> {
        self.epoll.modify(self.listener.as_fd(), LISTENER, Interest::ACCEPT.and(Interest::ONESHOT))
    }
}
