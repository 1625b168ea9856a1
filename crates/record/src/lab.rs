use serde::{Deserialize, Serialize};

use crate::{
    AcceptResults, AcceptSettings, PortsResults, PortsSettings, Record, TimeWaitResults, TimeWaitSettings,
};

/// Record of `fourtuple lab`: every experiment in its short form.
pub type LabRecord = Record<LabSettings, LabResults>;

/// What the experiments of a bare `lab` were asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabSettings {
    /// As for `lab ports`.
    pub ports: PortsSettings,
    /// As for `lab time-wait`.
    pub time_wait: TimeWaitSettings,
    /// As for `lab accept`; absent from records of before it was part of a bare `lab`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptSettings>,
}

/// What they found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LabResults {
    /// As of `lab ports`.
    pub ports: PortsResults,
    /// As of `lab time-wait`.
    pub time_wait: TimeWaitResults,
    /// As of `lab accept`; absent as well where it was interrupted before, or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptResults>,
}
