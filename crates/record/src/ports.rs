use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Record, Scatter};

/// Record of `fourtuple lab ports`.
pub type PortsRecord = Record<PortsSettings, PortsResults>;

/// What `lab ports` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortsSettings {
    /// First port of net.ipv4.ip_local_port_range in the experiment's namespace.
    pub low: u16,
    /// Last port, inclusive.
    pub high: u16,
    /// Strategies in the order given, by name.
    pub strategies: Vec<String>,
    /// The random windows have one try each and no way out, as seed 000 published them.
    pub windows: bool,
    /// Share of the tuples to fill, 0 to 1.
    pub fill: f64,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// 4 or 6.
    pub family: u8,
    /// Source addresses to spread over.
    pub sources: u32,
    /// How often every strategy is run, interleaved.
    pub repeats: u32,
    /// Seed of our own random choices.
    pub seed: u64,
}

/// What `lab ports` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortsResults {
    /// Tuples there are: ports of the range x sources.
    pub tuples: u64,
    /// One entry per strategy and repeat, in the order in which they ran.
    pub strategies: Vec<StrategyResult>,
    /// What this kernel does and what to set here, in plain words.
    pub advice: Vec<String>,
}

/// How one strategy filled the range, once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StrategyResult {
    /// `kernel-default`, `select-test-repeat`, `random-window:500`, `full-range`, `auto`.
    pub strategy: String,
    /// What `auto` chose on this kernel; absent for the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// 1 for the first run, 2 for its first repeat.
    pub repeat: u32,
    /// Dials begun.
    pub dials: u64,
    /// Connections held at the end.
    pub connections: u64,
    /// connect() or bind() calls beyond the first of each dial.
    pub retries: u64,
    /// Dials that failed, by the name of the errno of the last call.
    pub errors: BTreeMap<String, u64>,
    /// Wall time of all dials, without the floor's dials between them.
    pub elapsed_ns: u64,
    /// Connections per second of `elapsed_ns`.
    pub rate_per_s: f64,
    /// CPU time of the dialing thread per dial, the kernel's included.
    pub cpu_ns_per_dial: u64,
    /// Time in connect() per successful dial (for strategies that bind a port: in bind() and connect()).
    pub connect_ns: ByParity,
    /// The mean by sixteenth of the fill.
    pub by_fill: Vec<FillPoint>,
    /// Mean time of the same calls on a destination with an empty table, dialed in between.
    pub floor_ns: u64,
    /// One dot per dial, for the picture; absent when it was not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scatter: Option<Scatter>,
}

impl StrategyResult {
    /// Dials that failed.
    pub fn failed(&self) -> u64 {
        self.errors.values().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

/// One distribution over all ports, the even and the odd ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByParity {
    /// All ports; absent when nothing was measured.
    pub all: Option<Spread>,
    /// Even ports.
    pub even: Option<Spread>,
    /// Odd ports.
    pub odd: Option<Spread>,
}

/// A distribution of durations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// How many samples.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// The slowest.
    pub max: u64,
}

/// A part of the fill: the connections made while the table went from the point before to `fill`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FillPoint {
    /// Share of the tuples in use at the end of this part, 0 to 1.
    pub fill: f64,
    /// Connections in this part.
    pub connections: u64,
    /// Their mean time in connect(); 0 if there were none.
    pub mean_ns: u64,
    /// Mean of the floor's dials made in this part; 0 if there were none.
    pub floor_ns: u64,
}
