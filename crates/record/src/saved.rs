use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::{
    AcceptRecord, CompareRecord, DoctorRecord, FixAcceptRecord, FixPortsRecord, FleetRecord, ForwardRecord,
    GuardRecord, Host, LabLocksRecord, LabRecord, LoadRecord, PlanRecord, PlanesRecord, PortsRecord, Record,
    Remark, RunRecord, SCHEMA, ServeRecord, TimeWaitRecord, TraceAcceptRecord, TraceConnectRecord,
    TraceLocksRecord,
};

/// The fields that every record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common<'a> {
    /// The command and experiment, as typed: `lab ports`.
    pub command: &'a str,
    /// Start of the run, RFC 3339 in UTC.
    pub started: &'a str,
    /// The machine and the kernel.
    pub host: &'a Host,
    /// Remarks that limit what the run proves.
    pub validity: &'a [Remark],
}

impl<S, R> Record<S, R> {
    /// Returns the fields that every record has.
    pub fn common(&self) -> Common<'_> {
        Common { command: &self.command, started: &self.started, host: &self.host, validity: &self.validity }
    }
}

/// The reason why a text is not a record.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or fields are missing or of another type.
    #[error("not a fourtuple record: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A record of another version.
    #[error("the record's schema is {found:?}; this fourtuple reads {SCHEMA:?}")]
    Schema {
        /// The version that the record names.
        found: String,
    },
    /// A command that this version does not know.
    #[error("the record is of {0:?}, a command that this fourtuple does not know")]
    Command(String),
}

#[derive(Deserialize)]
struct Envelope {
    schema: String,
    command: String,
}

impl Envelope {
    /// Returns the command of a record of this version.
    fn command(&self) -> Result<&str, ReadError> {
        match self.schema.as_str() {
            SCHEMA => Ok(&self.command),
            _ => Err(ReadError::Schema { found: self.schema.clone() }),
        }
    }
}

impl<'de> Deserialize<'de> for Saved {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Saved::from_value(Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Defines [`Saved`] from one line per record: the commands, the variant, the type.
macro_rules! records {
    ($($($command:literal)|+ => $kind:ident($record:ty),)*) => {
        /// A record of any command, read from a file. Serializes as the record itself.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(untagged)]
        #[allow(clippy::large_enum_variant, reason = "a process holds only a few records at a time")]
        pub enum Saved {
            $(
                #[doc = concat!($("`fourtuple ", $command, "` "),+)]
                $kind($record),
            )*
        }

        impl Saved {
            /// Reads any record.
            ///
            /// # Errors
            /// The text is not JSON, or of another schema version, or of a command that is not known here.
            pub fn parse(text: &str) -> Result<Saved, ReadError> {
                let envelope: Envelope = serde_json::from_str(text)?;
                match envelope.command()? {
                    $($($command)|+ => Ok(Saved::$kind(serde_json::from_str(text)?)),)*
                    _ => Err(ReadError::Command(envelope.command)),
                }
            }

            /// Reads any record that is already JSON.
            ///
            /// # Errors
            /// As [`Saved::parse`].
            pub fn from_value(value: Value) -> Result<Saved, ReadError> {
                let envelope = Envelope::deserialize(&value)?;
                match envelope.command()? {
                    $($($command)|+ => Ok(Saved::$kind(serde_json::from_value(value)?)),)*
                    _ => Err(ReadError::Command(envelope.command)),
                }
            }

            /// Returns one branch of the schema for each row, and all commands.
            #[cfg(feature = "schema")]
            pub(crate) fn branches(generator: &mut schemars::SchemaGenerator) -> (Vec<schemars::Schema>, Vec<&'static str>) {
                (vec![$(<$record>::branch(generator, &[$($command),+])),*], vec![$($($command),+),*])
            }

            /// Returns the fields that every record has.
            pub fn common(&self) -> Common<'_> {
                match self {
                    $(Saved::$kind(record) => record.common(),)*
                }
            }
        }
    };
}

records! {
    "lab" => Lab(LabRecord),
    "lab ports" => Ports(PortsRecord),
    "lab time-wait" => TimeWait(TimeWaitRecord),
    "lab accept" => LabAccept(AcceptRecord),
    "lab keepalive" => LabKeepalive(AcceptRecord),
    "lab locks" => LabLocks(LabLocksRecord),
    "lab planes" => LabPlanes(PlanesRecord),
    "plan" => Plan(PlanRecord),
    "compare" => Compare(CompareRecord),
    "load" => Load(LoadRecord),
    "serve" => Serve(ServeRecord),
    "forward" => Forward(ForwardRecord),
    "fix ports" => FixPorts(FixPortsRecord),
    "fix accept" => FixAccept(FixAcceptRecord),
    "guard status" => GuardStatus(GuardRecord),
    "run" => Run(RunRecord),
    "fleet doctor" | "fleet lab ports" | "fleet trace connect" | "fleet plan" | "fleet serve" => Fleet(FleetRecord),
    "doctor" => Doctor(DoctorRecord),
    "trace connect" => TraceConnect(TraceConnectRecord),
    "trace accept" => TraceAccept(TraceAcceptRecord),
    "trace locks" => TraceLocks(TraceLocksRecord),
}
