use serde::{Deserialize, Serialize};

use crate::{Record, Spread};

/// Record of `fourtuple trace locks`.
pub type TraceLocksRecord = Record<TraceLocksSettings, TraceLocksResults>;

/// Whose waits were looked at: those that match everything that is not `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLocksSettings {
    /// Process.
    pub process: Option<u32>,
    /// Name of the thread that waits.
    pub name: Option<String>,
    /// Path of a cgroup (version 2); those below it count as well.
    pub cgroup: Option<String>,
    /// For how long; `null`: until told to stop.
    pub for_ns: Option<u64>,
}

/// Which locks of TCP were waited for on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceLocksResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints).
    pub tier: String,
    /// For how long was traced.
    pub elapsed_ns: u64,
    /// Connections meanwhile: those opened from here, or those accepted here if that is more, so that one over loopback
    /// counts once.
    pub connections: u64,
    /// Waits for locks on the path of TCP, spinning and asleep.
    pub waits: u64,
    /// How long they took together.
    pub wait_ns: u64,
    /// Waits for each connection; `null` without connections.
    pub waits_per_connection: Option<f64>,
    /// Time of waiting for each connection; `null` without connections.
    pub wait_ns_per_connection: Option<f64>,
    /// Part of the time of all processors that went into spinning, from 0 to 1. Sleeping costs none.
    pub cpu_share: f64,
    /// What was not counted, or not whole, for want of room.
    pub lost: u64,
    /// Waits for spinlocks that have nothing to do with TCP.
    pub elsewhere_waits: u64,
    /// How long these took together.
    pub elsewhere_wait_ns: u64,
    /// By class, the one with the longest time first; those without waits are left out.
    pub classes: Vec<LockClass>,
    /// By path through the kernel, the one with the longest time first.
    pub paths: Vec<LockPath>,
    /// Waits for buckets of the table of local ports by the port that they hold, the one with the longest time first.
    pub ports: Vec<LockPort>,
    /// What this host does not show.
    pub blind_spots: Vec<String>,
}

/// Waits for locks of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockClass {
    /// `listener`, `accept queue`, `ehash`, `bhash`, `time-wait`, `socket owner`, `other`.
    pub class: String,
    /// How many.
    pub waits: u64,
    /// How long they took together.
    pub wait_ns: u64,
    /// Of the waits, those asleep (`__lock_sock`).
    pub sleeps: u64,
    /// How long these took together.
    pub sleep_ns: u64,
    /// How many locks it was, as far as they are told apart; those that were slept for are not.
    pub locks: u64,
    /// How long each took. The maximum and the mean are exact, quantiles to 6.3%.
    pub times_ns: Option<Spread>,
    /// What removes it.
    pub remedy: String,
}

/// Waits on one path through the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockPath {
    /// As in `classes`.
    pub class: String,
    /// `spin` or `sleep`.
    pub kind: String,
    /// Functions, the one that waits first; empty when the stack was lost.
    pub frames: Vec<String>,
    /// How many waits.
    pub waits: u64,
    /// How long they took together.
    pub wait_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// Waits for the bucket of one local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockPort {
    /// The port; with fewer buckets than ports the lowest of those that share it.
    pub port: u16,
    /// How many waits.
    pub waits: u64,
    /// How long they took together.
    pub wait_ns: u64,
    /// The longest.
    pub max_ns: u64,
}
