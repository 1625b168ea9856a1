use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple lab locks`.
pub type LabLocksRecord = Record<LabLocksSettings, LabLocksResults>;

/// The settings of `lab locks`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabLocksSettings {
    /// Changes in the order of their runs: `reuseport`, `sources`, `full-range`.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::LocksChange>"))]
    pub changes: Vec<String>,
    /// Number of threads that accept and answer.
    pub workers: u32,
    /// Number of threads that connect, each with one query in flight at a time.
    pub clients: u32,
    /// Queries per trial.
    pub queries: u64,
    /// Number of source addresses in trials with several.
    pub sources: u32,
    /// Pairs of timed trials per change.
    pub repeats: u32,
    /// Trials of each side in which lock waits were counted; these trials are not timed.
    pub traced: u32,
    /// Side that closes first and keeps the TIME_WAIT socket: `client`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["client"])))]
    pub closer: String,
    /// Smallest difference that counts: 0.05 is 5%.
    pub narrow: f64,
    /// Seed of the bootstrap for the intervals.
    pub seed: u64,
}

/// The results of `lab locks`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabLocksResults {
    /// One entry per change.
    pub pairs: Vec<LocksPair>,
    /// Reason why lock waits were not counted; `null`: they were counted.
    pub untraced: Option<String>,
    /// Kinds of lock waits that this host cannot show, one line each.
    pub blind_spots: Vec<String>,
    /// Advice, one sentence per entry.
    pub advice: Vec<String>,
}

/// One change: the same queries without and with the change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LocksPair {
    /// Name of the change: `reuseport`, `sources` or `full-range`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::LocksChange"))]
    pub change: String,
    /// Results without the change.
    pub before: LocksSide,
    /// Results with the change.
    pub after: LocksSide,
    /// Number of pairs of timed trials used.
    pub pairs: u64,
    /// Queries per second with the change over without: above 1 is faster.
    pub ratio: LocksRatio,
    /// The verdict as text: `5.8% more queries per second, 4.1 to 7.4`, `too noisy to say`.
    pub verdict: String,
    /// CPU time per query with the change over without: below 1 is cheaper.
    pub cpu_ratio: LocksRatio,
    /// The verdict on CPU time as text.
    pub cpu_verdict: String,
    /// Recommendation.
    pub advice: String,
}

/// A ratio with its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LocksRatio {
    /// The ratio.
    pub value: f64,
    /// Lower end of the interval; `null`: too few pairs.
    pub low: Option<f64>,
    /// Upper end of the interval; `null`: too few pairs.
    pub high: Option<f64>,
}

/// One side of a pair. A query is: connect, send one byte, receive one byte, close.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LocksSide {
    /// Accept policy: `exclusive` (one listener for all workers) or `reuseport` (one listener per worker).
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Policy"))]
    pub policy: String,
    /// Number of source addresses.
    pub sources: u32,
    /// Port strategy of the clients: `kernel-default`, `full-range`.
    pub strategy: String,
    /// First port of the ephemeral range.
    pub low: u16,
    /// Last port of the ephemeral range, inclusive.
    pub high: u16,
    /// Queries answered, summed over all timed trials.
    pub queries: u64,
    /// Median queries per second of the timed trials.
    pub queries_per_s: f64,
    /// Lower end of the 95% interval of `queries_per_s`.
    pub queries_per_s_low: f64,
    /// Upper end of the 95% interval of `queries_per_s`.
    pub queries_per_s_high: f64,
    /// CPU time per query of all threads, workers and clients: median of the timed trials.
    pub cpu_ns_per_query: f64,
    /// Lower end of the 95% interval of `cpu_ns_per_query`.
    pub cpu_ns_per_query_low: f64,
    /// Upper end of the 95% interval of `cpu_ns_per_query`.
    pub cpu_ns_per_query_high: f64,
    /// Lock waits per query, mean over the traced trials; `null`: not counted.
    pub waits_per_query: Option<f64>,
    /// Time in lock waits per query; `null`: not counted.
    pub wait_ns_per_query: Option<f64>,
    /// Lock waits by class of lock, longest total time first; empty: there were none, or they were not counted.
    pub classes: Vec<LocksClass>,
    /// Queries that failed, summed over all trials, by name of the errno.
    pub errors: BTreeMap<String, u64>,
}

/// Waits for locks of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LocksClass {
    /// Class of `trace locks`: `listener`, `accept queue`, `ehash`, `bhash`, `time-wait`, `socket owner`, `other`.
    pub class: String,
    /// Waits per query.
    pub waits_per_query: f64,
    /// Time in these waits per query.
    pub wait_ns_per_query: f64,
}
