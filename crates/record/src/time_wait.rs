use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple lab time-wait`.
pub type TimeWaitRecord = Record<TimeWaitSettings, TimeWaitResults>;

/// What `lab time-wait` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeWaitSettings {
    /// First port of the range in the experiment's namespace.
    pub low: u16,
    /// Last port, inclusive.
    pub high: u16,
    /// The remedies tried, by name, in the order of their runs.
    pub remedies: Vec<String>,
    /// Longest time to sit out one stall before the run is cut.
    pub patience_ns: u64,
}

/// What `lab time-wait` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeWaitResults {
    /// Ports of the range.
    pub ports: u64,
    /// How long the kernel keeps TIME_WAIT: 60 s (TCP_TIMEWAIT_LEN).
    pub time_wait_ns: u64,
    /// The rate that one source can keep up for ever: ports / 60 s.
    pub ceiling_per_s: f64,
    /// One entry per run.
    pub runs: Vec<TimeWaitRun>,
    /// What it means here, in plain words.
    pub advice: Vec<String>,
}

/// Open, one byte, close, as fast as one thread can: until the transactions are done or the patience is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeWaitRun {
    /// `none-under` (one transaction fewer than there are ports), `none-over`, `more-sources`, `wider-range`,
    /// `tcp-tw-reuse`, `server-closes-first`, `keep-alive`.
    pub remedy: String,
    /// Transactions asked for.
    pub transactions: u64,
    /// Transactions done.
    pub completed: u64,
    /// From the first connect() to the end of the last transaction, the stall included.
    pub elapsed_ns: u64,
    /// Transactions per second while nothing stalled.
    pub rate_per_s: f64,
    /// Predicted before the run: the first transaction that finds no port (1 = the first one); absent: none will.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_stall_at: Option<u64>,
    /// Measured: the first transaction that found no port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stalled_at: Option<u64>,
    /// Predicted length of the stall: 60 s less the time that the first port had been waiting when the last one was taken.
    /// 0: no stall.
    pub predicted_stall_ns: u64,
    /// Measured length of the stall: from the first failure to the next success, or to the end of a run that was cut.
    pub stall_ns: u64,
    /// True when the patience ended before the stall did: `stall_ns` is then a lower bound.
    pub cut: bool,
    /// Failed connect() calls by errno; a stalled transaction tries again every 10 ms.
    pub errors: BTreeMap<String, u64>,
    /// Sockets in TIME_WAIT over time.
    pub time_wait: Vec<TimeWaitPoint>,
}

/// One reading of the TIME_WAIT count (`tw` in /proc/net/sockstat).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeWaitPoint {
    /// Since the first connect() of the run.
    pub at_ns: u64,
    /// Sockets in TIME_WAIT in the namespace.
    pub count: u64,
    /// Transactions done by then.
    pub completed: u64,
}
