use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_syscalls::sock_diag;
use fourtuple_syscalls::socket::{self, Connect, Progress, Transport};

use super::attempt::{Attempt, Retry};
use super::book::Book;
use super::census;
use super::error::{BuildError, Census, DialError};
use super::source::SourcePool;
use super::strategy::Strategy;
use crate::capabilities::{self, LocalPortRange};
use crate::ports::{PortRange, PortSet};

/// Opens TCP connections to one destination.
///
/// A dialer is built once per destination (and may be shared by threads); [`Dialer::dial`] then makes no allocation and
/// no system call beyond those of the connection itself.
///
/// ```no_run
/// use fourtuple::dial::{Dialer, SourcePool};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dialer = Dialer::to("127.0.0.1:8080".parse()?)
///     .sources("127.0.0.0/28".parse()?)
///     .timeout(std::time::Duration::from_secs(3))
///     .build()?;
/// let (stream, report) = dialer.dial()?;
/// println!("from {} after {} tries", report.source, report.attempts);
/// # drop(stream); Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Dialer {
    pub(super) destination: SocketAddr,
    pub(super) choice: Choice,
    pub(super) range: PortRange,
    pub(super) fixed_source: Option<IpAddr>,
    pub(super) source_port: Option<u16>,
    pub(super) device: Option<String>,
    timeout: Option<Duration>,
    book: Option<Mutex<Book>>,
    /// `None` where the ports are not to be counted.
    census: Option<Mutex<LastCensus>>,
}

/// When the ports were last counted, and with what result.
type LastCensus = Option<(Instant, Option<Census>)>;

/// What a dialer was found to do best here, or was told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The strategy for dials that the book does not help.
    pub strategy: Strategy,
    /// Whether free ports are named from the dialer's own book of the ports it holds.
    pub steered: bool,
    /// What IP_LOCAL_PORT_RANGE was found to be; `None` when nothing was probed, because the strategy was given.
    pub found: Option<LocalPortRange>,
}

impl fmt::Display for Choice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.strategy.fmt(formatter)?;
        if self.steered { write!(formatter, " steered by its own book") } else { Ok(()) }
    }
}

/// Settings of a [`Dialer`] to be.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    destination: SocketAddr,
    sources: SourcePool,
    strategy: Strategy,
    source_port: Option<u16>,
    device: Option<String>,
    timeout: Option<Duration>,
    census: bool,
}

impl Builder {
    /// Where connections come from; by default the kernel chooses by route.
    pub fn sources(mut self, sources: SourcePool) -> Self {
        self.sources = sources;
        self
    }

    /// How a source port is chosen; by default [`Strategy::Auto`].
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Dials from this very port instead of choosing one; the strategy is then not asked.
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }

    /// Dials through a network device or a VRF (SO_BINDTODEVICE).
    pub fn device(mut self, name: &str) -> Self {
        self.device = Some(name.to_owned());
        self
    }

    /// Gives up when a connection is not there after this long; by default when the kernel does (tcp_syn_retries, about
    /// 130 s).
    ///
    /// With a timeout connect() is made without blocking, so that [`DialReport::connect`] is the port search and the SYN
    /// alone; it costs two system calls more (ppoll, and setting the stream back to blocking).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Leaves it unsaid who holds the ports when they are exhausted: for callers that would rather fail at once than ask
    /// the kernel, which takes about 1.2 us per socket on the destination. It is asked once a second at most.
    pub fn without_census(mut self) -> Self {
        self.census = false;
        self
    }

    /// Checks the settings, probes the kernel where the strategy wants that, and reads what ports are in use already.
    pub fn build(self) -> Result<Dialer, BuildError> {
        let destination = self.destination;
        if destination.port() == 0 {
            return Err(BuildError::PortZero(destination));
        }
        if let Some(source_address) = self.sources.foreign_family(destination) {
            return Err(BuildError::Family { source_address, destination });
        }
        match &self.device {
            Some(name) if name.is_empty() || name.len() > 15 => {
                return Err(BuildError::Device(name.clone()));
            }
            _ => {}
        }
        let addresses = self.sources.addresses();
        if self.source_port.is_some() && (self.source_port == Some(0) || addresses.len() > 1) {
            return Err(BuildError::SourcePort);
        }
        let (choice, ports) = choose(self.strategy)?;
        let steered = choice.steered || addresses.len() > 1;
        let (range, reserved) = match ports {
            Some(ports) => ports,
            // These two draw ports themselves and must know where from; a pool must know how much room there is.
            None if steered
                || matches!(
                    choice.strategy,
                    Strategy::SelectTestRepeat { .. } | Strategy::RandomWindow { .. }
                ) =>
            {
                capabilities::local_ports().map_err(BuildError::Range)?
            }
            None => (PortRange::KERNEL_DEFAULT, PortSet::new()),
        };
        let dialer = Dialer {
            destination,
            choice,
            range,
            fixed_source: match addresses {
                [only] => Some(*only),
                _ => None,
            },
            source_port: self.source_port,
            device: self.device,
            timeout: self.timeout,
            book: steered.then(|| Mutex::new(Book::new(range, reserved, addresses))),
            census: self.census.then(Mutex::default),
        };
        // Not knowing what others hold costs a refused connect() here and there, and is no reason not to dial.
        let _ = dialer.refresh();
        Ok(dialer)
    }
}

/// Settles what `Auto` stands for on this kernel, and reads the ports where that needs them.
fn choose(strategy: Strategy) -> Result<(Choice, Option<(PortRange, PortSet)>), BuildError> {
    if strategy != Strategy::Auto {
        return Ok((Choice { strategy, steered: false, found: None }, None));
    }
    let found = capabilities::probe()?.local_port_range;
    let ports = capabilities::local_ports().ok();
    let strategy = match found {
        LocalPortRange::Linear => Strategy::FullRange,
        // Ends at the full range, so it is right whichever way the kernel searches.
        LocalPortRange::Parity | LocalPortRange::Unproven if ports.is_some() => Strategy::RANDOM_WINDOW,
        LocalPortRange::Parity | LocalPortRange::Unproven => Strategy::FullRange,
        // Up to half of the ports the kernel's own search is as good as any and does no harm; beyond, see `Attempt`.
        LocalPortRange::Absent if ports.is_some() => Strategy::SELECT_TEST_REPEAT,
        LocalPortRange::Absent => Strategy::KernelDefault,
    };
    Ok((Choice { strategy, steered: ports.is_some(), found: Some(found) }, ports))
}

/// How a connection came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialReport {
    /// The strategy that was used; for [`Strategy::Auto`], what it chose.
    pub strategy: Strategy,
    /// Source address and port.
    pub source: SocketAddr,
    /// Calls of bind() or connect() that were made for a port, the successful one included: at least 1.
    pub attempts: u32,
    /// Time in connect(), and in bind() where a port was bound by number, over all attempts. Blocking dials without a
    /// timeout spend the handshake in there too.
    pub connect: Duration,
    /// Time waited for the handshake after a connect() that did not block.
    pub handshake: Duration,
}

impl Dialer {
    /// Begins the settings of a dialer to `destination`.
    pub fn to(destination: SocketAddr) -> Builder {
        Builder {
            destination,
            sources: SourcePool::any(),
            strategy: Strategy::Auto,
            source_port: None,
            device: None,
            timeout: None,
            census: true,
        }
    }

    /// What this dialer does here.
    pub fn choice(&self) -> Choice {
        self.choice
    }

    /// Where it dials to.
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    /// Opens a connection, blocking.
    ///
    /// # Errors
    ///
    /// See [`DialError`]. Only ports that are taken are tried again; a connection that is refused or not answered ends
    /// the dial at once.
    pub fn dial(&self) -> Result<(TcpStream, DialReport), DialError> {
        let begun = Instant::now();
        let (socket, mut attempt, connected) = self.start(self.timeout.is_some())?;
        if !connected {
            let waiting = Instant::now();
            self.wait(&socket, begun)?;
            attempt.add_handshake(waiting.elapsed());
        }
        if self.timeout.is_some() {
            self.call("ioctl FIONBIO", socket::set_nonblocking(socket.as_fd(), false))?;
        }
        let report = attempt.finish(socket.as_fd())?;
        Ok((TcpStream::from(socket), report))
    }

    /// Waits for the handshake of a dial that began at `begun`.
    fn wait(&self, socket: &OwnedFd, begun: Instant) -> Result<(), DialError> {
        let rest = self.timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        match self.call("ppoll", socket::wait_connected(socket.as_fd(), rest))? {
            Progress::Connected => Ok(()),
            Progress::Failed => match self.call("getsockopt SO_ERROR", option::take_error(socket.as_fd()))? {
                Some(error) => Err(self.connect_error(error, begun.elapsed())),
                None => Ok(()),
            },
            Progress::Pending => {
                Err(DialError::TimedOut { destination: self.destination, after: begun.elapsed() })
            }
        }
    }

    /// Opens a connection on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`Dialer::dial`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O (and, with a timeout, time) enabled.
    #[cfg(feature = "tokio")]
    pub async fn dial_tokio(&self) -> Result<(tokio::net::TcpStream, DialReport), DialError> {
        super::tokio::dial(self, self.timeout).await
    }

    /// Makes `socket`, which the caller opened (non-blocking or not), ready for the caller's own connect().
    ///
    /// The socket keeps whatever else is set on it: IP_TRANSPARENT, IP_FREEBIND, TCP_FASTOPEN_CONNECT, marks. Loop:
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    /// # use fourtuple::dial::{Dialer, Retry};
    /// # fn open() -> std::os::fd::OwnedFd { todo!() }
    /// # fn connect(_: std::os::fd::BorrowedFd<'_>, _: std::net::SocketAddr) -> std::io::Result<()> { todo!() }
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let dialer = Dialer::to("127.0.0.1:8080".parse()?).build()?;
    /// let mut socket = open();
    /// let mut attempt = dialer.prepare(socket.as_fd())?;
    /// while let Err(error) = connect(socket.as_fd(), dialer.destination()) {
    ///     // (EINPROGRESS is no failure: wait until the socket is writable, as the runtime does it.)
    ///     if attempt.failed(socket.as_fd(), error)? == Retry::FreshSocket {
    ///         socket = open();
    ///         attempt.renew(socket.as_fd())?;
    ///     }
    /// }
    /// let report = attempt.finish(socket.as_fd())?;
    /// # Ok(()) }
    /// ```
    pub fn prepare(&self, socket: std::os::fd::BorrowedFd<'_>) -> Result<Attempt<'_>, DialError> {
        let mut attempt = Attempt::begin(self);
        attempt.first(socket)?;
        Ok(attempt)
    }

    /// Tells the dialer that a connection is closed, so that its port can be named again.
    ///
    /// Need not be called: a dialer that is never told tries other ports first, and starts its book anew when that is
    /// full. Call it for connections that the peer closed first; one that was closed here keeps its port in TIME_WAIT
    /// for 60 s.
    pub fn release(&self, source: SocketAddr) {
        if let Some(mut book) = self.book()
            && let Some(page) = book.page_of(source.ip())
        {
            book.free(page, source.port());
        }
    }

    /// Reads from the kernel (sock_diag) which ports towards the destination are in use, by whichever process: about
    /// 1.2 us a socket. Building a dialer does it once.
    ///
    /// # Errors
    ///
    /// What sock_diag(7) says; ENOENT where the kernel has none.
    pub fn refresh(&self) -> io::Result<()> {
        let Some(book) = &self.book else {
            return Ok(());
        };
        let filter = sock_diag::Filter {
            transport: Transport::Tcp,
            source: self.fixed_source,
            source_port: None,
            destination: self.destination,
        };
        let mut taken = Vec::new();
        sock_diag::each(&filter, |entry| taken.push(entry.local))?;
        let mut book = book.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        book.forget_all();
        for local in taken {
            if let Some(page) = book.page_of(local.ip()) {
                book.note(page, local.port());
            }
        }
        Ok(())
    }

    /// Everything up to the handshake: opens a socket (or several, where ports are bound by number) and calls connect()
    /// until a port is found. The flag says whether the connection is there already.
    pub(super) fn start(&self, nonblocking: bool) -> Result<(OwnedFd, Attempt<'_>, bool), DialError> {
        let mut socket = self.open(nonblocking)?;
        let mut attempt = self.prepare(socket.as_fd())?;
        loop {
            let error = match attempt.connect(socket.as_fd()) {
                Ok(progress) => return Ok((socket, attempt, progress == Connect::Done)),
                Err(error) => error,
            };
            if attempt.failed(socket.as_fd(), error)? == Retry::FreshSocket {
                socket = self.open(nonblocking)?;
                attempt.renew(socket.as_fd())?;
            }
        }
    }

    pub(super) fn open(&self, nonblocking: bool) -> Result<OwnedFd, DialError> {
        self.call("socket", socket::open(Transport::Tcp, self.destination, nonblocking))
    }

    pub(super) fn book(&self) -> Option<MutexGuard<'_, Book>> {
        // The book is a hint: one that a panic left half-written is as good as any.
        self.book.as_ref().map(|book| book.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Who holds the ports, not older than a second: a caller that dials on and on must not be slowed down by counting.
    pub(super) fn census(&self, source: Option<IpAddr>) -> Option<Census> {
        const FRESH: Duration = Duration::from_secs(1);
        let mut last = self.census.as_ref()?.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match *last {
            Some((taken, census)) if taken.elapsed() < FRESH => census,
            _ => {
                let census = census::take(Transport::Tcp, source, self.destination);
                *last = Some((Instant::now(), census));
                census
            }
        }
    }

    pub(super) fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        result.map_err(|error| DialError::Call { call, address: self.destination, error })
    }

    /// What an error of connect() means that is not about ports.
    pub(super) fn connect_error(&self, error: io::Error, after: Duration) -> DialError {
        let destination = self.destination;
        match error.kind() {
            io::ErrorKind::ConnectionRefused => DialError::Refused(destination),
            io::ErrorKind::TimedOut => DialError::TimedOut { destination, after },
            _ => DialError::Call { call: "connect", address: destination, error },
        }
    }

    /// The address that stands for "any" in the family of the destination.
    pub(super) fn unspecified(&self) -> IpAddr {
        match self.destination {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }
}
