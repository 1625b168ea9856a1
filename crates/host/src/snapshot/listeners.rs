//! Listeners of TCP.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use fourtuple_record::snapshot::Listener;
use fourtuple_syscalls::sock_diag::{self, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query};

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
            standing: 0,
            given_up: 0,
            waited_ns: 0,
            backlog: detail.limit,
            handshakes: 0,
            drops: drops.map(|total| since(drops_before.as_ref(), total, is_first)),
            owners: sockets.owners(detail.inode),
        });
    })
    .map_err(|error| format!("sock_diag(7): {}", reason(&error)))?;
    listeners.sort_by_key(|listener| (listener.address, listener.cookie));
    Ok(listeners)
}

/// The connections in the accept queues of an address and port.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    standing: u32,
    given_up: u32,
    longest: Duration,
}

/// Maximum number of ports whose accept queues are read.
const MAX_QUEUES: usize = 16;
/// The kernel keeps the times of packets in ticks of 10 ms or less.
const TICK: Duration = Duration::from_millis(10);

/// Reads the connections in the accept queues that were not empty at both readings, by the address and port of this side.
fn waits(listeners: &[Listener], began: Instant, interval: Duration) -> HashMap<SocketAddr, Waits> {
    let is_standing = |listener: &&Listener| listener.waiting.min(listener.waiting_before) > 0;
    let ports: BTreeSet<u16> =
        listeners.iter().filter(is_standing).map(|listener| listener.address.port()).collect();
    let mut waits: HashMap<SocketAddr, Waits> = HashMap::new();
    for port in ports.into_iter().take(MAX_QUEUES) {
        let states = 1 << state::ESTABLISHED | 1 << state::CLOSE_WAIT;
        let query = Query { transport: Transport::Tcp, states, peer: None, port, times: true };
        // What the kernel does not tell leaves the bound of the lengths of the queue.
        let _ = socket_census::each(&query, |socket| {
            // A connection that waits in an accept queue has no inode.
            let Some(silent) = socket.info.map(|info| info.silent).filter(|_| socket.inode == 0) else {
                return;
            };
            let its = waits.entry(canonical(socket.local)).or_default();
            let is_old = silent >= interval + began.elapsed() + TICK;
            its.standing += u32::from(is_old);
            its.given_up += u32::from(is_old && socket.state == state::CLOSE_WAIT);
            its.longest = its.longest.max(silent);
        });
    }
    waits
}

/// Fills in how long connections have waited; `began` is the time of the second reading. The connections of the listeners of a SO_REUSEPORT
/// group are counted together: a listener has the connections that do not fit into the queues of other listeners.
pub(super) fn add_waits(listeners: &mut [Listener], began: Instant, interval: Duration) {
    let mut by_listener: HashMap<SocketAddr, Waits> = HashMap::new();
    for (address, its) in by_listener_address(listeners, &waits(listeners, began, interval)) {
        let sum = by_listener.entry(address).or_default();
        sum.standing += its.standing;
        sum.given_up += its.given_up;
        sum.longest = sum.longest.max(its.longest);
    }
    let mut queued: HashMap<SocketAddr, u32> = HashMap::new();
    for listener in listeners.iter() {
        *queued.entry(listener.address).or_default() += listener.waiting;
    }
    for listener in listeners {
        let Some(its) = by_listener.get(&listener.address) else { continue };
        let of_others = queued[&listener.address] - listener.waiting;
        let own = |number: u32| number.saturating_sub(of_others).min(listener.waiting);
        let (standing, given_up) = (own(its.standing), own(its.given_up));
        (listener.standing, listener.given_up) = (standing, given_up);
        listener.waited_ns = if of_others == 0 { its.longest.as_nanos() as u64 } else { 0 };
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Fills in the handshakes in progress, which the census of connections counts by local address.
pub(super) fn add_handshakes(listeners: &mut [Listener], handshakes: &HashMap<SocketAddr, u32>) {
    let mut by_listener: HashMap<SocketAddr, u32> = HashMap::new();
    for (address, number) in by_listener_address(listeners, handshakes) {
        *by_listener.entry(address).or_default() += number;
    }
    for listener in listeners {
        listener.handshakes = by_listener.get(&listener.address).copied().unwrap_or(0);
    }
}

/// Returns values of connections, which are by the address of this side, with the address of the listener that gets these connections: one
/// with this address, else one with all addresses (inet_lookup_listener).
fn by_listener_address<T: Copy>(
    listeners: &[Listener],
    connections: &HashMap<SocketAddr, T>,
) -> Vec<(SocketAddr, T)> {
    let addresses: HashSet<SocketAddr> = listeners.iter().map(|listener| listener.address).collect();
    let listener_of = |local: &SocketAddr| {
        let all: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let all = all.into_iter().skip(usize::from(local.is_ipv6()));
        let mut candidates = [local.ip()].into_iter().chain(all).map(|ip| SocketAddr::new(ip, local.port()));
        candidates.find(|candidate| addresses.contains(candidate))
    };
    connections.iter().filter_map(|(local, value)| Some((listener_of(local)?, *value))).collect()
}
