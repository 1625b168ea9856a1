use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, is_of_source, option, route};

use crate::capabilities;
use crate::dial::attempt;
use crate::dial::builder::{SourcePool, bind_address};
use crate::dial::dialer::{self, DialReport};
use crate::dial::strategy::Strategy;
use crate::dial::{BuildError, Counter, DialError, SOCK_DIAG, Uncounted, Unseen};
use crate::ports::{PortRange, PortSet};

/// Whether a connected UDP socket shares its port with sockets to other destinations.
///
/// Example: [`UdpDialer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Sharing {
    /// Each socket has a port of its own on its source address, so there are at most as many sockets as ports. This is the kernel's
    /// default.
    Exclusive,
    /// Sockets to different destinations share ports, as in TCP, so there are as many sockets *per destination* as ports. The kernel
    /// has no such search for UDP: the dialer uses SO_REUSEADDR and sock_diag. It detects owners of a 4-tuple reliably only if the
    /// other sockets are opened in the same way.
    Shared,
}

/// Opens connected UDP sockets, each with a 4-tuple of its own.
///
/// With SO_REUSEADDR alone the kernel binds a second socket to the same 4-tuple without an error, and the newer socket receives all
/// packets (`udp_lib_lport_inuse` and the order of the lookup). This dialer never leaves such a pair of sockets behind.
///
/// ```
/// use std::net::UdpSocket;
/// use fourtuple::dial::{DialError, Sharing, UdpDialer};
///
/// let server = UdpSocket::bind("127.0.0.1:0")?;
/// let dialer = UdpDialer::new(server.local_addr()?, None, Sharing::Shared)?
///     .sources("127.0.0.2,127.0.0.3".parse()?)?
///     .device("lo")?;
/// let (socket, report) = dialer.dial()?;
/// socket.send(b"ping")?;
/// assert_eq!(server.recv_from(&mut [0; 4])?, (4, report.source));
///
/// // A second socket on the same 4-tuple is an error. The kernel alone would deliver all packets to the newer socket.
/// let again = UdpDialer::new(dialer.destination(), Some(report.source.ip()), Sharing::Shared)?;
/// let again = again.source_port(report.source.port()).dial();
/// assert!(matches!(again, Err(DialError::WouldShadow { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct UdpDialer {
    destination: SocketAddr,
    /// [`UNKNOWN`] if the source comes from the route and no route was found.
    source: IpAddr,
    /// The source comes from the route. If the address is removed from the host, the dialer looks up the route again.
    by_route: bool,
    source_port: Option<u16>,
    /// Other sources; empty: `source` alone.
    sources: SourcePool,
    device: Option<String>,
    sharing: Sharing,
    range: PortRange,
    reserved: PortSet,
    /// Shared by the clones of the dialer.
    census: Arc<Counter>,
}

/// Ports drawn at random before the dialer asks the kernel for the ports in use.
const BLIND_TRIES: u32 = 8;

/// In place of a source address that no route has given yet.
const UNKNOWN: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

impl UdpDialer {
    /// Creates a dialer to `destination` from `source`. Without a source the dialer uses the source address of the route through the
    /// device, if [`UdpDialer::device`] sets one, and looks up the route again after the address was removed from the host. An
    /// IPv4-mapped IPv6 address stands for its IPv4 address.
    ///
    /// # Errors
    ///
    /// [`BuildError::PortZero`], [`BuildError::Family`]; [`BuildError::Range`] if the port range cannot be read.
    pub fn new(
        destination: SocketAddr,
        source: Option<IpAddr>,
        sharing: Sharing,
    ) -> Result<Self, BuildError> {
        if destination.port() == 0 {
            return Err(BuildError::PortZero { destination });
        }
        // The kernel has one table of ports for IPv4 and for IPv4-mapped addresses.
        let destination = socket::canonical(destination);
        let by_route = source.is_none();
        let source = match source.map(|source| source.to_canonical()) {
            Some(source_address) if source_address.is_ipv4() != destination.is_ipv4() => {
                return Err(BuildError::Family { source_address, destination });
            }
            Some(source) => source,
            None => UNKNOWN,
        };
        let (range, reserved) = capabilities::local_ports().map_err(|error| BuildError::Range { error })?;
        let (source_port, sources, device) = (None, SourcePool::any(), None);
        let dialer = UdpDialer {
            destination,
            source,
            by_route,
            source_port,
            sources,
            device,
            sharing,
            range,
            reserved,
            census: Arc::new(Counter::new(Transport::Udp, destination)),
        };
        Ok(dialer.with_route())
    }

    /// Looks up the source address of the route. Without a route each dial repeats the lookup: a device may be set later.
    fn with_route(mut self) -> Self {
        if self.by_route {
            self.source = self.route_source().unwrap_or(UNKNOWN);
        }
        self
    }

    fn route_source(&self) -> Result<IpAddr, DialError> {
        let to = self.destination.ip();
        let source = match (self.destination, &self.device) {
            // As in connect(), a scope counts for link-local destinations only, and more than the device.
            (SocketAddr::V6(v6), _) if v6.scope_id() != 0 && is_scoped(*v6.ip()) => {
                route::source_for_device(to, v6.scope_id())
            }
            (_, Some(name)) => {
                let device = self.call("if_nametoindex", device::index(name))?;
                route::source_for_device(to, device)
            }
            (_, None) => route::source_for(to),
        };
        self.call("RTM_GETROUTE", source)
    }

    /// Returns the destination.
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    /// Dials from this source port, inside or outside of the ephemeral range.
    #[must_use]
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }

    /// Dials from the addresses of a pool: the first is drawn at random, the next is tried if an address has no free port, has the
    /// fixed port in use, is not local, or has no route or permission to the destination (EACCES, EPERM, EINVAL, ENETUNREACH,
    /// EHOSTUNREACH, ENETDOWN).
    ///
    /// # Errors
    ///
    /// [`BuildError::Family`] if an address has another family than the destination.
    pub fn sources(mut self, sources: SourcePool) -> Result<Self, BuildError> {
        let destination = self.destination;
        if let Some(source_address) = sources.foreign_family(destination) {
            return Err(BuildError::Family { source_address, destination });
        }
        self.sources = sources;
        Ok(self)
    }

    /// Dials through a network device or a VRF: `setsockopt(SO_BINDTODEVICE)`.
    ///
    /// # Errors
    ///
    /// [`BuildError::Device`] if the name is empty or longer than 15 bytes.
    pub fn device(mut self, name: impl Into<String>) -> Result<Self, BuildError> {
        let name = name.into();
        if name.is_empty() || name.len() > 15 {
            return Err(BuildError::Device { name });
        }
        self.device = Some(name);
        Ok(self.with_route())
    }

    /// Opens a connected socket, which blocks.
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`], [`DialError::SourceNotLocal`], [`DialError::Call`]; with [`Sharing::Shared`]
    /// [`DialError::CannotSee`] if the kernel has no udp_diag; with a fixed source port [`DialError::WouldShadow`] if the
    /// 4-tuple has an owner, and [`DialError::TupleBusy`] if a socket without SO_REUSEADDR holds the port.
    pub fn dial(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let dialed = self.dial_from_sources().map_err(|error| self.census.counted(error));
        dialer::trace_end(self.destination, dialed)
    }

    fn dial_from_sources(&self) -> Result<(UdpSocket, DialReport), DialError> {
        if !self.sources.addresses().is_empty() {
            return self.dial_from_pool();
        }
        if !self.by_route || self.source != UNKNOWN {
            let dialed = self.dial_from_source();
            if !self.by_route || !matches!(dialed, Err(DialError::SourceNotLocal { .. })) {
                return dialed;
            }
        }
        UdpDialer { source: self.route_source()?, ..self.clone() }.dial_from_source()
    }

    fn dial_from_pool(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let addresses = self.sources.addresses();
        let start = attempt::with_random(|random| random.u32(..addresses.len() as u32)) as usize;
        let (first, second) = addresses.split_at(start);
        let mut left = addresses.len();
        let mut next = second.iter().chain(first);
        loop {
            let source = next.next().copied().unwrap_or(self.source);
            left = left.saturating_sub(1);
            let one = UdpDialer { source, sources: SourcePool::any(), ..self.clone() };
            match one.dial_from_source() {
                Err(
                    DialError::PortsExhausted { .. }
                    | DialError::SourceNotLocal { .. }
                    | DialError::TupleBusy { .. }
                    | DialError::WouldShadow { .. },
                ) if left > 0 => {}
                Err(DialError::Call { error, .. }) if left > 0 && is_of_source(&error, Duration::ZERO) => {}
                dialed => return dialed,
            }
        }
    }

    fn dial_from_source(&self) -> Result<(UdpSocket, DialReport), DialError> {
        match self.sharing {
            Sharing::Exclusive => self.dial_exclusive(),
            Sharing::Shared => self.dial_shared(),
        }
    }

    fn dial_exclusive(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let socket = self.open()?;
        let local = self.local(self.source_port.unwrap_or(0));
        let begun = Instant::now();
        socket::bind(socket.as_fd(), local).map_err(|error| self.bind_error(local, error))?;
        self.connect(&socket)?;
        self.report(socket, 1, begun.elapsed())
    }

    fn dial_shared(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let begun = Instant::now();
        if let Some(port) = self.source_port {
            return match self.try_port(port)? {
                DialTrial::Connected(socket) => self.report(socket, 1, begun.elapsed()),
                DialTrial::Owned => {
                    Err(DialError::WouldShadow { local: self.local(port), destination: self.destination })
                }
                DialTrial::NotShared => {
                    Err(DialError::TupleBusy { local: self.local(port), destination: self.destination })
                }
            };
        }
        let mut attempts = 0;
        for _ in 0..BLIND_TRIES {
            let port = self.random_port();
            if !self.reserved.contains(port) {
                attempts += 1;
                if let DialTrial::Connected(socket) = self.try_port(port)? {
                    return self.report(socket, attempts, begun.elapsed());
                }
            }
        }
        let mut taken = self.taken()?;
        let start = self.random_port();
        while let Some(port) = taken.next_free(self.range, start) {
            attempts += 1;
            if let DialTrial::Connected(socket) = self.try_port(port)? {
                return self.report(socket, attempts, begun.elapsed());
            }
            taken.insert(port);
        }
        Err(self.exhausted(attempts))
    }

    /// Opens a socket and shares `port` if its 4-tuple has no owner.
    ///
    /// SO_REUSEADDR lets bind() share the port. While it is off again, no other socket can bind the port, and this dialer looks for
    /// an owner of the 4-tuple, connects, and looks once more: if two dialers bound the port at the same time, the second to connect
    /// finds the other socket and closes its own.
    fn try_port(&self, port: u16) -> Result<DialTrial, DialError> {
        let socket = self.open()?;
        let reuse = |on| self.call("setsockopt SO_REUSEADDR", option::set_reuse_address(socket.as_fd(), on));
        reuse(true)?;
        let local = self.local(port);
        match socket::bind(socket.as_fd(), local) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Ok(DialTrial::NotShared),
            result => result.map_err(|error| self.bind_error(local, error))?,
        }
        reuse(false)?;
        if self.owners(port)? > 0 {
            return Ok(DialTrial::Owned);
        }
        self.connect(&socket)?;
        if self.owners(port)? > 1 {
            self.call("connect AF_UNSPEC", socket::disconnect(socket.as_fd()))?;
            return Ok(DialTrial::Owned);
        }
        reuse(true)?;
        Ok(DialTrial::Connected(socket))
    }

    /// Counts the sockets that are connected on the 4-tuple with this source port.
    fn owners(&self, port: u16) -> Result<u32, DialError> {
        let mut owners = 0;
        let filter = Filter { source_port: Some(port), ..self.filter() };
        sock_diag::each(&filter, |_| owners += 1).map_err(|error| self.cannot_see(port, &error))?;
        Ok(owners)
    }

    fn taken(&self) -> Result<PortSet, DialError> {
        let mut taken = self.reserved.clone();
        let note = |entry: sock_diag::Entry| {
            taken.insert(entry.local.port());
        };
        sock_diag::each(&self.filter(), note).map_err(|error| self.cannot_see(0, &error))?;
        Ok(taken)
    }

    fn cannot_see(&self, port: u16, error: &io::Error) -> DialError {
        DialError::CannotSee {
            local: self.local(port),
            destination: self.destination,
            unseen: Unseen::new(SOCK_DIAG, error),
        }
    }

    fn filter(&self) -> Filter {
        Filter {
            transport: Transport::Udp,
            source: Some(self.source),
            source_port: None,
            destination: self.destination,
        }
    }

    fn open(&self) -> Result<OwnedFd, DialError> {
        let socket = self.call("socket", socket::open(Transport::Udp, self.destination, false))?;
        if let Some(device) = &self.device {
            self.call("setsockopt SO_BINDTODEVICE", option::set_device(socket.as_fd(), device))?;
        }
        Ok(socket)
    }

    fn connect(&self, socket: &OwnedFd) -> Result<(), DialError> {
        socket::connect(socket.as_fd(), self.destination).map(drop).map_err(|error| match error.kind() {
            // EAGAIN: inet_autobind() found no port. An event loop would take this error for "try again later".
            io::ErrorKind::WouldBlock => self.exhausted(1),
            _ => self.error("connect", self.destination, error),
        })
    }

    fn bind_error(&self, local: SocketAddr, error: io::Error) -> DialError {
        match error.kind() {
            io::ErrorKind::AddrInUse if local.port() == 0 => self.exhausted(1),
            io::ErrorKind::AddrInUse => DialError::TupleBusy { local, destination: self.destination },
            io::ErrorKind::AddrNotAvailable => DialError::SourceNotLocal { source_address: self.source },
            _ => self.error("bind", local, error),
        }
    }

    fn report(
        &self,
        socket: OwnedFd,
        attempts: u32,
        connect: Duration,
    ) -> Result<(UdpSocket, DialReport), DialError> {
        let source = self.call("getsockname", socket::local_address(socket.as_fd()))?;
        let report = DialReport {
            strategy: match self.sharing {
                Sharing::Exclusive => Strategy::KernelDefault,
                Sharing::Shared => Strategy::SELECT_TEST_REPEAT,
            },
            source,
            attempts,
            connect,
            handshake: Duration::ZERO,
        };
        Ok((UdpSocket::from(socket), report))
    }

    /// Returns the error for exhausted ports, without a census: [`UdpDialer::dial`] adds it.
    fn exhausted(&self, attempts: u32) -> DialError {
        DialError::PortsExhausted {
            source_address: Some(self.source),
            destination: self.destination,
            attempts,
            census: Err(Uncounted::NotAsked),
        }
    }

    fn local(&self, port: u16) -> SocketAddr {
        bind_address(self.source, port, self.destination)
    }

    fn random_port(&self) -> u16 {
        attempt::with_random(|random| random.u16(self.range.low()..=self.range.high()))
    }

    fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        result.map_err(|error| self.error(call, self.destination, error))
    }

    fn error(&self, call: &'static str, address: SocketAddr, error: io::Error) -> DialError {
        let source_address = (self.source != UNKNOWN).then_some(self.source);
        DialError::Call { call, address, source_address, error }
    }
}

/// Returns whether connect() reads the scope of an address (`__ipv6_addr_needs_scope_id`).
fn is_scoped(ip: Ipv6Addr) -> bool {
    // ff01::/16 and ff02::/16, with any flags: the scopes of an interface and of a link.
    ip.is_unicast_link_local() || matches!(ip.segments()[0] & 0xff0f, 0xff01 | 0xff02)
}

enum DialTrial {
    Connected(OwnedFd),
    /// The 4-tuple has an owner.
    Owned,
    /// A socket without SO_REUSEADDR holds the port.
    NotShared,
}
