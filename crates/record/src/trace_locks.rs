use serde::{Deserialize, Serialize};

use crate::snapshot::Part;
use crate::{Distribution, Record, TraceSymptom};

/// The record of `fourtuple trace locks`.
pub type TraceLocksRecord = Record<TraceLocksSettings, TraceLocksResults>;

/// The settings of `trace locks`. Filters are joined by AND; `null` filters nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceLocksSettings {
    /// Process ID.
    pub process: Option<u32>,
    /// Name of the process or waiting thread.
    pub name: Option<String>,
    /// Path of the network namespace of the waiting thread and of the connections. Absent in older records.
    #[serde(default)]
    pub netns: Option<String>,
    /// Path of a cgroup (version 2); includes the cgroups below it.
    pub cgroup: Option<String>,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
}

/// The results of `trace locks`: waits for TCP locks on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceLocksResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints).
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tp_btf"])))]
    pub tier: String,
    /// Duration of the trace.
    pub elapsed_ns: u64,
    /// Connections during the trace: opened from this host or accepted by it, whichever is more, so that a loopback
    /// connection counts once.
    pub connections: u64,
    /// Waits for locks on the TCP path, spinning and sleeping.
    pub waits: u64,
    /// Total time of these waits.
    pub wait_ns: u64,
    /// Waits per connection; `null` without connections.
    pub waits_per_connection: Option<f64>,
    /// Time in waits per connection; `null` without connections.
    pub wait_ns_per_connection: Option<f64>,
    /// Share of the time of all CPUs spent spinning, 0 to 1. Sleeping uses no CPU time.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub cpu_share: f64,
    /// Waits that were not counted or lost their path because a table was full, and events for which the kernel did not run a
    /// BPF program (`recursion_misses`).
    pub lost: u64,
    /// Notes on lost events, one line each, when they are too few to make the run invalid: at most one event in 100.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Waits for spinlocks unrelated to TCP.
    pub elsewhere_waits: u64,
    /// Total time of the waits for spinlocks unrelated to TCP.
    pub elsewhere_wait_ns: u64,
    /// Waits by class of lock, longest total time first; classes without waits are omitted.
    pub classes: Vec<LockClass>,
    /// Waits by kernel call path, longest total time first.
    pub paths: Vec<LockPath>,
    /// Waits for buckets of the local port table (bhash) by port, longest total time first.
    pub ports: Vec<LockPort>,
    /// Kinds of lock waits that this host cannot show, one line each.
    pub blind_spots: Vec<String>,
    /// Symptoms in the network namespace of the trace, as `doctor` counts them; waits for locks explain none of them. `hidden`: not read.
    #[serde(default)]
    pub symptoms: Part<Vec<TraceSymptom>>,
}

/// The waits for locks of one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockClass {
    /// Class: `listener`, `accept queue`, `ehash`, `bhash`, `time-wait`, `socket owner`, `other`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::LockClassName"))]
    pub class: String,
    /// Number of waits.
    pub waits: u64,
    /// Total time of the waits.
    pub wait_ns: u64,
    /// Waits that slept (`__lock_sock`).
    pub sleeps: u64,
    /// Total time of the waits that slept.
    pub sleep_ns: u64,
    /// Number of distinct locks, as far as they can be distinguished; locks that a thread slept for are not.
    pub locks: u64,
    /// Distribution of the waits. Maximum and mean are exact; quantiles are accurate to 6.3%.
    pub times_ns: Option<Distribution>,
    /// Change that removes these waits.
    pub remedy: String,
}

/// The waits on one call path through the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockPath {
    /// Class of the lock, as in `classes`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::LockClassName"))]
    pub class: String,
    /// Kind of wait: `spin` or `sleep`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["spin", "sleep"])))]
    pub kind: String,
    /// Functions of the call path, innermost first; empty when the stack was lost.
    pub frames: Vec<String>,
    /// Number of waits.
    pub waits: u64,
    /// Total time of the waits.
    pub wait_ns: u64,
    /// Maximum wait.
    pub max_ns: u64,
}

/// The waits for the bucket of one local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockPort {
    /// Port number; if several ports share a bucket, the lowest.
    pub port: u16,
    /// Number of waits.
    pub waits: u64,
    /// Total time of the waits.
    pub wait_ns: u64,
    /// Maximum wait.
    pub max_ns: u64,
}
