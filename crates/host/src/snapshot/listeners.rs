//! TCP listeners.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fourtuple_record::snapshot::Listener;
use fourtuple_syscalls::sock_diag;

use crate::snapshot::counters::since;
use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::reason;

/// Accept queue and drops of each listener, by cookie.
pub(super) type Before = HashMap<u64, (u32, Option<u64>)>;

pub(super) fn read(
    sockets: &Sockets,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Result<Vec<Listener>, String> {
    let mut listeners = Vec::new();
    sock_diag::each_listener_detail(|detail| {
        let drops = detail.memory.map(|memory| u64::from(memory.drops));
        now.insert(detail.cookie, (detail.queue, drops));
        let previous = before.get(&detail.cookie);
        let waiting_before =
            previous.map_or(if is_first { detail.queue } else { 0 }, |(waiting, _)| *waiting);
        let drops_before = previous.and_then(|(_, drops)| *drops);
        listeners.push(Listener {
            address: detail.local,
            interface: detail.interface,
            cookie: detail.cookie,
            waiting: detail.queue,
            waiting_before,
            backlog: detail.limit,
            handshakes: 0,
            drops: drops.map(|total| since(drops_before.as_ref(), total, is_first)),
            owners: sockets.holders(detail.inode).iter().map(|pid| sockets.owner(*pid, 1)).collect(),
        });
    })
    .map_err(|error| format!("sock_diag(7): {}", reason(&error)))?;
    listeners.sort_by_key(|listener| (listener.address, listener.cookie));
    Ok(listeners)
}

/// Fills in the handshakes in progress, which the census of connections counts by local address. A listener of the address takes them, else
/// a listener of all addresses (inet_lookup_listener).
pub(super) fn add_handshakes(listeners: &mut [Listener], handshakes: &HashMap<SocketAddr, u32>) {
    let addresses: HashSet<SocketAddr> = listeners.iter().map(|listener| listener.address).collect();
    let mut by_listener: HashMap<SocketAddr, u32> = HashMap::new();
    for (local, number) in handshakes {
        let all: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let all = all.into_iter().skip(usize::from(local.is_ipv6()));
        let mut candidates = [local.ip()].into_iter().chain(all).map(|ip| SocketAddr::new(ip, local.port()));
        if let Some(found) = candidates.find(|candidate| addresses.contains(candidate)) {
            *by_listener.entry(found).or_default() += number;
        }
    }
    for listener in listeners {
        listener.handshakes = by_listener.get(&listener.address).copied().unwrap_or(0);
    }
}
