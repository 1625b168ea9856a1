use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fourtuple_syscalls::errno::EPROTO;
use fourtuple_syscalls::errno_name;

/// A count of the sockets that hold the ports towards a destination, from sock_diag(7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncounted {
    /// [`DialerBuilder::without_census`](super::DialerBuilder::without_census) was set.
    NotAsked,
    /// The kernel could not list its sockets.
    Unseen(Unseen),
}

/// A failure to list the kernel's sockets. The ports held by other processes are then unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unseen {
    /// The call that failed: `sock_diag`, or the path of a file in /proc.
    pub call: &'static str,
    /// The errno. ENOENT from sock_diag(7): the kernel has no inet_diag or tcp_diag (for UDP: udp_diag) and cannot load it.
    pub errno: i32,
}

impl Unseen {
    pub(super) fn new(call: &'static str, error: &io::Error) -> Self {
        // An error without an errno: a file in /proc with unexpected content.
        Unseen { call, errno: error.raw_os_error().unwrap_or(EPROTO) }
    }
}

impl fmt::Display for Unseen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = errno_name(&io::Error::from_raw_os_error(self.errno));
        write!(formatter, "{}: {name}", self.call)?;
        match name.as_str() {
            "ENOENT" if self.call == SOCK_DIAG => {
                write!(formatter, "; is the module tcp_diag or udp_diag loaded?")
            }
            _ => Ok(()),
        }
    }
}

/// Name of sock_diag(7) in errors.
pub(super) const SOCK_DIAG: &str = "sock_diag";

/// A failed dial. The variants depend on the failed call, because one errno has different meanings in different calls.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// No source port is free: connect() of TCP failed with EADDRNOTAVAIL, bind() to port 0 with EADDRINUSE, or connect() of UDP
    /// with EAGAIN.
    #[error("no source port is left from {} to {destination}: {}", Source(*.source_address), Holders(.census))]
    PortsExhausted {
        /// The source, if one was set.
        source_address: Option<IpAddr>,
        /// The destination.
        destination: SocketAddr,
        /// The sockets that hold the ports, counted at most one second ago.
        census: Result<Census, Uncounted>,
    },
    /// The source is no address of this host: bind() failed with EADDRNOTAVAIL.
    #[error(
        "the source {0} is no address of this host; add it to a device, or use IP_FREEBIND on a socket of your own"
    )]
    SourceNotLocal(IpAddr),
    /// The fixed source port is in use on this tuple: connect() failed with EADDRNOTAVAIL. Or a socket without SO_REUSEADDR holds
    /// the port: bind() failed with EADDRINUSE.
    #[error("the tuple {local} -> {destination} is busy")]
    TupleBusy {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// UDP: another socket owns this 4-tuple. A second socket would receive the packets of the first without an error.
    #[error("another UDP socket owns {local} -> {destination}; this one would silently take its packets")]
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
    CannotSee {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
        /// The failure of sock_diag.
        unseen: Unseen,
    },
    /// The destination refused the connection: ECONNREFUSED.
    #[error("{destination} refused the connection{}: no socket listens there", From(*.source_address))]
    Refused {
        /// The destination.
        destination: SocketAddr,
        /// The source, if one was set.
        source_address: Option<IpAddr>,
    },
    /// The kernel chose the destination's address and port as the source and connected the socket to itself. This happens when the
    /// destination is a local port in the ephemeral range without a listener.
    #[error(
        "{0} is not listened on: the kernel connected the socket to itself. Keep listening ports out of \
         net.ipv4.ip_local_port_range, or reserve them (net.ipv4.ip_local_reserved_ports)"
    )]
    SelfConnect(SocketAddr),
    /// The destination did not answer within the timeout of the dialer or of the kernel (ETIMEDOUT).
    #[error("{destination} did not answer{} within {}", From(*.source_address), Time(.after))]
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
    NotSupported {
        /// Name of the option.
        option: &'static str,
        /// Name of the strategy.
        strategy: String,
    },
    /// Any other failure.
    #[error("{call} for {address}{}: {} ({error})", From(*.source_address), errno_name(.error))]
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

/// Invalid settings of a dialer, or a kernel that could not be probed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The destination has port 0.
    #[error("the destination {0} has port 0")]
    PortZero(SocketAddr),
    /// The source and the destination have different address families.
    #[error("the source {source_address} cannot reach {destination}: one is IPv4, the other IPv6")]
    Family {
        /// The source.
        source_address: IpAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// The device name is empty or longer than 15 bytes (IFNAMSIZ).
    #[error("{0:?} is not the name of a network device: expected 1 to 15 bytes")]
    Device(String),
    /// The fixed source port is 0, or there is more than one source.
    #[error("a fixed source port must be 1 to 65535 and goes with at most one source address")]
    SourcePort,
    /// The kernel could not be probed.
    #[error(transparent)]
    Probe(#[from] crate::capabilities::ProbeError),
    /// The port range of the namespace could not be read from /proc.
    #[error("cannot read the port range of this namespace: {0}")]
    Range(#[source] io::Error),
    /// The kernel has no route to the destination, so there is no source address.
    #[error("no route to {destination}: {error}")]
    Route {
        /// The destination.
        destination: SocketAddr,
        /// The error of the route lookup.
        #[source]
        error: io::Error,
    },
}

/// Displays ` from 10.0.0.2`, or nothing without a source.
struct From(Option<IpAddr>);

impl fmt::Display for From {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |source| write!(formatter, " from {source}"))
    }
}

struct Source(Option<IpAddr>);

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(source) => source.fmt(formatter),
            None => "the address the kernel chose".fmt(formatter),
        }
    }
}

struct Holders<'a>(&'a Result<Census, Uncounted>);

impl fmt::Display for Holders<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(Census { ports, established, time_wait, otherwise }) => write!(
                formatter,
                "of {ports} ports {established} are established, {time_wait} in TIME_WAIT, {otherwise} otherwise held"
            ),
            Err(Uncounted::NotAsked) => write!(formatter, "the holders were not counted"),
            Err(Uncounted::Unseen(unseen)) => write!(formatter, "the holders cannot be listed ({unseen})"),
        }
    }
}

struct Time<'a>(&'a Duration);

impl fmt::Display for Time<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.1?}", self.0)
    }
}
