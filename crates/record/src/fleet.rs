use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Record, Saved};

/// The record of `fourtuple fleet doctor`, `fleet lab ports`, `fleet trace connect`, `fleet plan` and `fleet serve`. The record of
/// `fleet load` is the [`LoadRecord`](crate::LoadRecord).
pub type FleetRecord = Record<FleetSettings, FleetResults>;

/// The settings of a command that each host performs by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FleetSettings {
    /// Labels of the selected hosts: `zone=eu`. Empty: all hosts.
    pub labels: Vec<String>,
    /// Command that each host performed, in words: `lab`, `ports`, `--repeats`, `1`.
    pub command: Vec<String>,
}

/// The records of all hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FleetResults {
    /// Hosts, the worst first.
    pub hosts: Vec<FleetHost>,
    /// Kernels and findings in which the hosts differ, one sentence per entry.
    pub differences: Vec<String>,
}

/// A host. One of `record` and `failed` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FleetHost {
    /// Name of its agent.
    pub name: String,
    /// Labels of its agent.
    pub labels: BTreeMap<String, String>,
    /// Kernel release.
    pub kernel: String,
    /// Number of CPUs.
    pub cpus: u32,
    /// Record of the command; `null`: the host has none.
    pub record: Option<Saved>,
    /// Why there is no record; `null`: there is one.
    pub failed: Option<String>,
}
