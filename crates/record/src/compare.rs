use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple compare`.
pub type CompareRecord = Record<CompareSettings, CompareResults>;

/// What `compare` was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompareSettings {
    /// The command of A as typed, or the files of A with spaces between.
    pub a: String,
    /// The same of B.
    pub b: String,
    /// What is compared: `rate`, `mean`, `p50`, `p99`, `p999`, `cpu`.
    pub metric: String,
    /// Longest time to go on; `null` for saved records.
    pub for_ns: Option<u64>,
    /// How far the interval may reach each way when the comparison ends: 0.02 is 2%.
    pub narrow: f64,
    /// Most pairs of trials; `null`: as many as there is time for.
    pub trials: Option<u64>,
    /// Trials of each side that were run first and not used.
    pub warmup: u32,
    /// The server that was started for each trial of A, as typed; `null`: none was.
    pub server_a: Option<String>,
    /// The same of B.
    pub server_b: Option<String>,
    /// Longest time that a server had until it listened; `null` without one.
    pub server_wait_ns: Option<u64>,
    /// Whether client and server were kept to CPUs of their own.
    pub pinned: bool,
    /// Whether each trial had a network namespace of its own: without, TIME_WAIT of one is there in the next. `null` for
    /// saved records.
    pub fresh_namespace: Option<bool>,
    /// Seed of the resampling of saved records.
    pub seed: u64,
}

/// What `compare` found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompareResults {
    /// How much faster B is than A, whatever the metric: 1.058 is 5.8% faster.
    pub ratio: f64,
    /// Lower end of the 95% interval of the ratio; `null` when there is none.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// In words: `B is 5.8% faster, 4.1 to 7.4`, `no difference larger than 2%`, `too noisy to say`.
    pub verdict: String,
    /// Trials used, of both sides.
    pub trials: u64,
    /// Pairs of neighbours among them; 0 for saved records.
    pub pairs: u64,
    /// Trials among them in which the client of a load was busy all the time, so that the number is the client's.
    pub client_saturated: u64,
    /// The metric of each trial of A, in the order in which they ran: per second for `rate`, else in nanoseconds.
    pub samples_a: Vec<f64>,
    /// The same of B.
    pub samples_b: Vec<f64>,
}
