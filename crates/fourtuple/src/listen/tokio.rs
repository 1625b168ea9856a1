//! The acceptor for a tokio runtime, with one current-thread runtime per worker.
//!
//! The kernel wakes a thread that waits in the listener's wait queue, so a thread of the adapter waits there, in
//! [`Acceptor::next`]. The runtime's epoll cannot watch the acceptor's epoll instead: `ep_poll_callback` ignores EPOLLEXCLUSIVE
//! for a nested epoll, and the kernel would wake all workers for each connection.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::TcpStream as StdTcpStream;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{self, Context, Poll, ready};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::yield_now;

use crate::listen::ListenError;
use crate::listen::acceptor::{AcceptWaker, Acceptor, LeaveReport};
use crate::listen::async_connection::{AsyncConnection, Stream, Turn};
use crate::listen::connection::{Connection, OpenGuard, Recycle, chance};
use crate::listen::group::{Inner, ListenerGroup};
use crate::listen::policy::Family;
use crate::listen::seats::{Count, Phase};

/// The acceptor of one worker of a group, for a task of its tokio runtime: usually a current-thread runtime in each of several threads,
/// each with its own acceptor ([`Workers::Runtimes`](crate::listen::Workers::Runtimes)). A multi-thread runtime is one worker: its single
/// acceptor takes connections for all its threads.
///
/// ```no_run
/// use fourtuple::listen::{AsyncAcceptor, ListenError, ListenerGroup, ListenerGroupBuilder, Workers};
/// use tokio::runtime::Builder;
///
/// fn serve(group: &ListenerGroup) -> Result<(), ListenError> {
///     let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
///     runtime.block_on(async {
///         let mut acceptor = AsyncAcceptor::new(group.join()?)?;
///         loop {
///             match acceptor.accept().await {
///                 Ok(accepted) => drop(tokio::spawn(async move { drop(accepted) })), // serve it
///                 Err(ListenError::Drained) => return Ok(()),
///                 Err(error) => return Err(error),
///             }
///         }
///     })
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // At least as many seats as workers.
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080)).workers(Workers::Runtimes).max_workers(4).open()?;
/// std::thread::scope(|scope| {
///     let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| serve(&group))).collect();
///     workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
/// })?;
/// # Ok(()) }
/// ```
///
/// [`AsyncConnection`] has a whole server with hyper.
///
/// A thread of the acceptor waits for the next connection only while a task waits in [`accept`](AsyncAcceptor::accept) and the runtime
/// has no other task to run. So while the runtime is busy, other workers get the connections that have bytes to read; at most one, which
/// arrived when the runtime became busy, waits for it.
/// With the policies of an epoll per worker, the thread may also hold connections that clients opened and have not yet used; these
/// stay with the worker. [`defer_accept`](crate::listen::ListenerGroupBuilder::defer_accept) leaves them in the kernel. A
/// connection costs two more context switches than without a runtime.
///
/// The policy places the first request of a connection; the runtime reads the further ones. `SharedOneshot` and `Dispatcher`,
/// which place every request without a runtime, place only the first one here. A group with the defaults, `Auto` and
/// [`Workers::Threads`](crate::listen::Workers::Threads), has `SharedOneshot`; [`choice`](ListenerGroup::choice) says so. With
/// `SharedOneshot` and the feature `axum`,
#[cfg_attr(feature = "axum", doc = "[`by_request`](crate::listen::by_request) places every request.")]
#[cfg_attr(not(feature = "axum"), doc = "`by_request` places every request.")]
///
/// In [`stats`](ListenerGroup::stats) a worker counts as busy while none of its tasks waits for a connection.
///
/// Dropping the acceptor leaves the group and waits for the thread: up to 50 ms with `Blocking` and `SharedOneshot`.
/// [`leave`](AsyncAcceptor::leave) does not block the runtime.
///
/// Example: [`ConnectionHandle`](crate::listen::ConnectionHandle).
#[derive(Debug)]
pub struct AsyncAcceptor {
    bridge: Arc<Bridge>,
    waker: AcceptWaker,
    thread: Option<JoinHandle<()>>,
    group: ListenerGroup,
    seat: usize,
    /// Called with the errors that the listener of axum cannot return.
    #[cfg(feature = "axum")]
    pub(super) on_error: OnError,
}

/// The function of [`AsyncAcceptor::on_error`], if one was set.
#[cfg(feature = "axum")]
#[derive(Default)]
pub(super) struct OnError(Option<Box<Report>>);

#[cfg(feature = "axum")]
type Report = dyn Fn(&ListenError) + Send + Sync;

#[cfg(feature = "axum")]
impl OnError {
    pub(super) fn new(report: impl Fn(&ListenError) + Send + Sync + 'static) -> OnError {
        OnError(Some(Box::new(report)))
    }

    pub(super) fn report(&self, error: &ListenError) {
        if let Some(report) = &self.0 {
            report(error);
        }
    }
}

#[cfg(feature = "axum")]
impl std::fmt::Debug for OnError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if self.0.is_some() { "OnError(set)" } else { "OnError" })
    }
}

/// The requests of one connection, and whether the next response is its last.
#[derive(Debug)]
pub(super) struct Session {
    guard: OpenGuard,
    recycle: Recycle,
    served: AtomicU32,
    born: Instant,
    draw: u32,
    pub(super) turn: Turn,
    group: Weak<Inner>,
}

impl Session {
    /// Counts a request as answered.
    pub(super) fn response_sent(&self) {
        let count = |served: u32| Some(served.saturating_add(1));
        // The closure never returns `None`, so the update cannot fail.
        let _ = self.served.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        self.guard.response_sent();
    }

    /// Returns the number of requests answered so far.
    pub(super) fn served(&self) -> u32 {
        self.served.load(Ordering::Relaxed)
    }

    /// Returns the time since the connection was accepted.
    pub(super) fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Returns whether the server must close the connection after the current response: [`Recycle`] requires it, or the group is
    /// [draining](ListenerGroup::drain).
    pub(super) fn should_close(&self) -> bool {
        self.guard.is_draining() || self.recycle.is_last(self.served(), self.age(), chance(self.draw))
    }

    /// Returns the socket of the connection to the group, so that any idle worker gets the next request. A socket that cannot be
    /// watched is closed.
    pub(super) fn keep(&self, stream: Stream) {
        let Some(group) = self.group.upgrade() else { return };
        let Some(shared) = group.shared.epoll() else { return };
        let Ok(socket) = stream.into_socket() else { return };
        let mut connection = Connection::new(socket, self.guard.again());
        (connection.served, connection.born, connection.draw) = (self.served().into(), self.born, self.draw);
        if shared.put(connection).is_err() {
            self.guard.unwatched();
        }
        // A drain may have closed the idle connections before.
        if group.seats.phase() == Phase::Drained {
            drop(shared.idle().drain());
        }
    }

    /// Returns whether the policy of the group gives a connection that was returned to any idle worker.
    pub(super) fn can_return(&self) -> bool {
        self.group.upgrade().is_some_and(|group| group.shared.epoll().is_some())
    }
}

/// The state that the waiting thread and the tasks of the runtime share.
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
    report: Option<Result<LeaveReport, ListenError>>,
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

    fn poll_report(&self, context: &Context<'_>) -> Poll<Result<LeaveReport, ListenError>> {
        let mut state = self.state();
        if let Some(report) = state.report.take() {
            return Poll::Ready(report);
        }
        state.waiting = Some(context.waker().clone());
        Poll::Pending
    }

    /// Changes the state and wakes the task that waits for a change.
    fn update(&self, change: impl FnOnce(&mut State)) {
        let waiting = {
            let mut state = self.state();
            change(&mut state);
            state.waiting.take()
        };
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }

    /// Waits until a task asks for a connection; `false` if the acceptor leaves.
    fn is_asked(&self) -> bool {
        let state = self.state();
        let state = self.changed.wait_while(state, |state| !state.asked && !state.stop);
        !state.unwrap_or_else(PoisonError::into_inner).stop
    }

    /// Runs the waiting thread.
    fn run(&self, mut acceptor: Acceptor) {
        while self.is_asked() {
            let found = match acceptor.next(None).transpose() {
                Some(found) => found,
                None if acceptor.group().is_drained() => Err(ListenError::Drained),
                None => continue,
            };
            // The runtime's epoll watches the connection from now on.
            let found =
                found.and_then(|mut connection| acceptor.forget(&mut connection).map(|()| connection));
            self.update(|state| {
                state.asked = false;
                state.found = Some(found);
            });
        }
        let untaken = self.state().found.take();
        let kept = match untaken {
            // No task of this runtime has read from the connection, so another worker can serve it.
            Some(Ok(connection)) => acceptor.keep(connection),
            Some(Err(_)) | None => Ok(()),
        };
        let report = acceptor.leave();
        self.update(|state| state.report = Some(kept.and(report)));
    }
}

impl AsyncAcceptor {
    /// Makes an acceptor for a runtime. Its thread runs in the namespaces of the calling thread.
    ///
    /// # Errors
    ///
    /// The thread cannot be created; the group uses [`Recycle::Measured`], and the adapter cannot measure how long a request
    /// waits for the runtime.
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
        Ok(AsyncAcceptor {
            bridge,
            waker,
            thread,
            group,
            seat,
            #[cfg(feature = "axum")]
            on_error: OnError::default(),
        })
    }

    /// Waits for a readable connection. The future is cancel safe: the next call returns a connection that arrived before the
    /// future was dropped.
    ///
    /// # Errors
    ///
    /// [`ListenError::Drained`] after the group was [drained](ListenerGroup::drain), the normal end of a worker; otherwise the errors of
    /// [`Acceptor::next`], unexpected failures of a system call, after which the call can be repeated. Without descriptors the acceptor waits
    /// and returns no error.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with I/O enabled.
    pub async fn accept(&mut self) -> Result<AsyncConnection, ListenError> {
        loop {
            // Tasks that are ready run first: while one blocks the runtime, another worker serves the next connection. A new task becomes
            // ready when the runtime has looked at its socket, and `block_on` then polls its own future before the task.
            yield_now().await;
            yield_now().await;
            let connection = poll_fn(|context| self.bridge.poll_found(context)).await?;
            match self.register(connection) {
                Ok(accepted) => return Ok(accepted),
                Err(error) if epoll::is_watch_refused(&error) => {
                    self.group.0.seats.add(self.seat, Count::Unwatched, 1);
                }
                Err(error) => return Err(self.group.failed("epoll_ctl()")(error)),
            }
        }
    }

    /// Registers a connection with the runtime.
    fn register(&self, mut connection: Connection) -> io::Result<AsyncConnection> {
        let carry = std::mem::take(&mut connection.carry);
        let (served, born, draw) = (connection.served(), connection.born, connection.draw);
        let (socket, guard) = connection.into_parts();
        let stream = match self.group.family() {
            Family::Unix => UnixStream::from_std(StdUnixStream::from(socket)).map(Stream::Unix)?,
            Family::Tcp4 | Family::Tcp6 => {
                TcpStream::from_std(StdTcpStream::from(socket)).map(Stream::Tcp)?
            }
        };
        let session = Session {
            guard,
            recycle: self.group.0.recycle,
            served: AtomicU32::new(served),
            born,
            draw,
            turn: Turn::default(),
            group: Arc::downgrade(&self.group.0),
        };
        Ok(AsyncConnection::new(stream, session, carry))
    }

    /// Returns the connections as a stream, which ends after a [drain](ListenerGroup::drain) of the group.
    ///
    /// ```no_run
    /// use futures_util::StreamExt;
    ///
    /// # async fn example(group: fourtuple::listen::ListenerGroup) -> Result<(), fourtuple::listen::ListenError> {
    /// let acceptor = fourtuple::listen::AsyncAcceptor::new(group.join()?)?;
    /// let mut connections = acceptor.incoming();
    /// while let Some(connection) = connections.next().await {
    ///     drop(connection?);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn incoming(self) -> Incoming {
        Incoming::of(self)
    }

    /// Waits for a connection, and returns the acceptor with it.
    pub(super) async fn accept_owned(mut self) -> (AsyncAcceptor, Result<AsyncConnection, ListenError>) {
        let accepted = self.accept().await;
        (self, accepted)
    }

    /// Returns the number of this worker's seat, from 0.
    pub fn seat(&self) -> usize {
        self.seat
    }

    /// Returns the group of this acceptor.
    pub fn group(&self) -> &ListenerGroup {
        &self.group
    }

    /// Stops accepting and hands over every connection that no task has taken, as [`Acceptor::leave`]. A connection
    /// that a task has taken stays with this task.
    ///
    /// # Errors
    ///
    /// The same errors as [`Acceptor::next`].
    pub async fn leave(mut self) -> Result<LeaveReport, ListenError> {
        self.stop();
        let report = poll_fn(|context| self.bridge.poll_report(context)).await;
        self.join();
        report
    }

    fn stop(&self) {
        self.bridge.state().stop = true;
        self.bridge.changed.notify_one();
        self.waker.wake();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The result of the thread is in the report; a panic of the thread has been printed.
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

/// The connections of an [`AsyncAcceptor`] as a stream; see [`AsyncAcceptor::incoming`]. An error does not end the stream. Dropping it drops
/// the acceptor.
///
/// Example: [`AsyncAcceptor::incoming`].
pub struct Incoming {
    next: Pin<Box<Accepting>>,
}

/// A call of [`AsyncAcceptor::accept`], with the acceptor.
type Accepting = dyn Future<Output = (AsyncAcceptor, Result<AsyncConnection, ListenError>)> + Send;

impl Incoming {
    pub(super) fn of(acceptor: AsyncAcceptor) -> Incoming {
        Incoming { next: Box::pin(acceptor.accept_owned()) }
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Incoming").finish_non_exhaustive()
    }
}

impl futures_core::Stream for Incoming {
    type Item = Result<AsyncConnection, ListenError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (acceptor, accepted) = ready!(self.next.as_mut().poll(context));
        *self = Incoming::of(acceptor);
        Poll::Ready(match accepted {
            Err(ListenError::Drained) => None,
            accepted => Some(accepted),
        })
    }
}
