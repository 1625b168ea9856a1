use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple lab accept` and of `fourtuple lab keepalive`: both ask which worker gets a connection and who
/// waits for it, and answer in the same fields.
pub type AcceptRecord = Record<AcceptSettings, AcceptResults>;

/// What `lab accept` or `lab keepalive` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptSettings {
    /// Workers that share the listener; of a server of somebody else's 0 when nobody said how many.
    pub workers: u32,
    /// Clients that each have one request under way at a time; light load has one.
    pub clients: u32,
    /// Connections of a run of light load; 0 of `lab keepalive`.
    pub connections: u64,
    /// `unix`, `tcp4`, `tcp6`.
    pub families: Vec<String>,
    /// Policies in kebab-case, as asked; `external`: a server of somebody else's.
    pub policies: Vec<String>,
    /// After how many requests a connection is closed, 0: never.
    pub close_every: Vec<u64>,
    /// `lab accept`: `light`, `heavy`. `lab keepalive`: the service mix, `sleep` or `spin`.
    pub load: Vec<String>,
    /// How the service time is spent: `sleep` or `spin`.
    pub service: String,
    /// Service time of most requests.
    pub short_ns: u64,
    /// Service time of the others: the heavy tail.
    pub long_ns: u64,
    /// Share of requests that are long, 0 to 1.
    pub long_share: f64,
    /// Mean pause of a client between an answer and its next request.
    pub pause_ns: u64,
    /// A request that waited longer counts as slow.
    pub slow_ns: u64,
    /// Length of one run, but of light load.
    pub for_ns: u64,
    /// Runs of every cell.
    pub repeats: u32,
    /// Length of the accept queue that was asked for; the kernel cuts it to net.core.somaxconn.
    pub backlog: u32,
    /// Seed of service times and pauses.
    pub seed: u64,
    /// Where that server was reached; `null`: our own were measured.
    pub server: Option<String>,
}

/// What `lab accept` or `lab keepalive` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptResults {
    /// One entry per combination that was run, its repeats taken together.
    pub cells: Vec<AcceptCell>,
    /// Combinations that cannot be run here, each with the reason.
    pub skipped: Vec<SkippedCell>,
    /// One request that waited behind a busy worker while another idled; `null`: none was seen or looked for.
    pub timeline: Option<Timeline>,
    /// Whether closing connections pays here; `null`: not measured.
    pub break_even: Option<BreakEven>,
    /// What this kernel does and what to set here, in plain words.
    pub advice: Vec<String>,
}

/// One policy over one family, under one load and with one way of closing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptCell {
    /// Kebab-case: `exclusive`, `rotate`, `rotate:16`; `external`: a server of somebody else's.
    pub policy: String,
    /// The name of that server; `null` for our own.
    pub server: Option<String>,
    /// `unix`, `tcp4` or `tcp6`.
    pub family: String,
    /// After how many requests a connection is closed, 0: never.
    pub close_every: u64,
    /// `light`, `heavy` (`lab accept`), `sleep` or `spin` (`lab keepalive`).
    pub load: String,
    /// Workers that shared the listener.
    pub workers: u32,
    /// Clients, each with one request under way at a time.
    pub clients: u32,
    /// Connections accepted by each worker.
    pub accepts: Vec<u64>,
    /// Requests answered by each worker.
    pub requests: Vec<u64>,
    /// Connections that each worker had open at the end of the run, before any was closed for that reason.
    pub sockets: Vec<u64>,
    /// Time that each worker was busy with requests.
    pub busy_ns: Vec<u64>,
    /// Jain's index over the workers' requests (`lab accept`: accepts), 1/n to 1; `null`: there were none.
    pub jain: Option<f64>,
    /// The busiest worker's requests (`lab accept`: accepts) over the mean, 1 to n; `null`: there were none.
    pub max_over_mean: Option<f64>,
    /// Latency less the service time.
    pub wait_ns: WaitNs,
    /// Of 10,000 requests, how many waited longer than the settings' `slow_ns`.
    pub slow_per_10k: f64,
    /// Mean over all requests of the time that a request waited while some worker was idle.
    pub misplaced_wait_ns: u64,
    /// What a client of its own met that sends short requests only; `null`: there was none.
    pub probe: Option<Probe>,
    /// CPU time of the workers' threads, and of the dispatcher's, per request.
    pub cpu_ns_per_request: u64,
    /// Returns of epoll_wait, io_uring_enter or accept4 with the listener ready, per connection accepted; `null`: not
    /// counted.
    pub wakeups_per_accept: Option<f64>,
    /// accept4 calls that found the queue empty (EAGAIN), per connection accepted; `null`: not counted.
    pub empty_accepts_per_accept: Option<f64>,
    /// Requests answered, of all repeats.
    pub operations: u64,
    /// Failures by the name of the errno.
    pub errors: BTreeMap<String, u64>,
    /// Runs that this is made of.
    pub repeats: u32,
}

/// Quantiles of a wait, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitNs {
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// The longest.
    pub max: u64,
    /// Lower end of the 95% interval of `p999` over the repeats; `null`: too few repeats.
    pub p999_low: Option<u64>,
    /// Its upper end.
    pub p999_high: Option<u64>,
}

/// One client that sends short requests, with a pause of its own, next to all others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// Requests that it sent and that were answered.
    pub requests: u64,
    /// Of 10,000, how many waited longer than the settings' `slow_ns`.
    pub slow_per_10k: f64,
    /// Latency less the service time.
    pub wait_ns: WaitNs,
}

/// A combination that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedCell {
    /// As in [`AcceptCell`].
    pub policy: String,
    /// As in [`AcceptCell`].
    pub family: String,
    /// As in [`AcceptCell`].
    pub close_every: u64,
    /// One line for people.
    pub why: String,
}

/// A piece of a run in which a request waits behind a busy worker while another worker idles. All times are since the
/// start of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// As in [`AcceptCell`].
    pub policy: String,
    /// As in [`AcceptCell`].
    pub family: String,
    /// As in [`AcceptCell`].
    pub close_every: u64,
    /// What each worker did, in order of time; between two spans it was idle.
    pub workers: Vec<Vec<Span>>,
    /// Start of the piece.
    pub from_ns: u64,
    /// Its end.
    pub to_ns: u64,
    /// The request that it is about.
    pub waiting: Waiter,
}

/// One request at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// When the worker began with it.
    pub from_ns: u64,
    /// When the worker was done.
    pub to_ns: u64,
    /// How long the request had waited before.
    pub waited_ns: u64,
}

/// The request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiter {
    /// The worker that has its connection, by number.
    pub worker: u32,
    /// When its client sent it.
    pub sent_ns: u64,
    /// When its worker began with it.
    pub begun_ns: u64,
    /// When its worker was done.
    pub ended_ns: u64,
    /// A worker that idled meanwhile, by number.
    pub idle_worker: u32,
}

/// What a fresh connection costs against what it saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakEven {
    /// Cost of a fresh connection over this family: connect, accept, close.
    pub fresh_connection_ns: u64,
    /// Mean time that a request waits while some worker is idle, when connections are kept.
    pub misplaced_wait_ns: u64,
    /// Requests that this is the mean of; fewer than 200 decide nothing.
    pub requests: u64,
    /// True: a fresh connection costs less than it saves, so closing pays.
    pub closes: bool,
}
