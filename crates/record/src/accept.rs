use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple lab accept` and of `fourtuple lab keepalive`, which share their fields.
pub type AcceptRecord = Record<AcceptSettings, AcceptResults>;

/// The settings of `lab accept` or `lab keepalive`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AcceptSettings {
    /// Number of workers that share the listener; 0 for an external server whose number of workers was not given.
    pub workers: u32,
    /// Number of clients, each with one request in flight at a time; light load has one client.
    pub clients: u32,
    /// Connections of a run of light load; 0 in `lab keepalive`.
    pub connections: u64,
    /// Address families: `unix`, `tcp4`, `tcp6`.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::ListenerFamily>"))]
    pub families: Vec<String>,
    /// Accept policies in kebab-case, as given; `external` is an external server.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::PolicyOrExternal>"))]
    pub policies: Vec<String>,
    /// Numbers of requests after which a connection is closed; 0 means never.
    pub close_every: Vec<u64>,
    /// Loads. In `lab accept`: `light`, `heavy`. In `lab keepalive`: the service mix, `sleep` or `spin`.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<crate::schema::AcceptLoad>"))]
    pub load: Vec<String>,
    /// How a worker spends the service time: `sleep` or `spin`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Service"))]
    pub service: String,
    /// Service time of short requests, which are the majority.
    pub short_ns: u64,
    /// Service time of long requests, which form the heavy tail.
    pub long_ns: u64,
    /// Share of requests that are long, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub long_share: f64,
    /// Mean pause of a client between a response and its next request.
    pub pause_ns: u64,
    /// Threshold of the wait above which a request counts as slow.
    pub slow_ns: u64,
    /// Duration of one run; light load ends after `connections` instead.
    pub for_ns: u64,
    /// Number of runs of every cell.
    pub repeats: u32,
    /// Backlog passed to listen(); the kernel caps it at net.core.somaxconn.
    pub backlog: u32,
    /// Seed of service times and pauses.
    pub seed: u64,
    /// Address of the external server; `null`: fourtuple's own workers were measured.
    pub server: Option<String>,
}

/// The results of `lab accept` or `lab keepalive`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AcceptResults {
    /// One entry per combination that was run, with its repeats merged.
    pub cells: Vec<AcceptCell>,
    /// Combinations that cannot run on this host, each with the reason.
    pub skipped: Vec<SkippedCell>,
    /// One request that waited for a busy worker while another worker was idle; `null`: none was recorded.
    pub timeline: Option<Timeline>,
    /// Whether closing connections pays on this host; `null`: not measured.
    pub break_even: Option<BreakEven>,
    /// Advice: the kernel's behaviour and the settings to use, one sentence per entry.
    pub advice: Vec<String>,
}

/// The results of one accept policy with one address family, load and `close_every`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AcceptCell {
    /// Accept policy in kebab-case: `exclusive`, `rotate`, `rotate:16`; `external` is an external server.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::PolicyOrExternal"))]
    pub policy: String,
    /// Name of the external server; `null` for fourtuple's own workers.
    pub server: Option<String>,
    /// Address family: `unix`, `tcp4` or `tcp6`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::ListenerFamily"))]
    pub family: String,
    /// Number of requests after which a connection is closed; 0 means never.
    pub close_every: u64,
    /// Load: `light` or `heavy` (`lab accept`), `sleep` or `spin` (`lab keepalive`).
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::AcceptLoad"))]
    pub load: String,
    /// Number of workers that shared the listener.
    pub workers: u32,
    /// Number of clients, each with one request in flight at a time.
    pub clients: u32,
    /// Connections accepted by each worker.
    pub accepts: Vec<u64>,
    /// Requests answered by each worker.
    pub requests: Vec<u64>,
    /// Connections that each worker had open when the run ended, before the shutdown closed them.
    pub sockets: Vec<u64>,
    /// Time that each worker spent on requests.
    pub busy_ns: Vec<u64>,
    /// Jain's fairness index of the workers' requests (`lab accept`: accepts), 1/n to 1; `null`: there were none.
    pub jain: Option<f64>,
    /// Requests of the busiest worker (`lab accept`: accepts) over the mean of all workers, 1 to n; `null`: there
    /// were none.
    pub max_over_mean: Option<f64>,
    /// Wait of the requests: latency minus service time.
    pub wait_ns: WaitNs,
    /// Requests per 10,000 that waited longer than the settings' `slow_ns`.
    pub slow_per_10k: f64,
    /// Misplaced wait: the part of a request's wait during which some worker was idle; mean over all requests.
    pub misplaced_wait_ns: u64,
    /// Results of one more client, which sends short requests only; `null`: there was no such client.
    pub probe: Option<Probe>,
    /// CPU time per request of the workers and the dispatcher.
    pub cpu_ns_per_request: u64,
    /// Returns of epoll_wait, io_uring_enter or accept4 with the listener ready, per accepted connection; `null`: not
    /// counted.
    pub wakeups_per_accept: Option<f64>,
    /// accept4 calls that failed with EAGAIN, per accepted connection; `null`: not counted.
    pub empty_accepts_per_accept: Option<f64>,
    /// Requests answered, summed over all repeats.
    pub operations: u64,
    /// Number of failures by name of the errno.
    pub errors: BTreeMap<String, u64>,
    /// Number of runs merged into this cell.
    pub repeats: u32,
}

/// Quantiles of a wait, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WaitNs {
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
    /// Lower end of the 95% interval of `p999` over the repeats; `null`: too few repeats.
    pub p999_low: Option<u64>,
    /// Upper end of the 95% interval of `p999`; `null`: too few repeats.
    pub p999_high: Option<u64>,
}

/// The results of a client that sends short requests, with pauses, beside all other clients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Probe {
    /// Requests of this client that were answered.
    pub requests: u64,
    /// Requests per 10,000 that waited longer than the settings' `slow_ns`.
    pub slow_per_10k: f64,
    /// Wait of the requests: latency minus service time.
    pub wait_ns: WaitNs,
}

/// A combination that cannot run on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SkippedCell {
    /// The accept policy, as in [`AcceptCell`].
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::PolicyOrExternal"))]
    pub policy: String,
    /// The address family, as in [`AcceptCell`].
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::ListenerFamily"))]
    pub family: String,
    /// Number of requests after which a connection is closed, as in [`AcceptCell`].
    pub close_every: u64,
    /// The reason in one line.
    pub why: String,
}

/// An interval of a run in which a request waits for a busy worker while another worker is idle. All times count from
/// the start of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Timeline {
    /// The accept policy, as in [`AcceptCell`].
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::PolicyOrExternal"))]
    pub policy: String,
    /// The address family, as in [`AcceptCell`].
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::ListenerFamily"))]
    pub family: String,
    /// Number of requests after which a connection is closed, as in [`AcceptCell`].
    pub close_every: u64,
    /// Busy spans of each worker, in order of time; the worker is idle between two spans.
    pub workers: Vec<Vec<Span>>,
    /// Start of the interval.
    pub from_ns: u64,
    /// End of the interval.
    pub to_ns: u64,
    /// The request that waits.
    pub waiting: Waiter,
}

/// A span in which a worker serves one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Span {
    /// Time at which the worker started to serve the request.
    pub from_ns: u64,
    /// Time at which the worker finished.
    pub to_ns: u64,
    /// Time that the request had waited before.
    pub waited_ns: u64,
}

/// A request that waits for its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Waiter {
    /// Number of the worker that holds the request's connection.
    pub worker: u32,
    /// Time at which the client sent the request.
    pub sent_ns: u64,
    /// Time at which the worker started to serve the request.
    pub begun_ns: u64,
    /// Time at which the worker finished.
    pub ended_ns: u64,
    /// Number of a worker that was idle during the wait.
    pub idle_worker: u32,
}

/// The cost of a new connection compared with the wait that it avoids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BreakEven {
    /// Cost of a new connection over this family: connect, accept and close.
    pub fresh_connection_ns: u64,
    /// Misplaced wait with connections kept open, mean per request.
    pub misplaced_wait_ns: u64,
    /// Number of requests that the mean covers; a mean of fewer than 200 requests decides nothing.
    pub requests: u64,
    /// Whether a new connection costs less than the wait it avoids: closing pays.
    pub closes: bool,
}
