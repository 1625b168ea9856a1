use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use fourtuple::ports::{PortRange, TIME_WAIT};
use fourtuple_record::format_time;
use fourtuple_record::measure::words::{counted, grouped, percent};

use crate::load::preflight::forecast::{ASSUMED_CONNECTIONS_PER_S, RateSource, TupleUsage};
use crate::load::preflight::{Closer, Finding, Need, Severity, Snapshot, Transport};

/// File descriptors needed besides one per connection: rings, epoll, timers, files.
const SPARE_DESCRIPTORS: u64 = 64;

/// Maximum number of direct descriptors of a ring (IORING_MAX_FIXED_FILES).
const MAX_SLOTS: u64 = 1 << 20;

/// Time for which connection tracking keeps a closed connection: nf_conntrack_tcp_timeout_time_wait.
const TRACKED: Duration = Duration::from_secs(120);

/// Time for which connection tracking keeps a connection after RST: nf_conntrack_tcp_timeout_close.
const TRACKED_AFTER_RESET: Duration = Duration::from_secs(10);

/// Share of the 4-tuples that may be in use before a finding is reported.
const TAKEN: f64 = 0.1;

/// Returns the findings that apply to every run.
pub(super) fn without_ports(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Vec<Finding> {
    let each = [unseen(snapshot, need), descriptors(snapshot, need, course), backlog(snapshot, need, course)];
    each.into_iter().flatten().collect()
}

fn unseen(snapshot: &Snapshot, need: &Need) -> Option<Finding> {
    let (module, unknown) = match need.transport {
        Transport::Tcp => {
            ("tcp_diag", "the tuples that are taken, the ports that are listened at and the backlog")
        }
        Transport::Udp => ("udp_diag", "the tuples that are taken"),
        Transport::Unix => ("unix_diag", "the backlog"),
    };
    let why = snapshot.unseen.as_ref()?;
    let message = format!("the sockets of this host cannot be seen ({why}): {unknown} are not known");
    let message =
        if need.transport == Transport::Unix { message.replace(" are not", " is not") } else { message };
    Some(finding(
        "sockets-unseen",
        Severity::Warn,
        message,
        vec![Remedy::Other(format!("modprobe {module}"))],
    ))
}

/// Returns the findings for runs over IP.
pub(super) fn of_ports(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Vec<Finding> {
    let mut found = Vec::new();
    if snapshot.ports() == 0 {
        found.push(no_ports(snapshot));
    } else {
        found.extend(ports(snapshot, need, course));
        found.extend(taken(snapshot, course));
    }
    found.extend(tracking(snapshot, need, course));
    if need.transport == Transport::Tcp {
        found.extend(time_wait(snapshot, need, course));
        found.extend(handshakes(snapshot, course));
        found.extend(no_listener(snapshot));
    }
    found
}

fn finding(id: &'static str, severity: Severity, message: String, remedies: Vec<Remedy>) -> Finding {
    Finding { id, severity, message, remedies }
}

fn no_ports(snapshot: &Snapshot) -> Finding {
    let message = format!(
        "all {} of net.ipv4.ip_local_port_range ({}) are reserved or listened at",
        counted(snapshot.range.len().into(), "port"),
        snapshot.range
    );
    let order = "shorten net.ipv4.ip_local_reserved_ports or widen the range";
    finding("range-reserved", Severity::Refuse, message, vec![Remedy::Other(order.to_owned())])
}

fn ports(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    let stall = course.stall();
    if stall.is_none() && !course.is_tight() {
        return None;
    }
    let remedies = for_ports(snapshot, need);
    let there_are = format!(
        "there are {}{}{}",
        grouped(snapshot.budget()),
        if course.leaves_time_wait() { per(course.kept) } else { String::new() },
        match snapshot.taken.all() {
            0 => String::new(),
            taken => format!(", {} of them taken", grouped(taken)),
        }
    );
    let needs = counted(course.needed(), "tuple");
    let Some(stall) = stall else {
        let why = if course.leaves_time_wait() {
            "it may stall when every connection is busy, or when the kernel gives tuples back late"
        } else {
            "it would stall if every connection were open at once"
        };
        let message = format!("this run needs {needs}, {there_are}: {why}");
        return Some(finding("ports-tight", Severity::Warn, message, remedies));
    };
    if course.hold > 0 && stall.after_connections == 0 {
        let message = format!(
            "this run needs {needs}, {there_are}: the {} to hold leave none for others",
            grouped(course.hold)
        );
        return Some(finding("ports", Severity::Refuse, message, remedies));
    }
    let after = match (stall.at, course.basis) {
        _ if stall.after_connections == 0 => "no connection would find a port".to_owned(),
        (Some(at), _) => format!("it would stall after {}", format_time(at)),
        (None, RateSource::Assumed) if course.leaves_time_wait() && need.operations.is_none() => {
            let seconds = stall.after_connections.saturating_sub(course.at_once) as f64 / course.rate;
            format!(
                "at {} a second and thread, which is an assumption, it would stall after {}",
                counted(
                    (ASSUMED_CONNECTIONS_PER_S.min(course.rate / need.threads.max(1) as f64)) as u64,
                    "new connection"
                ),
                format_time(Duration::try_from_secs_f64(seconds).unwrap_or_default()),
            )
        }
        (None, _) => format!("it would stall after {}", counted(stall.after_connections, "connection")),
    };
    let message = format!("this run needs {needs}, {there_are}: {after}");
    Some(finding("ports", Severity::Refuse, message, remedies))
}

/// Formats a period: ` a minute`, ` a second`, ` every 2.5 s`.
fn per(kept: Duration) -> String {
    match kept {
        TIME_WAIT => " a minute".to_owned(),
        kept if kept == Duration::from_secs(1) => " a second".to_owned(),
        kept => format!(" every {}", format_time(kept)),
    }
}

fn taken(snapshot: &Snapshot, course: &TupleUsage) -> Option<Finding> {
    let taken = &snapshot.taken;
    // TIME_WAIT sockets that connect() reuses are not an obstacle.
    let (all, budget) =
        (taken.all() - if snapshot.reuse().is_some() { taken.time_wait } else { 0 }, snapshot.budget());
    let share = all as f64 / budget as f64;
    (share > TAKEN && course.stall().is_none()).then(|| {
        let message = format!(
            "{} of {} tuples are taken before the run ({}: {} established, {} in TIME_WAIT, {} otherwise): connect() \
             has to look past them",
            grouped(all),
            grouped(budget),
            percent(share),
            grouped(taken.established),
            grouped(taken.time_wait),
            grouped(taken.other),
        );
        let mut remedies = Vec::new();
        if taken.time_wait * 2 > all {
            remedies.push(Remedy::Wait(Duration::from_secs(taken.time_wait_back.len().max(1) as u64)));
        }
        finding("ports-taken", Severity::Warn, message, remedies)
    })
}

fn descriptors(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    let (limits, threads) = (snapshot.descriptors, need.threads.max(1));
    let connections = course.at_most.saturating_add(need.hold);
    let beside = limits.open + SPARE_DESCRIPTORS + 4 * threads;
    let slots = limits.soft.min(MAX_SLOTS);
    let fits_rings = |threads: u64| connections.div_ceil(threads) < slots;
    let (needs, message) = if need.engine_needs_descriptors {
        let needs = connections.saturating_add(beside);
        let message = format!(
            "{} {} about {}, RLIMIT_NOFILE allows {}",
            counted(connections, "connection"),
            if connections == 1 { "needs" } else { "need" },
            counted(needs, "descriptor"),
            grouped(limits.soft),
        );
        (needs, message)
    } else {
        let needs = connections.div_ceil(threads) + 1;
        let message = format!(
            "{} over {} {} {} in each ring's table, which may have {} (RLIMIT_NOFILE bounds it too)",
            counted(connections, "connection"),
            counted(threads, "thread"),
            if connections == 1 { "needs" } else { "need" },
            counted(needs, "slot"),
            grouped(slots),
        );
        (needs, message)
    };
    let allowed = if need.engine_needs_descriptors { limits.soft } else { slots };
    if needs <= allowed {
        return None;
    }
    let mut remedies = Vec::new();
    if needs <= limits.hard && (need.engine_needs_descriptors || needs <= MAX_SLOTS) {
        remedies.push(Remedy::Other(format!("raise the limit with ulimit -n {needs}")));
    }
    if need.engine_needs_descriptors && fits_rings(threads) {
        remedies.push(Remedy::Engine("uring"));
    }
    if !need.engine_needs_descriptors && slots > 1 {
        remedies.push(Remedy::Threads(connections.div_ceil(slots - 1)));
    }
    let capacity = if need.engine_needs_descriptors {
        allowed.saturating_sub(beside)
    } else {
        allowed.saturating_sub(1).saturating_mul(threads)
    };
    let capacity = capacity.saturating_sub(need.hold);
    if capacity > 0 {
        remedies.push(Remedy::Connections(capacity));
    }
    if needs > limits.hard {
        remedies.push(Remedy::Other(format!("raise the hard limit with ulimit -Hn {needs} (as root)")));
    }
    Some(finding("descriptors", Severity::Refuse, message, remedies))
}

fn tracking(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    // An empty table means that no rule uses connection tracking.
    let table = snapshot.conntrack.filter(|table| table.count > 0)?;
    let free = table.max.saturating_sub(table.count);
    let tracked = if need.closer == Closer::Reset { TRACKED_AFTER_RESET } else { TRACKED };
    let certain = course.at_once.saturating_add(need.hold);
    let churn = if course.churns { course.opened_in(tracked.as_secs_f64()) } else { 0 };
    // An entry stands for a 4-tuple: a reused 4-tuple needs no further entry.
    let at_most = churn.max(course.at_most).saturating_add(need.hold).min(snapshot.budget());
    let (severity, entries) = if certain > free {
        (Severity::Refuse, certain)
    } else if at_most > free {
        (Severity::Warn, at_most)
    } else {
        return None;
    };
    let message = format!(
        "{} to track, the connection tracking has space for {} (nf_conntrack_max {}, {} used): new connections {} \
         dropped when it is full",
        counted(entries, "tuple"),
        grouped(free),
        grouped(table.max),
        grouped(table.count),
        if severity == Severity::Refuse { "are" } else { "may be" },
    );
    let remedies = vec![
        Remedy::Other(format!(
            "set net.netfilter.nf_conntrack_max={}",
            (table.count + entries).next_power_of_two()
        )),
        Remedy::Other("leave this traffic untracked (a rule with notrack)".to_owned()),
    ];
    Some(finding("conntrack", severity, message, remedies))
}

fn time_wait(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    let ours = need.closer == Closer::Client;
    if !(ours && course.churns) {
        return None;
    }
    let free = snapshot.tcp_max_tw_buckets.saturating_sub(snapshot.time_wait);
    let sockets = course.opened_in(TIME_WAIT.as_secs_f64()).min(course.steady());
    (sockets > free).then(|| {
        let message = format!(
            "up to {} in TIME_WAIT, net.ipv4.tcp_max_tw_buckets leaves space for {} ({} there): the rest \
             are closed without TIME_WAIT, unlike the sockets of real clients",
            counted(sockets, "socket"),
            grouped(free),
            grouped(snapshot.time_wait),
        );
        let enough = (snapshot.time_wait + sockets).next_power_of_two();
        let order = format!("set net.ipv4.tcp_max_tw_buckets={enough}");
        finding("tw-buckets", Severity::Warn, message, vec![Remedy::Other(order)])
    })
}

/// Returns the capacity of a queue: one more than its backlog (`sk_acceptq_is_full`, `unix_recvq_full`).
fn backlog(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    let queue = snapshot.listener.filter(|_| need.transport != Transport::Udp)?;
    let at_once = course.at_most;
    (at_once > queue.backlog + queue.sockets).then(|| {
        let dropped = match need.transport {
            Transport::Unix => {
                "what does not fit waits (engine uring) or fails at once with EAGAIN (engine epoll)"
            }
            _ => "what does not fit is dropped and comes again a second or more later",
        };
        let message = format!(
            "{} at once, the server's accept {} {} (backlog of listen(), {} waiting now): {dropped}",
            counted(at_once, "connection"),
            if queue.sockets == 1 {
                "queue holds".to_owned()
            } else {
                format!("queues ({}) hold", queue.sockets)
            },
            grouped(queue.backlog),
            grouped(queue.waiting),
        );
        let per_socket = at_once.div_ceil(queue.sockets.max(1));
        let order = if snapshot.somaxconn.is_none_or(|most| per_socket > most) {
            format!("set net.core.somaxconn={per_socket} and restart the server with a backlog of that")
        } else {
            format!("give the server a backlog of {per_socket}")
        };
        let mut remedies = vec![Remedy::Other(order)];
        if queue.backlog > 0 {
            remedies.push(Remedy::Connections(queue.backlog));
        }
        finding("backlog", Severity::Warn, message, remedies)
    })
}

/// Returns a finding if the SYN backlog is too small. Without SYN cookies the kernel reserves a quarter of tcp_max_syn_backlog for
/// known peers (`tcp_conn_request`).
fn handshakes(snapshot: &Snapshot, course: &TupleUsage) -> Option<Finding> {
    let limit = snapshot.tcp_max_syn_backlog - snapshot.tcp_max_syn_backlog / 4;
    let here = snapshot.listener.is_some() && !snapshot.tcp_syncookies;
    (here && course.at_most > limit).then(|| {
        let message = format!(
            "{} at once, net.ipv4.tcp_max_syn_backlog={} without SYN cookies lets about {} shake hands: other SYNs are \
             dropped and come again after 1 s",
            counted(course.at_most, "connection"),
            snapshot.tcp_max_syn_backlog,
            grouped(limit),
        );
        let order = format!("set net.ipv4.tcp_max_syn_backlog={}", (course.at_most * 4).div_ceil(3));
        finding("syn-backlog", Severity::Warn, message, vec![Remedy::Other(order)])
    })
}

fn no_listener(snapshot: &Snapshot) -> Option<Finding> {
    let destination = snapshot.destination.filter(|to| to.ip().to_canonical().is_loopback())?;
    (snapshot.listener.is_none() && snapshot.unseen.is_none()).then(|| {
        let message =
            format!("no socket listens at {destination} now: connections will be refused (ECONNREFUSED)");
        finding("nobody-listens", Severity::Warn, message, vec![Remedy::Other("start the server".to_owned())])
    })
}

/// A remedy, formatted as flags or commands to type.
#[derive(Clone, Debug, PartialEq)]
pub enum Remedy {
    /// All addresses of a network as sources: on loopback each address in 127.0.0.0/8 is local.
    SourceNetwork {
        network: Ipv4Addr,
        prefix: u8,
    },
    /// This many source addresses, which must first be added to an interface.
    Sources(u64),
    CloseServer,
    /// A lower rate, in operations per second.
    Rate(u64),
    /// This many requests per connection.
    CloseEvery(u64),
    /// A wider net.ipv4.ip_local_port_range: its first and last port.
    Range(u16, u16),
    /// The sysctl net.ipv4.tcp_tw_reuse=1.
    TwReuse,
    /// A wait until the TIME_WAIT sockets of earlier connections have expired.
    Wait(Duration),
    /// Fewer open connections.
    Connections(u64),
    Engine(&'static str),
    Threads(u64),
    /// Another remedy, as an instruction in words.
    Other(String),
}

/// Maximum number of source addresses in a remedy: the size limit of a source pool.
const MAX_SOURCES: u64 = fourtuple::dial::MAX_SOURCES as u64;

/// Returns the remedies for a run without enough ports. Each is tested by judging the run with it.
fn for_ports(snapshot: &Snapshot, need: &Need) -> Vec<Remedy> {
    let enough = |snapshot: &Snapshot, need: &Need| {
        let course = TupleUsage::of(snapshot, need);
        course.stall().is_none() && !course.is_tight()
    };
    let with = |change: &dyn Fn(&mut Snapshot)| {
        let mut changed = snapshot.clone();
        change(&mut changed);
        enough(&changed, need)
    };
    let asked = |change: &dyn Fn(&mut Need)| {
        let mut changed = *need;
        change(&mut changed);
        enough(snapshot, &changed)
    };
    let course = TupleUsage::of(snapshot, need);
    let mut remedies = Vec::new();
    if snapshot.taken.time_wait > 0 && with(&|changed| changed.taken.forget_time_wait()) {
        let seconds = (snapshot.taken.time_wait_back.len() as u64).max(1);
        remedies.push(Remedy::Wait(Duration::from_secs(seconds)));
    }
    remedies.extend(sources(snapshot, &|count| with(&|changed| changed.sources = count)));
    if !course.leaves_time_wait() {
        let fits = u64::try_from(course.free_now()).unwrap_or(0);
        if fits > 0 && asked(&|changed| changed.connections = fits) {
            remedies.push(Remedy::Connections(fits));
        }
    } else {
        if asked(&|changed| changed.closer = Closer::Server) {
            remedies.push(Remedy::CloseServer);
        }
        let kept_for = |requests| asked(&|changed| changed.requests_per_connection = requests);
        if need.may_keep_alive
            && let Some(requests) = smallest(need.requests_per_connection + 1, 1_000_000, &kept_for)
        {
            remedies.push(Remedy::CloseEvery(requests));
        }
        let fastest = need.rate_per_s.unwrap_or(course.rate * need.requests_per_connection as f64) as u64;
        // A lower rate needs fewer ports, so the search runs over the reduction of the rate.
        let slower = |less: u64| asked(&|changed| changed.rate_per_s = Some((fastest - less) as f64));
        if fastest > 1
            && let Some(less) = smallest(1, fastest - 1, &slower)
        {
            remedies.push(Remedy::Rate(fastest - less));
        }
    }
    let wide = PortRange::new(1024, u16::MAX).expect("1024 is below 65535");
    if snapshot.range.len() < wide.len() && with(&|changed| changed.range = wide) {
        remedies.push(Remedy::Range(wide.low(), wide.high()));
    }
    if snapshot.reuse().is_none() && snapshot.tcp_timestamps && with(&|changed| changed.tcp_tw_reuse = 1) {
        remedies.push(Remedy::TwReuse);
    }
    remedies
}

/// Returns the smallest sufficient number of sources: on loopback as a network, otherwise as a number.
fn sources(snapshot: &Snapshot, enough: &dyn Fn(u64) -> bool) -> Option<Remedy> {
    let destination = snapshot.destination?;
    match destination.ip().to_canonical() {
        IpAddr::V4(v4) if v4.is_loopback() => (20..=30).rev().find_map(|prefix| {
            let hosts = (1 << (32 - prefix)) - 2;
            (hosts > snapshot.sources && enough(hosts))
                .then_some(Remedy::SourceNetwork { network: Ipv4Addr::new(127, 0, 0, 0), prefix })
        }),
        _ => smallest(snapshot.sources + 1, MAX_SOURCES, enough).map(Remedy::Sources),
    }
}

/// Returns the smallest sufficient number from `low` to `high`, by bisection: each larger number must be sufficient too.
fn smallest(mut low: u64, mut high: u64, enough: &dyn Fn(u64) -> bool) -> Option<u64> {
    if low > high || !enough(high) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if enough(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

impl Remedy {
    /// Returns whether the text is an instruction, and not a setting.
    pub(super) fn is_instruction(&self) -> bool {
        matches!(self, Remedy::Wait(_) | Remedy::Other(_))
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::SourceNetwork { network, prefix } => write!(formatter, "--source {network}/{prefix}"),
            Remedy::Sources(count) => {
                write!(formatter, "--source with {}", counted(*count, "address"))
            }
            Remedy::CloseServer => formatter.write_str("--close server"),
            Remedy::Rate(per_s) => write!(formatter, "--rate {per_s}/s"),
            Remedy::CloseEvery(requests) => write!(formatter, "--close-every {requests}"),
            Remedy::Range(low, high) => {
                write!(formatter, "sysctl net.ipv4.ip_local_port_range=\"{low} {high}\"")
            }
            Remedy::TwReuse => formatter.write_str("sysctl net.ipv4.tcp_tw_reuse=1"),
            Remedy::Wait(time) => write!(formatter, "wait {}", format_time(*time)),
            Remedy::Connections(count) => write!(formatter, "--connections {count}"),
            Remedy::Engine(name) => write!(formatter, "--engine {name}"),
            Remedy::Threads(count) => write!(formatter, "--threads {count}"),
            Remedy::Other(words) => formatter.write_str(words),
        }
    }
}
