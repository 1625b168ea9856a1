//! One dial: the choice of a source address and of a port, step by step, until connect() succeeds or no port is left.
//!
//! `use_page` starts on the source address whose ledger page has the most free ports and decides where its ports come from, the
//! [`Phase`]: the fixed port, the kernel's own search while few ports are in use, the ledger, or the strategy. `next_step` follows after
//! a port was in use, from the ledger to the strategy; `try_another_source` follows after a source has no port left or cannot be used.
//! These decisions make no system call. `set_up` applies a step to a socket, and `finish` refuses a socket that is connected to itself
//! and enters the port into the ledger. All callers go through the same functions: the dialers, programs that connect sockets of their
//! own, and programs that make all system calls themselves.
//!
//! The ledger is a hint: a wrong entry costs one refused connect() and fails no dial.

use std::cell::RefCell;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::{self, Connect};
use fourtuple_syscalls::{fork, is_of_source, resource};

use crate::capabilities::LocalPortRange;
use crate::dial::builder::bind_address;
use crate::dial::dialer::{DialReport, Dialer};
use crate::dial::ledger::{Failure, PortLedger};
use crate::dial::strategy::{Step, Strategy};
use crate::dial::{DialError, Uncounted};
use crate::ports::{PortRange, Random};

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
/// [`Dialer::prepare`] and [`Dialer::begin`] create an attempt for callers that call connect() themselves. They set up each socket with
/// [`Attempt::prepare`], or on their own as [`Attempt::request`] says; they report failures to [`Attempt::connect_failed`] and
/// [`Attempt::bind_failed`], and end the dial with [`Attempt::finish`] or [`Attempt::keep`].
///
/// The errors of an attempt have no census: [`Dialer::with_census`] adds it.
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
    /// Number of the source in the pool, which is also its page in the ledger.
    page: usize,
    phase: Phase,
    /// The strategy of the dialer, or [`Strategy::KernelDefault`] while few ports of the source are in use.
    strategy: Strategy,
    /// What the next connect() needs.
    step: Step,
    failed: FailedSources,
    socket: SocketState,
    progress: Progress,
    attempts: u32,
    connect: Duration,
    handshake: Duration,
}

/// Where the ports of the current source come from.
#[derive(Debug)]
enum Phase {
    /// From the builder: one port, tried once.
    Fixed,
    /// From the kernel, once, because the ledger expects its search of the whole range to be short.
    Sparse {
        /// Whether that search took long; before connect(), whether the search of the dial before took long.
        was_slow: bool,
    },
    /// From the ledger, which marks the port as in use until the dial gives it back.
    Hint {
        port: u16,
        /// Ports that the dial may still take from the ledger.
        left: u32,
    },
    /// From the strategy, which has made this many steps.
    Strategy { steps: u32 },
    /// The dial has succeeded or failed: there is no port to give back.
    Ended,
}

/// The sources of a pool that have failed in this dial.
#[derive(Debug, Default)]
struct FailedSources {
    /// Start of the dial, or its first failure of a source if no source was backed off at the start.
    begun: Option<Instant>,
    count: u32,
    /// Page of the first source that had no free port. If all sources fail, the error names this source.
    exhausted: Option<usize>,
}

/// What has been set on the current socket.
#[derive(Debug, Default)]
struct SocketState {
    has_device: bool,
    has_source: bool,
    /// IP_LOCAL_PORT_RANGE.
    window: Option<PortRange>,
}

/// A connect() whose outcome is unknown yet.
#[derive(Debug)]
enum Progress {
    /// There is none.
    Idle,
    /// The dialer's own connect() has ended, and its handshake is in progress.
    Handshake {
        since: Instant,
        /// Time at which the caller drops the dial, if the dialer knows it.
        limit: Option<Instant>,
    },
    /// The caller has the socket and calls connect() itself.
    OfCaller {
        /// Set only if there are several sources.
        since: Option<Instant>,
    },
}

/// The socket to use for the next connect().
///
/// Example: [`Dialer::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the loop of a caller must handle each value")]
pub enum Retry {
    /// Pass the same socket to [`Attempt::prepare`].
    SameSocket,
    /// Pass a new socket to [`Attempt::prepare`]: the old socket stays bound to its port.
    FreshSocket,
}

/// The address and options that a socket needs before connect(), for callers that make system calls through io_uring or another
/// interface of their own. Example: [`Dialer::begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectRequest {
    /// Address to bind. For port 0 set IP_BIND_ADDRESS_NO_PORT before bind(), so that connect() chooses the port. For any other
    /// port set SO_REUSEADDR.
    pub source: Option<SocketAddr>,
    /// Value of IP_LOCAL_PORT_RANGE to set; `None`: leave the option unset.
    pub window: Option<PortRange>,
}

impl ConnectRequest {
    /// Returns a request for a port that the kernel chooses, on this source address, or for `None` on the source address of the route.
    ///
    /// ```
    /// use fourtuple::dial::ConnectRequest;
    ///
    /// let request = ConnectRequest::from_source(Some([127, 0, 0, 2].into()));
    /// assert_eq!((request.source, request.window), (Some(([127, 0, 0, 2], 0).into()), None));
    /// ```
    pub fn from_source(source: Option<IpAddr>) -> ConnectRequest {
        ConnectRequest { source: source.map(|source| SocketAddr::new(source, 0)), window: None }
    }
}

/// Why a source gives no connection.
enum Obstacle {
    /// No port is free.
    Ports,
    /// The address cannot be bound, or has no route to the destination.
    Source(DialError),
}

impl<'a> Attempt<'a> {
    /// Begins a dial with its first step. `is_timed`: the dialer itself will call connect(), which does not block, so that its duration
    /// is the duration of the search, and a search that is longer than expected is noticed.
    pub(super) fn begin(dialer: &'a Dialer, is_timed: bool) -> Result<Self, DialError> {
        let mut attempt = Attempt {
            dialer,
            page: 0,
            phase: Phase::Ended,
            strategy: dialer.choice.strategy,
            step: Step::Search,
            failed: FailedSources::default(),
            socket: SocketState::default(),
            progress: Progress::Idle,
            attempts: 0,
            connect: Duration::ZERO,
            handshake: Duration::ZERO,
        };
        let first = match dialer.ledger() {
            Some(mut ledger) => {
                let page = ledger.choose(|| *attempt.failed.begun.insert(Instant::now()));
                attempt.use_page(page, Some(&mut *ledger), is_timed)
            }
            None => attempt.use_page(0, None, is_timed),
        };
        attempt.step = match first {
            Some(step) => step,
            None => attempt.try_another_source(Obstacle::Ports)?,
        };
        Ok(attempt)
    }

    /// Continues the dial from the source of `page`: decides where its ports come from, and returns the first step.
    fn use_page(&mut self, page: usize, ledger: Option<&mut PortLedger>, is_timed: bool) -> Option<Step> {
        self.page = page;
        let choice = &self.dialer.choice;
        let steering = ledger.filter(|_| choice.steered);
        // The kernel's short search then costs less than setsockopt(IP_LOCAL_PORT_RANGE). In a pool each dial takes its port at once
        // instead, so that dials in progress spread over the sources.
        let is_short = |ledger: &PortLedger| is_timed && !ledger.is_pool() && ledger.is_sparse(page);
        // Without IP_LOCAL_PORT_RANGE a port from the ledger must be bound by number, and no automatic choice takes such a port.
        // While half of the ports are free, the kernel's own search is as fast and has no such effect.
        let is_harmless =
            |ledger: &PortLedger| choice.found == Some(LocalPortRange::Absent) && !ledger.past_half(page);
        let is_default = steering.as_ref().is_some_and(|ledger| is_short(ledger) || is_harmless(ledger));
        self.strategy = if is_default { Strategy::KernelDefault } else { choice.strategy };
        match (self.dialer.source_port, steering) {
            (Some(port), _) => {
                self.phase = Phase::Fixed;
                Some(Step::Bind(port))
            }
            (None, Some(ledger)) if is_short(ledger) => {
                self.phase = Phase::Sparse { was_slow: ledger.was_slow(page) };
                Some(Step::Search)
            }
            (None, Some(ledger)) if !is_default => self.hint(ledger, HINTS),
            (None, _) => self.strategy_step(0),
        }
    }

    /// Returns the next step from this source after the port of the last one was in use. A port of the ledger stays marked as in use.
    fn next_step(&mut self) -> Option<Step> {
        match self.phase {
            Phase::Fixed | Phase::Sparse { .. } | Phase::Ended => None,
            Phase::Hint { left, .. } => match self.dialer.ledger() {
                Some(mut ledger) if left > 0 => self.hint(&mut ledger, left),
                _ => self.strategy_step(0),
            },
            Phase::Strategy { steps } => self.strategy_step(steps),
        }
    }

    /// Takes a free port from the ledger or, if it has none, the first step of the strategy.
    fn hint(&mut self, ledger: &mut PortLedger, left: u32) -> Option<Step> {
        if ledger.free_ports(self.page) == 0 {
            ledger.forget(self.page);
        }
        let Some(port) = with_random(|random| ledger.take(self.page, random)) else {
            return self.strategy_step(0);
        };
        self.phase = Phase::Hint { port, left: left - 1 };
        Some(match self.strategy {
            Strategy::SelectTestRepeat { .. } => Step::Bind(port),
            _ => Step::Window(PortRange::single(port)),
        })
    }

    fn strategy_step(&mut self, tried: u32) -> Option<Step> {
        self.phase = Phase::Strategy { steps: tried + 1 };
        let (range, reserved) = (self.dialer.range, &self.dialer.reserved);
        with_random(|random| self.strategy.unreserved_step(tried, range, reserved, random))
    }

    /// Continues the dial from another source of the pool, or returns the error of the dial if no source is worth trying.
    fn try_another_source(&mut self, obstacle: Obstacle) -> Result<Step, DialError> {
        let why = match obstacle {
            Obstacle::Ports => Failure::Exhausted,
            Obstacle::Source(_) => Failure::Unusable,
        };
        if why == Failure::Exhausted {
            self.failed.exhausted.get_or_insert(self.page);
        }
        self.next_source(why).ok_or_else(|| match (self.failed.exhausted, obstacle) {
            (None, Obstacle::Source(error)) => error,
            (page, _) => self.exhausted(page.unwrap_or(self.page)),
        })
    }

    fn next_source(&mut self, why: Failure) -> Option<Step> {
        let was_sparse = matches!(self.phase, Phase::Sparse { .. });
        self.give_back();
        let mut ledger = self.dialer.ledger()?;
        if why == Failure::Exhausted && was_sparse {
            ledger.note_crowd(self.page);
        }
        if !ledger.is_pool() {
            return None;
        }
        let now = Instant::now();
        // A search of all ports takes milliseconds, so a dial searches at most one source that was exhausted a moment ago.
        let is_enough = why == Failure::Exhausted && ledger.was_exhausted(self.page);
        ledger.fail(self.page, why, now);
        self.failed.count += 1;
        let begun = *self.failed.begun.get_or_insert(now);
        let page = ledger.another(begun).filter(|_| !is_enough && self.failed.count < MAX_TRIED)?;
        self.use_page(page, Some(&mut *ledger), false)
    }

    /// Chooses the next step after the port of this one was in use.
    fn port_in_use(&mut self) -> Result<Retry, DialError> {
        self.attempts += 1;
        let retry = match self.step {
            // The port of this socket cannot be changed.
            Step::Bind(_) => Retry::FreshSocket,
            Step::Search | Step::Window(_) => Retry::SameSocket,
        };
        if let Some(step) = self.next_step() {
            self.step = step;
            return Ok(retry);
        }
        if let Some(port) = self.dialer.source_port {
            let (local, destination) = (self.local(port), self.dialer.destination);
            return Err(DialError::TupleBusy { local, destination });
        }
        self.step = self.try_another_source(Obstacle::Ports)?;
        Ok(Retry::FreshSocket)
    }

    /// Chooses the next step after connect() or the handshake failed with `error`; ETIMEDOUT stands for a time limit of the caller.
    /// EINPROGRESS is not a failure and must not be passed.
    ///
    /// EADDRNOTAVAIL leads to another port, and an error that the source address may cause to another source, as do ENETUNREACH and
    /// EHOSTUNREACH within 100 ms of [`Attempt::prepare`]: later they may come from the network, and another source would take as long
    /// again. For a caller of [`Attempt::request`] the time of [`Attempt::add_connect`] counts instead.
    ///
    /// # Errors
    ///
    /// The error of the dial, if there is no next step: [`DialError::PortsExhausted`], [`DialError::TupleBusy`] for a fixed port, or the
    /// error by its cause.
    pub fn connect_failed(&mut self, error: io::Error) -> Result<Retry, DialError> {
        let progress = mem::replace(&mut self.progress, Progress::Idle);
        let retry = if error.kind() == io::ErrorKind::AddrNotAvailable {
            self.port_in_use()?
        } else {
            let took = match progress {
                Progress::OfCaller { since: Some(since) } => since.elapsed(),
                _ => self.connect,
            };
            let is_of_source = is_of_source(&error, took);
            let error = self.connect_error(error);
            if !is_of_source {
                self.lost(&error);
                return Err(error);
            }
            self.step = self.try_another_source(Obstacle::Source(error))?;
            Retry::FreshSocket
        };
        if retry == Retry::FreshSocket {
            self.socket = SocketState::default();
        }
        Ok(retry)
    }

    /// Chooses the next step after bind() to the address of [`Attempt::request`] failed. The socket may be used again:
    /// [`Attempt::prepare`] does so by itself.
    ///
    /// EADDRINUSE of a port leads to another port; every other error backs off the source, and leads to another source of the pool.
    ///
    /// # Errors
    ///
    /// The errors of [`Attempt::connect_failed`]; [`DialError::SourceNotLocal`] or [`DialError::Call`] if no other source is worth trying.
    pub fn bind_failed(&mut self, error: io::Error) -> Result<(), DialError> {
        let obstacle = match (self.step, error.kind()) {
            // A socket without SO_REUSEADDR holds the port.
            (Step::Bind(_), io::ErrorKind::AddrInUse) => return self.port_in_use().map(drop),
            (_, io::ErrorKind::AddrInUse) => Obstacle::Ports,
            (_, kind) => {
                let address = self.request().source.unwrap_or(self.dialer.destination);
                Obstacle::Source(match kind {
                    io::ErrorKind::AddrNotAvailable => {
                        DialError::SourceNotLocal { source_address: address.ip() }
                    }
                    _ => DialError::Call { call: "bind", address, source_address: self.source(), error },
                })
            }
        };
        self.step = self.try_another_source(obstacle)?;
        Ok(())
    }

    /// Returns what the next socket needs before connect(). The request changes after each failure.
    pub fn request(&self) -> ConnectRequest {
        let source = self.source().map(|source| bind_address(source, 0, self.dialer.destination));
        match self.step {
            Step::Search => ConnectRequest { source, window: None },
            Step::Window(window) => ConnectRequest { source, window: Some(window) },
            Step::Bind(port) => ConnectRequest { source: Some(self.local(port)), window: None },
        }
    }

    /// Returns whether the next connect() may search more than 1,024 ports. A search of 56,000 ports takes milliseconds, so an event
    /// loop makes such a call on another thread.
    pub fn searches_for_long(&self) -> bool {
        match self.step {
            Step::Search => !matches!(self.phase, Phase::Sparse { .. }),
            Step::Window(window) => window.len() > LONG_SEARCH,
            Step::Bind(_) => false,
        }
    }

    /// Records a failed handshake. A source without an answer is backed off: it has the most free ports and would otherwise be the
    /// first choice of the next dial. A destination that refuses the connection was reached, so its source works.
    pub(super) fn lost(&mut self, error: &DialError) {
        self.progress = Progress::Idle;
        self.give_back();
        if !matches!(error, DialError::Refused { .. }) {
            self.back_off(Instant::now());
        }
    }

    fn back_off(&self, now: Instant) {
        if let Some(mut ledger) = self.dialer.ledger() {
            ledger.fail(self.page, Failure::Unusable, now);
        }
    }

    /// Returns a port of the ledger to it, because no socket holds the port.
    fn give_back(&mut self) {
        if let Phase::Hint { port, .. } = mem::replace(&mut self.phase, Phase::Ended)
            && let Some(mut ledger) = self.dialer.ledger()
        {
            ledger.free(self.page, port);
        }
    }

    /// Returns the source address; `None`: the kernel chooses it by route.
    fn source(&self) -> Option<IpAddr> {
        self.dialer.source(self.page)
    }

    fn local(&self, port: u16) -> SocketAddr {
        let source = self.source().unwrap_or_else(|| self.dialer.unspecified());
        bind_address(source, port, self.dialer.destination)
    }

    /// Adds the duration of the caller's own connect() to the report.
    pub fn add_connect(&mut self, time: Duration) {
        self.connect += time;
    }

    /// Adds the time that the caller waited for the handshake to the report.
    pub fn add_handshake(&mut self, time: Duration) {
        self.handshake += time;
    }

    fn exhausted(&self, page: usize) -> DialError {
        DialError::PortsExhausted {
            source_address: self.dialer.source(page),
            destination: self.dialer.destination,
            attempts: self.attempts,
            census: Err(Uncounted::NotAsked),
        }
    }

    /// Converts an error of connect() other than EADDRNOTAVAIL.
    pub(super) fn connect_error(&self, error: io::Error) -> DialError {
        let (destination, source_address) = (self.dialer.destination, self.source());
        match error.kind() {
            io::ErrorKind::ConnectionRefused => DialError::Refused { destination, source_address },
            io::ErrorKind::TimedOut => {
                DialError::TimedOut { destination, source_address, after: self.connect + self.handshake }
            }
            _ => DialError::Call { call: "connect", address: destination, source_address, error },
        }
    }

    /// Converts a failure of a call other than connect(), and adds the source.
    pub(super) fn called<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        let (address, source_address) = (self.dialer.destination, self.source());
        result.map_err(|error| DialError::Call { call, address, source_address, error })
    }

    /// Returns the error for a handshake without an answer in time.
    pub(super) fn timed_out(&self) -> DialError {
        // The timeout includes the time before connect().
        let after = self.dialer.timeout.unwrap_or_default().max(self.connect + self.handshake);
        DialError::TimedOut { destination: self.dialer.destination, source_address: self.source(), after }
    }
}

/// System calls on the sockets of a dial.
impl Attempt<'_> {
    /// Sets up a socket of the caller for its next connect(): its device, source address, port or range of ports. After
    /// [`Attempt::connect_failed`] pass the socket that [`Retry`] names.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::prepare`].
    pub fn prepare(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.set_up(socket)?;
        let is_pool = self.dialer.sources.addresses().len() > 1;
        self.progress = Progress::OfCaller { since: is_pool.then(Instant::now) };
        Ok(())
    }

    /// Applies the step to a socket. If bind() fails, the same socket is bound to another port or source.
    pub(super) fn set_up(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        if let Some(device) = &self.dialer.device
            && !mem::replace(&mut self.socket.has_device, true)
        {
            self.dialer.call("setsockopt SO_BINDTODEVICE", option::set_device(socket, device))?;
        }
        while let Err(error) = self.apply(socket)? {
            self.bind_failed(error)?;
        }
        Ok(())
    }

    /// Sets the options of the step and binds the socket. The inner result is that of bind().
    fn apply(&mut self, socket: BorrowedFd<'_>) -> Result<io::Result<()>, DialError> {
        match self.step {
            Step::Search => {
                debug_assert!(
                    self.socket.window.is_none(),
                    "no strategy goes back from a window to a search"
                );
            }
            Step::Window(window) if self.socket.window == Some(window) => {}
            Step::Window(window) => {
                let set = option::set_local_port_range(socket, window.low(), window.high());
                match self.called("setsockopt IP_LOCAL_PORT_RANGE", set)? {
                    Answer::Done => self.socket.window = Some(window),
                    Answer::Absent => return Err(self.not_supported("IP_LOCAL_PORT_RANGE")),
                }
            }
            Step::Bind(port) => {
                self.called("setsockopt SO_REUSEADDR", option::set_reuse_address(socket, true))?;
                let begun = Instant::now();
                let bound = bind(socket, self.local(port));
                self.connect += begun.elapsed();
                return Ok(bound);
            }
        }
        // The port is left to connect(): only connect() can share one port among destinations.
        let Some(source) = self.source().filter(|_| !self.socket.has_source) else { return Ok(Ok(())) };
        let set = option::set_bind_address_no_port(socket);
        if self.called("setsockopt IP_BIND_ADDRESS_NO_PORT", set)? == Answer::Absent {
            return Err(self.not_supported("IP_BIND_ADDRESS_NO_PORT"));
        }
        let bound = bind(socket, bind_address(source, 0, self.dialer.destination));
        self.socket.has_source = bound.is_ok();
        Ok(bound)
    }

    fn not_supported(&self, option: &'static str) -> DialError {
        DialError::NotSupported { option, strategy: self.strategy.to_string() }
    }

    /// Calls connect() and adds its duration to the report.
    pub(super) fn connect(&mut self, socket: BorrowedFd<'_>) -> io::Result<Connect> {
        // After a search that took long, the CPU time shows whether the thread searched or had lost its processor.
        let cpu = matches!(self.phase, Phase::Sparse { was_slow: true }).then(resource::thread_cpu_time);
        let begun = Instant::now();
        let result = socket::connect(socket, self.dialer.destination);
        let ended = Instant::now();
        self.end_connect(begun, ended);
        if let Phase::Sparse { was_slow } = &mut self.phase {
            let search = cpu.map_or(ended - begun, |begun| resource::thread_cpu_time() - begun);
            *was_slow = search > SLOW_SEARCH;
        }
        result
    }

    /// Adds the duration of a connect() to the report; the wait for the handshake begins at its end.
    pub(super) fn end_connect(&mut self, begun: Instant, ended: Instant) {
        self.connect += ended - begun;
        self.progress = Progress::Handshake { since: ended, limit: None };
    }

    /// Sets the time at which the caller drops the dial: a handshake that is then in progress counts against its source.
    #[cfg(feature = "tokio")]
    pub(super) fn set_limit(&mut self, end: Option<Instant>) {
        if let Progress::Handshake { limit, .. } = &mut self.progress {
            *limit = end;
        }
    }

    /// Adds the time since the last connect() to the report.
    pub(super) fn end_handshake(&mut self) {
        if let Progress::Handshake { since, .. } = mem::replace(&mut self.progress, Progress::Idle) {
            self.handshake += since.elapsed();
        }
    }

    /// Ends the dial after connect() succeeded or returned EINPROGRESS: records the port in the ledger and returns the report.
    ///
    /// # Errors
    ///
    /// [`DialError::SelfConnect`]; [`DialError::Call`] if getsockname(2) fails.
    pub fn finish(mut self, socket: BorrowedFd<'_>) -> Result<DialReport, DialError> {
        self.progress = Progress::Idle;
        let destination = self.dialer.destination;
        let source = socket::canonical(self.dialer.call("getsockname", socket::local_address(socket))?);
        if source.port() == destination.port() && source.ip() == destination.ip() {
            // The socket is its own peer: a reset leaves no TIME_WAIT socket behind.
            self.dialer.call("setsockopt SO_LINGER", option::set_reset_on_close(socket))?;
            return Err(DialError::SelfConnect { destination });
        }
        let phase = mem::replace(&mut self.phase, Phase::Ended);
        if let Some(mut ledger) = self.dialer.ledger() {
            match phase {
                Phase::Hint { port, .. } if port == source.port() => {}
                _ => ledger.note(self.page, source.port()),
            }
            if let Phase::Sparse { was_slow } = phase {
                ledger.note_search(self.page, was_slow);
            }
            ledger.succeed(self.page);
        }
        Ok(DialReport {
            strategy: self.strategy,
            source,
            attempts: self.attempts + 1,
            connect: self.connect,
            handshake: self.handshake,
        })
    }

    /// Ends a dial whose outcome the caller does not know, for sockets that another library connects. Call it before the socket is
    /// closed. A connection is recorded as by [`Attempt::finish`]. While a handshake is in progress, or if the state cannot be read, the
    /// port stays marked as in use, as after a drop of the attempt; without a connection it is free for the next dial at once.
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    /// # use std::net::TcpStream;
    /// # use fourtuple::dial::Dialer;
    /// # fn open() -> TcpStream { unreachable!("yours") }
    /// # fn connect_by_another_library(_: &TcpStream) {}
    /// # fn example(dialer: &Dialer) -> Result<(), Box<dyn std::error::Error>> {
    /// let socket = open();
    /// let attempt = dialer.prepare(socket.as_fd())?;
    /// connect_by_another_library(&socket);
    /// attempt.settle(socket.as_fd());
    /// # Ok(()) }
    /// ```
    pub fn settle(mut self, socket: BorrowedFd<'_>) {
        match option::tcp_state(socket) {
            Ok(state::CLOSE) => self.give_back(),
            Ok(state::SYN_SENT) | Err(_) => {}
            // A socket that is its own peer was reset, and its port is the one of the destination.
            Ok(_) => drop(self.finish(socket)),
        }
    }

    /// Ends a successful dial without a getsockname(), for callers of [`Attempt::request`]. Returns the address to pass to
    /// [`Dialer::release`] when the connection is closed. Port 0 stands for a port that the kernel chose.
    pub fn keep(mut self) -> SocketAddr {
        self.progress = Progress::Idle;
        let port = match (mem::replace(&mut self.phase, Phase::Ended), self.step) {
            (Phase::Hint { port, .. }, _) | (_, Step::Bind(port)) => port,
            _ => 0,
        };
        let had_failures = self.failed.begun.is_some();
        if (had_failures || port == 0)
            && let Some(mut ledger) = self.dialer.ledger()
        {
            if had_failures {
                ledger.succeed(self.page);
            }
            if port == 0 {
                ledger.note_unknown(self.page);
            }
        }
        self.local(port)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // The caller has dropped the dial during a handshake, for example because a time limit of its own has passed.
        let (since, limit) = match self.progress {
            Progress::Idle => (None, None),
            Progress::Handshake { since, limit } => (Some(since), limit),
            Progress::OfCaller { since } => {
                // The connect() may have succeeded, and then its socket holds the port: the ledger keeps it. A port that is free again
                // is found when the ledger is read again.
                self.phase = Phase::Ended;
                (since, None)
            }
        };
        self.give_back();
        if let Some(since) = since {
            let now = Instant::now();
            if now - since >= UNANSWERED || limit.is_some_and(|limit| now >= limit) {
                self.back_off(now);
            }
        }
    }
}

/// Calls bind(). An IPv6 socket of a caller of [`Dialer::prepare`] refuses an IPv4 address with EINVAL, and gets its IPv4-mapped form.
fn bind(socket: BorrowedFd<'_>, local: SocketAddr) -> io::Result<()> {
    let is_ipv6 = || socket::local_address(socket).is_ok_and(|address| address.is_ipv6());
    match (socket::bind(socket, local), local.ip()) {
        (Err(error), IpAddr::V4(ip)) if error.kind() == io::ErrorKind::InvalidInput && is_ipv6() => {
            socket::bind(socket, SocketAddr::new(ip.to_ipv6_mapped().into(), local.port()))
        }
        (result, _) => result,
    }
}

// One random number generator per thread, with a new seed in each forked process: two processes with one seed would draw the same
// ports.

thread_local! {
    static GENERATOR: RefCell<(u32, Random)> = const { RefCell::new((0, Random::with_seed(0))) };
}

/// Calls `use_it` with the generator of this thread.
pub(super) fn with_random<R>(use_it: impl FnOnce(&mut Random) -> R) -> R {
    GENERATOR.with_borrow_mut(|(seeded_in, generator)| {
        let generation = fork::generation();
        if *seeded_in != generation {
            // Rng::new() hashes the thread, the time and an address. The process id separates parent and child even if both
            // seed in the same nanosecond.
            *generator = Random::with_seed(fastrand::Rng::new().u64(..) ^ u64::from(generation) << 32);
            *seeded_in = generation;
        }
        use_it(generator)
    })
}
