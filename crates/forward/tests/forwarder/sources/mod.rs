//! Packets with chosen source addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple_syscalls::datagram::{Batch, Outgoing};

/// A socket that sends each packet from another address of 127.64.0.0/10.
pub(crate) struct Sources {
    socket: UdpSocket,
    batch: Batch,
    number: u32,
}

impl Sources {
    /// The maximum number of packets per call.
    pub(crate) const MAX_BURST: usize = 20;

    pub(crate) fn new(port: u16) -> io::Result<Sources> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        Ok(Sources { socket, batch: Batch::new(Sources::MAX_BURST, 64), number: 0 })
    }

    /// Sends `packets` packets of 64 zero bytes, at most [`Sources::MAX_BURST`], and returns the number that the kernel has
    /// accepted.
    pub(crate) fn send(&mut self, to: SocketAddr, packets: usize) -> usize {
        let mut outgoing = Outgoing::new();
        for index in 0..packets.min(Sources::MAX_BURST) {
            let source = u32::from(Ipv4Addr::new(127, 64, 0, 0)) + self.number % (1 << 22);
            self.number += 1;
            outgoing.message(Some(to), None);
            outgoing.from_last(IpAddr::V4(Ipv4Addr::from(source)), to);
            outgoing.part(index, 0..64);
        }
        outgoing.send(self.socket.as_fd(), &self.batch, 0).unwrap_or(0)
    }
}
