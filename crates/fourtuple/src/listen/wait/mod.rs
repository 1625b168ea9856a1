//! The accept policies: the trait that they implement, and what they share. `pool` has the policies with an epoll per worker.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::EventFd;
use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::{Endpoint, Errno, epoll};

use crate::listen::ListenError;
use crate::listen::connection::{Connection, OpenGuard};
use crate::listen::dispatcher::WorkerChannels;
use crate::listen::group::{ListenerGroup, Listeners};
use crate::listen::handoff::Arrival;
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::{Count, Phase};
use crate::listen::wait::shared_oneshot::SharedEpoll;

pub(crate) mod blocking;
pub(crate) mod dispatcher;
#[cfg(feature = "bpf")]
pub(crate) mod least_busy;
pub(crate) mod pool;
pub(crate) mod shared_oneshot;
#[cfg(feature = "uring")]
pub(crate) mod uring_oneshot;

/// A policy whose feature this build lacks: opening a group with it fails.
#[cfg(not(all(feature = "bpf", feature = "uring")))]
macro_rules! absent {
    ($module:ident, $policy:ident, $feature:literal) => {
        pub(crate) mod $module {
            use crate::listen::ListenError;
            use crate::listen::policy::AcceptPolicy;
            use crate::listen::wait::{Preparation, SharedState};
            use crate::listen::wait::{Seat, Wait};

            const NOT_BUILT: ListenError =
                ListenError::NotBuilt { policy: AcceptPolicy::$policy, feature: $feature };

            pub(crate) fn prepare(_preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
                Err(NOT_BUILT)
            }

            pub(crate) fn open(_seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
                Err(NOT_BUILT)
            }
        }
    };
}
#[cfg(not(feature = "bpf"))]
absent!(least_busy, ReuseportLeastBusy, "bpf");
#[cfg(not(feature = "uring"))]
absent!(uring_oneshot, UringOneshot, "uring");

/// A worker's implementation of an accept policy.
pub(crate) trait Wait: Send {
    /// Returns a connection that has something to read, or `None`: at the latest after `timeout` or a wakeup through the waker. The
    /// caller decides whether to wait on: a wakeup and the end of a wait can come together.
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError>;

    /// Waits for the next request of a connection.
    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError>;

    /// Returns how long the request that `next` has just returned waited for this worker while another worker was idle. The
    /// connection has been kept since `kept`, and `next` was called at `asked`. Zero where a ready connection waits for any worker, or the
    /// worker serves only this connection.
    fn misplaced(&self, _seat: &Seat, _kept: Instant, _asked: Instant) -> Duration {
        Duration::ZERO
    }

    /// Stops watching a connection that `next` returned. Another epoll will watch it, and both would report its events. Does nothing where
    /// `next` returns connections that nothing watches.
    fn forget(&mut self, _seat: &Seat, _connection: &mut Connection) -> Result<(), ListenError> {
        Ok(())
    }

    /// Stops accepting, for another process that accepts from the same listeners, and takes the connection for which the kernel may
    /// have woken only this worker. Called between two calls of `next`, at most once.
    fn hand_over(&mut self, seat: &Seat) -> Result<(), ListenError>;

    /// Stops accepting; a listener of the worker's own goes into the handoff queue, which it waits for until the deadline.
    fn release(&mut self, seat: &Seat, until: Instant) -> Released;
}

/// What a worker that leaves has held.
pub(crate) struct Released {
    /// The connections that other workers must take over, whatever has failed.
    pub(crate) connections: Vec<Connection>,
    /// Whether the others have everything else: a listener, or the news.
    pub(crate) told: Result<(), ListenError>,
}

impl From<Vec<Connection>> for Released {
    fn from(connections: Vec<Connection>) -> Released {
        Released { connections, told: Ok(()) }
    }
}

/// A worker slot of a group, held by the worker that joined.
pub(crate) struct Seat {
    pub(crate) group: ListenerGroup,
    pub(crate) number: usize,
    pub(crate) waker: Arc<EventFd>,
}

/// The outcome of accept4(2).
pub(crate) enum AcceptOutcome {
    Connection(Connection),
    /// Another worker was faster, or the error was of a connection that is gone.
    Empty,
    /// An immediate retry would fail too: the kernel had no descriptor or no memory, a filter forbids the call, or a drain has shut the
    /// unix listener down.
    Pause,
}

impl Seat {
    /// Adds one to a counter of this seat.
    pub(crate) fn count(&self, count: Count) {
        self.group.0.seats.add(self.number, count, 1);
    }

    /// Calls accept4(2) and counts the outcome.
    pub(crate) fn accept(&self, listener: &OwnedFd) -> Result<AcceptOutcome, ListenError> {
        match socket::accept_nonblocking(listener.as_fd()) {
            Ok(socket) => Ok(AcceptOutcome::Connection(self.new_connection(socket))),
            Err(error) => self.not_accepted(error),
        }
    }

    /// Counts a failure of accept(2), and decides what follows.
    pub(crate) fn not_accepted(&self, error: io::Error) -> Result<AcceptOutcome, ListenError> {
        match AcceptFailure::of(&error) {
            AcceptFailure::Wait => {
                // A blocking listener returns EAGAIN when its timeout expires.
                if Errno::of(&error) == Some(Errno::EAGAIN) && self.group.policy() != AcceptPolicy::Blocking {
                    self.count(Count::EmptyAccepts);
                }
                Ok(AcceptOutcome::Empty)
            }
            AcceptFailure::Retry => {
                self.count(Count::OtherAccepts);
                Ok(AcceptOutcome::Empty)
            }
            AcceptFailure::Pause => {
                self.count(cause_of(&error));
                Ok(AcceptOutcome::Pause)
            }
            // A drain has shut the unix listener down.
            AcceptFailure::Fatal
                if Errno::of(&error) == Some(Errno::EINVAL)
                    && self.group.0.seats.phase() != Phase::Serving =>
            {
                Ok(AcceptOutcome::Pause)
            }
            AcceptFailure::Fatal => Err(self.group.failed("accept()")(error)),
        }
    }

    /// Counts the connection of a failed epoll_ctl(2) as unwatched if the kernel refused only this watch. Returns `Ok(None)` then: the caller drops this connection, and other connections are unaffected.
    pub(crate) fn watched<T>(&self, added: io::Result<T>) -> Result<Option<T>, ListenError> {
        match added {
            Ok(value) => Ok(Some(value)),
            Err(error) if epoll::is_watch_refused(&error) => {
                self.count(Count::Unwatched);
                Ok(None)
            }
            Err(error) => Err(self.group.failed("epoll_ctl()")(error)),
        }
    }

    /// Takes the next message of the handoff queue. Without a free descriptor the kernel closes the connection in the message.
    pub(crate) fn take_handoff(&self) -> Result<Option<Arrival>, ListenError> {
        match self.group.0.handoff.take() {
            Err(error) if Errno::of(&error) == Some(Errno::EMFILE) => {
                self.count(Count::ProcessDescriptors);
                Ok(None)
            }
            taken => taken.map_err(self.group.failed("recvmsg()")),
        }
    }

    /// Wakes another worker if the accept queue has a connection. The kernel may have woken only this worker for it.
    pub(crate) fn nudge_if_queued(&self, listener: &OwnedFd) -> Result<(), ListenError> {
        let waiting = socket::wait_readable(listener.as_fd(), Some(Duration::ZERO));
        if waiting.map_err(self.group.failed("poll()"))? {
            self.group.0.handoff.nudge().map_err(self.group.failed("sendmsg()"))?;
        }
        Ok(())
    }

    /// Counts a socket that was accepted for this worker and returns it as a connection.
    pub(crate) fn new_connection(&self, socket: OwnedFd) -> Connection {
        self.count(Count::Accepts);
        Connection::new(socket, self.open_guard())
    }

    /// Closes connections that have exceeded the idle limit, and counts them.
    pub(crate) fn close_idle(&self, connections: Vec<Connection>) {
        self.group.0.seats.add(self.number, Count::IdleClosed, connections.len() as u64);
    }

    /// Returns a guard that counts a connection as open in this seat.
    pub(crate) fn open_guard(&self) -> OpenGuard {
        OpenGuard::new(&self.group.0.seats, self.number)
    }
}

/// Returns the counter for an error of accept(2).
pub(crate) fn cause_of(error: &io::Error) -> Count {
    match Errno::of(error) {
        Some(Errno::EMFILE) => Count::ProcessDescriptors,
        Some(Errno::ENFILE) => Count::HostDescriptors,
        Some(Errno::ENOBUFS | Errno::ENOMEM) => Count::SocketMemory,
        _ => Count::OtherAccepts,
    }
}

/// The settings of a group that is being opened.
pub(crate) struct Preparation<'a> {
    pub(crate) listeners: &'a Listeners,
    pub(crate) seats: usize,
    pub(crate) idle: Duration,
    pub(crate) endpoint: &'a Endpoint,
}

/// The state that the workers of a policy share besides the listener.
#[derive(Debug)]
pub(crate) enum SharedState {
    None,
    Epoll(SharedEpoll),
    Channels(WorkerChannels),
    #[cfg(feature = "bpf")]
    LeastBusy(Arc<fourtuple_bpf::LeastBusy>),
}

impl SharedState {
    /// Returns the epoll in which any idle worker gets a kept connection; `None`: the policy has none.
    pub(crate) fn epoll(&self) -> Option<&SharedEpoll> {
        match self {
            SharedState::Epoll(shared) => Some(shared),
            _ => None,
        }
    }

    /// Returns the number of idle connections that belong to no worker.
    pub(crate) fn idle_connections(&self) -> usize {
        self.epoll().map_or(0, SharedEpoll::idle_connections)
    }
}

/// A table of idle connections by descriptor: a map, because the descriptors of one worker are few of the numbers that the process
/// uses. It is swept four times per limit, so that a connection is closed between the
/// limit and 1.25 times the limit after its last request.
#[derive(Debug)]
pub(crate) struct Idle<T> {
    slots: HashMap<usize, (T, Instant)>,
    limit: Duration,
    /// `None` if the limit is beyond the range of the clock.
    next_sweep: Option<Instant>,
}

impl<T: AsFd> Idle<T> {
    pub(crate) fn new(limit: Duration) -> Idle<T> {
        Idle { slots: HashMap::new(), limit, next_sweep: next_sweep(Instant::now(), limit) }
    }

    /// Adds a connection, whose idle time starts now.
    pub(crate) fn put(&mut self, connection: T) {
        let descriptor = connection.as_fd().as_raw_fd() as usize;
        self.slots.insert(descriptor, (connection, Instant::now()));
    }

    #[cfg(feature = "uring")]
    pub(crate) fn get(&self, descriptor: usize) -> Option<&T> {
        self.slots.get(&descriptor).map(|(connection, _)| connection)
    }

    pub(crate) fn take(&mut self, descriptor: usize) -> Option<T> {
        self.slots.remove(&descriptor).map(|(connection, _)| connection)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.values().map(|(connection, _)| connection)
    }

    /// Removes all connections.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.slots.drain().map(|(_, (connection, _))| connection).collect()
    }

    /// Returns the time until the next sweep is due; `None` if there is no limit.
    pub(crate) fn until_sweep(&self) -> Option<Duration> {
        self.next_sweep.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Removes and returns the connections that have exceeded the limit, if a sweep is due. A readable connection stays, because
    /// epoll_wait(2) may already have returned its event.
    pub(crate) fn sweep(&mut self) -> Vec<T> {
        let now = Instant::now();
        if self.next_sweep.is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.next_sweep = next_sweep(now, self.limit);
        let (limit, slots) = (self.limit, &mut self.slots);
        let expired = slots.extract_if(|_, (connection, since)| {
            now.saturating_duration_since(*since) >= limit && !socket::has_something(connection.as_fd())
        });
        expired.map(|(_, (connection, _))| connection).collect()
    }
}

/// Returns the time of the next sweep; `None` if the limit is beyond the range of the clock.
fn next_sweep(now: Instant, limit: Duration) -> Option<Instant> {
    now.checked_add(limit)?;
    now.checked_add((limit / 4).max(Duration::from_millis(1)))
}

/// Returns the shorter of two timeouts; `None` is infinite.
pub(crate) fn sooner(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

// An estimate of how long a request on a kept connection waited for its worker. The caller passes all times.
//
// A worker polls for ready connections, serves the returned connections, and polls again. A connection that a poll returns
// at once became ready at some time since the previous poll, or since it was kept; on average its request waited for half of
// this period. A connection that a poll returns after the worker slept did not wait. If a poll returns several connections, a
// later one also waited while the earlier ones were served, and this time is known exactly.
//
// The wait is misplaced if another worker could have served the request. This is checked only at both ends of the period: the
// whole wait counts if another worker is idle at one of the ends, and nothing counts otherwise. So the estimate is too high
// if that worker was busy in between, and too low if it was idle only in between.

/// A poll for ready connections.
#[derive(Clone, Copy, Debug)]
struct PollPoint {
    at: Instant,
    /// Whether another worker was idle.
    others_idle: bool,
}

/// The last two polls of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    before: Option<PollPoint>,
    last: Option<PollPoint>,
}

impl Rounds {
    /// Records a poll that returned connections without sleeping.
    pub(crate) fn found(&mut self, at: Instant, others_idle: bool) {
        self.before = self.last.replace(PollPoint { at, others_idle });
    }

    /// Records a poll in which the worker slept.
    pub(crate) fn woken(&mut self, at: Instant, others_idle: bool) {
        self.before = None;
        self.last = Some(PollPoint { at, others_idle });
    }

    /// Returns the misplaced wait of the request that the worker is about to serve. The last poll returned its connection, which
    /// was kept at `kept`. The worker asked for a connection at `asked`: before this poll, or after serving earlier connections that the
    /// poll returned. The time that the worker itself needs to return a connection is not a wait: every other worker needs it too.
    pub(crate) fn misplaced(
        &self,
        kept: Instant,
        asked: Instant,
        others_idle: impl FnOnce() -> bool,
    ) -> Duration {
        let Some(last) = self.last else { return Duration::ZERO };
        // The connection was kept after the last poll, so that poll did not return it.
        if kept > last.at {
            return Duration::ZERO;
        }
        let unseen =
            self.before.map_or(Duration::ZERO, |before| last.at.duration_since(before.at.max(kept)) / 2);
        let waited = unseen + asked.saturating_duration_since(last.at);
        let idle = self.before.is_some_and(|before| before.others_idle) || last.others_idle || others_idle();
        if idle { waited } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn only_silent_connections_expire() {
        let limit = Duration::from_millis(40);
        let mut idle = Idle::new(limit);
        let (_silent, first) = UnixStream::pair().unwrap();
        let (mut on_readable, second) = UnixStream::pair().unwrap();
        let (first_fd, second_fd) = (first.as_raw_fd() as usize, second.as_raw_fd() as usize);
        idle.put(first);
        idle.put(second);
        on_readable.write_all(b"x").unwrap();
        thread::sleep(limit);
        assert!(idle.until_sweep().unwrap().is_zero());
        assert_eq!(idle.sweep().len(), 1);
        assert!(idle.get(first_fd).is_none() && idle.take(second_fd).is_some());
        assert!(idle.sweep().is_empty(), "the next sweep is not due");
    }

    #[test]
    fn duration_max_means_no_limit() {
        let mut idle = Idle::<UnixStream>::new(Duration::MAX);
        assert_eq!(idle.until_sweep(), None);
        assert!(idle.sweep().is_empty());
    }

    fn after(begin: Instant, milliseconds: u64) -> Instant {
        begin + Duration::from_millis(milliseconds)
    }

    #[test]
    fn the_wait_is_half_the_gap_plus_earlier_requests() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        assert_eq!(rounds.misplaced(zero, zero, || true), Duration::ZERO);
        // Two connections woke the worker: the second waits for the first.
        rounds.woken(after(zero, 100), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 90), || true), Duration::ZERO);
        assert_eq!(rounds.misplaced(zero, after(zero, 100), || true), Duration::ZERO);
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || false), Duration::ZERO);
        // Three connections were ready after 20 ms of work.
        rounds.found(after(zero, 120), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 120), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 125), || true), Duration::from_millis(15));
        // The last of these connections was kept after the work had begun.
        assert_eq!(rounds.misplaced(after(zero, 116), after(zero, 125), || true), Duration::from_millis(7));
        assert_eq!(rounds.misplaced(after(zero, 121), after(zero, 125), || true), Duration::ZERO);
    }

    #[test]
    fn a_worker_idle_at_either_end_counts() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        rounds.woken(zero, true);
        rounds.found(after(zero, 10), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 10), || false), Duration::from_millis(5));
        rounds.found(after(zero, 20), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 20), || false), Duration::ZERO);
        rounds.found(after(zero, 30), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 30), || false), Duration::from_millis(5));
        // After a sleep the polls before it do not count.
        rounds.woken(after(zero, 40), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 40), || true), Duration::ZERO);
    }
}
