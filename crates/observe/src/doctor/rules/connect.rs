//! What connect() meets when ports run short: errors, slow searches, sources.

use std::net::{IpAddr, SocketAddr};

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{
    FailedCall, LocalAddress, Owner, Part, Snapshot, Source, TracedConnects, Tuple,
};

use crate::doctor::accepting;
use crate::doctor::attribute::{Callers, Growth, left_behind, unknown_user, users};
use crate::doctor::budget::{Budget, state};
use crate::doctor::causes::{OWN_RANGE, own_range};
use crate::doctor::command::Scope;
use crate::doctor::draft::{Draft, Remedy, Subject, What};
use crate::doctor::remedies::{
    more_ports, more_sources, network, print_name, printed, shorter_searches, wider_range,
    wider_range_of_bound,
};
use crate::doctor::rules::{Checked, Rule, Threshold, joined, of_visible};
use crate::doctor::words::{caller, callers, count, counted, doing, percent, process, time};
use fourtuple_record::errno;

pub(super) const P07: Rule = Rule {
    id: "P07",
    title: "connect() fails with EADDRNOTAVAIL",
    source: "the tracepoint at the end of connect() (raw_syscalls:sys_exit; `fourtuple trace connect`)",
    threshold: None,
    explanation: &[
        "connect() returns EADDRNOTAVAIL if it finds no port for the destination (__inet_hash_connect), or if the socket has a port already, from \
         bind() by number, and another connection has the same addresses and ports (__inet_check_established). No counter of the kernel counts \
         it: only a trace sees it, or the log of the program (`Cannot assign requested address`).",
        "The rule names the process and the destination, and compares with the ports of the tuples to this destination. If one of them is full, \
         P01 has the cause. If none is, sockets that called bind() may have all ports: connect() passes over them for every destination, from \
         any address (P08). Otherwise the usual cause is bind() by number before connect(), for a tuple that is in TIME_WAIT or open.",
        "The same errno from bind() means that the address is not an address of this host (P11). Exhausted ports give EADDRINUSE from bind() to \
         port 0, and EAGAIN from connect() of UDP.",
        "What helps: what P01 names. For bind() by number: connect() without bind(), or bind() to port 0 with IP_BIND_ADDRESS_NO_PORT.",
        "What does not help: trying again at once, while all ports are in use.",
    ],
    check: p07,
};

fn p07(snapshot: &Snapshot, _: f64) -> Checked {
    let failures = snapshot.failures.seen().map_err(|reason| {
        format!("{reason}; `fourtuple trace connect --for 10s` shows failed calls of connect() by errno")
    })?;
    // Workers of one name fail for one reason.
    let mut programs: Vec<(SocketAddr, Vec<&FailedCall>)> = Vec::new();
    for (call, destination) in failures.without_port() {
        let is_same = |(to, rows): &&mut (SocketAddr, Vec<&FailedCall>)| {
            *to == destination && rows[0].owner.name == call.owner.name && rows[0].range == call.range
        };
        match programs.iter_mut().find(is_same) {
            Some((_, rows)) => rows.push(call),
            None => programs.push((destination, vec![call])),
        }
    }
    let draft =
        |(to, rows): &(SocketAddr, Vec<&FailedCall>)| draft_p07(snapshot, &FailedCall::sum(rows), *to);
    Ok(programs.iter().map(draft).collect())
}

fn draft_p07(snapshot: &Snapshot, call: &FailedCall, destination: SocketAddr) -> Draft {
    let FailedCall { failed, .. } = call;
    let owner = &caller(&call.owner, call.processes);
    let seconds = snapshot.interval_ns as f64 / 1e9;
    let verdict = format!(
        "{} cannot connect to {destination}: {} of connect() failed with EADDRNOTAVAIL in {seconds:.1} s",
        callers(&call.owner, call.processes),
        counted(*failed, "call")
    );
    let subject = Subject::Connects(owner.pid, owner.name.clone(), destination);
    let failed = What::Calls {
        call: "connect",
        errno: errno::EADDRNOTAVAIL,
        process: Some(owner.pid).filter(|pid| *pid != 0),
        address: Some(destination.to_string()),
    };
    match full_tuple(snapshot, destination) {
        Some((full, budget)) => {
            let fact = format!(
                "{} uses {} of {} ports (P01)",
                full,
                count(budget.taken().into()),
                count(budget.total.into())
            );
            let holder = full.owners.first().filter(|holder| holder.sockets > 0 && holder.pid != owner.pid);
            let holder = holder.map(|holder| {
                format!("{} has {} of them", process(holder), counted(holder.sockets.into(), "connection"))
            });
            let holder = holder.or_else(|| left_behind(snapshot, full));
            // The process that fails needs ports, not the process that has them.
            let full = Tuple { owners: vec![owner.clone()], ..full.clone() };
            more_ports(Draft::new(Severity::Critical, subject, verdict).explains(failed).because(fact).because_if(holder), snapshot, &full)
        }
        None if let Some((first, last)) = own_range(snapshot, call) => {
            let fact = format!("the program permits its sockets the ports {first}-{last} only (IP_LOCAL_PORT_RANGE), and all of them are in use");
            let (change, effect) = OWN_RANGE;
            Draft::new(Severity::Critical, subject, verdict)
                .explains(failed)
                .because(fact)
                .proper(Remedy::advice(change, effect))
        }
        None if let Some((source, usable)) = taken_by_bind(snapshot) => {
            let Source { address, in_use, .. } = source;
            let fact = format!(
                "sockets that seem to have called bind() to {address} have {} of {} ports, and connect() passes over them for every destination (P08)",
                count((*in_use).into()),
                count(usable.into())
            );
            let mut draft = Draft::new(Severity::Critical, subject, verdict).explains(failed).because(fact);
            draft.now.extend(wider_range_of_bound(snapshot, source));
            draft.proper(Remedy::advice(
                "in the program that calls bind(): setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &(int){1}, 4) before it",
                "its sockets then take no port from other programs",
            ))
        }
        None => Draft::new(Severity::Warning, subject, verdict)
            .explains(failed)
            .because("no source has all its ports to this destination in use now: the ports are free again, or the program binds ports by number")
            .proper(Remedy::advice(
                "connect() without bind(), or bind() to port 0 with IP_BIND_ADDRESS_NO_PORT (24)",
                "connect() then chooses a port that is free for the destination",
            )),
    }
}

/// The tuple to the destination that has, or just had, no port left.
fn full_tuple(snapshot: &Snapshot, destination: SocketAddr) -> Option<(&Tuple, Budget)> {
    let tuples = &snapshot.connections.seen().ok()?.tuples;
    let of_destination = tuples.iter().filter(|tuple| tuple.destination == destination);
    of_destination
        .filter_map(|tuple| Some((tuple, Budget::of(snapshot, tuple).ok()?)))
        .find(|(_, budget)| budget.is_past(95.0))
}

pub(super) const P08: Rule = Rule {
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
         new ones follow, does the rule see bind() where there was none. A trace decides: of at least 20 calls that did not fail, and one for each \
         50 ports, none from a bound port, and no bind() that failed with EADDRINUSE: no finding.",
        "What helps: the option in the program. nginx and HAProxy set it themselves for proxy_bind and source; Envoy needs socket_options \
         before 2026-07 (`fourtuple fix --print envoy`). `fourtuple run --via bound` sets it for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR, which does not let connect() of another program take the port; `fourtuple fix ports`, which leaves \
         sockets alone that called bind(), as does `fourtuple run` by its way `cgroup`.",
    ],
    check: p08,
};

/// Fewer ports can have one parity by chance.
const MIN_IN_USE: u32 = 20;
/// For one in so many ports a traced call of connect() must tell how it got its own: in 2 s, of connections whose TIME_WAIT takes a minute.
const SEEN: u32 = 50;

fn p08(snapshot: &Snapshot, limit: f64) -> Checked {
    let bound = bound_first(snapshot, limit)?;
    Ok(bound.into_iter().map(|(source, usable, fact)| draft_p08(snapshot, source, usable, fact)).collect())
}

/// Returns the source whose ports, which bind() seems to have chosen, are all that there are: connect() takes none of them, from any source.
fn taken_by_bind(snapshot: &Snapshot) -> Option<(&Source, u32)> {
    bound_first(snapshot, 95.0).ok()?.into_iter().map(|(source, usable, _)| (source, usable)).next()
}

/// Returns the sources that have this percentage of the ports, chosen by bind() as it seems, each with the number of usable ports and what tells so.
fn bound_first(snapshot: &Snapshot, limit: f64) -> Result<Vec<(&Source, u32, String)>, String> {
    let usable = snapshot.ports.seen()?.usable();
    let connections = snapshot.connections.seen()?;
    let is_past = |source: &&Source| {
        source.in_use >= MIN_IN_USE && f64::from(source.in_use) >= f64::from(usable) * limit / 100.0
    };
    let is_seen_otherwise = |source: &&Source| {
        // A few calls say nothing of the sockets that were there before.
        let enough = MIN_IN_USE.max(source.in_use / SEEN);
        given_ports(snapshot, source).is_some_and(|(given, calls)| given == 0 && calls >= enough.into())
            && !is_refused_ports(snapshot, source)
    };
    let has_parity = |source: &Source| {
        u64::from(source.in_use.saturating_sub(source.low_parity)) * 100 >= u64::from(source.in_use) * 95
    };
    let bound = connections.sources.iter().filter(is_past).filter(|source| !is_seen_otherwise(source)).filter_map(|source| {
        let fact = if has_parity(source) {
            let odd = snapshot.ports.seen().is_ok_and(|ports| ports.low & 1 == 0);
            format!(
                "{} of {} ports are {}; connect() without a port begins with the others",
                count(source.in_use.saturating_sub(source.low_parity).into()),
                count(source.in_use.into()),
                if odd { "odd" } else { "even" }
            )
        } else if connections.tuples_left_out == 0 && shares_none(source, &connections.tuples, usable) {
            "no two destinations share a port; connect() without bind() can use one port for several destinations".to_owned()
        } else {
            return None;
        };
        Some((source, usable, fact))
    });
    Ok(bound.collect())
}

/// Returns the traced calls of connect() from a port that was already bound, and all that did not fail, of the largest process of a source to its
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
        (
            given + connects.given_port,
            calls + u64::from(connects.owner.sockets).saturating_sub(connects.failed),
        )
    });
    (calls > 0).then_some((given, calls))
}

/// Returns whether bind() of a process of the source failed for lack of a port. Such a process calls connect() without bind() at most, so
/// that the trace of connect() says nothing of its other sockets.
fn is_refused_ports(snapshot: &Snapshot, source: &Source) -> bool {
    let mut calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    calls.any(|call| {
        call.call == "bind"
            && call.errno == errno::EADDRINUSE
            && source.owners.iter().any(|owner| owner.pid == call.owner.pid)
    })
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

fn draft_p08(snapshot: &Snapshot, source: &Source, usable: u32, fact: String) -> Draft {
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
    draft.now.extend(wider_range_of_bound(snapshot, source));
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
            "sets the option without a change of the program (ways `preload` and `supervise`); ports that bind() took before are free when their TIME_WAIT ends",
        ))
}

pub(super) const P09: Rule = Rule {
    id: "P09",
    title: "the search for a port is slow",
    source: "tracepoints around the port search of connect() (`fourtuple trace connect`)",
    threshold: Some(Threshold { default: 500.0, unit: "us, the 99th percentile of the search" }),
    explanation: &[
        "connect() looks for a source port before it sends the SYN (__inet_hash_connect). With free ports this takes 5 to 20 us. If many ports are in \
         use, it takes milliseconds of CPU time: up to half of the range is looked at in vain (P02), or ports that bind() holds (P06), or ports in \
         TIME_WAIT, each of which takes a lock and costs about three times as much as an established connection.",
        "Connections of doctor to itself cannot replace the trace: a port that connections to another destination use is free for them, so \
         that they are fast while connect() to a destination without free ports is slow. Without a trace P02 computes the length of the search \
         from the ports in use.",
        "The rule needs a trace. The time in which a thread waits for a processor is not part of a search. With at least 100 searches the rule also wants \
         a mean of a tenth of the threshold, because interrupts, or a host that takes the processor from a virtual machine, give a high percentile; with \
         10 to 99 it compares the mean.",
        "What helps: `fourtuple fix ports` for running programs, `fourtuple run`, IP_LOCAL_PORT_RANGE in the program (Linux 6.8), fewer ports in use. \
         Where no port is free, only ports that become free help (P01). \
         Linux 6.15 searches under RCU, which removes the contention of processors, not the length.",
        "What does not help: more processors, non-blocking connect(), a faster network: the search comes before the handshake.",
    ],
    check: p09,
};

/// Fewer searches have no 99th percentile.
const MIN_SEARCHES: u64 = 100;
/// Of fewer searches the mean says little.
const MIN_LONG_SEARCHES: u64 = 10;

fn p09(snapshot: &Snapshot, limit: f64) -> Checked {
    let traced = snapshot.traced.seen().map_err(|reason| {
        format!(
            "{reason}; `fourtuple trace connect --for 10s` measures the search; P02 and P06 compute its length from the ports in use"
        )
    })?;
    let Some(p99_ns) = traced.search_p99_ns else { return Ok(Vec::new()) };
    let Some(mean_ns) = traced.search_ns.checked_div(traced.searches) else { return Ok(Vec::new()) };
    let limit_ns = limit * 1e3;
    let (p99_ms, mean_ms) = (p99_ns as f64 / 1e6, mean_ns as f64 / 1e6);
    let searches = counted(traced.searches, "search");
    let verdict = if traced.searches >= MIN_SEARCHES {
        if (p99_ns as f64) < limit_ns || (mean_ns as f64) < limit_ns / 10.0 {
            return Ok(Vec::new());
        }
        format!(
            "connect() searches {p99_ms:.1} ms for a port (99th percentile of {searches}, mean {mean_ms:.2} ms)"
        )
    } else {
        // The longer searches take, the fewer there are.
        if traced.searches < MIN_LONG_SEARCHES || (mean_ns as f64) < limit_ns {
            return Ok(Vec::new());
        }
        format!("connect() searches {mean_ms:.1} ms for a port (mean of {searches})")
    };
    let of_one_cpu = percent(traced.search_ns, snapshot.interval_ns);
    let mut draft = Draft::new(Severity::Warning, "connect()", verdict)
        .because(format!("the searches take {of_one_cpu} of one processor"));
    for connects in traced.connects.iter().filter(|connects| connects.searches > 0).take(3) {
        draft = draft.because(format!(
            "{} → {}: mean {:.2} ms of {}",
            process(&connects.owner),
            connects.destination,
            connects.search_mean_ns as f64 / 1e6,
            counted(connects.searches, "search")
        ));
    }
    Ok(vec![shorter_searches(draft, snapshot, traced)])
}

pub(super) const P10: Rule = Rule {
    id: "P10",
    title: "the ports of a source and destination will run out",
    source: "two readings of sock_diag(7), remaining times of TIME_WAIT sockets, net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 600.0, unit: "s until the last port" }),
    explanation: &[
        "The forecast has two inputs: the growth of the ports in use between two readings, and the rate at which this side closes first, from the \
         remaining times of its TIME_WAIT sockets. A rate of R per second leads to R * 60 ports in TIME_WAIT after 60 s and no more (R times \
         net.ipv4.tcp_tw_reuse_delay where connect() may take them again). So growth by TIME_WAIT ends at this plateau, and the rule has a \
         finding only if the plateau is above the usable ports. Growth of open connections has no such end.",
        "Growth by TIME_WAIT counts from a quarter of the usable ports on, growth of open connections from half of them on, because pools that \
         fill at a start are not exhaustion. From 90% on P01 has the finding.",
        "What helps: what P01 names, in time. For open connections that only grow, look for a leak in the program: connections that are \
         never closed (T07: connections that the peer closed).",
        "What does not help: a higher limit of descriptors, which only moves the failure to the ports.",
    ],
    check: p10,
};

/// The shares from which on growth by TIME_WAIT and growth of open connections count, in percent.
const CLOSING: f64 = 25.0;
const OPENING: f64 = 50.0;
/// The share from which on P01 has the finding, in percent.
const NEAR: f64 = 90.0;

fn p10(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if let Some(seconds) = until_full(tuple, &budget).filter(|seconds| *seconds <= limit) {
            drafts.push(draft_p10(snapshot, tuple, &budget, seconds));
        }
    }
    Ok(drafts)
}

/// Returns the seconds until no port is left, or `None` if the ports last.
fn until_full(tuple: &Tuple, budget: &Budget) -> Option<f64> {
    let left = f64::from(budget.total.checked_sub(budget.taken())?);
    if left <= 0.0 || budget.is_past(NEAR) {
        return None;
    }
    let growth = tuple.growth_per_s;
    if budget.time_wait * 2 > budget.in_use {
        // No port becomes free before the first sockets have been in TIME_WAIT for 60 s.
        let rate = if growth > 0.0 { growth } else { budget.closes_per_s };
        (budget.is_outrun() && budget.is_past(CLOSING)).then(|| left / rate)
    } else {
        (growth > 0.0 && budget.is_past(OPENING)).then(|| left / growth)
    }
}

fn draft_p10(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, seconds: f64) -> Draft {
    let mut verdict = format!(
        "{} uses {} of {} ports, and the last one is taken in about {}",
        subject,
        count(budget.taken().into()),
        count(budget.total.into()),
        time(seconds)
    );
    if budget.is_outrun() {
        verdict += &format!("; {}", Callers::closed(snapshot, subject, budget));
    } else {
        let owner = Callers::name(snapshot, subject);
        verdict += &format!("; {owner} opens {:.1}/s more than it closes", subject.growth_per_s);
        if let Some(leak) = Growth::of(snapshot, subject, budget).and_then(|growth| growth.leak()) {
            verdict += &format!(" and {leak}");
        }
    }
    let draft = Draft::new(Severity::Warning, subject, verdict).explains(What::Growth(subject.into()));
    more_ports(draft, snapshot, subject)
}

pub(super) const P11: Rule = Rule {
    id: "P11",
    title: "the source address of connections is not an address of this host",
    source: "sock_diag(7) (inet_diag), rtnetlink(7) (RTM_GETADDR, RTM_GETROUTE)",
    threshold: None,
    explanation: &[
        "Connections keep their source address when the address is removed from its device: a changed lease, a floating address that moved to another \
         host, a container network that was built again. The kernel does not tell the program. It still sends packets from the address, \
         but drops what comes back, so that writes fail with ETIMEDOUT only after net.ipv4.tcp_retries2 (15 retransmissions, 13 to 30 \
         minutes), and reads wait without end unless keepalives are on.",
        "New sockets get EADDRNOTAVAIL from bind() to such an address (inet_bind checks inet_addr_valid_or_nonlocal), which is easily taken for \
         exhausted ports. Only the call tells them apart: bind() to an address fails for the address, connect() for the ports. A trace sees such calls, and the rule \
         names the process and the address, also of a source that is only in a configuration file.",
        "Local are all addresses of devices, also of devices in a VRF, and what a route of type `local` covers (127.0.0.0/8, AnyIP). Sources of sockets \
         with IP_TRANSPARENT or IP_FREEBIND, which transparent proxies use, are not reported. Sockets that the program has closed already are not either.",
        "What helps: the address back on its device; closing the connections (`ss -K`, or a restart of the program), so that the program connects \
         again from an address that exists; TCP_USER_TIMEOUT or keepalives in the program, so that it notices.",
        "What does not help: net.ipv4.ip_nonlocal_bind = 1, with which bind() succeeds and no answer arrives.",
    ],
    check: p11,
};

/// States of sockets that a program has.
const OPEN: [&str; 3] = ["established", "syn-sent", "close-wait"];

fn p11(snapshot: &Snapshot, _: f64) -> Checked {
    joined(lost_sources(snapshot), refused_binds(snapshot))
}

/// Returns a finding for each source of open connections that is not an address of this host.
fn lost_sources(snapshot: &Snapshot) -> Checked {
    let lost = snapshot.lost_sources.seen()?;
    let connections = snapshot.connections.seen()?;
    let open = |tuple: &&Tuple| OPEN.iter().map(|name| state(tuple, name)).sum::<u64>();
    let mut drafts = Vec::new();
    for source in lost {
        let of_source = connections.tuples.iter().filter(|tuple| tuple.source == *source);
        let of_source: Vec<&Tuple> = of_source.filter(|tuple| open(tuple) > 0).collect();
        let first = of_source.first().map(|tuple| tuple.destination);
        // Of tuples that are not listed the source alone is known.
        if first.is_none() && connections.tuples_left_out == 0 {
            continue;
        }
        let row = connections.sources.iter().find(|row| row.address == *source);
        let owner = of_source.iter().find_map(|tuple| tuple.owners.first());
        let owner = owner.or_else(|| row.and_then(|row| row.owners.first()));
        let (number, to) = match first {
            Some(first) => {
                let sockets: u64 = of_source.iter().map(open).sum();
                (counted(sockets, "connection"), format!("first destination {first}"))
            }
            None => ("connections".to_owned(), "their destinations are not listed".to_owned()),
        };
        let verdict = format!(
            "{} has {number} from {source}, which is not an address of this host: answers do not arrive ({to})",
            owner.map_or_else(|| "this host".to_owned(), process)
        );
        let source = *source;
        let mut draft = Draft::new(Severity::Warning, source.to_string(), verdict);
        for tuple in of_source.iter().take(5) {
            draft = draft.because(format!("{} to {}", counted(open(tuple), "connection"), tuple.destination));
        }
        if snapshot.number("net.ipv4.ip_nonlocal_bind").is_ok_and(|value| value == 1) {
            draft = draft.because("net.ipv4.ip_nonlocal_bind is 1: bind() to any address succeeds");
        }
        let forget = move |snapshot: &mut Snapshot| {
            if let Part::Seen(lost) = &mut snapshot.lost_sources {
                lost.retain(|address| *address != source);
            }
        };
        drafts.push(
            draft
                .now(Remedy::privileged(Scope::Namespace, format!("ss -K src {}", filter(source)), "ends these connections with ECONNABORTED, and the program connects again (needs CONFIG_INET_DIAG_DESTROY)").with(forget))
                .now(Remedy::advice(
                    addition(snapshot, source, first.map(|first| first.ip())),
                    "the connections go on if the peers still have them",
                ))
                .proper(Remedy::advice(
                    "in the program: TCP_USER_TIMEOUT, or SO_KEEPALIVE with TCP_KEEPIDLE of a minute",
                    "the program notices dead connections within minutes",
                )),
        );
    }
    Ok(drafts)
}

/// Returns a finding for each process and address with calls of bind() that failed because the address is not on this host.
fn refused_binds(snapshot: &Snapshot) -> Checked {
    let failures = snapshot.failures.seen().map_err(|reason| {
        format!("{reason}; `fourtuple trace connect --for 10s` shows failed calls of bind() by address")
    })?;
    let addresses = snapshot.addresses.seen()?;
    let calls = failures.calls.iter();
    let refused = calls.filter(|call| call.call == "bind" && call.errno == errno::EADDRNOTAVAIL);
    let mut drafts = Vec::new();
    for call in refused {
        let Some(Ok(address)) = call.address.as_ref().map(|address| address.parse::<SocketAddr>()) else {
            continue;
        };
        let source = address.ip();
        if addresses.iter().any(|local| local.address == source) {
            continue;
        }
        let name = process(&caller(&call.owner, call.processes));
        let verdict = format!(
            "{name} cannot use {source}, which is not an address of this host: {} of bind() failed with EADDRNOTAVAIL in {}",
            counted(call.failed, "call"),
            accepting::time(snapshot.interval_ns)
        );
        let owner = &call.owner;
        let configured = format!("{}: another source address in its configuration, or none", owner.name);
        drafts.push(
            Draft::new(Severity::Critical, format!("bind() of {name} to {address}"), verdict)
                .explains(What::Calls {
                    call: "bind",
                    errno: errno::EADDRNOTAVAIL,
                    process: Some(owner.pid),
                    address: Some(address.to_string()),
                })
                .now(Remedy::advice(addition(snapshot, source, None), "bind() succeeds at once"))
                .proper(Remedy::advice(configured, "the program binds to an address that is there"))
                .proper(Remedy::advice(
                    "`sysctl -w net.ipv4.ip_nonlocal_bind=1`, only for an address that moves between hosts (VRRP)",
                    "bind() succeeds before the address is there; connections from it still get no answer",
                )),
        );
    }
    Ok(drafts)
}

/// Returns the command that adds an address: beside an address of the same network, else as a single address on the device of the network
/// of the destination.
fn addition(snapshot: &Snapshot, source: IpAddr, destination: Option<IpAddr>) -> String {
    let addresses = snapshot.addresses.seen().map(Vec::as_slice).unwrap_or_default();
    let is_plain = |name: &&String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._@-".contains(c));
    // The prefix of a neighbour and the name of its device.
    let beside = |address: IpAddr| {
        let holds = |local: &&LocalAddress| {
            local.address.is_ipv4() == address.is_ipv4()
                && network(local.address, local.prefix) == network(address, local.prefix)
        };
        let nearest = addresses.iter().filter(holds).max_by_key(|local| local.prefix)?;
        Some((nearest.prefix, nearest.device.as_ref().filter(is_plain)?))
    };
    let single = if source.is_ipv4() { 32 } else { 128 };
    let there = beside(source).or_else(|| Some((single, beside(destination?)?.1)));
    match there {
        Some((prefix, device)) => {
            format!("`ip addr add {source}/{prefix} dev {device}`, if the address should be on this host")
        }
        None => format!(
            "`ip addr add {source}/{single} dev DEVICE` with the device that had it, if the address should be on this host"
        ),
    }
}

/// Returns an address as `ss` reads it, for a shell, which could take brackets for a pattern.
fn filter(address: IpAddr) -> String {
    if address.is_ipv4() { address.to_string() } else { format!("'[{address}]'") }
}

pub(super) const P12: Rule = Rule {
    id: "P12",
    title: "several processes share the ports of a source and destination",
    source: "sock_diag(7) (inet_diag), descriptors in /proc/PID/fd, net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 50.0, unit: "% of the usable ports" }),
    explanation: &[
        "The ports of a source address and a destination belong to the network namespace, not to a process. Workers of a server, sidecars and \
         agents that connect from the same address to the same destination share them: the first one to leak connections or to close first \
         at a high rate takes the ports of all, and all get EADDRNOTAVAIL.",
        "The rule has a finding if two or more processes have a tenth of the sockets each and together use a share past the threshold. TIME_WAIT \
         sockets have no process and count for the whole.",
        "What helps: a source address for each process or group of processes; connections that are used again in the process with most of them; a network \
         namespace with an address of its own.",
        "What does not help: a port range for each process with IP_LOCAL_PORT_RANGE, which divides the ports and adds none. It does keep one process \
         from taking the ports of another.",
    ],
    check: p12,
};

fn p12(snapshot: &Snapshot, limit: f64) -> Checked {
    let (mut drafts, mut is_hidden) = (Vec::new(), false);
    for tuple in &snapshot.connections.seen()?.tuples {
        let held: u64 = tuple.owners.iter().map(|owner| u64::from(owner.sockets)).sum();
        let is_large = |owner: &&Owner| u64::from(owner.sockets) * 10 >= held;
        let large: Vec<&Owner> = tuple.owners.iter().filter(is_large).collect();
        // Processes that inherited descriptors hold the same sockets.
        let open: u64 = tuple.states.values().sum::<u64>() - state(tuple, "time-wait");
        if held > open + open / 10 {
            continue;
        }
        let budget = Budget::of(snapshot, tuple)?;
        // Sockets that their process has closed have none.
        is_hidden |= held < state(tuple, "established") && budget.is_past(limit);
        if large.len() >= 2 && budget.is_past(limit) {
            drafts.push(draft_p12(snapshot, tuple, &budget, &large));
        }
    }
    of_visible(drafts, is_hidden)
}

fn draft_p12(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, large: &[&Owner]) -> Draft {
    let share = |owner: &&Owner| format!("{} {}", process(owner), count(owner.sockets.into()));
    let named: Vec<String> = large.iter().take(3).map(share).collect();
    let more = if large.len() > 3 { format!(" and {} more", large.len() - 3) } else { String::new() };
    let verdict = format!(
        "{} the {} ports of {}: {}{more}; {} are in use",
        doing(large.len() as u64, "process", "share"),
        count(budget.total.into()),
        subject,
        named.join(", "),
        percent(budget.taken().into(), budget.total.into())
    );
    let mut draft = Draft::new(Severity::Notice, subject, verdict);
    draft.now.extend(more_sources(snapshot, subject));
    draft.now.extend(wider_range(snapshot, Some(subject)));
    draft.proper.extend(printed(snapshot, subject));
    draft.proper(Remedy::advice(
        "a source address for each process, or a network namespace of its own",
        "each source address has the whole range to the destination",
    ))
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Connections, FailedCall, Failures, Owner};

    use super::*;

    fn local(address: [u8; 4], prefix: u8, device: &str) -> LocalAddress {
        LocalAddress { address: address.into(), prefix, tentative: false, device: Some(device.to_owned()) }
    }

    #[test]
    fn the_addition_names_what_is_known() {
        let addresses = vec![
            local([10, 0, 0, 1], 24, "eth0"),
            local([10, 0, 0, 9], 16, "eth1"),
            local([10, 1, 0, 1], 16, "a;b"),
        ];
        let snapshot = Snapshot { addresses: Part::Seen(addresses), ..Snapshot::default() };
        let of = |source: &str, destination: Option<[u8; 4]>| {
            let line = addition(&snapshot, source.parse().unwrap(), destination.map(IpAddr::from));
            line.split('`').nth(1).unwrap().to_owned()
        };
        assert_eq!(of("10.0.0.99", None), "ip addr add 10.0.0.99/24 dev eth0");
        assert_eq!(of("10.0.7.99", None), "ip addr add 10.0.7.99/16 dev eth1");
        assert_eq!(of("10.9.0.1", Some([10, 0, 0, 2])), "ip addr add 10.9.0.1/32 dev eth0");
        assert_eq!(of("10.9.0.1", Some([8, 8, 8, 8])), "ip addr add 10.9.0.1/32 dev DEVICE");
        assert_eq!(of("10.1.0.2", None), "ip addr add 10.1.0.2/32 dev DEVICE", "a name for a shell");
        assert_eq!(of("2001:db8::1", None), "ip addr add 2001:db8::1/128 dev DEVICE");
    }

    #[test]
    fn a_refused_bind_names_the_missing_address() {
        let call = |address: &str| FailedCall {
            call: "bind".to_owned(),
            errno: "EADDRNOTAVAIL".to_owned(),
            protocol: "tcp".to_owned(),
            owner: Owner { pid: 7, name: "haproxy".to_owned(), sockets: 12 },
            processes: 1,
            address: Some(address.to_owned()),
            failed: 12,
            ..FailedCall::default()
        };
        let snapshot = Snapshot {
            interval_ns: 2_000_000_000,
            lost_sources: Part::Seen(Vec::new()),
            connections: Part::Seen(Connections::default()),
            addresses: Part::Seen(vec![local([10, 0, 0, 1], 24, "eth0")]),
            failures: Part::Seen(Failures {
                calls: vec![call("10.0.0.99:0"), call("10.0.0.1:0")],
                ..Failures::default()
            }),
            ..Snapshot::default()
        };
        let drafts = p11(&snapshot, 0.0).unwrap();
        let [draft] = &drafts[..] else { panic!("{} findings", drafts.len()) };
        let expected = "haproxy[7] cannot use 10.0.0.99, which is not an address of this host: 12 calls of bind() failed with EADDRNOTAVAIL in 2.0 s";
        assert_eq!(draft.verdict, expected);
        let left = crate::doctor::diagnose(&snapshot, &crate::doctor::Limits::default()).findings;
        let of = |id: &str| left.iter().filter(|finding| finding.id == id).count();
        assert_eq!((of("P11"), of("X01")), (1, 1), "the other address is not explained: {left:#?}");
    }
}
