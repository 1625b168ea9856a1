//! Sockets in CLOSE_WAIT, by process.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fourtuple_record::snapshot::CloseWait;
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query};

use crate::host::snapshot::LISTED;
use crate::host::snapshot::processes::Sockets;

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
