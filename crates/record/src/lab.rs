use serde::{Deserialize, Serialize};

use crate::{
    AcceptResults, AcceptSettings, PortsResults, PortsSettings, Record, TimeWaitResults, TimeWaitSettings,
};

/// The record of `fourtuple lab`: every experiment in its short form.
pub type LabRecord = Record<LabSettings, LabResults>;

/// The settings of the experiments of a `lab` without a subcommand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabSettings {
    /// Settings of `lab ports`.
    pub ports: PortsSettings,
    /// Settings of `lab time-wait`.
    pub time_wait: TimeWaitSettings,
    /// Settings of `lab accept`; absent in older records.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptSettings>,
}

/// The results of the experiments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LabResults {
    /// Results of `lab ports`.
    pub ports: PortsResults,
    /// Results of `lab time-wait`.
    pub time_wait: TimeWaitResults,
    /// Results of `lab accept`; absent in older records, and if the experiment failed or was interrupted before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept: Option<AcceptResults>,
}
