//! Ports of the range that connect() may choose, held by sockets that are not outgoing connections.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fourtuple_record::snapshot::{EphemeralPorts, HeldPort, Owner};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket_census::Socket;

use super::LISTED;
use super::processes::Sockets;

/// Sockets that hold a port of the range, by port, address and kind.
#[derive(Default)]
pub(super) struct Held(BTreeMap<(u16, IpAddr, &'static str), (u32, u32)>);

impl Held {
    /// Adds a TCP socket that listens or is only bound, if its port is in the range.
    pub(super) fn add_tcp(&mut self, ports: &EphemeralPorts, socket: &Socket) {
        let kind = if socket.state == state::LISTEN { "listening" } else { "bound" };
        self.add(ports, socket, kind);
    }

    /// Adds a UDP socket without a peer.
    pub(super) fn add_udp(&mut self, ports: &EphemeralPorts, socket: &Socket) {
        self.add(ports, socket, "udp");
    }

    fn add(&mut self, ports: &EphemeralPorts, socket: &Socket, kind: &'static str) {
        if !ports.contains(socket.local.port()) {
            return;
        }
        let key = (socket.local.port(), socket.local.ip(), kind);
        // Sockets of a SO_REUSEPORT group share a port and an address.
        let (inode, number) = self.0.entry(key).or_default();
        *inode = (*inode).max(socket.inode);
        *number += 1;
    }

    /// Returns the ports in ascending order, and the number of those left out.
    pub(super) fn listed(self, sockets: &Sockets) -> (Vec<HeldPort>, u64) {
        let left_out = self.0.len().saturating_sub(LISTED) as u64;
        let first = self.0.into_iter().take(LISTED);
        let listed = first.map(|((port, address, kind), (inode, number))| HeldPort {
            port,
            address,
            kind: kind.to_owned(),
            owner: sockets.holders(inode).first().map(|pid| -> Owner { sockets.owner(*pid, number) }),
        });
        (listed.collect(), left_out)
    }
}
