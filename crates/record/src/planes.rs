use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple lab planes`.
pub type PlanesRecord = Record<PlanesSettings, PlanesResults>;

/// What `lab planes` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanesSettings {
    /// True: every combination of the lists below. False: the choice that answers the questions of the experiment.
    pub every_combination: bool,
    /// How planes move packets: `one-by-one`, `batched`, `offload`, `uring`.
    pub plane: Vec<String>,
    /// Numbers of planes.
    pub planes: Vec<u32>,
    /// Payloads of packets.
    pub bytes: Vec<u32>,
    /// Which plane gets a packet: `hash`, `random`, `flow`, `cpu`.
    pub spread: Vec<String>,
    /// Numbers of 4-tuples.
    pub flows: Vec<u32>,
    /// What a packet costs beyond being moved.
    pub work_ns: Vec<u64>,
    /// Packets of one run.
    pub packets: u64,
    /// Runs of every cell.
    pub repeats: u32,
    /// What is between generator, planes and sink: `veth` or `loopback`.
    pub over: String,
    /// Seed of the intervals.
    pub seed: u64,
}

/// What `lab planes` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanesResults {
    /// One for each combination that was run.
    pub cells: Vec<PlanesCell>,
    /// Ways to move packets that this host has not got.
    pub skipped: Vec<PlanesSkipped>,
    /// Work per packet above which two planes forward at least a tenth more than one, between the works that were measured;
    /// 0: they do without any; `null`: not up to the longest, or fewer than two works were measured.
    pub planes_help_above_ns: Option<u64>,
    /// What it means here, in plain words.
    pub advice: Vec<String>,
}

/// A way to move packets that was not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanesSkipped {
    /// Which.
    pub plane: String,
    /// Why not.
    pub why: String,
}

/// One combination. Counts are those of all its runs together, rates and times are medians of the runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanesCell {
    /// How planes move packets.
    pub plane: String,
    /// How many planes.
    pub planes: u32,
    /// Which plane gets a packet.
    pub spread: String,
    /// How many 4-tuples.
    pub flows: u32,
    /// Flows within the 4-tuples, each in order.
    pub inner_flows: u32,
    /// Payload of a packet.
    pub packet_bytes: u32,
    /// MTU of the devices.
    pub mtu: u32,
    /// What a packet costs beyond being moved.
    pub work_ns: u64,
    /// Runs that are in it.
    pub repeats: u32,
    /// Packets sent to the planes.
    pub packets: u64,
    /// Packets that did not arrive behind them.
    pub lost: u64,
    /// Where they went: `overflow` (the queue of a plane), other reasons of `forward`, `sink` (the queue of whoever counts them),
    /// `elsewhere`.
    pub dropped: BTreeMap<String, u64>,
    /// Packets that arrived behind a later one of their inner flow.
    pub reordered: u64,
    /// Each plane's part of what all of them received, 0 to 1; of `hash` and `cpu` in the first run, as they choose anew in each.
    pub share: Vec<f64>,
    /// Processor time of the planes' threads per packet received. Of one plane with a full queue: generator and plane take turns
    /// on one processor for this; of several abreast.
    pub cpu_ns_per_packet: u64,
    /// Lower end of its 95% interval; `null` with fewer than three runs.
    pub cpu_ns_low: Option<u64>,
    /// Upper end.
    pub cpu_ns_high: Option<u64>,
    /// Packets that arrived, per second from the first sent to the last arrived.
    pub pps: f64,
    /// Lower end of its 95% interval; `null` with fewer than three runs.
    pub pps_low: Option<f64>,
    /// Upper end.
    pub pps_high: Option<f64>,
    /// Packets that the planes move per second of their own processor time, all planes together: what they would do if each had
    /// a processor for itself and always something to do. Planes that got nothing count for nothing.
    pub capacity_pps: f64,
    /// Share of the time in which the generator waited because as many packets were under way as may be.
    pub generator_waited: f64,
    /// Who set the pace: `generator`, which hardly ever had to wait, or `planes`.
    pub limited_by: String,
    /// Processor time of the generator per packet.
    pub generator_cpu_ns_per_packet: u64,
    /// Processor time of the sink per packet.
    pub sink_cpu_ns_per_packet: u64,
    /// CPU per packet over that of `one-by-one` where all else is the same, run by run.
    pub cpu_to_one_by_one: Option<PlanesRatio>,
    /// Counted capacity over that of one plane where all else is the same, run by run.
    pub capacity_to_one_plane: Option<PlanesRatio>,
    /// Packets per second over those of one plane where all else is the same, run by run.
    pub pps_to_one_plane: Option<PlanesRatio>,
}

/// A ratio of two cells: the median of the runs' ratios and its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanesRatio {
    /// The median.
    pub ratio: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}
