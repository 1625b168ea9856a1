use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, merged};

use crate::budget::Budget;
use crate::draft::{Draft, Remedy};
use crate::remedies::{NODE_PORTS, blocks, lasting_sysctls, listening_ports, node_port_server, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, percent, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P04",
    title: "reserved ports consume the port range",
    source: "net.ipv4.ip_local_reserved_ports, net.ipv4.ip_local_port_range, sock_diag(7) (inet_diag)",
    threshold: Some(Threshold { default: 25.0, unit: "% of the range reserved" }),
    explanation: &[
        "connect() and bind() to port 0 pass over the ports in net.ipv4.ip_local_reserved_ports (inet_is_local_reserved_port). The list keeps ports \
         free for servers that bind by number; bind() to such a port is not affected.",
        "A list that covers much of net.ipv4.ip_local_port_range, such as 32768-50000 for one program, takes these ports from all connections. \
         The search also passes over each of them, which costs time.",
        "The rule has a finding if the reserved share of the range is past the threshold and a source and a destination use a quarter of the \
         ports that are left. Without such a use the list does no harm.",
        "What helps: a list with only the ports that servers use; a wider range. Both act at once.",
        "What does not help: IP_LOCAL_PORT_RANGE of a socket, whose search passes over reserved ports too.",
    ],
    check,
};

/// The share of the remaining ports in use that makes the reservation matter, in percent.
const MATTERS: f64 = 25.0;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let reserved = ports.range() - ports.usable();
    let Some(largest) = snapshot.connections.seen()?.tuples.first() else { return Ok(Vec::new()) };
    let budget = Budget::of(snapshot, largest)?;
    let is_large = f64::from(reserved) >= f64::from(ports.range()) * limit / 100.0;
    if reserved == 0 || !is_large || !budget.is_past(MATTERS) {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} of the {} ports of the range are reserved ({}); {} uses {} of the {} that are left",
        count(reserved.into()),
        count(ports.range().into()),
        percent(reserved.into(), ports.range().into()),
        tuple(largest),
        count(budget.taken().into()),
        count(budget.total.into())
    );
    // Without the reservation the connections would fit.
    let is_cause = f64::from(budget.taken()) < f64::from(ports.range() - budget.held) * 0.9;
    let severity = match (budget.is_full() && is_cause, budget.is_past(90.0)) {
        (true, _) => Severity::Critical,
        (false, true) => Severity::Warning,
        (false, false) => Severity::Notice,
    };
    let inside = |&(first, last): &(u16, u16)| first <= ports.high && last >= ports.low;
    let listed: Vec<(u16, u16)> = ports.reserved.iter().copied().filter(inside).take(10).collect();
    let mut draft = Draft::new(severity, "net.ipv4.ip_local_reserved_ports", verdict)
        .because(format!("reserved inside of the range: {}", blocks(&listed)));
    let name = "net.ipv4.ip_local_reserved_ports";
    let configured = snapshot.configured.seen().map(Vec::as_slice).unwrap_or_default();
    for line in configured.iter().filter(|line| line.name == name).take(3) {
        draft = draft.because(format!("{}:{} sets it at boot", line.file, line.line));
    }
    // First what takes no port from a server that does not run now.
    draft.now.extend(wider_range(snapshot, Some(largest)));
    draft.now.extend(needed_only(snapshot));
    Ok(vec![draft.proper(lasting_sysctls()).proper(Remedy::advice(
        "remove blocks from net.ipv4.ip_local_reserved_ports in /etc/sysctl.conf and /etc/sysctl.d that no server needs",
        "the change lasts",
    ))])
}

/// The reserved ports that are outside of the range or have a listener.
fn needed_only(snapshot: &Snapshot) -> Option<Remedy> {
    let ports = snapshot.ports.seen().ok()?;
    let listening = listening_ports(snapshot)?;
    let is_reserved = |port: u16| ports.reserved.iter().any(|&(first, last)| (first..=last).contains(&port));
    let mut kept: Vec<(u16, u16)> = Vec::new();
    for &(first, last) in &ports.reserved {
        // The parts of a block before and after the range.
        if first < ports.low {
            kept.push((first, last.min(ports.low - 1)));
        }
        if last > ports.high {
            kept.push((first.max(ports.high + 1), last));
        }
    }
    kept.extend(listening.into_iter().filter(|port| is_reserved(*port)).map(|port| (port, port)));
    if node_port_server(snapshot).is_some() && is_reserved(NODE_PORTS.0) {
        kept.push(NODE_PORTS);
    }
    let list = blocks(&merged(kept));
    let name = "net.ipv4.ip_local_reserved_ports";
    let effect = "gives up the ports that were reserved without a listener now: first add the ports of servers that do not run at the moment";
    Some(Remedy::sysctl(name, list, effect))
}
