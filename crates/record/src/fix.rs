use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple fix ports`.
pub type FixPortsRecord = Record<FixPortsSettings, FixPortsResults>;

/// The settings of `fix ports`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixPortsSettings {
    /// Directory of the cgroup (version 2); includes the cgroups below it.
    pub cgroup: String,
    /// Prefix with additional source addresses; `null`: none.
    pub source: Option<String>,
    /// Destinations to act on, as prefix and port; `null`: all.
    pub to: Option<String>,
    /// Share of the port range up to which connects proceed unchanged, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub past: f64,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
    /// Whether connects were only counted.
    pub dry_run: bool,
}

/// The results of `fix ports`. `connects` is the sum of `left`, `drawn`, `spread`, `fallbacks` and `would_draw`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixPortsResults {
    /// Time during which the programs were attached.
    pub elapsed_ns: u64,
    /// Calls of connect() by programs of the cgroup.
    pub connects: u64,
    /// Connects per second.
    pub connects_per_s: f64,
    /// Connects that proceeded unchanged, by reason. `below`: the tuple used at most the given share. `udp`, `protocol` (neither TCP
    /// nor UDP), `bound-port`, `bound-address`, `device`, `mark`, `own-range`: the socket's settings. `destination`: unspecified or
    /// link-local. `filter`: not in `to`. `source-unknown`: the first connects to a destination. `no-route`, `namespace-unknown`,
    /// `table-full`. `none-free`: a connect before had found no free port, and none was free since.
    pub left: BTreeMap<String, u64>,
    /// Connects whose port was drawn.
    pub drawn: u64,
    /// Connects with an additional source address, whose port the kernel chose.
    pub spread: u64,
    /// Connects past the share for which no port was found; the kernel searched.
    pub fallbacks: u64,
    /// Connects that a dry run would have changed.
    pub would_draw: u64,
    /// Ports that draws looked up.
    pub probes: u64,
    /// `probes` by draw, fallbacks included; `null` without draws.
    pub probes_per_draw: Option<f64>,
    /// Free 4-tuples whose port bind() refused, because another socket holds the port.
    pub refused: u64,
    /// Draws that found their port in order, after all random ports were in use.
    pub in_order: u64,
    /// Draws of a port whose TIME_WAIT socket the kernel accepts for reuse.
    pub time_wait_used: u64,
    /// Total time of draws.
    pub hook_ns: u64,
    /// Mean time of a draw; `null` without draws.
    pub hook_ns_per_draw: Option<u64>,
    /// Ports in use that the kernel's search would have passed over: half of the range for each draw while half of the range or
    /// more was in use.
    pub avoided_probes: u64,
    /// Cost of a port that the kernel's search passes over, measured before the start in a small table; `null`: not measured.
    pub probe_ns: Option<f64>,
    /// Median time of a connect() over loopback to an unused destination, measured before the start; `null`: not measured.
    pub floor_ns: Option<u64>,
    /// Estimated time saved: `avoided_probes` at `probe_ns` each, minus `hook_ns`, at least 0; `null`: `probe_ns` is unknown.
    pub saved_ns: Option<u64>,
    /// Network namespaces of the tuples.
    pub namespaces: Vec<FixNamespace>,
    /// Connects by source address and destination, most connects first, at most 1,000.
    pub tuples: Vec<FixPortsTuple>,
    /// Number of tuples that are not listed.
    pub tuples_left_out: u64,
}

/// The ports of a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixNamespace {
    /// Cookie of the namespace (SO_NETNS_COOKIE).
    pub cookie: u64,
    /// First port of net.ipv4.ip_local_port_range.
    pub low: u16,
    /// Last port of net.ipv4.ip_local_port_range.
    pub high: u16,
    /// Number of ports of the range that are not reserved.
    pub usable: u32,
}

/// The connects from one source address to one destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixPortsTuple {
    /// Cookie of the network namespace.
    pub namespace: u64,
    /// Source address.
    pub source: String,
    /// Destination address and port.
    pub destination: String,
    /// Connects.
    pub connects: u64,
    /// Connects whose port was drawn.
    pub drawn: u64,
    /// Connects past the share for which no port was found.
    pub fallbacks: u64,
    /// Estimated share of the range that the kernel's search could not use at the last connect, 0 to 1: the mean of about the last
    /// 64 random ports.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub share: f64,
}

/// The record of `fourtuple fix accept`.
pub type FixAcceptRecord = Record<FixAcceptSettings, FixAcceptResults>;

/// The settings of `fix accept`. One of `listen` and `pid` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptSettings {
    /// Address of the listeners, or `unix:` and the path of a unix socket; `null`: `pid` is set.
    pub listen: Option<String>,
    /// Process whose listeners have selectors, with its descendants; `null`: `listen` is set.
    pub pid: Option<u32>,
    /// The rule of the selector: `least-busy`, `cpu`, `random`, `flow:OFFSET:WIDTH` or `rotate`.
    pub select: String,
    /// Filter for control packets, which one socket of each UDP group gets; `null`: none.
    pub control: Option<String>,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
    /// Whether connections were only counted.
    pub dry_run: bool,
}

/// The results of `fix accept`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptResults {
    /// Time during which the selectors were attached.
    pub elapsed_ns: u64,
    /// SO_REUSEPORT groups at the end; with `rotate` listeners.
    pub groups: u64,
    /// Connections and datagrams that the selectors sent to a listener.
    pub choices: u64,
    /// Choices per second.
    pub choices_per_s: f64,
    /// TCP connections that entered the queue of a listener; with `rotate` connections that a worker accepted.
    pub connections: u64,
    /// With `rotate`: how often a worker became the last to be woken.
    #[serde(default)]
    pub moves: u64,
    /// Packets for which the kernel's hash chose, because fourtuple had sent no heartbeat for 500 ms.
    pub lapsed: u64,
    /// Packets for which the kernel's hash chose, because the selector found closed listeners only.
    pub strays: u64,
    /// Listeners that joined after the start; with `rotate` workers.
    pub joined: u64,
    /// Listeners that were closed; with `rotate` workers that ended.
    pub closed: u64,
    /// Events that the counting programs missed, because the same program ran on this processor (`recursion_misses`). With `rotate`
    /// these are system calls of any kind, and events for which the ring had no room.
    pub missed: u64,
    /// Listeners and UDP sockets, closed ones included, at most 1,000; with `rotate` a row for each worker of a listener.
    pub listeners: Vec<FixAcceptListener>,
    /// Number of listeners that are not listed.
    pub listeners_left_out: u64,
}

/// A listener, or a UDP socket, of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptListener {
    /// `tcp`, `udp` or `unix`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tcp", "udp", "unix"])))]
    pub transport: String,
    /// Address to which the socket is bound, or the path of a unix socket.
    pub address: String,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Process that waits for the connections of the socket.
    pub process: u32,
    /// Name of the process.
    pub command: String,
    /// Connections or datagrams that the selector sent to the socket.
    pub choices: u64,
    /// TCP connections that entered the queue of the socket; with `rotate` connections that the process accepted.
    pub connections: u64,
    /// With `rotate`: how often the process became the last to be woken.
    #[serde(default)]
    pub moves: u64,
    /// Share of the choices at this address, 0 to 1; in a dry run and with `rotate` of the connections; `null` without any.
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Share>"))]
    pub share: Option<f64>,
    /// Connections that entered the queue after the start and were not closed; `null` with `rotate`, which does not count them.
    pub open: Option<u64>,
    /// Length of the queue at the end: connections, or bytes for UDP; `null`: the socket was closed.
    pub queue: Option<u32>,
}

/// The record of `fourtuple run`.
pub type RunRecord = Record<RunSettings, RunResults>;

/// The settings of `run`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunSettings {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The requested way: `cgroup`, `supervise` or `preload`; `bound`: the first that covers sockets which the program binds; `null`: the
    /// first that fits.
    pub via: Option<String>,
}

/// The results of `run`. `connects` is the sum of `changed` and `left`, for the way `cgroup` with `fallbacks` of `ports`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunResults {
    /// The way: `cgroup`, `supervise` or `preload`.
    pub way: String,
    /// The ways that were tried before and did not fit, with the reason.
    pub passed_over: BTreeMap<String, String>,
    /// Time from the start to the end of the program.
    pub elapsed_ns: u64,
    /// Exit code of the program; `null`: a signal ended it.
    pub exit_code: Option<u8>,
    /// The signal that ended the program; `null`: none.
    pub signal: Option<u8>,
    /// Calls of connect() for IP sockets that the way has seen.
    pub connects: u64,
    /// Connects for which the kernel searched the whole range port by port; for the way `cgroup`, connects whose port was drawn.
    pub changed: u64,
    /// Connects that proceeded unchanged, by reason. `own-range`: IP_LOCAL_PORT_RANGE of the program. `udp`, `protocol` (neither TCP
    /// nor UDP), `no-permission`: the supervisor may not duplicate the socket. For the way `cgroup`: the reasons of `fix ports`.
    pub left: BTreeMap<String, u64>,
    /// Connects of sockets whose bind() to port 0 left the choice of the port to connect(); `null` for the way `cgroup`.
    pub bound: Option<u64>,
    /// Ports of such sockets that were chosen before connect(), because the program asked for them; `null` for the way `cgroup`.
    pub named: Option<u64>,
    /// Time in connect() of the connects in `changed`; `null`: the way does not see the end of a call.
    pub connect_ns: Option<u64>,
    /// Connects in `changed` with an even source port; `null`: the way does not see the end of a call.
    pub even: Option<u64>,
    /// Connects in `changed` with an odd source port; `null`: the way does not see the end of a call.
    pub odd: Option<u64>,
    /// Connects that failed with EADDRNOTAVAIL; `null`: the way does not see the end of a call.
    pub unavailable: Option<u64>,
    /// Connects in `bound` during quarters of a second at whose end bind() to port 0 failed with EADDRINUSE, so that these programs
    /// could not have connected; `null` for the way `cgroup`.
    pub avoided: Option<u64>,
    /// Calls of connect(), bind() and getsockname() that the supervisor answered; `null` for other ways.
    pub calls: Option<u64>,
    /// Time from the receipt of a call by the supervisor to its answer, in total; `null` for other ways.
    pub held_ns: Option<u64>,
    /// Results of `fix ports`; `null` for other ways than `cgroup`.
    pub ports: Option<FixPortsResults>,
}
