use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple lab time-wait`.
pub type TimeWaitRecord = Record<TimeWaitSettings, TimeWaitResults>;

/// The settings of `lab time-wait`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimeWaitSettings {
    /// First port of the range in the experiment's namespace.
    pub low: u16,
    /// Last port of the range, inclusive.
    pub high: u16,
    /// Names of the remedies, in the order of their runs.
    pub remedies: Vec<String>,
    /// Maximum time to wait for the end of one stall before the run is cut.
    pub patience_ns: u64,
}

/// The results of `lab time-wait`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimeWaitResults {
    /// Number of ports in the range.
    pub ports: u64,
    /// Lifetime of a TIME_WAIT socket in the kernel: 60 s (TCP_TIMEWAIT_LEN).
    pub time_wait_ns: u64,
    /// Highest sustained rate of one source address: ports / 60 s.
    pub ceiling_per_s: f64,
    /// One entry per run.
    pub runs: Vec<TimeWaitRun>,
    /// Advice, one sentence per entry.
    pub advice: Vec<String>,
}

/// The results of one run: one thread connects, sends one byte and closes as fast as it can, until all transactions
/// are done or a stall exceeds the patience.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimeWaitRun {
    /// Name of the remedy, such as `none-under` (one transaction fewer than there are ports) or `more-sources`.
    pub remedy: String,
    /// Transactions requested.
    pub transactions: u64,
    /// Transactions completed.
    pub completed: u64,
    /// Time from the first connect() to the end of the last transaction, including the stall.
    pub elapsed_ns: u64,
    /// Transactions per second outside of stalls.
    pub rate_per_s: f64,
    /// Predicted number of the first transaction that finds no port, counted from 1; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_stall_at: Option<u64>,
    /// Measured number of the first transaction that found no port; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stalled_at: Option<u64>,
    /// Predicted length of the stall: 60 s minus the time since the first port was closed when the last port was
    /// taken; 0: no stall.
    pub predicted_stall_ns: u64,
    /// Measured length of the stall: from the first failure to the next success, or to the end of a run that was cut.
    pub stall_ns: u64,
    /// Whether the patience ended before the stall: `stall_ns` is then a lower bound.
    pub cut: bool,
    /// Failed connect() calls by errno; a stalled transaction retries every 10 ms.
    pub errors: BTreeMap<String, u64>,
    /// Number of TIME_WAIT sockets over time.
    pub time_wait: Vec<TimeWaitPoint>,
}

impl TimeWaitRun {
    /// Returns what the remedy with this name changes; `None` for the name of another version.
    pub fn meaning(remedy: &str) -> Option<&'static str> {
        Some(match remedy {
            "none-under" => "nothing changed, one transaction fewer than there are ports",
            "none-over" => "nothing changed, more transactions than there are ports, as in all further runs",
            "more-sources" => "four source addresses",
            "wider-range" => "net.ipv4.ip_local_port_range = 1024 65535",
            "tcp-tw-reuse" => "net.ipv4.tcp_tw_reuse = 1 (needs timestamps)",
            "server-closes-first" => "the server closing first",
            "keep-alive" => "100 transactions per connection",
            _ => return None,
        })
    }
}

/// One reading of the TIME_WAIT count (`tw` in /proc/net/sockstat).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimeWaitPoint {
    /// Time since the first connect() of the run.
    pub at_ns: u64,
    /// TIME_WAIT sockets in the namespace.
    pub count: u64,
    /// Transactions completed by then.
    pub completed: u64,
}
