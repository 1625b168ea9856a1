//! The sockets of RFC 5881: one receives at port 3784, and each session has one to send from.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fastrand::Rng;
use fourtuple::spread::DeviceName;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{neighbour, option};

use crate::bfd::error::{LinkError, socket_failed};

/// The UDP port of control packets (RFC 5881, section 4).
pub const PORT: u16 = 3784;
/// The source ports of RFC 5881, section 4: each session keeps one of its own.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 49_152..=65_535;
/// The number of random ports to try before all ports are tried in turn.
const GUESSES: usize = 32;
/// DSCP CS6, network control (RFC 4594, section 3.1): queues that classify by DSCP send these packets first.
const CLASS: u8 = 48 << 2;

fn open(address: SocketAddr, device: Option<DeviceName>) -> Result<OwnedFd, LinkError> {
    let opened = socket::open(Transport::Udp, address, true).map_err(socket_failed("socket()", address))?;
    if let Some(device) = device {
        option::set_device(opened.as_fd(), device.name())
            .map_err(socket_failed("setsockopt(SO_BINDTODEVICE)", address))?;
    }
    Ok(opened)
}

/// Opens a socket that receives packets from the link only. The socket filter rejects packets with a hop limit below 255 (GTSM;
/// RFC 5881, section 5) before they occupy the receive queue or wake the thread; the session checks the hop limit again.
pub(super) fn receiver(address: SocketAddr, device: Option<DeviceName>) -> Result<OwnedFd, LinkError> {
    let receiver = open(address, device)?;
    option::set_receive_hops(receiver.as_fd(), true)
        .map_err(socket_failed("setsockopt(IP_RECVTTL)", address))?;
    neighbour::refuse_distant(receiver.as_fd())
        .map_err(socket_failed("setsockopt(SO_ATTACH_FILTER)", address))?;
    socket::bind(receiver.as_fd(), address).map_err(socket_failed("bind()", address))?;
    Ok(receiver)
}

/// The socket that a session sends from: its own, or one that also sends data.
pub(super) struct Sender(pub(super) Arc<OwnedFd>);

impl Sender {
    /// Sends a packet with a TTL or hop limit of 255 and DSCP CS6.
    pub(super) fn send(&self, packet: &[u8], to: SocketAddr) -> io::Result<()> {
        neighbour::send(self.0.as_fd(), packet, to, CLASS)
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        socket::local_address(self.0.as_fd())
    }
}

/// Opens a socket to send from, at a source port of its own: no other socket can bind the same port.
pub(super) fn sender(
    local: SocketAddr,
    device: Option<DeviceName>,
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

/// Sets the port of an address, and keeps the scope (interface) of a link-local IPv6 address.
pub(super) fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}
