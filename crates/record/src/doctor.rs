use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;
use crate::snapshot::Snapshot;

/// The record of `fourtuple doctor`.
pub type DoctorRecord = Record<DoctorSettings, DoctorResults>;

/// The settings of `doctor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DoctorSettings {
    /// Process whose network namespace was examined; `null`: another or this one.
    pub pid: Option<u32>,
    /// File of the network namespace; `null`: another or this one.
    pub netns: Option<String>,
    /// Container whose network namespace was examined; `null`: another or this one.
    pub container: Option<String>,
    /// The only destination that was examined; `null`: all.
    pub to: Option<String>,
    /// Time between the two readings.
    pub for_ns: u64,
    /// Thresholds that differ from the default, by rule.
    pub thresholds: BTreeMap<String, f64>,
}

/// The results of `doctor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DoctorResults {
    /// Findings, the most severe first.
    pub findings: Vec<Finding>,
    /// Rules that were checked, by id.
    pub checked: Vec<String>,
    /// Rules that could not be checked.
    pub unchecked: Vec<Unchecked>,
    /// The input of the rules.
    pub snapshot: Snapshot,
    /// Figures of the last minutes; `null` for a single diagnosis.
    pub history: Option<History>,
}

/// Figures of the last minutes, for charts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorHistory"))]
pub struct History {
    /// Tuples with the most ports in use: `10.0.0.9 → 10.1.2.3:443`.
    pub tuples: Vec<String>,
    /// The readings, in order.
    pub moments: Vec<Moment>,
}

/// A reading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorMoment"))]
pub struct Moment {
    /// Time since the start.
    pub at_ns: u64,
    /// Ports in use of each tuple of the history.
    pub in_use: Vec<u32>,
    /// TIME_WAIT sockets of the namespace.
    pub time_wait: u64,
    /// Connections in all accept queues.
    pub queued: u64,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Connections fail now.
    Critical,
    /// Connections are slow now, or will fail.
    Warning,
    /// A setting that does not do what its name suggests, or that will matter under load.
    Notice,
}

/// A fault that a rule found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorFinding"))]
pub struct Finding {
    /// Rule: `P01`.
    pub id: String,
    /// Severity.
    pub severity: Severity,
    /// The subject of the finding: a tuple, a listener, a process. Two findings of a rule have different subjects.
    pub subject: String,
    /// The fault in one line, with its figures and the process.
    pub verdict: String,
    /// Further facts.
    pub evidence: Vec<String>,
    /// Commands that help at once.
    pub now: Vec<Advice>,
    /// Changes that last.
    pub proper: Vec<Advice>,
    /// Place in `findings` of an earlier finding with the same cause, whose remedies help here too; `null`: there is none.
    #[serde(default)]
    pub same_cause_as: Option<u32>,
}

/// A command or a change, and its effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorAdvice"))]
pub struct Advice {
    /// The command, to be pasted, or a sentence if there is no command.
    pub action: String,
    /// Whether `action` is a command.
    pub is_command: bool,
    /// The effect in words.
    pub effect: String,
    /// A condition or a step before, in words; `null`: none.
    pub condition: Option<String>,
    /// How the effect is known.
    pub proof: Proof,
    /// The severity that the finding keeps with the change, by calculation; `null`: the finding is gone then, or nothing was computed.
    #[serde(default)]
    pub remains: Option<Severity>,
    /// Whether the command needs root.
    pub needs_root: bool,
    /// When the effect ends by itself, such as `the next boot`; `null`: not known, or never.
    pub until: Option<String>,
    /// The command that restores the values of the snapshot; `null`: none is needed or known.
    pub undo: Option<String>,
    /// The command that keeps the effect after a boot, once `action` was done; `null`: there is none.
    pub lasting: Option<String>,
}

/// How the effect of an advice is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Proof {
    /// It was neither computed nor tried.
    None,
    /// The rule, applied to the snapshot with this change, no longer has the finding or has it with a lower severity.
    Calculation,
    /// A probe has tried it on this kernel.
    Test,
}

/// A rule that could not be checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorUnchecked"))]
pub struct Unchecked {
    /// Rule: `P07`.
    pub id: String,
    /// The fault that the rule looks for.
    pub title: String,
    /// Why the rule could not be checked, and what would make it possible.
    pub reason: String,
}
