use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_syscalls::sock_diag::{self, state};
use fourtuple_syscalls::socket::{self, Connect, Progress, Transport};

use crate::dial::attempt::{Attempt, Retry};
use crate::dial::builder::{DialerBuilder, SourcePool, StrategyChoice};
use crate::dial::ledger::PortLedger;
use crate::dial::strategy::Strategy;
use crate::dial::{Counter, DialError};
use crate::ports::{PortRange, PortSet};

/// Opens TCP connections to one destination.
///
/// Build one dialer per destination; threads may share it. [`Dialer::dial`] allocates no memory and makes only the system calls of
/// the connection.
///
/// ```
/// use std::net::TcpListener;
/// use std::time::Duration;
/// use fourtuple::dial::Dialer;
///
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let dialer = Dialer::builder(server.local_addr()?)
///     .sources("127.0.0.0/28".parse()?) // 14 source addresses
///     .timeout(Duration::from_secs(3))
///     .build()?;
/// println!("{} to {}", dialer.choice(), dialer.destination());
///
/// let (stream, report) = dialer.dial()?;
/// assert_eq!(report.source, stream.local_addr()?);
/// println!("{} attempts, {:?} in connect()", report.attempts, report.connect);
///
/// drop(server.accept()?); // the server closes first: the port is free at once
/// drop(stream);
/// dialer.release(report.source);
///
/// dialer.refresh()?; // after other programs opened many connections to the server
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Dialer {
    pub(super) destination: SocketAddr,
    pub(super) choice: StrategyChoice,
    pub(super) range: PortRange,
    pub(super) reserved: PortSet,
    pub(super) sources: SourcePool,
    pub(super) fixed_source: Option<IpAddr>,
    pub(super) source_port: Option<u16>,
    pub(super) device: Option<String>,
    pub(super) timeout: Option<Duration>,
    pub(super) ledger: Option<Mutex<PortLedger>>,
    /// `None` without a census: [`DialerBuilder::without_census`].
    pub(super) census: Option<Arc<Counter>>,
    /// Held by the task that waits for a census; other tasks of the dialer wait for it, and occupy no blocking thread meanwhile.
    #[cfg(feature = "tokio")]
    pub(super) census_task: tokio::sync::Mutex<()>,
}

impl Dialer {
    /// Returns the settings for a dialer to `destination`. An unspecified address stands for loopback, or for the only IPv4 source
    /// address if one is set, as in connect(2); an IPv4-mapped IPv6 address for its IPv4 address. [`Dialer::destination`] returns the
    /// address that is dialed.
    pub fn builder(destination: SocketAddr) -> DialerBuilder {
        DialerBuilder::new(destination)
    }

    /// Returns the strategy of this dialer, and how it was chosen.
    pub fn choice(&self) -> StrategyChoice {
        self.choice
    }

    /// Returns the destination.
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    /// Opens a connection and blocks until it is established.
    ///
    /// # Errors
    ///
    /// See [`DialError`]. The dialer retries only when a port is in use or a source of the pool fails. A refused or unanswered
    /// connection ends the dial.
    pub fn dial(&self) -> Result<(TcpStream, DialReport), DialError> {
        trace_end(self.destination, self.dial_blocking().map_err(|error| self.with_census(error)))
    }

    fn dial_blocking(&self) -> Result<(TcpStream, DialReport), DialError> {
        let deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (socket, mut attempt, connected) = self.start(self.timeout.is_some())?;
        if !connected {
            self.wait(&socket, &mut attempt, deadline).inspect_err(|error| attempt.lost(error))?;
        }
        if self.timeout.is_some() {
            self.call("ioctl FIONBIO", socket::set_nonblocking(socket.as_fd(), false))?;
        }
        let report = attempt.finish(socket.as_fd())?;
        Ok((TcpStream::from(socket), report))
    }

    /// Waits for the handshake, at most until `deadline`.
    fn wait(
        &self,
        socket: &OwnedFd,
        attempt: &mut Attempt<'_>,
        deadline: Option<Instant>,
    ) -> Result<(), DialError> {
        let progress = loop {
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match socket::wait_connected(socket.as_fd(), rest) {
                // After a signal the loop waits for the rest of the time.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break attempt.called("ppoll", result)?,
            }
        };
        attempt.end_handshake();
        match progress {
            Progress::Connected => Ok(()),
            Progress::Failed => {
                match attempt.called("getsockopt SO_ERROR", option::take_error(socket.as_fd()))? {
                    Some(error) => Err(attempt.connect_error(error)),
                    None => Ok(()),
                }
            }
            Progress::Pending => Err(attempt.timed_out()),
        }
    }

    /// Begins a dial on a socket of the caller, blocking or non-blocking, for the caller's own connect(): [`Dialer::begin`] and
    /// [`Attempt::prepare`].
    ///
    /// The socket keeps its other options, such as IP_TRANSPARENT, IP_FREEBIND, TCP_FASTOPEN_CONNECT and SO_MARK. For an IPv4
    /// destination it may be an IPv6 socket, which the caller connects to the IPv4-mapped address. The caller's loop:
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    /// # use fourtuple::dial::{Dialer, Retry};
    /// # fn open() -> std::os::fd::OwnedFd { unreachable!("yours") }
    /// # fn connect(_: std::os::fd::BorrowedFd<'_>, _: std::net::SocketAddr) -> std::io::Result<()> { unreachable!("yours") }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let dialer = Dialer::builder("127.0.0.1:8080".parse()?).build()?;
    /// let mut socket = open();
    /// let mut attempt = dialer.prepare(socket.as_fd())?;
    /// while let Err(error) = connect(socket.as_fd(), dialer.destination()) {
    ///     // EINPROGRESS is not a failure: wait until the socket is writable.
    ///     if attempt.connect_failed(error).map_err(|error| dialer.with_census(error))? == Retry::FreshSocket {
    ///         socket = open();
    ///     }
    ///     attempt.prepare(socket.as_fd())?;
    /// }
    /// let report = attempt.finish(socket.as_fd())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`DialError::NotSupported`] if the kernel lacks a socket option that the strategy needs; [`DialError::SourceNotLocal`],
    /// [`DialError::PortsExhausted`] or [`DialError::TupleBusy`] if bind() fails for every source; [`DialError::Call`] for other failures
    /// of a system call.
    pub fn prepare(&self, socket: BorrowedFd<'_>) -> Result<Attempt<'_>, DialError> {
        let mut attempt = self.begin()?;
        attempt.prepare(socket)?;
        Ok(attempt)
    }

    /// Begins a dial without a socket, for callers that make all system calls themselves, for example through io_uring: the options and
    /// the bind() of [`Attempt::request`], then connect() to [`Dialer::destination`]. [`Attempt::keep`] ends it without a getsockname().
    /// Dropping the attempt returns the port to the ledger.
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`] if all ports of the strategy are reserved.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use fourtuple::dial::{ConnectRequest, Dialer};
    /// # use std::{io, net::SocketAddr, os::fd::OwnedFd};
    /// /// The call that failed.
    /// enum Failed {
    ///     Bind(io::Error),
    ///     Connect(io::Error),
    /// }
    ///
    /// /// socket(), the options and the bind() of the request, and connect().
    /// fn connect(request: ConnectRequest, to: SocketAddr) -> Result<OwnedFd, Failed> {
    /// #   let _ = (request, to); unreachable!("yours")
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let dialer = Dialer::builder("192.0.2.1:443".parse()?).build()?;
    /// let mut attempt = dialer.begin()?;
    /// let socket = loop {
    ///     match connect(attempt.request(), dialer.destination()) {
    ///         Ok(socket) => break socket,
    ///         Err(Failed::Bind(error)) => attempt.bind_failed(error)?,
    ///         Err(Failed::Connect(error)) => _ = attempt.connect_failed(error)?, // always a fresh socket
    ///     }
    /// };
    /// let source = attempt.keep();
    ///
    /// drop(socket); // after the server has closed first
    /// dialer.release(source);
    /// # Ok(()) }
    /// ```
    pub fn begin(&self) -> Result<Attempt<'_>, DialError> {
        Attempt::begin(self, false)
    }

    /// Counts the sockets that hold the ports, if `error` is [`DialError::PortsExhausted`] of an [`Attempt`], and adds this census and
    /// the source that it counts. Returns other errors unchanged, and all errors of a dialer [without](DialerBuilder::without_census) a
    /// census. [`Dialer::dial`] does so by itself.
    ///
    /// A census takes about 1.2 us for each socket on the destination. A dialer takes at most one per second.
    ///
    /// Example: [`Dialer::prepare`].
    pub fn with_census(&self, error: DialError) -> DialError {
        match &self.census {
            Some(counter) => counter.counted(error),
            None => error,
        }
    }

    /// Marks the port of a closed connection as free in the ledger.
    ///
    /// [`GuardedStream`](super::GuardedStream) and the streams of a connector call it by themselves.
    ///
    /// The call is optional: without it the dialer uses other ports first, and clears a page of the ledger when the page is full.
    /// Call it for connections that the peer closed first. A connection that this host closed first keeps its port in TIME_WAIT for
    /// 60 s.
    pub fn release(&self, source: SocketAddr) {
        if let Some(mut ledger) = self.ledger()
            && let Some(page) = ledger.page_of(source.ip().to_canonical())
        {
            match source.port() {
                // `Attempt::keep` returns port 0 if the kernel chose the port.
                0 => ledger.free_unknown(page),
                port => ledger.free(page, port),
            }
        }
    }

    /// Reads the ports in use towards the destination, by all processes, from the kernel (sock_diag): about 1.2 us for each socket.
    /// [`DialerBuilder::build`] does so once.
    ///
    /// # Errors
    ///
    /// The errors of sock_diag(7); ENOENT: the kernel lacks inet_diag or tcp_diag. The ledger is then unchanged.
    pub fn refresh(&self) -> io::Result<()> {
        let Some(ledger) = &self.ledger else {
            return Ok(());
        };
        let filter = sock_diag::Filter {
            transport: Transport::Tcp,
            source: self.fixed_source,
            source_port: None,
            destination: self.destination,
        };
        // Filled before it replaces the old ledger: no dial waits for the dump.
        let mut fresh = PortLedger::new(self.range, self.reserved.clone(), self.sources.addresses());
        sock_diag::each(&filter, |entry| {
            if let Some(page) = fresh.page_of(entry.local.ip()) {
                fresh.note(page, entry.local.port());
            }
        })?;
        fresh.set_read();
        let old = mem::replace(&mut *ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner()), fresh);
        drop(old);
        Ok(())
    }

    /// Dials up to the handshake: opens a socket, or several if ports are bound by number, and calls connect() until a port is
    /// found. The flag says whether the connection is established.
    pub(super) fn start(&self, nonblocking: bool) -> Result<(OwnedFd, Attempt<'_>, bool), DialError> {
        let mut socket = self.open(nonblocking)?;
        let mut attempt = Attempt::begin(self, nonblocking)?;
        loop {
            attempt.set_up(socket.as_fd())?;
            let error = match attempt.connect(socket.as_fd()) {
                Ok(progress) => return Ok((socket, attempt, progress == Connect::Done)),
                Err(error) => error,
            };
            if attempt.connect_failed(error)? == Retry::FreshSocket {
                socket = self.open(nonblocking)?;
            }
        }
    }

    pub(super) fn open(&self, nonblocking: bool) -> Result<OwnedFd, DialError> {
        self.call("socket", socket::open(Transport::Tcp, self.destination, nonblocking))
    }

    pub(super) fn ledger(&self) -> Option<MutexGuard<'_, PortLedger>> {
        // The ledger is a hint: entries that a panic left incomplete do no harm.
        self.ledger.as_ref().map(|ledger| ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Returns a source address by its number in the pool; `None`: the kernel chooses.
    pub(super) fn source(&self, number: usize) -> Option<IpAddr> {
        self.sources.addresses().get(number).copied()
    }

    pub(super) fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        result.map_err(|error| DialError::Call {
            call,
            address: self.destination,
            source_address: self.fixed_source,
            error,
        })
    }

    /// Returns the wildcard address of the destination's family.
    pub(super) fn unspecified(&self) -> IpAddr {
        match self.destination {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }
}

/// The source port of a connection, and the time it took to get it.
///
/// Example: [`Dialer`](super::Dialer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DialReport {
    /// The strategy of the dial; for [`Strategy::Auto`] the strategy that the dialer chose, or
    /// [`Strategy::KernelDefault`] while few ports are in use. For a UDP socket, what its [`Sharing`](super::Sharing) does:
    /// [`Strategy::KernelDefault`] if it is exclusive, [`Strategy::SELECT_TEST_REPEAT`] if it is shared.
    pub strategy: Strategy,
    /// Source address and port.
    pub source: SocketAddr,
    /// Calls of bind() or connect() to get a port, the successful call included: at least 1.
    pub attempts: u32,
    /// Time in connect(), and in bind() to a port, over all attempts. In a blocking dial without a timeout this includes the
    /// handshake.
    pub connect: Duration,
    /// Time waited for the handshake after a non-blocking connect().
    pub handshake: Duration,
}

/// Reports the end of a dial as an event of level DEBUG, for the crate tracing.
pub(super) fn trace_end<T>(
    destination: SocketAddr,
    result: Result<(T, DialReport), DialError>,
) -> Result<(T, DialReport), DialError> {
    #[cfg(feature = "tracing")]
    match &result {
        Ok((_, report)) => tracing::debug!(
            %destination,
            source = %report.source,
            attempts = report.attempts,
            strategy = %report.strategy,
            connect_ns = u64::try_from(report.connect.as_nanos()).unwrap_or(u64::MAX),
            handshake_ns = u64::try_from(report.handshake.as_nanos()).unwrap_or(u64::MAX),
            "connected"
        ),
        Err(error) => tracing::debug!(%destination, %error, "dial failed"),
    }
    #[cfg(not(feature = "tracing"))]
    let _ = destination;
    result
}

/// A blocking connection that releases its port: a [`TcpStream`] that, when it is dropped after the peer closed or reset the
/// connection first, marks its port as free in the ledger of its dialer ([`Dialer::release`]).
///
/// `D` is a `&Dialer` or an `Arc<Dialer>`. When the stream is dropped, it reads the state of the connection (TCP_INFO), from which it
/// knows which side closed first.
///
/// ```
/// use std::io::Write;
/// use std::net::{Shutdown, TcpListener, TcpStream};
/// use fourtuple::dial::{Dialer, GuardedStream};
///
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let dialer = Dialer::builder(server.local_addr()?).build()?;
/// let (mut stream, report) = GuardedStream::dial(&dialer)?;
/// stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
/// println!("from {}", report.source);
/// drop(server.accept()?); // the server closes first
/// drop(stream); // marks the port as free
///
/// let (stream, _) = GuardedStream::dial(&dialer)?;
/// stream.shutdown(Shutdown::Write)?; // this side closes first: the port stays in TIME_WAIT for 60 s
/// let stream: TcpStream = stream.into_inner();
/// # drop(stream);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GuardedStream<D: Deref<Target = Dialer>> {
    /// `None` only while the stream is dropped.
    stream: Option<TcpStream>,
    dialer: D,
    source: SocketAddr,
    /// Whether this side has closed its direction first. A later end of the connection then leaves a TIME_WAIT socket.
    closed_first: AtomicBool,
}

impl<D: Deref<Target = Dialer>> GuardedStream<D> {
    /// Opens a connection and blocks until it is established.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial`].
    pub fn dial(dialer: D) -> Result<(GuardedStream<D>, DialReport), DialError> {
        let (stream, report) = dialer.dial()?;
        let closed_first = AtomicBool::new(false);
        Ok((GuardedStream { stream: Some(stream), dialer, source: report.source, closed_first }, report))
    }

    /// Calls [`TcpStream::shutdown`], and notes whether this side closed first.
    ///
    /// # Errors
    ///
    /// The errors of [`TcpStream::shutdown`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Read && self.state() == Some(state::ESTABLISHED) {
            self.closed_first.store(true, Ordering::Relaxed);
        }
        self.deref().shutdown(how)
    }

    /// Returns the socket. The caller must call [`Dialer::release`], if at all.
    pub fn into_inner(mut self) -> TcpStream {
        self.stream.take().expect("only the drop takes the stream")
    }

    fn state(&self) -> Option<u8> {
        option::tcp_state(self.stream.as_ref()?.as_fd()).ok()
    }
}

/// Does the same as [`GuardedStream::into_inner`].
impl<D: Deref<Target = Dialer>> From<GuardedStream<D>> for TcpStream {
    fn from(stream: GuardedStream<D>) -> TcpStream {
        stream.into_inner()
    }
}

impl<D: Deref<Target = Dialer>> Drop for GuardedStream<D> {
    fn drop(&mut self) {
        let Some(state) = self.state() else { return };
        // After a reset, and at the end of a connection that the peer closed first, the state is CLOSE. So it is in TIME_WAIT.
        let by_peer = match state {
            state::CLOSE_WAIT | state::LAST_ACK => true,
            state::CLOSE => !self.closed_first.load(Ordering::Relaxed),
            _ => false,
        };
        // The socket is closed before another dial can take the port.
        drop(self.stream.take());
        if by_peer {
            self.dialer.release(self.source);
        }
    }
}

impl<D: Deref<Target = Dialer>> Deref for GuardedStream<D> {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        self.stream.as_ref().expect("only the drop takes the stream")
    }
}

impl<D: Deref<Target = Dialer>> DerefMut for GuardedStream<D> {
    fn deref_mut(&mut self) -> &mut TcpStream {
        self.stream.as_mut().expect("only the drop takes the stream")
    }
}
