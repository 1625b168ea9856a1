//! Sums over TCP sockets by source and destination, or by service.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use fourtuple_bpf::PlainTimeWait;
use fourtuple_record::snapshot::{IdleTimes, Owner, Tuple};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket_census::{self, Query, Socket};

use crate::host::snapshot::LISTED;
use crate::host::snapshot::processes::Sockets;

/// The part of TIME_WAIT in which the sockets are counted that entered it: 10 of 60 s.
const RECENT: Duration = Duration::from_secs(10);
const TIME_WAIT: Duration = Duration::from_secs(60);

/// Names of the TCP states by number (include/net/tcp_states.h).
const NAMES: [&str; STATES] = [
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
];
const STATES: usize = 13;

/// Returns the name of a TCP state.
pub(super) fn name(state: u8) -> &'static str {
    NAMES.get(usize::from(state)).copied().unwrap_or(NAMES[0])
}

/// Two addresses and a port: the tuple of connections whose source port is left open. A service has its port only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    source: (u64, u64),
    destination: (u64, u64),
    port: u16,
}

impl Key {
    pub(super) fn of_tuple(source: IpAddr, destination: SocketAddr) -> Key {
        Key { source: words(source), destination: words(destination.ip()), port: destination.port() }
    }

    pub(super) fn of_service(port: u16) -> Key {
        Key { source: (0, 0), destination: (0, 0), port }
    }

    pub(super) fn of_source(source: IpAddr) -> Key {
        Key { source: words(source), destination: (0, 0), port: 0 }
    }

    pub(super) fn source(&self) -> IpAddr {
        address(self.source)
    }

    pub(super) fn destination(&self) -> SocketAddr {
        SocketAddr::new(address(self.destination), self.port)
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

fn words(address: IpAddr) -> (u64, u64) {
    match address {
        IpAddr::V4(v4) => (0, 0xffff << 32 | u64::from(v4.to_bits())),
        IpAddr::V6(v6) => ((v6.to_bits() >> 64) as u64, v6.to_bits() as u64),
    }
}

fn address((high, low): (u64, u64)) -> IpAddr {
    Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low)).to_canonical()
}

/// Sums over the sockets of a key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    states: [u32; STATES],
    /// Sockets on ports of the range.
    pub(super) in_use: u32,
    /// Sockets on ports of the range that have the parity of its first port.
    pub(super) low_parity: u32,
    recent: u32,
    /// Sockets that entered TIME_WAIT in the last second.
    pub(super) closed_last_s: u32,
    /// Milliseconds since the oldest of the recent closes, and of all.
    oldest: [u32; 2],
    /// One process with its sockets; process 0: none yet. Further processes are in the table.
    owner: (u32, u32),
}

impl Sums {
    fn add(&mut self, socket: &Socket) {
        self.states[usize::from(socket.state).min(STATES - 1)] += 1;
        if let Some(left) = socket.expires.filter(|_| socket.state == state::TIME_WAIT) {
            self.recent += u32::from(left > TIME_WAIT - RECENT);
            self.closed_last_s += u32::from(left > TIME_WAIT - Duration::from_secs(1));
            let age = TIME_WAIT.saturating_sub(left);
            let ms = age.as_millis() as u32;
            self.oldest = [self.oldest[0].max(if age < RECENT { ms } else { 0 }), self.oldest[1].max(ms)];
        }
    }

    /// Returns the sockets by the names of their states.
    pub(super) fn states(&self) -> BTreeMap<String, u64> {
        let mut states = BTreeMap::new();
        for (number, name) in self.states.iter().zip(NAMES).filter(|(number, _)| **number > 0) {
            *states.entry(name.to_owned()).or_default() += u64::from(*number);
        }
        states
    }

    /// Returns the number of sockets in a state.
    pub(super) fn in_state(&self, state: u8) -> u32 {
        self.states[usize::from(state).min(STATES - 1)]
    }

    /// Returns a process with its sockets, usually the largest; process 0: none.
    pub(super) fn owner(&self) -> (u32, u32) {
        self.owner
    }

    pub(super) fn closes_per_s(&self) -> f64 {
        f64::from(self.recent) / RECENT.as_secs_f64()
    }

    /// Returns the time since the first of the recent closes; without one, since the first of all.
    pub(super) fn closing(&self) -> Duration {
        Duration::from_millis(self.oldest[usize::from(self.recent == 0)].into())
    }

    /// Adds the sockets of another key.
    pub(super) fn merge(&mut self, other: &Sums) {
        self.states.iter_mut().zip(other.states).for_each(|(sum, number)| *sum += number);
    }

    pub(super) fn sockets(&self) -> u32 {
        self.states.iter().sum()
    }

    /// Adds a socket to the sums over all keys.
    pub(super) fn count(&mut self, socket: &Socket) {
        self.add(socket);
    }
}

/// Sums by key.
#[derive(Debug, Default)]
pub(super) struct Table {
    places: HashMap<Key, u32, Fast>,
    pub(super) sums: Vec<(Key, Sums)>,
    /// Place in `sums` and inode of the sockets whose processes are to be added.
    held: Vec<(u32, u32)>,
    /// Sockets of the processes of a place, except the process in its sums.
    others: HashMap<(u32, u32), u32, Fast>,
}

impl Table {
    /// Adds a socket. `range`: its port is in the range, and whether it has the parity of the first port.
    pub(super) fn add(&mut self, key: Key, socket: &Socket, range: Option<bool>) {
        let place = *self.places.entry(key).or_insert_with(|| {
            self.sums.push((key, Sums::default()));
            self.sums.len() as u32 - 1
        });
        let sums = &mut self.sums[place as usize].1;
        sums.add(socket);
        if let Some(is_low) = range {
            sums.in_use += 1;
            sums.low_parity += u32::from(is_low);
        }
        // Sockets in TIME_WAIT and in accept queues have no inode.
        if socket.inode != 0 {
            self.held.push((place, socket.inode));
        }
    }

    /// Adds the processes of the sockets.
    pub(super) fn add_processes(&mut self, sockets: &Sockets) {
        for (place, inode) in mem::take(&mut self.held) {
            let owner = &mut self.sums[place as usize].1.owner;
            // A socket of several processes counts once: the sums of a child that has copies of all descriptors are not figures of its own.
            let Some(pid) = sockets.holder(inode) else { continue };
            if owner.0 == 0 {
                owner.0 = pid;
            }
            if owner.0 == pid {
                owner.1 += 1;
            } else {
                *self.others.entry((place, pid)).or_default() += 1;
            }
        }
    }

    /// Returns the processes of each of these keys, the largest number of sockets first.
    pub(super) fn owners(&self, keys: &[(Key, Sums)], sockets: &Sockets) -> Vec<Vec<Owner>> {
        let mut owners: HashMap<u32, Vec<(u32, u32)>> =
            keys.iter().map(|(key, sums)| (self.places[key], vec![sums.owner])).collect();
        for ((place, pid), number) in &self.others {
            if let Some(of_key) = owners.get_mut(place) {
                of_key.push((*pid, *number));
            }
        }
        let listed = |(key, _): &(Key, Sums)| {
            let mut of_key = owners.get(&self.places[key]).cloned().unwrap_or_default();
            of_key.retain(|(pid, _)| *pid != 0);
            of_key.sort_unstable_by_key(|(pid, number)| (std::cmp::Reverse(*number), *pid));
            let living = of_key.iter().filter_map(|(pid, number)| sockets.owner(*pid, *number));
            living.take(LISTED).collect()
        };
        keys.iter().map(listed).collect()
    }
}

/// Builds hashers with a random seed, as peers choose addresses and ports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fast(u64);

impl Default for Fast {
    fn default() -> Fast {
        Fast(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Fast {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded(self.0)
    }
}

/// A multiplication to 128 bits whose halves are combined, for each integer.
pub(super) struct Folded(u64);

/// The fraction of the golden ratio, which is odd.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * u128::from(FACTOR);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0.wrapping_mul(FACTOR)
    }
}

/// Maximum number of tuples whose open sockets are read.
const MAX_TUPLES: usize = 4;

/// ESTABLISHED, FIN_WAIT_1, FIN_WAIT_2, CLOSE_WAIT, LAST_ACK and CLOSING.
const OPEN: u32 = 1 << state::ESTABLISHED | 1 << 4 | 1 << 5 | 1 << state::CLOSE_WAIT | 1 << 9 | 1 << 11;

/// The TIME_WAIT sockets of connections without TCP timestamps.
#[derive(Debug, Default)]
pub(super) enum Plain {
    /// Not decided yet how they are read.
    #[default]
    Undecided,
    /// By a BPF iterator over TCP sockets.
    Bpf(PlainTimeWait),
    /// Not: without the iterator only open sockets of the same tuple tell.
    Unknown,
}

impl Plain {
    /// Returns the number of such sockets by tuple; `None`: unknown.
    pub(super) fn read(&mut self, root: &Path) -> Option<HashMap<Key, u32, Fast>> {
        if matches!(self, Plain::Undecided) {
            let iterator = (root == Path::new("/")).then(PlainTimeWait::load).and_then(Result::ok);
            *self = iterator.map_or(Plain::Unknown, Plain::Bpf);
        }
        let Plain::Bpf(iterator) = self else { return None };
        let mut found: HashMap<Key, u32, Fast> = HashMap::default();
        let pass = iterator.each(|local, remote| {
            *found.entry(Key::of_tuple(local.ip().to_canonical(), remote)).or_default() += 1;
        });
        match pass {
            Ok(()) => Some(found),
            Err(_) => {
                *self = Plain::Unknown;
                None
            }
        }
    }
}

/// Adds to the tuples with a quarter of `ports` or more, at most [`MAX_TUPLES`], what their open sockets tell.
pub(super) fn add(tuples: &mut [Tuple], ports: u32, query: &Query) -> io::Result<()> {
    for tuple in tuples.iter_mut().take(MAX_TUPLES).filter(|tuple| is_large(tuple, ports)) {
        let peer = Some((tuple.destination.ip(), Some(tuple.destination.port())));
        let (mut idle, mut open, mut plain) = (Vec::new(), 0_u64, 0_u64);
        socket_census::each(&Query { states: OPEN, peer, times: true, ..*query }, |socket| {
            let Some(info) = socket.info.filter(|_| socket.local.ip().to_canonical() == tuple.source) else {
                return;
            };
            open += 1;
            plain += u64::from(!info.timestamps);
            if socket.state == state::ESTABLISHED {
                idle.push(info.idle());
            }
        })?;
        tuple.idle = times(idle);
        if tuple.time_wait_plain.is_none() {
            let waiting = tuple.states.get("time-wait").copied().unwrap_or(0);
            tuple.time_wait_plain = (waiting * plain).checked_div(open).map(|plain| plain as u32);
        }
    }
    Ok(())
}

/// Returns whether a tuple uses a quarter of the ports.
pub(super) fn is_large(tuple: &Tuple, ports: u32) -> bool {
    tuple.in_use > 0 && u64::from(tuple.in_use) * 4 >= u64::from(ports)
}

fn times(mut idle: Vec<Duration>) -> Option<IdleTimes> {
    idle.sort_unstable();
    let nanoseconds = |time: &Duration| time.as_nanos() as u64;
    Some(IdleTimes {
        median_ns: idle.get(idle.len() / 2).map(nanoseconds)?,
        longest_ns: idle.last().map(nanoseconds)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_are_counted_by_their_age() {
        let address = SocketAddr::from(([10, 0, 0, 1], 80));
        let socket = |state, left_ms| Socket {
            state,
            local: address,
            remote: address,
            expires: Some(Duration::from_millis(left_ms)),
            retransmits: 0,
            unread: 0,
            inode: 0,
            user: 0,
            info: None,
        };
        let of = |left_ms: &[u64]| {
            let mut sums = Sums::default();
            left_ms.iter().for_each(|left| sums.add(&socket(state::TIME_WAIT, *left)));
            // The timer of an open socket is another one.
            sums.add(&socket(state::ESTABLISHED, 59_900));
            (sums.closed_last_s, sums.closes_per_s(), sums.closing())
        };
        // Closed 0.5, 1, 5, 10 and 40 s ago.
        let all = [59_500, 59_000, 55_000, 50_000, 20_000];
        assert_eq!(of(&all), (1, 0.3, Duration::from_secs(5)));
        assert_eq!(of(&all[3..]), (0, 0.0, Duration::from_secs(40)));
    }
}
