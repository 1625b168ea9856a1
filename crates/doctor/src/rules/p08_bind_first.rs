use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Source, TracedConnects, Tuple};

use crate::attribute::{unknown_user, users};
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::{print_name, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{caller, count, counted, process};

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
         before 2026-07 (`fourtuple fix --print envoy`). `fourtuple run --via bound` sets it for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR, which does not let connect() of another program take the port; `fourtuple fix ports`, which leaves \
         sockets alone that called bind(), as does `fourtuple run` by its way `cgroup`.",
    ],
    check,
};

/// Fewer ports can have one parity by chance.
const MIN_IN_USE: u32 = 20;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let usable = snapshot.ports.seen()?.usable();
    let connections = snapshot.connections.seen()?;
    let is_past = |source: &&Source| {
        source.in_use >= MIN_IN_USE && f64::from(source.in_use) >= f64::from(usable) * limit / 100.0
    };
    let is_seen_otherwise =
        |source: &&Source| given_ports(snapshot, source).is_some_and(|(given, _)| given == 0);
    let has_parity = |source: &Source| {
        u64::from(source.in_use.saturating_sub(source.low_parity)) * 100 >= u64::from(source.in_use) * 95
    };
    let drafts = connections.sources.iter().filter(is_past).filter(|source| !is_seen_otherwise(source)).filter_map(|source| {
        let fact = if has_parity(source) {
            let odd = snapshot.ports.seen().is_ok_and(|ports| ports.low & 1 == 0);
            format!(
                "{} of {} ports are {}; connect() without a port begins with the others",
                count(source.in_use.saturating_sub(source.low_parity).into()),
                count(source.in_use.into()),
                if odd { "odd" } else { "even" }
            )
        } else if connections.tuples_left_out == 0 && shares_none(source, &connections.tuples, usable) {
            "no two destinations share a port; connect() without bind() gives the same ports to several destinations".to_owned()
        } else {
            return None;
        };
        Some(draft(snapshot, source, usable, fact))
    });
    Ok(drafts.collect())
}

/// Returns the traced calls of connect() from a port that was already bound, and all traced calls, of the largest process of a source to its
/// destinations; `None`: no such call was traced. Calls to other destinations say nothing of this source.
fn given_ports(snapshot: &Snapshot, source: &Source) -> Option<(u64, u64)> {
    let owner = source.owners.first()?;
    let connects = snapshot.traced.seen().ok()?.connects.iter();
    let tuples = &snapshot.connections.seen().ok()?.tuples;
    let is_own = |connects: &&TracedConnects| {
        let is_its =
            |tuple: &Tuple| tuple.source == source.address && tuple.destination == connects.destination;
        caller(&connects.owner, connects.processes).pid == owner.pid && tuples.iter().any(is_its)
    };
    let of_owner = connects.filter(is_own);
    let (given, calls) = of_owner.fold((0, 0), |(given, calls), connects| {
        (given + connects.given_port, calls + u64::from(connects.owner.sockets))
    });
    (calls > 0).then_some((given, calls))
}

/// Returns whether the destinations of a source share no port although ports that connect() chose would coincide: of the ports of the first
/// parity, which connect() takes first, two destinations with a and b ports would share about 2ab / usable.
fn shares_none(source: &Source, tuples: &[Tuple], usable: u32) -> bool {
    const MIN_SHARED: f64 = 10.0;
    let ports: Vec<u32> =
        tuples.iter().filter(|tuple| tuple.source == source.address).map(|tuple| tuple.in_use).collect();
    let sum: u32 = ports.iter().sum();
    let squares: f64 = ports.iter().map(|ports| f64::from(*ports).powi(2)).sum();
    let expected = (f64::from(sum).powi(2) - squares) / f64::from(usable.max(1));
    let shared = f64::from(sum.saturating_sub(source.in_use));
    expected >= MIN_SHARED && shared * 20.0 <= expected
}

fn draft(snapshot: &Snapshot, source: &Source, usable: u32, fact: String) -> Draft {
    let Source { address, in_use, destinations, .. } = source;
    let owner = source.owners.first();
    let unknown = owner.is_none().then(|| unknown_user(snapshot, *address));
    let name = match (owner, &unknown) {
        (Some(owner), _) => process(owner),
        (None, Some((_, perhaps))) if perhaps.len() == 1 => {
            format!("a process (perhaps {})", process(&perhaps[0].0))
        }
        _ => "a process".to_owned(),
    };
    let verdict = format!(
        "{name} seems to call bind() to {address} without IP_BIND_ADDRESS_NO_PORT: {} together have {} of {} ports",
        counted(*destinations, "destination"),
        count((*in_use).into()),
        count(usable.into())
    );
    let is_near = u64::from(*in_use) * 100 >= u64::from(usable) * 80;
    let severity = if *in_use >= usable {
        Severity::Critical
    } else if is_near {
        Severity::Warning
    } else {
        Severity::Notice
    };
    let mut draft = Draft::new(severity, address.to_string(), verdict).because(fact);
    if *in_use >= usable {
        draft = draft.because("the next bind() to this address and port 0 fails with EADDRINUSE");
    }
    if let Some((given, calls)) = given_ports(snapshot, source) {
        let fact = format!(
            "the trace saw {} of {} calls of connect() from a port that bind() had chosen",
            count(given),
            count(calls)
        );
        draft = draft.because(fact);
    }
    for owner in &source.owners {
        let process = Some(owner.pid).filter(|pid| *pid != 0);
        draft =
            draft.explains(What::Calls { call: "bind", errno: errno::EADDRINUSE, process, address: None });
    }
    for owner in source.owners.iter().take(3).filter(|owner| owner.sockets > 0) {
        draft = draft.because(format!("{}: {}", process(owner), counted(owner.sockets.into(), "socket")));
    }
    if source.owners.iter().all(|owner| owner.sockets == 0) {
        // TIME_WAIT sockets belong to no process.
        for (owner, how) in users(snapshot, *address).iter().take(3) {
            draft = draft.because(format!("the sockets are in TIME_WAIT; {}: {how}", process(owner)));
        }
    }
    if let Some((why, perhaps)) = unknown {
        draft = draft.because(why);
        for (owner, how) in perhaps.iter().take(3) {
            draft = draft.because(format!("perhaps {}: {how}", process(owner)));
        }
        draft = draft.now(Remedy::own("trace connect --for 30s", "names the process when it connects again"));
    }
    draft.now.extend(wider_range(snapshot, None));
    if let Some(program) = owner.and_then(|owner| print_name(&owner.name)) {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        draft = draft.proper(Remedy::own(
            format!("fix --print {program} --source {address}/{prefix}"),
            format!("prints the configuration or code of {program} with the option, ready to paste"),
        ));
    }
    draft
        .proper(Remedy::advice(
            "in the program: setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &(int){1}, 4) before bind()",
            "connect() chooses the port: each destination has the whole range",
        ))
        .proper(Remedy::advice(
            "restart the program with `fourtuple run --via bound -- PROGRAM`",
            "sets the option without a change of the program (ways `preload` and `supervise`)",
        ))
}
