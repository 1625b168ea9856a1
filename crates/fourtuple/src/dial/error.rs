use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fourtuple_syscalls::errno_name;

/// Who holds the ports towards a destination, as sock_diag sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Ports that an automatic choice could use from one source: the range less the reserved ones.
    pub ports: u64,
    /// Sockets on that destination that are ESTABLISHED.
    pub established: u64,
    /// Sockets on that destination in TIME_WAIT.
    pub time_wait: u64,
    /// What is left of `ports`: connections that are opening or closing, and ports bound by number (on any address: an
    /// automatic choice avoids them all). Without a source the two counts above are those of all sources, and this one
    /// may be too low.
    pub otherwise: u64,
}

/// Why a dial failed, told apart by the call that failed: the same errno means different things from different calls.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// No source port is left: EADDRNOTAVAIL from connect() of TCP, EADDRINUSE from bind() of port 0, EAGAIN from
    /// connect() of UDP.
    #[error("no source port is left from {} to {destination}: {}", Source(*.source_address), Holders(.census))]
    PortsExhausted {
        /// The source, if one was set.
        source_address: Option<IpAddr>,
        /// The destination.
        destination: SocketAddr,
        /// Who holds the ports, at most a second old; `None` where the kernel has no sock_diag to ask, or was not to
        /// be asked.
        census: Option<Census>,
    },
    /// EADDRNOTAVAIL from bind(): the source is no address of this host.
    #[error(
        "the source {0} is no address of this host; add it to a device, or use IP_FREEBIND on a socket of your own"
    )]
    SourceNotLocal(IpAddr),
    /// The port that was asked for is in use on this tuple (EADDRNOTAVAIL from connect()), or held by a socket that does
    /// not share it (EADDRINUSE from bind()).
    #[error("the tuple {local} -> {destination} is busy")]
    TupleBusy {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// UDP: another socket owns this 4-tuple, and this one would have taken its packets without a word.
    #[error("another UDP socket owns {local} -> {destination}; this one would silently take its packets")]
    WouldShadow {
        /// Source address and port.
        local: SocketAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// ECONNREFUSED: nobody listens there.
    #[error("{0} refused the connection: nobody listens there")]
    Refused(SocketAddr),
    /// The kernel chose the destination's own address and port for the source, and connected the socket to itself. It
    /// happens to whoever dials a local port within the ephemeral range on which nobody listens.
    #[error(
        "{0} is not listened on: the kernel connected the socket to itself. Keep listening ports out of \
         net.ipv4.ip_local_port_range, or reserve them (net.ipv4.ip_local_reserved_ports)"
    )]
    SelfConnect(SocketAddr),
    /// No answer within the timeout of the dialer, or of the kernel (ETIMEDOUT).
    #[error("{destination} did not answer within {}", Time(.after))]
    TimedOut {
        /// The destination.
        destination: SocketAddr,
        /// How long the dial took.
        after: Duration,
    },
    /// The strategy needs an option that this kernel has not got.
    #[error("the strategy {strategy} needs {option}, which this kernel has not got; use auto")]
    NotSupported {
        /// Name of the option.
        option: &'static str,
        /// Name of the strategy.
        strategy: String,
    },
    /// Any other failure.
    #[error("{call} for {address}: {} ({error})", errno_name(.error))]
    Call {
        /// The system call.
        call: &'static str,
        /// The address that it was about.
        address: SocketAddr,
        /// What it said.
        #[source]
        error: io::Error,
    },
}

/// Why a dialer could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Port 0 is nobody's.
    #[error("the destination {0} has port 0")]
    PortZero(SocketAddr),
    /// A source of the other family.
    #[error("the source {source_address} cannot reach {destination}: one is IPv4, the other IPv6")]
    Family {
        /// The source.
        source_address: IpAddr,
        /// The destination.
        destination: SocketAddr,
    },
    /// A device name that the kernel cannot have (IFNAMSIZ).
    #[error("{0:?} is not the name of a network device: expected 1 to 15 bytes")]
    Device(String),
    /// A fixed source port with more than one source, or port 0.
    #[error("a fixed source port must be 1 to 65535 and goes with at most one source address")]
    SourcePort,
    /// The kernel could not be probed.
    #[error(transparent)]
    Probe(#[from] crate::capabilities::ProbeError),
    /// A file of /proc that is needed could not be read.
    #[error("cannot read the port range of this namespace: {0}")]
    Range(#[source] io::Error),
    /// The source address could not be found out.
    #[error("no route to {destination}: {error}")]
    Route {
        /// The destination.
        destination: SocketAddr,
        /// What the kernel said.
        #[source]
        error: io::Error,
    },
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

struct Holders<'a>(&'a Option<Census>);

impl fmt::Display for Holders<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(Census { ports, established, time_wait, otherwise }) => write!(
                formatter,
                "of {ports} ports {established} are established, {time_wait} in TIME_WAIT, {otherwise} otherwise held"
            ),
            None => write!(formatter, "who holds them was not asked"),
        }
    }
}

struct Time<'a>(&'a Duration);

impl fmt::Display for Time<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.1?}", self.0)
    }
}
