//! The sockets of RFC 5881: one to receive at port 3784, one for each session to send from.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fastrand::Rng;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{neighbour, option};

use super::error::{LinkError, socket_failed};

/// UDP port of control packets: RFC 5881, section 4.
pub const PORT: u16 = 3784;
/// Source ports of the same section: one for each session, and always the same.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 49_152..=65_535;
/// Ports that are tried by chance before all are tried in turn.
const GUESSES: usize = 32;
/// DSCP CS6, network control (RFC 4594, section 3.1): where queues tell packets apart, these go first.
const CLASS: u8 = 48 << 2;

fn open(address: SocketAddr, device: Option<&str>) -> Result<OwnedFd, LinkError> {
    let opened = socket::open(Transport::Udp, address, true).map_err(socket_failed("socket()", address))?;
    if let Some(device) = device {
        option::set_device(opened.as_fd(), device)
            .map_err(socket_failed("setsockopt(SO_BINDTODEVICE)", address))?;
    }
    Ok(opened)
}

/// Receives, and is told how far what it receives has come.
pub(super) fn receiver(address: SocketAddr, device: Option<&str>) -> Result<OwnedFd, LinkError> {
    let receiver = open(address, device)?;
    option::set_hops_told(receiver.as_fd(), true)
        .map_err(socket_failed("setsockopt(IP_RECVTTL)", address))?;
    socket::bind(receiver.as_fd(), address).map_err(socket_failed("bind()", address))?;
    Ok(receiver)
}

/// What a session sends from: a socket of its own, or one that sends data as well.
pub(super) struct Sender(pub(super) Arc<OwnedFd>);

impl Sender {
    /// With 255 hops, and the class of what keeps the network going.
    pub(super) fn send(&self, packet: &[u8], to: SocketAddr) -> io::Result<()> {
        neighbour::send(self.0.as_fd(), packet, to, CLASS)
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        socket::local_address(self.0.as_fd())
    }
}

/// To send from, at a port that no other session has: only this socket may be bound to it.
pub(super) fn sender(
    local: SocketAddr,
    device: Option<&str>,
    random: &mut Rng,
) -> Result<OwnedFd, LinkError> {
    let sender = open(local, device)?;
    let guesses: Vec<u16> = std::iter::repeat_with(|| random.u16(SOURCE_PORTS)).take(GUESSES).collect();
    for port in guesses.into_iter().chain(SOURCE_PORTS) {
        let address = with_port(local, port);
        match socket::bind(sender.as_fd(), address) {
            Ok(()) => return Ok(sender),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(socket_failed("bind()", address)(error)),
        }
    }
    Err(LinkError::NoSourcePort(local.ip()))
}

/// Keeps what an IPv6 address has beside it: the interface of a link-local one.
pub(super) fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}
