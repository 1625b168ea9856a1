//! The budget of ports: the range, what is reserved and what is held.

use std::collections::BTreeMap;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{
    EphemeralPorts, HeldPort, Owner, SelfConnected, Snapshot, Source, Tuple, merged,
};

use crate::doctor::attribute::{Callers, Growth, Stuck, left_behind};
use crate::doctor::budget::{Budget, is_relieved};
use crate::doctor::command::Scope;
use crate::doctor::draft::{Draft, Remedy, What};
use crate::doctor::remedies::{
    DEFAULT_PORTS, DEFAULT_RANGE, NODE_PORTS, RANGE, blocks, default_range, drawn_ports, is_lasting,
    listening_ports, more_ports, more_sources, most_ports, node_port_server, printed, running_fix,
    wider_range,
};
use crate::doctor::rules::{Checked, Rule, Threshold};
use crate::doctor::words::{count, counted, percent, process, states};
use fourtuple_record::errno;

pub(super) const P01: Rule = Rule {
    id: "P01",
    title: "the ports of a source and destination run out",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports, net.ipv4.tcp_tw_reuse",
    threshold: Some(Threshold { default: 90.0, unit: "% of the usable ports" }),
    explanation: &[
        "A connection is identified by source address, source port, destination address and destination port. Connections from one source \
         address to one destination differ in the source port only, so that at most one connection per port of \
         net.ipv4.ip_local_port_range can exist at a time. With none left, connect() fails with EADDRNOTAVAIL (__inet_hash_connect).",
        "Ports in net.ipv4.ip_local_reserved_ports and ports that bind() or listen() holds are closed to every connect() and are not counted as \
         usable.",
        "The side that closes first keeps the connection in TIME_WAIT for 60 s (TCP_TIMEWAIT_LEN, a constant). With N usable ports, a client that \
         closes first can therefore open N / 60 connections per second to one destination, for ever. The verdict has this rate, and \
         the connections that this side closed first, from the remaining times of the TIME_WAIT sockets.",
        "Ports in TIME_WAIT do not count where connect() may take them again: with net.ipv4.tcp_tw_reuse = 1, or over loopback with 2 (the \
         default), after net.ipv4.tcp_tw_reuse_delay (1 s), if both sides have TCP timestamps (tcp_twsk_unique; T04).",
        "Ports whose connections are open and idle, while their number grows, are a leak: the verdict says so, from the times since the last data \
         (tcpi_last_data_sent, tcpi_last_data_recv). More ports, and more descriptors, then only postpone the failure.",
        "What helps: connections that are used again; more source addresses (`fourtuple fix ports --source`); more addresses or ports of the \
         destination; a server that closes first; net.ipv4.tcp_tw_reuse = 1 on the client. A wider range helps by the ratio of the widths.",
        "Ports in SYN_SENT, FIN_WAIT_1 or LAST_ACK wait for a peer that does not answer, those in FIN_WAIT_2 and CLOSE_WAIT for a close(), \
         there or here. Where most ports do, more ports would wait too, and the finding has what ends the wait.",
        "What does not help: net.ipv4.tcp_fin_timeout, unless most ports are in FIN_WAIT_2; a shorter search for a port, which finds no port that \
         is not there; more processes or threads, which share the ports.",
    ],
    check: p01,
};

fn p01(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if budget.is_past(limit) {
            drafts.push(draft_p01(snapshot, tuple, &budget));
        }
    }
    Ok(drafts)
}

fn draft_p01(snapshot: &Snapshot, subject: &Tuple, budget: &Budget) -> Draft {
    let Budget { total, in_use, time_wait, .. } = *budget;
    let mut verdict = format!("{} uses {} of {} ports", subject, count(in_use.into()), count(total.into()));
    if time_wait > 0 {
        verdict += &format!(", {} of them in TIME_WAIT", percent(time_wait.into(), in_use.into()));
    }
    if budget.closes_per_s > 0.0 {
        verdict += &format!("; {}", Callers::closed(snapshot, subject, budget));
    } else if let Some(leak) = Growth::of(snapshot, subject, budget).and_then(|growth| growth.leak()) {
        verdict += &format!("; {} {leak}", Callers::name(snapshot, subject));
    } else if let Some(callers) = Callers::of(snapshot, subject) {
        verdict += &match callers.owner.sockets {
            // Only a trace has seen the process.
            0 => format!("; {callers} calls connect()"),
            sockets if callers.are_many => {
                format!("; {callers}: at most {} each", counted(sockets.into(), "connection"))
            }
            sockets => format!("; {callers} has {} of the connections", count(sockets.into())),
        };
    }
    // New connections have other sources.
    let is_relieved = is_relieved(snapshot, subject);
    let severity = match (is_relieved, budget.is_full()) {
        (true, _) => Severity::Notice,
        (false, true) if !budget.is_presumed => Severity::Critical,
        (false, _) => Severity::Warning,
    };
    let held = (budget.held > 0).then(|| {
        format!(
            "bind() and listen() hold {} of the range (P05, P06)",
            counted(budget.held.into(), "more port")
        )
    });
    let mut draft = Draft::new(severity, subject, verdict)
        .because_if(narrow(snapshot, subject, budget))
        .because(format!("sockets: {}", states(&subject.states)))
        .because_if(left_behind(snapshot, subject))
        .because_if(held)
        .because_if(
            (subject.growth_per_s >= 1.0)
                .then(|| format!("{} per second", counted(subject.growth_per_s.round() as u64, "more port"))),
        );
    if budget.is_full() && !is_relieved {
        let fails = "the next connect() fails with EADDRNOTAVAIL (EADDRINUSE from bind() to port 0)";
        draft = draft.because(match budget.is_presumed {
            true => format!("{fails} if the connections had no TCP timestamps, which root sees: none was taken again meanwhile"),
            false => fails.to_owned(),
        });
    }
    let processes = iter::once(None).chain(subject.owners.iter().map(|owner| Some(owner.pid)));
    for process in processes {
        for errno in [errno::EADDRNOTAVAIL, errno::EADDRINUSE] {
            let address = Some(subject.destination.to_string());
            draft = draft.explains(What::Calls { call: "connect", errno, process, address });
        }
    }
    let mut draft = draft.explains(What::Growth(subject.into()));
    if Stuck::of(snapshot, subject).is_some_and(|(stuck, _)| stuck.is_silent()) {
        draft = draft.explains(What::Silent(subject.destination));
    }
    let draft = more_ports(draft, snapshot, subject);
    if subject.owners.is_empty() {
        return draft.now(Remedy::own(
            "trace connect --for 10s",
            format!("names the processes that connect to {}", subject.destination),
        ));
    }
    draft
}

/// Says that the range is narrow, less than half of the ports that the kernel's default has, and whether the default would do. That the
/// range is narrow is not the cause of a leak, nor of connections that are stuck.
fn narrow(snapshot: &Snapshot, subject: &Tuple, budget: &Budget) -> Option<String> {
    let range = snapshot.ports.seen().ok()?.range();
    let is_leak = Growth::of(snapshot, subject, budget).is_some_and(|growth| growth.idle_s.is_some());
    let is_stuck = Stuck::of(snapshot, subject).is_some();
    (range < DEFAULT_PORTS / 2 && !is_leak && !is_stuck).then(|| {
        let (range, default) = (counted(range.into(), "port"), count(DEFAULT_PORTS.into()));
        let would_do = is_lasting(snapshot, subject, 1, DEFAULT_PORTS);
        let full = if would_do { "" } else { ", which this rate would use up too" };
        format!("the range is narrow: {range}, by default {default}{full}")
    })
}

pub(super) const P02: Rule = Rule {
    id: "P02",
    title: "connect() searches half of the port range before it finds a port",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, and probes of the search over loopback",
    threshold: Some(Threshold { default: 95.0, unit: "% of the ports of the first parity in use" }),
    explanation: &[
        "connect() of a socket without a port looks for one in steps of 2 from a random start: first at all ports with the parity of the first \
         port of the range, then at the others (__inet_hash_connect). bind() to port 0 begins with the others (inet_csk_find_open_port), so \
         that the two do not compete.",
        "Once a source and a destination use all ports of the first parity, which is half of the range, each connect() passes over all of \
         them, one hash lookup each, before it finds a port of the second parity. With the default range these are 14,116 lookups. Measured on \
         Linux 6.18 with 56,512 ports: 17 us for a port of the first parity, 4,682 us for one of the second.",
        "The time is CPU time of the calling thread within connect(), also of a non-blocking one: an event loop stands still meanwhile.",
        "What helps: `fourtuple fix ports` for programs that run, which draws free ports at random; `fourtuple run` for programs that can be \
         restarted; in a program the socket option IP_LOCAL_PORT_RANGE (51) with the value 0xFFFF0000, the whole range, which makes the search \
         linear since Linux 6.8; the crate fourtuple, which does it and shows what the kernel can. Fewer connections to one destination, \
         more source addresses and a wider range keep the use below half.",
        "What does not help: the option on Linux 6.3 to 6.7 (and 6.1 with the backport), where the search stays by parity; \
         net.ipv4.ip_local_port_step_width (Linux 7.1), which keeps the two halves; a faster network.",
        "Ports in TIME_WAIT that connect() may take again (net.ipv4.tcp_tw_reuse) end the search; with them the rule has no finding. It has \
         none either if less than 1% of the ports are free: then ports are missing (P01), and no search finds one sooner.",
    ],
    check: p02,
};

/// Lookups from which on a search is worth a finding: about 0.1 ms.
const LONG_SEARCH: u32 = 500;
/// Nanoseconds of a lookup: measured on Linux 6.18 and 7.2.
const LOOKUP_NS: (f64, f64) = (100.0, 170.0);

fn p02(snapshot: &Snapshot, limit: f64) -> Checked {
    let search = snapshot.search.seen()?;
    let ports = snapshot.ports.seen()?;
    let connections = snapshot.connections.seen()?;
    if search.default != "parity" {
        return Ok(Vec::new());
    }
    let mut past_half = Vec::new();
    for tuple in &connections.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if tuple.in_use > budget.total / 2 {
            past_half.push((tuple, budget));
        }
    }
    if past_half.is_empty() {
        return Ok(Vec::new());
    }
    let is_low = |port: u16| ports.contains(port) && port & 1 == ports.low & 1;
    let low = (ports.low..=ports.high).filter(|port| is_low(*port)).count() as u32;
    let low = low.saturating_sub(connections.held_tcp_low_parity);
    let is_long = |(tuple, budget): &(&Tuple, Budget)| {
        low >= LONG_SEARCH
            && f64::from(tuple.low_parity) >= f64::from(low) * limit / 100.0
            && budget.draws_pay()
    };
    let long = past_half.iter().filter(|past| is_long(past));
    Ok(long.map(|(tuple, budget)| draft_p02(snapshot, tuple, low, budget)).collect())
}

fn draft_p02(snapshot: &Snapshot, subject: &Tuple, low: u32, budget: &Budget) -> Draft {
    let parity = match snapshot.ports.seen() {
        Ok(ports) if ports.low & 1 == 1 => "odd",
        _ => "even",
    };
    let caller = Callers::name(snapshot, subject);
    let verdict = format!(
        "{} uses {} of {} {parity} ports: each connect() of {caller} looks at up to {} before it finds a free one",
        subject,
        count(subject.low_parity.into()),
        count(low.into()),
        counted(low.into(), "port")
    );
    let time = |ns: f64| f64::from(low) * ns / 1e3;
    let mut draft = Draft::new(Severity::Warning, subject, verdict)
        .because(format!(
            "{} of {} ports are in use",
            count(budget.in_use.into()),
            count(budget.total.into())
        ))
        .because(format!(
            "about {:.0} to {:.0} us of CPU time in each connect(), at 0.10 to 0.17 us a port",
            time(LOOKUP_NS.0),
            time(LOOKUP_NS.1)
        ));
    draft = draft.because_if(running_fix(subject));
    draft.now.extend(drawn_ports(snapshot, subject));
    draft.now.extend(more_sources(snapshot, subject));
    draft.now.extend(wider_range(snapshot, Some(subject)));
    draft.proper.extend(printed(snapshot, subject));
    // The probe has connected with the option, in a network namespace of its own.
    let is_tested = snapshot.search.seen().is_ok_and(|search| search.option == "linear");
    if is_tested {
        let option = Remedy::advice(
            "in the program: setsockopt(fd, IPPROTO_IP, 51 /* IP_LOCAL_PORT_RANGE */, &(uint32_t){0xFFFF0000}, 4) before connect()",
            "the search goes port by port; the crate `fourtuple` and `fourtuple fix --print go`, `python` and `netty` have the code",
        );
        draft = draft.proper(option.tested(is_tested));
    }
    draft.proper(Remedy::advice(
        "restart the program with `fourtuple run -- PROGRAM`",
        "the same without a change of the program, from its start, also without root",
    ))
}

pub(super) const P03: Rule = Rule {
    id: "P03",
    title: "the port range is too small",
    source: "net.ipv4.ip_local_port_range, sock_diag(7) (inet_diag)",
    threshold: Some(Threshold { default: 14_116.0, unit: "usable ports (half of the kernel's default)" }),
    explanation: &[
        "net.ipv4.ip_local_port_range is the set of ports from which connect() and bind() to port 0 choose. The kernel's default is 32768 to 60999, \
         28,232 ports. Some images and hardening guides set less, and each network namespace, that is each container, has its own value.",
        "The rule has a finding if fewer ports than the threshold are usable and a source and a destination use, or will use, half of them. It \
         also has one for a range of any size, if a client closes so many connections per second that 60 s of TIME_WAIT need more ports than \
         there are, while the widest range would be enough.",
        "What helps: the range 1024 to 65535, with the ports of local servers in net.ipv4.ip_local_reserved_ports, so that connect() does not \
         take the port of a server while the server restarts (inet_is_local_reserved_port). The change acts at once and needs no restart. In \
         Kubernetes net.ipv4.ip_local_port_range is a safe sysctl of a pod (`fourtuple fix --print kubernetes`).",
        "What does not help: a change of the sysctl on the host if the program runs in a container with a network namespace of its own. A \
         program can set a range of its own within the sysctl with IP_LOCAL_PORT_RANGE, but not a wider one.",
    ],
    check: p03,
};

/// The share of the ports that makes a small range matter, in percent.
const P03_MATTERS: f64 = 50.0;
/// The share of the ports from which on a rate counts, in percent.
const STARTED: f64 = 25.0;

fn p03(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let mut largest: Option<(f64, &Tuple, Budget)> = None;
    let matters = |tuple: &&Tuple| !is_relieved(snapshot, tuple) && Stuck::of(snapshot, tuple).is_none();
    for tuple in snapshot.connections.seen()?.tuples.iter().filter(matters) {
        let budget = Budget::of(snapshot, tuple)?;
        let plateau = if budget.is_outrun() { budget.plateau() } else { 0.0 };
        let demand = plateau.max(budget.taken().into());
        if largest.as_ref().is_none_or(|(most, ..)| demand > *most) {
            largest = Some((demand, tuple, budget));
        }
    }
    let Some((demand, tuple, budget)) = largest else { return Ok(Vec::new()) };
    let total = f64::from(budget.total);
    let is_small = f64::from(ports.usable()) < limit && demand * 100.0 >= total * P03_MATTERS;
    let is_outrun =
        budget.is_outrun() && budget.is_past(STARTED) && demand <= f64::from(most_ports(snapshot));
    let is_finding = is_small || is_outrun;
    Ok(is_finding.then(|| draft_p03(snapshot, ports, demand, tuple, &budget)).into_iter().collect())
}

fn draft_p03(
    snapshot: &Snapshot,
    ports: &EphemeralPorts,
    demand: f64,
    subject: &Tuple,
    budget: &Budget,
) -> Draft {
    let range = format!("{}-{}", ports.low, ports.high);
    let verdict = if demand > f64::from(budget.taken()) {
        format!(
            "the range {range} has {}; {} needs {} at its rate of {:.0} closes/s ({} in the last second) and {:.0} s until a port is free again",
            counted(ports.usable().into(), "usable port"),
            subject,
            count(demand.ceil() as u64),
            budget.closes_per_s,
            count(budget.closed_last_s.into()),
            budget.wait_s
        )
    } else {
        format!(
            "the range {range} has {}; {} uses {} of them",
            counted(ports.usable().into(), "usable port"),
            subject,
            count(budget.taken().into())
        )
    };
    let is_short = demand > f64::from(budget.total);
    let severity = if is_short || budget.is_full() { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "net.ipv4.ip_local_port_range", verdict).because(format!(
        "the kernel's default is {DEFAULT_RANGE}: {}",
        counted(DEFAULT_PORTS.into(), "port")
    ));
    let wider = wider_range(snapshot, Some(subject));
    if !wider.as_ref().is_some_and(|wider| wider.sets(RANGE)) {
        draft.now.extend(default_range(snapshot, subject));
    }
    draft.now.extend(wider);
    draft.proper(Remedy::advice(
        "in Kubernetes: `fourtuple fix --print kubernetes`",
        "the range as a sysctl of the pod",
    ))
}

pub(super) const P04: Rule = Rule {
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
    check: p04,
};

/// The share of the remaining ports in use that makes the reservation matter, in percent.
const P04_MATTERS: f64 = 25.0;

fn p04(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let reserved = ports.range() - ports.usable();
    let Some(largest) = snapshot.connections.seen()?.tuples.first() else { return Ok(Vec::new()) };
    let budget = Budget::of(snapshot, largest)?;
    let is_large = f64::from(reserved) >= f64::from(ports.range()) * limit / 100.0;
    if reserved == 0 || !is_large || !budget.is_past(P04_MATTERS) {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} of the {} ports of the range are reserved ({}); {} uses {} of the {} that are left",
        count(reserved.into()),
        count(ports.range().into()),
        percent(reserved.into(), ports.range().into()),
        largest,
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
    Ok(vec![draft.proper(Remedy::advice(
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

pub(super) const P05: Rule = Rule {
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
    check: p05,
};

/// A listener inside of the range.
struct Exposed {
    address: IpAddr,
    port: u16,
    owner: Option<Owner>,
}

fn p05(snapshot: &Snapshot, limit: f64) -> Checked {
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
    let reserved = blocks(&merged(reserved));
    drafts.push(draft.now(Remedy::sysctl("net.ipv4.ip_local_reserved_ports", reserved, effect)));
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

pub(super) const P06: Rule = Rule {
    id: "P06",
    title: "bind() holds ports of the range",
    source: "sock_diag(7) (inet_diag, state BOUND_INACTIVE since Linux 6.8), descriptors in /proc/PID/fd",
    threshold: Some(Threshold { default: 10.0, unit: "% of the range" }),
    explanation: &[
        "A socket that called bind() with a port or with port 0, and neither connect() nor listen(), holds its port. connect() of every program in the \
         network namespace passes over the port for all destinations (the test of fastreuse in __inet_hash_connect), also if the socket is \
         bound to another address. One program can so take the ports of all others.",
        "Programs that look for a free port with bind() and keep the socket, pools of sockets that are bound in advance, and connects that never \
         happen after bind() are the usual causes. Before Linux 6.18 a port stays closed until all its sockets are gone, also when the \
         socket that called bind() is closed and connections share its port.",
        "What helps: bind() right before connect(), with IP_BIND_ADDRESS_NO_PORT (24), so that connect() chooses the port; closing the sockets; a \
         restart of the program. `fourtuple run --via bound` sets the option for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR of the other programs, because connect() does not look at it in its search.",
        "UDP sockets have ports of their own and are not counted.",
    ],
    check: p06,
};

fn p06(snapshot: &Snapshot, limit: f64) -> Checked {
    let range = snapshot.ports.seen()?.usable();
    let connections = snapshot.connections.seen()?;
    let bound: Vec<&HeldPort> = connections.held.iter().filter(|held| held.kind == "bound").collect();
    let number = u64::from(connections.held_bound);
    if number == 0 || (number as f64) < f64::from(range) * limit / 100.0 {
        return Ok(Vec::new());
    }
    let mut processes: BTreeMap<(String, u32), u64> = BTreeMap::new();
    for held in &bound {
        let key = held
            .owner
            .as_ref()
            .map_or_else(|| ("unknown processes".to_owned(), 0), |owner| (process(owner), owner.pid));
        *processes.entry(key).or_default() += 1;
    }
    let mut processes: Vec<((String, u32), u64)> = processes.into_iter().collect();
    processes.sort_by_key(|(_, ports)| std::cmp::Reverse(*ports));
    let most = processes.first().map_or_else(String::new, |((name, _), _)| format!(", most by {name}"));
    let verdict = format!(
        "bind() holds {} of {} ports without a connection{most}: no connect() of this host can take them",
        count(number),
        count(range.into())
    );
    let share = number * 100 / u64::from(range.max(1));
    let largest = connections.tuples.first().map(|tuple| Budget::of(snapshot, tuple)).transpose()?;
    let hurts = share >= 50 || largest.is_some_and(|budget| budget.is_past(90.0));
    let severity = if hurts { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "bind()", verdict)
        .explains(What::calls("bind", errno::EADDRINUSE))
        .explains(What::calls("connect", errno::EADDRNOTAVAIL));
    for ((name, _), ports) in processes.iter().take(5) {
        let example =
            bound.iter().find(|held| held.owner.as_ref().is_none_or(|owner| process(owner) == *name));
        let example =
            example.map_or_else(String::new, |held| format!(", such as {}:{}", held.address, held.port));
        let share = percent(*ports, bound.len() as u64);
        draft = draft.because(format!(
            "{name}: {} of the {} listed ports ({share}){example}",
            count(*ports),
            bound.len()
        ));
    }
    draft.now.extend(wider_range(snapshot, connections.tuples.first()));
    Ok(vec![
        draft
            .proper(Remedy::advice(
                "in the program: setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &(int){1}, 4) before bind(), and connect() right after",
                "connect() chooses the port and shares it with other destinations",
            ))
            .proper(Remedy::advice(
                "restart the program with `fourtuple run --via bound -- PROGRAM`",
                "frees the ports; bind() to port 0 then takes no port before connect()",
            )),
    ])
}
