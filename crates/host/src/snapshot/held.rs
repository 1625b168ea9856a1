//! Ports of the range that connect() may choose, held by sockets that are not outgoing connections.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::HeldPort;

use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::LISTED;

/// The inode of a socket and the number of sockets that hold a port of the range, by port, address and kind.
#[derive(Default)]
pub(super) struct Held(BTreeMap<(u16, IpAddr, &'static str), (u32, u32)>);

impl Held {
    pub(super) fn add(&mut self, kind: &'static str, local: SocketAddr, inode: u32) {
        // Sockets of a SO_REUSEPORT group share a port and an address.
        let (first, number) = self.0.entry((local.port(), local.ip(), kind)).or_default();
        *first = (*first).max(inode);
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
            owner: sockets.holders(inode).first().map(|pid| sockets.owner(*pid, number)),
        });
        (listed.collect(), left_out)
    }
}
