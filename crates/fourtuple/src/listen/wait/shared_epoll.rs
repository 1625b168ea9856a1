//! The epoll that all workers of the policy `shared-oneshot` wait in, with its idle connections.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest};

use crate::listen::connection::Connection;
use crate::listen::idle::Idle;

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
