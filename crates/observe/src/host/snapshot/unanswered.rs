//! Connections whose SYN or whose data is not answered, by destination.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::Unanswered;
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket_census::Socket;

use crate::host::snapshot::LISTED;
use crate::host::snapshot::processes::Sockets;

/// By destination, and whether the connections are established.
#[derive(Default)]
pub(super) struct Waiting(BTreeMap<(SocketAddr, bool), Sums>);

#[derive(Default)]
struct Sums {
    sockets: u32,
    retransmits: u32,
    inodes: Vec<u32>,
}

impl Waiting {
    /// Adds a socket that waits. A SYN that was sent once may be on its way, and data is lost two times in succession now and then. A peer
    /// that does not read does not count: the kernel counts no retransmissions into a window that is zero (tcp_retransmit_timer).
    pub(super) fn add(&mut self, socket: &Socket) {
        let least = match socket.state {
            state::SYN_SENT => 1,
            state::ESTABLISHED => 3,
            _ => return,
        };
        if socket.retransmits >= least {
            let sums = self.0.entry((socket.remote, socket.state == state::ESTABLISHED)).or_default();
            sums.sockets += 1;
            sums.retransmits += u32::from(socket.retransmits);
            sums.inodes.push(socket.inode);
        }
    }

    /// Returns the destinations with most sockets.
    pub(super) fn listed(self, sockets: &Sockets) -> Vec<Unanswered> {
        let mut found: Vec<_> = self.0.into_iter().collect();
        found.sort_by_key(|(key, sums)| (Reverse(sums.sockets), *key));
        found.truncate(LISTED);
        let listed = found.into_iter().map(|((destination, established), sums)| {
            let mut holders = BTreeMap::<u32, u32>::new();
            for holder in sums.inodes.iter().filter_map(|inode| sockets.holder(*inode)) {
                *holders.entry(holder).or_default() += 1;
            }
            let most = holders.into_iter().max_by_key(|&(pid, number)| (number, Reverse(pid)));
            let owner = most.and_then(|(pid, number)| sockets.owner(pid, number));
            let Sums { sockets, retransmits, .. } = sums;
            Unanswered { destination, established, sockets, retransmits, owner }
        });
        listed.collect()
    }
}
