//! One epoll that all workers wait in, with the listener and every connection in it, each told once (EPOLLONESHOT) and then
//! not until it is armed again: a queue of ready sockets, of which whoever is idle takes the next. So no request waits behind
//! a busy worker while another is idle, also on connections that are kept.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::socket;

use crate::listen::connection::Connection;
use crate::listen::error::ListenError;
use crate::listen::seats::Count;
use crate::listen::wait::{self, Accepted, Seat, Wait};

const LISTENER: u64 = u64::MAX;
/// A bell in the common epoll would wake the wrong worker, so each gives up waiting this often to look at its own.
const LOOK: Duration = Duration::from_millis(50);
/// How long a worker rests after accept() has found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// What all workers share.
#[derive(Debug)]
pub(crate) struct Common {
    epoll: Epoll,
    listener: Arc<OwnedFd>,
    /// By descriptor: connections that have nothing to say, or that nobody has taken yet.
    idle: Mutex<Vec<Option<Connection>>>,
}

impl Common {
    pub(super) fn new(listener: &Arc<OwnedFd>) -> io::Result<Common> {
        let epoll = Epoll::new()?;
        epoll.add(listener.as_fd(), LISTENER, Interest::ACCEPT.and(Interest::ONESHOT))?;
        Ok(Common { epoll, listener: Arc::clone(listener), idle: Mutex::new(Vec::new()) })
    }

    /// Puts a connection among those that wait, and arms it.
    fn put(&self, mut connection: Connection) -> io::Result<()> {
        let descriptor = connection.as_fd().as_raw_fd();
        let place = descriptor as usize;
        let interest = Interest::READ.and(Interest::ONESHOT);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // While the lock is held nobody who is woken can look for it, so it is armed before it is put in its place.
        if connection.watched {
            self.epoll.modify(connection.as_fd(), descriptor as u64, interest)?;
        } else {
            self.epoll.add(connection.as_fd(), descriptor as u64, interest)?;
            connection.watched = true;
        }
        if idle.len() <= place {
            idle.resize_with(place + 1, || None);
        }
        idle[place] = Some(connection);
        Ok(())
    }

    fn take(&self, place: usize) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.get_mut(place).and_then(Option::take)
    }

    fn arm_listener(&self) -> io::Result<()> {
        self.epoll.modify(self.listener.as_fd(), LISTENER, Interest::ACCEPT.and(Interest::ONESHOT))
    }
}

struct SharedOneshot;

pub(super) fn open() -> Box<dyn Wait> {
    Box::new(SharedOneshot)
}

fn common(seat: &Seat) -> &Common {
    match &seat.group.0.common {
        wait::Common::Epoll(common) => common,
        _ => unreachable!("the group was opened with this policy"),
    }
}

impl Wait for SharedOneshot {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let common = common(seat);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // One event at a time: what a worker does not serve at once is somebody else's.
            let mut events = [Ready::NONE; 1];
            let slice = left.map_or(LOOK, |left| left.min(LOOK));
            let ready =
                common.epoll.wait(&mut events, Some(slice)).map_err(seat.group.failed("epoll_wait()"))?;
            let Some(event) = ready.first() else {
                if seat.bell.silence() || left.is_some_and(|left| left.is_zero()) {
                    return Ok(None);
                }
                continue;
            };
            seat.count(Count::Wakeups);
            if event.token() != LISTENER {
                match common.take(event.token() as usize) {
                    Some(connection) => return Ok(Some(connection)),
                    None => continue,
                }
            }
            let accepted = seat.accept(&common.listener)?;
            if matches!(accepted, Accepted::NoRoom) {
                std::thread::sleep(BACK_OFF);
            }
            // Before the request is served: the next connection is for somebody else.
            common.arm_listener().map_err(seat.group.failed("epoll_ctl()"))?;
            match accepted {
                Accepted::Somebody(connection) if socket::has_something(connection.as_fd()) => {
                    return Ok(Some(connection));
                }
                Accepted::Somebody(connection) => {
                    common.put(connection).map_err(seat.group.failed("epoll_ctl()"))?;
                }
                Accepted::Nobody | Accepted::NoRoom => {}
            }
        }
    }

    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        common(seat).put(connection).map_err(seat.group.failed("epoll_ctl()"))
    }

    /// It waited for nobody in particular.
    fn misplaced(&self, _seat: &Seat, _kept: Instant) -> Duration {
        Duration::ZERO
    }

    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError> {
        if std::mem::take(&mut connection.watched) {
            common(seat).epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(())
    }

    /// Everything is common already.
    fn release(&mut self, _seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        Ok(Vec::new())
    }
}
