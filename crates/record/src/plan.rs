use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple plan`.
pub type PlanRecord = Record<PlanSettings, PlanResults>;

/// What `plan` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanSettings {
    /// First ephemeral port.
    pub low: u16,
    /// Last ephemeral port, inclusive.
    pub high: u16,
    /// Reserved ports within the range.
    pub reserved: u32,
    /// Source addresses.
    pub sources: u64,
    /// Destinations (address and port), equally loaded.
    pub destinations: u64,
    /// New connections per second over all destinations; absent: not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival_per_s: Option<f64>,
    /// How long a connection lives.
    pub hold_ns: u64,
    /// `us` (TIME_WAIT stays with us for 60 s) or `them`.
    pub closer: String,
    /// The search that the kernel makes: `parity` (before 6.8, and ever since without the option) or `linear`.
    pub kernel: String,
    /// The port strategy, by name.
    pub strategy: String,
    /// Random windows have one try each and no way out.
    pub windows: bool,
    /// Where the costs come from: `calibrated` on this host, or `reference` figures.
    pub costs: String,
}

/// What `plan` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanResults {
    /// Connections that fit at once: usable ports x sources x destinations.
    pub capacity: u64,
    /// Connections at which connect() starts to search half of the range; absent when this strategy has no cliff.
    pub cliff_connections: Option<u64>,
    /// Tuples in use once arrivals and departures balance: rate x (hold + TIME_WAIT); absent without an arrival rate.
    pub steady_tuples: Option<u64>,
    /// When the cliff is reached at this churn, from an empty table; absent: never.
    pub cliff_after_ns: Option<u64>,
    /// When the ports run out at this churn, from an empty table; absent: never.
    pub exhausted_after_ns: Option<u64>,
    /// Source addresses that this churn needs so that the ports never run out (and no cliff is reached, if there is one).
    pub sources_needed: u64,
    /// Dials that fail though ports are free (windows without a way out), of those that fill the range once.
    pub failed_dials: u64,
    /// Cost of a connect() along the fill.
    pub by_fill: Vec<PlanPoint>,
    /// Connections simulated to get there, over all destinations.
    pub simulated: u64,
    /// The answer in plain words.
    pub advice: Vec<String>,
}

/// One part of the fill of a single (source, destination) pair.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanPoint {
    /// Share of the ports in use at the end of this part, 0 to 1.
    pub fill: f64,
    /// Ports looked at per dial, on average.
    pub probes: f64,
    /// Predicted mean time in connect().
    pub mean_ns: u64,
}
