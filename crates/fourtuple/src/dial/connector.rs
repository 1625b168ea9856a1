use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{self, Instant};

use crate::dial::dialer::{DialReport, Dialer};
use crate::dial::tokio::Dialers;
use crate::dial::{BuildError, DialError};
use crate::on_blocking_thread;

/// Opens connections to host names on tokio: resolves the name, and connects to its addresses by Happy Eyeballs (RFC 8305), each
/// from a free port that the [`Dialer`](super::Dialer) of the address finds.
///
/// Clones share the [`Dialers`], also between runtimes: clone one connector into each. A connection belongs to the runtime that opened it, so
/// each runtime needs its own client of hyper-util. With the feature `hyper` the connector is a `tower_service::Service<http::Uri>` for the client of
/// hyper-util:
///
#[cfg_attr(feature = "hyper", doc = "```no_run")]
#[cfg_attr(not(feature = "hyper"), doc = "```ignore")]
/// use fourtuple::dial::Connector;
/// use http_body_util::Empty;
/// use hyper::body::Bytes;
/// use hyper_util::client::legacy::Client;
/// use hyper_util::rt::TokioExecutor;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::builder(TokioExecutor::new()).build::<_, Empty<Bytes>>(Connector::new());
/// let response = client.get("http://192.0.2.7/".parse()?).await?;
/// # drop(response); Ok(()) }
/// ```
///
/// Without hyper, [`Connector::connect`] takes a host and a port.
#[derive(Clone)]
pub struct Connector {
    dialers: Dialers,
    resolver: Arc<dyn Resolve>,
    timeout: Duration,
    attempt_delay: Duration,
    nodelay: bool,
    #[cfg(feature = "hyper")]
    pub(super) enforce_http: bool,
}

/// Settings from which a [`Connector`] is built.
///
/// ```
/// use std::net::SocketAddr;
/// use std::time::Duration;
/// use fourtuple::dial::{Connector, Dialers};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// # let port = server.local_addr()?.port();
/// let connector = Connector::builder()
///     .dialers(Dialers::new(100).settings(|dialer| dialer.timeout(Duration::from_secs(1))))
///     .resolver(|_host: String, port: u16| async move { Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))]) })
///     .timeout(Duration::from_secs(3))
///     .attempt_delay(Duration::from_millis(250))
///     .nodelay(true)
///     .build();
/// let stream = connector.connect("backend", port).await?;
/// assert_eq!(stream.peer_addr(), server.local_addr()?);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ConnectorBuilder(Connector);

impl Connector {
    /// Returns a connector with the default settings of [`ConnectorBuilder`].
    pub fn new() -> Connector {
        Connector::builder().build()
    }

    /// Returns the default settings.
    pub fn builder() -> ConnectorBuilder {
        ConnectorBuilder(Connector {
            dialers: Dialers::default(),
            resolver: Arc::new(SystemResolver),
            timeout: Duration::from_secs(10),
            attempt_delay: Duration::from_millis(250),
            nodelay: true,
            #[cfg(feature = "hyper")]
            enforce_http: true,
        })
    }

    /// Returns the dialers of this connector and its clones.
    pub fn dialers(&self) -> &Dialers {
        &self.dialers
    }

    /// Connects to `host`, a name or an IP address, on `port`.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`]. Dropping the future closes the sockets of its attempts.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::Connector;
    /// use tokio::io::{AsyncReadExt, AsyncWriteExt};
    /// use tokio::net::TcpListener;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = TcpListener::bind("127.0.0.1:0").await?;
    /// let address = server.local_addr()?;
    /// let connector = Connector::new();
    /// let mut stream = connector.connect("127.0.0.1", address.port()).await?;
    /// stream.write_all(b"ping").await?;
    /// server.accept().await?.0.read_exact(&mut [0; 4]).await?;
    /// assert_eq!((stream.peer_addr(), stream.local_addr()), (address, stream.report().source));
    ///
    /// let tcp: tokio::net::TcpStream = connector.connect_to(address).await?.into_inner();
    /// assert!(connector.dialers().contains(address)); // one dialer for both connections
    /// # drop(tcp); Ok(()) }
    /// ```
    pub async fn connect(&self, host: &str, port: u16) -> Result<DialedStream, ConnectError> {
        let limit = self.limit();
        match time::timeout_at(limit, self.connect_until(host, port, limit)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(ConnectError::TimedOut { host: host.to_owned(), port, after: self.timeout }),
        }
    }

    /// Connects to an address, without a resolution.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub async fn connect_to(&self, address: SocketAddr) -> Result<DialedStream, ConnectError> {
        let (host, port) = (address.ip(), address.port());
        let limit = self.limit();
        match time::timeout_at(limit, self.dial(address, limit)).await {
            Ok(result) => result,
            Err(_elapsed) => {
                Err(ConnectError::TimedOut { host: host.to_string(), port, after: self.timeout })
            }
        }
    }

    /// Returns the time at which a connect that begins now is dropped.
    fn limit(&self) -> Instant {
        const THIRTY_YEARS: Duration = Duration::from_secs(30 * 365 * 86_400);
        let now = Instant::now();
        now.checked_add(self.timeout).unwrap_or_else(|| now + THIRTY_YEARS)
    }

    async fn connect_until(
        &self,
        host: &str,
        port: u16,
        limit: Instant,
    ) -> Result<DialedStream, ConnectError> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return self.dial(SocketAddr::new(address, port), limit).await;
        }
        let resolved = self.resolver.resolve(host, port).await;
        let resolved = resolved.map_err(|error| ConnectError::Resolve { host: host.to_owned(), error })?;
        let addresses = interleave(&resolved);
        let race = race(&addresses, self.attempt_delay, |address| self.dial(address, limit));
        race.await.map_err(|failures| ConnectError::of_addresses(host, failures))
    }

    async fn dial(&self, address: SocketAddr, limit: Instant) -> Result<DialedStream, ConnectError> {
        let dialer = self.dialers.get(address).await?;
        let (stream, report) = dialer.dial_until(Some(limit)).await?;
        if self.nodelay {
            // An error means that the peer has reset the connection; the first read or write reports the reset.
            let _ = stream.set_nodelay(true);
        }
        Ok(DialedStream::new(stream, report, dialer))
    }
}

impl Default for Connector {
    fn default() -> Connector {
        Connector::new()
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Connector")
            .field("dialers", &self.dialers)
            .field("resolver", &format_args!(".."))
            .field("timeout", &self.timeout)
            .field("attempt_delay", &self.attempt_delay)
            .field("nodelay", &self.nodelay)
            .finish_non_exhaustive()
    }
}

impl ConnectorBuilder {
    /// Sets the dialers, with their source addresses and other settings. Default: [`Dialers::default`].
    pub fn dialers(mut self, dialers: Dialers) -> Self {
        self.0.dialers = dialers;
        self
    }

    /// Sets the resolver of host names. Default: [`SystemResolver`].
    pub fn resolver(mut self, resolver: impl Resolve) -> Self {
        self.0.resolver = Arc::new(resolver);
        self
    }

    /// Limits the time of a connect in total: resolution, all addresses and handshakes. Default: 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout = timeout;
        self
    }

    /// Sets the time after which the attempt for the next address starts while the previous attempt has no answer (Connection Attempt
    /// Delay of RFC 8305). Default: 250 ms. RFC 8305 recommends at least 100 ms and at most 2 s.
    pub fn attempt_delay(mut self, delay: Duration) -> Self {
        self.0.attempt_delay = delay;
        self
    }

    /// Sets TCP_NODELAY on each connection. Default: true.
    pub fn nodelay(mut self, nodelay: bool) -> Self {
        self.0.nodelay = nodelay;
        self
    }

    /// Sets whether the service refuses URIs with another scheme than `http`. Default: true. A TLS layer around the connector needs
    /// false; without such a layer a request to an `https` URI would be sent in plain text.
    ///
    /// ```
    /// // Beneath a TLS layer, such as hyper-rustls:
    /// let connector = fourtuple::dial::Connector::builder().enforce_http(false).build();
    /// # drop(connector);
    /// ```
    #[cfg(feature = "hyper")]
    pub fn enforce_http(mut self, enforce: bool) -> Self {
        self.0.enforce_http = enforce;
        self
    }

    /// Returns the connector.
    pub fn build(self) -> Connector {
        self.0
    }
}

/// A failure of a [`Connector`](super::Connector).
///
/// The client of hyper-util returns this error as the source of its own error:
///
#[cfg_attr(feature = "hyper", doc = "```")]
#[cfg_attr(not(feature = "hyper"), doc = "```ignore")]
/// use fourtuple::dial::ConnectError;
/// use std::error::Error;
///
/// fn is_exhausted(error: &hyper_util::client::legacy::Error) -> bool {
///     let source = error.source().and_then(|source| source.downcast_ref::<ConnectError>());
///     source.is_some_and(ConnectError::is_exhausted)
/// }
/// # let _ = is_exhausted;
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URI has no host.
    #[error("the URI {uri:?} has no host; expected http://HOST[:PORT]/PATH")]
    #[non_exhaustive]
    NoHost {
        /// The URI.
        uri: String,
    },
    /// The URI has another scheme than `http`.
    #[error("the URI {uri:?} has another scheme than http; a TLS layer needs enforce_http(false)")]
    #[non_exhaustive]
    NotHttp {
        /// The URI.
        uri: String,
    },
    /// The resolver failed.
    #[error("cannot resolve the name {host}")]
    #[non_exhaustive]
    Resolve {
        /// The host.
        host: String,
        /// The error of the resolver.
        #[source]
        error: io::Error,
    },
    /// The resolver returned no address.
    #[error("the name {host} has no address")]
    #[non_exhaustive]
    NoAddress {
        /// The host.
        host: String,
    },
    /// The time limit passed during the resolution or the connection.
    #[error("no connection to {host} port {port} within {after:?}")]
    #[non_exhaustive]
    TimedOut {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The time limit.
        after: Duration,
    },
    /// The dialer of the address could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The connection to the only address failed.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The connections to all addresses of a name failed.
    #[error("no address of {host} could be connected: {}", list(failures))]
    #[non_exhaustive]
    AllFailed {
        /// The host.
        host: String,
        /// The failure of each address, in the order of their occurrence: at least 2.
        failures: Vec<ConnectError>,
    },
}

impl ConnectError {
    /// Makes the error of a name from the failures of its addresses.
    pub(super) fn of_addresses(host: &str, mut failures: Vec<ConnectError>) -> ConnectError {
        match failures.len() {
            0 => ConnectError::NoAddress { host: host.to_owned() },
            1 => failures.remove(0),
            _ => ConnectError::AllFailed { host: host.to_owned(), failures },
        }
    }

    /// Returns the kind of [`io::Error`] that fits. For [`ConnectError::AllFailed`] this is the kind of the first failure.
    ///
    /// ```
    /// use std::io;
    /// use fourtuple::dial::Connector;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let error = Connector::new().connect_to("127.0.0.1:1".parse()?).await.unwrap_err();
    /// assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    /// assert!(error.is_retryable() && !error.is_exhausted());
    /// # Ok(()) }
    /// ```
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            ConnectError::NoHost { .. } | ConnectError::NotHttp { .. } => io::ErrorKind::InvalidInput,
            ConnectError::Resolve { error, .. } => error.kind(),
            ConnectError::NoAddress { .. } => io::ErrorKind::NotFound,
            ConnectError::TimedOut { .. } => io::ErrorKind::TimedOut,
            ConnectError::Build(error) => error.kind(),
            ConnectError::Dial(error) => error.kind(),
            ConnectError::AllFailed { failures, .. } => {
                failures.first().map_or(io::ErrorKind::Other, ConnectError::kind)
            }
        }
    }

    /// Returns whether an address failed because no source port was free: [`DialError::is_exhausted`].
    pub fn is_exhausted(&self) -> bool {
        match self {
            ConnectError::Dial(error) => error.is_exhausted(),
            ConnectError::AllFailed { failures, .. } => failures.iter().any(ConnectError::is_exhausted),
            _ => false,
        }
    }

    /// Returns whether the same connect may succeed later without a change of the settings: the resolver failed or the time limit
    /// passed, or [`DialError::is_retryable`] or [`BuildError::is_retryable`] is true for an address.
    pub fn is_retryable(&self) -> bool {
        match self {
            ConnectError::Resolve { .. } | ConnectError::TimedOut { .. } => true,
            ConnectError::Build(error) => error.is_retryable(),
            ConnectError::Dial(error) => error.is_retryable(),
            ConnectError::AllFailed { failures, .. } => failures.iter().any(ConnectError::is_retryable),
            _ => false,
        }
    }
}

impl From<ConnectError> for io::Error {
    fn from(error: ConnectError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

/// Returns the texts of errors with their sources, because `source()` can return only one error.
fn list(errors: &[ConnectError]) -> String {
    let with_sources = |error: &ConnectError| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(error) = source {
            text += &format!(": {error}");
            source = error.source();
        }
        text
    };
    errors.iter().map(with_sources).collect::<Vec<_>>().join("; ")
}

/// The future of a name resolution.
///
/// Example: [`Resolve::resolve`].
pub type Resolving<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Resolves host names for a [`Connector`](super::Connector).
///
/// The addresses must be in the order of preference (RFC 6724), the most preferred first. A function of a host and a port is a
/// resolver too:
///
/// ```
/// use fourtuple::dial::Connector;
/// use std::net::SocketAddr;
///
/// let connector = Connector::builder()
///     .resolver(|host: String, port: u16| async move {
///         match host.as_str() {
///             "backend" => Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))]),
///             _ => Err(std::io::ErrorKind::NotFound.into()),
///         }
///     })
///     .build();
/// # drop(connector);
/// ```
pub trait Resolve: Send + Sync + 'static {
    /// Returns the socket addresses of `host` with `port`.
    ///
    /// # Errors
    ///
    /// Any error of the name service. An empty list means that the name has no address.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::{Connector, Resolve, Resolving, SystemResolver};
    ///
    /// /// Resolves one name itself, and passes all others to the system.
    /// struct WithProxy;
    ///
    /// impl Resolve for WithProxy {
    ///     fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
    ///         match host {
    ///             "proxy" => Box::pin(async move { Ok(vec![([127, 0, 0, 1], port).into()]) }),
    ///             _ => SystemResolver.resolve(host, port),
    ///         }
    ///     }
    /// }
    ///
    /// let connector = Connector::builder().resolver(WithProxy).build();
    /// # drop(connector);
    /// ```
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a>;
}

impl<F, R> Resolve for F
where
    F: Fn(String, u16) -> R + Send + Sync + 'static,
    R: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
{
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
        Box::pin(self(host.to_owned(), port))
    }
}

/// The resolver of the C library: getaddrinfo(3) on a blocking thread of the tokio runtime, without a cache.
///
/// Example: [`Resolve::resolve`].
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs, reason = "has no state")]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
        Box::pin(async move {
            if let Ok(address) = host.parse::<IpAddr>() {
                return Ok(vec![SocketAddr::new(address, port)]);
            }
            let host = host.to_owned();
            on_blocking_thread(move || Ok((host, port).to_socket_addrs()?.collect())).await?
        })
    }
}

/// A connection of a [`Connector`](super::Connector), or of a dialer with [`DialedStream::dial`].
///
/// When the stream is dropped after the peer closed or reset the connection first, the stream marks its port as free in the
/// dialer's ledger: [`Dialer::release`] needs no call.
///
/// ```no_run
/// use std::sync::Arc;
/// use fourtuple::dial::{DialedStream, Dialer};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let dialer = Arc::new(Dialer::builder("192.0.2.1:80".parse()?).build_tokio().await?);
/// let stream = DialedStream::dial(Arc::clone(&dialer)).await?;
/// println!("from {} to {}", stream.local_addr(), stream.peer_addr());
/// # Ok(()) }
/// ```
///
/// Example: [`Connector::connect`](super::Connector::connect).
#[derive(Debug)]
pub struct DialedStream {
    // Declared before `port`, so that the socket is closed before another dial can take the port.
    stream: TcpStream,
    port: PortGuard,
    report: DialReport,
    is_shut_down: bool,
}

/// Releases the port of a closed connection if the peer closed first: such a connection leaves no TIME_WAIT socket on this host.
#[derive(Debug)]
struct PortGuard {
    dialer: Arc<Dialer>,
    source: SocketAddr,
    peer_closed_first: bool,
}

impl Drop for PortGuard {
    fn drop(&mut self) {
        if self.peer_closed_first {
            self.dialer.release(self.source);
        }
    }
}

impl DialedStream {
    pub(super) fn new(stream: TcpStream, report: DialReport, dialer: Arc<Dialer>) -> DialedStream {
        let port = PortGuard { dialer, source: report.source, peer_closed_first: false };
        DialedStream { stream, port, report, is_shut_down: false }
    }

    /// Opens a connection on the current tokio runtime, as [`Dialer::dial_tokio`] does.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial_tokio`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled, and time if the dialer has a timeout.
    pub async fn dial(dialer: Arc<Dialer>) -> Result<DialedStream, DialError> {
        let (stream, report) = dialer.dial_tokio().await?;
        Ok(DialedStream::new(stream, report, dialer))
    }

    /// Returns the source address and port of the connection, and the time that the dial took to find the port.
    pub fn report(&self) -> DialReport {
        self.report
    }

    /// Returns the address of the peer.
    pub fn peer_addr(&self) -> SocketAddr {
        self.port.dialer.destination()
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> SocketAddr {
        self.report.source
    }

    /// Returns the socket. The caller must call [`Dialer::release`], if at all.
    pub fn into_inner(self) -> TcpStream {
        self.stream
    }

    /// Notes the end of file or the reset that the result of a call shows.
    fn note<T>(&mut self, result: &io::Result<T>, is_end: bool) {
        let is_reset = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset);
        if is_reset || (is_end && !self.is_shut_down) {
            self.port.peer_closed_first = true;
        }
    }
}

/// Does the same as [`DialedStream::into_inner`].
impl From<DialedStream> for TcpStream {
    fn from(stream: DialedStream) -> TcpStream {
        stream.into_inner()
    }
}

impl AsFd for DialedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsyncRead for DialedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, has_space) = (buffer.filled().len(), buffer.remaining() > 0);
        let result = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        let is_end = has_space && result.is_ok() && buffer.filled().len() == before;
        self.note(&result, is_end);
        Poll::Ready(result)
    }
}

impl AsyncWrite for DialedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.note(&result, false);
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        self.note(&result, false);
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut_down = true;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(feature = "hyper")]
mod hyper {
    //! The connector as a service for the client of hyper-util.

    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http::Uri;
    use http::uri::Scheme;
    use hyper_util::client::legacy::connect::{Connected, Connection};
    use hyper_util::rt::TokioIo;
    use tower_service::Service;

    use crate::dial::connector::{ConnectError, Connector, DialedStream};

    /// Connects to the host and the port of the URI; without a port to 80, or to 443 for `https` and `wss`.
    ///
    /// The extensions of each HTTP response contain the [`DialReport`](super::DialReport) of its connection.
    impl Service<Uri> for Connector {
        type Response = TokioIo<DialedStream>;
        type Error = ConnectError;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

        fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, uri: Uri) -> Self::Future {
            let connector = self.clone();
            Box::pin(async move {
                if connector.enforce_http && uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP) {
                    return Err(ConnectError::NotHttp { uri: uri.to_string() });
                }
                let Some(host) = uri.host() else {
                    return Err(ConnectError::NoHost { uri: uri.to_string() });
                };
                // An IPv6 address is in brackets.
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let default_port = if matches!(uri.scheme_str(), Some("https" | "wss")) { 443 } else { 80 };
                let port = uri.port_u16().unwrap_or(default_port);
                connector.connect(host, port).await.map(TokioIo::new)
            })
        }
    }

    impl Connection for DialedStream {
        fn connected(&self) -> Connected {
            Connected::new().extra(self.report())
        }
    }
}

/// Sorts addresses for RFC 8305, section 4: the families alternate, the family of the first address first. The order within a
/// family stays. Removes repeated addresses.
fn interleave(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_is_ipv4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    let (mut first, mut second): (VecDeque<_>, VecDeque<_>) =
        addresses.iter().copied().partition(|address| address.is_ipv4() == first_is_ipv4);
    let mut sorted = Vec::with_capacity(addresses.len());
    while !first.is_empty() || !second.is_empty() {
        for address in [first.pop_front(), second.pop_front()].into_iter().flatten() {
            if !sorted.contains(&address) {
                sorted.push(address);
            }
        }
    }
    sorted
}

/// Starts an attempt for each address in turn, RFC 8305, section 5: the next attempt starts `delay` after the previous one, or at
/// once after an attempt failed. Returns the first success and drops the other attempts, or returns the errors in the order in which
/// they occurred.
async fn race<T, E, F>(
    addresses: &[SocketAddr],
    delay: Duration,
    mut attempt: impl FnMut(SocketAddr) -> F,
) -> Result<T, Vec<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut waiting = addresses.iter();
    let mut attempts: Vec<Pin<Box<F>>> = Vec::new();
    let mut errors = Vec::new();
    while let Some(address) = waiting.next() {
        attempts.push(Box::pin(attempt(*address)));
        if waiting.len() == 0 {
            break;
        }
        match time::timeout(delay, first_result(&mut attempts)).await {
            Ok(Ok(success)) => return Ok(success),
            Ok(Err(error)) => errors.push(error),
            Err(_elapsed) => {}
        }
    }
    while !attempts.is_empty() {
        match first_result(&mut attempts).await {
            Ok(success) => return Ok(success),
            Err(error) => errors.push(error),
        }
    }
    Err(errors)
}

/// Waits until an attempt ends, and removes it.
async fn first_result<R>(attempts: &mut Vec<Pin<Box<impl Future<Output = R>>>>) -> R {
    poll_fn(|context| {
        for index in 0..attempts.len() {
            if let Poll::Ready(result) = attempts[index].as_mut().poll(context) {
                drop(attempts.remove(index));
                return Poll::Ready(result);
            }
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::{pending, ready};
    use std::rc::Rc;

    use fourtuple_syscalls::Errno;

    use super::*;

    #[test]
    fn a_build_without_descriptors_is_retryable() {
        let range = |error| ConnectError::from(BuildError::Range { error });
        assert!(range(io::Error::from(Errno::EMFILE)).is_retryable());
        assert!(!range(io::ErrorKind::NotFound.into()).is_retryable());
        assert!(!ConnectError::from(BuildError::SourcePort).is_retryable());
    }

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn families_alternate_from_the_first_address() {
        let sorted = interleave(&addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "2.2.2.2:1"]));
        assert_eq!(sorted, addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "2.2.2.2:1", "[::3]:1"]));
        let sorted = interleave(&addresses(&["1.1.1.1:1", "1.1.1.1:1", "[::1]:1"]));
        assert_eq!(sorted, addresses(&["1.1.1.1:1", "[::1]:1"]));
        assert!(interleave(&[]).is_empty());
    }

    #[test]
    fn a_failure_starts_the_next_attempt_at_once() {
        let started = RefCell::new(Vec::new());
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2", "3.3.3.3:3"]);
        // The delay never passes.
        let result = run(race(&all, Duration::MAX, |address| {
            started.borrow_mut().push(address.port());
            ready(if address.port() == 2 { Ok(address.port()) } else { Err(address.port()) })
        }));
        assert_eq!((result, started.into_inner()), (Ok(2), vec![1, 2]));
    }

    #[test]
    fn all_errors_are_returned() {
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2"]);
        let result: Result<(), _> = run(race(&all, Duration::MAX, |address| ready(Err(address.port()))));
        assert_eq!(result, Err(vec![1, 2]));
        let result: Result<(), Vec<()>> = run(race(&[], Duration::MAX, |_| pending()));
        assert_eq!(result, Err(Vec::new()));
    }

    #[test]
    fn the_losers_are_dropped_before_the_race_returns() {
        let all = addresses(&["1.1.1.1:1", "2.2.2.2:2"]);
        let silent = Rc::new(());
        let result: Result<u16, Vec<()>> = run(race(&all, Duration::from_millis(1), |address| {
            let silent = Rc::clone(&silent);
            async move {
                if address.port() == 1 {
                    pending::<()>().await;
                }
                drop(silent);
                Ok(address.port())
            }
        }));
        assert_eq!((result, Rc::strong_count(&silent)), (Ok(2), 1));
    }
}
