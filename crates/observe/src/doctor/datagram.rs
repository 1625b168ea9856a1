//! UDP sockets that share a port, as several rules see them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::{Snapshot, UdpSocketView, UdpSockets};

use crate::doctor::accepting::{during, is_at};
use crate::doctor::attribute::is_own;

/// Ports on which programs share multicast or broadcast by SO_REUSEADDR: DHCP, SSDP, WS-Discovery, mDNS, LLMNR.
const SHARED: [u16; 6] = [67, 68, 1900, 3702, 5353, 5355];

/// Returns the sockets without a peer of each address that has several of them. Addresses and ports for multicast and broadcast are left
/// out: each socket gets its own copy of a packet there.
pub(crate) fn groups(udp: &UdpSockets) -> Vec<Vec<&UdpSocketView>> {
    let mut groups: BTreeMap<(SocketAddr, u32), Vec<&UdpSocketView>> = BTreeMap::new();
    for socket in udp.sockets.iter().filter(|socket| socket.remote.is_none()) {
        let is_broadcast =
            matches!(socket.local.ip(), std::net::IpAddr::V4(address) if address.is_broadcast());
        if socket.local.ip().is_multicast() || is_broadcast || SHARED.contains(&socket.local.port()) {
            continue;
        }
        groups.entry((socket.local, socket.interface)).or_default().push(socket);
    }
    groups.into_values().filter(|group| group.len() > 1).collect()
}

/// Returns the listed sockets to which this host delivers datagrams for an address. For an address of another host there are none.
pub(crate) fn sockets_at(snapshot: &Snapshot, address: SocketAddr) -> impl Iterator<Item = &UdpSocketView> {
    let udp = snapshot.udp.seen().ok().filter(|_| is_own(snapshot, address.ip()));
    udp.into_iter().flat_map(|udp| &udp.sockets).filter(move |socket| is_at(socket.local, address))
}

/// Events of both IP versions during the interval.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Datagrams that were not delivered.
    pub(crate) errors: u64,
    /// Of these, datagrams that met a full queue.
    pub(crate) full: u64,
    /// Of these, datagrams for which there was no memory.
    pub(crate) memory: u64,
}

impl Counted {
    pub(crate) fn of(snapshot: &Snapshot) -> Counted {
        let both =
            |name: &str| during(snapshot, &format!("Udp.{name}")) + during(snapshot, &format!("Udp6.{name}"));
        Counted { errors: both("InErrors"), full: both("RcvbufErrors"), memory: both("MemErrors") }
    }

    /// Returns the datagrams that a filter of the socket refused or whose checksum was wrong: neither the queue nor the memory was full.
    pub(crate) fn refused(&self) -> u64 {
        self.errors.saturating_sub(self.full + self.memory)
    }
}
