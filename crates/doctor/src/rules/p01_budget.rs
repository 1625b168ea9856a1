use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, percent, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P01",
    title: "the ports of a source and destination run out",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports",
    threshold: Some(Threshold { default: 90.0, unit: "% of the usable ports" }),
    explanation: &[
        "A connection is identified by source address, source port, destination address and destination port. Connections from one source \
         address to one destination differ in the source port only, so that at most one connection per port of \
         net.ipv4.ip_local_port_range can exist at a time. With none left, connect() fails with EADDRNOTAVAIL (__inet_hash_connect).",
        "The side that closes first keeps the connection in TIME_WAIT for 60 s (TCP_TIMEWAIT_LEN). With N usable ports and short connections, a \
         client that closes first can therefore open N / 60 connections per second to one destination, for ever.",
        "What helps: more source addresses, more destination addresses or ports, connections that are used again, or a server that closes \
         first. A wider range helps by the ratio of the widths.",
    ],
    check,
};

/// TCP_TIMEWAIT_LEN in seconds (include/net/tcp.h).
const TIME_WAIT_SECONDS: f64 = 60.0;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let usable = snapshot.ports.seen()?.usable();
    let connections = snapshot.connections.seen()?;
    let is_past = |tuple: &&Tuple| f64::from(tuple.in_use) >= f64::from(usable) * limit / 100.0;
    Ok(connections.tuples.iter().filter(is_past).map(|tuple| draft(tuple, usable)).collect())
}

fn draft(subject: &Tuple, usable: u32) -> Draft {
    let time_wait = subject.states.get("time-wait").copied().unwrap_or(0);
    let sockets: u64 = subject.states.values().sum();
    let closer = subject.owners.first().map_or_else(|| "this host".to_owned(), process);
    let ceiling = f64::from(usable) / TIME_WAIT_SECONDS;
    let mut verdict =
        format!("{} uses {} of {} ports", tuple(subject), count(subject.in_use.into()), count(usable.into()));
    if time_wait > 0 {
        verdict += &format!(", {} of them in TIME_WAIT", percent(time_wait, sockets));
    }
    if subject.closes_per_s > 0.0 {
        verdict +=
            &format!("; {closer} closes first, {:.0}/s; the ceiling is {ceiling:.0}/s", subject.closes_per_s);
    } else if let Some(owner) = subject.owners.first() {
        verdict += &format!("; {} has {} of the connections", process(owner), count(owner.sockets.into()));
    }
    let is_full = subject.in_use >= usable;
    let severity = if is_full { Severity::Critical } else { Severity::Warning };
    Draft::new(severity, tuple(subject), verdict).now(Remedy::sysctl(
        "net.ipv4.ip_local_port_range",
        "1024 65535",
        "64,512 ports",
    ))
}
