//! The acceptor on a tokio runtime, one current-thread runtime per worker.
//!
//! Who is woken is decided by which thread waits in the queue of the listener, so a thread of the adapter waits there, in
//! [`Acceptor::next`]. The runtime cannot: its epoll around the acceptor's would be told of every connection, as
//! `ep_poll_callback` knows nothing of EPOLLEXCLUSIVE where who waits is another epoll, and all workers would be woken for
//! each.

use std::future::poll_fn;
use std::io;
use std::net::TcpStream as StdTcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{self, Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use crate::listen::acceptor::{Acceptor, Farewell, Waker};
use crate::listen::connection::{Connection, Place};
use crate::listen::error::ListenError;
use crate::listen::group::Group;
use crate::listen::policy::Family;
use crate::listen::recycle::Recycle;

/// A worker's end of a group, for a task of its runtime.
///
/// A thread of its own waits for the next connection, and only while a task waits in [`accept`](AsyncAcceptor::accept): so a
/// runtime that is busy has at most one connection waiting for it, which came between the last poll and now. Whatever else
/// comes is for other workers. A connection costs two switches between threads more than without a runtime.
///
/// What the policy says of the first request of a connection is true here; the further ones are read by the runtime that has
/// it. `SharedOneshot` and `Dispatcher`, which elsewhere place every request, place the first one only.
///
/// In [`stats`](Group::stats) a worker counts as busy while none of its tasks waits for a connection.
///
/// Dropping it leaves, and waits for its thread: up to 50 ms where the policy waits in a call that nothing else ends.
/// [`leave`](AsyncAcceptor::leave) does not block the runtime.
#[derive(Debug)]
pub struct AsyncAcceptor {
    bridge: Arc<Bridge>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    group: Group,
    seat: usize,
}

/// A connection of a runtime, with something to read. Dropping stream and visit closes it.
#[derive(Debug)]
pub struct Accepted {
    /// The socket.
    pub stream: Stream,
    /// Its place in the group; to be held as long as the connection is open.
    pub visit: Visit,
    /// Bytes that were read already, to be taken before those of `stream`: only where a worker without a runtime has left
    /// the connection to this one.
    pub carry: Vec<u8>,
}

/// A connection's place among those of its worker, and when it is to be closed.
#[derive(Debug)]
pub struct Visit {
    place: Place,
    recycle: Recycle,
    served: u32,
    born: Instant,
    chance: f64,
}

impl Visit {
    /// Counts a request as answered.
    pub fn answered(&mut self) {
        self.served = self.served.saturating_add(1);
        self.place.answered();
    }

    /// Requests answered so far.
    pub fn served(&self) -> u32 {
        self.served
    }

    /// Time since the connection was accepted.
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Whether [`Recycle`] wants the connection closed after the request that is being answered.
    pub fn is_last(&self) -> bool {
        self.recycle.is_last(self.served, self.age(), self.chance)
    }
}

/// What the thread that waits and the tasks of the runtime have in common.
#[derive(Debug, Default)]
struct Bridge {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// A task waits for a connection.
    asked: bool,
    stop: bool,
    found: Option<Result<Connection, ListenError>>,
    farewell: Option<Result<Farewell, ListenError>>,
    waiting: Option<task::Waker>,
}

impl Bridge {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_found(&self, context: &Context<'_>) -> Poll<Result<Connection, ListenError>> {
        let mut state = self.state();
        if let Some(found) = state.found.take() {
            return Poll::Ready(found);
        }
        state.waiting = Some(context.waker().clone());
        if !state.asked {
            state.asked = true;
            self.changed.notify_one();
        }
        Poll::Pending
    }

    fn poll_farewell(&self, context: &Context<'_>) -> Poll<Result<Farewell, ListenError>> {
        let mut state = self.state();
        if let Some(farewell) = state.farewell.take() {
            return Poll::Ready(farewell);
        }
        state.waiting = Some(context.waker().clone());
        Poll::Pending
    }

    fn tell(&self, change: impl FnOnce(&mut State)) {
        let waiting = {
            let mut state = self.state();
            change(&mut state);
            state.waiting.take()
        };
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }

    /// Waits until a task asks for a connection; `false`: there will be no more.
    fn is_asked(&self) -> bool {
        let state = self.state();
        let state = self.changed.wait_while(state, |state| !state.asked && !state.stop);
        !state.unwrap_or_else(PoisonError::into_inner).stop
    }

    /// The thread that waits.
    fn run(&self, mut acceptor: Acceptor) {
        while self.is_asked() {
            let Some(found) = acceptor.next(None).transpose() else { continue };
            // The runtime's epoll watches it from now on.
            let found =
                found.and_then(|mut connection| acceptor.forget(&mut connection).map(|()| connection));
            self.tell(|state| {
                state.asked = false;
                state.found = Some(found);
            });
        }
        let untaken = self.state().found.take();
        let kept = match untaken {
            // No task of this runtime has seen it: it is for whoever takes over.
            Some(Ok(connection)) => acceptor.keep(connection),
            Some(Err(_)) | None => Ok(()),
        };
        let farewell = acceptor.leave();
        self.tell(|state| state.farewell = Some(kept.and(farewell)));
    }
}

impl AsyncAcceptor {
    /// Makes an acceptor one of a runtime. The thread that waits is in the namespaces of the calling one.
    ///
    /// # Errors
    ///
    /// No thread to be had; a group with [`Recycle::Measured`]: what a request waits for a runtime is not known here.
    pub fn new(acceptor: Acceptor) -> Result<AsyncAcceptor, ListenError> {
        let group = acceptor.group().clone();
        if group.is_measured() {
            return Err(ListenError::NotMeasurable);
        }
        let bridge = Arc::new(Bridge::default());
        let (seat, waker) = (acceptor.seat(), acceptor.waker());
        let own = Arc::clone(&bridge);
        let thread = thread::Builder::new().name(format!("accept {seat}")).spawn(move || own.run(acceptor));
        let thread = Some(thread.map_err(group.failed("clone()"))?);
        Ok(AsyncAcceptor { bridge, waker, thread, group, seat })
    }

    /// Waits for a connection that has something to read. It may be dropped while it waits: a connection that had come by
    /// then is for the next call.
    ///
    /// # Errors
    ///
    /// As [`Acceptor::next`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled.
    pub async fn accept(&mut self) -> Result<Accepted, ListenError> {
        let mut connection = poll_fn(|context| self.bridge.poll_found(context)).await?;
        let carry = std::mem::take(&mut connection.carry);
        let (served, born, chance) = (connection.served, connection.born, connection.chance());
        let (socket, place) = connection.into_parts();
        let stream = match self.group.family() {
            Family::Unix => UnixStream::from_std(StdUnixStream::from(socket)).map(Stream::Unix),
            Family::Tcp4 | Family::Tcp6 => TcpStream::from_std(StdTcpStream::from(socket)).map(Stream::Tcp),
        };
        let stream = stream.map_err(self.group.failed("epoll_ctl()"))?;
        let visit = Visit { place, recycle: self.group.0.recycle, served, born, chance };
        Ok(Accepted { stream, visit, carry })
    }

    /// Its number, from 0.
    pub fn seat(&self) -> usize {
        self.seat
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Accepts no more, and hands over what no task has taken, as [`Acceptor::leave`]. Connections that tasks have are theirs
    /// until they end.
    ///
    /// # Errors
    ///
    /// As [`Acceptor::next`].
    pub async fn leave(mut self) -> Result<Farewell, ListenError> {
        self.stop();
        let farewell = poll_fn(|context| self.bridge.poll_farewell(context)).await;
        self.join();
        farewell
    }

    fn stop(&self) {
        self.bridge.state().stop = true;
        self.bridge.changed.notify_one();
        self.waker.wake();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It has nothing to say; what became of its connections is in the farewell.
            let _ = thread.join();
        }
    }
}

impl Drop for AsyncAcceptor {
    fn drop(&mut self) {
        self.stop();
        self.join();
    }
}

/// A socket of a runtime, over whatever it is.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// AF_UNIX.
    Unix(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(context, room),
            Stream::Unix(stream) => Pin::new(stream).poll_read(context, room),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Stream::Unix(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Tcp(stream) => stream.is_write_vectored(),
            Stream::Unix(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
