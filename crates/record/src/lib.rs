//! The versioned records of all `fourtuple` commands, and the statistics in them ([`measure`]).
//!
//! A record is one JSON object with the settings, the host, remarks on validity and the results of one run. This
//! crate only defines the fields, and measures nothing: later versions of `fourtuple report` and other programs can
//! read a record that is written today.
//!
//! Durations are integers in nanoseconds (`_ns`), rates are floats per second (`_per_s`). The JSON schema of all
//! records is [`SCHEMA_JSON`].
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

mod accept;
mod compare;
mod doctor;
pub mod errno;
mod fix;
mod fleet;
mod format;
mod forward;
mod guard;
mod lab;
mod load;
pub mod measure;
mod plan;
mod ports;
mod saved;
#[cfg(feature = "schema")]
pub mod schema;
mod serve;
pub mod snapshot;
mod trace;
mod trace_accept;
mod trace_locks;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use accept::{
    AcceptCell, AcceptRecord, AcceptResults, AcceptSettings, BreakEven, Probe, SkippedCell, Span, Timeline,
    WaitNs, Waiter,
};
pub use compare::{CompareRecord, CompareResults, CompareSettings};
pub use doctor::{
    Advice, DoctorRecord, DoctorResults, DoctorSettings, Finding, History, Moment, Proof, Severity, Unchecked,
};
pub use fix::{
    FixAcceptListener, FixAcceptRecord, FixAcceptResults, FixAcceptSettings, FixNamespace, FixPortsRecord,
    FixPortsResults, FixPortsSettings, FixPortsTuple, RunRecord, RunResults, RunSettings,
};
pub use fleet::{FleetHost, FleetRecord, FleetResults, FleetSettings};
pub use format::{
    CommandLine, exact_duration, format_duration, format_time, printable, printable_lines, three_digits,
};
pub use forward::{
    ForwardBfd, ForwardBfdTimers, ForwardLink, ForwardPlane, ForwardRecord, ForwardResults, ForwardSettings,
};
pub use guard::{
    GuardAction, GuardEffect, GuardEvent, GuardEventKind, GuardFix, GuardRecord, GuardResults, GuardSettings,
    GuardState, GuardTotals,
};
pub use lab::{
    LabLocksRecord, LabLocksResults, LabLocksSettings, LabRecord, LabResults, LabSettings, LocksClass,
    LocksPair, LocksRatio, LocksSide, PlanesCell, PlanesRatio, PlanesRecord, PlanesResults, PlanesSettings,
    PlanesSkipped, TimeWaitPoint, TimeWaitRecord, TimeWaitResults, TimeWaitRun, TimeWaitSettings,
};
pub use load::{
    Held, Latency, LoadAddress, LoadExpectation, LoadHost, LoadHttp2, LoadPorts, LoadRamp, LoadRecord,
    LoadRequestCount, LoadRequests, LoadResults, LoadSettings, LoadStatus, LoadStep, LoadTls,
    LoadTlsSettings, LoadWarmUp, Quantile, Quantiles, Second, Slow, classes,
};
pub use plan::{PlanMoment, PlanOther, PlanPoint, PlanRecord, PlanResults, PlanSettings};
pub use ports::{
    ByParity, Distribution, Dot, FillPoint, PortsRecord, PortsResults, PortsSettings, Scatter, StrategyResult,
};
pub use saved::{Common, ReadError, Saved};
pub use serve::{ServeRecord, ServeResults, ServeSettings, ServeWorker};
pub use trace::{
    TraceConnectRecord, TraceConnectResults, TraceConnectSettings, TraceFlame, TraceHeat, TraceSample,
    TraceStep, TraceSymptom, TraceTuple,
};
pub use trace_accept::{
    Depth, TraceAcceptRecord, TraceAcceptResults, TraceAcceptSettings, TraceListener, TraceUnixListener,
    TraceWorker, WaitStep,
};
pub use trace_locks::{
    LockClass, LockPath, LockPort, TraceLocksRecord, TraceLocksResults, TraceLocksSettings,
};

/// The value of the `schema` field of every record of this version.
pub const SCHEMA: &str = "fourtuple/1";

/// The JSON schema (draft 2020-12) that every record validates against. Generated from the types of this crate: a test compares
/// them, and writes the file again if `FOURTUPLE_WRITE` is 1.
pub const SCHEMA_JSON: &str = include_str!("../schema/fourtuple-1.json");

/// A record: the fields that all commands share, around the settings `S` and the results `R` of one command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record<S, R> {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Command and experiment, as typed: `lab ports`.
    pub command: String,
    /// Start of the run, RFC 3339 in UTC.
    pub started: String,
    /// The machine and the kernel.
    pub host: Host,
    /// The settings, defaults included.
    pub settings: S,
    /// Remarks that limit what the run proves; empty for a valid run.
    pub validity: Vec<Remark>,
    /// The results.
    pub results: R,
}

/// A remark that limits what the run proves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Remark {
    /// Identifier in kebab-case for programs: `interrupted`.
    pub id: String,
    /// The explanation in one line.
    pub message: String,
}

impl Remark {
    /// Creates a remark.
    pub fn new(id: &str, message: impl Into<String>) -> Self {
        Remark { id: id.to_owned(), message: message.into() }
    }
}

/// The fingerprint of the machine and kernel that a record comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Host {
    /// Name of the machine as `uname -n` prints it; empty in records before there was this field.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Kernel release as `uname -r` prints it.
    pub kernel: String,
    /// Number of CPUs that this process may run on.
    pub cpus: u32,
    /// Virtualization of the machine, as far as the kernel shows it; `none`: bare metal; empty: unknown.
    pub virtualization: String,
    /// Sysctls that the command read, by dotted name.
    pub sysctls: BTreeMap<String, String>,
    /// Capabilities of the kernel, found by probing: `ip_local_port_range` -> `linear`.
    pub capabilities: BTreeMap<String, String>,
}
