use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple serve`.
pub type ServeRecord = Record<ServeSettings, ServeResults>;

/// What `serve` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServeSettings {
    /// Address and port, or `unix:` and a path, as asked: port 0 is any.
    pub listen: String,
    /// `crr`, `http`, `udp` or `sink`.
    pub protocol: String,
    /// How workers come to their connections, in kebab-case (`exclusive`, `rotate:16`); absent: as the family has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Threads that serve.
    pub workers: u32,
    /// Bytes that make a request (crr, udp); absent: the protocol says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_bytes: Option<u64>,
    /// Bytes of a response (crr) or of its body (http); absent: an echo, or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_bytes: Option<u64>,
    /// Who closes a connection: `client`, `server` (FIN) or `rst`.
    pub close: String,
    /// After how many responses the server closes; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub close_every: Option<u64>,
    /// Distribution of the service time: `0s`, `exp:1ms`, `10%:100ms`.
    pub service: String,
    /// True: the service time is spent computing; false: sleeping.
    pub spin: bool,
    /// When every worker stops serving, since the start; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_at_ns: Option<u64>,
    /// For how long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_length_ns: Option<u64>,
    /// Length of each accept queue that was asked for; the kernel cuts it to net.core.somaxconn.
    pub backlog: u32,
    /// TCP_DEFER_ACCEPT is set: a connection is accepted with its first bytes.
    pub defer_accept: bool,
    /// Every worker on a processor of its own.
    pub pin: bool,
    /// How long to serve; `null`: until told to stop.
    pub for_ns: Option<u64>,
    /// Seed of the service times.
    pub seed: u64,
}

/// What the workers of `serve` did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServeResults {
    /// Where it could be reached: the real port, or `unix:` and the path.
    pub listen: String,
    /// `crr`, `http`, `udp` or `sink`.
    pub protocol: String,
    /// How connections (of udp: packets) came to the workers, in kebab-case: `reuseport` (a socket each), `exclusive` (one
    /// listener, EPOLLEXCLUSIVE), or another that was asked for.
    pub policy: String,
    /// From the moment when all were ready to the end.
    pub elapsed_ns: u64,
    /// Requests of all workers per second.
    pub requests_per_s: f64,
    /// One entry per worker, in the order of their start.
    pub workers: Vec<ServeWorker>,
    /// Jain's index over the workers' requests (of `sink`: connections), 1/n to 1; `null`: there were none.
    pub jain: Option<f64>,
    /// The busiest worker's requests over the mean, 1 to n; `null`: there were none.
    pub max_over_mean: Option<f64>,
}

/// What one worker did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeWorker {
    /// Connections accepted; 0 of udp.
    pub accepted: u64,
    /// Requests that came in whole and were worked on.
    pub requests: u64,
    /// Bytes received, those of requests that never became whole as well.
    pub received_bytes: u64,
    /// Bytes sent, heads of responses as well.
    pub sent_bytes: u64,
    /// Failures by the name of the errno, and requests that could not be answered: `request-cut`, `malformed-request`,
    /// `header-too-large`, `length-required`, `short-datagram`.
    pub errors: BTreeMap<String, u64>,
}
