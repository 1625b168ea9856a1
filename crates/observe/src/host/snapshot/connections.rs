//! TCP connections, by source and destination.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use fourtuple_record::snapshot::{
    Connections, EphemeralPorts, HeldPort, Owner, SelfConnected, Service, Source, Tuple,
};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query, Socket};

use crate::host::snapshot::listeners::Handshakes;
use crate::host::snapshot::processes::Sockets;
use crate::host::snapshot::stalled::{self, Waiting};
use crate::host::snapshot::sums::{self, Fast, Key, Sums, Table};
use crate::host::snapshot::{LISTED, reason, running_fix, text};

/// Maximum number of tuples whose ports in use are kept for the next reading.
const KEPT: usize = 4_096;
/// States of a handshake in progress (TCP_SYN_RECV, TCP_NEW_SYN_RECV).
const SYN_RECV: [u8; 2] = [3, 12];

/// Ports in use of the tuples of a reading.
#[derive(Debug, Default)]
pub(super) struct Before {
    in_use: HashMap<Key, u32, Fast>,
    /// Whether these are all tuples: one that is missing had no port in use.
    is_whole: bool,
    /// Bytes that servers had not read, by inode of the socket.
    unread: HashMap<u32, u32>,
    /// Sources of the outgoing connections of this reading that a program has open, also of tuples that are not listed.
    pub(super) open_sources: BTreeSet<IpAddr>,
}

/// The sockets of one pass, whose processes are not known yet.
pub(super) struct Pass {
    query: Query,
    /// First port of the range.
    low: u16,
    range: Ports,
    held: Held,
    /// Ports of the range that UDP sockets hold.
    udp: Ports,
    /// The UDP sockets on ports of the range.
    udp_inodes: Vec<u32>,
    all: Sums,
    has_close_wait: bool,
    tuples: Table,
    services: Table,
    /// Connections of ports outside of the range at which nobody listens, by port.
    left: Table,
    /// Handshakes in progress, by the address and port of this side.
    pub(super) handshakes: HashMap<SocketAddr, Handshakes>,
    sources: Sources,
    /// Address and inode of sockets that are connected to themselves.
    self_connected: Vec<(SocketAddr, u32)>,
    unanswered: Waiting,
    /// Bytes that servers have not read, by inode of the socket.
    unread: HashMap<u32, u32>,
}

impl Pass {
    /// Reads all TCP sockets. `peer`: the only peer whose connections count.
    pub(super) fn read(
        ports: Option<&EphemeralPorts>,
        peer: Option<(IpAddr, Option<u16>)>,
    ) -> Result<Pass, String> {
        let mut listening = Ports::default();
        let listen = 1 << state::LISTEN;
        // Sockets without a peer are not in the table of connections.
        let others = 1 << state::CLOSE | 1 << state::BOUND;
        let mut pass = Pass {
            query: Query {
                transport: Transport::Tcp,
                states: !(listen | others),
                peer,
                port: 0,
                times: false,
            },
            low: ports.map_or(0, |ports| ports.low),
            range: Ports::default(),
            held: Held::default(),
            udp: Ports::default(),
            udp_inodes: Vec::new(),
            all: Sums::default(),
            has_close_wait: false,
            tuples: Table::default(),
            services: Table::default(),
            left: Table::default(),
            handshakes: HashMap::new(),
            sources: Sources::default(),
            self_connected: Vec::new(),
            unanswered: Waiting::default(),
            unread: HashMap::new(),
        };
        if let Some(ports) = ports {
            let free = (ports.low..=ports.high).filter(|port| ports.contains(*port));
            free.for_each(|port| pass.range.insert(port));
        }
        socket_census::each(&Query { states: listen, peer: None, ..pass.query }, |socket| {
            listening.insert(socket.local.port());
            pass.hold("listening", socket);
        })
        .map_err(failed)?;
        let query = pass.query;
        socket_census::each(&query, |socket| pass.add(socket, &listening)).map_err(failed)?;
        Ok(pass)
    }

    fn add(&mut self, socket: &Socket, listening: &Ports) {
        if socket.state == state::CLOSE {
            // Closed after the kernel found it in the table, and before it wrote the reply. After a close with SO_LINGER 0 the source
            // and the port of the peer are 0 (tcp_disconnect).
            return;
        }
        let port = socket.local.port();
        self.all.count(socket);
        // Without an inode the connection is in an accept queue.
        self.has_close_wait |= socket.state == state::CLOSE_WAIT && socket.inode != 0;
        if listening.contains(port) {
            if SYN_RECV.contains(&socket.state) {
                let local = SocketAddr::new(socket.local.ip().to_canonical(), port);
                let its = self.handshakes.entry(local).or_default();
                its.number += 1;
                if socket.retransmits > 0 {
                    its.resent += 1;
                    its.resent_to = its.resent_to.or(Some(socket.remote.ip().to_canonical()));
                }
            }
            self.unanswered.add(socket, Some(port));
            if socket.state == state::ESTABLISHED && socket.unread > 0 && socket.inode != 0 {
                self.unread.insert(socket.inode, socket.unread);
            }
            self.services.add(Key::of_service(port), socket, None);
            return;
        }
        self.unanswered.add(socket, None);
        if socket.local == socket.remote && self.self_connected.len() < LISTED {
            self.self_connected.push((socket.local, socket.inode));
        }
        let in_range = self.range.contains(port).then_some(port & 1 == self.low & 1);
        match in_range {
            Some(_) => self.sources.add(socket.local),
            None => self.left.add(Key::of_service(port), socket, None),
        }
        self.tuples.add(Key::of_tuple(socket.local.ip(), socket.remote), socket, in_range);
    }

    fn hold(&mut self, kind: &'static str, socket: &Socket) {
        if self.range.contains(socket.local.port()) {
            self.held.add(kind, socket.local, socket.inode);
        }
    }

    /// Returns whether there are TIME_WAIT sockets.
    pub(super) fn has_time_wait(&self) -> bool {
        self.all.in_state(state::TIME_WAIT) > 0
    }

    /// Adds the processes, and the sockets without a peer. `plain`: TIME_WAIT sockets without TCP timestamps, by tuple.
    pub(super) fn finish(
        mut self,
        sockets: &Sockets,
        before: &Before,
        interval: Duration,
        now: &mut Before,
        plain: Option<&HashMap<Key, u32, Fast>>,
    ) -> Result<Connections, String> {
        self.tuples.add_processes(sockets);
        self.services.add_processes(sockets);
        self.left.add_processes(sockets);
        self.hold_bound(sockets).map_err(failed)?;
        // The ports that UDP sockets hold are the only figure here that a kernel without udp_diag lacks.
        let held_udp_hidden = self.hold_udp().map_err(failed).err();
        let close_wait = match self.has_close_wait {
            true => stalled::close_wait(&self.query, sockets).map_err(failed)?,
            false => Vec::new(),
        };
        let owner = |inode| sockets.holder(inode).and_then(|pid| sockets.owner(pid, 1));
        let self_connected = self.self_connected.iter();
        let self_connected =
            self_connected.map(|(address, inode)| SelfConnected { address: *address, owner: owner(*inode) });
        let self_connected = self_connected.collect();
        let (held_tcp, held_tcp_low_parity) = self.held.tcp.count(self.low);
        let (held_bound, _) = self.held.bound.count(self.low);
        let (held_udp, _) = self.udp.count(self.low);
        let udp_holder = self.udp_holder(sockets);
        let (held, held_left_out) = self.held.listed(sockets);
        let unanswered = mem::take(&mut self.unanswered).listed(sockets, &self.query).map_err(failed)?;
        let is_left = |(inode, bytes): &(&u32, &u32)| before.unread.get(inode) == Some(bytes);
        let left = self.unread.iter().filter(is_left).map(|(inode, _)| *inode).collect();
        let unread = stalled::unread(&left, &self.query, sockets).map_err(failed)?;
        now.unread = mem::take(&mut self.unread);
        let sources = self.sources.listed(self.low, &self.tuples, sockets);
        now.open_sources = open_sources(&self.tuples);
        let (mut tuples, others) = list(&self.tuples, sockets, before, interval, now);
        if let Some(plain) = plain {
            for tuple in &mut tuples {
                let key = Key::of_tuple(tuple.source, tuple.destination);
                tuple.time_wait_plain = Some(plain.get(&key).copied().unwrap_or(0));
            }
        }
        let ports = self.range.count(self.low).0;
        sums::add(&mut tuples, ports, &self.query).map_err(failed)?;
        running_fix::add(&mut tuples, ports, sockets.root());
        let services = list_services(&self.services, sockets);
        Ok(Connections {
            age_ns: 0,
            processes_by: sockets.found_by().to_owned(),
            processes_hidden: sockets.hidden,
            states: self.all.states(),
            tuples_left_out: (self.tuples.sums.len() - tuples.len()) as u64,
            tuples_left_out_states: others.states(),
            tuples,
            sources,
            held,
            held_udp_hidden,
            held_left_out,
            held_tcp,
            held_tcp_low_parity,
            held_bound,
            held_udp,
            udp_holder,
            services_left_out: (self.services.sums.len() - services.len()) as u64,
            services,
            left: list_services(&self.left, sockets),
            close_wait,
            unix_close_wait: Vec::new(),
            self_connected,
            unanswered,
            unread,
        })
    }

    /// Adds the TCP sockets that are only bound.
    fn hold_bound(&mut self, sockets: &Sockets) -> io::Result<()> {
        let Some(bound) = &sockets.bound else {
            let bound = Query { states: 1 << state::BOUND, peer: None, ..self.query };
            return socket_census::each(&bound, |socket| self.hold("bound", socket));
        };
        // The pass over all descriptors has seen them.
        bound
            .iter()
            .filter(|bound| self.range.contains(bound.local.port()))
            .for_each(|bound| self.held.add("bound", bound.local, bound.inode));
        Ok(())
    }

    /// Adds the UDP sockets.
    fn hold_udp(&mut self) -> io::Result<()> {
        let states = 1 << state::CLOSE | 1 << state::ESTABLISHED;
        let udp = Query { transport: Transport::Udp, states, peer: None, ..self.query };
        socket_census::each(&udp, |socket| {
            if !self.range.contains(socket.local.port()) {
                return;
            }
            self.udp.insert(socket.local.port());
            self.udp_inodes.push(socket.inode);
            if socket.state == state::CLOSE {
                self.hold("udp", socket);
            }
        })
    }

    /// Returns the process that holds the most UDP sockets on ports of the range.
    fn udp_holder(&self, sockets: &Sockets) -> Option<Owner> {
        let mut holders: BTreeMap<u32, u32> = BTreeMap::new();
        for pid in self.udp_inodes.iter().filter_map(|inode| sockets.holder(*inode)) {
            *holders.entry(pid).or_default() += 1;
        }
        let (pid, number) = holders.into_iter().max_by_key(|(_, number)| *number)?;
        sockets.owner(pid, number)
    }
}

fn failed(error: io::Error) -> String {
    format!("sock_diag(7): {}", reason(&error))
}

fn open_sources(tuples: &Table) -> BTreeSet<IpAddr> {
    const OPEN: [u8; 3] = [state::ESTABLISHED, state::SYN_SENT, state::CLOSE_WAIT];
    let open = tuples.sums.iter().filter(|(_, sums)| OPEN.iter().any(|state| sums.in_state(*state) > 0));
    open.map(|(key, _)| key.source()).collect()
}

/// Returns the tuples with the most ports in use, and the sums over all other tuples.
fn list(
    table: &Table,
    sockets: &Sockets,
    before: &Before,
    interval: Duration,
    now: &mut Before,
) -> (Vec<Tuple>, Sums) {
    let mut found = table.sums.clone();
    let rank = |(key, sums): &(Key, Sums)| (Reverse(sums.in_use), *key);
    now.is_whole = found.len() <= KEPT;
    let mut others = Sums::default();
    if !now.is_whole {
        found.select_nth_unstable_by_key(KEPT, rank);
        found.drain(KEPT..).for_each(|(_, sums)| others.merge(&sums));
    }
    now.in_use.extend(found.iter().map(|(key, sums)| (*key, sums.in_use)));
    found.sort_unstable_by_key(rank);
    found.drain(LISTED.min(found.len())..).for_each(|(_, sums)| others.merge(&sums));
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
        closed_last_s: tuple.1.closed_last_s,
        closing_ns: tuple.1.closing().as_nanos() as u64,
        growth_per_s: growth(tuple),
        time_wait_plain: None,
        idle: None,
        fix: None,
        owners,
    });
    (listed.collect(), others)
}

/// Returns the services with the most sockets.
fn list_services(table: &Table, sockets: &Sockets) -> Vec<Service> {
    let mut found = table.sums.clone();
    found.sort_unstable_by_key(|(key, sums)| (Reverse(sums.sockets()), *key));
    found.truncate(LISTED);
    found.sort_unstable_by_key(|(key, _)| key.port());
    let owners = table.owners(&found, sockets);
    let listed = found.iter().zip(owners).map(|((key, sums), workers)| Service {
        port: key.port(),
        states: sums.states(),
        closes_per_s: sums.closes_per_s(),
        workers,
    });
    listed.collect()
}

/// A bit for each port.
#[derive(Debug)]
pub(super) struct Ports(Box<[u64; 1024]>);

impl Default for Ports {
    fn default() -> Ports {
        Ports(Box::new([0; 1024]))
    }
}

impl Ports {
    pub(super) fn insert(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
    }

    pub(super) fn contains(&self, port: u16) -> bool {
        self.0[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    /// Returns the number of ports, and the number with this parity.
    pub(super) fn count(&self, parity: u16) -> (u32, u32) {
        let mask = if parity & 1 == 0 { 0x5555_5555_5555_5555 } else { 0xaaaa_aaaa_aaaa_aaaa };
        let sum = |mask: u64| self.0.iter().map(|word| (word & mask).count_ones()).sum();
        (sum(u64::MAX), sum(mask))
    }
}

/// Held ports of the range.
#[derive(Default)]
pub(super) struct Held {
    /// The inode of a socket and the number of sockets, by kind, port and address.
    sockets: BTreeMap<(&'static str, u16, IpAddr), (u32, u32)>,
    /// Ports that TCP sockets hold.
    pub(super) tcp: Ports,
    /// Ports that TCP sockets without a peer hold that do not listen.
    pub(super) bound: Ports,
}

impl Held {
    pub(super) fn add(&mut self, kind: &'static str, local: SocketAddr, inode: u32) {
        // Sockets of a SO_REUSEPORT group share a port and an address.
        let (first, number) = self.sockets.entry((kind, local.port(), local.ip())).or_default();
        *first = (*first).max(inode);
        *number += 1;
        if kind != "udp" {
            self.tcp.insert(local.port());
        }
        if kind == "bound" {
            self.bound.insert(local.port());
        }
    }

    /// Returns the ports in the order of their kinds and numbers, and the number of ports that are not listed. The ports that are only bound
    /// come first, because no other part of a snapshot has them.
    pub(super) fn listed(self, sockets: &Sockets) -> (Vec<HeldPort>, u64) {
        let left_out = self.sockets.len().saturating_sub(LISTED) as u64;
        let first = self.sockets.into_iter().take(LISTED);
        let listed = first.map(|((kind, port, address), (inode, number))| HeldPort {
            port,
            address,
            kind: kind.to_owned(),
            owner: sockets.holder(inode).and_then(|pid| sockets.owner(pid, number)),
        });
        (listed.collect(), left_out)
    }
}

/// Maximum number of source addresses whose ports are counted. Only transparent proxies have more, the addresses of their clients.
const COUNTED: usize = 256;

#[derive(Debug, Default)]
struct OfSource {
    ports: Ports,
    destinations: u64,
    owners: HashMap<u32, u32, Fast>,
}

/// Ports by source address.
#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<Key, OfSource, Fast>);

impl Sources {
    /// Adds a connection on a port of the range.
    pub(super) fn add(&mut self, local: SocketAddr) {
        let key = Key::of_source(local.ip());
        if self.0.len() < COUNTED {
            self.0.entry(key).or_default().ports.insert(local.port());
        } else if let Some(source) = self.0.get_mut(&key) {
            source.ports.insert(local.port());
        }
    }

    /// Returns the sources with the most ports in use, with the destinations and the largest process of each of their tuples. `low`
    /// is the first port of the range.
    pub(super) fn listed(mut self, low: u16, tuples: &Table, sockets: &Sockets) -> Vec<Source> {
        for (key, sums) in &tuples.sums {
            let Some(source) = self.0.get_mut(&Key::of_source(key.source())) else { continue };
            let (pid, number) = sums.owner();
            source.destinations += 1;
            if pid != 0 {
                *source.owners.entry(pid).or_default() += number;
            }
        }
        let source = |(key, of_source): (Key, OfSource)| {
            let mut owners: Vec<Owner> =
                of_source.owners.iter().filter_map(|(pid, number)| sockets.owner(*pid, *number)).collect();
            owners.sort_by_key(|owner| (Reverse(owner.sockets), owner.pid));
            owners.truncate(crate::host::snapshot::LISTED);
            let (in_use, low_parity) = of_source.ports.count(low);
            Source { address: key.source(), in_use, low_parity, destinations: of_source.destinations, owners }
        };
        let mut sources: Vec<Source> = self.0.into_iter().map(source).collect();
        sources.sort_by_key(|source| (Reverse(source.in_use), source.address));
        sources.truncate(crate::host::snapshot::LISTED);
        sources
    }
}

pub(super) fn read_ports(root: &Path) -> Result<EphemeralPorts, String> {
    let range = text(root, "proc/sys/net/ipv4/ip_local_port_range")?;
    // A kernel without the list reserves nothing.
    let reserved = text(root, "proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    EphemeralPorts::parse(&range, &reserved)
        .ok_or_else(|| format!("net.ipv4.ip_local_port_range holds {:?}", range.trim()))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use fourtuple_syscalls::seccomp::{self, Facility};
    use fourtuple_testing::in_namespace;

    use super::*;

    #[test]
    fn without_udp_sockets_the_reason_is_named() {
        in_namespace(|| {
            let ports = EphemeralPorts { low: 20_000, high: 20_019, reserved: Vec::new() };
            let _held = UdpSocket::bind("127.0.0.1:20003").unwrap();
            // The sockets that are only bound come from the pass over all descriptors.
            let mut sockets = Sockets::default();
            sockets.bound = Some(Vec::new());
            let read = |refused: bool| {
                let pass = Pass::read(Some(&ports), None).unwrap();
                if refused {
                    seccomp::refuse(Facility::SocketDiag).unwrap();
                }
                let (before, mut now) = (Before::default(), Before::default());
                pass.finish(&sockets, &before, Duration::ZERO, &mut now, None).unwrap()
            };
            let seen = read(false);
            assert_eq!((seen.held.len(), seen.held_udp_hidden), (1, None));
            let hidden = read(true);
            assert_eq!(hidden.held, []);
            assert_eq!(hidden.held_udp_hidden.as_deref(), Some("sock_diag(7): EPROTONOSUPPORT"));
        });
    }

    #[test]
    fn ports_are_counted_by_parity() {
        let mut ports = Ports::default();
        [0, 1, 63, 64, 65, 65_535, 65_535].into_iter().for_each(|port| ports.insert(port));
        assert_eq!((ports.count(0), ports.count(20_001)), ((6, 2), (6, 4)));
        assert!(ports.contains(63) && !ports.contains(62));
    }
}
