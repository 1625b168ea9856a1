//! The requests and replies between the coordinator and the agents, and the subjects of NATS.

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::{Host, LoadSettings, SCHEMA, ServeSettings, exact_duration, format_time};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::request::LoadRequest;

/// The name of the NATS service.
pub const SERVICE: &str = "fourtuple";

/// The JetStream stream of all runs.
pub const STREAM: &str = "FOURTUPLE";

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
    pub labels: BTreeMap<String, String>,
    /// SHA-256 of the running program and of `fourtuple`, which it runs.
    pub binary: String,
    pub schema: String,
    /// Accepted commands, with commas.
    pub allow: String,
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
    pub request: Request,
}

/// A request to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Request {
    /// Check a load and this host. The reply is [`Reply::Prepared`].
    Prepare {
        run: String,
        slot: u32,
        /// The load of this slot.
        load: Box<LoadRequest>,
    },
    /// Start the prepared load at a time of the agent's monotonic clock.
    Start {
        run: String,
        /// The start, in nanoseconds of the agent's clock.
        at_ns: i64,
        /// Time after the start at which the worker stops, even if NATS is gone.
        deadline_ns: u64,
        /// Start of the run, RFC 3339 in UTC, for the record.
        started: String,
    },
    /// Stop the load of a run.
    Stop { run: String },
    /// Publish the messages of a run again (the reply is [`Reply::Done`]) that the agent has on its disk, from a sequence number on.
    Resend {
        run: String,
        slot: u32,
        /// First sequence number.
        from: u64,
    },
    /// Diagnose the host: `fourtuple doctor`.
    Doctor,
    /// Measure the port search: `fourtuple lab ports`.
    LabPorts {
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
        sources: u64,
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
    Done,
    /// The record of a command.
    Record {
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
        reason: String,
    },
}

/// The plan of a run, which the coordinator stores before the start: with it another coordinator can collect the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedWorker {
    pub agent: AgentInfo,
    /// Its settings, as it understood them.
    pub settings: LoadSettings,
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

// The offset between the monotonic clocks of two machines, from exchanges of messages (as in RFC 5905, section 8, with the
// minimum of the round-trip times).

/// The number of exchanges of an estimate.
pub const EXCHANGES: usize = 64;

/// One request and its answer. Times in nanoseconds of a monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Time at which the request was sent, on the local clock.
    pub sent: i64,
    /// Time at which the remote side answered, on the remote clock.
    pub answered: i64,
    /// Time at which the answer arrived, on the local clock.
    pub received: i64,
}

/// The offset of a remote clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockEstimate {
    /// Remote clock minus local clock, in nanoseconds.
    pub offset_ns: i64,
    /// Minimum round-trip time of the exchanges.
    pub rtt_ns: u64,
    /// Maximum error of the offset: half of the minimum round-trip time.
    pub bound_ns: u64,
}

impl ClockEstimate {
    /// Estimates the offset from the exchange with the minimum round-trip time. `None` without an exchange in which time passes
    /// forward.
    pub fn of(exchanges: &[Exchange]) -> Option<ClockEstimate> {
        let forward = exchanges.iter().filter(|exchange| exchange.received >= exchange.sent);
        let best = forward.min_by_key(|exchange| exchange.received - exchange.sent)?;
        let rtt = (best.received - best.sent) as u64;
        let middle = best.sent + (best.received - best.sent) / 2;
        // Rounded up: the bound holds for an odd round-trip time too.
        // An answer that is far off is a wrong clock, not a panic.
        Some(ClockEstimate {
            offset_ns: best.answered.saturating_sub(middle),
            rtt_ns: rtt,
            bound_ns: rtt.div_ceil(2),
        })
    }

    /// Converts a local time to a time of the remote clock.
    pub fn to_remote(&self, local_ns: i64) -> i64 {
        local_ns.saturating_add(self.offset_ns)
    }
}

/// Maximum number of open sessions of an agent. The session that was unused for the longest time ends first. Every command opens a
/// session, and a coordinator in use asks every second.
const MAX_SESSIONS: usize = 1024;

/// The place of a request in a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Name of the session, which the agent drew at random.
    pub session: String,
    /// Number of the request in the session, from 1.
    pub sequence: u64,
}

/// The reason why an agent refuses a ticket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The agent did not open the session, or has forgotten it.
    #[error("the agent has no session {session:?}: it is from another agent, or has expired")]
    Unknown { session: String },
    /// A request with this or a higher number was accepted before.
    #[error("request {sequence} of the session was accepted before: this is a replay")]
    Replayed { sequence: u64 },
}

/// The open sessions of an agent.
#[derive(Debug, Default)]
pub struct Sessions {
    /// Sequence number of the last accepted request, and the order of the last uses, by session.
    open: BTreeMap<String, (u64, u64)>,
    uses: u64,
}

impl Sessions {
    /// Opens a session with a name that the caller drew at random.
    pub fn open(&mut self, name: String) {
        self.uses += 1;
        self.open.insert(name, (0, self.uses));
        if self.open.len() > MAX_SESSIONS {
            let oldest = self.open.iter().min_by_key(|(_, (_, used))| *used).map(|(name, _)| name.clone());
            oldest.map(|name| self.open.remove(&name));
        }
    }

    /// Accepts a ticket, once.
    ///
    /// # Errors
    ///
    /// [`SessionError`]
    pub fn accept(&mut self, ticket: &Ticket) -> Result<(), SessionError> {
        let Some((last, used)) = self.open.get_mut(&ticket.session) else {
            return Err(SessionError::Unknown { session: ticket.session.clone() });
        };
        if ticket.sequence <= *last {
            return Err(SessionError::Replayed { sequence: ticket.sequence });
        }
        self.uses += 1;
        (*last, *used) = (ticket.sequence, self.uses);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    /// Returns an exchange with these delays on the way out and back, with a remote clock `offset` ahead.
    fn exchange(sent: i64, offset: i64, out: i64, back: i64) -> Exchange {
        Exchange { sent, answered: sent + out + offset, received: sent + out + back }
    }

    proptest! {
        #[test]
        fn the_offset_is_within_its_bound(
            offset in -3_000_000_000_000_i64..100_000_000_000_000,
            delays in proptest::collection::vec((0_i64..50_000_000, 0_i64..50_000_000), 1..64),
        ) {
            let exchanges: Vec<Exchange> = delays
                .iter()
                .enumerate()
                .map(|(at, (out, back))| exchange(at as i64 * 1_000_000_000, offset, *out, *back))
                .collect();
            let estimate = ClockEstimate::of(&exchanges).unwrap();
            prop_assert!(estimate.offset_ns.abs_diff(offset) <= estimate.bound_ns);
            let least = delays.iter().map(|(out, back)| out + back).min().unwrap();
            prop_assert_eq!(estimate.rtt_ns, least as u64);
        }
    }

    #[test]
    fn the_shortest_exchange_decides() {
        // A queue delays the answers of two exchanges by 5 ms and 40 ms; the third is symmetric.
        let exchanges = [
            exchange(0, 37_000_000_000, 100_000, 5_000_000),
            exchange(1_000_000_000, 37_000_000_000, 100_000, 40_000_000),
            exchange(2_000_000_000, 37_000_000_000, 100_000, 100_000),
        ];
        let estimate = ClockEstimate::of(&exchanges).unwrap();
        assert_eq!(estimate, ClockEstimate { offset_ns: 37_000_000_000, rtt_ns: 200_000, bound_ns: 100_000 });
        assert_eq!(estimate.to_remote(5), 37_000_000_005);
    }

    #[test]
    fn a_clock_that_runs_backwards_gives_no_estimate() {
        assert_eq!(ClockEstimate::of(&[]), None);
        assert_eq!(ClockEstimate::of(&[Exchange { sent: 5, answered: 0, received: 4 }]), None);
    }

    fn ticket(session: &str, sequence: u64) -> Ticket {
        Ticket { session: session.to_owned(), sequence }
    }

    #[test]
    fn a_ticket_is_accepted_once() {
        let mut sessions = Sessions::default();
        sessions.open("a".into());
        assert_eq!(sessions.accept(&ticket("a", 1)), Ok(()));
        assert_eq!(sessions.accept(&ticket("a", 1)), Err(SessionError::Replayed { sequence: 1 }));
        assert_eq!(sessions.accept(&ticket("a", 5)), Ok(()), "requests may be lost");
        assert_eq!(sessions.accept(&ticket("a", 4)), Err(SessionError::Replayed { sequence: 4 }));
        assert_eq!(sessions.accept(&ticket("a", 0)), Err(SessionError::Replayed { sequence: 0 }));
    }

    #[test]
    fn a_session_of_another_agent_is_refused() {
        let mut sessions = Sessions::default();
        assert_eq!(sessions.accept(&ticket("b", 1)), Err(SessionError::Unknown { session: "b".into() }));
    }

    #[test]
    fn the_session_unused_for_longest_ends_first() {
        let mut sessions = Sessions::default();
        for number in 0..=MAX_SESSIONS {
            sessions.open(format!("{number}"));
            assert_eq!(sessions.accept(&ticket("0", number as u64 + 1)), Ok(()), "it is in use");
        }
        assert!(sessions.accept(&ticket("1", 1)).is_err());
        assert!(sessions.accept(&ticket("2", 1)).is_ok());
        assert!(sessions.accept(&ticket(&MAX_SESSIONS.to_string(), 1)).is_ok());
    }
}
