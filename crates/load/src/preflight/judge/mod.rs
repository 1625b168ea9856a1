use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::preflight::forecast::TupleUsage;
use crate::preflight::{Remedy, Snapshot, Stall, findings};

/// The transport of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// UDP: a flow uses its port until its socket is closed.
    Udp,
    /// A unix socket: no ports.
    Unix,
}

/// How connections end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closer {
    /// The client sends its FIN first and has the TIME_WAIT socket.
    #[default]
    Client,
    /// The server sends its FIN first and has the TIME_WAIT socket.
    Server,
    /// The client sends RST: no TIME_WAIT socket.
    Reset,
}

/// The need of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// The transport.
    pub transport: Transport,
    /// How connections end.
    pub closer: Closer,
    /// Operations per second in an open loop; `None` in a closed loop.
    pub rate_per_s: Option<f64>,
    /// Maximum number of open connections (or UDP flows), besides `hold`.
    pub connections: u64,
    /// Pause between two operations of a connection in a closed loop.
    pub pause: Duration,
    /// Number of operations after which the run ends.
    pub operations: Option<u64>,
    /// Time after which the run ends. Without this and `operations` the run does not end by itself.
    pub length: Option<Duration>,
    /// Number of operations after which a connection is closed; 0 means never.
    pub requests_per_connection: u64,
    /// Number of connections that the run opens first and keeps open.
    pub hold: u64,
    /// Number of threads that generate load; 0 counts as 1.
    pub threads: u64,
    /// Whether each connection needs a file descriptor (`epoll`), and not a direct descriptor of a ring (`uring`).
    pub engine_needs_descriptors: bool,
    /// Whether the workload can send more than one request per connection (`http`), so that `--close-every` helps.
    pub may_keep_alive: bool,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The result needs care in its interpretation.
    Warn,
    /// The run would measure this limit instead of the server.
    Refuse,
}

/// A limit of this host that affects a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Name in kebab-case, stable for programs: `ports`, `descriptors`.
    pub id: &'static str,
    /// The severity.
    pub severity: Severity,
    /// A one-line description with numbers, without the remedy.
    pub message: String,
    /// Remedies, the best one first. Each one alone is sufficient.
    pub remedies: Vec<Remedy>,
}

/// The judgement on whether this host has the resources that a run needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Preflight {
    /// Number of 4-tuples to the destination: ports x sources. `None` for unix sockets.
    pub budget: Option<u64>,
    /// Number of these 4-tuples already in use, TIME_WAIT sockets included.
    pub taken: u64,
    /// Maximum number of 4-tuples that the run uses at once, if nothing stalls it; `None` for unix sockets.
    pub needed: Option<u64>,
    /// Time for which a 4-tuple stays in use after the end of its connection.
    pub kept: Duration,
    /// Forecast of the exhaustion of ports; `None` if they do not end.
    pub stall: Option<Stall>,
    /// Sustainable rate of new connections per second; `None` without a limit (`kept` is 0, or there are no ports).
    pub sustainable_per_s: Option<f64>,
    /// All findings, the most severe first.
    pub findings: Vec<Finding>,
}

impl Preflight {
    /// Returns whether the run must be refused without `--anyway`.
    pub fn refuses(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Refuse)
    }
}

impl fmt::Display for Finding {
    /// Returns description and remedies in one line: `DESCRIPTION; use REMEDY or REMEDY`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        let mut verb_said = false;
        for (index, remedy) in self.remedies.iter().enumerate() {
            formatter.write_str(if index == 0 { "; " } else { " or " })?;
            if !verb_said && !remedy.is_instruction() {
                formatter.write_str("use ")?;
                verb_said = true;
            }
            write!(formatter, "{remedy}")?;
        }
        Ok(())
    }
}

/// Compares the need of a run with the resources of the host.
///
/// In an open loop the rate of new connections is known (the rate over the requests per connection), and the time of a
/// stall is exact: the run takes tuples one by one, no tuple is free again before `kept` is over, and the run stalls if it
/// takes the last free tuple before that. A closed loop with a pause is at most as fast as its pauses allow. A closed loop
/// without a pause is assumed to make [`ASSUMED_CONNECTIONS_PER_S`](crate::preflight::ASSUMED_CONNECTIONS_PER_S): the
/// forecast has no time of a stall then, only a number of connections.
pub fn judge(snapshot: &Snapshot, need: &Need) -> Preflight {
    let course = TupleUsage::of(snapshot, need);
    let mut findings = findings::without_ports(snapshot, need, &course);
    let has_ports = need.transport != Transport::Unix;
    let mut stall = None;
    if has_ports {
        findings.extend(findings::of_ports(snapshot, need, &course));
        stall = course.stall();
    }
    findings.sort_by_key(|finding| Reverse(finding.severity));
    let churns = has_ports && course.leaves_time_wait();
    Preflight {
        budget: has_ports.then(|| snapshot.budget()),
        taken: if has_ports { snapshot.taken.all() } else { 0 },
        needed: has_ports.then(|| course.needed()),
        kept: course.kept,
        stall,
        sustainable_per_s: churns.then(|| course.steady() as f64 / course.kept.as_secs_f64()),
        findings,
    }
}

#[cfg(test)]
pub(super) mod tests;
