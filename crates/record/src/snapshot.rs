//! A network namespace at one moment: the input of the rules of `doctor`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::errno;

/// The address of a default value.
const NO_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// A part of a snapshot that may be impossible to read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part<T> {
    /// The part was read.
    Seen(T),
    /// The reason why the part was not read: the call or file, and the error.
    Hidden(String),
}

impl<T> Part<T> {
    /// Returns the value.
    ///
    /// # Errors
    ///
    /// The reason why the part was not read.
    pub fn seen(&self) -> Result<&T, String> {
        match self {
            Part::Seen(value) => Ok(value),
            Part::Hidden(reason) => Err(reason.clone()),
        }
    }
}

impl<T> Default for Part<T> {
    fn default() -> Part<T> {
        Part::Hidden("not read".to_owned())
    }
}

impl<T> From<Result<T, String>> for Part<T> {
    fn from(result: Result<T, String>) -> Part<T> {
        result.map_or_else(Part::Hidden, Part::Seen)
    }
}

/// A network namespace at one moment, and the changes of its counters during an interval before it. The default has no part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorSnapshot"))]
pub struct Snapshot {
    /// Time between the two readings of everything that is counted.
    pub interval_ns: u64,
    /// Number of online processors of the host.
    pub processors: u32,
    /// Number of other network namespaces of the host, which a diagnosis does not examine; 0 if this is not the one of process 1.
    #[serde(default)]
    pub other_namespaces: u32,
    /// Sysctls that could be read, by dotted name. Of `net.ipv6.conf.*.disable_ipv6` those that are not 0, with the names of devices as
    /// sysctl(8) writes them: `net.ipv6.conf.eth0/7.disable_ipv6`.
    pub sysctls: BTreeMap<String, String>,
    /// Lines of /etc/sysctl.conf and of files of sysctl.d(5) that set a sysctl of the network; bounded.
    pub configured: Part<Vec<ConfiguredSysctl>>,
    /// The ports that connect() may choose.
    pub ports: Part<EphemeralPorts>,
    /// How connect() searches for a port.
    pub search: Part<PortSearch>,
    /// TCP connections.
    pub connections: Part<Connections>,
    /// TCP listeners.
    pub listeners: Part<Vec<Listener>>,
    /// Listening unix sockets.
    pub unix_listeners: Part<Vec<UnixListener>>,
    /// UDP sockets.
    pub udp: Part<UdpSockets>,
    /// Processes that have sockets in the namespace.
    pub processes: Part<Vec<Process>>,
    /// Counters of /proc/net/netstat and /proc/net/snmp, by group and name: `TcpExt.ListenOverflows`; of
    /// queueing disciplines at the root of a device, `qdisc.eth0.fq_codel.drops`.
    pub counters: Part<BTreeMap<String, Counter>>,
    /// Memory and sockets of TCP as a whole.
    pub memory: Part<TcpMemory>,
    /// Connection tracking (nf_conntrack).
    pub conntrack: Part<Conntrack>,
    /// Local addresses with their prefix lengths.
    pub addresses: Part<Vec<LocalAddress>>,
    /// Sources of connections in `connections.tuples` to which this host delivers no packets: on no device, and without a local route.
    /// Sources of sockets with IP_TRANSPARENT or IP_FREEBIND are not among them.
    pub lost_sources: Part<Vec<IpAddr>>,
    /// connect() calls that a trace saw during the interval.
    pub traced: Part<Traced>,
    /// accept() calls that a trace saw during the interval.
    pub accepts: Part<TracedAccepts>,
    /// Waits for locks that a trace saw.
    pub locks: Part<TracedLocks>,
    /// System calls on sockets that a trace saw fail during the interval.
    pub failures: Part<Failures>,
}

impl Snapshot {
    /// Returns the number that a sysctl holds.
    ///
    /// # Errors
    ///
    /// The sysctl was not read, or does not hold a number.
    pub fn number(&self, sysctl: &str) -> Result<u64, String> {
        let text = self.sysctls.get(sysctl).ok_or_else(|| format!("cannot read the sysctl {sysctl}"))?;
        text.parse().map_err(|_| format!("the sysctl {sysctl} holds {text:?}, which is not a number"))
    }

    /// Returns a counter.
    ///
    /// # Errors
    ///
    /// The counters were not read, or this kernel does not have the counter.
    pub fn counter(&self, name: &str) -> Result<Counter, String> {
        let counters = self.counters.seen()?;
        counters.get(name).copied().ok_or_else(|| format!("this kernel does not count {name}"))
    }
}

/// A counter that only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorCounter"))]
pub struct Counter {
    /// Events since the namespace was created.
    pub total: u64,
    /// Events during the interval.
    pub during: u64,
}

/// A line that sets a sysctl at boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorConfiguredSysctl"))]
pub struct ConfiguredSysctl {
    /// Path of the file.
    pub file: String,
    /// Number of the line, from 1.
    pub line: u32,
    /// Dotted name.
    pub name: String,
    /// The value.
    pub value: String,
}

/// How connect() searches for a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorPortSearch"))]
pub struct PortSearch {
    /// The search of a socket without options: `parity`, first all ports of one parity, or `linear`, port by port.
    pub default: String,
    /// The search of a socket with IP_LOCAL_PORT_RANGE: `parity`, `linear`, or `absent` if the kernel lacks the option.
    pub option: String,
}

/// A process that holds sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorOwner"))]
pub struct Owner {
    /// Process ID; 0: not known, or many short processes with this name.
    pub pid: u32,
    /// Name of the process (comm).
    pub name: String,
    /// Number of sockets.
    pub sockets: u32,
}

impl fmt::Display for Owner {
    /// Writes `nginx[812]`, `curl (short processes)`, or `a process that is not visible`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            0 if self.name.is_empty() => formatter.write_str("a process that is not visible"),
            0 => write!(formatter, "{} (short processes)", self.name),
            pid => write!(formatter, "{}[{pid}]", self.name),
        }
    }
}

/// TCP connections, TIME_WAIT included.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorConnections"))]
pub struct Connections {
    /// Time since these sockets were read; 0: in this reading.
    pub age_ns: u64,
    /// How the processes of sockets were found: `bpf` (an iterator over all descriptors) or `proc` (/proc/PID/fd).
    pub processes_by: String,
    /// Processes whose descriptors could not be read, such as processes of other users: their sockets have no owner here.
    pub processes_hidden: u32,
    /// Sockets by state: `established`, `time-wait`, `close-wait`.
    pub states: BTreeMap<String, u64>,
    /// Sources and destinations of outgoing connections, sorted by ports in use, largest first; bounded.
    pub tuples: Vec<Tuple>,
    /// Number of tuples that are not listed.
    pub tuples_left_out: u64,
    /// Sockets by state of the tuples that are not listed.
    pub tuples_left_out_states: BTreeMap<String, u64>,
    /// Source addresses of outgoing connections, sorted by ports in use, largest first; bounded.
    pub sources: Vec<Source>,
    /// Ports of the range that are in use by a socket bound with bind() that is not an outgoing connection, sorted by kind; bounded.
    pub held: Vec<HeldPort>,
    /// Why `held` has no ports of UDP sockets, such as a kernel without udp_diag; `null`: it has them.
    pub held_udp_hidden: Option<String>,
    /// Number of held ports that are not listed.
    pub held_left_out: u64,
    /// Distinct ports of the range that TCP sockets hold, listed or not: no connect() can take them.
    pub held_tcp: u32,
    /// Distinct ports of `held_tcp` with the parity of the range's first port.
    pub held_tcp_low_parity: u32,
    /// Distinct ports of `held_tcp` that sockets of the kind `bound` hold.
    pub held_bound: u32,
    /// Distinct ports of the range that UDP sockets hold, with a peer or without: no other UDP socket gets them without bind().
    #[serde(default)]
    pub held_udp: u32,
    /// The process with the most of these sockets; `null`: not known.
    #[serde(default)]
    pub udp_holder: Option<Owner>,
    /// Accepted connections by local port, in ascending order; bounded to the ports with the most sockets.
    pub services: Vec<Service>,
    /// Number of local ports with accepted connections that are not listed.
    pub services_left_out: u64,
    /// Connections of local ports outside of the range at which nobody listens, such as those of a server that has ended, in ascending
    /// order; bounded to the ports with the most sockets.
    #[serde(default)]
    pub left: Vec<Service>,
    /// Sockets in CLOSE_WAIT by process; bounded.
    pub close_wait: Vec<CloseWait>,
    /// Unix sockets whose peer has closed, by process; bounded.
    pub unix_close_wait: Vec<UnixCloseWait>,
    /// Connections whose two ends are the same socket; bounded.
    pub self_connected: Vec<SelfConnected>,
    /// Connections whose SYN or whose data is not answered, by destination; bounded.
    #[serde(default)]
    pub unanswered: Vec<Unanswered>,
    /// Processes that do not read what arrives on their accepted connections; bounded.
    #[serde(default)]
    pub unread: Vec<Unread>,
}

/// A process with accepted connections whose data is a second old or older, and of which it has read nothing between the readings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Unread {
    /// The local port.
    pub port: u16,
    /// The process and the number of the connections.
    pub owner: Owner,
    /// Those with at most 16 KiB of such data: requests, rather than uploads that a proxy cannot pass on.
    #[serde(default)]
    pub short: u32,
    /// Age of the oldest of the data.
    pub oldest_ns: u64,
    /// Time since the process sent data on any connection of the port.
    pub sent_ns: u64,
}

/// Sockets in SYN_SENT whose SYN was sent again: the first is a second old or older. Or connections whose oldest data was sent again at
/// least three times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Unanswered {
    /// Remote address and port; with `service` those of one of the clients.
    pub destination: SocketAddr,
    /// The local port of a server whose data is not acknowledged; `null`: this host is the client.
    #[serde(default)]
    pub service: Option<u16>,
    /// Whether the handshakes are over.
    pub established: bool,
    /// Number of sockets.
    pub sockets: u32,
    /// How many times their SYNs or their oldest data were sent again, all together.
    pub retransmits: u32,
    /// Those whose SYN or data did not leave this host when it was last sent.
    #[serde(default)]
    pub unsent: u32,
    /// Those that have sent data of which the peer has never acknowledged any.
    #[serde(default)]
    pub none_acknowledged: u32,
    /// The type of the route to the destination, or the errno of the lookup, as of a failed call; `null`: not asked.
    #[serde(default)]
    pub route: Option<String>,
    /// The process with most of the sockets; `null`: not known.
    pub owner: Option<Owner>,
}

/// A socket that is connected to itself, from a connect() to a local port without a listener that chose this port as its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SelfConnected {
    /// Both ends.
    pub address: SocketAddr,
    /// The process; `null`: not known, or the socket is in TIME_WAIT.
    pub owner: Option<Owner>,
}

/// The connections from one source address to one destination: they share the ports of the range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTuple"))]
pub struct Tuple {
    /// Local address.
    pub source: IpAddr,
    /// Remote address and port.
    pub destination: SocketAddr,
    /// Distinct ports of the range in use.
    pub in_use: u32,
    /// Distinct ports of the range in use with the parity of the range's first port.
    pub low_parity: u32,
    /// Sockets by state.
    pub states: BTreeMap<String, u64>,
    /// Sockets that entered TIME_WAIT per second, from the remaining times of TIME_WAIT sockets: this side closed first.
    pub closes_per_s: f64,
    /// Sockets that entered TIME_WAIT in the last second.
    pub closed_last_s: u32,
    /// Time since the first close that `closes_per_s` counts, or, if it counts none, since the oldest socket entered TIME_WAIT; 0: none is there.
    #[serde(default)]
    pub closing_ns: u64,
    /// Growth of `in_use` per second during the interval; negative: the number falls.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Signed"))]
    pub growth_per_s: f64,
    /// Sockets in TIME_WAIT whose connection had no TCP timestamps: connect() does not take their ports before TIME_WAIT ends. `null`:
    /// not known.
    pub time_wait_plain: Option<u32>,
    /// Idle times of the connections in ESTABLISHED; `null`: not read, because the tuple uses few ports, or has none.
    pub idle: Option<IdleTimes>,
    /// A `fourtuple fix ports`, also that of a guard, that runs for a process with connections to the destination; `null`: none, or the
    /// tuple uses few ports.
    pub fix: Option<RunningFix>,
    /// Processes that hold sockets of the tuple, the largest number of sockets first; TIME_WAIT sockets have no process.
    pub owners: Vec<Owner>,
}

impl Default for Tuple {
    fn default() -> Tuple {
        Tuple {
            source: NO_ADDRESS.ip(),
            destination: NO_ADDRESS,
            in_use: Default::default(),
            low_parity: Default::default(),
            states: Default::default(),
            closes_per_s: Default::default(),
            closed_last_s: Default::default(),
            closing_ns: Default::default(),
            growth_per_s: Default::default(),
            time_wait_plain: Default::default(),
            idle: Default::default(),
            fix: Default::default(),
            owners: Default::default(),
        }
    }
}

/// A `fourtuple fix ports` that runs, or that of a `fourtuple guard`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunningFix {
    /// Process ID of fourtuple.
    pub pid: u32,
    /// The value of `--source`: new connections get other source addresses too.
    pub source: Option<String>,
    /// Whether the process is a guard, which attached the fix by its policy.
    #[serde(default)]
    pub guard: bool,
}

/// Times since connections carried data, in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct IdleTimes {
    /// Half of the connections have been idle for this time or longer.
    pub median_ns: u64,
    /// Maximum time.
    pub longest_ns: u64,
}

impl fmt::Display for Tuple {
    /// Writes `10.0.0.9 → 10.1.2.3:443`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} → {}", self.source, self.destination)
    }
}

/// The outgoing connections of a source address, to all destinations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorSource"))]
pub struct Source {
    /// Local address.
    pub address: IpAddr,
    /// Distinct ports of the range in use.
    pub in_use: u32,
    /// Distinct ports of the range in use with the parity of the range's first port.
    pub low_parity: u32,
    /// Number of destinations.
    pub destinations: u64,
    /// Processes that hold sockets, the largest number of sockets first; TIME_WAIT sockets have no process.
    pub owners: Vec<Owner>,
}

/// A port of the range that is not available to connect() for any destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorHeldPort"))]
pub struct HeldPort {
    /// The port.
    pub port: u16,
    /// Address to which the socket is bound.
    pub address: IpAddr,
    /// `bound` (bind() without connect() or listen()), `listening`, or `udp`.
    pub kind: String,
    /// The process; `null`: not known.
    pub owner: Option<Owner>,
}

/// The accepted connections of a local port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorService"))]
pub struct Service {
    /// The local port.
    pub port: u16,
    /// Sockets by state.
    pub states: BTreeMap<String, u64>,
    /// Sockets that entered TIME_WAIT per second: the server closed first.
    pub closes_per_s: f64,
    /// Processes that hold the connections, the largest number first.
    pub workers: Vec<Owner>,
}

/// CLOSE_WAIT sockets of a process: the peer has closed, the process has not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorCloseWait"))]
pub struct CloseWait {
    /// The process and the number of sockets.
    pub owner: Owner,
    /// The remote end of most of the sockets. Port 0: the address of most of the sockets, which have many ports of it, as clients of a
    /// server have.
    pub remote: SocketAddr,
    /// Time since the last packet of the peer on the oldest socket.
    pub oldest_ns: u64,
    /// Sockets whose peer has been silent for 5 s or more.
    pub settled: u32,
    /// Sockets whose peer has been silent for a minute or more.
    pub old: u32,
}

/// Connected unix sockets of a process whose peer has closed its end: the process has not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorUnixCloseWait"))]
pub struct UnixCloseWait {
    /// The process and the number of sockets.
    pub owner: Owner,
    /// The path of most of the sockets, which is the one of the listener that accepted them; empty for sockets of a client.
    pub path: String,
    /// Sockets whose peer had closed at the first reading, too.
    pub settled: u32,
    /// Time between the two readings: the kernel keeps no times of unix sockets.
    pub settled_ns: u64,
}

/// A TCP listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorListener"))]
pub struct Listener {
    /// Local address; the unspecified address stands for all addresses.
    pub address: SocketAddr,
    /// Index of the interface to which the listener is bound (SO_BINDTODEVICE); 0: all interfaces.
    pub interface: u32,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Connections in the accept queue at the second reading.
    pub waiting: u32,
    /// Connections in the accept queue at the first reading; 0 for a listener that did not exist then.
    pub waiting_before: u32,
    /// Connections in the accept queue that certainly were there at the first reading: their peers have sent nothing since.
    pub standing: u32,
    /// Connections among `standing` that the peer has closed (CLOSE_WAIT).
    pub given_up: u32,
    /// A lower bound of the time that the oldest connection in the accept queue has waited: the time since the last packet of its peer; 0: not
    /// known.
    pub waited_ns: u64,
    /// Limit of the accept queue: the backlog of listen(), cut to net.core.somaxconn.
    pub backlog: u32,
    /// Handshakes in progress (SYN_RECV) at this address and port; the listeners of a SO_REUSEPORT group have the same number.
    pub handshakes: u32,
    /// Of these, handshakes whose SYN-ACK was sent again, because the last ACK has not come.
    #[serde(default)]
    pub handshakes_resent: u32,
    /// One of the clients of these; `null`: there is none.
    #[serde(default)]
    pub resent_to: Option<IpAddr>,
    /// sk_drops of the listener: SYNs and last ACKs that it dropped, and packets that are not losses, such as SYNs sent again; `null`: the kernel
    /// does not tell.
    pub drops: Option<Counter>,
    /// Processes that hold the listener, with the number of their descriptors of it.
    pub owners: Vec<Owner>,
    /// Whether it is a listener of MPTCP, as those of programs in Go are since 1.24. Absent in older records.
    #[serde(default)]
    pub mptcp: bool,
    /// Whether a listener of the unspecified IPv6 address refuses IPv4 (IPV6_V6ONLY).
    #[serde(default)]
    pub ipv6_only: bool,
    /// Process ID of the `fourtuple fix accept` that gives its connections to workers.
    #[serde(default)]
    pub fix: Option<u32>,
}

impl Default for Listener {
    fn default() -> Listener {
        Listener {
            address: NO_ADDRESS,
            interface: Default::default(),
            cookie: Default::default(),
            waiting: Default::default(),
            waiting_before: Default::default(),
            standing: Default::default(),
            given_up: Default::default(),
            waited_ns: Default::default(),
            backlog: Default::default(),
            handshakes: Default::default(),
            handshakes_resent: Default::default(),
            resent_to: Default::default(),
            drops: Default::default(),
            owners: Default::default(),
            mptcp: Default::default(),
            ipv6_only: Default::default(),
            fix: Default::default(),
        }
    }
}

/// A listening unix socket. The kernel counts no drops: a connect() that finds the queue full waits, or fails with EAGAIN.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorUnixListener"))]
pub struct UnixListener {
    /// The path, or `@` and the abstract name.
    pub path: String,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Connections in the accept queue at the second reading.
    pub waiting: u32,
    /// Connections in the accept queue at the first reading; 0 for a listener that did not exist then.
    pub waiting_before: u32,
    /// Connections in the accept queue that were there at the first reading.
    pub standing: u32,
    /// Connections in the accept queue whose client has closed its socket.
    pub given_up: u32,
    /// Limit of the accept queue: the backlog of listen(), cut to net.core.somaxconn.
    pub backlog: u32,
    /// Processes that hold the listener.
    pub owners: Vec<Owner>,
    /// Processes that hold accepted connections, the largest number first. Listeners with the same path have the same ones.
    pub workers: Vec<Owner>,
    /// Processes whose connections are in the accept queue, the largest number first.
    pub clients: Vec<Owner>,
    /// Process ID of the `fourtuple fix accept` that gives its connections to workers.
    #[serde(default)]
    pub fix: Option<u32>,
}

/// UDP sockets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorUdpSockets"))]
pub struct UdpSockets {
    /// Number of sockets.
    pub total: u64,
    /// Sockets with drops, a queue or a local port that several sockets share; the sockets with the most drops first; bounded.
    pub sockets: Vec<UdpSocketView>,
    /// Number of such sockets that are not listed.
    pub left_out: u64,
    /// DNS queries without an answer, by server; bounded.
    #[serde(default)]
    pub queries: Vec<UnansweredQueries>,
}

/// Connected UDP sockets to port 53 that have received nothing since they were created: a second ago, or at the reading before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UnansweredQueries {
    /// Address and port of the DNS server.
    pub server: SocketAddr,
    /// Number of sockets.
    pub sockets: u32,
    /// The process with most of the sockets; `null`: not known.
    pub owner: Option<Owner>,
}

/// A UDP socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorUdpSocketView"))]
pub struct UdpSocketView {
    /// Local address.
    pub local: SocketAddr,
    /// The peer; `null`: not connected.
    pub remote: Option<SocketAddr>,
    /// Index of the interface to which the socket is bound (SO_BINDTODEVICE); 0: all interfaces.
    pub interface: u32,
    /// Cookie of the socket.
    pub cookie: u64,
    /// Bytes in the receive queue.
    pub queued_bytes: u64,
    /// Limit of the receive queue in bytes (sk_rcvbuf); `null`: the kernel does not tell.
    pub limit_bytes: Option<u64>,
    /// Datagrams that the socket dropped (sk_drops); `null`: the kernel does not tell.
    pub drops: Option<Counter>,
    /// User ID of the owner of the socket.
    pub user: u32,
    /// Processes that hold the socket.
    pub owners: Vec<Owner>,
}

impl Default for UdpSocketView {
    fn default() -> UdpSocketView {
        UdpSocketView {
            local: NO_ADDRESS,
            remote: Default::default(),
            interface: Default::default(),
            cookie: Default::default(),
            queued_bytes: Default::default(),
            limit_bytes: Default::default(),
            drops: Default::default(),
            user: Default::default(),
            owners: Default::default(),
        }
    }
}

/// A process that has sockets in the namespace. The list has the holders of listeners, accepted connections and shared UDP ports, and
/// the processes with the largest share of their descriptors; bounded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorProcess"))]
pub struct Process {
    /// Process ID.
    pub pid: u32,
    /// Name of the process (comm).
    pub name: String,
    /// Open descriptors.
    pub descriptors: u32,
    /// RLIMIT_NOFILE, the soft limit; `null`: unlimited.
    pub descriptor_limit: Option<u64>,
    /// RLIMIT_NOFILE, the hard limit; `null`: unlimited.
    pub descriptor_ceiling: Option<u64>,
    /// Process ID of the parent.
    pub parent: u32,
    /// Name of the parent (comm); `null`: not read, as for processes without listeners, or not visible.
    pub parent_name: Option<String>,
    /// Path of the executable file (/proc/PID/exe), which ends in ` (deleted)` if the file was removed or replaced; `null` as above.
    pub executable: Option<String>,
    /// Cgroup of version 2; `null` as above.
    pub cgroup: Option<String>,
    /// The beginning of the command line (/proc/PID/cmdline); `null`: not visible, or no other process shares an address with this one.
    #[serde(default)]
    pub command_line: Option<String>,
    /// Function of the kernel in which all threads of the process wait (/proc/PID/task/TID/wchan), such as `ep_poll`; `null`: they run or wait in
    /// several ones, or no connection waits for the process.
    #[serde(default)]
    pub waits_in: Option<String>,
    /// Process group.
    pub group: u32,
    /// State as in /proc/PID/stat: `S` sleeps, `R` runs, `T` is stopped.
    pub state: char,
    /// Time from the boot of the host to the start of the process.
    pub started_ns: u64,
    /// CPU time during the interval, in steps of 10 ms; `null`: the process was not there at the first reading.
    pub cpu_ns: Option<u64>,
}

/// TCP as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTcpMemory"))]
pub struct TcpMemory {
    /// Orphaned sockets: closed by their process, not yet by TCP.
    pub orphans: u64,
    /// Sockets in TIME_WAIT.
    pub time_wait: u64,
    /// Memory of all TCP sockets of the host, in pages.
    pub pages: u64,
    /// net.ipv4.tcp_mem: low, pressure, high, in pages.
    pub limits_pages: [u64; 3],
}

/// Connection tracking.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorConntrack"))]
pub struct Conntrack {
    /// Tracked connections.
    pub count: u64,
    /// Limit: net.netfilter.nf_conntrack_max.
    pub limit: u64,
    /// Counters of /proc/net/stat/nf_conntrack, summed over the processors: `drop`, `insert_failed`, `clashres`.
    pub counters: BTreeMap<String, Counter>,
    /// The source addresses of SNAT and the destinations with the most ports, if `insert_failed` grew; bounded. `null`: not read.
    pub translated: Option<Vec<Translated>>,
}

/// Tracked connections whose source SNAT has replaced by an address, to one destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Translated {
    /// Source address after the translation.
    pub source: IpAddr,
    /// Destination.
    pub destination: SocketAddr,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// Distinct source ports after the translation.
    pub ports: u32,
    /// The lowest of them.
    pub low: u16,
    /// The highest of them.
    pub high: u16,
    /// Ports of closed connections, whose entries are in TIME_WAIT.
    #[serde(default)]
    pub closed: u32,
}

/// A local address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorLocalAddress"))]
pub struct LocalAddress {
    /// The address.
    pub address: IpAddr,
    /// Prefix length; a loopback prefix is local as a whole.
    pub prefix: u8,
    /// An IPv6 address whose duplicate address detection is not complete, or has found a duplicate: no packet has it as source.
    #[serde(default)]
    pub tentative: bool,
    /// Name of the device; `null`: unknown.
    pub device: Option<String>,
}

/// connect() calls that a trace saw during the interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTraced"))]
pub struct Traced {
    /// connect() calls by process and destination, most calls first; bounded.
    pub connects: Vec<TracedConnects>,
    /// 99th percentile of the port search; `null`: no search was seen.
    pub search_p99_ns: Option<u64>,
    /// Number of port searches.
    pub searches: u64,
    /// Time in port searches.
    pub search_ns: u64,
    /// Connections that were established, those of `connects` included; 0 in older records.
    #[serde(default)]
    pub established: u64,
}

/// accept() calls that a trace saw during the interval.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTracedAccepts"))]
pub struct TracedAccepts {
    /// Connections accepted.
    pub accepts: u64,
    /// 99th percentile of the time from the end of the handshake to accept(); `null`: none was seen.
    pub wait_p99_ns: Option<u64>,
    /// Listeners whose programs close connections soon, without having read from them; bounded.
    #[serde(default)]
    pub turned_away: Vec<TurnedAway>,
}

/// Connections of a listener that a program accepted and closed within a second, with nothing read from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnedAway {
    /// Cookie of the listener.
    pub listener: u64,
    /// Connections accepted.
    pub accepts: u64,
    /// Connections closed in this way; some may have been accepted before.
    pub closed: u64,
}

/// Waits for locks of the network stack that a trace saw, on the whole host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTracedLocks"))]
pub struct TracedLocks {
    /// Duration of the trace. A live view that limits its own CPU time reads the waits less often than the rest of the snapshot.
    pub interval_ns: u64,
    /// Waits by class of the lock.
    pub classes: BTreeMap<String, LockWaits>,
}

/// The connect() calls of a process to a destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorTracedConnects"))]
pub struct TracedConnects {
    /// The process; `sockets` is the number of calls. Of many short processes with this name, one of them.
    pub owner: Owner,
    /// Processes of this name that made the calls, which have ended if there are several.
    pub processes: u32,
    /// The destination.
    pub destination: SocketAddr,
    /// Calls that searched for a port and found one.
    pub searches: u64,
    /// Mean time of a search.
    pub search_mean_ns: u64,
    /// 99th percentile of the time of a search.
    pub search_p99_ns: u64,
    /// Calls from a port that was already bound.
    pub given_port: u64,
    /// Handshakes that were completed.
    #[serde(default)]
    pub established: u64,
    /// Connects that failed, or were closed by the program before an answer.
    #[serde(default)]
    pub failed: u64,
}

impl Default for TracedConnects {
    fn default() -> TracedConnects {
        TracedConnects {
            owner: Default::default(),
            processes: Default::default(),
            destination: NO_ADDRESS,
            searches: Default::default(),
            search_mean_ns: Default::default(),
            search_p99_ns: Default::default(),
            given_port: Default::default(),
            established: Default::default(),
            failed: Default::default(),
        }
    }
}

/// Waits for one class of locks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorLockWaits"))]
pub struct LockWaits {
    /// Number of waits.
    pub waits: u64,
    /// Time of the waits.
    pub waited_ns: u64,
}

/// System calls on sockets that returned an error. EINTR, and EAGAIN and EINPROGRESS of non-blocking sockets, are not failures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Failures {
    /// Failed calls by call, errno, process and address, most first; bounded: the calls for further addresses are one row for each call, errno
    /// and name.
    pub calls: Vec<FailedCall>,
    /// Number of failed calls that are not listed.
    pub left_out: u64,
    /// Processes with a program of 32 bits at the end of the trace, the first of them: their calls are not seen. `sockets` is 0.
    #[serde(default)]
    pub processes_32_bit: Vec<Owner>,
    /// Failed calls in the other network namespaces of the host, if this is the one of process 1: most first; bounded.
    #[serde(default)]
    pub elsewhere: Vec<FailedElsewhere>,
}

/// Failed calls in another network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailedElsewhere {
    /// A process of the namespace.
    pub pid: u32,
    /// Failed calls by call, errno, process and address, most first; bounded: the calls for further addresses are one row for each call, errno
    /// and name.
    pub calls: Vec<FailedCall>,
}

impl Failures {
    /// Returns the calls of connect() that found no port for their destination, with the destination.
    pub fn without_port(&self) -> impl Iterator<Item = (&FailedCall, SocketAddr)> {
        let found_none = self.calls.iter().filter(|call| call.is_without_port());
        found_none.filter_map(|call| Some((call, call.address.as_ref()?.parse().ok()?)))
    }
}

/// Calls of a process for an address that failed with the same errno.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailedCall {
    /// `socket`, `bind`, `listen`, `connect`, `accept`, `send` or `recv`, each with its variants (`sendto`, `sendmsg`, `write`). An error of
    /// connect() that the program reads by SO_ERROR is one of `connect`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["socket", "bind", "listen", "connect", "accept", "send", "recv"])))]
    pub call: String,
    /// Name of the errno: `EADDRNOTAVAIL`.
    pub errno: String,
    /// `tcp`, `udp` or `unix`; `other` for other protocols and families.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tcp", "udp", "unix", "other"])))]
    pub protocol: String,
    /// The process; `sockets` is the number of failed calls. Of many short processes with this name, one of them.
    pub owner: Owner,
    /// Processes of this name that made the calls.
    pub processes: u32,
    /// Address of the peer (`connect`, `send`, `recv`) or of this side, such as `192.0.2.1:443`, or the path of a Unix socket; `null`:
    /// not known.
    pub address: Option<String>,
    /// Number of addresses, if the calls for many are one row: `address` is one of them. 0 or 1: `address` alone.
    #[serde(default)]
    pub addresses: u32,
    /// connect() of TCP: the call failed before it searched for a port, for lack of a source address or a route, or by a firewall.
    pub before_search: bool,
    /// Number of failed calls.
    pub failed: u64,
    /// Inode of the network namespace of the socket; 0 in older records.
    #[serde(default)]
    pub namespace: u32,
    /// connect(): the first and the last port that the sockets may use, if the program has set IP_LOCAL_PORT_RANGE, to the same ports for
    /// all calls; a bound of 0 is the bound of net.ipv4.ip_local_port_range.
    #[serde(default)]
    pub range: Option<(u16, u16)>,
    /// Calls to an address that failed with EACCES, EHOSTUNREACH, EINVAL or ENETUNREACH: the type of the route to the address (`unicast`, `local`,
    /// `broadcast`, or `other`), or the errno with which the kernel refuses one; `null`: not asked.
    #[serde(default)]
    pub route: Option<String>,
    /// bind() that failed with EADDRINUSE: a socket that has the port; `null`: not looked for, or there is none any more.
    #[serde(default)]
    pub holder: Option<PortHolder>,
    /// connect() that found no port: time since the start of the process; `null`: not asked, or the process has ended.
    #[serde(default)]
    pub running_ns: Option<u64>,
    /// Causes that the errno has for this call: the cause if it is known, otherwise possible causes. Records of `trace connect` and `trace accept`
    /// have them; a record of `doctor` has findings instead.
    #[serde(default)]
    pub causes: Vec<String>,
}

impl FailedCall {
    /// Returns whether these are calls of connect() that found no port for their destination.
    pub fn is_without_port(&self) -> bool {
        self.call == "connect"
            && self.protocol == "tcp"
            && self.errno == errno::EADDRNOTAVAIL
            && !self.before_search
    }

    /// Returns several rows as one: that with most calls, with the sums of the calls, processes and addresses, and the range if all have it.
    pub fn sum(rows: &[&FailedCall]) -> FailedCall {
        let most = rows.iter().max_by_key(|row| (row.failed, Reverse(&row.address)));
        let most = most.map_or_else(FailedCall::default, |row| (*row).clone());
        let mut processes = BTreeMap::new();
        let mut addresses = BTreeMap::new();
        for row in rows {
            let known = processes.entry(row.owner.pid).or_insert(row.processes);
            *known = row.processes.max(*known);
            if let Some(address) = &row.address {
                addresses.insert(address, row.addresses.max(1));
            }
        }
        FailedCall {
            failed: rows.iter().map(|row| row.failed).sum(),
            processes: processes.into_values().sum(),
            addresses: addresses.into_values().sum(),
            range: most.range.filter(|range| rows.iter().all(|row| row.range == Some(*range))),
            ..most
        }
    }
}

/// A socket that has a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortHolder {
    /// The process; `null`: not known, or there is none, as in TIME_WAIT.
    pub owner: Option<Owner>,
    /// Its address and port.
    pub local: SocketAddr,
    /// The address and port of its peer; `null`: it has none.
    pub remote: Option<SocketAddr>,
    /// The state of a TCP socket as ss(8) has it: `established`, `time-wait`; a UDP socket without a peer is in `close`.
    pub state: String,
}

/// The ports that connect() may choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorEphemeralPorts"))]
pub struct EphemeralPorts {
    /// First port of net.ipv4.ip_local_port_range.
    pub low: u16,
    /// Last port of net.ipv4.ip_local_port_range.
    pub high: u16,
    /// First and last ports of net.ipv4.ip_local_reserved_ports.
    pub reserved: Vec<(u16, u16)>,
}

impl EphemeralPorts {
    /// Parses net.ipv4.ip_local_port_range and net.ipv4.ip_local_reserved_ports. `None` if the text is not a range; a missing list
    /// reserves nothing.
    pub fn parse(range: &str, reserved: &str) -> Option<EphemeralPorts> {
        let mut bounds = range.split_whitespace().map(|bound| bound.parse().ok());
        let (low, high) = (bounds.next()??, bounds.next()??);
        let reserved = reserved.trim().split(',').filter_map(span).collect();
        (low <= high && low > 0).then_some(EphemeralPorts { low, high, reserved })
    }

    /// Returns whether connect() may choose this port.
    pub fn contains(&self, port: u16) -> bool {
        (self.low..=self.high).contains(&port)
            && !self.reserved.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Returns the number of ports that connect() may choose.
    pub fn usable(&self) -> u32 {
        let reserved = merged(self.reserved.clone()).into_iter().map(|(first, last)| {
            let (first, last) = (first.max(self.low), last.min(self.high));
            (u32::from(last) + 1).saturating_sub(first.into())
        });
        self.range() - reserved.sum::<u32>()
    }

    /// Returns the number of ports of the range, reserved ports included.
    pub fn range(&self) -> u32 {
        u32::from(self.high.saturating_sub(self.low)) + 1
    }
}

/// Parses `8080` or `9000-9100`.
fn span(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
}

/// Returns blocks of ports (first and last) in ascending order without overlap; adjacent blocks become one.
pub fn merged(mut blocks: Vec<(u16, u16)>) -> Vec<(u16, u16)> {
    blocks.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in blocks {
        match merged.last_mut() {
            Some(previous) if u32::from(first) <= u32::from(previous.1) + 1 => {
                previous.1 = previous.1.max(last)
            }
            _ => merged.push((first, last)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_usable() {
        let ports = EphemeralPorts::parse("20000\t20099\n", "8080,20010-20019,20050\n").unwrap();
        assert_eq!(ports.reserved, [(8_080, 8_080), (20_010, 20_019), (20_050, 20_050)]);
        assert_eq!((ports.range(), ports.usable()), (100, 89));
        assert!(ports.contains(20_009) && !ports.contains(20_010) && !ports.contains(8_080));
        let ports = EphemeralPorts::parse("32768\t60999\n", "8080,40000-40009,60999\n").unwrap();
        assert_eq!(ports.usable(), 28_232 - 11);
        assert!(ports.contains(32_768) && !ports.contains(40_003) && !ports.contains(60_999));
        assert!(EphemeralPorts::parse("1024 65535", "\n").unwrap().contains(65_535));
        for range in ["", "1024", "2 1", "0 9"] {
            assert!(EphemeralPorts::parse(range, "").is_none(), "{range:?}");
        }
    }

    #[test]
    fn reserved_blocks_may_overlap_and_exceed_the_range() {
        let list = "19990-20004,20003-20010,20005,20090-20200,1-5,65535";
        let ports = EphemeralPorts::parse("20000 20099", list).unwrap();
        let counted = (20_000..=20_099).filter(|port| ports.contains(*port)).count();
        assert_eq!((ports.usable(), counted), (79, 79));
        assert_eq!(
            merged(vec![(7, 9), (1, 3), (4, 4), (65_535, 65_535)]),
            [(1, 4), (7, 9), (65_535, 65_535)]
        );
    }
}
