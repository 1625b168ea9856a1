//! Binds sockets of a cgroup's programs to free source ports at connect(), beyond a share of the port range.

use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, PerCpuArray, RingBuf};
use aya::{Pod, include_bytes_aligned};
use fourtuple_syscalls::socket;

use crate::error::BpfError;
use crate::tracing::{Programs, address, address_bytes, failure};

const NAME: &str = "fix_ports";
const LOOKUP: &str = "bpf(BPF_MAP_LOOKUP_ELEM)";
const UPDATE: &str = "bpf(BPF_MAP_UPDATE_ELEM)";

/// Maximum number of additional source addresses.
pub const SOURCES: usize = 64;
/// Maximum number of network namespaces.
pub const NAMESPACES: usize = 64;
/// Shares have 16 bits after the point.
const ONE: f64 = 65_536.0;
const COUNTERS: usize = 26;
const DRY_RUN: u32 = 1;
const HAS_DESTINATION: u32 = 2;
const SPARES: u32 = 4;
const KNOWN: u32 = 1;
const NONE: u32 = 2;

/// Programs in the order of attaching.
const PROGRAMS: [&str; 2] = ["fix_ports_ipv4", "fix_ports_ipv6"];

/// Destinations by prefix and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DestinationFilter {
    /// An address of the prefix.
    pub address: IpAddr,
    /// Length of the prefix: 0 to 32, or to 128 for IPv6.
    pub length: u8,
    /// Port; `None` for all.
    pub port: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct FixPortsSettings {
    /// Share of the range, 0 to 1, up to which connects of a tuple proceed unchanged.
    pub past: f64,
    /// Whether to count only.
    pub dry_run: bool,
    /// Whether draws leave each fourth port to programs without a fix.
    pub spares: bool,
    /// Destinations to act on; `None` for all.
    pub destination: Option<DestinationFilter>,
    /// Additional source addresses, at most [`SOURCES`].
    pub sources: Vec<IpAddr>,
}

/// The ports of a network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespacePorts {
    /// First port of net.ipv4.ip_local_port_range.
    pub low: u16,
    /// Last port of net.ipv4.ip_local_port_range.
    pub high: u16,
    /// First and last ports of net.ipv4.ip_local_reserved_ports.
    pub reserved: Vec<(u16, u16)>,
    /// net.ipv4.tcp_tw_reuse: 0, 1, or 2 for loopback only.
    pub time_wait_reuse: u8,
    /// Whether the additional source addresses are local in this namespace.
    pub has_sources: bool,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Settings {
    past: u32,
    flags: u32,
    sources: u32,
    port: u16,
    hole: u16,
    address: [u8; 16],
    mask: [u8; 16],
}

/// A destination address within a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Destination {
    /// Cookie of the network namespace (SO_NETNS_COOKIE).
    pub namespace: u64,
    address: [u8; 16],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Route {
    source: [u8; 16],
    state: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Namespace {
    low: u16,
    high: u16,
    time_wait: u8,
    sources: u8,
    hole: u16,
    reserved: [u64; 1024],
}

/// A source address and a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FixTupleKey {
    /// Cookie of the network namespace.
    pub namespace: u64,
    source: [u8; 16],
    destination: [u8; 16],
    pub port: u16,
    hole: [u16; 3],
}

/// Counts of the connects from one source to one destination.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FixTuple {
    pub connects: u64,
    /// Connects whose port was drawn.
    pub drawn: u64,
    /// Connects past the share that were left to the kernel, because no port was found.
    pub fallbacks: u64,
    share: u32,
    samples: u32,
    cursor: u32,
    looks: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Numbers([u64; COUNTERS]);

// As in fix_ports.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 48 && mem::offset_of!(Settings, address) == 16);
const _: () = assert!(mem::size_of::<Destination>() == 24);
const _: () = assert!(mem::size_of::<Route>() == 20 && mem::offset_of!(Route, state) == 16);
const _: () = assert!(mem::size_of::<Namespace>() == 8 + 8192 && mem::offset_of!(Namespace, reserved) == 8);
const _: () = assert!(mem::size_of::<FixTupleKey>() == 48 && mem::offset_of!(FixTupleKey, port) == 40);
const _: () = assert!(mem::size_of::<FixTuple>() == 40 && mem::offset_of!(FixTuple, share) == 24);
const _: () = assert!(mem::size_of::<Numbers>() == 8 * COUNTERS);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}
// SAFETY: as above.
unsafe impl Pod for Destination {}
// SAFETY: as above.
unsafe impl Pod for Route {}
// SAFETY: as above.
unsafe impl Pod for Namespace {}
// SAFETY: as above.
unsafe impl Pod for FixTupleKey {}
// SAFETY: as above.
unsafe impl Pod for FixTuple {}
// SAFETY: as above.
unsafe impl Pod for Numbers {}

/// Counters of the programs, over all tuples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FixCounters {
    pub connects: u64,
    /// Connects that proceeded unchanged, by reason.
    pub left: Vec<(LeftAlone, u64)>,
    /// Connects whose port was drawn.
    pub drawn: u64,
    /// Connects whose socket was bound to an additional source address without a port.
    pub spread: u64,
    /// Connects past the share for which no port was found; the kernel searched.
    pub fallbacks: u64,
    /// Connects past the share in a dry run.
    pub would_draw: u64,
    /// Ports that draws looked up.
    pub probes: u64,
    /// Free 4-tuples whose port bind() refused.
    pub refused: u64,
    /// Ports found in order, after random ports were all taken.
    pub in_order: u64,
    /// Ports of a TIME_WAIT socket that were used again.
    pub time_wait_used: u64,
    /// Total time of draws, in nanoseconds.
    pub hook_ns: u64,
    /// Ports that the kernel's search would have looked at in vain.
    pub avoided: u64,
}

/// The reason why a connect proceeded unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeftAlone {
    /// A UDP socket.
    Udp,
    /// Neither TCP nor UDP. The first subflow of an MPTCP socket is a TCP socket.
    Protocol,
    /// The program has bound the socket to a port.
    BoundPort,
    /// The program has bound the socket to an address.
    BoundAddress,
    /// SO_BINDTODEVICE.
    Device,
    /// SO_MARK.
    Mark,
    /// IP_LOCAL_PORT_RANGE.
    Range,
    /// An unspecified or link-local destination.
    Destination,
    /// A destination outside the filter.
    Filter,
    /// The source address was not known yet.
    Route,
    /// The routing table has no source for the destination.
    Unreachable,
    /// The port range of the network namespace is not known.
    Namespace,
    /// At most the given share of the range was in use.
    Below,
    Table,
    /// No port was free for a connect before this one.
    Full,
}

impl LeftAlone {
    /// All reasons, in the order of the counters.
    pub const ALL: [LeftAlone; 15] = [
        LeftAlone::Udp,
        LeftAlone::Protocol,
        LeftAlone::BoundPort,
        LeftAlone::BoundAddress,
        LeftAlone::Device,
        LeftAlone::Mark,
        LeftAlone::Range,
        LeftAlone::Destination,
        LeftAlone::Filter,
        LeftAlone::Route,
        LeftAlone::Unreachable,
        LeftAlone::Namespace,
        LeftAlone::Below,
        LeftAlone::Table,
        LeftAlone::Full,
    ];

    /// The reasons that are bind() of the program.
    pub const BOUND: [LeftAlone; 2] = [LeftAlone::BoundPort, LeftAlone::BoundAddress];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            LeftAlone::Udp => "udp",
            LeftAlone::Protocol => "protocol",
            LeftAlone::BoundPort => "bound-port",
            LeftAlone::BoundAddress => "bound-address",
            LeftAlone::Device => "device",
            LeftAlone::Mark => "mark",
            LeftAlone::Range => "own-range",
            LeftAlone::Destination => "destination",
            LeftAlone::Filter => "filter",
            LeftAlone::Route => "source-unknown",
            LeftAlone::Unreachable => "no-route",
            LeftAlone::Namespace => "namespace-unknown",
            LeftAlone::Below => "below",
            LeftAlone::Table => "table-full",
            LeftAlone::Full => "none-free",
        }
    }
}

impl FixCounters {
    fn of(numbers: &[u64; COUNTERS]) -> FixCounters {
        let [connects, ..] = *numbers;
        let reasons = LeftAlone::ALL.into_iter().zip(numbers[1..].iter().copied());
        let [
            drawn,
            spread,
            fallbacks,
            would_draw,
            probes,
            refused,
            in_order,
            time_wait_used,
            hook_ns,
            avoided,
        ] = *numbers[1 + LeftAlone::ALL.len()..].first_chunk().expect("the counters have this length");
        FixCounters {
            connects,
            left: reasons.filter(|(_, number)| *number > 0).collect(),
            drawn,
            spread,
            fallbacks,
            would_draw,
            probes,
            refused,
            in_order,
            time_wait_used,
            hook_ns,
            avoided,
        }
    }

    /// Returns the number of connects that proceeded unchanged for this reason.
    pub fn left(&self, reason: LeftAlone) -> u64 {
        self.left.iter().find(|(known, _)| *known == reason).map_or(0, |(_, number)| *number)
    }
}

impl Destination {
    /// Creates the key of an address in the namespace with this cookie.
    pub fn new(namespace: u64, address: IpAddr) -> Destination {
        Destination { namespace, address: address_bytes(address) }
    }

    /// Returns the address; IPv4 for v4-mapped addresses.
    pub fn address(&self) -> IpAddr {
        address(self.address)
    }

    fn read(bytes: &[u8]) -> Option<Destination> {
        // SAFETY: there are as many bytes, and any are a valid Destination.
        (bytes.len() == mem::size_of::<Destination>())
            .then(|| unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

impl FixTupleKey {
    pub fn source(&self) -> IpAddr {
        address(self.source)
    }

    pub fn destination(&self) -> IpAddr {
        address(self.destination)
    }
}

impl FixTuple {
    /// Returns the estimated share of the range that the kernel's search could not use at the last connect, 0 to 1.
    pub fn share(&self) -> f64 {
        f64::from(self.share) / ONE
    }
}

impl NamespacePorts {
    fn value(&self) -> Namespace {
        let mut reserved = [0; 1024];
        for &(first, last) in &self.reserved {
            for port in first..=last {
                reserved[usize::from(port) / 64] |= 1 << (port % 64);
            }
        }
        Namespace {
            low: self.low,
            high: self.high,
            time_wait: self.time_wait_reuse,
            sources: u8::from(self.has_sources),
            hole: 0,
            reserved,
        }
    }
}

impl DestinationFilter {
    /// Returns whether connects to an address are among the destinations.
    pub fn includes(&self, destination: SocketAddr) -> bool {
        let (address, mask) = self.bits();
        let masked = u128::from_be_bytes(address_bytes(destination.ip())) & u128::from_be_bytes(mask);
        self.port.is_none_or(|port| port == destination.port())
            && self.address.is_ipv4() == destination.is_ipv4()
            && masked.to_be_bytes() == address
    }

    /// Returns address and mask, of 16 bytes each.
    fn bits(&self) -> ([u8; 16], [u8; 16]) {
        let length = u32::from(self.length) + if self.address.is_ipv4() { 96 } else { 0 };
        let mask = u128::MAX.checked_shl(128 - length.min(128)).unwrap_or(0);
        let address = u128::from_be_bytes(address_bytes(self.address)) & mask;
        (address.to_be_bytes(), mask.to_be_bytes())
    }
}

impl FixPortsSettings {
    fn value(&self) -> Settings {
        let (address, mask) = self.destination.map(|filter| filter.bits()).unwrap_or_default();
        let dry_run = if self.dry_run { DRY_RUN } else { 0 };
        let spares = if self.spares { SPARES } else { 0 };
        let has_destination = if self.destination.is_some() { HAS_DESTINATION } else { 0 };
        Settings {
            past: (self.past * ONE) as u32,
            flags: dry_run | has_destination | spares,
            sources: self.sources.len().min(SOURCES) as u32,
            port: self.destination.and_then(|filter| filter.port).unwrap_or(0),
            hole: 0,
            address,
            mask,
        }
    }
}

/// The programs for connect() of a cgroup. They are detached when this value is dropped or the process ends.
pub struct FixPorts {
    programs: Programs,
    namespaces: HashMap<MapData, u64, Namespace>,
    routes: HashMap<MapData, Destination, Route>,
    tuples: HashMap<MapData, FixTupleKey, FixTuple>,
    counts: PerCpuArray<MapData, Numbers>,
    requests: RingBuf<MapData>,
    /// The programs need the map when they are loaded.
    _sources: Array<MapData, [u8; 16]>,
}

impl std::fmt::Debug for FixPorts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FixPorts").finish_non_exhaustive()
    }
}

impl FixPorts {
    /// Creates the maps. The programs run from [`FixPorts::attach`] on.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] on a kernel without BTF.
    pub fn load(settings: &FixPortsSettings) -> Result<FixPorts, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("fix_ports.o"))?;
        programs.set("settings", settings.value())?;
        let mut sources: Array<MapData, [u8; 16]> = programs.map("sources")?;
        for (index, &source) in settings.sources.iter().take(SOURCES).enumerate() {
            let set = sources.set(index as u32, address_bytes(source), 0);
            set.map_err(|error| failure(NAME, UPDATE, &error))?;
        }
        Ok(FixPorts {
            namespaces: programs.map("namespaces")?,
            routes: programs.map("routes")?,
            tuples: programs.map("tuples")?,
            counts: programs.map("counts")?,
            requests: programs.map("requests")?,
            _sources: sources,
            programs,
        })
    }

    /// Attaches the programs to a cgroup (version 2) and the cgroups below it, each by a link, beside other programs.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`]; [`BpfError::Refused`] by a kernel without bpf_loop (Linux 5.17).
    pub fn attach(&mut self, cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
        PROGRAMS.into_iter().try_for_each(|program| self.programs.attach_cgroup(program, cgroup))
    }

    /// Lets the kernel verify the program for IPv4, and attaches it nowhere. It takes a twentieth of the time of the one for IPv6, and needs the
    /// same from the host.
    ///
    /// # Errors
    ///
    /// As of [`FixPorts::attach`].
    pub fn verify(&mut self) -> Result<(), BpfError> {
        self.programs.load_for_cgroup(PROGRAMS[0]).map(drop)
    }

    /// Detaches the programs; the counters stay readable.
    pub fn detach(&mut self) {
        self.programs.detach();
    }

    /// Sets the ports of the network namespace with this cookie.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] with E2BIG past [`NAMESPACES`] namespaces.
    pub fn set_namespace(&mut self, cookie: u64, ports: &NamespacePorts) -> Result<(), BpfError> {
        self.namespaces.insert(cookie, ports.value(), 0).map_err(|error| failure(NAME, UPDATE, &error))
    }

    /// Removes a network namespace: connects there are left alone.
    pub fn forget_namespace(&mut self, cookie: u64) {
        // ENOENT: it is not there, which is the desired state.
        let _ = self.namespaces.remove(&cookie);
    }

    /// Sets the source address that the routing table gives for a destination; `None`: there is none.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] with E2BIG if the table of destinations is full.
    pub fn set_route(&mut self, destination: &Destination, source: Option<IpAddr>) -> Result<(), BpfError> {
        let route = Route {
            source: source.map(address_bytes).unwrap_or_default(),
            state: if source.is_some() { KNOWN } else { NONE },
        };
        self.routes.insert(destination, route, 0).map_err(|error| failure(NAME, UPDATE, &error))
    }

    /// Removes a destination, so that the next connect there requests it again.
    pub fn forget(&mut self, destination: &Destination) {
        // ENOENT: it is not there, which is the desired state.
        let _ = self.routes.remove(destination);
    }

    /// Returns all destinations that were requested and not forgotten.
    pub fn destinations(&self) -> Vec<Destination> {
        self.routes.keys().flatten().collect()
    }

    /// Passes the destinations that were requested since the previous call.
    pub fn requested(&mut self, mut take: impl FnMut(Destination)) {
        while let Some(item) = self.requests.next() {
            if let Some(destination) = Destination::read(&item) {
                take(destination);
            }
        }
    }

    /// Waits until a destination is requested, at most this long. A signal does not end the wait.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if poll(2) fails.
    pub fn wait(&self, timeout: Duration) -> Result<(), BpfError> {
        // SAFETY: the ring owns the descriptor and outlives the call.
        let ring = unsafe { BorrowedFd::borrow_raw(self.requests.as_raw_fd()) };
        socket::wait_readable(ring, Some(timeout)).map(drop).map_err(|error| BpfError::of("poll", error))
    }

    /// Reads the counters.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn counters(&self) -> Result<FixCounters, BpfError> {
        let all = self.counts.get(&0, 0).map_err(|error| failure(NAME, LOOKUP, &error))?;
        let mut sums = [0; COUNTERS];
        for numbers in all.iter() {
            sums.iter_mut().zip(numbers.0).for_each(|(sum, number)| *sum += number);
        }
        Ok(FixCounters::of(&sums))
    }

    /// Returns the tuples. The table keeps the 8,192 tuples that connected last.
    pub fn tuples(&self) -> Vec<(FixTupleKey, FixTuple)> {
        self.tuples.iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_mask_of_128_bits() {
        let filter = |text: &str, length| {
            DestinationFilter { address: text.parse().unwrap(), length, port: None }.bits()
        };
        let (address, mask) = filter("192.0.2.129", 25);
        assert_eq!(address[10..], [0xff, 0xff, 192, 0, 2, 128]);
        assert_eq!(mask[10..], [0xff, 0xff, 255, 255, 255, 128]);
        let (address, mask) = filter("2001:db8:ffff::1", 32);
        assert_eq!(
            (address[..5].to_vec(), mask[..5].to_vec()),
            (vec![0x20, 1, 0xd, 0xb8, 0], vec![255, 255, 255, 255, 0])
        );
        assert_eq!(filter("::1", 0), ([0; 16], [0; 16]));
        assert_eq!(filter("0.0.0.0", 0).1[..13], [vec![255; 12], vec![0]].concat());
        assert_eq!(filter("::1", 128).1, [255; 16]);
    }

    #[test]
    fn reserved_ports_are_bits() {
        let ports = NamespacePorts {
            low: 1,
            high: 65_535,
            reserved: vec![(0, 0), (64, 66), (65_535, 65_535)],
            time_wait_reuse: 2,
            has_sources: false,
        };
        let value = ports.value();
        assert_eq!((value.reserved[0], value.reserved[1], value.reserved[1023]), (1, 7, 1 << 63));
        assert_eq!(value.reserved.iter().map(|word| word.count_ones()).sum::<u32>(), 5);
    }

    #[test]
    fn counters_have_the_order_of_the_program() {
        let numbers: [u64; COUNTERS] = std::array::from_fn(|index| index as u64 + 1);
        let counters = FixCounters::of(&numbers);
        assert_eq!(
            (counters.connects, counters.left(LeftAlone::Udp), counters.left(LeftAlone::Full)),
            (1, 2, 16)
        );
        assert_eq!((counters.drawn, counters.would_draw, counters.avoided), (17, 20, 26));
    }
}
