//! Reads a network namespace into a snapshot, the input of the rules of `doctor`.
//!
//! A [`Reader`] reads the calling thread's namespace. Each part of the snapshot is a file here; a part that cannot be read does not
//! prevent the others.

mod addresses;
mod close_wait;
mod configured;
mod connections;
mod conntrack;
mod counters;
mod held;
mod listeners;
mod memory;
mod ports;
mod processes;
mod sources;
mod udp;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use fourtuple_record::snapshot::{Connections, Listener, Part, Snapshot, UdpSockets};

use crate::sysctl;
use processes::Sockets;

/// Sysctls that rules read.
const SYSCTLS: &[&str] = &[
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_nonlocal_bind",
    "net.ipv4.tcp_abort_on_overflow",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_max_orphans",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_max_tw_buckets",
    "net.ipv4.tcp_migrate_req",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_timestamps",
    "net.ipv4.tcp_tw_recycle",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_tw_reuse_delay",
];

/// The greatest number of items of a list in a snapshot; tuples with fewer ports in use are left out.
pub const LISTED: usize = 100;

/// Reads snapshots of the calling thread's network namespace.
#[derive(Debug)]
pub struct Reader {
    root: PathBuf,
    previous: Option<(Instant, Counted)>,
}

/// What is counted, to be compared with the next reading.
#[derive(Debug, Default)]
struct Counted {
    counters: counters::Totals,
    conntrack: BTreeMap<String, u64>,
    listeners: listeners::Before,
    connections: connections::Before,
    udp: udp::Before,
    processes: processes::Before,
}

impl Reader {
    /// Creates a reader. `root` is `/`, or a directory with copies of files of /proc in tests.
    pub fn new(root: &Path) -> Reader {
        Reader { root: root.to_owned(), previous: None }
    }

    /// Reads the namespace. All events and rates of the snapshot are those since the previous reading; the first reading has none.
    pub fn read(&mut self) -> Snapshot {
        let now = Instant::now();
        let (began, before) = self.previous.take().unwrap_or_else(|| (now, Counted::default()));
        let interval = now.duration_since(began);
        let is_first = interval.is_zero();
        let root = &self.root;
        let mut counted = Counted::default();
        let ports = ports::read(root);
        let sockets = Sockets::read(root);
        let connections = connections::read(
            ports.as_ref().ok(),
            &sockets,
            &before.connections,
            interval,
            &mut counted.connections,
        );
        let addresses = addresses::read();
        let mut listeners = listeners::read(&sockets, &before.listeners, is_first, &mut counted.listeners);
        if let (Ok(listeners), Ok(connections)) = (&mut listeners, &connections) {
            listeners::add_handshakes(listeners, connections);
        }
        let udp = udp::read(&sockets, &before.udp, is_first, &mut counted.udp);
        let named = named(listeners.as_deref().ok(), connections.as_ref().ok(), udp.as_ref().ok());
        let snapshot = Snapshot {
            processors: thread::available_parallelism().map_or(1, |processors| processors.get() as u32),
            interval_ns: interval.as_nanos() as u64,
            sysctls: SYSCTLS
                .iter()
                .filter_map(|name| Some((name.to_string(), sysctl(root, name)?)))
                .collect(),
            search: Part::Hidden("the search was not probed".to_owned()),
            configured: configured::read(root).into(),
            listeners: listeners.into(),
            udp: udp.into(),
            processes: processes::read(
                root,
                &sockets,
                &named,
                &before.processes,
                is_first,
                &mut counted.processes,
            )
            .into(),
            counters: counters::read(root, &before.counters, is_first, &mut counted.counters).into(),
            memory: memory::read(root).into(),
            conntrack: conntrack::read(root, &before.conntrack, is_first, &mut counted.conntrack).into(),
            lost_sources: addresses::lost_sources(&connections, &addresses).into(),
            connections: connections.into(),
            addresses: addresses.into(),
            traced: Part::Hidden("nothing was traced".to_owned()),
            ports: ports.into(),
        };
        self.previous = Some((now, counted));
        snapshot
    }
}

/// Returns the processes that hold listeners, accepted connections, or UDP sockets of the snapshot.
fn named(
    listeners: Option<&[Listener]>,
    connections: Option<&Connections>,
    udp: Option<&UdpSockets>,
) -> BTreeSet<u32> {
    let listeners = listeners.into_iter().flatten().flat_map(|listener| &listener.owners);
    let workers = connections.into_iter().flat_map(|connections| &connections.services);
    let udp = udp.into_iter().flat_map(|udp| &udp.sockets).flat_map(|socket| &socket.owners);
    let owners = listeners.chain(workers.flat_map(|service| &service.workers)).chain(udp);
    owners.map(|owner| owner.pid).collect()
}

/// Reads a file below `root`.
///
/// # Errors
///
/// The path and the error as text.
fn text(root: &Path, path: &str) -> Result<String, String> {
    std::fs::read_to_string(root.join(path)).map_err(|error| format!("/{path}: {}", reason(&error)))
}

/// Returns the name of an error: `EACCES`.
fn reason(error: &io::Error) -> String {
    fourtuple_syscalls::errno_name(error)
}
