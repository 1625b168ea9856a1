//! Sockets in CLOSE_WAIT, by process.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fourtuple_record::snapshot::CloseWait;
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query};

use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::LISTED;

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

/// Reads the sockets in CLOSE_WAIT that a process holds. The process 0 stands for processes that are not visible.
pub(super) fn read(query: &Query, sockets: &Sockets) -> io::Result<Vec<CloseWait>> {
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
            let (remote, _) = sums.remotes.iter().max_by_key(|(_, number)| **number)?;
            Some(CloseWait {
                owner: sockets.owner(pid, sums.sockets)?,
                remote: *remote,
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
