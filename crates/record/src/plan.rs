use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple plan`.
pub type PlanRecord = Record<PlanSettings, PlanResults>;

/// The settings of `plan`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanSettings {
    /// First port of the ephemeral range.
    pub low: u16,
    /// Last port of the ephemeral range, inclusive.
    pub high: u16,
    /// Number of reserved ports within the range.
    pub reserved: u32,
    /// Number of source addresses.
    pub sources: u64,
    /// Number of destinations (address and port), with equal load.
    pub destinations: u64,
    /// New connections per second over all destinations; absent: not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival_per_s: Option<f64>,
    /// Lifetime of a connection.
    pub hold_ns: u64,
    /// Side that closes first: `us` (the TIME_WAIT socket stays here) or `them`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["us", "them"])))]
    pub closer: String,
    /// Time in TIME_WAIT of the side that closes first.
    pub time_wait_ns: u64,
    /// Port search of the kernel: `parity` (before 6.8, and later without the option) or `linear`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["parity", "linear"])))]
    pub kernel: String,
    /// Port strategy by name.
    pub strategy: String,
    /// Whether each random window gets one attempt without a fallback.
    pub windows: bool,
    /// Source of the costs: `calibrated` (measured on this host) or `reference`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["calibrated", "reference"])))]
    pub costs: String,
}

/// The results of `plan`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanResults {
    /// Maximum number of concurrent connections: usable ports x sources x destinations.
    pub capacity: u64,
    /// Number of connections at which connect() begins to search half of the range; absent: this strategy has no
    /// cliff.
    pub cliff_connections: Option<u64>,
    /// Tuples in use when arrivals and departures balance: rate x (hold + TIME_WAIT); absent: no arrival rate.
    pub steady_tuples: Option<u64>,
    /// Time from an empty table to the cliff at this rate; absent: never.
    pub cliff_after_ns: Option<u64>,
    /// Time from an empty table to exhaustion of the ports at this rate; absent: never.
    pub exhausted_after_ns: Option<u64>,
    /// Number of source addresses with which the ports never run out at this rate and the cliff, if any, is never
    /// reached.
    pub sources_needed: u64,
    /// Dials that fail although ports are free (windows without a fallback) while the range fills once.
    pub failed_dials: u64,
    /// Cost of a connect() by fill.
    pub by_fill: Vec<PlanPoint>,
    /// The same ports with other strategies: `kernel-default`, which every ordinary program has, and the choice of fourtuple for
    /// this kernel; without the strategy of the plan.
    pub others: Vec<PlanOther>,
    /// Ports in use over time at this rate, from an empty table; straight lines between the points. Empty without a rate.
    pub over_time: Vec<PlanMoment>,
    /// Number of simulated connections, over all destinations.
    pub simulated: u64,
    /// Advice, one sentence per entry.
    pub advice: Vec<String>,
}

/// One step of the fill of a single (source, destination) pair.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanPoint {
    /// Share of the ports in use at the end of this step, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub fill: f64,
    /// Mean number of ports that the search probes per dial.
    pub probes: f64,
    /// Predicted mean time in connect().
    pub mean_ns: u64,
}

/// The plan with another strategy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanOther {
    /// Port strategy by name.
    pub strategy: String,
    /// Number of connections at which connect() begins to search half of the range; absent: never.
    pub cliff_connections: Option<u64>,
    /// Time from an empty table to the cliff at this rate; absent: never.
    pub cliff_after_ns: Option<u64>,
    /// Number of source addresses with which the ports never run out at this rate and the cliff, if any, is never
    /// reached.
    pub sources_needed: u64,
    /// Predicted mean time in connect() while the last sixteenth of the ports fills; absent: these costs were measured for
    /// another kind of strategy.
    pub last_mean_ns: Option<u64>,
}

/// The ports in use at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanMoment {
    /// Time since the first connection.
    pub at_ns: u64,
    /// Tuples in use, TIME_WAIT included.
    pub tuples: u64,
}
