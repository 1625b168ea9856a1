use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple lab locks`.
pub type LabLocksRecord = Record<LabLocksSettings, LabLocksResults>;

/// What `lab locks` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabLocksSettings {
    /// The changes tried, in the order of their runs: `reuseport`, `sources`, `full-range`.
    pub changes: Vec<String>,
    /// Threads that accept and answer.
    pub workers: u32,
    /// Threads that connect, each with one query under way at a time.
    pub clients: u32,
    /// Queries of one trial.
    pub queries: u64,
    /// Source addresses where there are several.
    pub sources: u32,
    /// Pairs of timed trials of each change.
    pub repeats: u32,
    /// Trials of each side in which lock waits were counted; they are not timed.
    pub traced: u32,
    /// Who closes first, and has the TIME_WAIT: `client`.
    pub closer: String,
    /// Differences up to this say nothing: 0.05 is 5%.
    pub narrow: f64,
    /// Seed of the intervals' resampling.
    pub seed: u64,
}

/// What `lab locks` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabLocksResults {
    /// One entry per change.
    pub pairs: Vec<LocksPair>,
    /// Why no lock waits were counted; `null`: they were.
    pub untraced: Option<String>,
    /// What the count of lock waits does not see, one line each.
    pub blind_spots: Vec<String>,
    /// What it means here, in plain words.
    pub advice: Vec<String>,
}

/// One change: the same queries before and after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocksPair {
    /// `reuseport`, `sources` or `full-range`.
    pub change: String,
    /// Without it.
    pub before: LocksSide,
    /// With it.
    pub after: LocksSide,
    /// Pairs of timed trials used.
    pub pairs: u64,
    /// Queries per second after, over those before: above 1 is faster.
    pub ratio: LocksRatio,
    /// In words: `5.8% more queries per second, 4.1 to 7.4`, `too noisy to say`.
    pub verdict: String,
    /// CPU time per query after, over that before: below 1 is cheaper.
    pub cpu_ratio: LocksRatio,
    /// The same in words.
    pub cpu_verdict: String,
    /// What to do.
    pub advice: String,
}

/// A ratio with its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocksRatio {
    /// The ratio.
    pub value: f64,
    /// Lower end of the interval; `null`: too few pairs for one.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

/// One side of a pair: connect, one byte there, one back, close.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocksSide {
    /// How workers share connections: `exclusive` (one listener for all) or `reuseport` (a listener each).
    pub policy: String,
    /// Source addresses.
    pub sources: u32,
    /// How clients choose source ports: `kernel-default`, `full-range`.
    pub strategy: String,
    /// First port of the ephemeral range.
    pub low: u16,
    /// Last port, inclusive.
    pub high: u16,
    /// Queries answered, of all timed trials.
    pub queries: u64,
    /// Median of the timed trials.
    pub queries_per_s: f64,
    /// Lower end of its 95% interval.
    pub queries_per_s_low: f64,
    /// Upper end.
    pub queries_per_s_high: f64,
    /// CPU time of all threads, workers' and clients': median of the timed trials.
    pub cpu_ns_per_query: f64,
    /// Lower end of its 95% interval.
    pub cpu_ns_per_query_low: f64,
    /// Upper end.
    pub cpu_ns_per_query_high: f64,
    /// Waits for a lock, mean over the traced trials; `null`: not counted.
    pub waits_per_query: Option<f64>,
    /// Time of these; `null`: not counted.
    pub wait_ns_per_query: Option<f64>,
    /// The waits by class of lock, the one with the longest time first; empty: there were none, or they were not counted.
    pub classes: Vec<LocksClass>,
    /// Queries that failed, of all trials, by the name of the errno.
    pub errors: BTreeMap<String, u64>,
}

/// Waits for locks of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocksClass {
    /// As `trace locks` calls it: `listener`, `accept queue`, `ehash`, `bhash`, `time-wait`, `socket owner`, `other`.
    pub class: String,
    /// Waits per query.
    pub waits_per_query: f64,
    /// Their time.
    pub wait_ns_per_query: f64,
}
