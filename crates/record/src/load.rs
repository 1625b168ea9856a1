use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::Histogram;
use crate::{Distribution, Record};

/// The record of `fourtuple load`.
pub type LoadRecord = Record<LoadSettings, LoadResults>;

/// The settings of `load`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadSettings {
    /// Target as typed: `http://127.0.0.1:8080/`, `tcp://[::1]:9000`, `unix:/run/app.sock:/path`.
    pub target: String,
    /// Address that is loaded: `127.0.0.1:8080`, or the path of a Unix socket. Several addresses are separated by commas.
    pub address: String,
    /// Addresses given for the host, as `HOST:PORT:ADDR,...`; `null` if the resolver was asked, also in older records.
    #[serde(default)]
    pub resolve: Option<String>,
    /// Whether connections go to all addresses of the name in turn; `false` in older records.
    #[serde(default)]
    pub all_addresses: bool,
    /// Maximum number of concurrent streams of a connection with HTTP/2; `null`: HTTP/1.1, or another workload, also in older
    /// records.
    #[serde(default)]
    pub streams: Option<u64>,
    /// Workload: `connect`, `crr`, `http`, `udp`, or `hold` (opens and closes connections while it holds others
    /// open).
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["connect", "crr", "http", "udp", "hold"])))]
    pub workload: String,
    /// Arrival process: `closed`, `even` or `poisson`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["closed", "even", "poisson"])))]
    pub arrival: String,
    /// Offered load in operations per second; `null` in a closed loop.
    pub rate_per_s: Option<f64>,
    /// Maximum number of concurrent connections, over all threads.
    pub connections: u64,
    /// Pause between two operations of a connection in a closed loop.
    pub pause_ns: u64,
    /// Number of requests after which a connection is closed; 0 means never.
    pub close_every: u64,
    /// Number of connections that `hold` keeps open; 0 in other workloads.
    pub hold: u64,
    /// Number of operations after which the run ends; `null`: no limit.
    pub operations: Option<u64>,
    /// Time after which the run ends; `null`: no limit.
    pub for_ns: Option<u64>,
    /// Timeout: an operation that takes longer has failed.
    pub timeout_ns: u64,
    /// Threshold: an operation that takes longer is listed; `null`: none is listed.
    pub threshold_ns: Option<u64>,
    /// Engine as given: `auto`, `uring` or `epoll`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["auto", "uring", "epoll"])))]
    pub engine: String,
    /// Number of load-generating threads.
    pub threads: u64,
    /// Whether each thread is pinned to a CPU of its own.
    pub pinned: bool,
    /// Port strategy as given; the results name the strategy in use.
    pub strategy: String,
    /// Source addresses as typed; `null`: the kernel chooses.
    pub sources: Option<String>,
    /// Method of closing: `client`, `rst` or `server`; the results explain them.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Closer"))]
    pub close: String,
    /// Bytes of a request (`crr`, `udp`) or of its body (`http`).
    pub request_bytes: u64,
    /// Bytes of a `crr` response; 0 where the response carries its length.
    pub response_bytes: u64,
    /// HTTP method; empty for other workloads and with a list of requests.
    pub method: String,
    /// Whether the last ACK of the handshake is sent separately; otherwise the request carries it (TCP_QUICKACK off).
    pub separate_ack: bool,
    /// Whether the run ignores a failed preflight.
    pub anyway: bool,
    /// Seed of arrivals and of source ports.
    pub seed: u64,
    /// Time before `for_ns` whose operations are not part of the results; 0 in older records.
    #[serde(default)]
    pub warm_up_ns: u64,
    /// Rates of a ramp, each for `warm_up_ns` and `for_ns`; `rate_per_s` is the last one. `null`: one rate, also in older records.
    #[serde(default)]
    pub ramp: Option<LoadRamp>,
    /// The list of requests; `null`: there is one request, also in older records.
    #[serde(default)]
    pub requests: Option<LoadRequests>,
    /// Settings of TLS, with https; `null`: no TLS, or an older record.
    #[serde(default)]
    pub tls: Option<LoadTlsSettings>,
    /// Thresholds as typed: `p99<20ms`; absent without any and in older records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expect: Vec<String>,
}

/// The results of `load`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadResults {
    /// Completed operations: connections for `connect`, answered requests for all other workloads. Held connections
    /// do not count.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Requests retried on a new connection because the server had closed a kept-alive connection before the first
    /// byte of the response; 0 in older records.
    #[serde(default)]
    pub retried: u64,
    /// Failures by name: `ECONNREFUSED`, `EADDRNOTAVAIL`, `timeout`, `closed-early`, `malformed`, `tls`,
    /// `status-503`.
    pub errors: BTreeMap<String, u64>,
    /// Text of the first failure of each name: the first bytes of a malformed response, the reason why TLS failed. Absent in older
    /// records.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub error_details: BTreeMap<String, String>,
    /// Responses of HTTP by status code, in ascending order; absent for other workloads and in older records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub statuses: Vec<LoadStatus>,
    /// Responses of HTTP by class of their status code: `2xx`, `4xx`; absent for other workloads and in older records.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub status_classes: BTreeMap<String, u64>,
    /// Bytes of requests that were given to the kernel, with TLS encrypted and with its handshakes; `null` in older records.
    #[serde(default)]
    pub sent_bytes: Option<u64>,
    /// Bytes that were received, counted like `sent_bytes`; `null` in older records.
    #[serde(default)]
    pub received_bytes: Option<u64>,
    /// The requests of a list with their responses, at most the first 1,000; absent without a list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<LoadRequestCount>,
    /// The TLS connections by version, cipher suite and protocol, full and resumed handshakes apart. Absent without TLS and in older
    /// records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tls: Vec<LoadTls>,
    /// The warm-up, whose operations count nowhere else; times count from its end. `null`: there was none, also in older records.
    #[serde(default)]
    pub warm_up: Option<LoadWarmUp>,
    /// The steps of a ramp. All other results are those of the last step that was reached, or of the first one. Absent without a ramp.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<LoadStep>,
    /// The thresholds of `settings.expect`, judged; absent without any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<LoadExpectation>,
    /// What happened on the connections of HTTP/2; absent for HTTP/1.1, other workloads and in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http2: Option<LoadHttp2>,
    /// Time from the start, including the opening of held connections, to the end of the last operation or of the
    /// requested time.
    pub elapsed_ns: u64,
    /// Achieved load: completed operations per second, counted once the held connections are open.
    pub rate_per_s: f64,
    /// Offered load in operations per second: the rate of an open loop. In a closed loop it equals the achieved load.
    pub offered_per_s: f64,
    /// CPU time of the load-generating threads per operation, including time in the kernel.
    pub client_cpu_ns_per_operation: u64,
    /// System calls of the engine per connection, by the engine's own count.
    pub syscalls_per_connection: f64,
    /// Engine that was used: `uring`, `epoll`, or for HTTP/2 `h2`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["uring", "epoll", "h2"])))]
    pub engine: String,
    /// Reason why the preferred engine was not used; `null` when it was used or the engine was given.
    pub engine_reason: Option<String>,
    /// How connections were closed: `client` (FIN first, TIME_WAIT socket on the client), `rst` (no TIME_WAIT socket;
    /// applications do not close like this), `server` (FIN first, TIME_WAIT socket on the server).
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Closer"))]
    pub close: String,
    /// Port strategy that was used; `null`: there are no ports (Unix sockets).
    pub strategy: Option<String>,
    /// Latency of the operations by part.
    pub latency_ns: Latency,
    /// Time from the intended start to the actual start in an open loop; part of `total`.
    pub late_ns: Quantiles,
    /// Operations over the threshold, at most the first 1,000.
    pub slow: Vec<Slow>,
    /// Number of operations over the threshold.
    pub slow_count: u64,
    /// Counts and latency for each second.
    pub seconds: Vec<Second>,
    /// Distribution of the total times, from the merged histogram.
    pub distribution: Vec<Quantile>,
    /// Ports before, during and after the run; `null`: there are no ports (Unix sockets).
    pub ports: Option<LoadPorts>,
    /// Held connections of `hold`; `null` in other workloads.
    pub hold: Option<Held>,
    /// Advice: stalls, their causes, and the command to use instead, one sentence per entry.
    pub advice: Vec<String>,
    /// The workers of a run of `fleet load`, by slot; absent for a run of one host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<LoadHost>,
    /// The addresses to which connections went in turn; absent for a run to one address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<LoadAddress>,
}

impl LoadResults {
    /// Merges the results of hosts that loaded one server at the same time, each with source ports of its own.
    ///
    /// What results cannot say together stays empty: the quantiles, which need the histograms, the rates of seconds, and what
    /// names a host (`engine`, `advice`, `hosts`).
    pub fn merged(parts: &[&LoadResults]) -> LoadResults {
        let sum = |of: fn(&LoadResults) -> u64| saturating(parts.iter().map(|part| of(part)));
        let (operations, connections) = (sum(|part| part.operations), sum(|part| part.connections));
        let cpu: u64 = sum(|part| part.client_cpu_ns_per_operation.saturating_mul(part.operations));
        let calls: f64 =
            parts.iter().map(|part| part.syscalls_per_connection * part.connections as f64).sum();
        let mut slow: Vec<Slow> = parts.iter().flat_map(|part| part.slow.clone()).collect();
        slow.sort_by_key(|slow| slow.at_ns);
        let mut error_details = BTreeMap::new();
        for (name, detail) in parts.iter().flat_map(|part| &part.error_details) {
            error_details.entry(name.clone()).or_insert_with(|| detail.clone());
        }
        LoadResults {
            operations,
            connections,
            retried: sum(|part| part.retried),
            error_details,
            statuses: statuses(parts),
            status_classes: classes(&statuses(parts)),
            sent_bytes: bytes(parts, |part| part.sent_bytes),
            received_bytes: bytes(parts, |part| part.received_bytes),
            http2: http2(parts),
            client_cpu_ns_per_operation: cpu / operations.max(1),
            syscalls_per_connection: calls / connections.max(1) as f64,
            strategy: parts.first().and_then(|part| part.strategy.clone()),
            slow,
            slow_count: sum(|part| part.slow_count),
            ports: ports(parts),
            hold: hold(parts),
            addresses: addresses(parts),
            requests: requests(parts),
            tls: tls(parts),
            warm_up: warm_up(parts),
            ..LoadResults::default()
        }
    }
}

/// Adds numbers, which may come from another host.
fn saturating(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}

fn statuses(parts: &[&LoadResults]) -> Vec<LoadStatus> {
    let mut sums: BTreeMap<u16, LoadStatus> = BTreeMap::new();
    for one in parts.iter().flat_map(|part| &part.statuses) {
        let empty = || LoadStatus { count: 0, ..one.clone() };
        let sum = sums.entry(one.code).or_insert_with(empty);
        sum.count = sum.count.saturating_add(one.count);
    }
    sums.into_values().collect()
}

/// Returns the sum of a count that older records lack.
fn bytes(parts: &[&LoadResults], of: fn(&LoadResults) -> Option<u64>) -> Option<u64> {
    parts.iter().map(|part| of(part)).collect::<Option<Vec<u64>>>().map(saturating)
}

/// Returns the number of responses by class of their status code: `2xx`.
pub fn classes(statuses: &[LoadStatus]) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for status in statuses {
        let sum = sums.entry(format!("{}xx", status.code / 100)).or_default();
        *sum = sum.saturating_add(status.count);
    }
    sums
}

fn addresses(parts: &[&LoadResults]) -> Vec<LoadAddress> {
    let mut sums: Vec<LoadAddress> = Vec::new();
    for one in parts.iter().flat_map(|part| &part.addresses) {
        match sums.iter_mut().find(|sum| sum.address == one.address) {
            Some(sum) => sum.connections = sum.connections.saturating_add(one.connections),
            None => sums.push(one.clone()),
        }
    }
    sums
}

/// Returns the responses to each request of the list, which all parts have in common.
fn requests(parts: &[&LoadResults]) -> Vec<LoadRequestCount> {
    let mut sums: Vec<LoadRequestCount> = Vec::new();
    for (number, one) in parts.iter().flat_map(|part| part.requests.iter().enumerate()) {
        match sums.get_mut(number) {
            Some(sum) => sum.responses = sum.responses.saturating_add(one.responses),
            None => sums.push(one.clone()),
        }
    }
    sums
}

fn tls(parts: &[&LoadResults]) -> Vec<LoadTls> {
    let mut sums: Vec<LoadTls> = Vec::new();
    for one in parts.iter().flat_map(|part| &part.tls) {
        let is_same =
            |sum: &&mut LoadTls| LoadTls { connections: one.connections, ..(**sum).clone() } == *one;
        match sums.iter_mut().find(is_same) {
            Some(sum) => sum.connections = sum.connections.saturating_add(one.connections),
            None => sums.push(one.clone()),
        }
    }
    sums
}

fn warm_up(parts: &[&LoadResults]) -> Option<LoadWarmUp> {
    let all: Vec<LoadWarmUp> = parts.iter().filter_map(|part| part.warm_up).collect();
    let sum = |of: fn(&LoadWarmUp) -> u64| saturating(all.iter().map(of));
    (!all.is_empty()).then(|| LoadWarmUp {
        for_ns: all.iter().map(|one| one.for_ns).max().unwrap_or(0),
        operations: sum(|one| one.operations),
        connections: sum(|one| one.connections),
        errors: sum(|one| one.errors),
    })
}

/// Returns the sum of the port budgets. The earliest stall counts.
fn ports(parts: &[&LoadResults]) -> Option<LoadPorts> {
    let all: Vec<&LoadPorts> = parts.iter().filter_map(|part| part.ports.as_ref()).collect();
    let sum = |of: fn(&LoadPorts) -> u64| saturating(all.iter().map(|ports| of(ports)));
    let least = |of: fn(&LoadPorts) -> Option<u64>| all.iter().filter_map(|ports| of(ports)).min();
    (!all.is_empty()).then(|| LoadPorts {
        budget: sum(|ports| ports.budget),
        taken_before: sum(|ports| ports.taken_before),
        needed: all.iter().map(|ports| ports.needed).collect::<Option<Vec<u64>>>().map(saturating),
        used: sum(|ports| ports.used),
        kept_ns: all.iter().map(|ports| ports.kept_ns).max().unwrap_or(0),
        predicted_stall_ns: least(|ports| ports.predicted_stall_ns),
        stalled_ns: least(|ports| ports.stalled_ns),
        stall_length_ns: all.iter().map(|ports| ports.stall_length_ns).max().unwrap_or(0),
    })
}

fn http2(parts: &[&LoadResults]) -> Option<LoadHttp2> {
    let all: Vec<LoadHttp2> = parts.iter().filter_map(|part| part.http2).collect();
    let sum = |of: fn(&LoadHttp2) -> u64| saturating(all.iter().map(of));
    (!all.is_empty()).then(|| LoadHttp2 {
        most_streams: all.iter().map(|one| one.most_streams).max().unwrap_or(0),
        server_limit: all.iter().filter_map(|one| one.server_limit).min(),
        goaways: sum(|one| one.goaways),
        refused_streams: sum(|one| one.refused_streams),
        window_waits: sum(|one| one.window_waits),
        window_wait_ns: sum(|one| one.window_wait_ns),
    })
}

fn hold(parts: &[&LoadResults]) -> Option<Held> {
    let all: Vec<Held> = parts.iter().filter_map(|part| part.hold).collect();
    (!all.is_empty()).then(|| Held {
        opened: saturating(all.iter().map(|held| held.opened)),
        lost: saturating(all.iter().map(|held| held.lost)),
        ramp_ns: all.iter().map(|held| held.ramp_ns).max().unwrap_or(0),
    })
}

/// What happened on the connections of HTTP/2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadHttp2 {
    /// Maximum number of streams that were in progress on a connection.
    pub most_streams: u64,
    /// The lowest SETTINGS_MAX_CONCURRENT_STREAMS of a connection; `null`: the server set no limit.
    pub server_limit: Option<u64>,
    /// Connections on which the server sent GOAWAY. Requests that it did not process count in `retried`.
    pub goaways: u64,
    /// Requests that the server refused with REFUSED_STREAM. They are errors too.
    pub refused_streams: u64,
    /// Requests whose body had to wait for flow control: for a window of the server.
    pub window_waits: u64,
    /// Total time of these waits, each from the head of the request to the last byte of its body.
    pub window_wait_ns: u64,
}

/// The responses with one status code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadStatus {
    /// The status code.
    pub code: u16,
    /// Number of responses.
    pub count: u64,
    /// The field Location of the first response, for redirections (3xx).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
}

/// A list of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadRequests {
    /// File of the list.
    pub file: String,
    /// Number of requests.
    pub count: u64,
    /// Order: `turn`, or `random` by the seed.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["turn", "random"])))]
    pub order: String,
}

/// A request of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadRequestCount {
    /// Method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Number of responses.
    pub responses: u64,
}

/// The settings of TLS.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadTlsSettings {
    /// Name of the server for the handshake and its certificate; `null`: the host of the target.
    pub name: Option<String>,
    /// File with the certificates of the client; `null`: none.
    pub certificate: Option<String>,
    /// File with its private key; `null`: none.
    pub key: Option<String>,
    /// Whether no session is resumed.
    pub full_handshakes: bool,
    /// The protocols that are offered (ALPN).
    pub protocols: Vec<String>,
}

/// TLS connections that negotiated the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadTls {
    /// Version: `TLS 1.3`.
    pub version: String,
    /// Cipher suite by its name at IANA: `TLS_AES_256_GCM_SHA384`.
    pub cipher: String,
    /// Protocol that the server chose (ALPN); `null`: none.
    pub protocol: Option<String>,
    /// Whether a session was resumed.
    pub resumed: bool,
    /// Number of connections.
    pub connections: u64,
}

/// Ascending rates with equal ratios.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadRamp {
    /// The first rate.
    pub from_per_s: f64,
    /// The last rate.
    pub to_per_s: f64,
    /// Number of rates.
    pub steps: u32,
}

/// What began in the warm-up of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadWarmUp {
    /// Its length.
    pub for_ns: u64,
    /// Completed operations.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures.
    pub errors: u64,
}

/// A step of a ramp.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadStep {
    /// Offered load.
    pub offered_per_s: f64,
    /// Achieved load.
    pub rate_per_s: f64,
    /// Completed operations, without those of the warm-up.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures.
    pub errors: u64,
    /// Completed operations of the warm-up of this step.
    pub warm_up_operations: u64,
    /// Median of the total times.
    pub p50_ns: u64,
    /// 99th percentile of the total times.
    pub p99_ns: u64,
    /// Maximum of the total times.
    pub max_ns: u64,
    /// CPU time of the load-generating threads per operation.
    pub client_cpu_ns_per_operation: u64,
    /// Reason why the rate was not reached; `null`: it was reached.
    pub not_reached: Option<String>,
}

/// A threshold of `--expect`, judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadExpectation {
    /// The threshold as typed: `p99<20ms`.
    pub expect: String,
    /// Unit of `limit` and `measured`: `ns`, `per_s`, `share` (0 to 1) or `count`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["ns", "per_s", "share", "count"])))]
    pub unit: String,
    /// The limit.
    pub limit: f64,
    /// The measured value; `null`: no operation had one.
    pub measured: Option<f64>,
    /// Whether the measured value is within the limit.
    pub met: bool,
}

/// One of several addresses to which connections went in turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadAddress {
    /// The address: `127.0.0.1:8080`.
    pub address: String,
    /// Connections established to it.
    pub connections: u64,
}

/// A worker of a run on several hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadHost {
    /// Name of the agent.
    pub name: String,
    /// Labels of the agent.
    pub labels: BTreeMap<String, String>,
    /// Kernel release of the host.
    pub kernel: String,
    /// Number of CPUs of the host.
    pub cpus: u32,
    /// Address of the target, as this host resolved it.
    pub address: String,
    /// Monotonic clock of this host minus the clock of the coordinator.
    pub clock_offset_ns: i64,
    /// Maximum error of the offset: half of the minimum round-trip time.
    pub clock_bound_ns: u64,
    /// Delay behind the common start, on the clock of this host; `null`: the host did not report it.
    pub start_error_ns: Option<u64>,
    /// First second that is missing, counted from the start, if the worker was lost; its seconds before count. `null`: it was
    /// not lost.
    pub lost_at_ns: Option<u64>,
    /// Number of intervals that count.
    pub intervals: u64,
    /// Number of intervals that the worker recorded and that did not arrive.
    pub missing: u64,
    /// Completed operations.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures by name.
    pub errors: BTreeMap<String, u64>,
    /// Achieved load of this host.
    pub rate_per_s: f64,
    /// Offered load of this host; `null` in a closed loop.
    pub offered_per_s: Option<f64>,
    /// CPU time of the load-generating threads per operation; `null` for a worker that was lost.
    pub client_cpu_ns_per_operation: Option<u64>,
    /// Total times of the operations. A worker without a record of its own (lost, failed or unfinished) has the times of its
    /// complete seconds, with percentiles that are at most 0.8% off; `null` without such a second.
    pub total_ns: Option<Quantiles>,
    /// Counts and latency for each second of this host.
    pub seconds: Vec<Second>,
}

/// Times of the parts of an operation. Each part covers the operations that had this part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Latency {
    /// Time in connect(): port search and SYN. With io_uring it is sampled: see `samples`.
    pub search: Quantiles,
    /// Time from the end of `search` until the connection is established. In older records it includes the handshake of TLS.
    pub handshake: Quantiles,
    /// Time of the TLS handshake: from the established connection until requests can be sent. Without samples in older records and
    /// in those of several hosts.
    #[serde(default)]
    pub tls: Quantiles,
    /// Time from the request to the first byte of the response.
    pub first_byte: Quantiles,
    /// Time from the intended start of the operation to its end, without closing.
    pub total: Quantiles,
}

/// A [`Distribution`] whose count is called `samples`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Quantiles {
    /// Number of samples.
    pub samples: u64,
    /// Mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 75th percentile; `null` in older records.
    #[serde(default)]
    pub p75: Option<u64>,
    /// 90th percentile; `null` in older records.
    #[serde(default)]
    pub p90: Option<u64>,
    /// 95th percentile; `null` in older records.
    #[serde(default)]
    pub p95: Option<u64>,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
}

impl From<Distribution> for Quantiles {
    fn from(Distribution { count, mean, p50, p99, p999, max }: Distribution) -> Quantiles {
        Quantiles { samples: count, mean, p50, p75: None, p90: None, p95: None, p99, p999, max }
    }
}

impl From<&Histogram> for Quantiles {
    fn from(times: &Histogram) -> Quantiles {
        let [p75, p90, p95] = [0.75, 0.9, 0.95].map(|share| Some(times.quantile(share)));
        Quantiles { p75, p90, p95, ..times.summary().into() }
    }
}

/// A point of a distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Quantile {
    /// Share of the operations that took at most `ns`, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub share: f64,
    /// Time in nanoseconds.
    pub ns: u64,
}

/// An operation over the threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Slow {
    /// Intended start, counted from the start of the run.
    pub at_ns: u64,
    /// Time from the intended start to the end.
    pub total_ns: u64,
    /// Longest part of the operation: `late`, `connect` or `response`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["late", "connect", "response"])))]
    pub longest: String,
    /// Position of the request on its connection; request 1 opened the connection.
    pub request: u64,
}

/// The counts and latencies of one second of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Second {
    /// Start of this second, counted from the start of the run.
    pub at_ns: u64,
    /// Operations that ended in this second.
    pub operations: u64,
    /// Connections established in this second.
    pub connections: u64,
    /// Failures in this second.
    pub errors: u64,
    /// Median of the total times.
    pub p50_ns: u64,
    /// 99th percentile of the total times.
    pub p99_ns: u64,
    /// Maximum of the total times.
    pub max_ns: u64,
    /// Tuples free for new connections, as far as known; `null`: there are no ports.
    pub ports_left: Option<u64>,
}

/// The port budget of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoadPorts {
    /// Number of tuples to the destination: ports x sources.
    pub budget: u64,
    /// Tuples in use before the run by any process, TIME_WAIT sockets included.
    pub taken_before: u64,
    /// Tuples that the run needs according to the preflight; `null`: unknown.
    pub needed: Option<u64>,
    /// Tuples that the connections of the run used.
    pub used: u64,
    /// Time for which a closed connection keeps its tuple: 60 s in TIME_WAIT, 1 s where it is reused, 0 when the
    /// server closes.
    pub kept_ns: u64,
    /// Predicted time of port exhaustion, counted from the start of the run; `null`: never.
    pub predicted_stall_ns: Option<u64>,
    /// Measured time of port exhaustion, counted from the start of the run; `null`: it did not occur.
    pub stalled_ns: Option<u64>,
    /// Total time during which no connection could be opened.
    pub stall_length_ns: u64,
}

/// The connections that `hold` keeps open.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Held {
    /// Number of connections opened and held.
    pub opened: u64,
    /// Number of held connections that the server closed before the end.
    pub lost: u64,
    /// Time it took to open them.
    pub ramp_ns: u64,
}
