use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Source};

use crate::draft::{Draft, Remedy};
use crate::remedies::{print_name, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, process};

pub(super) const RULE: Rule = Rule {
    id: "P08",
    title: "bind() before connect() without IP_BIND_ADDRESS_NO_PORT",
    source: "parity of the source ports in sock_diag(7), net.ipv4.ip_local_port_range; ports given by bind() (`fourtuple trace connect`)",
    threshold: Some(Threshold { default: 20.0, unit: "% of the usable ports" }),
    explanation: &[
        "A program that selects its source address with bind(address, port 0) gets a port at once, before the kernel knows the destination. The \
         kernel then takes a port that no other socket of the address has (inet_csk_get_port): the source address has at most as many \
         connections as ports, over all destinations together. connect() of other programs passes over these ports too. At the end bind() fails \
         with EADDRINUSE.",
        "With IP_BIND_ADDRESS_NO_PORT (option 24 at level IPPROTO_IP, Linux 4.2) bind() sets the address only, connect() chooses the port, and \
         connections to different destinations share ports.",
        "Which call chose a port is visible in the port: connect() begins with ports of the parity of the first port of the range \
         (__inet_hash_connect), bind() to port 0 with the other parity (inet_csk_find_open_port). The rule has a finding if at least 95% of \
         the ports of a source address have the other parity. Ports that were chosen by number or by a linear search have both parities \
         and give no finding. connect() itself takes the other parity once the first is full; only if all older connections then close, and no \
         new ones follow, does the rule see bind() where there was none. A trace decides: without a call from a bound port there is no finding.",
        "What helps: the option in the program. nginx and HAProxy set it themselves for proxy_bind and source; Envoy needs socket_options \
         before 2026-07 (`fourtuple fix --print envoy`). `fourtuple run` sets it for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR, which does not let connect() of another program take the port; `fourtuple fix ports`, which leaves \
         sockets alone that called bind().",
    ],
    check,
};

/// Fewer ports can have one parity by chance.
const FEWEST: u32 = 20;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let usable = snapshot.ports.seen()?.usable();
    let is_bound = |source: &&Source| {
        source.in_use >= FEWEST
            && f64::from(source.in_use) >= f64::from(usable) * limit / 100.0
            && u64::from(source.in_use.saturating_sub(source.low_parity)) * 100
                >= u64::from(source.in_use) * 95
    };
    let sources = &snapshot.connections.seen()?.sources;
    let is_seen_otherwise =
        |source: &&Source| given_ports(snapshot, source).is_some_and(|(given, _)| given == 0);
    Ok(sources
        .iter()
        .filter(is_bound)
        .filter(|source| !is_seen_otherwise(source))
        .map(|source| draft(snapshot, source, usable))
        .collect())
}

/// Returns the traced calls of connect() from a port that was already bound, and all traced calls, of the largest process of a source;
/// `None`: no call was traced.
fn given_ports(snapshot: &Snapshot, source: &Source) -> Option<(u64, u64)> {
    let owner = source.owners.first()?;
    let connects = snapshot.traced.seen().ok()?.connects.iter();
    let of_owner = connects.filter(|connects| connects.owner.pid == owner.pid);
    let (given, calls) = of_owner.fold((0, 0), |(given, calls), connects| {
        (given + connects.given_port, calls + u64::from(connects.owner.sockets))
    });
    (calls > 0).then_some((given, calls))
}

fn draft(snapshot: &Snapshot, source: &Source, usable: u32) -> Draft {
    let Source { address, in_use, low_parity, destinations, .. } = source;
    let owner = source.owners.first();
    let name = owner.map_or_else(|| "a process".to_owned(), process);
    let parity = match snapshot.ports.seen() {
        Ok(ports) if ports.low & 1 == 1 => "even",
        _ => "odd",
    };
    let verdict = format!(
        "{name} seems to call bind() to {address} without IP_BIND_ADDRESS_NO_PORT: {} of {} ports are {parity}; {} together have \
         {} ports",
        count(in_use.saturating_sub(*low_parity).into()),
        count((*in_use).into()),
        counted(*destinations, "destination"),
        count(usable.into())
    );
    let is_near = u64::from(*in_use) * 100 >= u64::from(usable) * 80;
    let severity = if is_near { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, address.to_string(), verdict)
        .because("connect() without a port begins with ports of the other parity");
    if let Some((given, calls)) = given_ports(snapshot, source) {
        let fact = format!(
            "the trace saw {} of {} calls of connect() from a port that bind() had chosen",
            count(given),
            count(calls)
        );
        draft = draft.because(fact);
    }
    for owner in source.owners.iter().take(3) {
        draft = draft.because(format!("{}: {} sockets", process(owner), count(owner.sockets.into())));
    }
    draft.now.extend(wider_range(snapshot));
    if let Some(program) = owner.and_then(|owner| print_name(&owner.name)) {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        draft = draft.proper(Remedy::unproven(
            format!("fourtuple fix --print {program} --source {address}/{prefix}"),
            format!("prints the configuration or code of {program} with the option, ready to paste"),
        ));
    }
    draft
        .proper(Remedy::advice(
            "in the program: setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &(int){1}, 4) before bind()",
            "connect() chooses the port: each destination has the whole range",
        ))
        .proper(Remedy::advice(
            "restart the program with `fourtuple run -- PROGRAM`",
            "sets the option without a change of the program (ways `preload` and `supervise`)",
        ))
}
