use std::time::Duration;

use fourtuple::ports::TIME_WAIT;
use fourtuple_measure::words::{counted, grouped, percent};
use fourtuple_record::format_time;

use crate::preflight::forecast::{ASSUMED_CONNECTIONS_PER_S, RateSource, TupleUsage};
use crate::preflight::{Closer, Finding, Need, Remedy, Severity, Snapshot, Transport, remedy};

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
    let remedies = remedy::for_ports(snapshot, need);
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
    // TIME_WAIT sockets that connect() reuses are no obstacle.
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
    let room = if need.engine_needs_descriptors {
        allowed.saturating_sub(beside)
    } else {
        allowed.saturating_sub(1).saturating_mul(threads)
    };
    let room = room.saturating_sub(need.hold);
    if room > 0 {
        remedies.push(Remedy::Connections(room));
    }
    if needs > limits.hard {
        remedies.push(Remedy::Other(format!("raise the hard limit with ulimit -Hn {needs} (as root)")));
    }
    Some(finding("descriptors", Severity::Refuse, message, remedies))
}

fn tracking(snapshot: &Snapshot, need: &Need, course: &TupleUsage) -> Option<Finding> {
    // An empty table means that no rule uses connection tracking.
    let table = snapshot.conntrack.filter(|table| table.count > 0)?;
    let room = table.max.saturating_sub(table.count);
    let tracked = if need.closer == Closer::Reset { TRACKED_AFTER_RESET } else { TRACKED };
    let certain = course.at_once.saturating_add(need.hold);
    let churn = if course.churns { course.opened_in(tracked.as_secs_f64()) } else { 0 };
    // An entry stands for a 4-tuple: a reused 4-tuple needs no further entry.
    let at_most = churn.max(course.at_most).saturating_add(need.hold).min(snapshot.budget());
    let (severity, entries) = if certain > room {
        (Severity::Refuse, certain)
    } else if at_most > room {
        (Severity::Warn, at_most)
    } else {
        return None;
    };
    let message = format!(
        "{} to track, the connection tracking has room for {} (nf_conntrack_max {}, {} used): new connections {} \
         dropped when it is full",
        counted(entries, "tuple"),
        grouped(room),
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
    let room = snapshot.tcp_max_tw_buckets.saturating_sub(snapshot.time_wait);
    let sockets = course.opened_in(TIME_WAIT.as_secs_f64()).min(course.steady());
    (sockets > room).then(|| {
        let message = format!(
            "up to {} in TIME_WAIT, net.ipv4.tcp_max_tw_buckets leaves room for {} ({} there): the rest \
             are closed without TIME_WAIT, unlike the sockets of real clients",
            counted(sockets, "socket"),
            grouped(room),
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
            _ => "what does not fit is dropped and comes again after 1 s, 3 s, 7 s",
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
