use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple compare`.
pub type CompareRecord = Record<CompareSettings, CompareResults>;

/// The settings of `compare`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CompareSettings {
    /// The command of A as typed, or the file names of A joined by spaces.
    pub a: String,
    /// The command of B as typed, or the file names of B joined by spaces.
    pub b: String,
    /// The metric: `rate`, `mean`, `p50`, `p99`, `p999`, `cpu`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["rate", "mean", "p50", "p99", "p999", "cpu"])))]
    pub metric: String,
    /// Maximum duration of the comparison; `null` for saved records.
    pub for_ns: Option<u64>,
    /// Half-width of the interval at which the comparison ends: 0.02 is 2%.
    pub narrow: f64,
    /// Maximum number of pairs of trials; `null`: limited by `for_ns` alone.
    pub trials: Option<u64>,
    /// Warm-up trials of each side, which are not used.
    pub warmup: u32,
    /// Command of the server that was started for each trial of A, as typed; `null`: none.
    pub server_a: Option<String>,
    /// Command of the server that was started for each trial of B, as typed; `null`: none.
    pub server_b: Option<String>,
    /// Maximum time that a server may take until it listens; `null`: no server.
    pub server_wait_ns: Option<u64>,
    /// Whether client and server were pinned to different CPUs.
    pub pinned: bool,
    /// Whether each trial ran in a network namespace of its own; `false`: TIME_WAIT sockets of one trial remain in
    /// the next. `null` for saved records.
    pub fresh_namespace: Option<bool>,
    /// Seed of the bootstrap over saved records.
    pub seed: u64,
}

/// The results of `compare`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CompareResults {
    /// Ratio by which B is better than A, oriented so that above 1 is better for every metric: 1.058 is 5.8% faster.
    pub ratio: f64,
    /// Lower end of the 95% interval of the ratio; `null`: no interval.
    pub low: Option<f64>,
    /// Upper end of the 95% interval of the ratio; `null`: no interval.
    pub high: Option<f64>,
    /// The verdict as text: `B is 5.8% faster, 4.1 to 7.4`, `no difference larger than 2%`, `too noisy to say`.
    pub verdict: String,
    /// Number of trials used, both sides together.
    pub trials: u64,
    /// Number of pairs of neighbouring trials; 0 for saved records.
    pub pairs: u64,
    /// Number of trials whose load generator used its CPU all the time: the result is then the client's limit.
    pub client_saturated: u64,
    /// Metric of each trial of A, in the order of the runs: per second for `rate`, otherwise in nanoseconds.
    pub samples_a: Vec<f64>,
    /// Metric of each trial of B, in the order of the runs.
    pub samples_b: Vec<f64>,
}
