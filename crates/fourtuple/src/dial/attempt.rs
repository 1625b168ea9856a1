use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Connect};

use crate::capabilities::LocalPortRange;
use crate::dial::dialer::Dialer;
use crate::dial::error::{DialError, Uncounted};
use crate::dial::ledger::{Failure, PortLedger};
use crate::dial::random;
use crate::dial::report::DialReport;
use crate::dial::strategy::{Step, Strategy};
use crate::ports::PortRange;

/// Ports that one dial takes from the ledger before it follows the strategy: two, because another process may hold the first.
const HINTS: u32 = 2;

/// Sources that one dial tries before it fails. The next dial starts with sources that have not failed.
const MOST_TRIED: u32 = 16;

/// Limit between two kinds of connect() errors. An error before it comes from a route or a rule of this host, so that another
/// source may succeed. A later error may come from the network, and another source would take as long again.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Largest window, in ports, that connect() may search on a runtime's thread: a longer search can take most of a millisecond.
const LONG_SEARCH: u32 = 1024;

/// A dial in progress: the ports that it has tried, and its next step.
///
/// [`Dialer::prepare`] creates an attempt for callers that call connect() themselves.
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
    /// Steps of the strategy so far.
    steps: u32,
    strategy: Strategy,
    step: Step,
    /// Start of the dial; set only if a source was backed off at that time.
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
    /// End of the last connect() of the dialer's own.
    waiting: Option<Instant>,
}

/// The address and options that a socket needs before connect(), for callers that make system calls through io_uring or another
/// interface of their own. See [`Dialer::begin`](super::Dialer::begin).
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
    pub fn from_source(source: Option<IpAddr>) -> ConnectRequest {
        ConnectRequest { source: source.map(|source| SocketAddr::new(source, 0)), window: None }
    }
}

/// The socket to use for the next connect().
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    pub(super) fn begin(dialer: &'a Dialer) -> Self {
        let mut attempt = Attempt {
            dialer,
            page: 0,
            source: dialer.fixed_source,
            named: None,
            hints_left: if dialer.choice.steered { HINTS } else { 0 },
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
        };
        if let Some(mut ledger) = dialer.ledger() {
            let begun = &mut attempt.begun;
            let page = ledger.highest(|| *begun.insert(Instant::now()));
            attempt.use_page(&ledger, page);
        }
        attempt
    }

    /// Continues the dial from the source of `page`.
    fn use_page(&mut self, ledger: &PortLedger, page: usize) {
        self.page = page;
        self.source = ledger.source(page);
        self.steps = 0;
        self.hints_left = if self.dialer.choice.steered { HINTS } else { 0 };
        self.strategy = self.dialer.choice.strategy;
        if self.dialer.choice.found == Some(LocalPortRange::Absent) && !ledger.past_half(page) {
            // Without IP_LOCAL_PORT_RANGE a port from the ledger must be bound by number, and no automatic choice takes such
            // a port. While half of the ports are free, the kernel's own search is as fast and has no such effect.
            self.hints_left = 0;
            self.strategy = Strategy::KernelDefault;
        }
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
        if !ledger.is_pool() {
            drop(ledger);
            return Err(self.give_up(obstacle));
        }
        let now = Instant::now();
        let was_backed_off = ledger.is_backed_off(self.page);
        ledger.fail(self.page, why, now);
        self.failed_sources += 1;
        // A search of all ports takes milliseconds, so a dial searches at most one source that was exhausted a moment ago.
        let is_enough = why == Failure::Exhausted && was_backed_off;
        let next = match self.begun {
            _ if is_enough || self.failed_sources >= MOST_TRIED => None,
            // No source was backed off when the dial began: each source that is backed off now has failed since.
            None => ledger.another(now, now).filter(|page| !ledger.is_backed_off(*page)),
            Some(begun) => ledger.another(begun, now),
        };
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

    /// Sets the options of the first socket.
    pub(super) fn first(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.set_device(socket)?;
        self.step = match self.next_step() {
            Some(step) => step,
            None => self.try_another_source(StepError::Ports)?,
        };
        self.apply(socket)
    }

    fn set_device(&self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        match &self.dialer.device {
            Some(device) => {
                self.dialer.call("setsockopt SO_BINDTODEVICE", option::set_device(socket, device))
            }
            None => Ok(()),
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
        let steps = self.steps;
        self.steps += 1;
        random::with(|random| self.strategy.step(steps, self.dialer.range, random))
    }

    fn name_port(&mut self) -> Option<u16> {
        let mut ledger = self.dialer.ledger()?;
        if ledger.room(self.page) == 0 {
            ledger.forget(self.page);
        }
        random::with(|random| ledger.take(self.page, random))
    }

    /// Applies the step to `socket`. If bind() to one source fails, the same socket is bound to another source.
    fn apply(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        while let Err(obstacle) = self.set(socket) {
            self.step = self.try_another_source(obstacle)?;
        }
        Ok(())
    }

    /// Applies the step to `socket`. A step that binds a port is repeated with other ports until bind() succeeds.
    fn set(&mut self, socket: BorrowedFd<'_>) -> Result<(), StepError> {
        loop {
            match self.step {
                Step::Search => {
                    debug_assert!(self.window.is_none(), "no strategy goes back from a window to a search");
                    return self.bind_source(socket);
                }
                Step::Window(window) => {
                    if self.window != Some(window) {
                        let set = option::set_local_port_range(socket, window.low(), window.high());
                        match self.call("setsockopt IP_LOCAL_PORT_RANGE", set)? {
                            Answer::Done => self.window = Some(window),
                            Answer::Absent => return Err(self.not_supported("IP_LOCAL_PORT_RANGE")),
                        }
                    }
                    return self.bind_source(socket);
                }
                Step::Bind(port) => {
                    self.call("setsockopt SO_REUSEADDR", option::set_reuse_address(socket, true))?;
                    let local = self.local(port);
                    let begun = Instant::now();
                    let bound = socket::bind(socket, local);
                    self.connect += begun.elapsed();
                    let Err(error) = bound else { return Ok(()) };
                    match error.kind() {
                        // A socket without SO_REUSEADDR holds the port. The same descriptor can be bound to another port.
                        io::ErrorKind::AddrInUse => {
                            self.attempts += 1;
                            self.step = self.step_after_conflict(local)?;
                        }
                        _ => return Err(self.bind_failed(local, error)),
                    }
                }
            }
        }
    }

    /// Binds the source address and leaves the port to connect(): only connect() can share one port among destinations.
    fn bind_source(&mut self, socket: BorrowedFd<'_>) -> Result<(), StepError> {
        let Some(source) = self.source else { return Ok(()) };
        if self.source_bound {
            return Ok(());
        }
        let set = option::set_bind_address_no_port(socket);
        if self.call("setsockopt IP_BIND_ADDRESS_NO_PORT", set)? == Answer::Absent {
            return Err(self.not_supported("IP_BIND_ADDRESS_NO_PORT"));
        }
        let local = SocketAddr::new(source, 0);
        socket::bind(socket, local).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => StepError::Ports,
            _ => self.bind_failed(local, error),
        })?;
        self.source_bound = true;
        Ok(())
    }

    fn bind_failed(&self, local: SocketAddr, error: io::Error) -> StepError {
        StepError::Source(match error.kind() {
            io::ErrorKind::AddrNotAvailable => DialError::SourceNotLocal { source_address: local.ip() },
            _ => DialError::Call { call: "bind", address: local, source_address: self.source, error },
        })
    }

    fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, StepError> {
        self.called(call, result).map_err(StepError::Other)
    }

    /// Calls connect() and adds its duration to the report.
    pub(super) fn connect(&mut self, socket: BorrowedFd<'_>) -> io::Result<Connect> {
        let begun = Instant::now();
        let result = socket::connect(socket, self.dialer.destination);
        self.end_connect(begun, Instant::now());
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
            Step::Search => true,
            Step::Window(window) => window.len() > LONG_SEARCH,
            Step::Bind(_) => false,
        }
    }

    /// Chooses the next step without a socket; see [`Dialer::begin`](super::Dialer::begin).
    pub(super) fn next_request(&mut self) -> Result<ConnectRequest, DialError> {
        self.step = match self.next_step() {
            Some(step) => step,
            None => self.try_another_source(StepError::Ports)?,
        };
        Ok(self.request())
    }

    fn request(&self) -> ConnectRequest {
        match self.step {
            Step::Search => {
                ConnectRequest { source: self.source.map(|source| SocketAddr::new(source, 0)), window: None }
            }
            Step::Window(window) => ConnectRequest {
                source: self.source.map(|source| SocketAddr::new(source, 0)),
                window: Some(window),
            },
            Step::Bind(port) => ConnectRequest { source: Some(self.local(port)), window: None },
        }
    }

    /// Returns the request for the next socket after the port of the last [`ConnectRequest`] was in use: connect() failed with
    /// EADDRNOTAVAIL, or bind() with EADDRINUSE.
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`], or [`DialError::TupleBusy`] for a fixed port.
    pub fn taken(&mut self) -> Result<ConnectRequest, DialError> {
        self.attempts += 1;
        self.named = None;
        self.next_request().map_err(|error| match (self.dialer.source_port, self.step) {
            (Some(_), Step::Bind(port)) => {
                DialError::TupleBusy { local: self.local(port), destination: self.dialer.destination }
            }
            _ => self.dialer.counted(error),
        })
    }

    /// Returns the request for the next socket after the source of the last [`ConnectRequest`] could not be used: bind() failed with
    /// an error other than EADDRINUSE, or connect() failed at once with EACCES, EPERM, EINVAL, ENETUNREACH, EHOSTUNREACH or
    /// ENETDOWN. The dialer backs off the source and continues with another source of the pool.
    ///
    /// # Errors
    ///
    /// [`DialError::Call`] with the source, if no other source is worth trying.
    pub fn source_failed(
        &mut self,
        call: &'static str,
        error: io::Error,
    ) -> Result<ConnectRequest, DialError> {
        let address = match call {
            "bind" => self.request().source.unwrap_or(self.dialer.destination),
            _ => self.dialer.destination,
        };
        let failed = match (call, error.kind()) {
            ("bind", _) => self.bind_failed(address, error),
            _ => StepError::Source(DialError::Call { call, address, source_address: self.source, error }),
        };
        self.step = self.try_another_source(failed).map_err(|error| self.dialer.counted(error))?;
        Ok(self.request())
    }

    /// Ends a successful dial that was made with a [`ConnectRequest`], without a getsockname(). Returns the address to pass to
    /// [`Dialer::release`] when the connection is closed. Port 0 stands for a port that the kernel chose.
    pub fn keep(mut self) -> SocketAddr {
        match (self.named.take(), self.step) {
            (Some(port), _) | (None, Step::Bind(port)) => self.local(port),
            _ => {
                if let Some(mut ledger) = self.dialer.ledger() {
                    ledger.note_unknown(self.page);
                }
                self.local(0)
            }
        }
    }

    /// Records a failed handshake. A source without an answer is backed off: it has the most free ports and would otherwise be the
    /// first choice of the next dial. A destination that refuses the connection was reached, so its source works.
    pub(super) fn lost(&mut self, error: &DialError) {
        let is_reached = matches!(error, DialError::Refused { .. });
        self.forget_named();
        if !is_reached && let Some(mut ledger) = self.dialer.ledger() {
            ledger.fail(self.page, Failure::Unusable, Instant::now());
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

    /// Chooses the next step after connect() failed with `error`. EINPROGRESS is no failure and must not be passed.
    ///
    /// # Errors
    ///
    /// The error of the dial, if there is no next step.
    pub fn failed(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<Retry, DialError> {
        self.retry(socket, error).map_err(|error| self.dialer.counted(error))
    }

    /// Does the same as [`Attempt::failed`] without a census.
    pub(super) fn retry(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<Retry, DialError> {
        if error.kind() != io::ErrorKind::AddrNotAvailable {
            self.forget_named();
            let is_of_source = is_of_source(&error) && self.connect < AT_ONCE;
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
    pub fn renew(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.renew_uncounted(socket).map_err(|error| self.dialer.counted(error))
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
        let source = self.dialer.call("getsockname", socket::local_address(socket))?;
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
        SocketAddr::new(self.source.unwrap_or_else(|| self.dialer.unspecified()), port)
    }

    /// Returns the error for exhausted ports, without a census: [`Dialer::counted`] adds it.
    fn exhausted(&self, source_address: Option<IpAddr>) -> DialError {
        DialError::PortsExhausted {
            source_address,
            destination: self.dialer.destination,
            census: Err(Uncounted::NotAsked),
        }
    }

    fn not_supported(&self, option: &'static str) -> StepError {
        StepError::Other(DialError::NotSupported { option, strategy: self.strategy.to_string() })
    }
}

/// Returns whether the error may be caused by the source address: no route from it, a prohibiting route, a rule of a cgroup, a
/// device that is down, or a loopback source for a destination elsewhere.
fn is_of_source(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkDown
    )
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.forget_named();
    }
}
