//! Unix sockets: listeners with their accept queues, and connections by process.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use fourtuple_record::snapshot::{Owner, UnixCloseWait, UnixListener};
use fourtuple_syscalls::unix_diag;

use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::{LISTED, reason};

/// Accept queue of a listener.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: u32,
    /// Inodes of the clients, the oldest connection first; empty if they were not read.
    clients: Vec<u32>,
}

/// Accept queue of each listener, by cookie.
pub(super) type Before = HashMap<u64, Queue>;

/// Reads the listening unix sockets.
pub(super) fn read(
    sockets: &Sockets,
    connections: &Connections,
    before: &Before,
    is_first: bool,
    now: &mut Before,
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
pub(super) struct Connections {
    /// Accepted connections by the path of their listener and by process.
    workers: HashMap<String, BTreeMap<u32, u32>>,
    /// Sockets whose peer has closed, by process.
    pub(super) close_wait: Vec<UnixCloseWait>,
    /// Cookies of the sockets whose peer has closed.
    closed: HashSet<u64>,
}

impl Connections {
    /// Reads the connections. `earlier`: the pass before, `since` ago. A kernel without unix_diag has none; the listeners have the reason.
    pub(super) fn read(sockets: &Sockets, earlier: Option<&Connections>, since: Duration) -> Connections {
        #[derive(Default)]
        struct Closed {
            sockets: u32,
            settled: u32,
            paths: BTreeMap<String, u32>,
        }
        let mut connections = Connections::default();
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
