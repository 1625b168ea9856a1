use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_syscalls::sock_diag;
use fourtuple_syscalls::socket::{self, Connect, Progress, Transport};

use super::attempt::{Attempt, Retry, Wanted};
use super::book::Book;
use super::builder::{Builder, Choice};
use super::census;
use super::error::{Census, DialError};
use super::report::DialReport;
use crate::ports::PortRange;

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
    pub(super) timeout: Option<Duration>,
    pub(super) book: Option<Mutex<Book>>,
    /// `None` where the ports are not to be counted.
    pub(super) census: Option<Mutex<LastCensus>>,
}

/// When the ports were last counted, and with what result.
pub(super) type LastCensus = Option<(Instant, Option<Census>)>;

impl Dialer {
    /// Begins the settings of a dialer to `destination`.
    pub fn to(destination: SocketAddr) -> Builder {
        Builder::new(destination)
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

    /// Makes `socket`, which the caller opened (non-blocking or not), ready for the caller's own connect().
    ///
    /// The socket keeps whatever else is set on it: IP_TRANSPARENT, IP_FREEBIND, TCP_FASTOPEN_CONNECT, marks. Loop:
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    /// # use fourtuple::dial::{Dialer, Retry};
    /// # fn open() -> std::os::fd::OwnedFd { unreachable!("yours") }
    /// # fn connect(_: std::os::fd::BorrowedFd<'_>, _: std::net::SocketAddr) -> std::io::Result<()> { unreachable!("yours") }
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

    /// Begins a dial whose system calls the caller makes in a way of its own: options and bind() as [`Wanted`] says, then
    /// connect(). Where the port was taken, [`Attempt::taken`] says what the next socket must be given; at the end
    /// comes [`Attempt::keep`]. An attempt that is dropped gives the port back.
    ///
    /// # Errors
    ///
    /// None of its own: those of [`Attempt::taken`].
    pub fn begin(&self) -> Result<(Attempt<'_>, Wanted), DialError> {
        let mut attempt = Attempt::begin(self);
        let wanted = attempt.want()?;
        Ok((attempt, wanted))
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
            match source.port() {
                // From `Attempt::keep`: one that the kernel chose.
                0 => book.free_unknown(page),
                port => book.free(page, port),
            }
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
