//! A connection of a worker, and when the server closes it, so that another worker may get the client's next request.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket;

use crate::listen::ListenError;
use crate::listen::seats::{Count, Phase, Seats};
use crate::sync::{AtomicU64, Ordering};

/// A guard that counts a connection as open in a worker's seat while it exists.
///
/// Example: [`Acceptor::detach`](crate::listen::Acceptor::detach).
#[derive(Debug)]
pub struct OpenGuard {
    seats: Arc<Seats>,
    seat: usize,
}

impl OpenGuard {
    pub(crate) fn new(seats: &Arc<Seats>, seat: usize) -> OpenGuard {
        seats.add(seat, Count::Open, 1);
        OpenGuard { seats: Arc::clone(seats), seat }
    }

    /// Returns whether the group closes every connection after its next response.
    pub(crate) fn is_draining(&self) -> bool {
        self.seats.phase() != Phase::Serving
    }

    /// Returns a second guard of the connection, before the first one is dropped.
    #[cfg(feature = "tokio")]
    pub(crate) fn again(&self) -> OpenGuard {
        OpenGuard::new(&self.seats, self.seat)
    }

    /// Counts a connection that could not be watched.
    #[cfg(feature = "tokio")]
    pub(crate) fn unwatched(&self) {
        self.seats.add(self.seat, Count::Unwatched, 1);
    }

    /// Counts a request as answered, for a runtime that reads the further requests of a connection by itself.
    pub fn response_sent(&self) {
        self.seats.add(self.seat, Count::Requests, 1);
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.seats.subtract(self.seat, Count::Open);
    }
}

/// Returns a random number as a fraction from 0 to 1.
pub(crate) fn chance(draw: u32) -> f64 {
    f64::from(draw) / f64::from(u32::MAX)
}

/// A readable connection: it has a request, a part of a request, or an end of file. Dropping it closes the connection.
///
/// Example: [`Acceptor`](crate::listen::Acceptor).
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    guard: OpenGuard,
    /// Bytes that were read and belong to the next request. They stay with the connection when it is kept, even if another
    /// worker gets it. A connection with more than about 64 KiB of them cannot go to another process or to the dispatcher.
    pub carry: Vec<u8>,
    /// A value for the caller's use, 0 at first. It stays with the connection like `carry`.
    pub mark: u64,
    pub(crate) served: Cell<u32>,
    /// A random number, drawn once per connection, that selects its age limit within the jitter of
    /// [`Recycle::Age`](crate::listen::Recycle::Age).
    pub(crate) draw: u32,
    /// The time of the accept.
    pub(crate) born: Instant,
    /// Whether [`Recycle`](crate::listen::Recycle) closes the connection after its next response.
    pub(crate) last: bool,
    /// With `Recycle::Measured`: the time at which the connection was kept.
    pub(crate) kept: Option<Instant>,
    /// With `Recycle::Measured`: how long the current request waited for its worker while another worker was idle.
    pub(crate) waited: Cell<Option<Duration>>,
    /// Whether an epoll watches the connection.
    pub(crate) watched: bool,
    /// Whether the connection has exceeded the idle limit while the ring of its worker still polls it.
    #[cfg(feature = "uring")]
    pub(crate) expired: bool,
    /// The remaining time for which its writes may wait for space until the next call of `Acceptor::next`.
    pub(crate) write_left: Duration,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, guard: OpenGuard) -> Connection {
        Connection {
            socket,
            guard,
            carry: Vec::new(),
            mark: 0,
            served: Cell::new(0),
            draw: fastrand::u32(..),
            born: Instant::now(),
            last: false,
            kept: None,
            waited: Cell::new(None),
            watched: false,
            #[cfg(feature = "uring")]
            expired: false,
            write_left: Duration::ZERO,
        }
    }

    /// Counts a request as answered.
    pub fn response_sent(&self) {
        self.served.set(self.served().saturating_add(1));
        self.guard.response_sent();
        if let Some(waited) = self.waited.take() {
            self.guard.seats.comparison().add_request(waited);
        }
    }

    pub(crate) fn seats(&self) -> &Arc<Seats> {
        &self.guard.seats
    }

    /// Returns the connection's random number as a fraction from 0 to 1.
    pub(crate) fn chance(&self) -> f64 {
        chance(self.draw)
    }

    /// Returns the number of requests answered on this connection so far, by any worker.
    pub fn served(&self) -> u32 {
        self.served.get()
    }

    /// Returns the time since the connection was accepted.
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Returns whether the server must close the connection after the current response: announce this in the response and drop the
    /// connection. [`Recycle`](crate::listen::Recycle) requires it, or the group is
    /// [draining](crate::listen::ListenerGroup::drain).
    pub fn should_close(&self) -> bool {
        self.last || self.guard.is_draining()
    }

    /// Returns the socket, which no epoll of the group watches, and its guard.
    pub(crate) fn into_parts(self) -> (OwnedFd, OpenGuard) {
        (self.socket, self.guard)
    }

    /// Counts the connection as open in `seat` instead of its previous seat.
    pub(crate) fn moves_to(&mut self, seats: &Arc<Seats>, seat: usize) {
        if self.guard.seat != seat {
            self.guard = OpenGuard::new(seats, seat);
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads with recv(2) without waiting: returns [`io::ErrorKind::WouldBlock`] when there is no data.
impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        socket::receive(self.socket.as_fd(), buffer)
    }
}

/// Writes with send(2), which waits for space in the send buffer. The worker serves no other connection meanwhile.
///
/// Returns [`io::ErrorKind::TimedOut`] when the writes since [`next`](crate::listen::Acceptor::next) returned the connection have
/// waited for longer than [`ListenerGroupBuilder::write_timeout`](crate::listen::ListenerGroupBuilder::write_timeout) in total, even
/// if the client reads slowly.
impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match socket::send(self.socket.as_fd(), bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_space()?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection {
    fn wait_for_space(&mut self) -> io::Result<()> {
        let begun = Instant::now();
        let writable = socket::wait_writable(self.socket.as_fd(), Some(self.write_left));
        self.write_left = self.write_left.saturating_sub(begun.elapsed());
        if writable? { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}

/// When the server closes a kept connection.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::listen::{ListenError, ListenerGroupBuilder, Recycle};
///
/// let builder = ListenerGroupBuilder::at(([127, 0, 0, 1], 0));
/// let by_age = Recycle::Age { limit: Duration::from_secs(60), jitter: 0.1 }; // between 54 s and 66 s
/// assert!(builder.clone().recycle(by_age).open()?.break_even().is_none());
///
/// let group = builder.recycle(Recycle::Measured).policy("exclusive".parse().unwrap()).open()?;
/// let costs = group.break_even().expect("the group uses Recycle::Measured");
/// assert_eq!((costs.closes, costs.samples), (false, 0)); // no request yet
/// println!("{costs}");
/// # Ok::<(), ListenError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Recycle {
    /// Never: the connection stays open until the client closes it.
    #[default]
    Never,
    /// After this number of requests; 1 means one connection per request.
    Requests(u32),
    /// With the first request after an age. The age is drawn per connection from `limit` ± `jitter`, so that connections which
    /// were opened together are not closed together.
    Age {
        /// The mean age.
        limit: Duration,
        /// Maximum deviation, as a fraction of `limit` from 0 to 1.
        jitter: f64,
    },
    /// After each request, while a fresh local connection costs less than requests on kept connections wait for their worker
    /// although another worker is idle; otherwise like `Never`.
    ///
    /// Both are measured ([`BreakEven`](crate::listen::BreakEven)). The cost is measured when the group is opened, with 64
    /// connections to a separate listener. The wait is measured continuously, and on one sixteenth of the requests while
    /// connections are closed. This helps clients on the same host; remote clients pay an additional round trip.
    Measured,
}

impl Recycle {
    /// Returns whether the current request of a connection is its last. `chance`: the connection's random number from 0 to 1.
    pub(crate) fn is_last(self, served: u32, age: Duration, chance: f64) -> bool {
        match self {
            // `Measured` is decided by the group's comparison.
            Recycle::Never | Recycle::Measured => false,
            Recycle::Requests(most) => served.saturating_add(1) >= most,
            Recycle::Age { limit, jitter } => {
                // Computed in floating point: `Duration::MAX` times more than 1 would overflow.
                age.as_secs_f64() >= limit.as_secs_f64() * (1.0 + jitter * (2.0 * chance - 1.0))
            }
        }
    }

    /// Refuses a jitter outside of 0 to 1.
    pub(crate) fn check(self) -> Result<(), ListenError> {
        match self {
            Recycle::Age { jitter, .. } if !(0.0..=1.0).contains(&jitter) => Err(ListenError::Setting {
                setting: "jitter",
                value: jitter.to_string(),
                accepted: "a number from 0 to 1",
            }),
            _ => Ok(()),
        }
    }
}

// The decision whether to keep connections or to close them after each request. It uses no clock and no socket: the caller
// passes waits and random numbers.
//
// If connections are closed after every N requests, a request costs c/N + m(1 - 1/N) on average, where c is the cost of a fresh
// connection and m the misplaced wait of a request on a kept connection. This is linear in 1/N: the best N is 1 if m > c, and
// otherwise connections should never be closed.

/// Minimum number of samples for a decision.
const MIN_SAMPLES: u64 = 200;
/// The samples of a window while connections are kept. A clear result ends the window earlier.
const WINDOW: u64 = 2000;
/// The samples of a window while connections are closed. They come from the few connections that are still kept. One request in
/// a hundred may cause the whole wait, and a smaller window could miss all of these requests.
const WINDOW_OF_PROBES: u64 = 1000;
/// The number of samples between two checks for a clear result.
const CHECK_INTERVAL: u64 = 50;
/// The ratio of the two costs from which the decision changes.
const FACTOR: f64 = 1.25;
/// The fraction of requests whose connection is kept while connections are closed, so that the wait is still measured.
const PROBES: f64 = 1.0 / 16.0;

/// The measurements of [`Recycle::Measured`](crate::listen::Recycle::Measured).
///
/// Example: [`Recycle`](crate::listen::Recycle).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BreakEven {
    /// The time of connect(2), accept4(2) and two close(2) for a fresh local connection: the median of 64 when the group was
    /// opened.
    pub fresh_connection: Duration,
    /// The mean time for which a request on a kept connection waited for its worker while another worker was idle.
    pub misplaced_wait: Duration,
    /// Whether connections are closed after each request.
    pub closes: bool,
    /// The number of requests in the mean.
    pub samples: u64,
}

impl fmt::Display for BreakEven {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BreakEven { fresh_connection, misplaced_wait, closes, samples } = self;
        write!(
            formatter,
            "a fresh connection costs {fresh_connection:.1?}, a request on a kept one waits {misplaced_wait:.1?} for its \
             worker while another is idle (mean of {samples}): connections are {}",
            if *closes { "closed after each request" } else { "kept" }
        )
    }
}

/// A sum over the requests of all workers, in shared memory.
#[derive(Clone, Copy)]
enum Sum {
    /// Samples of the current window.
    Samples,
    /// Misplaced wait in nanoseconds.
    Waited,
    /// Sum of the squared waits, in square microseconds.
    Squares,
    /// 1 while connections are closed after each request.
    Closes,
    /// Samples of the previous window, which are reported until the current one has enough.
    SamplesBefore,
    WaitedBefore,
    /// Cost of a fresh connection in nanoseconds.
    Fresh,
}

/// The comparison of the wait on kept connections with the cost of fresh connections.
pub(crate) struct Comparison<'a> {
    sums: &'a [AtomicU64],
}

impl<'a> Comparison<'a> {
    /// The number of shared sums.
    pub(crate) const SUMS: usize = 7;

    /// Creates a comparison; `sums` has [`SUMS`](Comparison::SUMS) elements, initially 0.
    pub(crate) fn new(sums: &'a [AtomicU64]) -> Comparison<'a> {
        Comparison { sums }
    }

    /// Sets the cost of a fresh connection.
    pub(crate) fn set_fresh(&self, cost: Duration) {
        self.set(Sum::Fresh, u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX));
    }

    fn of(&self, sum: Sum) -> &AtomicU64 {
        &self.sums[sum as usize]
    }

    fn get(&self, sum: Sum) -> u64 {
        self.of(sum).load(Ordering::Relaxed)
    }

    fn set(&self, sum: Sum, value: u64) {
        self.of(sum).store(value, Ordering::Relaxed);
    }

    fn add(&self, sum: Sum, more: u64) {
        self.of(sum).fetch_add(more, Ordering::Relaxed);
    }

    /// Adds a request on a kept connection and its misplaced wait.
    pub(crate) fn add_request(&self, waited: Duration) {
        let nanoseconds = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        if nanoseconds > 0 {
            // A wait counts as at most ten seconds, so that the sum of squares does not overflow.
            let nanoseconds = nanoseconds.min(10_000_000_000);
            self.add(Sum::Waited, nanoseconds);
            self.add(Sum::Squares, (nanoseconds / 1000).pow(2));
        }
        let samples = self.of(Sum::Samples).fetch_add(1, Ordering::Relaxed) + 1;
        // Exactly one worker reaches each number of samples, so only one checks the result.
        if samples.is_multiple_of(CHECK_INTERVAL) && samples >= MIN_SAMPLES {
            self.weigh(samples);
        }
    }

    fn weigh(&self, samples: u64) {
        let count = samples as f64;
        let waited = self.get(Sum::Waited);
        let mean = waited as f64 / count / 1000.0;
        let variance = (self.get(Sum::Squares) as f64 / count - mean * mean).max(0.0);
        let fresh = self.get(Sum::Fresh) as f64 / 1000.0;
        let closes = self.get(Sum::Closes) != 0;
        let full = samples >= if closes { WINDOW_OF_PROBES } else { WINDOW };
        // Frequent checks see random deviations more often, so they need a larger difference.
        let doubt = if full { 2.0 } else { 4.0 } * (variance / count).sqrt();
        let other_is_better = if closes {
            full && mean + doubt < fresh && mean * FACTOR < fresh
        } else {
            mean - doubt > fresh && mean > fresh * FACTOR
        };
        if !other_is_better && !full {
            return;
        }
        self.set(Sum::SamplesBefore, samples);
        self.set(Sum::WaitedBefore, waited);
        if other_is_better {
            self.set(Sum::Closes, (!closes).into());
        }
        // Samples from before a change of the decision say nothing about the time after it.
        self.set(Sum::Waited, 0);
        self.set(Sum::Squares, 0);
        self.set(Sum::Samples, 0);
    }

    /// Returns whether the connection is closed after the current request. `chance`: a random number from 0 to 1 for this request.
    pub(crate) fn is_last(&self, chance: f64) -> bool {
        chance >= PROBES && self.get(Sum::Closes) != 0
    }

    pub(crate) fn report(&self) -> BreakEven {
        let (mut samples, mut waited) = (self.get(Sum::Samples), self.get(Sum::Waited));
        // While connections are closed, samples are few. Until they fill a window, the previous window explains the decision.
        let enough = if self.get(Sum::Closes) == 0 { MIN_SAMPLES } else { WINDOW_OF_PROBES };
        if samples < enough && self.get(Sum::SamplesBefore) > 0 {
            (samples, waited) = (self.get(Sum::SamplesBefore), self.get(Sum::WaitedBefore));
        }
        BreakEven {
            fresh_connection: Duration::from_nanos(self.get(Sum::Fresh)),
            misplaced_wait: Duration::from_nanos(waited.checked_div(samples).unwrap_or(0)),
            closes: self.get(Sum::Closes) != 0,
            samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_age_limit_a_connection() {
        let age = Duration::from_secs(10);
        assert!(!Recycle::Never.is_last(u32::MAX, age, 0.0));
        assert!(Recycle::Requests(1).is_last(0, Duration::ZERO, 0.0));
        assert!(!Recycle::Requests(3).is_last(1, age, 0.0));
        assert!(Recycle::Requests(3).is_last(2, age, 0.0));
        let by_age = Recycle::Age { limit: Duration::from_secs(10), jitter: 0.5 };
        assert!(by_age.is_last(0, age, 0.5) && !by_age.is_last(0, age, 0.51));
        assert!(
            by_age.is_last(0, Duration::from_secs(5), 0.0)
                && !by_age.is_last(0, Duration::from_secs(14), 1.0)
        );
    }

    #[test]
    fn duration_max_never_ends_and_jitter_is_checked() {
        let never = Recycle::Age { limit: Duration::MAX, jitter: 1.0 };
        assert!(never.check().is_ok() && !never.is_last(0, Duration::from_secs(1 << 40), 1.0));
        for jitter in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
            let error = Recycle::Age { limit: Duration::from_secs(1), jitter }.check().unwrap_err();
            assert!(error.is_usage(), "{error}");
        }
    }

    const FRESH: Duration = Duration::from_micros(50);

    fn sums() -> Vec<AtomicU64> {
        (0..Comparison::SUMS).map(|_| AtomicU64::new(0)).collect()
    }

    fn weighing(sums: &[AtomicU64]) -> Comparison<'_> {
        let comparison = Comparison::new(sums);
        comparison.set_fresh(FRESH);
        comparison
    }

    /// Plays requests of which one in `one_in` waits for `wait`. Returns the number of changed decisions and the fraction of kept
    /// connections.
    fn play(
        comparison: &Comparison<'_>,
        random: &mut fastrand::Rng,
        requests: u32,
        one_in: u32,
        wait: Duration,
    ) -> (u32, f64) {
        let (mut changes, mut kept, mut was) = (0, 0, comparison.report().closes);
        for _ in 0..requests {
            if !comparison.is_last(random.f64()) {
                kept += 1;
                comparison.add_request(if random.u32(..one_in) == 0 { wait } else { Duration::ZERO });
            }
            let closes = comparison.report().closes;
            changes += u32::from(closes != was);
            was = closes;
        }
        (changes, f64::from(kept) / f64::from(requests))
    }

    #[test]
    fn connections_are_closed_while_kept_ones_wait() {
        for seed in 0..20 {
            let sums = sums();
            let comparison = weighing(&sums);
            let mut random = fastrand::Rng::with_seed(seed);
            assert_eq!(play(&comparison, &mut random, 10_000, 1000, Duration::from_micros(10)), (0, 1.0));
            // One request in a hundred waits 20 ms: on average four times the cost of a connection.
            let (changes, kept) = play(&comparison, &mut random, 100_000, 100, Duration::from_millis(20));
            assert!(changes == 1 && kept < 0.1, "seed {seed}: {changes} changes, {kept} kept");
            let found = comparison.report();
            assert!(found.closes && found.misplaced_wait > FRESH && found.samples >= MIN_SAMPLES, "{found}");
            let (changes, kept) = play(&comparison, &mut random, 100_000, 1000, Duration::from_micros(10));
            assert!(changes == 1 && kept > 0.5, "seed {seed}: {changes} changes, {kept} kept");
            assert!(!comparison.report().closes);
        }
    }

    #[test]
    fn equal_costs_do_not_flap() {
        for wait in [40, 45, 50, 55, 60] {
            let sums = sums();
            let comparison = weighing(&sums);
            let mut random = fastrand::Rng::with_seed(wait);
            let wait = Duration::from_micros(wait * 10);
            let (changes, _) = play(&comparison, &mut random, 1_000_000, 10, wait);
            assert!(changes <= 2, "{changes} changes at {wait:?} for a tenth");
        }
    }

    #[test]
    fn too_few_samples_change_no_decision() {
        let sums = sums();
        let comparison = weighing(&sums);
        for _ in 0..MIN_SAMPLES - 1 {
            comparison.add_request(Duration::from_secs(1));
            assert!(!comparison.is_last(1.0));
        }
        comparison.add_request(Duration::from_secs(100));
        assert!(comparison.is_last(1.0) && comparison.is_last(0.07) && !comparison.is_last(0.05));
        assert_eq!(
            comparison.report().to_string(),
            "a fresh connection costs 50.0µs, a request on a kept one waits 1.0s for its worker while another is idle (mean \
             of 200): connections are closed after each request"
        );
    }

    #[test]
    fn without_samples_connections_are_kept() {
        let sums = sums();
        let comparison = weighing(&sums);
        assert_eq!(comparison.report(), BreakEven { fresh_connection: FRESH, ..BreakEven::default() });
        assert!(!comparison.is_last(1.0));
    }
}
