//! Ports of the range that connect() may choose, held by sockets that are not outgoing connections.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::HeldPort;

use crate::snapshot::port_set::Ports;
use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::LISTED;

/// Held ports of the range.
#[derive(Default)]
pub(super) struct Held {
    /// The inode of a socket and the number of sockets, by kind, port and address.
    sockets: BTreeMap<(&'static str, u16, IpAddr), (u32, u32)>,
    /// Ports that TCP sockets hold.
    pub(super) tcp: Ports,
    /// Ports that TCP sockets without a peer hold that do not listen.
    pub(super) bound: Ports,
}

impl Held {
    pub(super) fn add(&mut self, kind: &'static str, local: SocketAddr, inode: u32) {
        // Sockets of a SO_REUSEPORT group share a port and an address.
        let (first, number) = self.sockets.entry((kind, local.port(), local.ip())).or_default();
        *first = (*first).max(inode);
        *number += 1;
        if kind != "udp" {
            self.tcp.insert(local.port());
        }
        if kind == "bound" {
            self.bound.insert(local.port());
        }
    }

    /// Returns the ports in the order of their kinds and numbers, and the number of ports that are not listed. The ports that are only bound
    /// come first, because no other part of a snapshot has them.
    pub(super) fn listed(self, sockets: &Sockets) -> (Vec<HeldPort>, u64) {
        let left_out = self.sockets.len().saturating_sub(LISTED) as u64;
        let first = self.sockets.into_iter().take(LISTED);
        let listed = first.map(|((kind, port, address), (inode, number))| HeldPort {
            port,
            address,
            kind: kind.to_owned(),
            owner: sockets.holder(inode).and_then(|pid| sockets.owner(pid, number)),
        });
        (listed.collect(), left_out)
    }
}
