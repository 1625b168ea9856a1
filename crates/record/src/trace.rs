use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::snapshot::{Failures, Part};
use crate::{ByParity, Distribution, Record};

/// The record of `fourtuple trace connect`.
pub type TraceConnectRecord = Record<TraceConnectSettings, TraceConnectResults>;

/// The settings of `trace connect`. Filters are joined by AND; `null` filters nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceConnectSettings {
    /// Protocol: `tcp` or `udp`. Absent in older records, which are of TCP.
    #[serde(default = "tcp")]
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tcp", "udp"])))]
    pub protocol: String,
    /// Process ID.
    pub process: Option<u32>,
    /// Name of the process or connecting thread.
    pub name: Option<String>,
    /// Destination address.
    pub destination: Option<String>,
    /// Destination port.
    pub port: Option<u16>,
    /// Path of the network namespace of the socket. Absent in older records.
    #[serde(default)]
    pub netns: Option<String>,
    /// Path of a cgroup (version 2); includes the cgroups below it.
    pub cgroup: Option<String>,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
    /// Seed of the sampling.
    pub seed: u64,
    /// Instrument as given; `auto`: the first one that the kernel supports.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["auto", "tp_btf", "fexit"])))]
    pub tier: String,
}

pub(crate) fn one() -> u32 {
    1
}

fn tcp() -> String {
    "tcp".to_owned()
}

/// The results of `trace connect`: port searches on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceConnectResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints) or `fexit` (entry and exit of the kernel function); for UDP
    /// `cgroup+tp_btf` (programs of the root cgroup for the start, BTF-typed tracepoints for the end).
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tp_btf", "fexit", "cgroup+tp_btf"])))]
    pub tier: String,
    /// Reason why the instrument is not `tp_btf`; `null`: it is, or another instrument was requested.
    pub tier_reason: Option<String>,
    /// Duration of the trace.
    pub elapsed_ns: u64,
    /// Port searches that found a port.
    pub searches: u64,
    /// Searches that found a port, per second.
    pub searches_per_s: f64,
    /// Failed connects by errno. `closed`: the program closed the socket during the handshake. `unknown`: a port was
    /// found but no SYN sent (no route, or no memory), or a UDP search had not ended when the trace did.
    pub failed: BTreeMap<String, u64>,
    /// Connects from a port that was already bound, which need no search.
    pub given_port: u64,
    /// Handshakes completed.
    pub established: u64,
    /// IPv6 connections whose search is missing from `searches`: the trace attaches to the end of IPv6 searches
    /// within 50 ms of the first IPv6 connect.
    pub untimed: u64,
    /// Events that were not counted because a table was full, and events for which the kernel did not run a BPF program
    /// (`recursion_misses`).
    pub lost: u64,
    /// Notes on lost events, one line each, when they are too few to make the run invalid: at most one event in 100.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Searches during which the thread was scheduled out.
    pub switched: u64,
    /// Time of the searches that found a port, without waits for a processor, by parity of the port. Maximum and mean are exact; quantiles are accurate to
    /// 1.6%.
    pub search_ns: ByParity,
    /// Time of the searches that found no port; `null` for UDP, where the kernel shows no end of a failed search.
    pub failed_search_ns: Option<Distribution>,
    /// Time from the end of the search until the connection is established; `null` for UDP.
    pub handshake_ns: Option<Distribution>,
    /// Histogram of search times, in ascending order.
    pub histogram: Vec<TraceStep>,
    /// Heat map of the searches that found a port: end time and duration.
    pub heat: TraceHeat,
    /// Samples of `--flame`; `null` without it.
    pub flame: Option<TraceFlame>,
    /// Connects by process and destination, most searches first.
    pub tuples: Vec<TraceTuple>,
    /// Random sample of single searches in order, at most 10,000.
    pub samples: Vec<TraceSample>,
    /// Calls on sockets that failed, by process and address, with the errno that the program got; with a filter by destination, calls
    /// with this address only. `hidden`: not counted.
    #[serde(default)]
    pub calls: Part<Failures>,
    /// Symptoms other than failed calls in the network namespace of the trace, as `doctor` counts them. `hidden`: not read.
    #[serde(default)]
    pub symptoms: Part<Vec<TraceSymptom>>,
}

/// A counter of failures that grew during a trace, packets that a socket dropped, or a queue that did not move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceSymptom {
    /// The symptom in one line, with the number of events.
    pub sentence: String,
    /// Rules of `doctor` that explain events of it, by id; none: it is unexplained.
    pub rules: Vec<String>,
}

/// A bucket of the histogram of search times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceStep {
    /// Lower bound of the bucket.
    pub from_ns: u64,
    /// Searches that found an even port.
    pub even: u64,
    /// Searches that found an odd port.
    pub odd: u64,
}

/// A heat map of searches: columns are time, rows are duration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceHeat {
    /// Time per column. The first column begins with the trace.
    pub column_ns: u64,
    /// Lower bound of each row's duration, ascending: four rows per factor of ten, without gaps.
    pub from_ns: Vec<u64>,
    /// Number of searches per row, one list per column, at most 120 columns.
    #[cfg_attr(feature = "schema", schemars(length(max = 120)))]
    pub columns: Vec<Vec<u64>>,
}

/// The samples that a flame graph was drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceFlame {
    /// Samples of the traced programs while they ran on a CPU.
    pub samples: u64,
    /// Samples per second and CPU.
    pub samples_per_s: u64,
    /// Share of the samples in connect(), 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub in_connect: f64,
    /// Share of the samples in the port search, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub in_search: f64,
    /// Samples lost because the stack map was full.
    pub lost: u64,
}

/// The connects of one process to one destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceTuple {
    /// Process ID. Of many short processes with this name, one of them.
    pub process: u32,
    /// Processes of this name that connected to the destination, which have ended if there are several.
    #[serde(default = "one")]
    pub processes: u32,
    /// Name of the process.
    pub name: String,
    /// Destination address and port.
    pub destination: String,
    /// Inode of the network namespace, as `lsns` prints it; 0 in older records.
    #[serde(default)]
    pub namespace: u32,
    /// Searches that found a port.
    pub searches: u64,
    /// Searches that found an even port.
    pub even: u64,
    /// Searches that found an odd port.
    pub odd: u64,
    /// Mean time of the searches.
    pub mean_ns: u64,
    /// 99th percentile of the search time, accurate to 6.3%.
    pub p99_ns: u64,
    /// Median of the searches that found an even port, accurate to 6.3%.
    pub even_p50_ns: Option<u64>,
    /// Median of the searches that found an odd port, accurate to 6.3%.
    pub odd_p50_ns: Option<u64>,
    /// Failed connects, for any reason.
    pub failed: u64,
    /// Connects that failed because no port was free: EADDRNOTAVAIL, for UDP EAGAIN.
    pub no_port: u64,
    /// Connects from a port that was already bound.
    pub given_port: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Connects made after a failed connect and before the next successful one.
    pub retries: u64,
    /// SYNs retransmitted.
    pub syn_retries: u64,
    /// Connections that this process closed before its peer: the TIME_WAIT socket is on this side.
    pub closed_first: u64,
    /// Connections that the peer closed first.
    pub closed_by_peer: u64,
    /// Ports of the range in use at the end by connections to this destination, TIME_WAIT sockets included, from the
    /// source address with the most; `null`: unknown.
    pub in_use: Option<u32>,
    /// Number of ports in the ephemeral range; `null`: unknown.
    pub range: Option<u32>,
    /// `in_use` divided by `range`; `null`: unknown.
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Share>"))]
    pub fill: Option<f64>,
}

/// A single port search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceSample {
    /// End of the search, counted from the start of the trace.
    pub at_ns: u64,
    /// Duration of the search.
    pub search_ns: u64,
    /// Port that the search found; `null`: none.
    pub source_port: Option<u16>,
    /// Index into `tuples`; `null`: the tuple is not listed because the map was full.
    pub tuple: Option<u32>,
}
