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
