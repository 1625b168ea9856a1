use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{AcceptResults, AcceptSettings, PortsResults, PortsSettings, Record};

/// The record of `fourtuple lab`: every experiment in its short form.
pub type LabRecord = Record<LabSettings, LabResults>;

/// The settings of the experiments of a `lab` without a subcommand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabSettings {
    /// Settings of `lab ports`.
    pub ports: PortsSettings,
    /// Settings of `lab time-wait`.
    pub time_wait: TimeWaitSettings,
    /// Settings of `lab accept`; absent in older records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptSettings>,
}

/// The results of the experiments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabResults {
    /// Results of `lab ports`.
    pub ports: PortsResults,
    /// Results of `lab time-wait`.
    pub time_wait: TimeWaitResults,
    /// Results of `lab accept`; absent in older records, and if the experiment failed or was interrupted before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptResults>,
}

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

/// The record of `fourtuple lab planes`.
pub type PlanesRecord = Record<PlanesSettings, PlanesResults>;

/// The settings of `lab planes`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanesSettings {
    /// Whether every combination of the lists below was run; otherwise a selection that answers the experiment's
    /// questions.
    pub every_combination: bool,
    /// I/O methods of the planes: `one-by-one`, `batched`, `offload`, `uring`.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::Plane>"))]
    pub plane: Vec<String>,
    /// Numbers of planes.
    pub planes: Vec<u32>,
    /// Payload sizes.
    pub bytes: Vec<u32>,
    /// Selectors of the plane that receives a packet: `hash`, `random`, `flow`, `cpu`.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::PlanesSpread>"))]
    pub spread: Vec<String>,
    /// Numbers of 4-tuples.
    pub flows: Vec<u32>,
    /// Work per packet besides moving it.
    pub work_ns: Vec<u64>,
    /// Packets of one run.
    pub packets: u64,
    /// Number of runs of every cell.
    pub repeats: u32,
    /// Link between generator, planes and sink: `veth` or `loopback`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["veth", "loopback"])))]
    pub over: String,
    /// Seed of the bootstrap for the intervals.
    pub seed: u64,
}

/// The results of `lab planes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanesResults {
    /// One entry per combination that was run.
    pub cells: Vec<PlanesCell>,
    /// I/O methods that this host does not support.
    pub skipped: Vec<PlanesSkipped>,
    /// Work per packet above which two planes forward at least a tenth more than one, interpolated between measured
    /// values; 0: without any work; `null`: not up to the longest, or fewer than two values were measured.
    pub planes_help_above_ns: Option<u64>,
    /// Advice, one sentence per entry.
    pub advice: Vec<String>,
}

/// An I/O method that was not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanesSkipped {
    /// Name of the I/O method.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Plane"))]
    pub plane: String,
    /// Reason.
    pub why: String,
}

/// The results of one combination. Counts are sums over its runs; rates and times are medians of its runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanesCell {
    /// I/O method of the planes.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Plane"))]
    pub plane: String,
    /// Number of planes.
    pub planes: u32,
    /// Selector of the plane that receives a packet.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::PlanesSpread"))]
    pub spread: String,
    /// Number of 4-tuples.
    pub flows: u32,
    /// Number of flows within the 4-tuples; packets of a flow are in order.
    pub inner_flows: u32,
    /// Payload size of a packet.
    pub packet_bytes: u32,
    /// MTU of the devices.
    pub mtu: u32,
    /// Work per packet besides moving it.
    pub work_ns: u64,
    /// Number of runs merged into this cell.
    pub repeats: u32,
    /// Packets sent to the planes.
    pub packets: u64,
    /// Packets sent to the planes that did not arrive at the sink.
    pub lost: u64,
    /// Lost packets by reason: `overflow` (receive queue of a plane), other reasons of `forward`, `sink` (receive
    /// queue of the sink), `elsewhere`.
    pub dropped: BTreeMap<String, u64>,
    /// Packets that arrived after a later packet of the same inner flow.
    pub reordered: u64,
    /// Share of all received packets for each plane, 0 to 1. For `hash` and `cpu` the shares of the first run,
    /// because each run distributes differently.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::Share>"))]
    pub share: Vec<f64>,
    /// CPU time of the planes' threads per received packet. Measured with one plane and a full queue, with generator
    /// and plane taking turns on one CPU; with several planes, measured while they run in parallel.
    pub cpu_ns_per_packet: u64,
    /// Lower end of the 95% interval of `cpu_ns_per_packet`; `null`: fewer than three runs.
    pub cpu_ns_low: Option<u64>,
    /// Upper end of the 95% interval of `cpu_ns_per_packet`; `null`: fewer than three runs.
    pub cpu_ns_high: Option<u64>,
    /// Packets that arrived, per second between the first packet sent and the last one received.
    pub pps: f64,
    /// Lower end of the 95% interval of `pps`; `null`: fewer than three runs.
    pub pps_low: Option<f64>,
    /// Upper end of the 95% interval of `pps`; `null`: fewer than three runs.
    pub pps_high: Option<f64>,
    /// Packets per second of CPU time, summed over the planes: the throughput if each plane had a CPU of its own and
    /// a queue that is never empty. Planes without packets add nothing.
    pub capacity_pps: f64,
    /// Share of the time in which the generator waited because the maximum number of packets was in flight.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub generator_waited: f64,
    /// Bottleneck: `generator`, which hardly ever waited, or `planes`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["generator", "planes"])))]
    pub limited_by: String,
    /// CPU time of the generator per packet.
    pub generator_cpu_ns_per_packet: u64,
    /// CPU time of the sink per packet.
    pub sink_cpu_ns_per_packet: u64,
    /// CPU time per packet relative to `one-by-one` with otherwise equal settings, compared run by run.
    pub cpu_to_one_by_one: Option<PlanesRatio>,
    /// `capacity_pps` relative to one plane with otherwise equal settings, compared run by run.
    pub capacity_to_one_plane: Option<PlanesRatio>,
    /// `pps` relative to one plane with otherwise equal settings, compared run by run.
    pub pps_to_one_plane: Option<PlanesRatio>,
}

/// The ratio of two cells: the median of the runs' ratios and its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanesRatio {
    /// Median.
    pub ratio: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}
