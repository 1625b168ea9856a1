//! One dial: the choice of a source address and of a port, step by step, until connect() succeeds or no port is left.
//!
//! `begin` takes the source address whose ledger page has the most free ports. `next_step` takes the fixed port if there is one; else, with
//! a ledger, a free port from it, at most twice; else the next step of the strategy: a search of the whole range, a search of a window,
//! or a bind by number. `apply` turns a step into system calls. After EADDRNOTAVAIL `failed` takes the next step, on the same descriptor
//! if possible; after any other error the dial ends. `finish` refuses a socket that is connected to itself and enters the port into the
//! ledger.
//!
//! The ledger is a hint: a wrong entry costs one refused connect() and fails no dial.

mod request;
mod setup;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket::{self, Connect};
use fourtuple_syscalls::{is_of_source, option, resource};

use crate::capabilities::LocalPortRange;
use crate::dial::dialer::Dialer;
use crate::dial::error::{DialError, Uncounted};
use crate::dial::ledger::{Failure, PortLedger};
use crate::dial::random;
use crate::dial::report::DialReport;
use crate::dial::source;
use crate::dial::strategy::{Step, Strategy};
use crate::ports::PortRange;

pub use request::ConnectRequest;

/// Ports that one dial takes from the ledger before it follows the strategy: two, because another process may hold the first.
const HINTS: u32 = 2;

/// Sources that one dial tries before it fails. The next dial starts with sources that have not failed.
const MAX_TRIED: u32 = 16;

/// A handshake that its caller abandons after this time without an answer counts against its source. A limit that is too short does
/// little harm: the back-off of a source only prefers the other sources of the pool.
const UNANSWERED: Duration = Duration::from_millis(100);

/// Time of a connect() after which the kernel must have searched many ports: more than a thousand, at 20 to 140 ns each.
const SLOW_SEARCH: Duration = Duration::from_micros(200);

/// Maximum window, in ports, that connect() may search on a runtime's thread: a longer search can take most of a millisecond.
const LONG_SEARCH: u32 = 1024;

/// A dial in progress: the ports that it has tried, and its next step.
///
/// [`Dialer::prepare`] creates an attempt for callers that call connect() themselves, and [`Dialer::begin`] for callers that make all
/// system calls themselves.
///
/// Examples: [`Dialer::prepare`], [`Dialer::begin`]. An event loop moves a long search to another thread, and adds the times to the
/// report:
///
/// ```no_run
/// use std::os::fd::AsFd;
/// use std::time::Instant;
/// # use std::{io, os::fd::OwnedFd};
/// # use fourtuple::dial::{DialReport, Dialer};
/// # fn open() -> OwnedFd { unreachable!("yours") }
/// # fn connect(_: &OwnedFd) -> io::Result<()> { unreachable!("yours") }
/// # fn connect_on_a_thread(_: &OwnedFd) -> io::Result<()> { unreachable!("yours") }
/// # fn wait_until_writable(_: &OwnedFd) -> io::Result<()> { unreachable!("yours") }
/// # fn example(dialer: &Dialer) -> Result<DialReport, Box<dyn std::error::Error>> {
/// let socket = open();
/// let mut attempt = dialer.prepare(socket.as_fd())?;
///
/// let begun = Instant::now();
/// if attempt.searches_for_long() {
///     connect_on_a_thread(&socket)?;
/// } else {
///     connect(&socket)?;
/// }
/// attempt.add_connect(begun.elapsed());
///
/// let begun = Instant::now();
/// wait_until_writable(&socket)?;
/// attempt.add_handshake(begun.elapsed());
/// let report = attempt.finish(socket.as_fd())?;
/// # Ok(report) }
/// ```
#[derive(Debug)]
pub struct Attempt<'a> {
    dialer: &'a Dialer,
    /// Page of the source in the ledger.
    page: usize,
    /// Source address; `None`: the kernel chooses it by route.
    source: Option<IpAddr>,
    /// Port that the ledger gave to this attempt, until the kernel has accepted or refused it.
    named: Option<u16>,
    hints_left: u32,
    /// Whether the duration of connect() is the duration of the search, so that a search longer than expected is noticed: connect()
    /// does not block and is called by the dialer.
    is_timed: bool,
    /// Whether the kernel chooses the port, because the ledger expects its search to be short.
    is_sparse: bool,
    /// Whether that search took long, and before connect() the search of the dial before.
    was_slow: bool,
    /// Steps of the strategy so far.
    steps: u32,
    strategy: Strategy,
    step: Step,
    /// Start of the dial, or its first failure of a source if no source was backed off at the start.
    begun: Option<Instant>,
    /// Number of sources that have failed in this dial.
    failed_sources: u32,
    /// First source that had no free port. If all sources fail, the error names this source.
    exhausted: Option<Option<IpAddr>>,
    /// Whether the current socket is bound to the source.
    source_bound: bool,
    /// IP_LOCAL_PORT_RANGE of the current socket.
    window: Option<PortRange>,
    attempts: u32,
    connect: Duration,
    handshake: Duration,
    /// End of the last connect() of the dialer's own, while its handshake is in progress.
    waiting: Option<Instant>,
    /// Time at which the socket was returned to a caller that calls connect() itself; set only if there are several sources.
    prepared: Option<Instant>,
    /// Whether the caller calls connect().
    is_of_caller: bool,
    /// Time at which the caller drops the dial, if the dialer knows it.
    limit: Option<Instant>,
}

/// The socket to use for the next connect().
///
/// Example: [`Dialer::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the loop of a caller must handle each value")]
pub enum Retry {
    /// Call connect() again on the same socket. Its options have been updated.
    SameSocket,
    /// Open a new socket and pass it to [`Attempt::renew`]: the old socket stays bound to its port.
    FreshSocket,
}

/// The reason why a step failed.
enum StepError {
    /// The strategy found no free port.
    Ports,
    /// The source address cannot be used.
    Source(DialError),
    /// A failure that another source would not avoid.
    Other(DialError),
}

impl<'a> Attempt<'a> {
    pub(super) fn begin(dialer: &'a Dialer, is_timed: bool) -> Self {
        let mut attempt = Attempt {
            dialer,
            page: 0,
            source: dialer.fixed_source,
            named: None,
            hints_left: 0,
            is_timed,
            is_sparse: false,
            was_slow: false,
            steps: 0,
            strategy: dialer.choice.strategy,
            step: Step::Search,
            begun: None,
            failed_sources: 0,
            exhausted: None,
            source_bound: false,
            window: None,
            attempts: 0,
            connect: Duration::ZERO,
            handshake: Duration::ZERO,
            waiting: None,
            prepared: None,
            is_of_caller: false,
            limit: None,
        };
        if let Some(mut ledger) = dialer.ledger() {
            let begun = &mut attempt.begun;
            let page = ledger.choose(|| *begun.insert(Instant::now()));
            attempt.use_page(&ledger, page);
        }
        attempt
    }

    /// Continues the dial from the source of `page`.
    fn use_page(&mut self, ledger: &PortLedger, page: usize) {
        self.page = page;
        self.source = ledger.source(page);
        self.steps = 0;
        let choice = &self.dialer.choice;
        // The kernel's short search then costs less than setsockopt(IP_LOCAL_PORT_RANGE). In a pool each dial takes its port at once
        // instead, so that dials in progress spread over the sources.
        self.is_sparse = choice.steered && self.is_timed && !ledger.is_pool() && ledger.is_sparse(page);
        self.was_slow = self.is_sparse && ledger.was_slow(page);
        // Without IP_LOCAL_PORT_RANGE a port from the ledger must be bound by number, and no automatic choice takes such a port.
        // While half of the ports are free, the kernel's own search is as fast and has no such effect.
        let is_default =
            self.is_sparse || choice.found == Some(LocalPortRange::Absent) && !ledger.past_half(page);
        (self.hints_left, self.strategy) = match choice.steered {
            true if is_default => (0, Strategy::KernelDefault),
            true => (HINTS, choice.strategy),
            false => (0, choice.strategy),
        };
    }

    /// Continues the dial from another source of the pool, or returns the error of the dial if no source is worth trying.
    fn try_another_source(&mut self, obstacle: StepError) -> Result<Step, DialError> {
        self.forget_named();
        let why = match &obstacle {
            StepError::Ports => Failure::Exhausted,
            StepError::Source(_) => Failure::Unusable,
            StepError::Other(_) => return Err(self.give_up(obstacle)),
        };
        if why == Failure::Exhausted {
            self.exhausted.get_or_insert(self.source);
        }
        let Some(mut ledger) = self.dialer.ledger() else { return Err(self.give_up(obstacle)) };
        if why == Failure::Exhausted && self.is_sparse {
            ledger.note_crowd(self.page);
        }
        if !ledger.is_pool() {
            drop(ledger);
            return Err(self.give_up(obstacle));
        }
        let now = Instant::now();
        // A search of all ports takes milliseconds, so a dial searches at most one source that was exhausted a moment ago.
        let is_enough = why == Failure::Exhausted && ledger.was_exhausted(self.page);
        ledger.fail(self.page, why, now);
        self.failed_sources += 1;
        let begun = *self.begun.get_or_insert(now);
        let next = ledger.another(begun).filter(|_| !is_enough && self.failed_sources < MAX_TRIED);
        let Some(page) = next else {
            drop(ledger);
            return Err(self.give_up(obstacle));
        };
        self.use_page(&ledger, page);
        drop(ledger);
        self.next_step().ok_or_else(|| self.exhausted(self.source))
    }

    fn give_up(&self, obstacle: StepError) -> DialError {
        match (obstacle, self.exhausted) {
            (StepError::Other(error), _) | (StepError::Source(error), None) => error,
            (_, source) => self.exhausted(source.unwrap_or(self.source)),
        }
    }

    fn next_step(&mut self) -> Option<Step> {
        if let Some(port) = self.dialer.source_port {
            self.steps += 1;
            return (self.steps == 1).then_some(Step::Bind(port));
        }
        if self.hints_left > 0 {
            self.hints_left -= 1;
            if let Some(port) = self.name_port() {
                self.named = Some(port);
                return Some(match self.strategy {
                    Strategy::SelectTestRepeat { .. } => Step::Bind(port),
                    _ => Step::Window(PortRange::single(port)),
                });
            }
            self.hints_left = 0;
        }
        let (range, reserved) = (self.dialer.range, &self.dialer.reserved);
        let steps = self.steps;
        self.steps += 1;
        if self.is_sparse {
            return (steps == 0).then_some(Step::Search);
        }
        random::with(|random| self.strategy.unreserved_step(steps, range, reserved, random))
    }

    fn name_port(&mut self) -> Option<u16> {
        let mut ledger = self.dialer.ledger()?;
        if ledger.room(self.page) == 0 {
            ledger.forget(self.page);
        }
        random::with(|random| ledger.take(self.page, random))
    }

    /// Sets the time at which the caller drops the dial: a handshake that is then in progress counts against its source.
    #[cfg(feature = "tokio")]
    pub(super) fn set_limit(&mut self, limit: Option<Instant>) {
        self.limit = limit;
    }

    /// Calls connect() and adds its duration to the report.
    pub(super) fn connect(&mut self, socket: BorrowedFd<'_>) -> io::Result<Connect> {
        // After a search that took long, the CPU time shows whether the thread searched or had lost its processor.
        let cpu = self.was_slow.then(resource::thread_cpu_time);
        let begun = Instant::now();
        let result = socket::connect(socket, self.dialer.destination);
        let ended = Instant::now();
        self.end_connect(begun, ended);
        let search = cpu.map_or(ended - begun, |begun| resource::thread_cpu_time() - begun);
        self.was_slow = self.is_sparse && search > SLOW_SEARCH;
        result
    }

    /// Adds the duration of a connect() to the report; the wait for the handshake begins at its end.
    pub(super) fn end_connect(&mut self, begun: Instant, ended: Instant) {
        self.connect += ended - begun;
        self.waiting = Some(ended);
    }

    /// Adds the time since the last connect() to the report.
    pub(super) fn end_handshake(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            self.handshake += waiting.elapsed();
        }
    }

    /// Returns whether the next connect() may search more than 1,024 ports. A search of 56,000 ports takes milliseconds, so an event
    /// loop makes such a call on another thread.
    pub fn searches_for_long(&self) -> bool {
        match self.step {
            Step::Search => !self.is_sparse,
            Step::Window(window) => window.len() > LONG_SEARCH,
            Step::Bind(_) => false,
        }
    }

    /// Records a failed handshake. A source without an answer is backed off: it has the most free ports and would otherwise be the
    /// first choice of the next dial. A destination that refuses the connection was reached, so its source works.
    pub(super) fn lost(&mut self, error: &DialError) {
        self.waiting = None;
        self.forget_named();
        if !matches!(error, DialError::Refused { .. }) {
            self.back_off(Instant::now());
        }
    }

    fn back_off(&self, now: Instant) {
        if let Some(mut ledger) = self.dialer.ledger() {
            ledger.fail(self.page, Failure::Unusable, now);
        }
    }

    /// Adds the duration of the caller's own connect() to the report.
    pub fn add_connect(&mut self, time: Duration) {
        self.connect += time;
    }

    /// Adds the time that the caller waited for the handshake to the report.
    pub fn add_handshake(&mut self, time: Duration) {
        self.handshake += time;
    }

    /// Chooses the next step after connect() or the handshake failed with `error`; ETIMEDOUT stands for a time limit of the caller.
    /// EINPROGRESS is not a failure and must not be passed.
    ///
    /// ENETUNREACH and EHOSTUNREACH lead to another source only within 100 ms of [`Dialer::prepare`](super::Dialer::prepare),
    /// [`Attempt::renew`] or the previous call: later they may come from the network, and another source would take as long again.
    ///
    /// # Errors
    ///
    /// The error of the dial, if there is no next step.
    pub fn failed(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<Retry, DialError> {
        let retry = self.retry(socket, error).map_err(|error| self.dialer.counted(error))?;
        self.note_prepared();
        Ok(retry)
    }

    /// Notes the time at which the caller gets its socket back.
    pub(super) fn note_prepared(&mut self) {
        self.is_of_caller = true;
        if self.dialer.sources.addresses().len() > 1 {
            self.prepared = Some(Instant::now());
        }
    }

    /// Does the same as [`Attempt::failed`] without a census.
    pub(super) fn retry(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<Retry, DialError> {
        self.waiting = None;
        let prepared = self.prepared.take();
        if error.kind() != io::ErrorKind::AddrNotAvailable {
            self.forget_named();
            let took = prepared.map_or(self.connect, |prepared| prepared.elapsed());
            let is_of_source = is_of_source(&error, took);
            let error = self.connect_error(error);
            if !is_of_source {
                self.lost(&error);
                return Err(error);
            }
            self.step = self.try_another_source(StepError::Source(error))?;
            return Ok(Retry::FreshSocket);
        }
        self.attempts += 1;
        match self.step {
            Step::Bind(port) => {
                self.step = match self.step_after_conflict(self.local(port)) {
                    Ok(step) => step,
                    Err(obstacle) => self.try_another_source(obstacle)?,
                };
                Ok(Retry::FreshSocket)
            }
            Step::Search | Step::Window(_) => {
                // Another socket holds the port that the ledger gave: the port stays marked as in use.
                self.named = None;
                if let Some(step) = self.next_step() {
                    self.step = step;
                    self.apply(socket)?;
                    return Ok(Retry::SameSocket);
                }
                self.step = self.try_another_source(StepError::Ports)?;
                Ok(Retry::FreshSocket)
            }
        }
    }

    /// Converts an error of connect() other than EADDRNOTAVAIL.
    pub(super) fn connect_error(&self, error: io::Error) -> DialError {
        self.dialer.connect_error(error, self.source, self.connect + self.handshake)
    }

    /// Converts a failure of a call other than connect(), and adds the source.
    pub(super) fn called<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        let (address, source_address) = (self.dialer.destination, self.source);
        result.map_err(|error| DialError::Call { call, address, source_address, error })
    }

    /// Returns the error for a handshake without an answer in time.
    pub(super) fn timed_out(&self) -> DialError {
        // The timeout includes the time before connect().
        let after = self.dialer.timeout.unwrap_or_default().max(self.connect + self.handshake);
        DialError::TimedOut { destination: self.dialer.destination, source_address: self.source, after }
    }

    /// Sets the options of a new socket, after [`Retry::FreshSocket`].
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::prepare`].
    pub fn renew(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.renew_uncounted(socket).map_err(|error| self.dialer.counted(error))?;
        self.note_prepared();
        Ok(())
    }

    /// Does the same as [`Attempt::renew`] without a census.
    pub(super) fn renew_uncounted(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.source_bound = false;
        self.window = None;
        self.set_device(socket)?;
        self.apply(socket)
    }

    fn step_after_conflict(&mut self, local: SocketAddr) -> Result<Step, StepError> {
        self.named = None;
        self.next_step().ok_or(match self.dialer.source_port {
            Some(_) => StepError::Other(DialError::TupleBusy { local, destination: self.dialer.destination }),
            None => StepError::Ports,
        })
    }

    /// Ends the dial after connect() succeeded or returned EINPROGRESS: records the port in the ledger and returns the report.
    ///
    /// # Errors
    ///
    /// [`DialError::SelfConnect`]; [`DialError::Call`] if getsockname(2) fails.
    pub fn finish(mut self, socket: BorrowedFd<'_>) -> Result<DialReport, DialError> {
        (self.waiting, self.prepared) = (None, None);
        let source = socket::canonical(self.dialer.call("getsockname", socket::local_address(socket))?);
        if source.port() == self.dialer.destination.port() && source.ip() == self.dialer.destination.ip() {
            // The socket is its own peer: a reset leaves no TIME_WAIT socket behind.
            self.dialer.call("setsockopt SO_LINGER", option::set_reset_on_close(socket))?;
            self.forget_named();
            return Err(DialError::SelfConnect { destination: self.dialer.destination });
        }
        if let Some(mut ledger) = self.dialer.ledger() {
            if self.named != Some(source.port()) {
                ledger.note(self.page, source.port());
            }
            if self.is_sparse {
                ledger.note_search(self.page, self.was_slow);
            }
            ledger.succeed(self.page);
        }
        self.named = None;
        Ok(DialReport {
            strategy: self.strategy,
            source,
            attempts: self.attempts + 1,
            connect: self.connect,
            handshake: self.handshake,
        })
    }

    /// Returns the port that the ledger gave, if any, to the ledger.
    fn forget_named(&mut self) {
        if let Some(port) = self.named.take()
            && let Some(mut ledger) = self.dialer.ledger()
        {
            ledger.free(self.page, port);
        }
    }

    fn local(&self, port: u16) -> SocketAddr {
        let source = self.source.unwrap_or_else(|| self.dialer.unspecified());
        source::local(source, port, self.dialer.destination)
    }

    /// Returns the error for exhausted ports, without a census: [`Dialer::counted`] adds it.
    fn exhausted(&self, source_address: Option<IpAddr>) -> DialError {
        DialError::PortsExhausted {
            source_address,
            destination: self.dialer.destination,
            attempts: self.attempts,
            census: Err(Uncounted::NotAsked),
        }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // The outcome of a connect() of the caller is unknown: it may have succeeded, and then its socket holds the port. A port that is
        // free again is found when the ledger is read again.
        if !self.is_of_caller {
            self.forget_named();
        }
        // The caller has dropped the dial during a handshake, for example because a time limit of its own has passed.
        if let Some(waiting) = self.waiting.or(self.prepared) {
            let now = Instant::now();
            if now - waiting >= UNANSWERED || self.limit.is_some_and(|limit| now >= limit) {
                self.back_off(now);
            }
        }
    }
}
