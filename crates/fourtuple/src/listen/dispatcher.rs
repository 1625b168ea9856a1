//! The dispatcher of the policy `dispatcher`.
//!
//! It accepts for all workers, waits until a connection is readable, and sends the descriptor to an idle worker. No request
//! waits behind a busy worker while another worker is idle, even where workers are processes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::EventFd;
use fourtuple_syscalls::epoll::{self, Epoll, Interest, Ready};
use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::{Errno, unix_socket};

use crate::listen::ListenError;
use crate::listen::acceptor::AcceptWaker;
use crate::listen::group::ListenerGroup;
use crate::listen::handoff::{self, Arrival, HandoffConnection, MAX_MESSAGE};
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::{Count, Phase, Seats};
use crate::listen::wait::{Idle, SharedState, cause_of};

const WAKER: u64 = u64::MAX;
const HANDOFF: u64 = u64::MAX - 1;
const LISTENER: u64 = u64::MAX - 2;
/// Set in the token of a worker's channel. The low 32 bits are the seat. The token of a connection is its descriptor.
const WORKER: u64 = 1 << 32;
const EVENTS: usize = 128;
/// Maximum number of connections accepted in a row before other events are handled.
const ACCEPTS: usize = 64;
/// The interval at which the dispatcher checks its stop flag, dead workers and the idle limit.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The pause after a call that found no descriptor or no space.
const BACK_OFF: Duration = Duration::from_millis(10);
/// One choice of a worker in this number is random.
const RANDOM_EVERY: u32 = 8;

/// A connection that is between two requests, or whose request no worker serves yet.
#[derive(Debug)]
struct PendingConnection {
    connection: HandoffConnection,
    _held: Held,
    fresh: bool,
}

impl PendingConnection {
    fn accepted(socket: OwnedFd, seats: &Arc<Seats>) -> Self {
        seats.add_held(None);
        PendingConnection::of(HandoffConnection::of_dispatcher(socket), None, true, seats)
    }

    /// Holds a connection that was in transit.
    fn returned(connection: HandoffConnection, fresh: bool, seats: &Arc<Seats>) -> Self {
        seats.hold();
        PendingConnection::of(connection, None, fresh, seats)
    }

    /// Counts a connection in transit that the dispatcher holds as an open one of the seat of the worker that has kept it.
    fn kept(connection: HandoffConnection, seat: usize, seats: &Arc<Seats>) -> Self {
        seats.add_held(Some(seat));
        seats.sub_held(None);
        PendingConnection::of(connection, Some(seat), false, seats)
    }

    fn of(mut connection: HandoffConnection, seat: Option<usize>, fresh: bool, seats: &Arc<Seats>) -> Self {
        connection.leave_count();
        PendingConnection { connection, _held: Held { seats: Arc::clone(seats), seat }, fresh }
    }
}

/// Counts a connection as held by the dispatcher until it is dropped.
#[derive(Debug)]
struct Held {
    seats: Arc<Seats>,
    seat: Option<usize>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.seats.sub_held(self.seat);
    }
}

impl AsFd for PendingConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// The counters of a dispatcher.
///
/// Example: [`Dispatcher`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DispatcherStats {
    /// Connections accepted.
    pub accepts: u64,
    /// accept(2) calls that failed: the sum of the next four counters.
    pub failed_accepts: u64,
    /// EMFILE: this process may have no more descriptors (RLIMIT_NOFILE).
    pub out_of_process_descriptors: u64,
    /// ENFILE: this host has no more descriptors (fs.file-max).
    pub out_of_host_descriptors: u64,
    /// ENOBUFS or ENOMEM: no memory for a socket.
    pub out_of_memory: u64,
    /// Any other error: of a connection that was gone (ECONNABORTED, EPROTO, EHOSTUNREACH and others; the worker goes on), or of a filter
    /// that forbids the call (EPERM; the worker pauses).
    pub other_failed_accepts: u64,
    /// Connections that were closed because epoll could not watch them: ENOSPC (fs.epoll.max_user_watches) or ENOMEM.
    pub unwatched: u64,
    /// Connections that were closed because they exceeded the limit of
    /// [`ListenerGroupBuilder::idle_timeout`](crate::listen::ListenerGroupBuilder::idle_timeout).
    pub idle_closed: u64,
    /// Connections sent to workers; a kept connection counts each time.
    pub handed: u64,
    /// Connections that were closed because the dispatcher had no descriptor to receive them. The dispatcher reserves two for each
    /// worker, so this needs other code that takes descriptors.
    pub lost: u64,
    /// Returns of epoll_wait(2) with at least one event.
    pub wakeups: u64,
    /// Maximum number of readable connections at one time while no worker was idle.
    pub longest_queue: usize,
}

/// The thread or process that accepts for the workers of a group.
///
/// It does nothing until it [runs](Dispatcher::run). It holds the connections that are between two requests. When it is
/// dropped, the next dispatcher takes over up to about 200 of them; the remaining ones are closed.
///
/// ```
/// use std::io::Write;
/// use std::net::TcpStream;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use std::thread;
/// use fourtuple::listen::{AcceptPolicy, ListenerGroupBuilder};
///
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).policy(AcceptPolicy::Dispatcher).open()?;
/// let mut dispatcher = group.dispatcher()?.depth(1)?;
/// let (stop, waker) = (Arc::new(AtomicBool::new(false)), dispatcher.waker());
/// let flag = Arc::clone(&stop);
/// let running = thread::spawn(move || dispatcher.run(&flag).map(|()| dispatcher.stats()));
///
/// let mut acceptor = group.join()?; // in each worker thread
/// let mut client = TcpStream::connect(group.endpoint().inet().expect("TCP"))?;
/// client.write_all(b"ping")?;
/// drop(acceptor.next(None)?);
///
/// stop.store(true, Ordering::Release);
/// waker.wake();
/// let stats = running.join().expect("no panic")?;
/// assert_eq!((stats.accepts, stats.handed), (1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Dispatcher {
    group: ListenerGroup,
    listener: Arc<OwnedFd>,
    waker: Arc<EventFd>,
    epoll: Epoll,
    depth: u32,
    workers: Vec<WorkerState>,
    turn: u64,
    /// Connections without a request.
    idle: Idle<PendingConnection>,
    /// Readable connections, in the order in which they became readable.
    ready: VecDeque<PendingConnection>,
    /// Whether the dispatcher has stopped accepting because its group hands over.
    handed_over: bool,
    /// The end of a pause in accepting.
    accept_after: Option<Instant>,
    /// The end of a pause in sending connections to workers.
    hand_after: Option<Instant>,
    checked: Instant,
    buffer: Vec<u8>,
    stats: DispatcherStats,
}

impl ListenerGroup {
    /// Returns the dispatcher of the group, where the policy is [`AcceptPolicy::Dispatcher`]. The group has one, and workers wait
    /// until it [runs](Dispatcher::run). Call this in the process in which it will run.
    ///
    /// # Errors
    ///
    /// The group has another policy; an earlier dispatcher was not dropped; a system call failed.
    ///
    /// # Examples
    ///
    /// Example: [`Dispatcher`].
    pub fn dispatcher(&self) -> Result<Dispatcher, ListenError> {
        let policy = self.policy();
        let SharedState::Channels(channels) = &self.0.shared else {
            let why = "its workers accept by themselves; open it with AcceptPolicy::Dispatcher";
            return Err(ListenError::NoDispatcher { policy, why });
        };
        let listener = self.listener()?;
        let waker = Arc::new(EventFd::new().map_err(self.failed("eventfd()"))?);
        self.register_waker(&waker);
        let epoll = Epoll::new().map_err(self.failed("epoll_create1()"))?;
        let failed = self.failed("epoll_ctl()");
        epoll.add(waker.as_fd(), WAKER, Interest::ACCEPT).map_err(&failed)?;
        epoll.add(self.0.handoff.receiver(), HANDOFF, Interest::ACCEPT).map_err(&failed)?;
        epoll.add(listener.as_fd(), LISTENER, Interest::ACCEPT).map_err(&failed)?;
        for seat in 0..channels.count() {
            epoll
                .add(channels.of_dispatcher(seat), WORKER | seat as u64, Interest::ACCEPT)
                .map_err(&failed)?;
        }
        let workers = channels.unattended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut workers) = workers else {
            let why = "it has one already; drop that first";
            return Err(ListenError::NoDispatcher { policy: AcceptPolicy::Dispatcher, why });
        };
        let seats = &self.0.seats;
        for (seat, worker) in workers.iter_mut().enumerate() {
            // The dispatcher of a process that died has read the messages of the workers that joined.
            if !worker.present && seats.get(seat, Count::Taken) != 0 {
                let tenure = tenure(seats, seat);
                *worker = WorkerState { present: true, tenure, ..WorkerState::default() };
            }
        }
        let turn = workers.iter().map(|worker| worker.since).max().unwrap_or(0);
        Ok(Dispatcher {
            group: self.clone(),
            listener,
            waker,
            epoll,
            depth: 1,
            workers,
            turn,
            idle: Idle::new(self.0.idle),
            ready: VecDeque::new(),
            handed_over: false,
            accept_after: None,
            hand_after: None,
            checked: Instant::now(),
            buffer: vec![0; MAX_MESSAGE],
            stats: DispatcherStats::default(),
        })
    }
}

impl Dispatcher {
    /// Sets how many unfinished connections a worker may have: 1 by default. With 1, no request waits behind a busy worker. A
    /// larger depth hides the latency of the messages between dispatcher and worker, at the cost of such waits.
    ///
    /// # Errors
    ///
    /// 0: [`ListenError::Setting`].
    pub fn depth(mut self, depth: u32) -> Result<Dispatcher, ListenError> {
        if depth == 0 {
            return Err(ListenError::Setting {
                setting: "depth",
                value: "0".to_owned(),
                accepted: "at least 1",
            });
        }
        self.depth = depth;
        Ok(self)
    }

    /// Returns a waker that ends [`run`](Dispatcher::run) at once after the flag was set. Without it this takes up to 50 ms.
    pub fn waker(&self) -> AcceptWaker {
        AcceptWaker::new(&self.waker)
    }

    /// Returns the counters of this dispatcher.
    pub fn stats(&self) -> DispatcherStats {
        self.stats
    }

    /// Accepts connections and sends them to workers until `stop` is true or the group is [drained](ListenerGroup::drain).
    /// Connections that are not accepted by then stay in the accept queue; accepted ones are served when it runs again.
    ///
    /// # Errors
    ///
    /// An unexpected failure of a system call. An error of a single connection is counted instead.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<(), ListenError> {
        self.seats().set_dispatches(true);
        let ran = self.run_until(stop);
        self.seats().set_dispatches(false);
        ran
    }

    fn run_until(&mut self, stop: &AtomicBool) -> Result<(), ListenError> {
        while !stop.load(Ordering::Acquire) && !self.group.is_drained() {
            if !self.handed_over && self.seats().is_handed_over() {
                self.hand_over()?;
            }
            self.hand_out()?;
            let now = Instant::now();
            if now.duration_since(self.checked) >= CHECK_INTERVAL {
                self.checked = now;
                self.reclaim_dead_workers()?;
                self.stats.idle_closed += self.idle.sweep().len() as u64;
            }
            let mut left = CHECK_INTERVAL;
            for after in [self.accept_after, self.hand_after].into_iter().flatten() {
                left = left.min(after.saturating_duration_since(now));
            }
            let mut events = [Ready::NONE; EVENTS];
            let ready =
                self.epoll.wait(&mut events, Some(left)).map_err(self.group.failed("epoll_wait()"))?;
            self.stats.wakeups += u64::from(!ready.is_empty());
            for event in ready {
                match event.token() {
                    WAKER => drop(self.waker.clear()),
                    HANDOFF => self.take_handoff()?,
                    LISTENER => self.accept()?,
                    token if token & WORKER != 0 => self.on_worker_message((token & !WORKER) as usize)?,
                    descriptor => self.on_readable(descriptor as usize)?,
                }
            }
            self.listen_again()?;
        }
        Ok(())
    }

    fn channels(&self) -> &WorkerChannels {
        match &self.group.0.shared {
            SharedState::Channels(channels) => channels,
            _ => unreachable!("`ListenerGroup::dispatcher` has checked the policy"),
        }
    }

    fn seats(&self) -> &Arc<Seats> {
        &self.group.0.seats
    }

    /// Sends readable connections to idle workers.
    fn hand_out(&mut self) -> Result<(), ListenError> {
        if self.hand_after.is_some_and(|after| Instant::now() < after) {
            return Ok(());
        }
        self.hand_after = None;
        while let Some(pending) = self.ready.front() {
            let Some(seat) = self.choose_worker() else { break };
            let tenure = self.workers[seat].tenure;
            let kind = kind(tenure, pending.fresh);
            match pending.connection.send(self.channels().of_dispatcher(seat), kind, self.seats()) {
                Ok(()) => {
                    // This closes the dispatcher's copy of the descriptor; the worker has its own.
                    self.ready.pop_front();
                    self.workers[seat].outstanding += 1;
                    self.stats.handed += 1;
                }
                Err(error) if handoff::is_full(&error) => {
                    self.hand_after = Some(Instant::now() + BACK_OFF);
                    break;
                }
                Err(error) => return Err(self.group.failed("sendmsg()")(error)),
            }
        }
        self.stats.longest_queue = self.stats.longest_queue.max(self.ready.len());
        Ok(())
    }

    /// Returns the worker with the fewest unfinished connections; among several, the worker idle for longest.
    ///
    /// One choice in [`RANDOM_EVERY`] is random among them. Workers that take turns strictly can be in step with the traffic:
    /// one worker then gets every request and another every end of a connection.
    fn choose_worker(&self) -> Option<usize> {
        let random = fastrand::u32(..RANDOM_EVERY) == 0;
        let idle = self.workers.iter().enumerate().filter(|(seat, worker)| {
            worker.present && worker.outstanding < self.depth && self.seats().get(*seat, Count::Taken) != 0
        });
        let order = |worker: &WorkerState| if random { fastrand::u64(..) } else { worker.since };
        idle.min_by_key(|(_, worker)| (worker.outstanding, order(worker))).map(|(seat, _)| seat)
    }

    /// Stops accepting, for another process that accepts from the same listener. Without EPOLLEXCLUSIVE the kernel wakes both
    /// dispatchers for each connection, so the queue needs no last look.
    fn hand_over(&mut self) -> Result<(), ListenError> {
        self.handed_over = true;
        if self.accept_after.take().is_none() {
            self.epoll.remove(self.listener.as_fd()).map_err(self.group.failed("epoll_ctl()"))?;
        }
        self.seats().set_dispatches(false);
        Ok(())
    }

    fn accept(&mut self) -> Result<(), ListenError> {
        for _ in 0..ACCEPTS {
            match self.channels().accept(self.listener.as_fd(), self.wanted_spare()) {
                Ok(socket) => {
                    self.stats.accepts += 1;
                    self.arrive(PendingConnection::accepted(socket, self.seats()))?;
                }
                Err(error) => match AcceptFailure::of(&error) {
                    AcceptFailure::Wait if Errno::of(&error) == Some(Errno::EINTR) => {}
                    AcceptFailure::Wait => break,
                    AcceptFailure::Retry => self.count_failure(&error),
                    AcceptFailure::Pause => {
                        self.count_failure(&error);
                        let removed = self.epoll.remove(self.listener.as_fd());
                        removed.map_err(self.group.failed("epoll_ctl()"))?;
                        self.accept_after = Some(Instant::now() + BACK_OFF);
                        break;
                    }
                    // A drain has shut the unix listener down.
                    AcceptFailure::Fatal
                        if Errno::of(&error) == Some(Errno::EINVAL)
                            && self.seats().phase() != Phase::Serving =>
                    {
                        break;
                    }
                    AcceptFailure::Fatal => return Err(self.group.failed("accept()")(error)),
                },
            }
        }
        Ok(())
    }

    /// Counts a failure of accept(2) by its cause.
    fn count_failure(&mut self, error: &io::Error) {
        match cause_of(error) {
            Count::ProcessDescriptors => self.stats.out_of_process_descriptors += 1,
            Count::HostDescriptors => self.stats.out_of_host_descriptors += 1,
            Count::SocketMemory => self.stats.out_of_memory += 1,
            _ => self.stats.other_failed_accepts += 1,
        }
        self.stats.failed_accepts += 1;
    }

    /// Adds the listener to the epoll again after a pause, if there are descriptors for all connections in messages.
    fn listen_again(&mut self) -> Result<(), ListenError> {
        if self.accept_after.is_none_or(|after| Instant::now() < after) {
            return Ok(());
        }
        if self.channels().reserve(self.wanted_spare()).is_err() {
            self.accept_after = Some(Instant::now() + BACK_OFF);
            return Ok(());
        }
        self.accept_after = None;
        match self.epoll.add(self.listener.as_fd(), LISTENER, Interest::ACCEPT) {
            Err(error) if epoll::is_watch_refused(&error) => {
                self.accept_after = Some(Instant::now() + BACK_OFF);
                Ok(())
            }
            added => added.map_err(self.group.failed("epoll_ctl()")),
        }
    }

    /// Returns the number of descriptors to reserve for connections that workers receive and return: two for each, because the sender
    /// closes its own after the message.
    fn wanted_spare(&self) -> usize {
        let present = self.workers.iter().filter(|worker| worker.present).count();
        2 * present.max(1) * self.depth as usize
    }

    /// Stores a connection, as ready if it is readable.
    fn arrive(&mut self, pending: PendingConnection) -> Result<(), ListenError> {
        if socket::has_something(pending.as_fd()) {
            self.ready.push_back(pending);
            return Ok(());
        }
        self.watch(pending)
    }

    fn watch(&mut self, pending: PendingConnection) -> Result<(), ListenError> {
        let token = pending.as_fd().as_raw_fd() as u64;
        match self.epoll.add(pending.as_fd(), token, Interest::READ) {
            Ok(()) => self.idle.put(pending),
            Err(error) if epoll::is_watch_refused(&error) => self.stats.unwatched += 1,
            Err(error) => return Err(self.group.failed("epoll_ctl()")(error)),
        }
        Ok(())
    }

    /// Moves an idle connection that became readable to the ready ones.
    fn on_readable(&mut self, descriptor: usize) -> Result<(), ListenError> {
        if let Some(pending) = self.take_idle(descriptor)? {
            self.ready.push_back(pending);
        }
        Ok(())
    }

    /// Removes an idle connection from the epoll. Closing the descriptor is not enough: the worker's copy refers to the same
    /// open file, which the epoll watches.
    fn take_idle(&mut self, descriptor: usize) -> Result<Option<PendingConnection>, ListenError> {
        let Some(pending) = self.idle.take(descriptor) else { return Ok(None) };
        self.epoll.remove(pending.as_fd()).map_err(self.group.failed("epoll_ctl()"))?;
        Ok(Some(pending))
    }

    /// Takes a connection of a worker that left from the handoff queue.
    fn take_handoff(&mut self) -> Result<(), ListenError> {
        match self.channels().receive(|| self.group.0.handoff.take()) {
            Ok(Some(Arrival::Connection(connection))) => {
                self.arrive(PendingConnection::returned(connection, false, self.seats()))
            }
            Ok(Some(Arrival::Listener(_) | Arrival::Nudge) | None) => Ok(()),
            Err(error) if Errno::of(&error) == Some(Errno::EMFILE) => {
                self.stats.lost += 1;
                Ok(())
            }
            Err(error) => Err(self.group.failed("recvmsg()")(error)),
        }
    }

    /// Receives a message of a worker.
    fn on_worker_message(&mut self, seat: usize) -> Result<(), ListenError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let channels = self.channels();
        let received = channels.receive(|| unix_socket::receive(channels.of_dispatcher(seat), &mut buffer));
        let result = match received {
            Ok((count, socket)) => {
                // Before anything else: the dispatcher may be killed.
                if socket.is_some() {
                    self.seats().hold();
                }
                self.handle_message(seat, &buffer[..count], socket)
            }
            Err(error) if handoff::is_empty(&error) => Ok(()),
            Err(error) => match Errno::of(&error) {
                // The kernel has closed the connection in the message; only a message with a connection fails with EMFILE.
                Some(Errno::EMFILE) => {
                    self.stats.lost += 1;
                    self.seats().sub_in_transit();
                    self.is_done(seat);
                    Ok(())
                }
                _ => Err(self.group.failed("recvmsg()")(error)),
            },
        };
        self.buffer = buffer;
        result
    }

    fn handle_message(
        &mut self,
        seat: usize,
        bytes: &[u8],
        socket: Option<OwnedFd>,
    ) -> Result<(), ListenError> {
        let Some((kind, rest)) = bytes.split_first() else { return Ok(()) };
        match *kind {
            JOINED => {
                self.turn += 1;
                let (tenure, known) = (rest.first().copied().unwrap_or(0), self.workers[seat]);
                let is_known = known.present && known.tenure == tenure;
                let outstanding = if is_known { known.outstanding } else { 0 };
                self.workers[seat] = WorkerState { present: true, tenure, outstanding, since: self.turn };
            }
            LEFT if rest.first() == Some(&self.workers[seat].tenure) => return self.on_worker_left(seat),
            DONE | KEPT_AND_DONE => self.is_done(seat),
            _ => {}
        }
        let Some(socket) = socket else { return Ok(()) };
        match HandoffConnection::read(rest, socket, self.seats()) {
            Some(connection) => self.watch(PendingConnection::kept(connection, seat, self.seats())),
            None => {
                self.seats().let_go();
                Ok(())
            }
        }
    }

    fn is_done(&mut self, seat: usize) {
        self.turn += 1;
        let worker = &mut self.workers[seat];
        worker.outstanding = worker.outstanding.saturating_sub(1);
        worker.since = self.turn;
    }

    /// Takes back the connections that a worker did not read before it left or died. The seat's next worker may have read some.
    fn on_worker_left(&mut self, seat: usize) -> Result<(), ListenError> {
        self.workers[seat].present = false;
        self.workers[seat].outstanding = 0;
        let mut returned = Vec::new();
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let channels = self.channels();
            match channels.receive(|| unix_socket::receive(channels.of_worker(seat), &mut buffer)) {
                Ok((count, Some(socket))) => {
                    let Some((kind, rest)) = buffer[..count].split_first() else { continue };
                    let fresh = kind & FRESH != 0;
                    let connection = HandoffConnection::read(rest, socket, self.seats());
                    returned.extend(
                        connection
                            .map(|connection| PendingConnection::returned(connection, fresh, self.seats())),
                    );
                }
                Ok((_, None)) => break,
                Err(error) if handoff::is_empty(&error) => break,
                Err(error) if Errno::of(&error) == Some(Errno::EMFILE) => {
                    self.stats.lost += 1;
                    self.seats().sub_in_transit();
                }
                Err(error) => return Err(self.group.failed("recvmsg()")(error)),
            }
        }
        for pending in returned.into_iter().rev() {
            self.ready.push_front(pending);
        }
        Ok(())
    }

    /// Handles workers that died without leaving and whose seats are free.
    fn reclaim_dead_workers(&mut self) -> Result<(), ListenError> {
        for seat in 0..self.workers.len() {
            if self.workers[seat].present && self.seats().get(seat, Count::Taken) == 0 {
                self.on_worker_left(seat)?;
            }
        }
        Ok(())
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        let idle = self.idle.drain();
        // No worker takes a connection from a drained group.
        let all_pending = self.ready.drain(..).chain(idle).filter(|_| !self.group.is_drained());
        for pending in all_pending {
            // A connection for which the queue has no space is closed. The epoll is closed too, so nothing must be removed.
            let _ = self.group.0.handoff.offer(&pending.connection);
        }
        let workers = std::mem::take(&mut self.workers);
        self.channels().release();
        *self.channels().unattended.lock().unwrap_or_else(PoisonError::into_inner) = Some(workers);
    }
}

/// Set in the first byte of a message to a worker if the connection is new. The remaining bits are the tenure of the worker
/// to which the dispatcher sent the message; the seat may have another worker when the message is read.
pub(crate) const FRESH: u8 = 1;
/// Message of a worker that has joined, with its tenure.
pub(crate) const JOINED: u8 = b'J';
/// Message of a worker that has served its connection.
pub(crate) const DONE: u8 = b'D';
/// Message of a worker that has left, with its tenure. The seat is free before the worker sends it, so the message of the
/// seat's next worker may arrive first.
pub(crate) const LEFT: u8 = b'X';
/// Message with a kept connection, from a worker that has more to serve.
pub(crate) const KEPT: u8 = b'K';
/// Message with a kept connection, from a worker that has served its connection.
pub(crate) const KEPT_AND_DONE: u8 = b'B';

/// One pair of connected sockets per seat, created before workers are forked so that every process has all of them.
#[derive(Debug)]
pub(crate) struct WorkerChannels {
    /// The dispatcher's end and the worker's end.
    ends: Vec<(OwnedFd, OwnedFd)>,
    /// The dispatcher's state of the workers, stored here while the group has no dispatcher.
    pub(crate) unattended: Mutex<Option<Vec<WorkerState>>>,
    /// Descriptors of this process that are reserved for connections in messages. The kernel closes a connection for which the
    /// receiver has no descriptor.
    spare: Mutex<Vec<OwnedFd>>,
}

/// The dispatcher's state of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkerState {
    pub(crate) present: bool,
    pub(crate) tenure: u8,
    /// Connections that the worker has received and not finished.
    pub(crate) outstanding: u32,
    /// The turn in which the worker finished its last connection.
    pub(crate) since: u64,
}

impl WorkerChannels {
    pub(crate) fn new(seats: usize) -> io::Result<WorkerChannels> {
        let ends = (0..seats).map(|_| unix_socket::pair()).collect::<io::Result<Vec<_>>>()?;
        let workers = vec![WorkerState::default(); seats];
        Ok(WorkerChannels { ends, unattended: Mutex::new(Some(workers)), spare: Mutex::new(Vec::new()) })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, spare: &mut Vec<OwnedFd>, wanted: usize) -> io::Result<()> {
        while spare.len() < wanted {
            spare.push(self.ends[0].0.try_clone()?);
        }
        Ok(())
    }

    /// Reserves `wanted` descriptors; EMFILE if the process has too few.
    pub(crate) fn reserve(&self, wanted: usize) -> io::Result<()> {
        self.fill(&mut self.spare(), wanted)
    }

    /// Accepts a connection if `wanted` descriptors are reserved afterwards; EMFILE if the process has too few.
    pub(crate) fn accept(&self, listener: BorrowedFd<'_>, wanted: usize) -> io::Result<OwnedFd> {
        let mut spare = self.spare();
        self.fill(&mut spare, wanted)?;
        socket::accept_nonblocking(listener)
    }

    /// Receives a message with a reserved descriptor, which no other worker and no accept(2) of the dispatcher can take.
    pub(crate) fn receive<T>(&self, receive: impl FnOnce() -> T) -> T {
        let mut spare = self.spare();
        drop(spare.pop());
        receive()
    }

    /// Closes the reserved descriptors.
    pub(crate) fn release(&self) {
        self.spare().clear();
    }

    pub(crate) fn count(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn of_worker(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].1.as_fd()
    }

    pub(crate) fn of_dispatcher(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].0.as_fd()
    }
}

/// Returns the tenure of a worker that joins: the number of workers that have had the seat, modulo 128.
pub(crate) fn next_tenure(seats: &Seats, seat: usize) -> u8 {
    seats.add(seat, Count::Joins, 1);
    tenure(seats, seat)
}

/// Returns the tenure of the worker that has a seat.
pub(crate) fn tenure(seats: &Seats, seat: usize) -> u8 {
    seats.get(seat, Count::Joins) as u8 & 0x7f
}

/// Returns the first byte of a message to a worker.
pub(crate) fn kind(tenure: u8, fresh: bool) -> u8 {
    tenure << 1 | if fresh { FRESH } else { 0 }
}
