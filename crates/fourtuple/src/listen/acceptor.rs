//! The acceptor of one worker.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::EventFd;

use crate::listen::ListenError;
use crate::listen::connection::{Connection, OpenGuard};
use crate::listen::group::ListenerGroup;
use crate::listen::handoff;
use crate::listen::policy::open_waiter;
use crate::listen::seats::{Count, Phase, SeatStats};
use crate::listen::wait::{Released, Seat, Wait};

/// The acceptor of one worker of a group. Dropping it leaves the group, as [`leave`](Acceptor::leave) does.
///
/// ```
/// use std::io::{Read, Write};
/// use std::net::TcpStream;
/// use fourtuple::listen::ListenerGroupBuilder;
///
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
/// let mut acceptor = group.join()?; // in each worker thread
/// let waker = acceptor.waker();
///
/// let mut client = TcpStream::connect(acceptor.group().endpoint().inet().expect("TCP"))?;
/// client.write_all(b"ping")?;
/// let mut connection = acceptor.next(None)?.expect("no wakeup yet");
/// connection.read_exact(&mut [0; 4])?;
/// connection.write_all(b"pong")?;
/// connection.response_sent();
/// println!("{} requests in {:?}", connection.served(), connection.age());
/// if !connection.should_close() {
///     acceptor.keep(connection)?;
/// }
///
/// waker.wake(); // from any thread
/// assert!(acceptor.next(None)?.is_none());
/// let stats = acceptor.stats();
/// assert_eq!((acceptor.seat(), stats.accepts, stats.requests, stats.open), (0, 1, 1, 1));
/// let report = acceptor.leave()?;
/// assert_eq!(report.waiting, 1); // the kept connection, for the next worker that joins
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Acceptor {
    seat: Seat,
    wait: Box<dyn Wait>,
    /// The time at which `next` returned a connection.
    busy: Option<Instant>,
    random: fastrand::Rng,
    waker: AcceptWaker,
    /// Whether the worker has stopped accepting because the group hands over.
    handed_over: bool,
    left: bool,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Acceptor")
            .field("seat", &self.seat.number)
            .field("endpoint", self.seat.group.endpoint())
            .field("policy", &self.seat.group.policy())
            .finish_non_exhaustive()
    }
}

/// The connections of a worker that left its group.
///
/// Example: [`Acceptor`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct LeaveReport {
    /// Idle connections that were handed to other workers of the group.
    pub handed_over: usize,
    /// Idle connections in the handoff queue while the group has no other worker: connections of this worker and of earlier
    /// workers. They are closed with the group unless a worker joins before.
    pub waiting: usize,
    /// Idle connections for which the handoff queue, which takes some hundreds, had no space: the worker waits for it for a second in
    /// total. Also those that sendmsg(2) refused. Dropping them closes them. To lose no request,
    /// wait for the next request of each and mark its response as the last.
    pub kept: Vec<Connection>,
}

/// A handle that ends the wait of an acceptor, from any thread.
///
/// Example: [`Acceptor`].
#[derive(Clone, Debug)]
pub struct AcceptWaker {
    event: Arc<EventFd>,
    /// Set before the event, which the group signals too. Its wakeups do not end the wait.
    asked: Arc<AtomicBool>,
}

impl AcceptWaker {
    pub(crate) fn new(event: &Arc<EventFd>) -> AcceptWaker {
        AcceptWaker { event: Arc::clone(event), asked: Arc::default() }
    }

    /// Makes [`Acceptor::next`] return `None`: at once, or within 50 ms with the policies `Blocking` and `SharedOneshot`, whose
    /// wait only a timeout ends. If the worker is busy, its next call of `next` returns `None`.
    pub fn wake(&self) {
        self.asked.store(true, Ordering::Release);
        self.event.signal();
    }
}

impl ListenerGroup {
    /// Takes the lowest free seat. Where the order of workers matters (`Exclusive` wakes the first idle worker), it is the order
    /// of these calls, whichever threads use the acceptors afterwards. The acceptor keeps the group open.
    ///
    /// # Errors
    ///
    /// No seat is free, or a system call failed.
    ///
    /// # Examples
    ///
    /// Example: [`Acceptor`].
    pub fn join(&self) -> Result<Acceptor, ListenError> {
        let event = Arc::new(EventFd::new().map_err(self.failed("eventfd()"))?);
        self.register_waker(&event);
        let waker = AcceptWaker::new(&event);
        let seats = &self.0.seats;
        let number = seats.take().ok_or(ListenError::Full { seats: seats.count() })?;
        let seat = Seat { group: self.clone(), number, waker: event };
        match open_waiter(&seat) {
            Ok(wait) => {
                let random = fastrand::Rng::new();
                Ok(Acceptor { seat, wait, busy: None, random, waker, handed_over: false, left: false })
            }
            Err(error) => {
                seats.free(number);
                Err(error)
            }
        }
    }
}

impl Acceptor {
    /// Waits for a readable connection: a new one with its first bytes, or a kept one. Returns `None` after `timeout`, after a
    /// [wakeup](AcceptWaker::wake), or when the group is [drained](ListenerGroup::drain).
    ///
    /// With the policy `Blocking` the wait may last about 50 ms longer than `timeout`, because only the receive timeout of the listener ends
    /// accept(2).
    ///
    /// The worker counts as busy from the return of a connection until the next call.
    ///
    /// # Errors
    ///
    /// An unexpected failure of a system call, after which a retry is of no use. An error of a single connection is counted, or returned
    /// by reading from it. A lack of descriptors or memory (EMFILE, ENFILE, ENOBUFS, ENOMEM) is counted in [`stats`](Acceptor::stats), and
    /// the worker pauses in accepting for 10 ms.
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let Seat { group, number, .. } = &self.seat;
        let seats = &group.0.seats;
        if seats.phase() == Phase::Drained {
            return Ok(None);
        }
        let asked = group.is_measured().then(Instant::now);
        if let Some(since) = self.busy.take() {
            let busy = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            seats.add(*number, Count::Busy, busy);
        }
        seats.set(*number, Count::Idle, 1);
        let found = self.wait(timeout);
        let Seat { group, number, .. } = &self.seat;
        let seats = &group.0.seats;
        seats.set(*number, Count::Idle, 0);
        let Some(mut connection) = found? else { return Ok(None) };
        self.busy = Some(Instant::now());
        connection.write_left = group.0.write_timeout;
        connection.moves_to(seats, *number);
        let recycle = group.0.recycle;
        connection.last = recycle.is_last(connection.served(), connection.age(), connection.chance());
        if let Some(asked) = asked {
            connection.last = seats.comparison().is_last(self.random.f64());
            let waited = connection.kept.take().map(|kept| self.wait.misplaced(&self.seat, kept, asked));
            connection.waited.set(waited);
        }
        Ok(Some(connection))
    }

    /// Waits for a readable connection, and stops accepting first if the group hands over. The wakeup for this does not end the wait.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let Acceptor { seat, wait, waker, handed_over, .. } = self;
        let seats = &seat.group.0.seats;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if !*handed_over && seats.is_handed_over() {
                wait.hand_over(seat)?;
                *handed_over = true;
                seats.worker_handed_over(seat.number);
            }
            // Asked first: under load `found` is never `None`.
            if waker.asked.swap(false, Ordering::AcqRel) {
                return Ok(None);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let found = wait.next(seat, left)?;
            if found.is_some()
                || seats.phase() == Phase::Drained
                || until.is_some_and(|until| Instant::now() >= until)
            {
                return Ok(found);
            }
        }
    }

    /// Keeps a connection for its next request. With some policies another worker may get this request.
    ///
    /// # Errors
    ///
    /// The same errors as [`next`](Acceptor::next).
    pub fn keep(&mut self, mut connection: Connection) -> Result<(), ListenError> {
        if self.seat.group.is_measured() {
            connection.kept = Some(Instant::now());
        }
        self.wait.keep(&self.seat, connection)
    }

    /// Removes a connection from the group's epoll, for a runtime with its own event loop. The connection counts as open while
    /// the guard exists.
    ///
    /// # Errors
    ///
    /// The same errors as [`next`](Acceptor::next).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use std::net::TcpStream;
    /// use fourtuple::listen::ListenerGroupBuilder;
    ///
    /// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?;
    /// let mut acceptor = group.join()?;
    /// # let mut client = TcpStream::connect(group.endpoint().inet().expect("TCP"))?;
    /// # client.write_all(b"ping")?;
    /// let connection = acceptor.next(None)?.expect("no wakeup yet");
    /// let (socket, guard) = acceptor.detach(connection)?;
    ///
    /// let mut stream = TcpStream::from(socket); // for the event loop of the caller
    /// stream.read_exact(&mut [0; 4])?;
    /// guard.response_sent();
    /// assert_eq!((acceptor.stats().open, acceptor.stats().requests), (1, 1));
    /// drop((stream, guard));
    /// assert_eq!(acceptor.stats().open, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn detach(&mut self, mut connection: Connection) -> Result<(OwnedFd, OpenGuard), ListenError> {
        self.forget(&mut connection)?;
        Ok(connection.into_parts())
    }

    /// Stops watching a connection until it is kept again.
    pub(crate) fn forget(&mut self, connection: &mut Connection) -> Result<(), ListenError> {
        self.wait.forget(&self.seat, connection)
    }

    /// Returns the group of this acceptor.
    pub fn group(&self) -> &ListenerGroup {
        &self.seat.group
    }

    /// Returns a handle that ends the wait of this acceptor from another thread.
    pub fn waker(&self) -> AcceptWaker {
        self.waker.clone()
    }

    /// Returns the counters of this worker's seat.
    pub fn stats(&self) -> SeatStats {
        self.seat.group.0.seats.stats_of(self.seat.number)
    }

    /// Returns the number of this worker's seat, from 0.
    pub fn seat(&self) -> usize {
        self.seat.number
    }

    /// Stops accepting and hands over the idle connections and, with a listener per worker, the listener with its accept queue.
    /// Other workers take them, including one that joins later. They are closed with the group:
    /// [drain](ListenerGroup::drain) the group first.
    ///
    /// # Errors
    ///
    /// The same errors as [`next`](Acceptor::next), after everything that could be handed over has been.
    pub fn leave(mut self) -> Result<LeaveReport, ListenError> {
        self.leave_group()
    }

    fn leave_group(&mut self) -> Result<LeaveReport, ListenError> {
        let mut report = LeaveReport::default();
        if std::mem::replace(&mut self.left, true) {
            return Ok(report);
        }
        let group = &self.seat.group;
        let seats = &group.0.seats;
        // The seat is freed first: of two workers that leave at the same time, one must see that no worker remains.
        seats.free(self.seat.number);
        let (mut sent, until) = (0, handoff::deadline());
        let Released { connections, told } = self.wait.release(&self.seat, until);
        for mut connection in connections {
            connection.watched = false;
            // No worker takes a connection from a drained group. What the queue does not take, the caller gets.
            if seats.phase() != Phase::Drained && group.0.handoff.put(&connection, until).unwrap_or(false) {
                sent += 1;
            } else {
                report.kept.push(connection);
            }
        }
        let waiting = group.0.handoff.requeue_all().map_err(group.failed("sendmsg()"))?;
        if seats.has_others(self.seat.number) {
            report.handed_over = sent;
        } else {
            // With the policy `Dispatcher`, the dispatcher may hold some of the connections that were sent.
            report.waiting = waiting.max(sent) + group.0.shared.idle_connections();
        }
        told.map(|()| report)
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // The report is lost. Connections that were not handed over are closed.
        let _ = self.leave_group();
    }
}
