//! The requests and replies between the coordinator and the agents, and the subjects of NATS.

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::{Host, LoadSettings, SCHEMA, ServeSettings, exact_duration, format_time};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::clock::ClockEstimate;
use crate::request::LoadRequest;
use crate::session::Ticket;

/// The name of the NATS service.
pub const SERVICE: &str = "fourtuple";

/// The JetStream stream of all runs.
pub const STREAM: &str = "FOURTUPLE";

/// The subjects of the stream.
pub const STREAM_SUBJECTS: &str = "fourtuple.run.>";

/// Maximum size of a request in bytes.
pub const MAX_REQUEST: usize = 256 << 10;

/// Maximum time from the start of a run to its deadline.
pub const MAX_RUN: Duration = Duration::from_secs(7 * 24 * 3600);

/// Maximum time from the request to start a run until its start, during which the agent takes no other run.
pub const MAX_AHEAD: Duration = Duration::from_secs(60);

/// Maximum length of the measurement of a trace.
pub const MAX_TRACE: Duration = Duration::from_secs(3600);

/// Maximum number of workers of a run.
pub const MAX_WORKERS: u32 = 10_000;

/// Returns the prefix of the subjects of one running agent.
pub fn agent_subject(instance: &str) -> String {
    format!("fourtuple.agent.{instance}")
}

/// Returns the subjects of the intervals, ends and losses of all workers of a run.
pub fn slots_subjects(run: &str) -> String {
    format!("fourtuple.run.{run}.slot.>")
}

/// Returns the subjects of the intervals, the end and the loss of one worker.
pub fn slot_subjects(run: &str, slot: u32) -> String {
    format!("fourtuple.run.{run}.slot.{slot}.>")
}

/// Returns the subject of the intervals and the end of a worker.
pub fn worker_subject(run: &str, slot: u32) -> String {
    format!("fourtuple.run.{run}.slot.{slot}.second")
}

/// Returns the subject of the loss of a worker.
pub fn lost_subject(run: &str, slot: u32) -> String {
    format!("fourtuple.run.{run}.slot.{slot}.lost")
}

/// Returns the subjects of the lost workers of a run.
pub fn lost_subjects(run: &str) -> String {
    format!("fourtuple.run.{run}.slot.*.lost")
}

/// Returns the subject of a message of the summary of a worker.
pub fn summary_subject(run: &str, slot: u32, part: usize) -> String {
    format!("fourtuple.run.{run}.end.{slot}.{part}")
}

/// Returns the subjects of the summaries of a run.
pub fn summary_subjects(run: &str) -> String {
    format!("fourtuple.run.{run}.end.>")
}

/// Returns the subject of the plan of a run.
pub fn plan_subject(run: &str) -> String {
    format!("fourtuple.run.{run}.plan")
}

/// Returns the slot in the subject of a worker, and the rest behind it: `second`, `lost`, or the number of a message of a summary.
pub fn slot_of<'a>(run: &str, subject: &'a str) -> Option<(u32, &'a str)> {
    let rest = subject.strip_prefix("fourtuple.run.")?.strip_prefix(run)?;
    let rest = rest.strip_prefix(".slot.").or_else(|| rest.strip_prefix(".end."))?;
    let (slot, rest) = rest.split_once('.')?;
    Some((slot.parse().ok()?, rest))
}

/// Returns whether a text can be the name of a run or of an agent in a subject: letters, digits, `-` and `_`, at most 64.
pub fn is_token(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=64).contains(&text.len()) && text.bytes().all(is_part)
}

/// A running agent, as it describes itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentInfo {
    /// Name that the operator gave, by default the host name.
    pub name: String,
    /// Identifier of this process, drawn at random.
    pub instance: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// SHA-256 of the running program.
    pub binary: String,
    /// Schema of its records.
    pub schema: String,
    /// Accepted commands, with commas.
    pub allow: String,
    /// Kernel release.
    pub kernel: String,
    /// Number of CPUs.
    pub cpus: u32,
}

impl AgentInfo {
    /// Returns the metadata of the NATS service.
    pub fn to_metadata(&self) -> BTreeMap<String, String> {
        let fixed = [
            ("name", self.name.clone()),
            ("instance", self.instance.clone()),
            ("binary", self.binary.clone()),
            ("schema", self.schema.clone()),
            ("allow", self.allow.clone()),
            ("kernel", self.kernel.clone()),
            ("cpus", self.cpus.to_string()),
        ];
        let fixed = fixed.map(|(key, value)| (key.to_owned(), value));
        let labels = self.labels.iter().map(|(key, value)| (format!("label.{key}"), value.clone()));
        fixed.into_iter().chain(labels).collect()
    }

    /// Reads the metadata of a NATS service; `None` if it is not an agent.
    pub fn from_metadata<'a>(pairs: impl IntoIterator<Item = (&'a String, &'a String)>) -> Option<AgentInfo> {
        let pairs: BTreeMap<&str, &str> =
            pairs.into_iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let text = |key: &str| pairs.get(key).map(|value| (*value).to_owned());
        let labels = pairs
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix("label.")?.to_owned(), (*value).to_owned())));
        let info = AgentInfo {
            name: text("name")?,
            instance: text("instance")?,
            labels: labels.collect(),
            binary: text("binary")?,
            schema: text("schema")?,
            allow: text("allow")?,
            kernel: text("kernel")?,
            cpus: text("cpus")?.parse().ok()?,
        };
        info.has_names().then_some(info)
    }

    /// Returns whether the names can be parts of a subject.
    fn has_names(&self) -> bool {
        is_token(&self.name) && is_token(&self.instance)
    }
}

/// A request with its place in a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// The place in the session.
    pub ticket: Ticket,
    /// The request.
    pub request: Request,
}

/// A request to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Request {
    /// Check a load and this host. The reply is [`Reply::Prepared`].
    Prepare {
        /// Name of the run.
        run: String,
        /// Slot of this worker.
        slot: u32,
        /// The load of this slot.
        load: Box<LoadRequest>,
    },
    /// Start the prepared load at a time of the agent's monotonic clock.
    Start {
        /// Name of the run.
        run: String,
        /// The start, in nanoseconds of the agent's clock.
        at_ns: i64,
        /// Time after the start at which the worker stops, even if NATS is gone.
        deadline_ns: u64,
        /// Start of the run, RFC 3339 in UTC, for the record.
        started: String,
    },
    /// Stop the load of a run.
    Stop {
        /// Name of the run.
        run: String,
    },
    /// Publish the messages of a run again (the reply is [`Reply::Done`]) that the agent has on its disk, from a sequence number on.
    Resend {
        /// Name of the run.
        run: String,
        /// Slot of the worker.
        slot: u32,
        /// First sequence number.
        from: u64,
    },
    /// Diagnose the host: `fourtuple doctor`.
    Doctor,
    /// Measure the port search: `fourtuple lab ports`.
    LabPorts {
        /// Repeats of each strategy.
        repeats: u32,
        /// First port of the range.
        first: u16,
        /// Last port of the range.
        last: u16,
    },
    /// Measure the connects of all processes: `fourtuple trace connect`.
    TraceConnect {
        /// Length of the measurement.
        for_ns: u64,
    },
    /// Calibrate the port search and plan: `fourtuple plan`.
    Plan {
        /// New connections per second over all destinations.
        rate_per_s: Option<f64>,
        /// Lifetime of a connection.
        hold_ns: u64,
        /// Source addresses.
        sources: u64,
        /// Destinations.
        destinations: u64,
    },
    /// Start a server: `fourtuple serve`. The reply is [`Reply::Running`] when it is ready. It ends at its deadline, `for_ns`.
    Serve {
        /// The settings, with an address and a deadline.
        settings: Box<ServeSettings>,
    },
    /// Ask for a server or a command, which ends if its coordinator no longer asks. The reply is [`Reply::Running`] or
    /// [`Reply::Record`].
    Ask {
        /// Name of the process.
        child: String,
        /// Whether to stop it.
        stop: bool,
    },
}

impl Request {
    /// Returns the time after which an agent ends the command of the request, or why the request is refused. `None`: it runs no
    /// command.
    ///
    /// # Errors
    ///
    /// The reason, if a measurement is longer than [`MAX_TRACE`].
    pub fn limit(&self) -> Result<Option<Duration>, String> {
        let minutes = |minutes: u64| Ok(Some(Duration::from_secs(minutes * 60)));
        match self {
            Request::Doctor => minutes(1),
            Request::Plan { .. } => minutes(3),
            Request::LabPorts { .. } => minutes(10),
            Request::TraceConnect { for_ns } => match Duration::from_nanos(*for_ns) {
                time if time <= MAX_TRACE => Ok(Some(time + Duration::from_secs(60))),
                time => Err(format!(
                    "invalid value '{}' for '--for': expected at most {}",
                    format_time(time),
                    format_time(MAX_TRACE)
                )),
            },
            _ => Ok(None),
        }
    }

    /// Returns the command line behind `fourtuple` by which an agent performs the request; `None`: it runs no command, or the settings
    /// of the agent are needed.
    pub fn command(&self) -> Option<Vec<String>> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Some(match self {
            Request::Doctor => words(&["doctor"]),
            Request::LabPorts { repeats, first, last } => words(&[
                "lab",
                "ports",
                "--repeats",
                &repeats.to_string(),
                "--range",
                &format!("{first}-{last}"),
            ]),
            Request::TraceConnect { for_ns } => {
                words(&["trace", "connect", "--for", &exact_duration(*for_ns)])
            }
            Request::Plan { rate_per_s, hold_ns, sources, destinations } => {
                let mut words: Vec<String> = words(&[
                    "plan",
                    &format!("--hold={}", exact_duration(*hold_ns)),
                    &format!("--sources={sources}"),
                    &format!("--destinations={destinations}"),
                ]);
                words.extend(rate_per_s.map(|rate| format!("--rate={rate}/s")));
                words
            }
            _ => return None,
        })
    }
}

/// The reply of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Reply {
    /// The load is prepared.
    Prepared {
        /// The settings as the agent understood them.
        settings: Box<LoadSettings>,
        /// Findings of the preflight that refuse the run, as one line.
        refusal: Option<String>,
        /// Other findings.
        warnings: Vec<String>,
        /// The host, for the record.
        host: Host,
    },
    /// The request is done.
    Done,
    /// The record of a command.
    Record {
        /// The record.
        record: Value,
    },
    /// A command or a server, which is ready, has not ended.
    Running {
        /// Name of the process.
        child: String,
        /// Address, workers and mechanism of a server.
        listen: Option<String>,
    },
    /// The agent refuses or failed.
    Refused {
        /// The reason.
        reason: String,
    },
}

/// The plan of a run, which the coordinator stores before the start: with it another coordinator can collect the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of the run.
    pub run: String,
    /// Start, RFC 3339 in UTC.
    pub started: String,
    /// Common start of the workers, in nanoseconds since the epoch by the clock of the coordinator.
    pub started_ns: u64,
    /// The settings of the whole run.
    pub settings: LoadSettings,
    /// Time after the start at which workers stop.
    pub deadline_ns: u64,
    /// Maximum start error of a valid run.
    pub most_skew_ns: u64,
    /// The host of the coordinator, for the record.
    pub host: Host,
    /// The workers by slot.
    pub workers: Vec<PlannedWorker>,
}

impl Plan {
    /// Reads the plan of a run. `None`: it is not one, or not of this run.
    pub fn decode(run: &str, bytes: &[u8]) -> Option<Plan> {
        let plan: Plan = serde_json::from_slice(bytes).ok()?;
        let is_possible = plan.run == run
            && (1..=MAX_WORKERS as usize).contains(&plan.workers.len())
            && Duration::from_nanos(plan.deadline_ns) <= MAX_RUN
            && plan.workers.iter().all(|worker| worker.agent.has_names());
        is_possible.then_some(plan)
    }
}

/// The loss of a worker, which the coordinator stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The slot of the worker.
    pub slot: u32,
    /// The first second that does not count.
    pub second: u64,
}

/// A worker of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedWorker {
    /// The agent.
    pub agent: AgentInfo,
    /// Its settings, as it understood them.
    pub settings: LoadSettings,
    /// Its clock.
    pub clock: ClockEstimate,
}

/// Why some agents cannot run together, or `None`: all have the same program and the schema of this one.
pub fn mismatch(agents: &[AgentInfo]) -> Option<String> {
    if let Some(other) = agents.iter().find(|agent| agent.schema != SCHEMA) {
        return Some(format!(
            "{} writes records of {}, and this program {SCHEMA}: use the same version on all hosts",
            other.name, other.schema
        ));
    }
    let first = agents.first()?;
    let other = agents.iter().find(|agent| agent.binary != first.binary)?;
    let short = |agent: &AgentInfo| agent.binary.chars().take(12).collect::<String>();
    Some(format!(
        "{} runs another program ({}) than {} ({}): use the same binary on all hosts",
        other.name,
        short(other),
        first.name,
        short(first)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(name: &str) -> AgentInfo {
        AgentInfo {
            name: name.into(),
            instance: format!("{name}-1"),
            labels: BTreeMap::from([("zone".into(), "a".into())]),
            binary: "abc".into(),
            schema: SCHEMA.into(),
            allow: "load".into(),
            kernel: "6.1".into(),
            cpus: 2,
        }
    }

    #[test]
    fn an_agent_survives_its_metadata() {
        let metadata = agent("a").to_metadata();
        assert_eq!(AgentInfo::from_metadata(&metadata), Some(agent("a")));
        for key in ["name", "instance", "binary", "cpus"] {
            let mut less = metadata.clone();
            less.remove(key);
            assert_eq!(AgentInfo::from_metadata(&less), None, "{key}");
        }
        let mut hostile = metadata;
        hostile.insert("instance".into(), "*.>".into());
        assert_eq!(AgentInfo::from_metadata(&hostile), None);
    }

    #[test]
    fn a_slot_is_read_from_its_subject() {
        assert_eq!(slot_of("r", &worker_subject("r", 12)), Some((12, "second")));
        assert_eq!(slot_of("r", &lost_subject("r", 0)), Some((0, "lost")));
        assert_eq!(slot_of("r", &summary_subject("r", 7, 2)), Some((7, "2")));
        assert_eq!(slot_of("r", &plan_subject("r")), None);
        assert_eq!(slot_of("r", &worker_subject("other", 1)), None);
    }

    #[test]
    fn names_cannot_be_wildcards() {
        assert!(is_token("web-1_a"));
        for text in ["", "a.b", "*", ">", "a b", &"a".repeat(65)] {
            assert!(!is_token(text), "{text}");
        }
    }

    #[test]
    fn another_binary_or_schema_is_a_mismatch() {
        assert_eq!(mismatch(&[agent("a"), agent("b")]), None);
        let other = AgentInfo { binary: "def".into(), ..agent("b") };
        assert!(mismatch(&[agent("a"), other]).unwrap().contains("b runs another program"));
        let old = AgentInfo { schema: "fourtuple/0".into(), ..agent("b") };
        assert!(mismatch(&[agent("a"), old]).unwrap().contains("fourtuple/0"));
    }
}
