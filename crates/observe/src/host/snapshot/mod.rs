//! Reads a network namespace into a snapshot, the input of the rules of `doctor`.
//!
//! A [`Reader`] reads the calling thread's namespace. Each part of the snapshot is a file here; a part that cannot be read does not
//! prevent the reading of other parts.
//!
//! The kernel lists the TCP sockets of both families in one walk over its hash table (TCPDIAG_GETSOCK). Each socket is added to its source
//! and destination, or to its service if its local port is a listener's, and is not kept: memory grows with the number of tuples. A second
//! thread finds the processes meanwhile, by a BPF iterator over their descriptors or, without permission for BPF or in a PID namespace, in
//! /proc/PID/fd. The iterator misses a socket whose only reference is io_uring or a message in flight.
//!
//! A reader with `limited_to(0.01)` repeats the connections of its previous pass, with their age, as long as another pass would use more
//! than 1% of a processor: 50,000 sockets take 33 ms in the kernel, nearly all of it cache misses (`examples/doctor.rs`).

mod connections;
mod counters;
mod listeners;
mod processes;
mod running_fix;
mod stalled;
mod sums;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::errno;
use fourtuple_record::snapshot::{
    ConfiguredSysctl, Connections, EphemeralPorts, FailedCall, Listener, LocalAddress, Owner, Part,
    PortHolder, Process, Snapshot, TcpMemory, UdpSockets, UnixListener,
};
use fourtuple_syscalls::sock_diag::{self, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query, Socket};
use fourtuple_syscalls::{device, procfs, resource, route};

use crate::host::snapshot::connections::Pass;
use crate::host::snapshot::processes::{Sockets, Source, Wanted};
use crate::host::snapshot::sums::Plain;
use crate::host::{processors, sysctl};

pub(crate) use crate::host::snapshot::counters::counter_totals;

/// The reason why a reading has no traces: the caller adds them.
const UNTRACED: &str = "nothing was traced";

/// Sysctls that rules read.
pub(crate) const SYSCTLS: &[&str] = &[
    "fs.file-max",
    "fs.nr_open",
    "net.core.netdev_max_backlog",
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.ipv4.conf.all.route_localnet",
    "net.ipv4.conf.all.rp_filter",
    "net.ipv4.ip_forward",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_nonlocal_bind",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.neigh.default.gc_thresh1",
    "net.ipv4.neigh.default.gc_thresh2",
    "net.ipv4.neigh.default.gc_thresh3",
    "net.ipv4.tcp_abort_on_overflow",
    "net.ipv4.tcp_fastopen",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_max_orphans",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_max_tw_buckets",
    "net.ipv4.tcp_migrate_req",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_orphan_retries",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_timestamps",
    "net.ipv4.tcp_tw_recycle",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_tw_reuse_delay",
    "net.netfilter.nf_conntrack_buckets",
    "net.netfilter.nf_conntrack_max",
    "net.netfilter.nf_conntrack_tcp_timeout_time_wait",
];

/// Reads snapshots of the calling thread's network namespace.
#[derive(Debug)]
pub struct Reader {
    root: PathBuf,
    peer: Option<(IpAddr, Option<u16>)>,
    /// Maximum share of a processor that the census may use.
    share: Option<f64>,
    source: Source,
    plain: Plain,
    census: Option<Census>,
    previous: Option<(Instant, Counted)>,
}

/// The sockets of a reading.
#[derive(Debug)]
struct Census {
    began: Instant,
    /// When the connections of unix sockets had been read.
    read: Instant,
    /// Processor time of the pass.
    used: Duration,
    sockets: Sockets,
    connections: Part<Connections>,
    /// Handshakes in progress, by the address and port of this side.
    handshakes: HashMap<SocketAddr, listeners::Handshakes>,
    in_use: connections::Before,
    processes: Part<Vec<Process>>,
    unix: listeners::UnixConnections,
    selectors: Vec<running_fix::Selector>,
    ticks: processes::Before,
    /// Time since the pass before, during which the processes have used their processor time; zero for the first pass.
    since: Duration,
}

/// Counts to be compared with the next reading.
#[derive(Debug, Default)]
struct Counted {
    counters: counters::Totals,
    conntrack: BTreeMap<String, u64>,
    listeners: listeners::Before,
    unix_listeners: listeners::UnixBefore,
    udp: counters::Before,
}

impl Reader {
    /// Creates a reader. `root` is `/`, or a directory with copies of files of /proc in tests.
    pub fn new(root: &Path) -> Reader {
        Reader {
            root: root.to_owned(),
            peer: None,
            share: None,
            source: Source::default(),
            plain: Plain::default(),
            census: None,
            previous: None,
        }
    }

    /// Returns the reader with a filter: connections with this peer only; without a port, with any port of the address.
    #[must_use]
    pub fn only(self, peer: IpAddr, port: Option<u16>) -> Reader {
        Reader { peer: Some((peer, port)), ..self }
    }

    /// Limits the share of a processor that the pass over all sockets and processes uses, for readings at short intervals: 0.01 is 1%. A
    /// reading within this limit repeats the connections and the processes of an earlier pass, whose age is in [`Connections::age_ns`].
    #[must_use]
    pub fn limited_to(self, share: f64) -> Reader {
        Reader { share: Some(share), ..self }
    }

    /// Reads the namespace. All events and rates of the snapshot are those since the previous reading; the first reading has none.
    pub fn read(&mut self) -> Snapshot {
        let now = Instant::now();
        let (began, before) = self.previous.take().unwrap_or_else(|| (now, Counted::default()));
        let interval = now.duration_since(began);
        let is_first = interval.is_zero();
        let root = &self.root;
        let mut counted = Counted::default();
        let ports = connections::read_ports(root);
        let mut census = match self.census.take() {
            Some(census) if self.share.is_some_and(|share| census.is_recent(now, share)) => census.aged(now),
            earlier => {
                let ways = (&mut self.source, &mut self.plain);
                Census::read(root, ways, self.peer, ports.as_ref().ok(), now, earlier)
            }
        };
        let mut listeners =
            listeners::read(&census.sockets, &before.listeners, is_first, &mut counted.listeners);
        if let Ok(listeners) = &mut listeners {
            listeners::add_handshakes(listeners, &census.handshakes);
            // A pass that is repeated says nothing of the queues of now.
            if census.began == now {
                let start = resource::thread_cpu_time();
                listeners::add_waits(listeners, now, interval);
                census.used += resource::thread_cpu_time().saturating_sub(start);
            }
        }
        let connections = census.connections.seen();
        let mut unix_listeners = listeners::read_unix(
            &census.sockets,
            &census.unix,
            &before.unix_listeners,
            is_first,
            &mut counted.unix_listeners,
        );
        let tcp = listeners.as_deref_mut().unwrap_or_default();
        let unix = unix_listeners.as_deref_mut().unwrap_or_default();
        if census.began == now {
            let start = resource::thread_cpu_time();
            census.selectors = running_fix::selectors(tcp, unix, root);
            census.used += resource::thread_cpu_time().saturating_sub(start);
        }
        running_fix::add_to_listeners(tcp, unix, &census.selectors, root);
        let udp = counters::read_udp(&census.sockets, &before.udp, is_first, &mut counted.udp);
        let mut named =
            named(listeners.as_deref().ok(), connections.as_ref().ok().copied(), udp.as_ref().ok());
        let waiting = listeners.iter().flatten().filter(|listener| listener.waiting > 0);
        let unix_waiting = unix_listeners.iter().flatten().filter(|listener| listener.waiting > 0);
        let awaited = waiting.flat_map(|listener| &listener.owners);
        let awaited = awaited.chain(unix_waiting.flat_map(|listener| &listener.owners));
        let unread =
            connections.as_ref().map(|connections| connections.unread.as_slice()).unwrap_or_default();
        let awaited = awaited.chain(unread.iter().map(|process| &process.owner));
        let awaited = awaited.map(|owner| owner.pid).collect();
        let used = |listener: &&UnixListener| listener.waiting > 0 || !listener.workers.is_empty();
        let used = unix_listeners.iter().flatten().filter(used);
        named.extend(used.flat_map(|listener| &listener.owners).map(|owner| owner.pid));
        let addresses = read_addresses();
        let lost_sources = lost_sources(&connections, &census.in_use.open_sources, &addresses).into();
        if census.began == now {
            let sharing = sharing(listeners.as_deref().ok(), udp.as_ref().ok());
            census.read_processes(root, &Wanted { named, sharing, awaited });
        }
        let snapshot = Snapshot {
            processors: processors(root),
            other_namespaces: 0,
            interval_ns: interval.as_nanos() as u64,
            sysctls: SYSCTLS
                .iter()
                .filter_map(|name| Some((name.to_string(), sysctl(root, name)?)))
                .chain(without_ipv6(root))
                .collect(),
            search: Part::Hidden("the search was not probed".to_owned()),
            configured: read_configured(root).into(),
            lost_sources,
            connections: census.connections.clone(),
            listeners: listeners.into(),
            unix_listeners: unix_listeners.into(),
            udp: udp.into(),
            processes: census.processes_in(interval),
            counters: counters::read(root, &before.counters, is_first, &mut counted.counters).into(),
            memory: read_memory(root).into(),
            conntrack: counters::read_conntrack(root, &before.conntrack, is_first, &mut counted.conntrack)
                .into(),
            addresses: addresses.into(),
            traced: Part::Hidden(UNTRACED.to_owned()),
            accepts: Part::Hidden(UNTRACED.to_owned()),
            locks: Part::Hidden(UNTRACED.to_owned()),
            failures: Part::Hidden(UNTRACED.to_owned()),
            ports: ports.into(),
        };
        self.previous = Some((now, counted));
        self.census = Some(census);
        snapshot
    }

    /// Looks for DNS queries without an answer between two readings: one that began after the first reading, or that ends before the second,
    /// is not in both. The next reading lists what this finds.
    pub fn look_for_queries(&mut self) {
        if let (Some((_, counted)), Some(census)) = (&mut self.previous, &self.census) {
            counters::look_for_queries(&census.sockets, &mut counted.udp);
        }
    }

    /// Adds to calls that failed what the namespace has at their addresses: routes, and the sockets that hold a port. Processes are those
    /// of the last reading.
    pub fn look_up<'a>(&self, calls: impl IntoIterator<Item = &'a mut FailedCall>) {
        let none = Sockets::default();
        look_up(calls, self.census.as_ref().map_or(&none, |census| &census.sockets));
    }
}

/// Number of the processes of a tuple that are read, to find the parent of many.
const CALLERS: usize = 8;

/// Returns the processes that hold listeners, accepted connections, sockets in CLOSE_WAIT, or UDP sockets of the snapshot.
fn named(
    listeners: Option<&[Listener]>,
    connections: Option<&Connections>,
    udp: Option<&UdpSockets>,
) -> BTreeSet<u32> {
    let listeners = listeners.into_iter().flatten().flat_map(|listener| &listener.owners);
    let workers = connections.into_iter().flat_map(|connections| &connections.services);
    let udp = udp.into_iter().flat_map(|udp| &udp.sockets).flat_map(|socket| &socket.owners);
    let leaking = connections.into_iter().flat_map(|connections| {
        let unix = connections.unix_close_wait.iter().map(|leak| &leak.owner);
        let unread = connections.unread.iter().map(|process| &process.owner);
        connections.close_wait.iter().map(|leak| &leak.owner).chain(unix).chain(unread)
    });
    // Of tuples that may run out of ports.
    let near = connections.into_iter().flat_map(|connections| &connections.tuples);
    let near = near.filter(|tuple| tuple.idle.is_some());
    let near = near.flat_map(|tuple| tuple.owners.iter().take(CALLERS));
    let owners =
        near.chain(listeners).chain(workers.flat_map(|service| &service.workers)).chain(leaking).chain(udp);
    owners.map(|owner| owner.pid).collect()
}

/// Returns the processes that hold a socket at an address with several.
fn sharing(listeners: Option<&[Listener]>, udp: Option<&UdpSockets>) -> BTreeSet<u32> {
    let listeners =
        listeners.into_iter().flatten().map(|listener| (true, listener.address, &listener.owners));
    let udp = udp.into_iter().flat_map(|udp| &udp.sockets);
    let mut at: BTreeMap<(bool, SocketAddr), Vec<&[Owner]>> = BTreeMap::new();
    for (is_tcp, address, owners) in listeners.chain(udp.map(|socket| (false, socket.local, &socket.owners)))
    {
        at.entry((is_tcp, address)).or_default().push(owners);
    }
    let shared = at.into_values().filter(|sockets| sockets.len() > 1);
    shared.flatten().flatten().map(|owner| owner.pid).collect()
}

/// Returns the sysctls that disable IPv6: of all devices (`all`), of devices to come (`default`), and of a device.
fn without_ipv6(root: &Path) -> BTreeMap<String, String> {
    // A kernel without IPv6 has no such directory.
    let entries = fs::read_dir(root.join("proc/sys/net/ipv6/conf")).into_iter().flatten().flatten();
    let disabled = entries.filter_map(|entry| {
        let value = procfs::read_to_string(entry.path().join("disable_ipv6")).ok()?;
        let device = entry.file_name().into_string().ok()?.replace('.', "/");
        Some((format!("net.ipv6.conf.{device}.disable_ipv6"), value.trim().to_owned()))
    });
    disabled.filter(|(_, value)| value != "0").collect()
}

/// Reads the listening unix sockets of the calling thread's network namespace with their processes, and no other socket. Nothing is known
/// of an earlier reading.
///
/// # Errors
///
/// The reason why the kernel does not list them, such as a missing unix_diag.
pub fn unix_listeners(root: &Path) -> Result<Vec<UnixListener>, String> {
    let sockets = Sockets::read(root, &mut Source::default(), None);
    let connections = listeners::UnixConnections::read(&sockets, None, Duration::ZERO);
    listeners::read_unix(&sockets, &connections, &HashMap::new(), true, &mut HashMap::new())
}

impl Census {
    fn read(
        root: &Path,
        (source, plain): (&mut Source, &mut Plain),
        peer: Option<(IpAddr, Option<u16>)>,
        ports: Option<&EphemeralPorts>,
        began: Instant,
        earlier: Option<Census>,
    ) -> Census {
        let start = resource::thread_cpu_time();
        let source = Mutex::new(source);
        let before = earlier.as_ref().map(|earlier| &earlier.sockets);
        let find = || {
            let start = resource::thread_cpu_time();
            let mut source = source.lock().unwrap_or_else(PoisonError::into_inner);
            (Sockets::read(root, &mut source, before), resource::thread_cpu_time().saturating_sub(start))
        };
        // The passes over descriptors and over the tables of sockets take about as long as each other.
        let (pass, sockets, used) = thread::scope(|scope| {
            let thread = thread::Builder::new().name("processes".to_owned()).spawn_scoped(scope, find);
            let pass = Pass::read(ports, peer);
            match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok((sockets, used))) => (pass, sockets, used),
                Ok(Err(panic)) => panic::resume_unwind(panic),
                // RLIMIT_NPROC or pids.max.
                Err(_) => (pass, find().0, Duration::ZERO),
            }
        });
        let since = earlier.as_ref().map_or(Duration::ZERO, |earlier| began.duration_since(earlier.began));
        // The first reading loads the BPF programs in between, which takes seconds on a busy host.
        let apart = earlier.as_ref().map_or(Duration::ZERO, |earlier| began.duration_since(earlier.read));
        let unix = earlier.as_ref().map(|earlier| &earlier.unix);
        let unix = listeners::UnixConnections::read(&sockets, unix, apart);
        let read = Instant::now();
        let (before, ticks) =
            earlier.map_or_else(Default::default, |earlier| (earlier.in_use, earlier.ticks));
        let mut in_use = connections::Before::default();
        let mut handshakes = HashMap::new();
        let connections = pass.and_then(|mut pass| {
            handshakes = mem::take(&mut pass.handshakes);
            let plain = pass.has_time_wait().then(|| plain.read(root)).flatten();
            let connections = pass.finish(&sockets, &before, since, &mut in_use, plain.as_ref())?;
            Ok(Connections { unix_close_wait: unix.close_wait.clone(), ..connections })
        });
        Census {
            began,
            read,
            used: used + resource::thread_cpu_time().saturating_sub(start),
            sockets,
            connections: connections.into(),
            handshakes,
            in_use,
            unix,
            selectors: Vec::new(),
            processes: Part::Hidden("not read".to_owned()),
            ticks,
            since,
        }
    }

    /// Reads the processes with sockets, as a part of this pass.
    fn read_processes(&mut self, root: &Path, wanted: &Wanted) {
        let start = resource::thread_cpu_time();
        let (mut ticks, is_first) = (processes::Before::default(), self.since.is_zero());
        let processes = processes::read(root, &self.sockets, wanted, &self.ticks, is_first, &mut ticks);
        self.processes = processes.into();
        self.ticks = ticks;
        self.used += resource::thread_cpu_time().saturating_sub(start);
    }

    /// Returns the processes with the processor time that they would have used in this interval.
    fn processes_in(&self, interval: Duration) -> Part<Vec<Process>> {
        let mut processes = self.processes.clone();
        if let Part::Seen(processes) = &mut processes
            && interval != self.since
            && !self.since.is_zero()
        {
            let share = interval.as_secs_f64() / self.since.as_secs_f64();
            for cpu_ns in processes.iter_mut().filter_map(|process| process.cpu_ns.as_mut()) {
                *cpu_ns = (*cpu_ns as f64 * share) as u64;
            }
        }
        processes
    }

    /// Returns whether another pass now would use more than this share of a processor.
    fn is_recent(&self, now: Instant, share: f64) -> bool {
        now.duration_since(self.began).mul_f64(share) < self.used
    }

    fn aged(mut self, now: Instant) -> Census {
        if let Part::Seen(connections) = &mut self.connections {
            connections.age_ns = now.duration_since(self.began).as_nanos() as u64;
        }
        self
    }
}

/// Maximum number of items of a list in a snapshot; tuples with fewer ports in use are left out.
pub const LISTED: usize = 100;

/// Reads a file below `root`.
///
/// # Errors
///
/// The path and the error as text.
fn text(root: &Path, path: &str) -> Result<String, String> {
    procfs::read_to_string(root.join(path)).map_err(|error| format!("/{path}: {}", reason(&error)))
}

/// Returns the name of an error: `EACCES`.
fn reason(error: &io::Error) -> String {
    fourtuple_syscalls::errno_name(error).to_string()
}

/// Directories of sysctl.d(5) and the file of sysctl.conf(5). /lib is a link to /usr/lib on most hosts and is left out.
const DIRECTORIES: [&str; 4] = ["etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d"];

const FILE: &str = "etc/sysctl.conf";
/// The name of FILE in a directory of sysctl.d(5), as distributions have it.
const LINK: &str = "99-sysctl.conf";

/// Reads the lines in the order in which systemd-sysctl(8) applies them: by name of the file, of which the first directory has precedence.
/// A directory or file that does not exist has none.
fn read_configured(root: &Path) -> Result<Vec<ConfiguredSysctl>, String> {
    let mut files = BTreeMap::new();
    for directory in DIRECTORIES {
        let Ok(entries) = fs::read_dir(root.join(directory)) else { continue };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| name.ends_with(".conf")) {
            files.entry(name.clone()).or_insert(format!("{directory}/{name}"));
        }
    }
    // It is applied at boot where this name is a link to it.
    let is_linked =
        |path: &mut String| fs::canonicalize(root.join(path)).is_ok_and(|path| path.ends_with(FILE));
    if files.get_mut(LINK).is_none_or(is_linked) {
        files.insert(LINK.to_owned(), FILE.to_owned());
    }
    let mut lines = Vec::new();
    for file in files.into_values() {
        match fs::read_to_string(root.join(&file)) {
            Ok(text) => lines.extend(parse(&format!("/{file}"), &text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("/{file}: {}", reason(&error))),
        }
    }
    lines.truncate(LISTED);
    Ok(lines)
}

fn parse(file: &str, text: &str) -> Vec<ConfiguredSysctl> {
    let lines = text.lines().zip(1..).filter_map(|(line, number)| {
        // A leading minus sign: an error of this line is ignored.
        let line = line.trim().trim_start_matches('-');
        let (name, value) = line.split_once('=')?;
        let name = name.trim().replace('/', ".");
        let is_of_the_network = !line.starts_with(['#', ';']) && name.starts_with("net.");
        is_of_the_network.then(|| ConfiguredSysctl {
            file: file.to_owned(),
            line: number,
            name,
            value: value.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    });
    lines.collect()
}

fn read_memory(root: &Path) -> Result<TcpMemory, String> {
    let sockstat = text(root, "proc/thread-self/net/sockstat")?;
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP: "));
    let line = line.ok_or("/proc/net/sockstat: no line about TCP")?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let value = |name: &str| words.chunks_exact(2).find(|pair| pair[0] == name)?[1].parse().ok();
    let limits = text(root, "proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
    let limits: Vec<u64> = limits.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    Ok(TcpMemory {
        orphans: value("orphan").unwrap_or(0),
        time_wait: value("tw").unwrap_or(0),
        pages: value("mem").unwrap_or(0),
        limits_pages: <[u64; 3]>::try_from(limits).unwrap_or_default(),
    })
}

fn read_addresses() -> Result<Vec<LocalAddress>, String> {
    let addresses = device::addresses().map_err(|error| format!("rtnetlink(7): {}", reason(&error)))?;
    let record = |device::Local { address, prefix, index, is_tentative }| LocalAddress {
        address,
        prefix,
        tentative: is_tentative,
        device: device::name(index).ok(),
    };
    Ok(addresses.into_iter().map(record).collect())
}

/// Maximum number of sources that are on no device whose route is looked up.
const ROUTED: usize = 1_024;

/// Returns the sources of connections that are on no device and not local by a route, out of those that a program has open.
fn lost_sources(
    connections: &Result<&Connections, String>,
    open: &BTreeSet<IpAddr>,
    addresses: &Result<Vec<LocalAddress>, String>,
) -> Result<Vec<IpAddr>, String> {
    let addresses = addresses.as_ref().map_err(Clone::clone)?;
    let tuples = &connections.as_ref().map_err(Clone::clone)?.tuples;
    let listed: BTreeSet<IpAddr> = tuples.iter().map(|tuple| tuple.source).collect();
    let mut lost = Vec::new();
    let (mut routed, mut foreign, mut is_cut) = (0, 0, false);
    for source in open.intersection(&listed).chain(open.difference(&listed)).copied() {
        // An address of a device in a VRF is local without a route in the main table.
        if source.is_unspecified() || addresses.iter().any(|local| local.address == source) {
            continue;
        }
        if routed == ROUTED || foreign == LISTED {
            is_cut = true;
            break;
        }
        routed += 1;
        let failed = |error: std::io::Error| format!("rtnetlink(7): {}", reason(&error));
        if route::is_local(source).map_err(failed)? {
            continue;
        }
        // Proxies with IP_TRANSPARENT use the addresses of their clients. Only such hosts pay for this second pass.
        foreign += 1;
        let is_foreign = sock_diag::has_foreign_source(source);
        if !is_foreign.map_err(|error| format!("sock_diag(7): {}", reason(&error)))? {
            lost.push(source);
        }
    }
    // Silence about sources that were not looked up is not health.
    if lost.is_empty() && is_cut {
        return Err("connections have too many source addresses that are on no device".to_owned());
    }
    Ok(lost)
}

/// Maximum number of failed calls whose address is looked up.
const LOOKED_UP: usize = 32;

/// Adds to calls that failed what is known of their address.
fn look_up<'a>(calls: impl IntoIterator<Item = &'a mut FailedCall>, sockets: &Sockets) {
    const OF_ROUTES: [&str; 4] = [errno::EACCES, errno::EHOSTUNREACH, errno::EINVAL, errno::ENETUNREACH];
    let mut left = LOOKED_UP;
    for call in calls {
        if call.is_without_port() && call.processes == 1 {
            call.running_ns = processes::running_ns(sockets.root(), call.owner.pid);
        }
        let Some(Ok(address)) = call.address.as_ref().map(|address| address.parse::<SocketAddr>()) else {
            continue;
        };
        match (call.call.as_str(), call.errno.as_str()) {
            _ if left == 0 => return,
            ("connect" | "send", errno) if OF_ROUTES.contains(&errno) => call.route = route_to(address),
            ("bind", errno::EADDRINUSE) if address.port() != 0 => {
                call.holder = holder(&call.protocol, address, sockets);
            }
            _ => continue,
        }
        left -= 1;
    }
}

/// Returns the type of the route to an address, or the errno of the lookup. The route to a link-local address is by the device of the socket.
fn route_to(to: SocketAddr) -> Option<String> {
    if matches!(to, SocketAddr::V6(to) if to.ip().is_unicast_link_local()) {
        return None;
    }
    Some(match route::kind(to.ip().to_canonical()) {
        Ok(kind) => route::name(kind).to_owned(),
        Err(error) => reason(&error),
    })
}

/// Returns the socket that has the port of an address, at this address or at one that includes it: one with a process if there is one.
fn holder(protocol: &str, address: SocketAddr, sockets: &Sockets) -> Option<PortHolder> {
    let (transport, states) = match protocol {
        "udp" => (Transport::Udp, 1 << state::CLOSE | 1 << state::ESTABLISHED),
        "tcp" => (Transport::Tcp, !0),
        _ => return None,
    };
    let query = Query { transport, states, peer: None, port: address.port(), times: false };
    let mut found: Vec<Socket> = Vec::new();
    let overlaps = |own: SocketAddr| {
        let (own, other) = (own.ip().to_canonical(), address.ip().to_canonical());
        own == other || own.is_unspecified() || other.is_unspecified()
    };
    let add = |socket: &Socket| {
        if overlaps(socket.local) && found.len() < LISTED {
            found.push(*socket);
        }
    };
    socket_census::each(&query, add).ok()?;
    let socket = found.iter().find(|socket| socket.inode != 0).or(found.first())?;
    let owner = sockets.holder(socket.inode).and_then(|pid| sockets.owner(pid, 1));
    let remote = Some(socket.remote).filter(|remote| remote.port() != 0);
    Some(PortHolder { owner, local: socket.local, remote, state: sums::name(socket.state).to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pass over 3,000 processes takes 150 ms of processor time.
    #[test]
    fn a_pass_is_repeated_within_its_share() {
        let (root, now) = (Path::new("/"), Instant::now());
        let ways = (&mut Source::default(), &mut Plain::default());
        let mut census = Census::read(root, ways, None, None, now, None);
        let of_sockets = census.used;
        census.read_processes(root, &Wanted::default());
        assert!(census.used > of_sockets, "the processes are a part of the pass");
        census.used = Duration::from_millis(150);
        for (seconds, is_recent) in [(0, true), (1, true), (14, true), (16, false)] {
            assert_eq!(census.is_recent(now + Duration::from_secs(seconds), 0.01), is_recent, "{seconds} s");
        }
    }

    #[test]
    fn lines_that_set_a_network_sysctl_are_read() {
        let text =
            "# net.ipv4.a = 1\nvm.swappiness = 1\n-net/ipv4/tcp_tw_recycle=1\n; x\nnet.ipv4.b =  1\t2\n";
        let lines = parse("/etc/sysctl.conf", text);
        let lines: Vec<_> =
            lines.iter().map(|line| (line.line, line.name.as_str(), line.value.as_str())).collect();
        assert_eq!(lines, [(3, "net.ipv4.tcp_tw_recycle", "1"), (5, "net.ipv4.b", "1 2")]);
        assert_eq!(read_configured(Path::new("/nonexistent")), Ok(Vec::new()));
    }

    #[test]
    fn files_of_sysctls_are_read_as_they_are_applied() {
        let root = std::env::temp_dir().join(format!("fourtuple-sysctl-d-{}", std::process::id()));
        for (file, value) in [
            ("usr/lib/sysctl.d/99-z.conf", 1),
            ("usr/lib/sysctl.d/50-a.conf", 2),
            ("etc/sysctl.d/50-a.conf", 3),
            ("run/sysctl.d/60-b.conf", 4),
            ("etc/sysctl.conf", 5),
            ("etc/sysctl.d/README", 6),
        ] {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), format!("net.ipv4.a = {value}\n")).unwrap();
        }
        let values =
            || read_configured(&root).unwrap().into_iter().map(|line| line.value).collect::<Vec<_>>();
        assert_eq!(values(), ["3", "4", "5", "1"]);
        let link = root.join("etc/sysctl.d/99-sysctl.conf");
        std::os::unix::fs::symlink("../sysctl.conf", &link).unwrap();
        assert_eq!(values(), ["3", "4", "5", "1"]);
        assert_eq!(read_configured(&root).unwrap()[2].file, "/etc/sysctl.conf");
        // Files that hide others: one with other lines, and an empty one.
        fs::remove_file(&link).unwrap();
        fs::write(&link, "net.ipv4.a = 7\n").unwrap();
        fs::write(root.join("etc/sysctl.d/99-z.conf"), "").unwrap();
        assert_eq!(values(), ["3", "4", "7"]);
        fs::remove_dir_all(root).unwrap();
    }
}
