//! A one-shot accept of io_uring, armed only while the worker waits.
//!
//! The kernel appends the waiter to the listener's wait queue and removes it when it wakes it (`io_arm_poll_handler`,
//! `io_poll_wake`), so workers take turns. A multishot accept would keep its position, even while its worker is busy.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use fourtuple_syscalls::accept_ring::{AcceptRing, Outcome};
use fourtuple_syscalls::{Endpoint, Errno, socket};

use crate::errors::is_temporary;
use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::handoff::Arrival;
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::Count;
use crate::listen::wait::{
    AcceptOutcome, Idle, Preparation, Released, Rounds, Seat, SharedState, Wait, sooner,
};

/// The token of the accept. The token of a connection is its descriptor, which is smaller.
const ACCEPT: u64 = 1 << 32;
const WAKER: u64 = ACCEPT + 1;
const HANDOFF: u64 = ACCEPT + 2;
/// The pause in accepting after an accept found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// Checks that this kernel permits io_uring and that a one-shot accept waits.
pub(crate) fn prepare(preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    let endpoint = preparation.endpoint;
    let mut ring = AcceptRing::new().map_err(|error| refused(endpoint, error))?;
    if ring.waits().map_err(ListenError::call("io_uring_enter()", endpoint))? {
        return Ok(SharedState::None);
    }
    Err(ListenError::Absent {
        policy: AcceptPolicy::UringOneshot,
        what: "an accept of io_uring that waits for a connection",
        error: io::ErrorKind::WouldBlock.into(),
    })
}

fn refused(endpoint: &Endpoint, error: io::Error) -> ListenError {
    let policy = AcceptPolicy::UringOneshot;
    match Errno::of(&error) {
        Some(Errno::EPERM | Errno::EACCES) => ListenError::NotPermitted {
            policy,
            call: "io_uring_setup()",
            needs: "it takes the sysctl kernel.io_uring_disabled at 0 (or 1 with the group of kernel.io_uring_group) and a \
                    seccomp profile that allows io_uring",
            error,
        },
        Some(Errno::ENOSYS) => ListenError::Absent { policy, what: "a kernel with io_uring", error },
        Some(Errno::EINVAL) => {
            ListenError::Absent { policy, what: "IORING_SETUP_DEFER_TASKRUN (Linux 6.1)", error }
        }
        _ => ListenError::call("io_uring_setup()", endpoint)(error),
    }
}

struct UringOneshot {
    listener: Arc<OwnedFd>,
    /// The ring and the thread that created it; the kernel permits only this thread to use it. An acceptor that moves to
    /// another thread creates a new ring.
    ring: Option<(ThreadId, AcceptRing)>,
    /// Idle connections. Each one is also in `unarmed`, has a poll in progress, or is in `ready`.
    idle: Idle<Connection>,
    unarmed: Vec<i32>,
    ready: VecDeque<u64>,
    /// Whether an accept is in progress.
    accepting: bool,
    /// Whether a poll of the waker is in progress.
    waker_armed: bool,
    /// Whether a poll of the handoff queue is in progress.
    handoff_armed: bool,
    /// The end of a pause in accepting.
    accept_after: Option<Instant>,
    /// Whether the worker has stopped accepting because its group hands over.
    handed_over: bool,
    /// The times of the last polls, with `Recycle::Measured` only.
    rounds: Option<Rounds>,
}

/// The completions of one wait.
#[derive(Clone, Copy)]
struct Completed {
    /// There was at least one completion.
    any: bool,
    /// An accept was cancelled.
    cancelled: bool,
}

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    // This process may lack a permission that the process which opened the group has, such as under a seccomp filter.
    drop(AcceptRing::new().map_err(|error| refused(&seat.group.0.endpoint, error))?);
    Ok(Box::new(UringOneshot::new(seat)?))
}

impl UringOneshot {
    fn new(seat: &Seat) -> Result<UringOneshot, ListenError> {
        Ok(UringOneshot {
            listener: seat.group.listener()?,
            ring: None,
            idle: Idle::new(seat.group.0.idle),
            unarmed: Vec::new(),
            ready: VecDeque::new(),
            accepting: false,
            waker_armed: false,
            handoff_armed: false,
            accept_after: None,
            handed_over: false,
            rounds: seat.group.is_measured().then(Rounds::default),
        })
    }

    /// Returns the ring of this thread. Between two calls of `next` no accept is in progress, so closing an old ring loses no
    /// connection.
    fn take_ring(&mut self, seat: &Seat, here: ThreadId) -> Result<AcceptRing, ListenError> {
        match self.ring.take() {
            Some((thread, ring)) if thread == here => return Ok(ring),
            other => drop(other),
        }
        (self.accepting, self.waker_armed, self.handoff_armed) = (false, false, false);
        self.ready.clear();
        self.unarmed.clear();
        self.unarmed.extend(self.idle.iter().map(|connection| connection.as_fd().as_raw_fd()));
        AcceptRing::new().map_err(|error| refused(&seat.group.0.endpoint, error))
    }

    fn put(&mut self, connection: Connection) -> i32 {
        let descriptor = connection.as_fd().as_raw_fd();
        self.idle.put(connection);
        descriptor
    }

    /// Stores a new connection, as ready if it is readable.
    fn arrive(&mut self, connection: Connection) {
        let readable = socket::has_something(connection.as_fd());
        let descriptor = self.put(connection);
        if readable { self.ready.push_back(descriptor as u64) } else { self.unarmed.push(descriptor) }
    }

    /// Submits every poll and the accept, unless they are in progress.
    fn arm(&mut self, ring: &mut AcceptRing, seat: &Seat) -> io::Result<()> {
        for descriptor in self.unarmed.drain(..) {
            if let Some(connection) = self.idle.get(descriptor as usize) {
                ring.poll(descriptor as u64, connection.as_fd())?;
            }
        }
        if !std::mem::replace(&mut self.waker_armed, true) {
            ring.poll(WAKER, seat.waker.as_fd())?;
        }
        if !std::mem::replace(&mut self.handoff_armed, true) {
            ring.poll(HANDOFF, seat.group.0.handoff.receiver())?;
        }
        let may_accept = !self.handed_over && self.accept_after.is_none();
        if may_accept && !std::mem::replace(&mut self.accepting, true) {
            ring.accept(ACCEPT, self.listener.as_fd())?;
        }
        Ok(())
    }

    /// Waits for completions. Completions that `disarm` collects shortly afterwards count for this poll.
    fn poll(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<(), ListenError> {
        // A first wait without a timeout tells whether the worker would have slept. It also submits the polls, and
        // polls of readable connections complete at once.
        let at_once = self.rounds.is_some() && self.gather(ring, seat, Some(Duration::ZERO))?.any;
        if !at_once {
            self.gather(ring, seat, timeout)?;
        }
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        let others_idle = seat.group.0.seats.others_idle(seat.number);
        let now = Instant::now();
        if at_once {
            rounds.found(now, others_idle)
        } else {
            rounds.woken(now, others_idle)
        }
        Ok(())
    }

    /// Waits, and stores the outcome of every completion.
    fn gather(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<Completed, ListenError> {
        ring.wait(timeout).map_err(seat.group.failed("io_uring_enter()"))?;
        let mut completed = Completed { any: false, cancelled: false };
        while let Some((token, outcome)) = ring.outcome() {
            completed.any = true;
            match token {
                ACCEPT => {
                    self.accepting = false;
                    match outcome {
                        Outcome::Accepted(socket) => self.arrive(seat.new_connection(socket)),
                        Outcome::Failed(error) => self.not_accepted(seat, error)?,
                        Outcome::Cancelled | Outcome::Ready => completed.cancelled = true,
                    }
                }
                WAKER => {
                    self.waker_armed = false;
                    self.ready.push_back(WAKER);
                }
                HANDOFF => {
                    self.handoff_armed = false;
                    self.ready.push_back(HANDOFF);
                }
                // The caller gets any error of the connection from read(2).
                descriptor => self.ready.push_back(descriptor),
            }
        }
        if completed.any && !completed.cancelled {
            seat.count(Count::Wakeups);
        }
        Ok(completed)
    }

    fn not_accepted(&mut self, seat: &Seat, error: io::Error) -> Result<(), ListenError> {
        // The kernel allocates the descriptor before it checks the accept queue, so the failure may repeat at once.
        if matches!(seat.not_accepted(error)?, AcceptOutcome::Pause) {
            self.accept_after = Some(Instant::now() + BACK_OFF);
        }
        Ok(())
    }

    /// Cancels the accept and waits for its completion. A connection that it accepted meanwhile is stored. Returns whether the
    /// accept was cancelled.
    fn disarm(&mut self, ring: &mut AcceptRing, seat: &Seat) -> Result<bool, ListenError> {
        if !self.accepting {
            return Ok(false);
        }
        ring.cancel(ACCEPT).map_err(seat.group.failed("io_uring_enter()"))?;
        let mut cancelled = false;
        while self.accepting {
            cancelled |= self.gather(ring, seat, None)?.cancelled;
        }
        Ok(cancelled)
    }

    /// Cancels the accept of a worker that will be busy. A waiter that was woken and then cancelled has consumed the wakeup
    /// (`io_poll_check_events` checks the cancellation first), so the remaining workers get a nudge.
    fn disarm_and_nudge(&mut self, ring: &mut AcceptRing, seat: &Seat) -> Result<(), ListenError> {
        if self.disarm(ring, seat)? { seat.nudge_if_queued(&self.listener) } else { Ok(()) }
    }

    /// Accepts the connection of a consumed wakeup without the ring. Workers of the other process got all further wakeups.
    fn accept_last(&mut self, seat: &Seat) -> Result<(), ListenError> {
        if let AcceptOutcome::Connection(connection) = seat.accept(&self.listener)? {
            self.arrive(connection);
        }
        Ok(())
    }

    /// Handles a completion. Returns `Some(None)` for the waker.
    fn handle(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        token: u64,
    ) -> Result<Option<Option<Connection>>, ListenError> {
        match token {
            WAKER => {
                seat.waker.clear();
                Ok(Some(None))
            }
            HANDOFF => {
                match seat.take_handoff()? {
                    Some(Arrival::Connection(received)) => self.arrive(received.settle(seat.open_guard())),
                    // The nudge may be of a worker that has not stopped accepting yet, for a connection of which no process was woken.
                    Some(Arrival::Nudge) if self.handed_over => self.accept_last(seat)?,
                    // The accept queue may already hold a connection for which this waiter got no wakeup. A new accept checks
                    // the queue first.
                    Some(Arrival::Listener(_) | Arrival::Nudge) | None => {
                        self.disarm(ring, seat)?;
                    }
                }
                Ok(None)
            }
            descriptor => {
                let found = self.idle.take(descriptor as usize);
                Ok(found.filter(|connection| !connection.expired).map(Some))
            }
        }
    }

    /// Shuts down connections that have exceeded the idle limit. The ring holds a reference to a connection that it polls, so
    /// the connection is closed when its poll completes.
    fn end_idle(&mut self, seat: &Seat) {
        for mut connection in self.idle.sweep() {
            // shutdown(2) fails if the client has reset the connection; the poll completes then too.
            let _ = socket::shutdown(connection.as_fd());
            if !std::mem::replace(&mut connection.expired, true) {
                seat.count(Count::IdleClosed);
            }
            self.idle.put(connection);
        }
    }

    fn search(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looked = false;
        loop {
            while let Some(token) = self.ready.pop_front() {
                if let Some(found) = self.handle(ring, seat, token)? {
                    self.disarm_and_nudge(ring, seat)?;
                    return Ok(found);
                }
            }
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if looked && left.is_some_and(|left| left.is_zero()) {
                self.disarm_and_nudge(ring, seat)?;
                if self.ready.is_empty() {
                    return Ok(None);
                }
                continue;
            }
            looked = true;
            self.end_idle(seat);
            left = sooner(left, self.idle.until_sweep());
            if let Some(after) = self.accept_after {
                let pause = after.saturating_duration_since(Instant::now());
                if pause.is_zero() {
                    self.accept_after = None;
                } else {
                    left = sooner(left, Some(pause));
                }
            }
            self.arm(ring, seat).map_err(seat.group.failed("io_uring_enter()"))?;
            self.poll(ring, seat, left)?;
        }
    }
}

impl Wait for UringOneshot {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let here = thread::current().id();
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let found = self.take_ring(seat, here).and_then(|mut ring| {
                let found = self.search(&mut ring, seat, left)?;
                self.ring = Some((here, ring));
                Ok(found)
            });
            match found {
                // No descriptor or no memory for a ring, or for a request. The next ring gets all requests again.
                Err(ListenError::Call { error, .. }) if is_temporary(&error) => {
                    seat.not_accepted(error)?;
                    if left.is_some_and(|left| left.is_zero()) || seat.waker.clear() {
                        return Ok(None);
                    }
                    thread::sleep(left.map_or(BACK_OFF, |left| left.min(BACK_OFF)));
                }
                found => return found,
            }
        }
    }

    /// Stores the connection; its poll is submitted together with the next accept.
    fn keep(&mut self, _seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        let descriptor = self.put(connection);
        self.unarmed.push(descriptor);
        Ok(())
    }

    fn misplaced(&self, seat: &Seat, kept: Instant, asked: Instant) -> Duration {
        self.rounds.as_ref().map_or(Duration::ZERO, |rounds| {
            rounds.misplaced(kept, asked, || seat.group.0.seats.others_idle(seat.number))
        })
    }

    fn hand_over(&mut self, seat: &Seat) -> Result<(), ListenError> {
        self.handed_over = true;
        self.accept_last(seat)
    }

    fn release(&mut self, _seat: &Seat, _until: Instant) -> Released {
        // Dropping the ring waits until no poll is in progress. No accept is in progress, so no connection is lost.
        self.ring = None;
        self.ready.clear();
        self.unarmed.clear();
        Released::from(self.idle.drain())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use fourtuple_syscalls::epoll::EventFd;
    use fourtuple_testing::{in_namespace, print, skip};

    use crate::listen::ListenerGroupBuilder;

    use super::*;

    /// A seccomp filter does not see the accepts of a ring, so that the test gives each result to the function for results.
    #[test]
    fn every_errno_of_accept_leaves_the_worker_alive() {
        const TEST: &str = "uring_oneshot::every_errno_of_accept_leaves_the_worker_alive";
        in_namespace(|| {
            let endpoint = Endpoint::Inet("127.0.0.1:0".parse().unwrap());
            let builder =
                ListenerGroupBuilder::at(endpoint).policy(AcceptPolicy::UringOneshot).max_workers(1);
            let group = match builder.open() {
                Ok(group) => group,
                Err(error) => return skip(TEST, "uring", &error.to_string()),
            };
            let number = group.0.seats.take().unwrap();
            let seat = Seat { group: group.clone(), number, waker: Arc::new(EventFd::new().unwrap()) };
            let mut worker = UringOneshot::new(&seat).unwrap();
            let mut rows = [" Waits:", " Ends:", " Counted:"].map(str::to_owned);
            for errno in Errno::ALL {
                let before = seat.group.0.seats.stats_of(number);
                let ends = worker.not_accepted(&seat, (*errno).into()).is_err();
                let after = seat.group.0.seats.stats_of(number);
                let failed = after.failed_accepts - before.failed_accepts;
                let expected = match *errno {
                    Errno::EAGAIN | Errno::EINTR => (false, 0),
                    Errno::EBADF | Errno::EFAULT | Errno::EINVAL | Errno::ENOTSOCK | Errno::ENOSYS => {
                        (true, 0)
                    }
                    _ => (false, 1),
                };
                assert_eq!((ends, failed), expected, "{errno}");
                rows[2 * failed as usize + usize::from(ends)] += &format!(" {errno}");
            }
            print(&format!("MATRIX Accept uring-oneshot:{}", rows.concat()));
            let mut client = TcpStream::connect(group.endpoint().inet().unwrap()).unwrap();
            client.write_all(b"?").unwrap();
            assert!(worker.next(&seat, Some(Duration::from_secs(60))).unwrap().is_some());
        });
    }
}
