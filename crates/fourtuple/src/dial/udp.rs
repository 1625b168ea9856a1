use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_syscalls::route;
use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::{self, Transport};

use super::census;
use super::error::{BuildError, DialError};
use super::random;
use super::report::DialReport;
use super::strategy::Strategy;
use crate::capabilities;
use crate::ports::{PortRange, PortSet};

/// Whether a connected UDP socket shares its port with sockets to other destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// A port of its own per socket and source address: as many sockets as there are ports. The kernel's default, and
    /// free of danger.
    Exclusive,
    /// One port for many destinations, as TCP has it: as many sockets *per destination* as there are ports. UDP has
    /// no such search, so this is done by hand (SO_REUSEADDR and sock_diag), and it protects only among those who do it
    /// the same way.
    Shared,
}

/// Opens connected UDP sockets of which no two own one 4-tuple.
///
/// With SO_REUSEADDR alone a second socket on the same 4-tuple is bound without complaint, and the newest one gets all
/// packets (`udp_lib_lport_inuse` and the order of the lookup). This dialer never leaves such a pair behind.
#[derive(Debug)]
pub struct UdpDialer {
    destination: SocketAddr,
    source: IpAddr,
    source_port: Option<u16>,
    sharing: Sharing,
    range: PortRange,
    reserved: PortSet,
}

/// Ports drawn blindly before the kernel is asked which are free.
const BLIND_TRIES: u32 = 8;

impl UdpDialer {
    /// A dialer to `destination` from `source`; without one the address is that of today's route, once and for all.
    pub fn new(
        destination: SocketAddr,
        source: Option<IpAddr>,
        sharing: Sharing,
    ) -> Result<Self, BuildError> {
        if destination.port() == 0 {
            return Err(BuildError::PortZero(destination));
        }
        let source = match source {
            Some(source_address) if source_address.is_ipv4() != destination.is_ipv4() => {
                return Err(BuildError::Family { source_address, destination });
            }
            Some(source) => source,
            None => route::source_for(destination.ip())
                .map_err(|error| BuildError::Route { destination, error })?,
        };
        let (range, reserved) = capabilities::local_ports().map_err(BuildError::Range)?;
        Ok(UdpDialer { destination, source, source_port: None, sharing, range, reserved })
    }

    /// Dials from this very port, which may lie outside of the ephemeral range.
    #[must_use]
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }

    /// Opens a connected socket.
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`], [`DialError::SourceNotLocal`], [`DialError::Call`]; with a fixed source port
    /// [`DialError::WouldShadow`] when the 4-tuple has an owner, and [`DialError::TupleBusy`] when the port belongs to a
    /// socket that does not share it.
    pub fn dial(&self) -> Result<(UdpSocket, DialReport), DialError> {
        match self.sharing {
            Sharing::Exclusive => self.dial_exclusive(),
            Sharing::Shared => self.dial_shared(),
        }
    }

    fn dial_exclusive(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let socket = self.open()?;
        let local = SocketAddr::new(self.source, self.source_port.unwrap_or(0));
        let begun = Instant::now();
        socket::bind(socket.as_fd(), local).map_err(|error| self.bind_error(local, error))?;
        self.connect(&socket)?;
        self.report(socket, 1, begun.elapsed())
    }

    fn dial_shared(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let begun = Instant::now();
        if let Some(port) = self.source_port {
            return match self.try_port(port)? {
                Tried::Connected(socket) => self.report(socket, 1, begun.elapsed()),
                Tried::Owned => {
                    Err(DialError::WouldShadow { local: self.local(port), destination: self.destination })
                }
                Tried::NotShared => {
                    Err(DialError::TupleBusy { local: self.local(port), destination: self.destination })
                }
            };
        }
        let mut attempts = 0;
        for _ in 0..BLIND_TRIES {
            let port = self.random_port();
            if !self.reserved.contains(port) {
                attempts += 1;
                if let Tried::Connected(socket) = self.try_port(port)? {
                    return self.report(socket, attempts, begun.elapsed());
                }
            }
        }
        let mut taken = self.taken()?;
        let start = self.random_port();
        while let Some(port) = taken.next_free(self.range, start) {
            attempts += 1;
            if let Tried::Connected(socket) = self.try_port(port)? {
                return self.report(socket, attempts, begun.elapsed());
            }
            taken.insert(port);
        }
        Err(self.exhausted())
    }

    /// The dance. SO_REUSEADDR lets the port be shared; off again it keeps everybody else from binding the port while
    /// we look whether the 4-tuple has an owner, connect, and look once more: of two who bound at the same time, the
    /// later to connect sees the other and steps back.
    fn try_port(&self, port: u16) -> Result<Tried, DialError> {
        let socket = self.open()?;
        let reuse = |on| self.call("setsockopt SO_REUSEADDR", option::set_reuse_address(socket.as_fd(), on));
        reuse(true)?;
        let local = self.local(port);
        match socket::bind(socket.as_fd(), local) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Ok(Tried::NotShared),
            result => result.map_err(|error| self.bind_error(local, error))?,
        }
        reuse(false)?;
        if self.owners(port)? > 0 {
            return Ok(Tried::Owned);
        }
        self.connect(&socket)?;
        if self.owners(port)? > 1 {
            self.call("connect AF_UNSPEC", socket::disconnect(socket.as_fd()))?;
            return Ok(Tried::Owned);
        }
        reuse(true)?;
        Ok(Tried::Connected(socket))
    }

    /// Sockets that are connected on the 4-tuple with this source port.
    fn owners(&self, port: u16) -> Result<u32, DialError> {
        let mut owners = 0;
        let filter = Filter { source_port: Some(port), ..self.filter() };
        self.call("sock_diag", sock_diag::each(&filter, |_| owners += 1))?;
        Ok(owners)
    }

    fn taken(&self) -> Result<PortSet, DialError> {
        let mut taken = self.reserved.clone();
        let note = |entry: sock_diag::Entry| {
            taken.insert(entry.local.port());
        };
        self.call("sock_diag", sock_diag::each(&self.filter(), note))?;
        Ok(taken)
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
        self.call("socket", socket::open(Transport::Udp, self.destination, false))
    }

    fn connect(&self, socket: &OwnedFd) -> Result<(), DialError> {
        socket::connect(socket.as_fd(), self.destination).map(drop).map_err(|error| match error.kind() {
            // EAGAIN: the automatic choice of a port failed (inet_autobind), which event loops take for "later".
            io::ErrorKind::WouldBlock => self.exhausted(),
            _ => DialError::Call { call: "connect", address: self.destination, error },
        })
    }

    fn bind_error(&self, local: SocketAddr, error: io::Error) -> DialError {
        match error.kind() {
            io::ErrorKind::AddrInUse if local.port() == 0 => self.exhausted(),
            io::ErrorKind::AddrInUse => DialError::TupleBusy { local, destination: self.destination },
            io::ErrorKind::AddrNotAvailable => DialError::SourceNotLocal(self.source),
            _ => DialError::Call { call: "bind", address: local, error },
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

    fn exhausted(&self) -> DialError {
        DialError::PortsExhausted {
            source_address: Some(self.source),
            destination: self.destination,
            census: census::take(Transport::Udp, Some(self.source), self.destination),
        }
    }

    fn local(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.source, port)
    }

    fn random_port(&self) -> u16 {
        random::with(|random| random.u16(self.range.low()..=self.range.high()))
    }

    fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, DialError> {
        result.map_err(|error| DialError::Call { call, address: self.destination, error })
    }
}

enum Tried {
    Connected(OwnedFd),
    /// The 4-tuple has an owner.
    Owned,
    /// A socket without SO_REUSEADDR has the port.
    NotShared,
}
