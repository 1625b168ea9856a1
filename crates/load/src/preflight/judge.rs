use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use super::forecast::Course;
use super::{Remedy, Snapshot, Stall, findings};

/// What carries the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// UDP: a flow keeps its port as long as its socket is open, and no longer.
    Udp,
    /// A unix socket: no ports.
    Unix,
}

/// How connections end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closer {
    /// Our FIN first: TIME_WAIT is ours.
    #[default]
    Client,
    /// The server's FIN first: TIME_WAIT is there.
    Server,
    /// RST: no TIME_WAIT.
    Reset,
}

/// What a run asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// What carries it.
    pub transport: Transport,
    /// How connections end.
    pub closer: Closer,
    /// Operations per second of an open loop; `None`: a closed loop.
    pub rate_per_s: Option<f64>,
    /// Most connections (or UDP flows) that are open at once, beside those of `hold`.
    pub connections: u64,
    /// Rest between two operations of a connection in a closed loop.
    pub pause: Duration,
    /// Operations after which the run ends.
    pub operations: Option<u64>,
    /// Time after which the run ends. Neither this nor `operations`: it does not end by itself.
    pub length: Option<Duration>,
    /// Operations after which a connection is closed; 0: never.
    pub requests_per_connection: u64,
    /// Connections that are opened first and kept.
    pub hold: u64,
    /// Threads that generate; 0 counts as 1.
    pub threads: u64,
    /// Whether every connection has a descriptor of the process (`epoll`), rather than a slot of its ring's table
    /// (`uring`).
    pub engine_needs_descriptors: bool,
    /// Whether the workload can send more than one request per connection (`http`), so that `--close-every` helps.
    pub may_keep_alive: bool,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The result will need a grain of salt.
    Warn,
    /// The run would measure this, and not the server.
    Refuse,
}

/// Something that stands in the way of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Kebab-case name that programs may match on: `ports`, `descriptors`.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What and how much, in one line, without the remedy.
    pub message: String,
    /// What to do, most fitting first; each would do by itself.
    pub remedies: Vec<Remedy>,
}

/// Whether this host has what a run needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Preflight {
    /// Tuples towards the destination: ports x sources. `None`: no ports (unix sockets).
    pub budget: Option<u64>,
    /// Those that are taken already, TIME_WAIT included.
    pub taken: u64,
    /// Most tuples that the run has at once, if nothing stops it; `None`: no ports.
    pub needed: Option<u64>,
    /// How long a tuple stays taken after its connection's end.
    pub kept: Duration,
    /// When the ports end; `None`: never.
    pub stall: Option<Stall>,
    /// New connections per second that can go on for ever; `None`: nothing limits them (`kept` is 0, or no ports).
    pub sustainable_per_s: Option<f64>,
    /// What else there is, the worst first.
    pub findings: Vec<Finding>,
}

impl Preflight {
    /// Whether the run is to be refused, unless it is wanted anyway.
    pub fn refuses(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Refuse)
    }
}

impl fmt::Display for Finding {
    /// `what and how much; use this or that`
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        let mut verb_said = false;
        for (index, remedy) in self.remedies.iter().enumerate() {
            formatter.write_str(if index == 0 { "; " } else { " or " })?;
            if !verb_said && !remedy.is_an_order() {
                formatter.write_str("use ")?;
                verb_said = true;
            }
            write!(formatter, "{remedy}")?;
        }
        Ok(())
    }
}

/// Holds what a run needs against what the host has.
///
/// In an open loop the rate of new connections is known (the rate over the requests per connection), and the time of a
/// stall is exact: the tuples are taken one by one, none comes back before `kept` is over, and the run stalls if the last
/// free one is taken before that. A closed loop with a pause is at most as fast as its pauses allow; one without is taken
/// to make [`ASSUMED_CONNECTIONS_PER_S`](super::ASSUMED_CONNECTIONS_PER_S): it has no time of a stall, only a number of
/// connections.
pub fn judge(snapshot: &Snapshot, need: &Need) -> Preflight {
    let course = Course::of(snapshot, need);
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
