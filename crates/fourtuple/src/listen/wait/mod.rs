//! One way to wait per file.

mod blocking;
mod dispatcher;
mod exclusive;
#[cfg(feature = "bpf")]
mod least_busy;
#[cfg(not(feature = "bpf"))]
#[path = "least_busy_absent.rs"]
mod least_busy;
mod plain;
mod pool;
mod reuseport;
mod rotate;
mod shared_oneshot;
mod uring_oneshot;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::{Endpoint, errno_name, socket};

use crate::listen::connection::{Connection, Place};
use crate::listen::dispatcher::Pairs;
use crate::listen::error::ListenError;
use crate::listen::group::{Door, Group};
use crate::listen::policy::Policy;
use crate::listen::seats::Count;

/// A worker's way to wait.
pub(crate) trait Wait: Send {
    /// A connection that has something to read; `None` when the time is over or the bell was rung.
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError>;

    /// Waits for the next request of a connection.
    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError>;

    /// How long the request that `next` has just given, on a connection that is kept since `kept`, has waited for this worker
    /// while another was idle. Nothing where whoever is idle takes what is next.
    fn misplaced(&self, seat: &Seat, kept: Instant) -> Duration;

    /// Watches a connection that `next` gave no longer: somebody else will, and else both would be told what it has.
    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError>;

    /// Accepts nobody any more. What others have to take over is returned; a listener of its own was put into the lobby.
    fn release(&mut self, seat: &Seat) -> Result<Vec<Connection>, ListenError>;
}

/// What a way to wait knows of its worker.
pub(crate) struct Seat {
    pub(crate) group: Group,
    pub(crate) number: usize,
    pub(crate) bell: Arc<Bell>,
}

/// What came of an accept().
pub(crate) enum Accepted {
    Somebody(Connection),
    /// Another worker was faster, or the client is gone.
    Nobody,
    /// No descriptor or no memory: asking again at once would be of no use.
    NoRoom,
}

impl Seat {
    pub(crate) fn count(&self, count: Count) {
        self.group.0.seats.add(self.number, count, 1);
    }

    /// accept4(2), counted.
    pub(crate) fn accept(&self, listener: &OwnedFd) -> Result<Accepted, ListenError> {
        match socket::accept_nonblocking(listener.as_fd()) {
            Ok(socket) => Ok(Accepted::Somebody(self.welcome(socket))),
            Err(error) => match errno_name(&error).as_str() {
                // Of a listener that blocks it is the time that is over.
                "EAGAIN" if self.group.policy() != Policy::Blocking => {
                    self.count(Count::EmptyAccepts);
                    Ok(Accepted::Nobody)
                }
                "EAGAIN" | "EINTR" | "ECONNABORTED" | "EPROTO" | "EPERM" => Ok(Accepted::Nobody),
                "EMFILE" | "ENFILE" | "ENOBUFS" | "ENOMEM" => {
                    self.count(Count::FailedAccepts);
                    Ok(Accepted::NoRoom)
                }
                _ => Err(self.group.failed("accept()")(error)),
            },
        }
    }

    /// A socket that was accepted for this worker.
    pub(crate) fn welcome(&self, socket: OwnedFd) -> Connection {
        self.count(Count::Accepts);
        Connection::new(socket, self.place())
    }

    pub(crate) fn place(&self) -> Place {
        Place::new(&self.group.0.seats, self.number)
    }
}

/// What the workers of a policy have in common beside the listener.
#[derive(Debug)]
pub(crate) enum Common {
    Nothing,
    Epoll(shared_oneshot::Common),
    Pairs(Pairs),
    #[cfg(feature = "bpf")]
    LeastBusy(Arc<fourtuple_bpf::LeastBusy>),
}

pub(crate) fn common(
    policy: Policy,
    door: &Door,
    seats: usize,
    endpoint: &Endpoint,
) -> Result<Common, ListenError> {
    let failed = |call| move |source| ListenError::Call { call, endpoint: endpoint.clone(), source };
    match (policy, door) {
        (Policy::SharedOneshot, Door::One(listener)) => {
            shared_oneshot::Common::new(listener).map(Common::Epoll).map_err(failed("epoll_ctl()"))
        }
        (Policy::UringOneshot, _) => uring_oneshot::probe(endpoint).map(|()| Common::Nothing),
        (Policy::Dispatcher, _) => Pairs::new(seats).map(Common::Pairs).map_err(failed("socketpair()")),
        (Policy::Blocking, Door::One(listener)) => {
            blocking::prepare(listener).map_err(failed("SO_RCVTIMEO"))?;
            Ok(Common::Nothing)
        }
        (Policy::ReuseportLeastBusy, _) => least_busy::common(seats),
        _ => Ok(Common::Nothing),
    }
}

/// The way of a worker that joins.
pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    match seat.group.policy() {
        Policy::Exclusive => exclusive::open(seat),
        Policy::Plain => plain::open(seat),
        Policy::Blocking => blocking::open(seat),
        Policy::Rotate { every } => rotate::open(seat, every),
        Policy::SharedOneshot | Policy::Auto => Ok(shared_oneshot::open()),
        Policy::Reuseport => reuseport::open(seat),
        Policy::UringOneshot => uring_oneshot::open(seat),
        Policy::Dispatcher => dispatcher::open(seat),
        Policy::ReuseportLeastBusy => least_busy::open(seat),
    }
}
