//! TCP connections, by source and destination.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use fourtuple_record::snapshot::{Connections, EphemeralPorts, Service, Tuple};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query};

use crate::snapshot::close_wait;
use crate::snapshot::fast::Fast;
use crate::snapshot::held::Held;
use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::LISTED;
use crate::snapshot::reading::reason;
use crate::snapshot::sums::{Key, Sums, Table};

/// The greatest number of tuples whose ports in use are kept for the next reading.
const KEPT: usize = 4_096;
const ENOENT: i32 = 2;

/// Ports in use of the tuples of a reading.
#[derive(Debug, Default)]
pub(super) struct Before {
    in_use: HashMap<Key, u32, Fast>,
    /// Whether these are all tuples: one that is missing had no port in use.
    is_whole: bool,
}

/// A set of ports.
struct Ports(Box<[u64; 1024]>);

impl Ports {
    fn insert(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
    }

    fn contains(&self, port: u16) -> bool {
        self.0[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }
}

/// Reads all TCP sockets in one pass. `peer`: the only peer whose connections count.
pub(super) fn read(
    ports: Option<&EphemeralPorts>,
    peer: Option<(IpAddr, Option<u16>)>,
    sockets: &Sockets,
    before: &Before,
    interval: Duration,
    now: &mut Before,
) -> Result<Connections, String> {
    let failed = |error: std::io::Error| format!("sock_diag(7): {}", reason(&error));
    let mut listening = Ports(Box::new([0; 1024]));
    let mut range = Ports(Box::new([0; 1024]));
    let mut held = Held::default();
    if let Some(ports) = ports {
        (ports.low..=ports.high).filter(|port| ports.contains(*port)).for_each(|port| range.insert(port));
    }
    let low = ports.map_or(0, |ports| ports.low);
    let query = Query { transport: Transport::Tcp, states: 1 << state::LISTEN, peer: None, times: false };
    socket_census::each(&query, |socket| {
        listening.insert(socket.local.port());
        if range.contains(socket.local.port()) {
            held.add("listening", socket.local, socket.inode);
        }
    })
    .map_err(failed)?;
    let mut all = Sums::default();
    let mut has_close_wait = false;
    let mut tuples = Table::default();
    let mut services = Table::default();
    // The pass over all descriptors has seen the sockets that are only bound, if it was complete.
    let bound = if sockets.bound().is_some() { 1 << state::BOUND } else { 0 };
    let query = Query { states: !(1 << state::LISTEN | bound), peer, ..query };
    socket_census::each(&query, |socket| {
        let port = socket.local.port();
        if socket.state == state::CLOSE {
            if range.contains(port) {
                held.add("bound", socket.local, socket.inode);
            }
            return;
        }
        all.count(socket);
        // Without an inode the connection is in an accept queue.
        has_close_wait |= socket.state == state::CLOSE_WAIT && socket.inode != 0;
        let holders = sockets.holders(socket.inode);
        if listening.contains(port) {
            services.add(Key::of_service(port), socket, None, holders);
        } else {
            let in_range = range.contains(port).then_some(port & 1 == low & 1);
            tuples.add(Key::of_tuple(socket.local.ip(), socket.remote), socket, in_range, holders);
        }
    })
    .map_err(failed)?;
    let in_range = |port| range.contains(port);
    hold_without_peer(&mut held, &in_range, sockets).map_err(failed)?;
    let close_wait =
        if has_close_wait { close_wait::read(&query, sockets).map_err(failed)? } else { Vec::new() };
    let (held, held_left_out) = held.listed(sockets);
    let (tuples, tuples_left_out) = list(tuples, sockets, before, interval, now);
    Ok(Connections {
        age_ns: 0,
        processes_by: sockets.found_by().to_owned(),
        processes_hidden: sockets.hidden,
        states: all.states(),
        tuples,
        tuples_left_out,
        held,
        held_left_out,
        services: list_services(&services, sockets),
        close_wait,
    })
}

/// Adds the UDP sockets without a peer, and TCP sockets that are only bound if the pass over all descriptors has seen them.
fn hold_without_peer(
    held: &mut Held,
    in_range: &dyn Fn(u16) -> bool,
    sockets: &Sockets,
) -> Result<(), std::io::Error> {
    for bound in sockets.bound().into_iter().flatten().filter(|bound| in_range(bound.local.port())) {
        held.add("bound", bound.local, bound.inode);
    }
    let udp = Query { transport: Transport::Udp, states: 1 << state::CLOSE, peer: None, times: false };
    let found = socket_census::each(&udp, |socket| {
        if in_range(socket.local.port()) {
            held.add("udp", socket.local, socket.inode);
        }
    });
    match found {
        // A kernel without udp_diag lists no UDP sockets.
        Err(error) if error.raw_os_error() == Some(ENOENT) => Ok(()),
        result => result,
    }
}

/// Returns the tuples with the most ports in use, and the number of tuples left out.
fn list(
    table: Table,
    sockets: &Sockets,
    before: &Before,
    interval: Duration,
    now: &mut Before,
) -> (Vec<Tuple>, u64) {
    let mut found: Vec<(Key, Sums)> = table.sums.iter().map(|(key, sums)| (*key, *sums)).collect();
    let rank = |(key, sums): &(Key, Sums)| (Reverse(sums.in_use), *key);
    now.is_whole = found.len() <= KEPT;
    let number = found.len();
    if !now.is_whole {
        found.select_nth_unstable_by_key(KEPT, rank);
        found.truncate(KEPT);
    }
    now.in_use.extend(found.iter().map(|(key, sums)| (*key, sums.in_use)));
    found.sort_unstable_by_key(rank);
    found.truncate(LISTED);
    let growth = |(key, sums): &(Key, Sums)| {
        let known = before.in_use.get(key).copied().or(before.is_whole.then_some(0));
        known.map_or(0.0, |before| {
            (f64::from(sums.in_use) - f64::from(before)) / interval.as_secs_f64().max(1e-3)
        })
    };
    let owners = table.owners(&found, sockets);
    let listed = found.iter().zip(owners).map(|(tuple, owners)| Tuple {
        source: tuple.0.source(),
        destination: tuple.0.destination(),
        in_use: tuple.1.in_use,
        low_parity: tuple.1.low_parity,
        states: tuple.1.states(),
        closes_per_s: tuple.1.closes_per_s(),
        growth_per_s: growth(tuple),
        owners,
    });
    (listed.collect(), number.saturating_sub(LISTED) as u64)
}

fn list_services(table: &Table, sockets: &Sockets) -> Vec<Service> {
    let mut found: Vec<(Key, Sums)> = table.sums.iter().map(|(key, sums)| (*key, *sums)).collect();
    found.sort_unstable_by_key(|(key, _)| key.port());
    found.truncate(LISTED);
    let owners = table.owners(&found, sockets);
    let listed = found.iter().zip(owners).map(|((key, sums), workers)| Service {
        port: key.port(),
        states: sums.states(),
        closes_per_s: sums.closes_per_s(),
        workers,
    });
    listed.collect()
}
