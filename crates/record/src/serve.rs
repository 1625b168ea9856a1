use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple serve`.
pub type ServeRecord = Record<ServeSettings, ServeResults>;

/// The settings of `serve`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServeSettings {
    /// Address and port, or `unix:` and a path, as given; the kernel chooses for port 0.
    pub listen: String,
    /// Protocol: `crr`, `http`, `udp` or `sink`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::ServeProtocol"))]
    pub protocol: String,
    /// Accept policy in kebab-case (`exclusive`, `rotate:16`); absent: the default of the address family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Policy>"))]
    pub policy: Option<String>,
    /// Number of serving threads.
    pub workers: u32,
    /// Bytes of a request (crr, udp); absent: the protocol determines the length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_bytes: Option<u64>,
    /// Bytes of a response (crr) or of its body (http); absent: an echo, or no body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_bytes: Option<u64>,
    /// Side that closes a connection: `client`, `server` (FIN) or `rst`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["client", "server", "rst"])))]
    pub close: String,
    /// Number of responses after which the server closes; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub close_every: Option<u64>,
    /// Distribution of the service time: `0s`, `exp:1ms`, `10%:100ms`.
    pub service: String,
    /// Whether a worker computes during the service time; otherwise it sleeps.
    pub spin: bool,
    /// Time from the start at which all workers pause; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_at_ns: Option<u64>,
    /// Duration of the pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_length_ns: Option<u64>,
    /// Time without traffic after which a connection is closed; absent: UDP, or an older record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ns: Option<u64>,
    /// Backlog passed to listen(); the kernel caps it at net.core.somaxconn.
    pub backlog: u32,
    /// Whether TCP_DEFER_ACCEPT is set: accept() returns a connection once it has data.
    pub defer_accept: bool,
    /// Whether every worker is pinned to a CPU of its own.
    pub pin: bool,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
    /// Seed of the service times.
    pub seed: u64,
}

/// The results of `serve`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServeResults {
    /// Bound address with the actual port, or `unix:` and the path.
    pub listen: String,
    /// Protocol: `crr`, `http`, `udp` or `sink`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::ServeProtocol"))]
    pub protocol: String,
    /// Mechanism that distributes connections (udp: packets) to workers, in kebab-case: `reuseport` (one socket per
    /// worker), `exclusive` (one listener, EPOLLEXCLUSIVE), or the accept policy that was given.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Policy"))]
    pub policy: String,
    /// Time from the moment when all workers were ready to the end.
    pub elapsed_ns: u64,
    /// Requests per second of all workers.
    pub requests_per_s: f64,
    /// One entry per worker, in the order of their start.
    pub workers: Vec<ServeWorker>,
    /// Jain's fairness index of the workers' requests (`sink`: connections), 1/n to 1; `null`: there were none.
    pub jain: Option<f64>,
    /// Requests of the busiest worker over the mean of all workers, 1 to n; `null`: there were none.
    pub max_over_mean: Option<f64>,
}

/// The counters of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServeWorker {
    /// Connections accepted; 0 for udp.
    pub accepted: u64,
    /// Requests received in full and processed.
    pub requests: u64,
    /// Bytes received, including incomplete requests.
    pub received_bytes: u64,
    /// Bytes sent, including response headers.
    pub sent_bytes: u64,
    /// Failures by name of the errno, and requests that could not be answered: `request-cut`, `malformed-request`,
    /// `header-too-large`, `length-required`, `short-datagram`.
    pub errors: BTreeMap<String, u64>,
}
