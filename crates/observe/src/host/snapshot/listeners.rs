//! Listeners of TCP.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use fourtuple_record::snapshot::{Listener, Owner, UnixCloseWait, UnixListener};
use fourtuple_syscalls::sock_diag::{self, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query};
use fourtuple_syscalls::unix_diag;

use crate::host::snapshot::counters::since;
use crate::host::snapshot::processes::Sockets;
use crate::host::snapshot::{LISTED, reason};

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
            handshakes_resent: 0,
            resent_to: None,
            drops: drops.map(|total| since(drops_before.as_ref(), total, is_first)),
            owners: sockets.owners(detail.inode),
            mptcp: detail.mptcp,
            ipv6_only: detail.ipv6_only,
            fix: None,
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
pub(super) fn add_handshakes(listeners: &mut [Listener], handshakes: &HashMap<SocketAddr, Handshakes>) {
    let mut by_listener: HashMap<SocketAddr, Handshakes> = HashMap::new();
    for (address, its) in by_listener_address(listeners, handshakes) {
        let sum = by_listener.entry(address).or_default();
        sum.number += its.number;
        sum.resent += its.resent;
        sum.resent_to = sum.resent_to.or(its.resent_to);
    }
    for listener in listeners {
        let Handshakes { number, resent, resent_to } =
            by_listener.get(&listener.address).copied().unwrap_or_default();
        listener.handshakes = number;
        listener.handshakes_resent = resent;
        listener.resent_to = resent_to;
    }
}

/// Handshakes in progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Handshakes {
    pub(super) number: u32,
    /// Those whose SYN-ACK was sent again.
    pub(super) resent: u32,
    /// A client of these.
    pub(super) resent_to: Option<IpAddr>,
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

/// Accept queue of a listener.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: u32,
    /// Inodes of the clients, the oldest connection first; empty if they were not read.
    clients: Vec<u32>,
}

/// Accept queue of each listener, by cookie.
pub(super) type UnixBefore = HashMap<u64, Queue>;

/// Reads the listening unix sockets.
pub(super) fn read_unix(
    sockets: &Sockets,
    connections: &UnixConnections,
    before: &UnixBefore,
    is_first: bool,
    now: &mut UnixBefore,
) -> Result<Vec<UnixListener>, String> {
    let mut listeners = Vec::new();
    unix_diag::each_listener(|detail| listeners.push(detail))
        .map_err(|error| format!("unix sockets: unix_diag: {}", reason(&error)))?;
    let mut queues: HashMap<u64, Vec<u32>> = HashMap::new();
    if listeners.iter().any(|listener| listener.queue.waiting > 0) {
        // What the kernel does not tell leaves the lengths.
        let _ = unix_diag::each_queue(|cookie, clients| drop(queues.insert(cookie, clients)));
    }
    let mut listeners: Vec<UnixListener> = listeners
        .into_iter()
        .map(|detail| {
            let waiting = detail.queue.waiting;
            let clients = queues.remove(&detail.cookie).unwrap_or_default();
            let earlier = before.get(&detail.cookie);
            let known = earlier.map_or(&[][..], |queue| &queue.clients);
            let listener = UnixListener {
                path: detail.name,
                cookie: detail.cookie,
                waiting,
                waiting_before: earlier.map_or(if is_first { waiting } else { 0 }, |queue| queue.waiting),
                standing: standing(known, &clients).min(waiting),
                given_up: clients.iter().filter(|inode| **inode == 0).count() as u32,
                backlog: detail.queue.backlog,
                owners: sockets.owners(detail.inode),
                workers: Vec::new(),
                clients: by_process(clients.iter().filter_map(|inode| sockets.holder(*inode)), sockets),
                fix: None,
            };
            now.insert(detail.cookie, Queue { waiting, clients });
            listener
        })
        .collect();
    for listener in &mut listeners {
        let workers = connections.workers.get(&listener.path);
        listener.workers = workers.map_or_else(Vec::new, |workers| owners(workers, sockets));
    }
    // The longest queues first; a host may have many idle listeners.
    let connections =
        |listener: &UnixListener| listener.workers.iter().map(|worker| worker.sockets).sum::<u32>();
    listeners
        .sort_by_key(|listener| (Reverse(listener.waiting), Reverse(connections(listener)), listener.cookie));
    listeners.truncate(LISTED);
    Ok(listeners)
}

/// Returns the connections in a queue that were in it before, as a lower bound. The queue is served in order: all connections before one that
/// was there are older than it. A client that has closed its socket has no inode and cannot be recognised.
fn standing(before: &[u32], now: &[u32]) -> u32 {
    let known: HashSet<u32> = before.iter().copied().filter(|inode| *inode != 0).collect();
    now.iter().rposition(|inode| known.contains(inode)).map_or(0, |last| last as u32 + 1)
}

fn by_process(pids: impl Iterator<Item = u32>, sockets: &Sockets) -> Vec<Owner> {
    let mut number = BTreeMap::new();
    pids.for_each(|pid| *number.entry(pid).or_default() += 1);
    owners(&number, sockets)
}

/// Returns the processes with the most sockets, which come first.
fn owners(by_process: &BTreeMap<u32, u32>, sockets: &Sockets) -> Vec<Owner> {
    let mut by_process: Vec<(u32, u32)> = by_process.iter().map(|(pid, number)| (*pid, *number)).collect();
    by_process.sort_by_key(|(pid, number)| (Reverse(*number), *pid));
    by_process.into_iter().filter_map(|(pid, number)| sockets.owner(pid, number)).take(LISTED).collect()
}

/// The connections between unix sockets.
#[derive(Debug, Default)]
pub(super) struct UnixConnections {
    /// Accepted connections by the path of their listener and by process.
    workers: HashMap<String, BTreeMap<u32, u32>>,
    /// Sockets whose peer has closed, by process.
    pub(super) close_wait: Vec<UnixCloseWait>,
    /// Cookies of the sockets whose peer has closed.
    closed: HashSet<u64>,
}

impl UnixConnections {
    /// Reads the connections. `earlier`: the pass before, at least `since` ago. A kernel without unix_diag has none; the listeners have the reason.
    pub(super) fn read(
        sockets: &Sockets,
        earlier: Option<&UnixConnections>,
        since: Duration,
    ) -> UnixConnections {
        #[derive(Default)]
        struct Closed {
            sockets: u32,
            settled: u32,
            paths: BTreeMap<String, u32>,
        }
        let mut connections = UnixConnections::default();
        let mut closed: BTreeMap<u32, Closed> = BTreeMap::new();
        let _ = unix_diag::each_connection(|end| {
            // A connection in an accept queue has no inode.
            let Some(pid) = sockets.holder(end.inode) else { return };
            if end.is_closed_by_peer {
                let of_process = closed.entry(pid).or_default();
                of_process.sockets += 1;
                let is_settled = earlier.is_some_and(|earlier| earlier.closed.contains(&end.cookie));
                of_process.settled += u32::from(is_settled);
                *of_process.paths.entry(end.name.clone()).or_default() += 1;
                connections.closed.insert(end.cookie);
            }
            if !end.name.is_empty() {
                *connections.workers.entry(end.name).or_default().entry(pid).or_default() += 1;
            }
        });
        let of_process = |(pid, of_process): (u32, Closed)| {
            let path = of_process.paths.into_iter().max_by_key(|(_, number)| *number)?.0;
            let owner = sockets.owner(pid, of_process.sockets)?;
            Some(UnixCloseWait {
                owner,
                path,
                settled: of_process.settled,
                settled_ns: since.as_nanos() as u64,
            })
        };
        connections.close_wait = closed.into_iter().filter_map(of_process).collect();
        connections.close_wait.sort_by_key(|process| (Reverse(process.owner.sockets), process.owner.pid));
        connections.close_wait.truncate(LISTED);
        connections
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_a_queue_tells_who_waits() {
        assert_eq!(standing(&[], &[1, 2]), 0);
        assert_eq!(standing(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(standing(&[1, 2, 3], &[3, 4]), 1, "two were accepted");
        assert_eq!(standing(&[1, 2], &[3, 4]), 0, "all were accepted");
        assert_eq!(standing(&[1, 2, 3], &[0, 0, 3]), 3, "two clients have closed");
        assert_eq!(standing(&[0, 0], &[0, 0, 5]), 0, "others may have closed");
    }
}
