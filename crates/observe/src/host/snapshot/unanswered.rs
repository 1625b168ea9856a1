//! Connections whose SYN is not answered, by destination.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::Unanswered;
use fourtuple_syscalls::socket_census::Socket;

use crate::host::snapshot::LISTED;
use crate::host::snapshot::processes::Sockets;

#[derive(Default)]
pub(super) struct Waiting(BTreeMap<SocketAddr, Sums>);

#[derive(Default)]
struct Sums {
    sockets: u32,
    retransmits: u32,
    inodes: Vec<u32>,
}

impl Waiting {
    /// Adds a socket in SYN_SENT. A SYN that was sent once may be on its way.
    pub(super) fn add(&mut self, socket: &Socket) {
        if socket.retransmits > 0 {
            let sums = self.0.entry(socket.remote).or_default();
            sums.sockets += 1;
            sums.retransmits += u32::from(socket.retransmits);
            sums.inodes.push(socket.inode);
        }
    }

    /// Returns the destinations with most sockets.
    pub(super) fn listed(self, sockets: &Sockets) -> Vec<Unanswered> {
        let mut found: Vec<(SocketAddr, Sums)> = self.0.into_iter().collect();
        found.sort_by_key(|(destination, sums)| (Reverse(sums.sockets), *destination));
        found.truncate(LISTED);
        let listed = found.into_iter().map(|(destination, sums)| {
            let mut holders = BTreeMap::<u32, u32>::new();
            for holder in sums.inodes.iter().filter_map(|inode| sockets.holder(*inode)) {
                *holders.entry(holder).or_default() += 1;
            }
            let most = holders.into_iter().max_by_key(|&(pid, number)| (number, Reverse(pid)));
            let owner = most.and_then(|(pid, number)| sockets.owner(pid, number));
            Unanswered { destination, sockets: sums.sockets, retransmits: sums.retransmits, owner }
        });
        listed.collect()
    }
}
