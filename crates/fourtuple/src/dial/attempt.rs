use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Connect};

use super::dialer::Dialer;
use super::error::DialError;
use super::random;
use super::report::DialReport;
use super::strategy::{Step, Strategy};
use crate::capabilities::LocalPortRange;
use crate::ports::PortRange;

/// Ports that the book may name before the strategy takes over: a second one, for the first may be somebody else's.
const HINTS: u32 = 2;

/// One dial on its way: which ports were tried, and what to do next.
///
/// [`Dialer::prepare`] begins one for callers that connect by themselves.
#[derive(Debug)]
pub struct Attempt<'a> {
    dialer: &'a Dialer,
    /// Page of the book, and the source address if one is set.
    page: usize,
    source: Option<IpAddr>,
    /// The port that the book named, as long as it is not known to be in use.
    named: Option<u16>,
    hints_left: u32,
    /// Steps of the strategy that were taken.
    steps: u32,
    strategy: Strategy,
    step: Step,
    /// The options of the current socket: whether the source is bound, and the window.
    source_bound: bool,
    window: Option<PortRange>,
    attempts: u32,
    connect: Duration,
    handshake: Duration,
}

/// What a socket must be given before connect(): for callers that make their system calls in a way of their own, such as
/// io_uring on direct descriptors. See [`Dialer::begin`](super::Dialer::begin).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Address to bind. With port 0 after IP_BIND_ADDRESS_NO_PORT, so that connect() finds the port; with another after
    /// SO_REUSEADDR.
    pub source: Option<SocketAddr>,
    /// IP_LOCAL_PORT_RANGE to set.
    pub window: Option<PortRange>,
}

/// On what to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Call connect() again on the same socket; its options are set anew.
    SameSocket,
    /// Open a fresh socket and give it to [`Attempt::renew`]: a port that was bound by number stays bound.
    FreshSocket,
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
            source_bound: false,
            window: None,
            attempts: 0,
            connect: Duration::ZERO,
            handshake: Duration::ZERO,
        };
        if let Some(book) = dialer.book() {
            attempt.page = book.roomiest();
            attempt.source = book.source(attempt.page);
            if dialer.choice.found == Some(LocalPortRange::Absent) && !book.past_half(attempt.page) {
                // Without the option the book can only bind by number, which spoils the port for all others; as long
                // as half of the ports are free the kernel's search is as quick and spoils nothing.
                attempt.hints_left = 0;
                attempt.strategy = Strategy::KernelDefault;
            }
        }
        attempt
    }

    /// Makes the first socket ready.
    pub(super) fn first(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.set_device(socket)?;
        self.ready(socket)
    }

    fn set_device(&self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        match &self.dialer.device {
            Some(device) => {
                self.dialer.call("setsockopt SO_BINDTODEVICE", option::set_device(socket, device))
            }
            None => Ok(()),
        }
    }

    /// Chooses a port or a window and sets it on `socket`.
    fn ready(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        match self.next_step() {
            Some(step) => {
                self.step = step;
                self.apply(socket)
            }
            None => Err(self.exhausted()),
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
        let mut book = self.dialer.book()?;
        if book.room(self.page) == 0 {
            book.forget(self.page);
        }
        random::with(|random| book.take(self.page, random))
    }

    /// Sets the step on `socket`, binding by number until a port can be bound.
    fn apply(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        loop {
            match self.step {
                Step::Search => {
                    debug_assert!(self.window.is_none(), "no strategy goes back from a window to a search");
                    return self.bind_source(socket);
                }
                Step::Window(window) => {
                    if self.window != Some(window) {
                        let set = option::set_local_port_range(socket, window.low(), window.high());
                        match self.dialer.call("setsockopt IP_LOCAL_PORT_RANGE", set)? {
                            Answer::Done => self.window = Some(window),
                            Answer::Absent => return Err(self.not_supported("IP_LOCAL_PORT_RANGE")),
                        }
                    }
                    return self.bind_source(socket);
                }
                Step::Bind(port) => {
                    self.dialer.call("setsockopt SO_REUSEADDR", option::set_reuse_address(socket, true))?;
                    let local = self.local(port);
                    let begun = Instant::now();
                    let bound = socket::bind(socket, local);
                    self.connect += begun.elapsed();
                    let Err(error) = bound else { return Ok(()) };
                    match error.kind() {
                        // A socket that does not share the port; the same descriptor can try another.
                        io::ErrorKind::AddrInUse => {
                            self.attempts += 1;
                            self.step = self.step_after_conflict(local)?;
                        }
                        io::ErrorKind::AddrNotAvailable => return Err(DialError::SourceNotLocal(local.ip())),
                        _ => return Err(DialError::Call { call: "bind", address: local, error }),
                    }
                }
            }
        }
    }

    /// Sets the source address and leaves the port to connect(), which alone may give one port to several destinations.
    fn bind_source(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        let Some(source) = self.source else { return Ok(()) };
        if self.source_bound {
            return Ok(());
        }
        let set = option::set_bind_address_no_port(socket);
        if self.dialer.call("setsockopt IP_BIND_ADDRESS_NO_PORT", set)? == Answer::Absent {
            return Err(self.not_supported("IP_BIND_ADDRESS_NO_PORT"));
        }
        let local = SocketAddr::new(source, 0);
        socket::bind(socket, local).map_err(|error| match error.kind() {
            io::ErrorKind::AddrNotAvailable => DialError::SourceNotLocal(source),
            io::ErrorKind::AddrInUse => self.exhausted(),
            _ => DialError::Call { call: "bind", address: local, error },
        })?;
        self.source_bound = true;
        Ok(())
    }

    /// connect(), with its time added up.
    pub(super) fn connect(&mut self, socket: BorrowedFd<'_>) -> io::Result<Connect> {
        let begun = Instant::now();
        let result = socket::connect(socket, self.dialer.destination);
        self.connect += begun.elapsed();
        result
    }

    /// Takes the next step without a socket; see [`Dialer::begin`](super::Dialer::begin).
    pub(super) fn want(&mut self) -> Result<Wanted, DialError> {
        self.step = self.next_step().ok_or_else(|| self.exhausted())?;
        Ok(match self.step {
            Step::Search => {
                Wanted { source: self.source.map(|source| SocketAddr::new(source, 0)), window: None }
            }
            Step::Window(window) => {
                Wanted { source: self.source.map(|source| SocketAddr::new(source, 0)), window: Some(window) }
            }
            Step::Bind(port) => Wanted { source: Some(self.local(port)), window: None },
        })
    }

    /// Says what the next socket must be given after one, made as [`Wanted`] said, found its port taken: EADDRNOTAVAIL of
    /// connect(), EADDRINUSE of bind().
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`], or [`DialError::TupleBusy`] for a fixed port.
    pub fn taken(&mut self) -> Result<Wanted, DialError> {
        self.attempts += 1;
        self.named = None;
        self.want().map_err(|error| match (self.dialer.source_port, self.step) {
            (Some(_), Step::Bind(port)) => {
                DialError::TupleBusy { local: self.local(port), destination: self.dialer.destination }
            }
            _ => error,
        })
    }

    /// Takes leave of a dial that was made as [`Wanted`] said and has succeeded, without asking the kernel for its port: what
    /// to give to [`Dialer::release`] when the connection is closed. Port 0 stands for one that the kernel chose.
    pub fn keep(mut self) -> SocketAddr {
        match (self.named.take(), self.step) {
            (Some(port), _) | (None, Step::Bind(port)) => self.local(port),
            _ => {
                if let Some(mut book) = self.dialer.book() {
                    book.note_unknown(self.page);
                }
                self.local(0)
            }
        }
    }

    /// Takes note of the time that the caller spent in its own connect().
    pub fn add_connect(&mut self, time: Duration) {
        self.connect += time;
    }

    /// Takes note of the time that the caller waited for the handshake.
    pub fn add_handshake(&mut self, time: Duration) {
        self.handshake += time;
    }

    /// Says what to do after connect() answered `error` (not EINPROGRESS, which is no failure).
    ///
    /// # Errors
    ///
    /// The dial has failed: for good, or for want of ports.
    pub fn failed(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<Retry, DialError> {
        if error.kind() != io::ErrorKind::AddrNotAvailable {
            self.forget_named();
            return Err(self.dialer.connect_error(error, self.connect + self.handshake));
        }
        self.attempts += 1;
        match self.step {
            Step::Bind(port) => {
                self.step = self.step_after_conflict(self.local(port))?;
                Ok(Retry::FreshSocket)
            }
            Step::Search | Step::Window(_) => {
                // A port that the book named is another's: it stays noted as taken.
                self.named = None;
                self.ready(socket)?;
                Ok(Retry::SameSocket)
            }
        }
    }

    /// Makes a fresh socket ready, after [`Retry::FreshSocket`].
    pub fn renew(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.source_bound = false;
        self.window = None;
        self.set_device(socket)?;
        self.apply(socket)
    }

    fn step_after_conflict(&mut self, local: SocketAddr) -> Result<Step, DialError> {
        self.named = None;
        self.next_step().ok_or_else(|| match self.dialer.source_port {
            Some(_) => DialError::TupleBusy { local, destination: self.dialer.destination },
            None => self.exhausted(),
        })
    }

    /// The connection is there (or on its way, for a caller that waits by itself): notes its port and reports.
    ///
    /// # Errors
    ///
    /// [`DialError::SelfConnect`], or a socket that has no address.
    pub fn finish(mut self, socket: BorrowedFd<'_>) -> Result<DialReport, DialError> {
        let source = self.dialer.call("getsockname", socket::local_address(socket))?;
        if source.port() == self.dialer.destination.port() && source.ip() == self.dialer.destination.ip() {
            // Nobody is on the other side to wait for: no TIME_WAIT is owed to anybody.
            self.dialer.call("setsockopt SO_LINGER", option::set_reset_on_close(socket))?;
            self.forget_named();
            return Err(DialError::SelfConnect(self.dialer.destination));
        }
        if self.named != Some(source.port())
            && let Some(mut book) = self.dialer.book()
        {
            book.note(self.page, source.port());
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

    /// Gives the port that the book named back to it.
    fn forget_named(&mut self) {
        if let Some(port) = self.named.take()
            && let Some(mut book) = self.dialer.book()
        {
            book.free(self.page, port);
        }
    }

    fn local(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.source.unwrap_or_else(|| self.dialer.unspecified()), port)
    }

    fn exhausted(&self) -> DialError {
        DialError::PortsExhausted {
            source_address: self.source,
            destination: self.dialer.destination,
            census: self.dialer.census(self.source),
        }
    }

    fn not_supported(&self, option: &'static str) -> DialError {
        DialError::NotSupported { option, strategy: self.strategy.to_string() }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.forget_named();
    }
}
