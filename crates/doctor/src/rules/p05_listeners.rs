use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, SelfConnected, Snapshot, Source, merged};

use crate::command::Scope;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::{NODE_PORTS, blocks, lasting_sysctls, node_port_server};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, process};

pub(super) const RULE: Rule = Rule {
    id: "P05",
    title: "ports of servers are inside of the port range",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports, names of processes",
    threshold: Some(Threshold {
        default: 10.0,
        unit: "% of the usable ports in use by connections of a source",
    }),
    explanation: &[
        "A server with a port inside of net.ipv4.ip_local_port_range competes with outgoing connections. While the server runs it holds its port, and \
         connect() passes over the port. When the server stops, connect() of any program can take the port, and bind() of the restarted server \
         fails with EADDRINUSE until that connection is gone, TIME_WAIT included (inet_csk_get_port). SO_REUSEADDR of the server helps only \
         if the connection's socket has it too.",
        "The rule has a finding if outgoing connections from an address that the server listens on use a share of the ports past the \
         threshold: this share is about the probability that a restart fails. Servers that bind to port 0 choose a port of the range on purpose; for them ignore the finding.",
        "While the server is down, a connect() to its port, such as a health check, can choose this very port as its source: the socket is then \
         connected to itself, and the server cannot start. The rule has a finding for each such connection.",
        "NodePorts of Kubernetes (30000 to 32767) are inside of a range that was widened. Older versions of kube-proxy open a socket for each NodePort and \
         cannot if a connection has the port; newer versions redirect packets to the port without regard to local sockets. The rule knows the \
         servers of NodePorts by the names of their processes.",
        "What helps: the ports in net.ipv4.ip_local_reserved_ports, which connect() passes over and bind() by number ignores; a range that does not \
         include them.",
        "What does not help: SO_REUSEPORT of the server, which shares the port only with sockets of the same user that have the option.",
    ],
    check,
};

/// A listener inside of the range.
struct Exposed {
    address: IpAddr,
    port: u16,
    owner: Option<Owner>,
}

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let usable = ports.usable();
    let sources = &snapshot.connections.seen()?.sources;
    let is_past =
        |source: &&Source| source.in_use > 0 && f64::from(source.in_use) >= f64::from(usable) * limit / 100.0;
    // A connection takes the port of a listener if the listener has its source address or all addresses.
    let meets = |address: IpAddr| {
        sources.iter().filter(is_past).find(|source| address.is_unspecified() || address == source.address)
    };
    let mut drafts: Vec<Draft> =
        snapshot.connections.seen()?.self_connected.iter().map(|found| to_itself(snapshot, found)).collect();
    let listeners = listeners(snapshot)?;
    let inside = listeners.into_iter().filter(|listener| ports.contains(listener.port));
    let exposed: Vec<(Exposed, &Source)> =
        inside.filter_map(|listener| meets(listener.address).map(|source| (listener, source))).collect();
    let node_ports =
        node_port_server(snapshot).filter(|_| (NODE_PORTS.0..=NODE_PORTS.1).any(|port| ports.contains(port)));
    let largest = exposed.iter().map(|(_, source)| *source).max_by_key(|source| source.in_use);
    let any_source = || node_ports.as_ref().and_then(|_| sources.iter().find(is_past));
    let Some(source) = largest.or_else(any_source) else { return Ok(drafts) };
    let chance = (100 * u64::from(source.in_use)).checked_div(usable.into()).unwrap_or(100).min(100);
    let shown: Vec<String> = exposed.iter().take(5).map(|(exposed, _)| listener(exposed)).collect();
    let more = if exposed.len() > 5 { format!(" and {} more", exposed.len() - 5) } else { String::new() };
    let what = match &node_ports {
        Some(server) if exposed.is_empty() => format!("{server} serves NodePorts 30000-32767"),
        _ => format!("{}{more} listen on ports", shown.join(", ")),
    };
    let verdict = format!(
        "{what} inside of the range {}-{}: connections from {} use {} of {} ports, so that a restart fails with EADDRINUSE with a probability of \
         about {chance}%",
        ports.low,
        ports.high,
        source.address,
        count(source.in_use.into()),
        count(usable.into())
    );
    let severity = if chance >= 50 { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "net.ipv4.ip_local_reserved_ports", verdict);
    let mut reserved = ports.reserved.clone();
    reserved.extend(exposed.iter().map(|(exposed, _)| (exposed.port, exposed.port)));
    if let Some(server) = node_ports {
        draft = draft.because(format!("{server} serves NodePorts 30000-32767"));
        reserved.push(NODE_PORTS);
    }
    let effect = "connect() passes over these ports; bind() by number still works";
    drafts.push(
        draft
            .now(Remedy::sysctl("net.ipv4.ip_local_reserved_ports", blocks(&merged(reserved)), effect))
            .proper(lasting_sysctls()),
    );
    Ok(drafts)
}

/// A connection that keeps the port of a server that does not run.
fn to_itself(snapshot: &Snapshot, found: &SelfConnected) -> Draft {
    let address = found.address;
    let owner = found.owner.as_ref().map_or_else(|| "a socket in TIME_WAIT".to_owned(), process);
    let verdict = format!(
        "{owner} is connected to itself at {address}: bind() of a server to this port fails with EADDRINUSE until the connection has ended"
    );
    let mut reserved = snapshot.ports.seen().map(|ports| ports.reserved.clone()).unwrap_or_default();
    reserved.push((address.port(), address.port()));
    let reserve = Remedy::sysctl(
        "net.ipv4.ip_local_reserved_ports",
        blocks(&merged(reserved)),
        "connect() chooses this port no more; the connection of now stays",
    );
    let any = SocketAddr::new(
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() },
        address.port(),
    );
    let refused = |address: SocketAddr| What::Calls {
        call: "bind",
        errno: errno::EADDRINUSE,
        process: None,
        address: Some(address.to_string()),
    };
    Draft::new(Severity::Warning, format!("{address} to itself"), verdict)
        .explains(refused(address))
        .explains(refused(any))
        .because("connect() to a local port of the range without a listener can choose this very port as its source (RFC 9293, simultaneous open)")
        .now(Remedy::privileged(
            Scope::Namespace,
            format!("ss -K src '{address}' dst '{address}'"),
            "closes the connection, where the kernel has CONFIG_INET_DIAG_DESTROY; otherwise restart the process",
        ))
        .now(reserve.unproven())
        .proper(lasting_sysctls())
        .proper(Remedy::advice(
            format!("in {owner}: compare getsockname() with getpeername() after connect() to a local service, and close if they are equal"),
            "the attempt then counts as refused",
        ))
}

/// Returns the listeners, each port and address once.
fn listeners(snapshot: &Snapshot) -> Result<Vec<Exposed>, String> {
    let listeners = snapshot.listeners.seen()?.iter().map(|listener| Exposed {
        address: listener.address.ip(),
        port: listener.address.port(),
        owner: listener.owners.first().cloned(),
    });
    let held = snapshot.connections.seen()?.held.iter().filter(|held| held.kind == "listening");
    let held = held.map(|held| Exposed { address: held.address, port: held.port, owner: held.owner.clone() });
    let mut all: Vec<Exposed> = listeners.chain(held).collect();
    all.sort_by_key(|exposed| (exposed.port, exposed.address));
    all.dedup_by_key(|exposed| (exposed.port, exposed.address));
    Ok(all)
}

/// Returns `nginx[812] (35000)`.
fn listener(exposed: &Exposed) -> String {
    let name = exposed.owner.as_ref().map_or_else(|| "a process".to_owned(), process);
    format!("{name} ({})", exposed.port)
}
