use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

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
