use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{self, Instant};

use crate::dial::connect_error::ConnectError;
use crate::dial::dialed_stream::DialedStream;
use crate::dial::dialers::Dialers;
use crate::dial::happy_eyeballs;
use crate::dial::resolve::{Opaque, Resolve, SystemResolver};

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
        let addresses = happy_eyeballs::interleave(&resolved);
        let race = happy_eyeballs::race(&addresses, self.attempt_delay, |address| self.dial(address, limit));
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
            .field("resolver", &Opaque)
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
