//! TCP connections, by tuple.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fourtuple_record::snapshot::{Connections, EphemeralPorts, Service, Tuple};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query, Socket};

use super::LISTED;
use super::close_wait;
use super::held::Held;
use super::processes::Sockets;
use super::reason;
use super::sources::Sources;

/// Ports in use of each tuple.
pub(super) type Before = HashMap<(IpAddr, SocketAddr), u32>;

/// The part of TIME_WAIT in which the sockets are counted that entered it: 10 of 60 s.
const RECENT: Duration = Duration::from_secs(10);
const TIME_WAIT: Duration = Duration::from_secs(60);
const ENOENT: i32 = 2;

#[derive(Default)]
struct Sums {
    states: [u64; 16],
    ports: HashSet<u16>,
    recent: u64,
    owners: BTreeMap<u32, u32>,
}

impl Sums {
    fn add(&mut self, socket: &Socket, sockets: &Sockets) {
        self.states[usize::from(socket.state & 15)] += 1;
        let is_recent = |left: Duration| left > TIME_WAIT - RECENT;
        self.recent += u64::from(socket.state == state::TIME_WAIT && socket.expires.is_some_and(is_recent));
        for pid in sockets.holders(socket.inode) {
            *self.owners.entry(*pid).or_default() += 1;
        }
    }

    fn states(&self) -> BTreeMap<String, u64> {
        let named = self.states.iter().zip(NAMES).filter(|(number, _)| **number > 0);
        named.map(|(number, name)| (name.to_owned(), *number)).collect()
    }

    fn owners(&self, sockets: &Sockets) -> Vec<fourtuple_record::snapshot::Owner> {
        let mut owners: Vec<_> =
            self.owners.iter().map(|(pid, number)| sockets.owner(*pid, *number)).collect();
        owners.sort_by_key(|owner| std::cmp::Reverse(owner.sockets));
        owners.truncate(LISTED);
        owners
    }

    fn closes_per_s(&self) -> f64 {
        self.recent as f64 / RECENT.as_secs_f64()
    }
}

/// Names of the TCP states by number (include/net/tcp_states.h).
const NAMES: [&str; 16] = [
    "unknown",
    "established",
    "syn-sent",
    "syn-recv",
    "fin-wait-1",
    "fin-wait-2",
    "time-wait",
    "close",
    "close-wait",
    "last-ack",
    "listen",
    "closing",
    "syn-recv",
    "bound",
    "unknown",
    "unknown",
];

pub(super) fn read(
    ports: Option<&EphemeralPorts>,
    sockets: &Sockets,
    before: &Before,
    interval: Duration,
    now: &mut Before,
) -> Result<Connections, String> {
    let mut listening: HashSet<u16> = HashSet::new();
    let failed = |error: std::io::Error| format!("sock_diag(7): {}", reason(&error));
    let mut held = Held::default();
    let query = Query { transport: Transport::Tcp, states: 1 << state::LISTEN, peer: None, times: false };
    socket_census::each(&query, |socket| {
        listening.insert(socket.local.port());
        if let Some(ports) = ports {
            held.add_tcp(ports, socket);
        }
    })
    .map_err(failed)?;
    let mut all = Sums::default();
    let mut tuples: HashMap<(IpAddr, SocketAddr), Sums> = HashMap::new();
    let mut services: BTreeMap<u16, Sums> = BTreeMap::new();
    let query = Query { states: !(1 << state::LISTEN), ..query };
    socket_census::each(&query, |socket| {
        if socket.state == state::CLOSE {
            ports.inspect(|ports| held.add_tcp(ports, socket));
            return;
        }
        all.states[usize::from(socket.state & 15)] += 1;
        if listening.contains(&socket.local.port()) {
            services.entry(socket.local.port()).or_default().add(socket, sockets);
        } else {
            let sums = tuples.entry((socket.local.ip(), socket.remote)).or_default();
            sums.add(socket, sockets);
            if ports.is_none_or(|ports| ports.contains(socket.local.port())) {
                sums.ports.insert(socket.local.port());
            }
        }
    })
    .map_err(failed)?;
    if let Some(ports) = ports {
        let udp = Query { transport: Transport::Udp, states: 1 << state::CLOSE, peer: None, times: false };
        match socket_census::each(&udp, |socket| held.add_udp(ports, socket)) {
            // A kernel without udp_diag lists no UDP sockets.
            Err(error) if error.raw_os_error() == Some(ENOENT) => {}
            result => result.map_err(failed)?,
        }
    }
    let close_wait = close_wait::read(&query, sockets).map_err(failed)?;
    let (held, held_left_out) = held.listed(sockets);
    let low = ports.map_or(0, |ports| ports.low);
    let mut sources = Sources::default();
    for (&(source, _), sums) in &tuples {
        sources.add(source, &sums.ports, &sums.owners);
    }
    let mut listed: Vec<Tuple> = tuples
        .iter()
        .map(|(&(source, destination), sums)| {
            let in_use = sums.ports.len() as u32;
            now.insert((source, destination), in_use);
            let growth = before.get(&(source, destination)).map_or(0.0, |before| {
                (f64::from(in_use) - f64::from(*before)) / interval.as_secs_f64().max(1e-3)
            });
            Tuple {
                source,
                destination,
                in_use,
                low_parity: sums.ports.iter().filter(|port| **port & 1 == low & 1).count() as u32,
                states: sums.states(),
                closes_per_s: sums.closes_per_s(),
                growth_per_s: growth,
                owners: sums.owners(sockets),
            }
        })
        .collect();
    listed.sort_by_key(|tuple| (std::cmp::Reverse(tuple.in_use), tuple.source, tuple.destination));
    let tuples_left_out = listed.len().saturating_sub(LISTED) as u64;
    listed.truncate(LISTED);
    Ok(Connections {
        states: all.states(),
        tuples: listed,
        tuples_left_out,
        sources: sources.listed(low, sockets),
        held,
        held_left_out,
        services: services
            .iter()
            .take(LISTED)
            .map(|(port, sums)| Service {
                port: *port,
                states: sums.states(),
                closes_per_s: sums.closes_per_s(),
                workers: sums.owners(sockets),
            })
            .collect(),
        close_wait,
    })
}
