use serde::{Deserialize, Serialize};

use crate::{PortsResults, PortsSettings, Record, TimeWaitResults, TimeWaitSettings};

/// Record of `fourtuple lab`: every experiment in its short form.
pub type LabRecord = Record<LabSettings, LabResults>;

/// What the experiments of a bare `lab` were asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabSettings {
    /// As for `lab ports`.
    pub ports: PortsSettings,
    /// As for `lab time-wait`.
    pub time_wait: TimeWaitSettings,
}

/// What they found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabResults {
    /// As of `lab ports`.
    pub ports: PortsResults,
    /// As of `lab time-wait`.
    pub time_wait: TimeWaitResults,
}
