//! Connections that make no progress: nobody answers them, or the program does not read or close them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fourtuple_record::snapshot::{CloseWait, Unanswered, Unread};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query, Socket};

use crate::host::snapshot::LISTED;
use crate::host::snapshot::processes::Sockets;
use crate::host::snapshot::route_to;

/// Age of data from which on it counts as not read: that of an upload is replaced all the time.
const LEFT: Duration = Duration::from_secs(1);

/// Connections whose SYN or whose data is not answered.
#[derive(Default)]
pub(super) struct Waiting(BTreeMap<Peers, Resent>);

/// Where they have their other end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Peers {
    /// At a server that answers no SYN.
    Silent(SocketAddr),
    /// At a server that acknowledges no data.
    Server(SocketAddr),
    /// At clients of a server of this host, by its port.
    Clients(u16),
}

impl Peers {
    /// `service`: the port of the server that the connection is of.
    fn of(socket: &Socket, service: Option<u16>) -> Option<Peers> {
        let peers = match service {
            Some(port) => Peers::Clients(port),
            None if socket.state == state::SYN_SENT => Peers::Silent(socket.remote),
            None => Peers::Server(socket.remote),
        };
        let is_meant = peers.states() & 1 << socket.state != 0 && socket.retransmits >= peers.least();
        is_meant.then_some(peers)
    }

    fn states(self) -> u32 {
        match self {
            Peers::Silent(_) => 1 << state::SYN_SENT,
            Peers::Server(_) => 1 << state::ESTABLISHED,
            // A server may have closed behind its last data.
            Peers::Clients(_) => 1 << state::ESTABLISHED | 1 << state::CLOSE_WAIT | 1 << state::FIN_WAIT1,
        }
    }

    /// Returns how many times a socket must have sent again: a SYN that was sent once may be on its way, and data is lost two times in
    /// succession now and then.
    fn least(self) -> u8 {
        if matches!(self, Peers::Silent(_)) { 1 } else { 3 }
    }
}

struct Resent {
    /// A peer.
    peer: SocketAddr,
    retransmits: u32,
    inodes: Vec<u32>,
}

impl Waiting {
    pub(super) fn add(&mut self, socket: &Socket, service: Option<u16>) {
        let Some(peers) = Peers::of(socket, service) else { return };
        let new = || Resent { peer: socket.remote, retransmits: 0, inodes: Vec::new() };
        let sums = self.0.entry(peers).or_insert_with(new);
        sums.retransmits += u32::from(socket.retransmits);
        sums.inodes.push(socket.inode);
    }

    /// Returns the peers with most sockets.
    pub(super) fn listed(self, sockets: &Sockets, query: &Query) -> io::Result<Vec<Unanswered>> {
        let mut found: Vec<_> = self.0.into_iter().collect();
        found.sort_by_key(|(peers, sums)| (Reverse(sums.inodes.len()), *peers));
        found.truncate(LISTED);
        let listed = found.into_iter().map(|(peers, sums)| {
            let unanswered = Unanswered {
                destination: sums.peer,
                service: if let Peers::Clients(port) = peers { Some(port) } else { None },
                established: !matches!(peers, Peers::Silent(_)),
                sockets: sums.inodes.len() as u32,
                retransmits: sums.retransmits,
                unsent: 0,
                none_acknowledged: 0,
                route: route_to(sums.peer),
                owner: sockets.owner_of_most(&sums.inodes),
            };
            (peers, unanswered)
        });
        let mut listed: BTreeMap<Peers, Unanswered> = listed.collect();
        let states = listed.keys().fold(0, |states, peers| states | peers.states());
        if states != 0 {
            socket_census::each(&Query { states, times: true, ..*query }, |socket| {
                let port = socket.local.port();
                let service = Some(port).filter(|port| listed.contains_key(&Peers::Clients(*port)));
                let found = Peers::of(socket, service).and_then(|peers| listed.get_mut(&peers));
                if let (Some(found), Some(info)) = (found, socket.info) {
                    found.unsent += u32::from(info.unsent);
                    // Of a client its SYN is acknowledged.
                    found.none_acknowledged +=
                        u32::from(found.established && info.acknowledged <= 1 && info.sent > 0);
                }
            })?;
        }
        let mut listed: Vec<Unanswered> = listed.into_values().collect();
        listed.sort_by_key(|found| Reverse(found.sockets));
        Ok(listed)
    }
}

/// Bytes of a request at most; of an upload that a proxy cannot pass on more are there.
const SHORT: u32 = 16 << 10;

/// The connections of a process at a port.
struct Served {
    unread: u32,
    short: u32,
    oldest: Duration,
    /// Time since the process sent data on one of them.
    sent: Duration,
}

/// Returns the processes that leave data unread; the process 0 stands for processes that are not visible. `inodes`: the sockets of servers
/// that had the same number of bytes at both readings. A program that reads slowly has fewer at the second one, or more.
pub(super) fn unread(inodes: &HashSet<u32>, query: &Query, sockets: &Sockets) -> io::Result<Vec<Unread>> {
    if inodes.is_empty() {
        return Ok(Vec::new());
    }
    let mut served: BTreeMap<(u32, u16), Served> = BTreeMap::new();
    let holder = |inode| sockets.holder(inode).unwrap_or(0);
    let slow: HashSet<u32> = inodes.iter().map(|inode| holder(*inode)).collect();
    socket_census::each(&Query { states: 1 << state::ESTABLISHED, times: true, ..*query }, |socket| {
        let Some(info) = socket.info.filter(|_| socket.inode != 0) else { return };
        let holder = holder(socket.inode);
        if !slow.contains(&holder) {
            return;
        }
        let new = || Served { unread: 0, short: 0, oldest: Duration::ZERO, sent: Duration::MAX };
        let its = served.entry((holder, socket.local.port())).or_insert_with(new);
        its.sent = its.sent.min(info.sent_ago);
        if inodes.contains(&socket.inode) && info.received_ago >= LEFT {
            its.unread += 1;
            its.short += u32::from(socket.unread <= SHORT);
            its.oldest = its.oldest.max(info.received_ago);
        }
    })?;
    let mut listed: Vec<Unread> = served
        .into_iter()
        .filter(|(_, its)| its.unread > 0)
        .filter_map(|((holder, port), its)| {
            Some(Unread {
                port,
                owner: sockets.owner(holder, its.unread)?,
                short: its.short,
                oldest_ns: its.oldest.as_nanos() as u64,
                sent_ns: its.sent.as_nanos() as u64,
            })
        })
        .collect();
    listed.sort_by_key(|process| Reverse(process.owner.sockets));
    listed.truncate(LISTED);
    Ok(listed)
}

/// Silence of the peer from which a socket counts as settled: programs close sooner.
const SETTLED: Duration = Duration::from_secs(5);
/// Silence of the peer from which a socket counts as old.
const OLD: Duration = Duration::from_secs(60);
/// Maximum number of remote ends of a process that are counted.
const REMOTES: usize = 10_000;

#[derive(Default)]
struct Sums {
    sockets: u32,
    remotes: BTreeMap<SocketAddr, u32>,
    oldest: Duration,
    settled: u32,
    old: u32,
}

/// Returns the remote end of most sockets. Clients of a server have a port each: then the port is 0, and the address has most sockets.
fn most(remotes: &BTreeMap<SocketAddr, u32>) -> Option<SocketAddr> {
    let mut addresses: BTreeMap<IpAddr, u32> = BTreeMap::new();
    for (remote, number) in remotes {
        *addresses.entry(remote.ip()).or_default() += number;
    }
    let (remote, of_remote) = remotes.iter().max_by_key(|(_, number)| **number)?;
    let (address, of_address) = addresses.into_iter().max_by_key(|(_, number)| *number)?;
    Some(if of_remote * 2 > of_address { *remote } else { SocketAddr::new(address, 0) })
}

/// Reads the sockets in CLOSE_WAIT that a process holds. The process 0 stands for processes that are not visible.
pub(super) fn close_wait(query: &Query, sockets: &Sockets) -> io::Result<Vec<CloseWait>> {
    let mut processes: BTreeMap<u32, Sums> = BTreeMap::new();
    let query = Query { transport: Transport::Tcp, states: 1 << state::CLOSE_WAIT, times: true, ..*query };
    socket_census::each(&query, |socket| {
        // A connection that waits in an accept queue has no inode.
        if socket.inode == 0 {
            return;
        }
        let sums = processes.entry(sockets.holder(socket.inode).unwrap_or(0)).or_default();
        let silent = socket.info.map(|info| info.silent).unwrap_or_default();
        sums.sockets += 1;
        sums.oldest = sums.oldest.max(silent);
        sums.settled += u32::from(silent >= SETTLED);
        sums.old += u32::from(silent >= OLD);
        if sums.remotes.len() < REMOTES || sums.remotes.contains_key(&socket.remote) {
            *sums.remotes.entry(socket.remote).or_default() += 1;
        }
    })?;
    let mut listed: Vec<CloseWait> = processes
        .into_iter()
        .filter_map(|(pid, sums)| {
            Some(CloseWait {
                owner: sockets.owner(pid, sums.sockets)?,
                remote: most(&sums.remotes)?,
                oldest_ns: sums.oldest.as_nanos() as u64,
                settled: sums.settled,
                old: sums.old,
            })
        })
        .collect();
    listed.sort_by_key(|process| (Reverse(process.owner.sockets), process.owner.pid));
    listed.truncate(LISTED);
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_clients_are_not_a_service() {
        let of = |ends: &[(&str, u32)]| {
            most(&ends.iter().map(|&(end, number)| (end.parse().unwrap(), number)).collect())
                .map(|end| end.to_string())
        };
        assert_eq!(of(&[("10.0.0.2:80", 9), ("10.0.0.3:80", 1)]).as_deref(), Some("10.0.0.2:80"));
        let clients = [("10.0.0.2:40001", 1), ("10.0.0.2:40002", 1), ("10.0.0.3:40001", 1)];
        assert_eq!(of(&clients).as_deref(), Some("10.0.0.2:0"));
        assert_eq!(of(&[("10.0.0.2:40001", 1)]).as_deref(), Some("10.0.0.2:40001"));
        assert_eq!(of(&[]), None);
    }
}
