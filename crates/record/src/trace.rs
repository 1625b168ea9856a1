use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ByParity, Record, Spread};

/// Record of `fourtuple trace connect`.
pub type TraceConnectRecord = Record<TraceConnectSettings, TraceConnectResults>;

/// Which connects were looked at: those that match everything that is not `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceConnectSettings {
    /// `tcp` or `udp`. Absent in records of before UDP was traced, which are of TCP.
    #[serde(default = "tcp")]
    pub protocol: String,
    /// Process.
    pub process: Option<u32>,
    /// Name of the thread that connects.
    pub name: Option<String>,
    /// Address of the destination.
    pub destination: Option<String>,
    /// Port of the destination.
    pub port: Option<u16>,
    /// Path of a cgroup (version 2); those below it count as well.
    pub cgroup: Option<String>,
    /// For how long; `null`: until told to stop.
    pub for_ns: Option<u64>,
    /// Seed of the choice of samples.
    pub seed: u64,
    /// Instrument that was asked for; `auto`: the first that the kernel can do.
    pub tier: String,
}

fn tcp() -> String {
    "tcp".to_owned()
}

/// What connect() did on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceConnectResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints) or `fexit` (beginning and return of the kernel's function); of UDP
    /// `cgroup+tp_btf` (programs of the root cgroup for the beginning, BTF-typed tracepoints for the end).
    pub tier: String,
    /// Why it is not `tp_btf`; `null`: it is, or another one was asked for.
    pub tier_reason: Option<String>,
    /// For how long was traced.
    pub elapsed_ns: u64,
    /// Searches for a source port that found one.
    pub searches: u64,
    /// These, per second.
    pub searches_per_s: f64,
    /// Connects that failed, by errno; `closed`: the program closed the socket during the handshake; `unknown`: a port
    /// was found and the SYN not made (no route from there, or no memory), or of UDP a search had not come to its end when
    /// the trace did.
    pub failed: BTreeMap<String, u64>,
    /// Connects from a port that was bound before: they have no search.
    pub given_port: u64,
    /// Handshakes that came to their end.
    pub established: u64,
    /// Connections over IPv6 whose search is not among `searches`: the end of it is only looked for once somebody has
    /// connected over IPv6, within 50 ms.
    pub untimed: u64,
    /// What was not counted, or not shown, for want of room.
    pub lost: u64,
    /// Searches during which the task was not running all the time.
    pub switched: u64,
    /// Time of the searches that found a port, by its parity. The maximum and the mean are exact, quantiles to 1.6%.
    pub search_ns: ByParity,
    /// Time of the searches that found none; of UDP nobody sees when they end.
    pub failed_search_ns: Option<Spread>,
    /// From the end of the search until the connection was established; UDP has none.
    pub handshake_ns: Option<Spread>,
    /// Searches by time, in ascending order.
    pub histogram: Vec<TraceStep>,
    /// Searches that found a port by when they ended and how long they took.
    pub heat: TraceHeat,
    /// What `--flame` sampled; `null` without it.
    pub flame: Option<TraceFlame>,
    /// By process and destination, the one with the most searches first.
    pub tuples: Vec<TraceTuple>,
    /// A sample of single searches in their order, at most 10,000.
    pub samples: Vec<TraceSample>,
}

/// Searches of about the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStep {
    /// The shortest time that counts here.
    pub from_ns: u64,
    /// Searches that found an even port.
    pub even: u64,
    /// Searches that found an odd port.
    pub odd: u64,
}

/// How many searches took how long, and when. A heat map: columns of time, rows of length.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceHeat {
    /// How much time a column stands for. The first begins with the trace.
    pub column_ns: u64,
    /// The shortest time that counts in a row, in ascending order: four rows to a factor of ten, without gaps.
    pub from_ns: Vec<u64>,
    /// Searches by row, a list for each column, at most 120.
    pub columns: Vec<Vec<u64>>,
}

/// Of what a flame graph was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceFlame {
    /// Samples of programs that were traced while they ran on a processor.
    pub samples: u64,
    /// Samples a second and processor.
    pub samples_per_s: u64,
    /// Share of the samples that lie in connect(), from 0 to 1.
    pub in_connect: f64,
    /// Share of the samples that lie in the search for a port.
    pub in_search: f64,
    /// Samples for whose stack there was no room.
    pub lost: u64,
}

/// The connects of one process to one destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceTuple {
    /// Process.
    pub process: u32,
    /// Name of the thread that connected first.
    pub name: String,
    /// Address and port.
    pub destination: String,
    /// Searches that found a port.
    pub searches: u64,
    /// Of these, searches that found an even one.
    pub even: u64,
    /// Searches that found an odd one.
    pub odd: u64,
    /// Mean time of the searches.
    pub mean_ns: u64,
    /// Their 99th percentile, to 6.3%.
    pub p99_ns: u64,
    /// Median of those that found an even port, to 6.3%.
    pub even_p50_ns: Option<u64>,
    /// Median of those that found an odd port, to 6.3%.
    pub odd_p50_ns: Option<u64>,
    /// Connects that failed, for whatever reason.
    pub failed: u64,
    /// Of these, for want of a port: with EADDRNOTAVAIL, of UDP with EAGAIN.
    pub no_port: u64,
    /// Connects from a port that was bound before.
    pub given_port: u64,
    /// Handshakes that came to their end.
    pub established: u64,
    /// Connects that came after one that had failed, before one succeeded.
    pub retries: u64,
    /// SYNs that were sent again.
    pub syn_retries: u64,
    /// Connections that this process closed before its peer did: the port is in TIME_WAIT here.
    pub closed_first: u64,
    /// Connections that the peer had closed first.
    pub closed_by_peer: u64,
    /// Ports of the range that connections to this destination had at the end, TIME_WAIT included, of the source address with
    /// the most; `null`: not known.
    pub in_use: Option<u32>,
    /// Ports that the kernel may choose from; `null`: not known.
    pub range: Option<u32>,
    /// The one by the other; `null`: not known.
    pub fill: Option<f64>,
}

/// One search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSample {
    /// When it ended, since the trace began.
    pub at_ns: u64,
    /// How long it took.
    pub search_ns: u64,
    /// The port that was found; `null`: none.
    pub source_port: Option<u16>,
    /// Which of `tuples`; `null`: it is not there for want of room.
    pub tuple: Option<u32>,
}
