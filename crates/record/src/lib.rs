//! The versioned result of every `fourtuple` command.
//!
//! A record is one JSON object that says what was asked, on which host, whether the run may be believed, and what came
//! out. This crate does not measure, read a host or draw: it only names the fields, so that a record written today can
//! be read by tomorrow's `fourtuple report` and by other people's programs.
//!
//! Durations are integers in nanoseconds (`_ns`), rates are floats per second (`_per_s`). The JSON schema of all
//! records is [`SCHEMA_JSON`].
#![forbid(unsafe_code)]

mod accept;
mod compare;
mod forward;
mod host;
mod lab;
mod lab_locks;
mod load;
mod plan;
mod planes;
mod ports;
mod scatter;
mod serve;
mod time_wait;
mod trace;
mod trace_accept;
mod trace_locks;

use serde::{Deserialize, Serialize};

pub use accept::{
    AcceptCell, AcceptRecord, AcceptResults, AcceptSettings, BreakEven, Probe, SkippedCell, Span, Timeline,
    WaitNs, Waiter,
};
pub use compare::{CompareRecord, CompareResults, CompareSettings};
pub use forward::{ForwardBfd, ForwardLink, ForwardPlane, ForwardRecord, ForwardResults, ForwardSettings};
pub use host::Host;
pub use lab::{LabRecord, LabResults, LabSettings};
pub use lab_locks::{
    LabLocksRecord, LabLocksResults, LabLocksSettings, LocksClass, LocksPair, LocksRatio, LocksSide,
};
pub use load::{
    Held, Latency, LoadPorts, LoadRecord, LoadResults, LoadSettings, Quantile, Quantiles, Second, Slow,
};
pub use plan::{PlanPoint, PlanRecord, PlanResults, PlanSettings};
pub use planes::{PlanesCell, PlanesRatio, PlanesRecord, PlanesResults, PlanesSettings, PlanesSkipped};
pub use ports::{ByParity, FillPoint, PortsRecord, PortsResults, PortsSettings, Spread, StrategyResult};
pub use scatter::{Dot, Scatter};
pub use serve::{ServeRecord, ServeResults, ServeSettings, ServeWorker};
pub use time_wait::{TimeWaitPoint, TimeWaitRecord, TimeWaitResults, TimeWaitRun, TimeWaitSettings};
pub use trace::{
    TraceConnectRecord, TraceConnectResults, TraceConnectSettings, TraceFlame, TraceHeat, TraceSample,
    TraceStep, TraceTuple,
};
pub use trace_accept::{
    Depth, TraceAcceptRecord, TraceAcceptResults, TraceAcceptSettings, TraceListener, TraceWorker, WaitStep,
};

pub use trace_locks::{
    LockClass, LockPath, LockPort, TraceLocksRecord, TraceLocksResults, TraceLocksSettings,
};

/// The value of the `schema` field of every record of this version.
pub const SCHEMA: &str = "fourtuple/1";

/// JSON schema (draft 2020-12) that every record validates against.
pub const SCHEMA_JSON: &str = include_str!("../schema/fourtuple-1.json");

/// One result: the envelope that all commands share, around the settings `S` and the results `R` of one command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record<S, R> {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// The command and experiment, as typed: `lab ports`.
    pub command: String,
    /// When the run started, RFC 3339 in UTC.
    pub started: String,
    /// Where it ran.
    pub host: Host,
    /// What was asked, as understood, defaults filled in.
    pub settings: S,
    /// Why the run is not, or not wholly, to be believed. Empty: nothing known against it.
    pub validity: Vec<Remark>,
    /// What came out.
    pub results: R,
}

/// Something that limits what a run proves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remark {
    /// Kebab-case name that programs may match on: `interrupted`.
    pub id: String,
    /// One line for people.
    pub message: String,
}

impl Remark {
    /// A remark `id` with its line for people.
    pub fn new(id: &str, message: impl Into<String>) -> Self {
        Remark { id: id.to_owned(), message: message.into() }
    }
}

/// A record read back from a file, whatever command wrote it.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "nobody holds more than a few of them")]
pub enum Saved {
    /// `fourtuple lab`
    Lab(LabRecord),
    /// `fourtuple lab ports`
    Ports(PortsRecord),
    /// `fourtuple lab time-wait`
    TimeWait(TimeWaitRecord),
    /// `fourtuple lab accept`
    LabAccept(AcceptRecord),
    /// `fourtuple lab keepalive`
    LabKeepalive(AcceptRecord),
    /// `fourtuple lab locks`
    LabLocks(LabLocksRecord),
    /// `fourtuple lab planes`
    LabPlanes(PlanesRecord),
    /// `fourtuple plan`
    Plan(PlanRecord),
    /// `fourtuple compare`
    Compare(CompareRecord),
    /// `fourtuple load`
    Load(LoadRecord),
    /// `fourtuple serve`
    Serve(ServeRecord),
    /// `fourtuple forward`
    Forward(ForwardRecord),
    /// `fourtuple trace connect`
    TraceConnect(TraceConnectRecord),
    /// `fourtuple trace accept`
    TraceAccept(TraceAcceptRecord),
    /// `fourtuple trace locks`
    TraceLocks(TraceLocksRecord),
}

/// Why a text is not a record.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or fields are missing or of another type.
    #[error("not a fourtuple record: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A record of another version.
    #[error("the record's schema is {found:?}; this fourtuple reads {SCHEMA:?}")]
    Schema {
        /// What the record says.
        found: String,
    },
    /// A command that this version does not know.
    #[error("the record is of {0:?}, a command that this fourtuple does not know")]
    Command(String),
}

impl Saved {
    /// Reads any record.
    pub fn parse(text: &str) -> Result<Saved, ReadError> {
        #[derive(Deserialize)]
        struct Envelope {
            schema: String,
            command: String,
        }
        let envelope: Envelope = serde_json::from_str(text)?;
        if envelope.schema != SCHEMA {
            return Err(ReadError::Schema { found: envelope.schema });
        }
        Ok(match envelope.command.as_str() {
            "lab" => Saved::Lab(serde_json::from_str(text)?),
            "lab ports" => Saved::Ports(serde_json::from_str(text)?),
            "lab time-wait" => Saved::TimeWait(serde_json::from_str(text)?),
            "lab accept" => Saved::LabAccept(serde_json::from_str(text)?),
            "lab keepalive" => Saved::LabKeepalive(serde_json::from_str(text)?),
            "lab locks" => Saved::LabLocks(serde_json::from_str(text)?),
            "lab planes" => Saved::LabPlanes(serde_json::from_str(text)?),
            "plan" => Saved::Plan(serde_json::from_str(text)?),
            "compare" => Saved::Compare(serde_json::from_str(text)?),
            "load" => Saved::Load(serde_json::from_str(text)?),
            "serve" => Saved::Serve(serde_json::from_str(text)?),
            "trace accept" => Saved::TraceAccept(serde_json::from_str(text)?),
            "forward" => Saved::Forward(serde_json::from_str(text)?),
            "trace connect" => Saved::TraceConnect(serde_json::from_str(text)?),
            "trace locks" => Saved::TraceLocks(serde_json::from_str(text)?),
            _ => return Err(ReadError::Command(envelope.command)),
        })
    }
}
