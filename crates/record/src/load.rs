use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple load`.
pub type LoadRecord = Record<LoadSettings, LoadResults>;

/// What `load` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadSettings {
    /// As typed: `http://127.0.0.1:8080/`, `tcp://[::1]:9000`, `unix:/run/app.sock`.
    pub target: String,
    /// Where that leads: `127.0.0.1:8080`, or the path of a unix socket.
    pub address: String,
    /// `connect`, `crr`, `http`, `udp`, or `hold` (connections are opened and closed on top of those that are held).
    pub workload: String,
    /// `closed`, `even` or `poisson`.
    pub arrival: String,
    /// Operations per second that are offered; `null` in a closed loop.
    pub rate_per_s: Option<f64>,
    /// Connections that may be open at once, over all threads.
    pub connections: u64,
    /// Rest between two operations of a connection in a closed loop.
    pub pause_ns: u64,
    /// Requests after which a connection is closed; 0: never.
    pub close_every: u64,
    /// Connections that `hold` keeps open; 0 in other workloads.
    pub hold: u64,
    /// Operations after which the run ends; `null`: none.
    pub operations: Option<u64>,
    /// Time after which the run ends; `null`: none.
    pub for_ns: Option<u64>,
    /// An operation that takes longer has failed.
    pub timeout_ns: u64,
    /// An operation that takes longer is listed; `null`: none is.
    pub threshold_ns: Option<u64>,
    /// `auto`, `uring` or `epoll`, as asked.
    pub engine: String,
    /// Threads that generate.
    pub threads: u64,
    /// Whether each thread stays on a processor of its own.
    pub pinned: bool,
    /// How a source port is chosen, as asked; see the results for what was done.
    pub strategy: String,
    /// Source addresses, as typed; `null`: the kernel's choice.
    pub sources: Option<String>,
    /// `client`, `rst` or `server`: see the results.
    pub close: String,
    /// Bytes of a request (`crr`, `udp`), or of its body (`http`).
    pub request_bytes: u64,
    /// Bytes of a response of `crr`; 0 where the response says its own length.
    pub response_bytes: u64,
    /// Method of HTTP; empty otherwise.
    pub method: String,
    /// Whether the handshake's last ACK goes by itself; else it goes with the request (TCP_QUICKACK off).
    pub separate_ack: bool,
    /// Whether the run was to go on in spite of the preflight.
    pub anyway: bool,
    /// Seed of arrivals and of source ports.
    pub seed: u64,
}

/// What `load` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadResults {
    /// Operations done: connections of `connect`, requests answered of all others. Connections that are held are none.
    pub operations: u64,
    /// Connections that were established.
    pub connections: u64,
    /// What failed, by name: `ECONNREFUSED`, `EADDRNOTAVAIL`, `timeout`, `closed-early`, `malformed`, `tls`, `status-503`.
    pub errors: BTreeMap<String, u64>,
    /// From the start, opening the connections to hold included, to the end of the last operation or of the time asked for.
    pub elapsed_ns: u64,
    /// Operations done per second, since the connections to hold were there.
    pub rate_per_s: f64,
    /// Operations per second that were to be done: the rate of an open loop. In a closed loop what was done.
    pub offered_per_s: f64,
    /// CPU time of the generating threads, kernel included, per operation.
    pub client_cpu_ns_per_operation: u64,
    /// System calls of the engine per connection, counted by itself.
    pub syscalls_per_connection: f64,
    /// The engine that did it: `uring` or `epoll`.
    pub engine: String,
    /// Why it was not the other one; `null` when it was asked for or is the first choice.
    pub engine_reason: Option<String>,
    /// How connections were closed: `client` (FIN, TIME_WAIT is ours), `rst` (no TIME_WAIT, as no application does it),
    /// `server` (its FIN first, TIME_WAIT is its own).
    pub close: String,
    /// How source ports were chosen; `null` where there are none (unix sockets).
    pub strategy: Option<String>,
    /// Times of operations.
    pub latency_ns: Latency,
    /// Time from an intended start to the real one, in an open loop; counted in `total`.
    pub late_ns: Quantiles,
    /// Operations over the threshold, the first 1,000 of them.
    pub slow: Vec<Slow>,
    /// How many operations were over the threshold.
    pub slow_count: u64,
    /// Second by second.
    pub seconds: Vec<Second>,
    /// The distribution of the total times, drawn from the merged histogram.
    pub distribution: Vec<Quantile>,
    /// Ports before, during and after the run; `null` where there are none (unix sockets).
    pub ports: Option<LoadPorts>,
    /// The connections of `hold`; `null` in other workloads.
    pub hold: Option<Held>,
    /// What it means, in plain words: what stalled, when and why, and what to type instead.
    pub advice: Vec<String>,
}

/// Times of the parts of an operation, each over the operations that had the part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// In connect(): the search for a port and the SYN. With io_uring of a sample, see `samples`.
    pub search: Quantiles,
    /// From there until the connection was there.
    pub handshake: Quantiles,
    /// From the request to the first byte of the response.
    pub first_byte: Quantiles,
    /// From the (intended) start of the operation to its end, closing not included.
    pub total: Quantiles,
}

/// A distribution in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// How many times it is made of.
    pub samples: u64,
    /// Mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Largest.
    pub max: u64,
}

/// A point of a distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantile {
    /// Share of the operations that took no longer, 0 to 1.
    pub share: f64,
    /// The time.
    pub ns: u64,
}

/// An operation over the threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slow {
    /// When it was to start, since the start of the run.
    pub at_ns: u64,
    /// How long it took from there.
    pub total_ns: u64,
    /// The part that took longest: `late`, `connect` or `response`.
    pub longest: String,
    /// Which request of its connection it was; 1 opened it.
    pub request: u64,
}

/// One second of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Second {
    /// Its start, since the start of the run.
    pub at_ns: u64,
    /// Operations that ended in it.
    pub operations: u64,
    /// Connections established in it.
    pub connections: u64,
    /// Failures in it.
    pub errors: u64,
    /// Median of the total times.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Largest.
    pub max_ns: u64,
    /// Tuples left for new connections, as far as known; `null` where there are no ports.
    pub ports_left: Option<u64>,
}

/// Ports of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadPorts {
    /// Tuples towards the destination: ports x sources.
    pub budget: u64,
    /// Those that were taken before the run, by whichever process, TIME_WAIT included.
    pub taken_before: u64,
    /// Tuples that the run needs, as the preflight reckons; `null`: cannot be told.
    pub needed: Option<u64>,
    /// Tuples that the run's connections took.
    pub used: u64,
    /// How long a closed connection keeps its tuple: 60 s in TIME_WAIT, 1 s where it is reused, 0 when the server closes.
    pub kept_ns: u64,
    /// When the ports were to run out, since the start of the run; `null`: never.
    pub predicted_stall_ns: Option<u64>,
    /// When they did; `null`: they did not.
    pub stalled_ns: Option<u64>,
    /// For how long in all no connection could be opened.
    pub stall_length_ns: u64,
}

/// The connections of `hold`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// How many were opened and kept.
    pub opened: u64,
    /// How many of them were closed by the other side before the end.
    pub lost: u64,
    /// How long it took to open them.
    pub ramp_ns: u64,
}
