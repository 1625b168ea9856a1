use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, Snapshot};

use crate::budget::{Budget, is_tcp};
use crate::draft::{Draft, Remedy};
use crate::remedies::{NODE_PORTS, blocks, lasting_sysctls, listening_ports, merged, node_port_server};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P05",
    title: "ports of servers are inside of the port range",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports, names of processes",
    threshold: Some(Threshold { default: 10.0, unit: "% of the usable ports in use by connections" }),
    explanation: &[
        "A server with a port inside of net.ipv4.ip_local_port_range competes with outgoing connections. While the server runs it holds its port, and \
         connect() passes over the port. When the server stops, connect() of any program can take the port, and bind() of the restarted server \
         fails with EADDRINUSE until that connection is gone, TIME_WAIT included (inet_csk_get_port). SO_REUSEADDR of the server helps only \
         if the connection's socket has it too.",
        "The rule has a finding if outgoing connections of one source use a share of the ports past the threshold: this share is about \
         the probability that a restart fails. Servers that bind to port 0 choose a port of the range on purpose; for them ignore the finding.",
        "NodePorts of Kubernetes (30000 to 32767) are inside of a range that was widened. kube-proxy up to 1.26 opens a socket for each NodePort and \
         cannot if a connection has the port; later versions redirect packets to the port whatever local sockets exist. The rule knows the \
         servers of NodePorts by the names of their processes.",
        "What helps: the ports in net.ipv4.ip_local_reserved_ports, which connect() passes over and bind() by number ignores; a range that does not \
         include them.",
        "What does not help: SO_REUSEPORT of the server, which shares the port only with sockets of the same user that have the option.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let connections = snapshot.connections.seen()?;
    let listening = listening_ports(snapshot);
    let listening = listening.ok_or_else(|| snapshot.listeners.seen().err().unwrap_or_default())?;
    let exposed: Vec<u16> = listening.into_iter().filter(|port| ports.contains(*port)).collect();
    let node_ports =
        node_port_server(snapshot).filter(|_| (NODE_PORTS.0..=NODE_PORTS.1).any(|port| ports.contains(port)));
    let Some(largest) = connections.tuples.first() else { return Ok(Vec::new()) };
    let budget = Budget::of(snapshot, largest)?;
    // Ports in TIME_WAIT that connect() may take again are closed to bind() all the same.
    let is_past = f64::from(budget.in_use) >= f64::from(budget.total) * limit / 100.0;
    if budget.in_use == 0 || !is_past || (exposed.is_empty() && node_ports.is_none()) {
        return Ok(Vec::new());
    }
    let chance = (100 * u64::from(budget.in_use)).checked_div(budget.total.into()).unwrap_or(100).min(100);
    let shown: Vec<String> = exposed.iter().take(5).map(|port| listener(snapshot, *port)).collect();
    let more = if exposed.len() > 5 { format!(" and {} more", exposed.len() - 5) } else { String::new() };
    let what = match &node_ports {
        Some(server) if exposed.is_empty() => format!("{server} serves NodePorts 30000-32767"),
        _ => format!("{}{more} listen on ports", shown.join(", ")),
    };
    let verdict = format!(
        "{what} inside of the range {}-{}: {} uses {} of {} ports, so that a restart fails with EADDRINUSE with a probability of about {chance}%",
        ports.low,
        ports.high,
        tuple(largest),
        count(budget.in_use.into()),
        count(budget.total.into())
    );
    let severity = if chance >= 50 { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "net.ipv4.ip_local_reserved_ports", verdict);
    let mut reserved = ports.reserved.clone();
    reserved.extend(exposed.iter().map(|port| (*port, *port)));
    if let Some(server) = node_ports {
        draft = draft.because(format!("{server} serves NodePorts 30000-32767"));
        reserved.push(NODE_PORTS);
    }
    let effect = "connect() passes over these ports; bind() by number still works";
    Ok(vec![
        draft
            .now(Remedy::sysctl("net.ipv4.ip_local_reserved_ports", blocks(&merged(reserved)), effect))
            .proper(lasting_sysctls()),
    ])
}

/// Returns `nginx[812] (35000)`.
fn listener(snapshot: &Snapshot, port: u16) -> String {
    let listed = snapshot.listeners.seen().ok();
    let listed = listed.and_then(|all| all.iter().find(|listener| listener.address.port() == port));
    let held = || {
        let held = &snapshot.connections.seen().ok()?.held;
        held.iter().filter(is_tcp).find(|held| held.port == port)?.owner.as_ref()
    };
    let owner: Option<&Owner> = listed.and_then(|listener| listener.owners.first()).or_else(held);
    format!("{} ({port})", owner.map_or_else(|| "a process".to_owned(), process))
}
