//! How long connect() looks for a source port, on a live system: counts and histograms made in the kernel.

use std::fmt;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::ptr;

use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use aya::{Pod, include_bytes_aligned};
use fourtuple_syscalls::errno_name;

use crate::error::BpfError;
use crate::filter::{HAS_ADDRESS, HAS_CGROUP, HAS_NAME, HAS_PORT, HAS_PROCESS, flag};
use crate::tier::Tier;
use crate::tracing::{self, COARSE, Programs, Times, address, address_bytes, thread_name, thread_name_bytes};

mod udp;

pub use udp::UDP_TIER;

const NAME: &str = "connect_search";
const LOOKUP: &str = "bpf(BPF_MAP_LOOKUP_ELEM)";

/// The most pairs of process and destination that are told apart.
pub const TUPLES: usize = 2048;

/// In `errnos`: nobody told.
const UNKNOWN: usize = 0;
/// In `errnos`: the program closed the socket while the handshake went on.
const CLOSED_EARLY: usize = 255;

/// What a program is attached to: a tracepoint, or the beginning or the return of a function.
#[derive(Clone, Copy)]
enum Hook {
    Tracepoint(&'static str),
    Entry(&'static str),
    Exit(&'static str),
}

/// Which programs in the order of attaching: what begins a search comes last, and goes first.
const TP_BTF: [(&str, Hook); 4] = [
    ("sent_again", Hook::Tracepoint("tcp_retransmit_skb")),
    ("route_lookup", Hook::Tracepoint("fib_table_lookup")),
    ("answered", Hook::Tracepoint("inet_sock_set_state")),
    ("called", Hook::Tracepoint("inet_sock_set_state")),
];

/// The same for the tier that times the search itself.
const FEXIT: [(&str, Hook); 5] = [
    ("sent_again", Hook::Tracepoint("tcp_retransmit_skb")),
    ("search_returns", Hook::Exit("__inet_hash_connect")),
    ("search_begins", Hook::Entry("__inet_hash_connect")),
    ("answered", Hook::Tracepoint("inet_sock_set_state")),
    ("called", Hook::Tracepoint("inet_sock_set_state")),
];

/// What every packet of the host goes through: only for IPv6, whose searches end there.
const PACKETS: (&str, &str) = ("packet_queued", "net_dev_queue");

/// In the map of times.
const TIMES: usize = 4;

/// Which connects are looked at: all that match everything that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Process, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that connects (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    /// Destination.
    pub address: Option<IpAddr>,
    /// Port of the destination.
    pub port: Option<u16>,
    /// Id of a cgroup (version 2), which is the inode of its directory; those below it count as well.
    pub cgroup: Option<u64>,
    /// How many single searches a second are told, about; and as many that took `outlier_ns` or longer.
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
    hole: [u16; 3],
}

/// Samples are taken in windows of 2^24 ns.
const WINDOW_NS: u64 = 1 << 24;

/// A process and where it connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct TupleKey {
    address: [u8; 16],
    /// Process, in this process's PID namespace if it is there.
    pub process: u32,
    /// Port of the destination.
    pub port: u16,
    hole: u16,
}

/// What is known of the connects of one process to one destination. Arrays of two are of even and of odd source ports.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Tuple {
    /// How long the searches that found a port took together, in nanoseconds.
    pub search_ns: [u64; 2],
    /// Handshakes that came to their end.
    pub established: u64,
    /// Connections that the process closed before its peer did: it has the port in TIME_WAIT.
    pub closed_first: u64,
    /// Connections that its peer had closed when the process did.
    pub closed_by_peer: u64,
    /// Connects from a port that was bound before: without a search.
    pub given_port: u64,
    to_retry: u32,
    /// Network namespace of the socket that connected first: inode of `/proc/PID/ns/net`.
    pub namespace: u32,
    /// Connects that failed, whenever.
    pub failed: u64,
    /// Of these, for want of a port: with EADDRNOTAVAIL, of UDP with EAGAIN.
    pub no_port: u64,
    /// Connects that came after one that had failed, before one succeeded.
    pub retries: u64,
    /// SYNs that were sent again.
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
    window: u64,
    samples_taken: u32,
    outliers_taken: u32,
    tuples: u32,
    ipv6_seen: u32,
    errnos: [u64; 256],
}

/// Sums over all connects that were wanted.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Samples for which the ring had no room.
    pub lost_events: u64,
    /// Connects for which the maps had no room; nothing else is known of them.
    pub lost_starts: u64,
    /// Searches, failures and handshakes that are in no tuple, because there were too many.
    pub lost_tuples: u64,
    /// Connections whose search's end was not seen.
    pub without_end: u64,
    /// Connects whose end, established or failed, went by while the processor looked at another one.
    pub lost_answers: u64,
    /// Handshakes that came to their end: those of `handshake`, and those whose time is not known.
    pub established: u64,
    /// Connections over IPv6 from before the first one was noticed: their search has an end, which nobody looked for.
    pub untimed: u64,
    /// Connects from a port that was bound before.
    pub given_port: u64,
    /// Searches during which the task was not running all the time.
    pub switched: u64,
    /// Failures by errno.
    errnos: [u64; 256],
    /// Searches that found an even port.
    pub even: Times,
    /// Searches that found an odd port.
    pub odd: Times,
    /// From the end of the search until the connection was established.
    pub handshake: Times,
    /// Searches that found none.
    pub failed: Times,
}

/// One search of a sample.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Event {
    /// When it ended, in nanoseconds since the programs were attached.
    pub at_ns: u64,
    /// How long it took.
    pub search_ns: u64,
    /// Its place in [`ConnectSearch::tuples`]; beyond these: it is not there for want of room.
    pub tuple: u32,
    /// The port that was found; 0: none.
    pub source_port: u16,
    hole: u16,
}

// As in connect_search.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 96 && mem::offset_of!(Settings, name) == 56);
const _: () = assert!(mem::size_of::<TupleKey>() == 24 && mem::offset_of!(TupleKey, port) == 20);
const _: () = assert!(mem::size_of::<Tuple>() == 128 + 8 * COARSE && mem::offset_of!(Tuple, failed) == 56);
const _: () = assert!(mem::size_of::<Sums>() == 96 + 8 * 256 && mem::offset_of!(Sums, errnos) == 96);
const _: () = assert!(mem::size_of::<Event>() == 24 && mem::offset_of!(Event, source_port) == 20);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}
// SAFETY: as above.
unsafe impl Pod for Tuple {}
// SAFETY: as above.
unsafe impl Pod for Sums {}

impl TupleKey {
    /// The destination.
    pub fn address(&self) -> IpAddr {
        address(self.address)
    }
}

impl Totals {
    /// Failures by the name of their errno: `closed` when the program closed the socket while the handshake went on,
    /// `unknown` when a port was found and the SYN not made (no route from there, or no memory), and of UDP when a search
    /// had no end yet when the programs were taken off.
    pub fn failures(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let numbers = self.errnos.iter().enumerate().map(|(errno, number)| match errno {
            UNKNOWN => ("unknown".to_owned(), *number),
            CLOSED_EARLY => ("closed".to_owned(), *number),
            errno => (errno_name(&io::Error::from_raw_os_error(errno as i32)), *number),
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
    /// Searches that found a port, by its parity.
    pub fn searches(&self) -> [u64; 2] {
        self.buckets.map(|buckets| buckets.iter().map(|&number| u64::from(number)).sum())
    }

    /// Name of the thread that connected first.
    pub fn name(&self) -> String {
        thread_name(&self.name)
    }
}

impl Wanted {
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
                | flag(self.cgroup.is_some(), HAS_CGROUP),
            process: self.process.unwrap_or_default(),
            samples_per_window: per_window,
            outliers_per_window: per_window,
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
            address: self.address.map(address_bytes).unwrap_or_default(),
            port: self.port.unwrap_or_default(),
            hole: [0; 3],
        }
    }
}

/// Programs on connect(), attached. They go with this value, and with the process.
pub struct ConnectSearch {
    programs: Programs,
    sums: Array<MapData, Sums>,
    times: PerCpuArray<MapData, Times>,
    tuples: Array<MapData, Tuple>,
    ring: RingBuf<MapData>,
    packets: Packets,
    /// Of UDP, while it is attached.
    callers: Option<Array<MapData, udp::Caller>>,
    /// Place in `tuples` of each search of UDP that had no end when the programs were taken off.
    unended: Vec<u32>,
}

/// Whether every packet is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packets {
    /// As soon as there is a connect over IPv6.
    Later,
    Watched,
    /// Only IPv4 is wanted, or the programs are off.
    Never,
}

impl ConnectSearch {
    /// Loads the programs of a tier and attaches them. Connects that are under way are not looked at.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// what the tier attaches to, [`BpfError::Refused`] when the verifier does not take a program.
    pub fn attach(wanted: &Wanted, tier: Tier) -> Result<ConnectSearch, BpfError> {
        let mut search = ConnectSearch::load(wanted)?;
        let programs: &[(&str, Hook)] = match tier {
            Tier::TpBtf => &TP_BTF,
            Tier::Fexit => &FEXIT,
        };
        match (tier, wanted.address.map(|address| address.to_canonical())) {
            (Tier::TpBtf, Some(IpAddr::V6(_))) => search.watch_packets()?,
            (Tier::TpBtf, None) => {}
            (Tier::TpBtf, Some(IpAddr::V4(_))) => search.packets = Packets::Never,
            // The search of both families ends where the function returns.
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

    fn load(wanted: &Wanted) -> Result<ConnectSearch, BpfError> {
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

    /// To be called now and then: looks for the end of searches over IPv6 as soon as there has been one. That is a look at
    /// every packet of the host, which a host that uses IPv4 need not pay for.
    ///
    /// # Errors
    ///
    /// As of [`ConnectSearch::attach`].
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

    /// Takes the programs off; what they counted stays. A search that is under way is not counted any more; of UDP it is a
    /// failure that nobody knows more of, for one that has failed and one that goes on look the same.
    pub fn detach(&mut self) {
        self.packets = Packets::Never;
        self.programs.detach();
        self.unended = self.callers.take().map(|callers| udp::unended(&callers)).unwrap_or_default();
    }

    /// Hands over the samples since the last time.
    pub fn drain(&mut self, mut take: impl FnMut(Event)) {
        while let Some(item) = self.ring.next() {
            if let Some(event) = Event::read(&item) {
                take(event);
            }
        }
    }

    /// The sums as they are now.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
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

    fn sums(&self) -> Result<Sums, BpfError> {
        self.sums.get(&0, 0).map_err(|error| tracing::failure(NAME, LOOKUP, &error))
    }

    /// All pairs of process and destination, in the order in which they came; a few places may be empty (port 0), where two
    /// threads came at the same time.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
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
