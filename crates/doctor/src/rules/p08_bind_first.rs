use std::collections::BTreeMap;
use std::net::IpAddr;

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, Snapshot};

use crate::draft::{Draft, Remedy};
use crate::remedies::{print_name, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, process};

pub(super) const RULE: Rule = Rule {
    id: "P08",
    title: "bind() before connect() without IP_BIND_ADDRESS_NO_PORT",
    source: "parity of the source ports in sock_diag(7), net.ipv4.ip_local_port_range",
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
         the ports of a source and a process have the other parity, and connect() had no reason for it, because less than 90% of the first parity \
         is in use by the tuple. Ports that were chosen by number or by a linear search have both parities and give no finding.",
        "What helps: the option in the program. nginx and HAProxy set it themselves for proxy_bind and source; Envoy needs socket_options \
         before 2026-07 (`fourtuple fix --print envoy`). `fourtuple run` sets it for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR, which does not let connect() of another program take the port; `fourtuple fix ports`, which leaves \
         sockets alone that called bind().",
    ],
    check,
};

/// Fewer ports can have one parity by chance.
const FEWEST: u32 = 20;

/// The ports of a process on a source address.
#[derive(Default)]
struct Sum {
    ports: u32,
    other_parity: u32,
    destinations: u32,
    owner: Option<Owner>,
}

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let usable = ports.usable();
    let mut sums: BTreeMap<(IpAddr, Option<u32>), Sum> = BTreeMap::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        // connect() itself goes on to the other parity.
        if u64::from(tuple.low_parity) * 2 * 100 >= u64::from(usable) * 90 {
            continue;
        }
        let owner = tuple.owners.first();
        let sum = sums.entry((tuple.source, owner.map(|owner| owner.pid))).or_default();
        sum.ports += tuple.in_use;
        sum.other_parity += tuple.in_use - tuple.low_parity;
        sum.destinations += 1;
        sum.owner = owner.cloned();
    }
    let is_bound = |sum: &Sum| {
        sum.ports >= FEWEST
            && f64::from(sum.ports) >= f64::from(usable) * limit / 100.0
            && u64::from(sum.other_parity) * 100 >= u64::from(sum.ports) * 95
    };
    let bound = sums.into_iter().filter(|(_, sum)| is_bound(sum));
    Ok(bound.map(|((source, _), sum)| draft(snapshot, source, &sum, usable)).collect())
}

fn draft(snapshot: &Snapshot, source: IpAddr, sum: &Sum, usable: u32) -> Draft {
    let name = sum.owner.as_ref().map_or_else(|| "a process".to_owned(), process);
    let parity = match snapshot.ports.seen() {
        Ok(ports) if ports.low & 1 == 1 => "even",
        _ => "odd",
    };
    let verdict = format!(
        "{name} calls bind() to {source} without IP_BIND_ADDRESS_NO_PORT: {} of its {} ports are {parity}; all destinations together have {} ports",
        count(sum.other_parity.into()),
        count(sum.ports.into()),
        count(usable.into())
    );
    let severity = if u64::from(sum.ports) * 100 >= u64::from(usable) * 80 {
        Severity::Warning
    } else {
        Severity::Notice
    };
    let mut draft = Draft::new(severity, format!("{name} from {source}"), verdict).because(format!(
        "{} destinations; connect() alone would choose ports of the other parity",
        count(sum.destinations.into())
    ));
    draft.now.extend(wider_range(snapshot));
    if let Some(program) = sum.owner.as_ref().and_then(|owner| print_name(&owner.name)) {
        draft = draft.proper(Remedy::unproven(
            format!(
                "fourtuple fix --print {program} --source {source}/{}",
                if source.is_ipv4() { 32 } else { 128 }
            ),
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
