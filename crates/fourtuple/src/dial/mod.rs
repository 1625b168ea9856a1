//! Dialers: they find a free source port quickly, open the connection, and report each cause of a failure separately.
//!
//! [`Dialer`] opens TCP connections, [`UdpDialer`] connected UDP sockets. They keep no pool of connections,
//! change nothing on the host, and start no threads. Example: [`Dialer`].
//!
#![cfg_attr(
    feature = "tokio",
    doc = "With the feature `tokio`, [`Dialers`] keeps a dialer per destination, and [`Connector`] connects to host names."
)]
#![cfg_attr(
    not(feature = "tokio"),
    doc = "With the feature `tokio`, `Dialers` keeps a dialer per destination, and `Connector` connects to host names."
)]

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::sock_diag::{self, Filter, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Errno, errno_name};

use crate::capabilities::{self, ProbeError};
use crate::errors::is_temporary;

mod attempt;
mod builder;
#[cfg(feature = "tokio")]
mod connector;
mod dialer;
mod ledger;
pub mod strategy;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;

pub use attempt::{Attempt, ConnectRequest, Retry};
pub use builder::{DialerBuilder, MAX_SOURCES, SourceError, SourcePool, StrategyChoice};
#[cfg(feature = "tokio")]
pub use connector::{
    ConnectError, Connector, ConnectorBuilder, DialedStream, Resolve, Resolving, SystemResolver,
};
pub use dialer::{DialReport, Dialer, GuardedStream};
pub use strategy::{Step, Strategy};
#[cfg(feature = "tokio")]
pub use tokio::Dialers;
pub use udp::{Sharing, UdpDialer};

/// A count of the sockets that hold the ports towards a destination, from sock_diag(7).
///
/// Example: [`DialError`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Census {
    /// Ports that an automatic choice can take from one source: the range without reserved ports.
    pub ports: u64,
    /// Sockets towards the destination in state ESTABLISHED.
    pub established: u64,
    /// Sockets towards the destination in state TIME_WAIT.
    pub time_wait: u64,
    /// The rest of `ports`: connections that are opening or closing, and ports bound by number on any address, which an automatic
    /// choice avoids. Without a source, `established` and `time_wait` count the sockets of all sources, and this count may be too
    /// low.
    pub otherwise: u64,
}

/// The reason for a missing [`Census`].
///
/// Example: [`DialError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Uncounted {
    /// [`DialerBuilder::without_census`] was set, or the error comes from an
    /// [`Attempt`]: [`Dialer::with_census`] counts.
    NotAsked,
    /// The kernel could not list its sockets.
    Unseen(Unseen),
}

/// A failure to list the kernel's sockets. The ports held by other processes are then unknown.
///
/// Example: [`DialError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Unseen {
    /// The call that failed: `sock_diag`, the path of a file in /proc, or `spawn_blocking`, if there is no thread for a census.
    pub call: &'static str,
    /// The errno. ENOENT from sock_diag(7): the kernel has no inet_diag or tcp_diag (for UDP: udp_diag) and cannot load it.
    pub errno: i32,
}

impl Unseen {
    pub(super) fn new(call: &'static str, error: &io::Error) -> Self {
        // An error without an errno: a file in /proc with unexpected content.
        Unseen { call, errno: error.raw_os_error().unwrap_or(Errno::EPROTO.number()) }
    }
}

impl fmt::Display for Unseen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = Errno::new(self.errno);
        write!(formatter, "{}: {errno}", self.call)?;
        if errno == Errno::ENOENT && self.call == SOCK_DIAG {
            write!(formatter, "; is the module tcp_diag or udp_diag loaded?")?;
        }
        Ok(())
    }
}

/// Name of sock_diag(7) in errors.
pub(super) const SOCK_DIAG: &str = "sock_diag";

/// A failed dial. The variants depend on the failed call, because one errno has different meanings in different calls.
///
/// ```
/// use std::io;
/// use fourtuple::dial::{DialError, Dialer, Uncounted};
///
/// let error = Dialer::builder("127.0.0.1:1".parse()?).build()?.dial().unwrap_err();
/// assert_eq!(error.to_string(), "127.0.0.1:1 refused the connection: nothing listens there, or a firewall rejects it");
/// assert_eq!((error.kind(), error.raw_os_error()), (io::ErrorKind::ConnectionRefused, Some(111)));
/// assert!(error.is_retryable() && !error.is_exhausted());
///
/// match error {
///     DialError::PortsExhausted { census: Ok(census), .. } => {
///         println!("{} of {} ports are in TIME_WAIT", census.time_wait, census.ports);
///     }
///     DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } => {
///         println!("no source port is left, and the sockets cannot be counted: {unseen}");
///     }
///     DialError::Refused { destination, .. } => println!("start the server at {destination}"),
///     error => println!("{error}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// No source port is free: connect() of TCP failed with EADDRNOTAVAIL, bind() to port 0 with EADDRINUSE, or connect() of UDP
    /// with EAGAIN.
    #[error("no source port is left from {} to {destination}: {}", source(*.source_address), holders(.census))]
    #[non_exhaustive]
    PortsExhausted {
        /// The source, if one was set. Of a pool whose sources have no free port, the source that the census counts: a dialer takes one
        /// census per second.
        source_address: Option<IpAddr>,
        /// The destination.
        destination: SocketAddr,
        /// Attempts of the dial that found no port, over all sources.
        attempts: u32,
        /// The sockets that hold the ports of the source, counted at most one second ago.
        census: Result<Census, Uncounted>,
    },
    /// The source is not an address of this host: bind() failed with EADDRNOTAVAIL.
    #[error(
        "the source {source_address} is not an address of this host; add it to a device, or use IP_FREEBIND on a socket of your own"
    )]
    #[non_exhaustive]
    SourceNotLocal {
        /// The source.
        source_address: IpAddr,
    },
    /// The fixed source port is in use on this tuple: connect() failed with EADDRNOTAVAIL. Or a socket without SO_REUSEADDR holds
    /// the port: bind() failed with EADDRINUSE.
    #[error("the tuple {local} -> {destination} is busy")]
    #[non_exhaustive]
    TupleBusy {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// UDP: another socket owns this 4-tuple. A second socket would receive the packets of the first without an error.
    #[error("another UDP socket owns {local} -> {destination}; this one would silently take its packets")]
    #[non_exhaustive]
    WouldShadow {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// UDP: sock_diag failed, so that an owner of this 4-tuple cannot be detected. The dialer does not share the port.
    #[error(
        "cannot see whether another UDP socket owns {local} -> {destination} ({unseen}); Sharing::Exclusive does not need to"
    )]
    #[non_exhaustive]
    CannotSee {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
        /// The failure of sock_diag.
        unseen: Unseen,
    },
    /// The destination refused the connection: ECONNREFUSED.
    #[error("{destination} refused the connection{}: nothing listens there, or a firewall rejects it", from(*.source_address))]
    #[non_exhaustive]
    Refused {
        /// The destination.
        destination: SocketAddr,
        /// The source, if one was set.
        source_address: Option<IpAddr>,
    },
    /// The kernel chose the destination's address and port as the source and connected the socket to itself. This happens when the
    /// destination is a local port in the ephemeral range without a listener.
    #[error(
        "{destination} is not listened on: the kernel connected the socket to itself. Keep listening ports out of \
         net.ipv4.ip_local_port_range, or reserve them (net.ipv4.ip_local_reserved_ports)"
    )]
    #[non_exhaustive]
    SelfConnect {
        /// The destination.
        destination: SocketAddr,
    },
    /// The destination did not answer within the timeout of the dialer or of the kernel (ETIMEDOUT).
    #[error("{destination} did not answer{} within {after:.1?}", from(*.source_address))]
    #[non_exhaustive]
    TimedOut {
        /// The destination.
        destination: SocketAddr,
        /// The source, if one was set.
        source_address: Option<IpAddr>,
        /// How long the dial took.
        after: Duration,
    },
    /// The strategy needs a socket option that this kernel lacks.
    #[error("the strategy {strategy} needs {option}, which this kernel has not got; use auto")]
    #[non_exhaustive]
    NotSupported {
        /// Name of the option.
        option: &'static str,
        /// Name of the strategy.
        strategy: String,
    },
    /// Any other failure.
    #[error("{call} for {address}{}: {}", from(*.source_address), errno_name(.error))]
    #[non_exhaustive]
    Call {
        /// The system call.
        call: &'static str,
        /// The address passed to the call.
        address: SocketAddr,
        /// The source, if one was set.
        source_address: Option<IpAddr>,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
}

impl DialError {
    /// Returns the kind of [`io::Error`] that fits: [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if no source port is free, as
    /// connect() of TCP reports this case.
    pub fn kind(&self) -> io::ErrorKind {
        match (self, self.raw_os_error()) {
            (DialError::NotSupported { .. }, _) => io::ErrorKind::Unsupported,
            (DialError::Call { error, .. }, _) => error.kind(),
            (DialError::CannotSee { .. }, _) | (_, None) => io::ErrorKind::Other,
            (_, Some(errno)) => io::Error::from_raw_os_error(errno).kind(),
        }
    }

    /// Returns the errno of the failed call, or the errno with which the kernel reports the case: EADDRNOTAVAIL without a free source port,
    /// EADDRINUSE for a busy tuple, ECONNREFUSED for a connection of the socket to itself.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            DialError::PortsExhausted { .. } | DialError::SourceNotLocal { .. } => {
                Some(Errno::EADDRNOTAVAIL.number())
            }
            DialError::TupleBusy { .. } | DialError::WouldShadow { .. } => Some(Errno::EADDRINUSE.number()),
            DialError::Refused { .. } | DialError::SelfConnect { .. } => Some(Errno::ECONNREFUSED.number()),
            DialError::TimedOut { .. } => Some(Errno::ETIMEDOUT.number()),
            DialError::NotSupported { .. } => Some(Errno::ENOPROTOOPT.number()),
            DialError::CannotSee { unseen, .. } => Some(unseen.errno),
            DialError::Call { error, .. } => error.raw_os_error(),
        }
    }

    /// Returns whether no source port was free: [`DialError::PortsExhausted`]. More source addresses, a wider port range or fewer
    /// connections to this destination avoid the error; a retry helps when connections close.
    pub fn is_exhausted(&self) -> bool {
        matches!(self, DialError::PortsExhausted { .. })
    }

    /// Returns whether the same dial may succeed later without a change of the settings or of the host's configuration: a port may
    /// become free, the destination may answer, or the host may get descriptors, memory or a route.
    ///
    /// ```
    /// # #[derive(Debug)] struct Backoff;
    /// # impl Backoff { fn wait(&mut self) {} }
    /// # fn example(dialer: &fourtuple::dial::Dialer, mut backoff: Backoff) -> std::io::Result<std::net::TcpStream> {
    /// loop {
    ///     match dialer.dial() {
    ///         Ok((stream, _)) => return Ok(stream),
    ///         Err(error) if error.is_retryable() => backoff.wait(),
    ///         Err(error) => return Err(error.into()),
    ///     }
    /// }
    /// # }
    /// ```
    pub fn is_retryable(&self) -> bool {
        match self {
            DialError::PortsExhausted { .. }
            | DialError::TupleBusy { .. }
            | DialError::WouldShadow { .. }
            | DialError::Refused { .. }
            | DialError::SelfConnect { .. }
            | DialError::TimedOut { .. } => true,
            DialError::Call { error, .. } => is_temporary(error),
            _ => false,
        }
    }
}

/// Keeps the [`DialError`]: [`io::Error::downcast`] returns it.
impl From<DialError> for io::Error {
    fn from(error: DialError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

impl BuildError {
    /// Returns the kind of [`io::Error`] that fits.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            BuildError::Probe(ProbeError { error, .. }) | BuildError::Range { error } => error.kind(),
            _ => io::ErrorKind::InvalidInput,
        }
    }

    /// Returns whether the same build may succeed later without a change of the settings: the host may get descriptors, memory or a
    /// route.
    pub fn is_retryable(&self) -> bool {
        match self {
            BuildError::Probe(ProbeError { error, .. }) | BuildError::Range { error } => is_temporary(error),
            _ => false,
        }
    }
}

impl From<BuildError> for io::Error {
    fn from(error: BuildError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

/// Invalid settings of a dialer, or a kernel that could not be probed.
///
/// ```
/// use std::io;
/// use fourtuple::dial::{BuildError, Dialer};
///
/// let error = Dialer::builder("192.0.2.1:0".parse()?).build().unwrap_err();
/// assert!(matches!(error, BuildError::PortZero { .. }));
/// assert!(error.kind() == io::ErrorKind::InvalidInput && !error.is_retryable());
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The destination has port 0.
    #[error("the destination {destination} has port 0")]
    #[non_exhaustive]
    PortZero {
        /// The destination.
        destination: SocketAddr,
    },
    /// The source and the destination have different address families.
    #[error("the source {source_address} cannot reach {destination}: one is IPv4, the other IPv6")]
    #[non_exhaustive]
    Family {
        /// The source.
        source_address: IpAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// The device name is empty or longer than 15 bytes (IFNAMSIZ).
    #[error("{name:?} is not the name of a network device: expected 1 to 15 bytes")]
    #[non_exhaustive]
    Device {
        /// The name.
        name: String,
    },
    /// The fixed source port is 0, or there is more than one source.
    #[error("a fixed source port must be 1 to 65535 and goes with at most one source address")]
    SourcePort,
    /// The kernel could not be probed.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The port range of the namespace could not be read from /proc.
    #[error("cannot read the port range of this namespace: {}", errno_name(.error))]
    #[non_exhaustive]
    Range {
        /// The error of reading /proc/sys/net/ipv4.
        #[source]
        error: io::Error,
    },
}

/// Returns ` from 10.0.0.2`, or nothing without a source.
fn from(source: Option<IpAddr>) -> String {
    source.map_or(String::new(), |source| format!(" from {source}"))
}

fn source(source: Option<IpAddr>) -> String {
    source.map_or("the address the kernel chose".to_owned(), |source| source.to_string())
}

fn holders(census: &Result<Census, Uncounted>) -> String {
    match census {
        Ok(Census { ports, established, time_wait, otherwise }) => format!(
            "of {ports} ports {established} are established, {time_wait} in TIME_WAIT, {otherwise} otherwise held"
        ),
        Err(Uncounted::NotAsked) => "the holders were not counted".to_owned(),
        Err(Uncounted::Unseen(unseen)) => format!("the holders cannot be listed ({unseen})"),
    }
}

/// Counts the sockets that hold the ports from `source` to `destination`.
fn take_census(
    transport: Transport,
    source: Option<IpAddr>,
    destination: SocketAddr,
) -> Result<Census, Unseen> {
    let (range, reserved) =
        capabilities::local_ports().map_err(|error| Unseen::new("/proc/sys/net/ipv4", &error))?;
    let mut census = Census {
        ports: u64::from(range.len() - reserved.count_in(range)),
        established: 0,
        time_wait: 0,
        otherwise: 0,
    };
    let filter = Filter { transport, source, source_port: None, destination };
    sock_diag::each(&filter, |entry| match entry.state {
        state::ESTABLISHED => census.established += 1,
        state::TIME_WAIT => census.time_wait += 1,
        _ => {}
    })
    .map_err(|error| Unseen::new(SOCK_DIAG, &error))?;
    census.otherwise = census.ports.saturating_sub(census.established + census.time_wait);
    Ok(census)
}

/// A census and the source address whose sockets it counts; `None`: the sockets of all sources.
pub(super) type SourceCensus = (Option<IpAddr>, Result<Census, Unseen>);

/// Takes a census for one destination, at most once per second.
#[derive(Debug)]
pub(super) struct Counter {
    transport: Transport,
    destination: SocketAddr,
    /// Time and result of the last census. Locked to read or write the value, never during a dump.
    last: Mutex<Option<(Instant, SourceCensus)>>,
    /// Held by the thread that takes a census; other threads wait for its result.
    counting: Mutex<()>,
}

impl Counter {
    pub(super) fn new(transport: Transport, destination: SocketAddr) -> Self {
        Counter { transport, destination, last: Mutex::new(None), counting: Mutex::new(()) }
    }

    /// Returns the last census if it is at most one second old. Does not wait for a census in progress.
    pub(super) fn fresh(&self) -> Option<SourceCensus> {
        const FRESH: Duration = Duration::from_secs(1);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.filter(|(taken, _)| taken.elapsed() < FRESH).map(|(_, census)| census)
    }

    /// Returns a census that is at most one second old, of `source` or of the source of an earlier call. A new census takes about 1.2 us
    /// for each socket on the destination.
    pub(super) fn count(&self, source: Option<IpAddr>) -> SourceCensus {
        if let Some(census) = self.fresh() {
            return census;
        }
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        self.fresh().unwrap_or_else(|| {
            let census = (source, take_census(self.transport, source, self.destination));
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            *last = Some((Instant::now(), census));
            census
        })
    }

    /// Adds a census to [`DialError::PortsExhausted`], and the source that it counts. Returns other errors unchanged.
    pub(super) fn counted(&self, mut error: DialError) -> DialError {
        if let DialError::PortsExhausted { source_address, census, .. } = &mut error {
            let counted = self.count(*source_address);
            *source_address = counted.0;
            *census = counted.1.map_err(Uncounted::Unseen);
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    fn exhausted() -> DialError {
        DialError::PortsExhausted {
            source_address: None,
            destination: ([127, 0, 0, 1], 80).into(),
            attempts: 1,
            census: Err(Uncounted::NotAsked),
        }
    }

    fn call(errno: Errno) -> DialError {
        DialError::Call {
            call: "connect",
            address: ([127, 0, 0, 1], 80).into(),
            source_address: None,
            error: errno.into(),
        }
    }

    #[test]
    fn exhaustion_becomes_addr_not_available_and_back() {
        let error = io::Error::from(exhausted());
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        assert_eq!(exhausted().raw_os_error(), Some(Errno::EADDRNOTAVAIL.number()));
        assert!(error.downcast::<DialError>().unwrap().is_exhausted());
    }

    #[test]
    fn lack_of_descriptors_is_retryable_and_eacces_is_not() {
        let retryable = [
            exhausted(),
            call(Errno::EMFILE),
            call(Errno::ENETUNREACH),
            DialError::SelfConnect { destination: ([127, 0, 0, 1], 1).into() },
        ];
        assert!(retryable.iter().all(DialError::is_retryable));
        let permanent =
            [call(Errno::EACCES), DialError::SourceNotLocal { source_address: [192, 0, 2, 1].into() }];
        assert!(!permanent.iter().any(DialError::is_retryable));
        assert!(
            !call(Errno::EACCES).is_exhausted()
                && call(Errno::EACCES).kind() == io::ErrorKind::PermissionDenied
        );
    }

    #[test]
    fn display_does_not_repeat_the_source() {
        let error = || io::Error::from(Errno::EACCES);
        let errors: [Box<dyn Error>; 2] =
            [Box::new(call(Errno::EACCES)), Box::new(BuildError::Range { error: error() })];
        for error in errors {
            let (text, source) = (error.to_string(), error.source().expect("a source").to_string());
            assert!(text.ends_with(": EACCES") && !text.contains(&source), "{text}");
        }
    }
}
