//! Measures on a live system how long connect() searches for a source port, with counts and histograms made in the kernel.

use std::fmt;
use std::mem;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr;

use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use aya::{Pod, include_bytes_aligned};
use fourtuple_syscalls::Errno;

use crate::error::BpfError;
use crate::filter::{HAS_ADDRESS, HAS_CGROUP, HAS_NAME, HAS_NETWORK, HAS_PORT, HAS_PROCESS, flag};
use crate::tracing::{
    self, COARSE, Programs, Tier, Times, address, address_bytes, thread_name, thread_name_bytes,
};

const NAME: &str = "connect_search";
const LOOKUP: &str = "bpf(BPF_MAP_LOOKUP_ELEM)";

/// Maximum number of pairs of process and destination with separate counts.
pub const TUPLES: usize = 2048;

/// Index in `errnos` of failures with an unknown errno.
const UNKNOWN: usize = 0;
/// Index in `errnos` of sockets that the program closed during the handshake.
const CLOSED_EARLY: usize = 255;

/// The hook of a program: a tracepoint, or the entry or the return of a function.
#[derive(Clone, Copy)]
enum Hook {
    Tracepoint(&'static str),
    Entry(&'static str),
    Exit(&'static str),
}

/// Programs in the order of attaching: the program at the start of a search is attached last and detached first.
const TP_BTF: [(&str, Hook); 4] = [
    ("sent_again", Hook::Tracepoint("tcp_retransmit_skb")),
    ("route_lookup", Hook::Tracepoint("fib_table_lookup")),
    ("answered", Hook::Tracepoint("inet_sock_set_state")),
    ("called", Hook::Tracepoint("inet_sock_set_state")),
];

/// The programs of the tier that times the search function itself.
const FEXIT: [(&str, Hook); 5] = [
    ("sent_again", Hook::Tracepoint("tcp_retransmit_skb")),
    ("search_returns", Hook::Exit("__inet_hash_connect")),
    ("search_begins", Hook::Entry("__inet_hash_connect")),
    ("answered", Hook::Tracepoint("inet_sock_set_state")),
    ("called", Hook::Tracepoint("inet_sock_set_state")),
];

/// Program and tracepoint that every packet of the host passes. Attached only for IPv6, whose searches end there.
const PACKETS: (&str, &str) = ("packet_queued", "net_dev_queue");

/// Number of histograms in the map of times.
const TIMES: usize = 4;

/// A filter of connects. A connect must match every field that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectFilter {
    /// Process id in this process's PID namespace.
    pub process: Option<u32>,
    /// Name of the process or thread that connects (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    /// Destination.
    pub address: Option<IpAddr>,
    pub port: Option<u16>,
    /// Id of a cgroup (version 2), which is the inode of its directory. Cgroups below it count as well.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the socket.
    pub network: Option<u32>,
    /// Approximate number of samples per second, and of additional samples of searches that took `outlier_ns` or longer.
    pub samples_per_s: u32,
    /// See `samples_per_s`.
    pub outlier_ns: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Settings {
    began_ns: u64,
    cgroup: u64,
    namespace_device: u64,
    namespace_inode: u64,
    outlier_ns: u64,
    flags: u32,
    process: u32,
    samples_per_window: u32,
    outliers_per_window: u32,
    name: [u8; 16],
    address: [u8; 16],
    port: u16,
    hole: u16,
    network: u32,
}

/// Samples are taken in windows of 2^24 ns.
const WINDOW_NS: u64 = 1 << 24;

/// A process and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct TupleKey {
    address: [u8; 16],
    /// Process id in this process's PID namespace if the process is in it, otherwise in the initial one.
    pub process: u32,
    pub port: u16,
    hole: u16,
}

/// Counts of the connects of one process to one destination. Arrays of two have a value for even and one for odd source ports.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Tuple {
    /// Total time of the searches that found a port, in nanoseconds.
    pub search_ns: [u64; 2],
    /// Completed handshakes.
    pub established: u64,
    /// Connections that the process closed first (active close), so that the port is in TIME_WAIT.
    pub closed_first: u64,
    /// Connections that the peer closed first.
    pub closed_by_peer: u64,
    /// Connects from a port that the program bound before, without a search.
    pub given_port: u64,
    to_retry: u32,
    /// Network namespace of the socket that connected first: inode of `/proc/PID/ns/net`.
    pub namespace: u32,
    /// Connects that failed, during the call or later.
    pub failed: u64,
    /// Failures because no port was free: EADDRNOTAVAIL, or EAGAIN for UDP.
    pub no_port: u64,
    /// Connects after a failed connect, up to the next successful connect.
    pub retries: u64,
    /// Retransmitted SYNs.
    pub syn_retries: u64,
    /// Process and destination.
    pub key: TupleKey,
    name: [u8; 16],
    /// Searches that found a port by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub buckets: [[u32; COARSE]; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Sums {
    lost_events: u64,
    lost_starts: u64,
    lost_tuples: u64,
    without_end: u64,
    untimed: u64,
    unanswered: u64,
    lost_answers: u64,
    given_port: u64,
    switched: u64,
    unmarked: u64,
    window: u64,
    samples_taken: u32,
    outliers_taken: u32,
    tuples: u32,
    ipv6_seen: u32,
    errnos: [u64; 256],
}

/// Sums over all connects that the filter selects.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Samples for which the ring was full.
    pub lost_events: u64,
    /// Connects that were not counted because the maps were full.
    pub lost_starts: u64,
    /// Searches, failures, handshakes and closes that are in no tuple because the table of tuples was full.
    pub lost_tuples: u64,
    /// Connections for which the end of the search was not seen.
    pub without_end: u64,
    /// Connects whose result was missed because the processor was counting another connect.
    pub lost_answers: u64,
    /// Connects for which the kernel had no memory to remember their tuple: their close counts only if the process that connected closes.
    pub unmarked: u64,
    /// Completed handshakes: the handshakes in `handshake`, and handshakes whose time is not known.
    pub established: u64,
    /// Connections over IPv6 whose search ended before the program at the end of IPv6 searches was attached.
    pub untimed: u64,
    /// Connects from a port that the program bound before connect().
    pub given_port: u64,
    /// Searches during which the task was not running all the time.
    pub switched: u64,
    errnos: [u64; 256],
    /// Searches that found an even port.
    pub even: Times,
    /// Searches that found an odd port.
    pub odd: Times,
    /// Times between the end of the search and the end of the handshake.
    pub handshake: Times,
    /// Searches that found no port.
    pub failed: Times,
}

/// One search of a sample.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Event {
    /// End of the search in nanoseconds since the programs were attached.
    pub at_ns: u64,
    pub search_ns: u64,
    /// Index in [`ConnectSearch::tuples`]. An index past the end means that the table was full.
    pub tuple: u32,
    /// The port that the search found, or 0 if it failed.
    pub source_port: u16,
    hole: u16,
}

// The layouts must equal the layouts in connect_search.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 96 && mem::offset_of!(Settings, network) == 92);
const _: () = assert!(mem::size_of::<TupleKey>() == 24 && mem::offset_of!(TupleKey, port) == 20);
const _: () = assert!(mem::size_of::<Tuple>() == 128 + 8 * COARSE && mem::offset_of!(Tuple, failed) == 56);
const _: () = assert!(mem::size_of::<Sums>() == 104 + 8 * 256 && mem::offset_of!(Sums, errnos) == 104);
const _: () = assert!(mem::size_of::<Event>() == 24 && mem::offset_of!(Event, source_port) == 20);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}
// SAFETY: as above.
unsafe impl Pod for Tuple {}
// SAFETY: as above.
unsafe impl Pod for Sums {}

impl TupleKey {
    /// Returns the destination.
    pub fn address(&self) -> IpAddr {
        address(self.address)
    }
}

impl Totals {
    /// Returns the failures by the name of their errno. `closed` means that the program closed the socket during the handshake.
    /// `unknown` means that a port was found but no SYN was made (no route from that port, or no memory), or, for UDP, that a
    /// search was still in progress when the programs were detached.
    pub fn failures(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let numbers = self.errnos.iter().enumerate().map(|(errno, number)| match errno {
            UNKNOWN => ("unknown".to_owned(), *number),
            CLOSED_EARLY => ("closed".to_owned(), *number),
            errno => (Errno::new(errno as i32).to_string(), *number),
        });
        numbers.filter(|(_, number)| *number > 0)
    }
}

impl Event {
    fn read(bytes: &[u8]) -> Option<Event> {
        // SAFETY: there are as many bytes, and any are a valid Event.
        (bytes.len() == mem::size_of::<Event>())
            .then(|| unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

impl Tuple {
    /// Returns the counts since an earlier state of the same tuple.
    pub fn since(&self, earlier: &Tuple) -> Tuple {
        // The kernel's counters of searches wrap.
        self.with(earlier, u64::saturating_sub, u32::wrapping_sub)
    }

    /// Returns the sums of the counts of two tuples, with the process of the first.
    #[must_use]
    pub fn plus(&self, other: &Tuple) -> Tuple {
        self.with(other, u64::saturating_add, u32::saturating_add)
    }

    fn with(&self, other: &Tuple, sums: fn(u64, u64) -> u64, searches: fn(u32, u32) -> u32) -> Tuple {
        let mut result = *self;
        for odd in [0, 1] {
            result.search_ns[odd] = sums(result.search_ns[odd], other.search_ns[odd]);
            for (own, other) in result.buckets[odd].iter_mut().zip(other.buckets[odd]) {
                *own = searches(*own, other);
            }
        }
        for (own, other) in [
            (&mut result.established, other.established),
            (&mut result.closed_first, other.closed_first),
            (&mut result.closed_by_peer, other.closed_by_peer),
            (&mut result.given_port, other.given_port),
            (&mut result.failed, other.failed),
            (&mut result.no_port, other.no_port),
            (&mut result.retries, other.retries),
            (&mut result.syn_retries, other.syn_retries),
        ] {
            *own = sums(*own, other);
        }
        result
    }

    /// Returns the searches that found a port, by the parity of the port.
    pub fn searches(&self) -> [u64; 2] {
        self.buckets.map(|buckets| buckets.iter().map(|&number| u64::from(number)).sum())
    }

    /// Returns the name of the process.
    pub fn name(&self) -> String {
        thread_name(&self.name)
    }
}

impl ConnectFilter {
    fn settings(&self, began_ns: u64, namespace: (u64, u64)) -> Settings {
        let windows_per_s = 1_000_000_000 / WINDOW_NS;
        let per_window = u64::from(self.samples_per_s).div_ceil(windows_per_s) as u32;
        Settings {
            began_ns,
            cgroup: self.cgroup.unwrap_or_default(),
            namespace_device: namespace.0,
            namespace_inode: namespace.1,
            outlier_ns: self.outlier_ns,
            flags: flag(self.process.is_some(), HAS_PROCESS)
                | flag(self.name.is_some(), HAS_NAME)
                | flag(self.address.is_some(), HAS_ADDRESS)
                | flag(self.port.is_some(), HAS_PORT)
                | flag(self.cgroup.is_some(), HAS_CGROUP)
                | flag(self.network.is_some(), HAS_NETWORK),
            process: self.process.unwrap_or_default(),
            samples_per_window: per_window,
            outliers_per_window: per_window,
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
            address: self.address.map(address_bytes).unwrap_or_default(),
            port: self.port.unwrap_or_default(),
            hole: 0,
            network: self.network.unwrap_or_default(),
        }
    }
}

/// The attached programs for connect(). They are detached when this value is dropped or the process ends.
pub struct ConnectSearch {
    programs: Programs,
    sums: Array<MapData, Sums>,
    times: PerCpuArray<MapData, Times>,
    tuples: Array<MapData, Tuple>,
    ring: RingBuf<MapData>,
    packets: Packets,
    /// The map of callers for UDP, while its programs are attached.
    callers: Option<Array<MapData, Caller>>,
    /// Index in `tuples` of each UDP search that was in progress when the programs were detached.
    unended: Vec<u32>,
}

/// Whether the program on every packet of the host is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packets {
    /// It will be attached after the first connect over IPv6.
    Later,
    Watched,
    /// It is not needed: the filter selects only IPv4, or the programs are detached.
    Never,
}

impl ConnectSearch {
    /// Loads the programs of a tier and attaches them. Connects in progress are not counted.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// the hooks of the tier, [`BpfError::Refused`] if the verifier rejects a program.
    pub fn attach(wanted: &ConnectFilter, tier: Tier) -> Result<ConnectSearch, BpfError> {
        let mut search = ConnectSearch::load(wanted)?;
        let programs: &[(&str, Hook)] = match tier {
            Tier::TpBtf => &TP_BTF,
            Tier::Fexit => &FEXIT,
        };
        match (tier, wanted.address.map(|address| address.to_canonical())) {
            (Tier::TpBtf, Some(IpAddr::V6(_))) => search.watch_packets()?,
            (Tier::TpBtf, None) => {}
            (Tier::TpBtf, Some(IpAddr::V4(_))) => search.packets = Packets::Never,
            // The search of both address families ends when the function returns.
            (Tier::Fexit, _) => {
                search.packets = Packets::Never;
                search.programs.set("watched", 1_u32)?;
            }
        }
        for &(program, hook) in programs {
            match hook {
                Hook::Tracepoint(tracepoint) => search.programs.attach(program, tracepoint)?,
                Hook::Entry(function) => search.programs.attach_entry(program, function)?,
                Hook::Exit(function) => search.programs.attach_exit(program, function)?,
            }
        }
        Ok(search)
    }

    fn load(wanted: &ConnectFilter) -> Result<ConnectSearch, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("connect_search.o"))?;
        programs.set("settings", wanted.settings(tracing::monotonic_ns(), tracing::pid_namespace()))?;
        Ok(ConnectSearch {
            sums: programs.map("sums")?,
            times: programs.map("times")?,
            tuples: programs.map("tuples")?,
            ring: programs.map("ring")?,
            programs,
            packets: Packets::Later,
            callers: None,
            unended: Vec::new(),
        })
    }

    /// Attaches the program for the end of IPv6 searches after the first connect over IPv6; call it at intervals. It runs
    /// for every packet of the host, a cost that hosts with only IPv4 avoid.
    ///
    /// # Errors
    ///
    /// The errors of [`ConnectSearch::attach`].
    pub fn keep_up(&mut self) -> Result<(), BpfError> {
        if self.packets == Packets::Later && self.sums()?.ipv6_seen != 0 {
            self.watch_packets()?;
        }
        Ok(())
    }

    fn watch_packets(&mut self) -> Result<(), BpfError> {
        let (program, tracepoint) = PACKETS;
        self.programs.attach(program, tracepoint)?;
        self.packets = Packets::Watched;
        self.programs.set("watched", 1_u32)
    }

    /// Detaches the programs; their counts stay readable. A TCP search in progress is no longer counted. A UDP search in progress
    /// counts as a failure with an unknown errno, because it cannot be told from a failed search.
    pub fn detach(&mut self) {
        self.packets = Packets::Never;
        self.programs.detach();
        self.unended = self.callers.take().map(|callers| unended(&callers)).unwrap_or_default();
    }

    /// Passes the samples since the previous call to `take`.
    pub fn drain(&mut self, mut take: impl FnMut(Event)) {
        while let Some(item) = self.ring.next() {
            if let Some(event) = Event::read(&item) {
                take(event);
            }
        }
    }

    /// Returns the current sums.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn totals(&self) -> Result<Totals, BpfError> {
        let sums = self.sums()?;
        let mut times = [Times::default(); TIMES];
        for (kind, sum) in (0..).zip(&mut times) {
            let each = self.times.get(&kind, 0).map_err(|error| tracing::failure(NAME, LOOKUP, &error))?;
            each.iter().for_each(|of_one| sum.add(of_one));
        }
        let [even, odd, handshake, failed] = times;
        let mut errnos = sums.errnos;
        errnos[UNKNOWN] += self.unended.len() as u64;
        Ok(Totals {
            lost_events: sums.lost_events,
            lost_starts: sums.lost_starts,
            lost_tuples: sums.lost_tuples,
            without_end: sums.without_end,
            lost_answers: sums.lost_answers,
            unmarked: sums.unmarked,
            established: handshake.count + sums.without_end + sums.untimed + sums.unanswered,
            untimed: sums.untimed,
            given_port: sums.given_port,
            switched: sums.switched,
            errnos,
            even,
            odd,
            handshake,
            failed,
        })
    }

    /// Returns the number of events that a program missed because it was already running on that processor.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn missed(&self) -> Result<u64, BpfError> {
        self.programs.missed()
    }

    fn sums(&self) -> Result<Sums, BpfError> {
        tracing::value(NAME, &self.sums)
    }

    /// Returns all pairs of process and destination in the order of their first connect. A few entries may be empty (port 0) where
    /// two threads added the same pair at the same time.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn tuples(&self) -> Result<Vec<Tuple>, BpfError> {
        let known = self.sums()?.tuples.min(TUPLES as u32);
        let tuples: Result<Vec<Tuple>, _> = (0..known).map(|place| self.tuples.get(&place, 0)).collect();
        let mut tuples = tuples.map_err(|error| tracing::failure(NAME, LOOKUP, &error))?;
        for &place in &self.unended {
            if let Some(tuple) = tuples.get_mut(place as usize) {
                tuple.failed += 1;
            }
        }
        Ok(tuples)
    }
}

impl fmt::Debug for ConnectSearch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ConnectSearch").finish_non_exhaustive()
    }
}

// The part for connect() of UDP, which has its own programs (`connect_search_udp.h`) and shares the maps with TCP.

/// The hook of a program: a tracepoint, or the root of the cgroups.
#[derive(Clone, Copy)]
enum UdpHook {
    Tracepoint(&'static str),
    Cgroup,
}

/// Programs in the order of attaching, with the address family that needs the program; `None` for both families.
const UDP: [(&str, UdpHook, Option<Family>); 4] = [
    ("udp_route_lookup_ipv6", UdpHook::Tracepoint("fib6_table_lookup"), Some(Family::Ipv6)),
    ("udp_route_lookup", UdpHook::Tracepoint("fib_table_lookup"), Some(Family::Ipv4)),
    // An IPv6 socket connects to IPv4 addresses as well, by their v4-mapped names.
    ("udp_connects_ipv6", UdpHook::Cgroup, None),
    ("udp_connects_ipv4", UdpHook::Cgroup, Some(Family::Ipv4)),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

/// The tier of UDP in records.
pub const UDP_TIER: &str = "cgroup+tp_btf";

/// A task and its last connect().
#[derive(Clone, Copy)]
#[repr(C)]
struct Caller {
    task: u64,
    /// Start of the current search; 0 outside a search.
    socket: u64,
    key: TupleKey,
    tuple: u32,
    namespace: u32,
    started_ns: u64,
    switches: u64,
    delay_ns: u64,
}

// The layouts must equal the layouts in connect_search.bpf.c.
const _: () = assert!(mem::size_of::<Caller>() == 72 && mem::offset_of!(Caller, tuple) == 40);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Caller {}

/// Returns the index in the table of tuples of each search without an end.
fn unended(callers: &Array<MapData, Caller>) -> Vec<u32> {
    callers.iter().flatten().filter(|caller| caller.socket != 0).map(|caller| caller.tuple).collect()
}

impl ConnectSearch {
    /// Loads and attaches the programs for UDP ([`UDP_TIER`]). `root` is the root of the cgroup2 file system, so that the programs
    /// see the tasks of all cgroups. The programs allow every call and change nothing.
    ///
    /// # Errors
    ///
    /// The errors of [`ConnectSearch::attach`]. Cgroup programs also need CAP_NET_ADMIN.
    pub fn attach_udp(wanted: &ConnectFilter, root: BorrowedFd<'_>) -> Result<ConnectSearch, BpfError> {
        let family = wanted.address.map(|address| match address.to_canonical() {
            IpAddr::V4(_) => Family::Ipv4,
            IpAddr::V6(_) => Family::Ipv6,
        });
        let mut search = ConnectSearch::load(wanted)?;
        search.packets = Packets::Never;
        search.callers = Some(search.programs.map("callers")?);
        for (program, hook, only) in UDP {
            if only.is_some() && family.is_some() && only != family {
                continue;
            }
            match hook {
                UdpHook::Tracepoint(tracepoint) => search.programs.attach(program, tracepoint)?,
                UdpHook::Cgroup => search.programs.attach_cgroup(program, root)?,
            }
        }
        Ok(search)
    }
}
