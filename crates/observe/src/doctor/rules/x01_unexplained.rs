use std::net::SocketAddr;

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{
    FailedCall, Failures, Listener, Owner, Snapshot, UdpSocketView, Unanswered,
};

use crate::doctor::accepting::{acceptors, holders, limit_of, reads_late, reads_nothing, stopped, time};
use crate::doctor::causes::{
    ACCEPT_OUTPUT, Cure, Judged, Judgement, LOST_ROUTE, RESTORE_ROUTE, UNSENT, enable_ipv6, is_refused,
    is_unsent, judged, timed_out,
};
use crate::doctor::command::Scope;
use crate::doctor::counters::{COUNTERS, drops_of_qdisc};
use crate::doctor::datagram::sockets_at;
use crate::doctor::draft::{Draft, Remedy};
use crate::doctor::remedies::reserve;
use crate::doctor::rules::{Checked, Rule};
use crate::doctor::symptom::{Account, Item, Symptom, failed_calls, serves_others};
use crate::doctor::words::{count, counted, doing, process};

pub(super) const RULE: Rule = Rule {
    id: "X01",
    title: "failures that no other rule explains",
    source: "counters of failures in /proc/net/netstat, snmp, snmp6, softnet_stat, stat/nf_conntrack, stat/arp_cache and stat/ndisc_cache; drops of queueing disciplines (tc(8)); sock_diag(7); rtnetlink(7) (RTM_GETROUTE); the tracepoint at the \
             end of system calls (raw_syscalls:sys_exit)",
    threshold: None,
    explanation: &[
        "The other rules know certain faults. This rule keeps an account of symptoms: counters of failures that grew, calls of socket(), bind(), \
         listen(), connect(), accept(), send() and recv() that returned an error, SYNs and data that nobody answers, data that a server does not read, connections that a server closes in their first second without having read from them, DNS queries of connected sockets that \
         have waited for a second or more (SO_INCOMING_CPU: no datagram has arrived), drops of sockets and of \
         queueing disciplines, connections that wait for accept() all the time, and ports that run out within a minute. Each finding of another \
         rule takes what it explains from the account; what remains is a finding of this rule, after all others.",
        "Errors that honest programs have at any time are not in the account: EINTR, EAGAIN and EINPROGRESS of non-blocking sockets, resets by \
         peers, probes of getaddrinfo(3), a failed attempt with one address of a name if another one succeeds, unless the program has waited \
         for it, and rates below the noise of a healthy host. Processes of one name count together, and so do addresses: a program that fails once \
         with each of a hundred addresses is a symptom, unless ten times as many of its connects succeed. Two connects that are refused, or find no \
         route, are one if the address accepts none meanwhile.",
        "What a server sends and no client acknowledges is in the account if three connections, and a hundredth of its own, have had nothing \
         acknowledged at all, if ten and half of its own wait, or if it does not leave this host: clients vanish in the middle of an answer at any time. What a server does not read is in the account if it is stopped, \
         if three connections wait for a second while it sends on none of its port, or if ten requests wait although it serves others.",
        "On the host, in the network namespace of process 1, the account also has calls that fail in other namespaces, such as those of containers, if no \
         healthy program has such a failure. Their cause is for `fourtuple doctor --pid PID` or `--container ID` to say: each diagnosis examines one \
         namespace.",
        "The evidence has the causes that this errno of this call can have in the kernel, what the snapshot excludes, and what it shows. An \
         error of a non-blocking connect() counts when the program reads it by SO_ERROR. Operations of io_uring count without their address, if the tracepoint \
         io_uring_complete has them (6.18 has, 6.12 has not); calls of 32-bit programs are not seen, and while one runs, the rule without a finding counts as not checked.",
        "What helps: to look at the causes that remain. `fourtuple trace connect` and `fourtuple trace accept` show the same account for longer.",
    ],
    check,
};

const MAX_FINDINGS: usize = 10;

/// Without other rules the account has everything. `diagnose` subtracts what they explain.
fn check(snapshot: &Snapshot, _: f64) -> Checked {
    unexplained(snapshot, &Account::of(snapshot), &[])
}

/// Returns a finding for each symptom of which something remains. `checked`: the rules that were checked.
pub(crate) fn unexplained(snapshot: &Snapshot, account: &Account<'_>, checked: &[String]) -> Checked {
    let rest = account.rest();
    if rest.is_empty() {
        // Silence means something only if the calls were seen.
        snapshot.counters.seen()?;
        let failures = snapshot.failures.seen().map_err(|reason| {
            format!("{reason}; `fourtuple trace connect --for 10s` counts the calls that fail")
        })?;
        return match of_32_bits(&failures.processes_32_bit).or_else(|| not_listed(failures)) {
            Some(reason) => Err(reason),
            None => Ok(Vec::new()),
        };
    }
    let mut drafts: Vec<Draft> =
        rest.iter().take(MAX_FINDINGS).map(|item| draft(snapshot, item, checked)).collect();
    if let (Some(last), more @ 1..) = (drafts.last_mut(), rest.len().saturating_sub(MAX_FINDINGS)) {
        let further: Vec<String> = rest[MAX_FINDINGS..].iter().take(5).map(|item| item.sentence()).collect();
        last.evidence.push(format!("{}: {}", counted(more as u64, "further symptom"), further.join("; ")));
    }
    let failures = snapshot.failures.seen().ok();
    if let (Some(last), Some(failures)) = (drafts.last_mut(), failures) {
        last.evidence.extend(of_32_bits(&failures.processes_32_bit));
        last.evidence.extend(not_listed(failures));
    }
    Ok(drafts)
}

/// Says that there are more failures than the account has.
fn not_listed(failures: &Failures) -> Option<String> {
    let more = counted(failures.left_out, "more call");
    (failures.left_out > 0).then(|| format!("{more} for further addresses failed, and are not listed"))
}

/// Says that the calls of these processes are not in the account.
fn of_32_bits(processes: &[Owner]) -> Option<String> {
    let names: Vec<String> = processes.iter().map(process).collect();
    (!names.is_empty()).then(|| {
        format!("failed calls of programs of 32 bits are not seen ({}); `strace -f -Z -e trace=network -p PID` shows them", names.join(", "))
    })
}

fn draft(snapshot: &Snapshot, item: &Item<'_>, checked: &[String]) -> Draft {
    let severity = match item.symptom {
        Symptom::Counter { .. } | Symptom::Qdisc { .. } => Severity::Notice,
        _ => Severity::Warning,
    };
    let processes = item.processes();
    let call = match item.symptom {
        Symptom::Calls(call) => Some(FailedCall { processes, ..call.clone() }),
        Symptom::Unanswered { found, .. } if !found.established => {
            let owner = found.owner.clone().unwrap_or_default();
            let timed_out = timed_out(&owner, processes, found.destination, found.sockets.into());
            Some(FailedCall { route: found.route.clone(), ..timed_out })
        }
        Symptom::GivenUp { connects, .. } => {
            Some(timed_out(&connects.owner, processes, connects.destination, connects.failed))
        }
        _ => None,
    };
    let call = call.as_ref();
    let judgement = call.map(|call| judged(snapshot, call, checked));
    // No rule knows the fault, but the cause of the errno may be known.
    let half_open = half_open(snapshot, &item.symptom);
    let unread = unread(snapshot, &item.symptom);
    let kept_here = match item.symptom {
        Symptom::Unanswered { found, .. } | Symptom::Unacknowledged { found, .. } if found.established => {
            Some((found, kept_here(snapshot, found)))
        }
        _ => None,
    };
    let is_known = half_open.is_some()
        || unread.is_some()
        || kept_here.is_some_and(|(_, (is_cause, ..))| is_cause == Judged::Yes)
        || matches!(item.symptom, Symptom::Unread(_) | Symptom::Datagrams(_))
        || matches!(judgement, Some(Judgement::Shown(_)));
    let kind = if is_known { "" } else { "unexplained: " };
    let during = match item.symptom {
        Symptom::Unanswered { .. }
        | Symptom::Unacknowledged { .. }
        | Symptom::Unread(_)
        | Symptom::Datagrams(_)
        | Symptom::Queries(_) => String::new(),
        _ => format!(" in {}", time(snapshot.interval_ns)),
    };
    let verdict = format!("{kind}{}{during}", item.sentence());
    let mut draft = Draft::new(severity, item.subject(), verdict);
    if item.rest < item.amount {
        let name = |rule: &&'static str| if *rule == RULE.id { "other symptoms" } else { rule };
        let by = item.by.iter().map(name).collect::<Vec<_>>().join(", ");
        draft = draft.because(format!(
            "explained by {by}: {} of {}",
            count(item.amount - item.rest),
            count(item.amount)
        ));
    }
    if let (Some(call), Some(judgement)) = (call, judgement) {
        draft.evidence.extend(judgement.facts(snapshot, call));
        draft.proper.extend(judgement.cures(snapshot, call));
        draft.now.extend(enable_ipv6(snapshot, call));
        draft.now.extend(reserve(snapshot, call));
    }
    if let Some(listener) = half_open {
        return not_completed(draft, snapshot, listener);
    }
    if let Some((found, kept_here)) = kept_here {
        return unacknowledged(draft, found, kept_here);
    }
    match &item.symptom {
        Symptom::Counter { name, counter } => {
            let draft = match COUNTERS.iter().find(|row| row.name == *name) {
                Some(row) => row.explain(draft),
                None => draft,
            };
            draft.because(format!("{} since the namespace was created", count(counter.total)))
        }
        Symptom::Qdisc { kind, drops, packets, device } => drops_of_qdisc(kind)
            .follow(draft, device)
            .because(format!("{} passed it in the same time", counted(*packets, "packet")))
            .because(format!("{} dropped since it was set up", counted(drops.total, "packet"))),
        Symptom::Queue { port: Some(port), .. } => draft
            .now(Remedy::own(format!("trace accept --port {port} --for 10s"), "shows which worker accepts")),
        Symptom::Growth { seconds, .. } => {
            draft.because(format!("at this rate the last port is taken in {seconds} s"))
        }
        Symptom::Unread(unread) if serves_others(unread) => reads_late(draft, snapshot, &unread.owner),
        Symptom::Unread(unread) => reads_nothing(draft, snapshot, &unread.owner),
        Symptom::Datagrams(socket) => by_no_one(draft, snapshot, socket),
        Symptom::TurnedAway { listener, .. } => turned_away(draft, snapshot, listener),
        Symptom::Queries(queries) => match unread {
            Some(socket) => not_read(draft, snapshot, socket),
            None => without_answer(draft, queries.server),
        },
        Symptom::Elsewhere { pid, calls } => calls
            .iter()
            .skip(1)
            .take(3)
            .fold(draft, |draft, call| draft.because(failed_calls(call, call.failed)))
            .now(Remedy::own(format!("doctor --pid {pid}"), "examines that namespace")),
        Symptom::GivenUp { instead: Some(instead), .. } => draft.because_first(format!(
            "it then uses {instead}: each of its connections begins later, by the time that it waits first (200 ms in curl, 250 to 300 ms in others)"
        )),
        Symptom::GivenUp { .. }
        | Symptom::Calls(_)
        | Symptom::Unanswered { .. }
        | Symptom::Unacknowledged { .. }
        | Symptom::Drops { .. }
        | Symptom::Queue { .. } => draft,
    }
}

/// Says why a server closes connections unread.
fn turned_away(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    let connections = snapshot.connections.seen().ok();
    let mut services = connections.into_iter().flat_map(|connections| &connections.services);
    let service = services.find(|service| service.port == listener.address.port());
    let open = service.and_then(|service| service.states.get("established")).copied().unwrap_or(0);
    let setting = limit_of(&listener.owners).unwrap_or("its setting for this");
    draft
        .because(format!(
            "each was closed in its first second; {} open there now",
            doing(open, "connection", "are")
        ))
        .because(
            "possible: the server is at a limit of its connections, and says so to the clients or in its log",
        )
        .because(
            "possible: it refuses the addresses of the clients, or only the server speaks in this protocol",
        )
        .proper(Remedy::advice(
            format!(
                "{}: {setting}, if its log names a limit; else fewer connections of the clients (a pool)",
                holders(&listener.owners)
            ),
            "connections are served",
        ))
}

/// Returns the UDP socket of this host that has queries to `server` in its queue.
fn unread<'a>(snapshot: &'a Snapshot, symptom: &Symptom<'_>) -> Option<&'a UdpSocketView> {
    let Symptom::Queries(queries) = symptom else { return None };
    sockets_at(snapshot, queries.server).find(|socket| socket.queued_bytes > 0)
}

/// Says why a DNS server gives no answer.
fn without_answer(draft: Draft, server: SocketAddr) -> Draft {
    let by_hand = Remedy::other(
        Scope::Namespace,
        format!("dig +tries=1 +time=2 @{} -p {} .", server.ip(), server.port()),
        "shows whether the server answers this host",
    );
    draft
        .because("each name costs 5 s before connect() or fails: glibc waits 5 s for an answer and asks each server twice (`timeout:` and `attempts:` of resolv.conf(5))")
        .because("possible: the server is down, or it does not answer queries from this source address")
        .because("possible: a firewall on the way drops the queries or the answers, or has forgotten the UDP flow")
        .because("possible: the server waits itself: a resolver whose own servers do not answer")
        .now(by_hand)
        .proper(Remedy::advice(
            "accept UDP port 53 in the firewall, or name a server that answers first in /etc/resolv.conf; `options timeout:1 attempts:2` \
             shortens the wait meanwhile",
            "names are resolved",
        ))
}

/// Says that the DNS server of this host does not read its queries.
fn not_read(draft: Draft, snapshot: &Snapshot, socket: &UdpSocketView) -> Draft {
    let draft = draft.because(format!(
        "{} is a socket of {}, whose queue holds {} of queries that it has not read",
        socket.local,
        holders(&socket.owners),
        counted(socket.queued_bytes, "byte"),
    ));
    by_no_one(draft, snapshot, socket)
}

/// Says why the processes of a UDP socket do not read from it.
fn by_no_one(draft: Draft, snapshot: &Snapshot, socket: &UdpSocketView) -> Draft {
    match stopped(snapshot, &socket.owners).or(socket.owners.first()) {
        Some(owner) => reads_nothing(draft, snapshot, owner),
        None => draft,
    }
}

/// Returns whether this host itself keeps the data of established connections, the cause and what mends it.
fn kept_here(snapshot: &Snapshot, found: &Unanswered) -> (Judged, &'static str, Cure) {
    match is_refused(found.route.as_ref()) {
        true => (Judged::Yes, LOST_ROUTE, RESTORE_ROUTE),
        false => (is_unsent(snapshot, found), UNSENT, ACCEPT_OUTPUT),
    }
}

/// Says why established connections get no acknowledgement of their data.
fn unacknowledged(mut draft: Draft, found: &Unanswered, kept_here: (Judged, &str, Cure)) -> Draft {
    let to = found.destination.ip();
    let (is_cause, cause, (action, effect)) = kept_here;
    if is_cause != Judged::No {
        let how = if is_cause == Judged::Yes { "the cause here" } else { "possible" };
        let of = |text: &str| text.replace("ADDRESS", &to.to_string());
        draft = draft.because(format!("{how}: {}", of(cause))).proper(Remedy::advice(of(action), effect));
    }
    if is_cause == Judged::Yes {
        return draft;
    }
    // What fits into a packet of 1500 bytes behind the headers of IP and ICMP.
    let fits = if to.is_ipv4() { 1_472 } else { 1_452 };
    let advice = format!(
        "`ping -M do -s {fits} {to}`, and with `-s 500`: if only the small packets are answered, a lower mtu of the route (`ip route change`), \
         or `sysctl -w net.ipv4.tcp_mtu_probing=1`"
    );
    if found.none_acknowledged > 0 {
        draft = draft.because(format!(
            "the handshakes are complete, and of {} no data was ever acknowledged",
            counted(found.none_acknowledged.into(), "connection")
        ));
    }
    draft = draft
        .because("possible: packets of full size do not arrive: the path has a smaller MTU, and the ICMP messages that say so are dropped")
        .because("possible: the host is down since, or a firewall has forgotten the connections")
        .proper(Remedy::advice(advice, "the data is acknowledged"));
    if found.service.is_some() {
        return draft;
    }
    draft
        .because(
            "possible: the accept queue of the server is full: it has dropped the last ACK of the handshake, and drops the data",
        )
        .proper(Remedy::advice(
            "on the server, `ss -ltn`: if Recv-Q is above Send-Q, workers that accept, or a longer backlog (`fourtuple doctor` there names them)",
            "new connections have a place",
        ))
}

/// Returns the listener with most handshakes whose SYN-ACK was sent again, if that is why the counter of SYNs that are sent again grew: no
/// connection of this host waits for an answer.
fn half_open<'a>(snapshot: &'a Snapshot, symptom: &Symptom<'_>) -> Option<&'a Listener> {
    let Symptom::Counter { name: "TcpExt.TCPSynRetrans", .. } = symptom else { return None };
    let waiting = &snapshot.connections.seen().ok()?.states;
    let listeners = snapshot.listeners.seen().ok()?.iter();
    let most = listeners.max_by_key(|listener| listener.handshakes_resent)?;
    (most.handshakes_resent > 0 && !waiting.contains_key("syn-sent")).then_some(most)
}

/// Says why handshakes are not completed.
fn not_completed(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    let client = listener.resent_to.map_or_else(String::new, |client| format!(" such as {client}"));
    draft
        .because(format!(
            "at {} of {} clients{client} have not answered the SYN-ACK: {} of {} in progress",
            listener.address,
            acceptors(snapshot, listener),
            count(listener.handshakes_resent.into()),
            counted(listener.handshakes.into(), "handshake")
        ))
        .because("possible: a firewall, or a router that sees one direction only, drops the SYN-ACK or the last ACK")
        .because("possible: the addresses are false (a scan or a SYN flood), or the clients send nothing and the listener waits for data (TCP_DEFER_ACCEPT)")
        .now(Remedy::other(
            Scope::Namespace,
            format!("ss -tno state syn-recv sport = :{}", listener.address.port()),
            "the clients, and how often their SYN-ACK was sent",
        ))
        .proper(Remedy::advice(
            "for clients that are known: `tcpdump` on both sides shows where the SYN-ACK ends; accept it in the firewall there, or let both \
             directions take the same way",
            "the handshake is completed",
        ))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use fourtuple_record::snapshot::{
        Connections, Conntrack, Counter, EphemeralPorts, FailedElsewhere, Failures, Listener, LocalAddress,
        Owner, Part, Process, Service, Traced, TracedAccepts, TracedConnects, Tuple, TurnedAway, UdpSockets,
        UnansweredQueries, Unread,
    };
    use fourtuple_record::{Finding, errno};

    use super::*;
    use crate::doctor::attribute::tests::full_tuple;
    use crate::doctor::counters::COUNTERS;
    use crate::doctor::draft::What;
    use crate::doctor::{Diagnosis, Limits, diagnose};

    fn failed(call: &str, errno: &str, protocol: &str, address: &str, failed: u64) -> FailedCall {
        FailedCall {
            call: call.to_owned(),
            errno: errno.to_owned(),
            protocol: protocol.to_owned(),
            owner: Owner { pid: 812, name: "pgbouncer".to_owned(), sockets: failed as u32 },
            processes: 1,
            address: Some(address.to_owned()),
            before_search: address.starts_with("[::1]"),
            failed,
            ..FailedCall::default()
        }
    }

    fn snapshot(calls: Vec<FailedCall>, counters: &[(&str, u64)]) -> Snapshot {
        let counter =
            |(name, during): &(&str, u64)| ((*name).to_owned(), Counter { total: 7, during: *during });
        Snapshot {
            interval_ns: 2_000_000_000,
            failures: Part::Seen(Failures { calls, ..Failures::default() }),
            counters: Part::Seen(counters.iter().map(counter).collect()),
            ..Snapshot::default()
        }
    }

    /// A socket whose SYN was sent again twice.
    fn silent(destination: SocketAddr) -> Unanswered {
        Unanswered {
            destination,
            established: false,
            sockets: 1,
            retransmits: 2,
            unsent: 0,
            none_acknowledged: 0,
            route: None,
            service: None,
            owner: None,
        }
    }

    fn found(snapshot: &Snapshot) -> Vec<(String, Vec<String>)> {
        let Diagnosis { findings, .. } = diagnose(snapshot, &Limits::default());
        let own = findings.into_iter().filter(|finding| finding.id == "X01");
        own.map(|finding| (finding.verdict, finding.evidence)).collect()
    }

    #[test]
    fn calls_for_many_addresses_or_of_many_processes_are_a_symptom_together() {
        let to = |host: u32| format!("10.0.0.{host}:80");
        let of = |calls: Vec<FailedCall>| -> Vec<String> {
            found(&snapshot(calls, &[])).into_iter().map(|(verdict, _)| verdict).collect()
        };
        let once = |errno: &str, host| failed("connect", errno, "tcp", &to(host), 1);
        let lost = |number: u32| (11..11 + number).map(|host| once("ENETUNREACH", host)).collect::<Vec<_>>();
        let expected = "unexplained: 40 connect() of pgbouncer[812] to 40 addresses such as 10.0.0.11:80 failed with ENETUNREACH in 2.0 s";
        assert_eq!(of(lost(40)), [expected]);
        assert_eq!(of(lost(2)), <[String; 0]>::default(), "one a second");
        let further = FailedCall { addresses: 30, failed: 30, ..once("ENETUNREACH", 99) };
        assert_eq!(of([lost(10), vec![further]].concat()), [expected]);
        // The route was looked up for one of them only.
        let known = FailedCall { route: Some("ENETUNREACH".to_owned()), ..once("ENETUNREACH", 99) };
        let mut twice = lost(40);
        twice.iter_mut().for_each(|call| call.failed = 2);
        let all = of([twice, vec![known]].concat());
        assert!(
            all.len() == 1
                && all[0].starts_with("81 connect() of pgbouncer[812] to 41 addresses such as 10.0.0.99:80"),
            "{all:?}"
        );
        // An address of its own is a symptom of its own.
        let mut one = lost(40);
        one[9].failed = 9;
        let own =
            "unexplained: 9 connect() of pgbouncer[812] to 10.0.0.20:80 failed with ENETUNREACH in 2.0 s";
        assert_eq!(of(one), [&*expected.replace("40", "39"), own]);
        let often = |number| lost(number).into_iter().map(|call| FailedCall { failed: 9, ..call }).collect();
        assert_eq!(of(often(3)).len(), 3);
        let all = "unexplained: 36 connect() of pgbouncer[812] to 4 addresses such as 10.0.0.11:80 failed with ENETUNREACH in 2.0 s";
        assert_eq!(of(often(4)), [all]);
        // Other errnos and other programs are no part of it.
        let mut several = lost(2);
        several.extend((13..15).map(|host| once("ECONNREFUSED", host)));
        several.extend(lost(2).into_iter().map(|call| FailedCall {
            owner: Owner { name: "curl".to_owned(), ..call.owner.clone() },
            ..call
        }));
        assert_eq!(of(several), <[String; 0]>::default());
        let workers = (0..50).map(|pid| {
            let call = once("ECONNREFUSED", 1);
            FailedCall { owner: Owner { pid, ..call.owner.clone() }, ..call }
        });
        let workers: Vec<FailedCall> = workers.collect();
        let expected = "unexplained: 50 connect() of pgbouncer (50 processes) to 10.0.0.1:80 failed with ECONNREFUSED in 2.0 s";
        assert_eq!(of(workers), [expected]);
    }

    #[test]
    fn some_hosts_of_a_crawler_are_down() {
        let to = |host| format!("10.0.0.{host}:80").parse::<SocketAddr>().unwrap();
        let owner = |pid| Owner { pid, name: "pgbouncer".to_owned(), sockets: 0 };
        let connects = |pid, host, failed, established| {
            let (owner, destination) = (owner(pid), to(host));
            TracedConnects {
                owner,
                destination,
                processes: 1,
                failed,
                established,
                ..TracedConnects::default()
            }
        };
        let with = |snapshot: &Snapshot, connects: Vec<TracedConnects>, established| {
            let traced = Part::Seen(Traced { connects, established, ..Traced::default() });
            let found = found(&Snapshot { traced, ..snapshot.clone() });
            found.into_iter().map(|(verdict, _)| verdict).collect::<Vec<_>>()
        };
        let refused = (1..=40).map(|host| failed("connect", "ECONNREFUSED", "tcp", &to(host).to_string(), 1));
        let refused = snapshot(refused.collect(), &[]);
        assert_eq!(with(&refused, vec![connects(812, 41, 0, 401)], 401), <[String; 0]>::default());
        assert_eq!(with(&refused, vec![connects(812, 41, 0, 400)], 400).len(), 1);
        // Those that the trace does not list may all be of the program.
        assert_eq!(with(&refused, Vec::new(), 401).len(), 0);
        assert_eq!(
            with(&refused, vec![TracedConnects { owner: Owner::default(), ..connects(7, 41, 0, 9) }], 409)
                .len(),
            1
        );
        // Each destination is given up once, by one of two processes.
        let given_up: Vec<_> = (1..=40).map(|host| connects(7 + host % 2, host, 1, 0)).collect();
        let expected = "unexplained: 40 calls of connect() of pgbouncer (2 processes) to 40 addresses such as 10.0.0.10:80 got no answer \
                        until the program closed the socket, and none succeeded in 2.0 s";
        assert_eq!(
            with(&snapshot(Vec::new(), &[("Tcp.AttemptFails", 40)]), given_up.clone(), 40),
            [expected]
        );
        assert_eq!(with(&snapshot(Vec::new(), &[]), given_up.clone(), 41).len(), 0);
        // The SYNs of others are not theirs.
        let resent = snapshot(Vec::new(), &[("TcpExt.TCPSynRetrans", 900)]);
        assert_eq!(with(&resent, given_up, 40).len(), 2);
        assert_eq!(
            with(&snapshot(Vec::new(), &[]), vec![connects(7, 1, 1, 0), connects(7, 2, 1, 0)], 0).len(),
            0
        );
    }

    #[test]
    fn silent_hosts_of_a_program_are_one_symptom() {
        let owner = Owner { pid: 7, name: "crawler".to_owned(), sockets: 1 };
        let hosts = |number| {
            let to = |host| format!("10.0.0.{host}:80").parse().unwrap();
            let of = |host| Unanswered { owner: Some(owner.clone()), ..silent(to(host)) };
            (1..=number).map(of).collect::<Vec<_>>()
        };
        let of = |number, left_out| {
            let states = [("established".to_owned(), left_out)].into();
            let (unanswered, tuples_left_out_states) = (hosts(number), states);
            let connections = Connections { unanswered, tuples_left_out_states, ..Connections::default() };
            let found = found(&Snapshot {
                connections: Part::Seen(connections),
                ..snapshot(Vec::new(), &[("TcpExt.TCPSynRetrans", 20)])
            });
            found.into_iter().map(|(verdict, _)| verdict).collect::<Vec<_>>()
        };
        let many = "unexplained: 9 connections of crawler[7] to 9 addresses such as 10.0.0.1:80 get no answer: their SYNs were sent again";
        assert_eq!(of(9, 0), [many]);
        assert_eq!(of(9, 90), [many]);
        // Nine of a hundred hosts may be down; the counter still says so.
        assert_eq!(of(9, 91), ["unexplained: TcpExt.TCPSynRetrans grew by 20 in 2.0 s"]);
    }

    #[test]
    fn without_calls_of_32_bit_programs_silence_means_nothing() {
        let mut seen = snapshot(Vec::new(), &[("TcpExt.ListenDrops", 0)]);
        let unchecked = |snapshot: &Snapshot| {
            let unchecked = diagnose(snapshot, &Limits::default()).unchecked;
            unchecked.into_iter().find(|rule| rule.id == "X01").map(|rule| rule.reason)
        };
        assert_eq!(unchecked(&seen), None);
        let game = Owner { pid: 77, name: "game".to_owned(), sockets: 0 };
        let mut failures = Failures { processes_32_bit: vec![game], ..Failures::default() };
        seen.failures = Part::Seen(failures.clone());
        let reason = unchecked(&seen).unwrap();
        let not_seen = "failed calls of programs of 32 bits are not seen (game[77]); ";
        assert!(reason.starts_with(not_seen), "{reason}");
        failures.calls = vec![failed("connect", "EHOSTUNREACH", "tcp", "10.0.0.3:80", 7)];
        seen.failures = Part::Seen(failures);
        let [(_, evidence)] = &found(&seen)[..] else { panic!("{:?}", found(&seen)) };
        assert!(evidence.last().unwrap().contains("(game[77])"), "{evidence:?}");
        seen.failures = Part::Seen(Failures { left_out: 7, ..Failures::default() });
        assert_eq!(
            unchecked(&seen).unwrap(),
            "7 more calls for further addresses failed, and are not listed"
        );
    }

    #[test]
    fn a_failure_without_a_rule_is_named_with_its_causes() {
        let mut snapshot = snapshot(vec![failed("connect", "EADDRNOTAVAIL", "tcp", "[::1]:6432", 320)], &[]);
        let of = found(&snapshot);
        let expected = "320 connect() of pgbouncer[812] to [::1]:6432 failed with EADDRNOTAVAIL in 2.0 s";
        assert_eq!(of[0].0, expected);
        assert!(of[0].1[0].starts_with("the cause here: no source address"), "{of:?}");
        let local = |address: IpAddr| LocalAddress { address, prefix: 8, tentative: false, device: None };
        snapshot.addresses = Part::Seen(vec![local([127, 0, 0, 1].into())]);
        assert!(found(&snapshot)[0].1[0].starts_with("the cause here: the host has no IPv6 address"));
        // A sysctl of the loopback device or of all devices; another device and the default have no part in it.
        let disabled = "the host has no IPv6 address to connect from";
        for (device, is_cause) in [("eth0", false), ("default", false), ("lo", true), ("all", true)] {
            let name = format!("net.ipv6.conf.{device}.disable_ipv6");
            snapshot.sysctls.insert(name.clone(), "1".to_owned());
            let finding = diagnose(&snapshot, &Limits::default()).findings.pop().unwrap();
            let commands: Vec<&str> = finding.now.iter().map(|advice| advice.action.as_str()).collect();
            match is_cause {
                false => assert_eq!(commands, Vec::<&str>::new()),
                true => {
                    assert_eq!(finding.evidence[0], format!("the cause here: {disabled}: {name} is 1"));
                    // Also where the sysctl of all devices has set it.
                    let name = "net.ipv6.conf.lo.disable_ipv6";
                    assert_eq!(commands, [format!("sysctl -w {name}=0")]);
                    assert_eq!(finding.now[0].undo, Some(format!("sysctl -w {name}=1")));
                }
            }
        }
        snapshot.sysctls.clear();
        // To another host: neither the default nor the loopback device.
        let call = failed("connect", "EADDRNOTAVAIL", "tcp", "[2001:db8::2]:80", 3);
        let call = FailedCall { before_search: true, ..call };
        snapshot.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
        let disabled = |snapshot: &Snapshot| found(snapshot)[0].1[0].contains("is 1");
        for (device, is_cause) in [("default", false), ("lo", false), ("eth0", true)] {
            snapshot.sysctls.insert(format!("net.ipv6.conf.{device}.disable_ipv6"), "1".to_owned());
            assert_eq!(disabled(&snapshot), is_cause, "{device}");
        }
        snapshot.sysctls.clear();
        let call = failed("connect", "EADDRNOTAVAIL", "tcp", "[::1]:6432", 320);
        snapshot.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
        snapshot.addresses = Part::Seen(vec![local(Ipv6Addr::LOCALHOST.into())]);
        assert!(found(&snapshot)[0].1[0].starts_with("the cause here: no source address"));
    }

    #[test]
    fn each_counter_that_grows_is_named() {
        for row in COUNTERS {
            let mut seen = snapshot(Vec::new(), &[(row.name, 10_000)]);
            if let Some(name) = row.name.strip_prefix("conntrack.") {
                let counters = [(name.to_owned(), Counter { total: 10_000, during: 10_000 })].into();
                let conntrack = Conntrack { count: 1, limit: 100_000, counters, translated: None };
                seen.conntrack = Part::Seen(conntrack);
            }
            let findings = diagnose(&seen, &Limits::default()).findings;
            let names = |finding: &Finding| finding.id != "X01" || finding.verdict.contains(row.name);
            assert!(findings.iter().any(names), "{}: {findings:#?}", row.name);
        }
    }

    /// AttemptFails counts refused connects too; the trace begins after the first reading of the counters, and ends before the second.
    #[test]
    fn counters_say_no_more_than_the_calls() {
        let refused = |calls| failed("connect", "ECONNREFUSED", "tcp", "10.0.0.3:80", calls);
        let of = |calls, fails| -> Vec<String> {
            let snapshot =
                snapshot(vec![refused(calls)], &[("Tcp.AttemptFails", fails), ("Tcp.ActiveOpens", fails)]);
            let first = |(verdict, evidence): (String, Vec<String>)| match evidence.into_iter().next() {
                Some(fact) if fact.starts_with("explained") => format!("{verdict}; {fact}"),
                _ => verdict,
            };
            found(&snapshot).into_iter().map(first).collect()
        };
        let calls =
            "unexplained: 40 connect() of pgbouncer[812] to 10.0.0.3:80 failed with ECONNREFUSED in 2.0 s";
        assert_eq!(of(40, 75), [calls]);
        assert_eq!(
            of(40, 300),
            [
                calls,
                "unexplained: Tcp.AttemptFails grew by 220 in 2.0 s; explained by other symptoms: 80 of 300"
            ]
        );
        // The kernel counts a SYN for an open connection in both, and does so all the time on a server with many clients.
        let counters = |challenges, errors, opens| {
            let counters =
                [("TcpExt.TCPSYNChallenge", challenges), ("Tcp.InErrs", errors), ("Tcp.PassiveOpens", opens)];
            found(&snapshot(Vec::new(), &counters))
                .into_iter()
                .map(|(verdict, _)| verdict)
                .collect::<Vec<_>>()
        };
        let challenged = "unexplained: TcpExt.TCPSYNChallenge grew by 60 in 2.0 s";
        assert_eq!(counters(60, 60, 60), [challenged]);
        assert_eq!(counters(60, 60, 60_000), <[String; 0]>::default());
        assert_eq!(counters(60, 100, 60), [challenged, "unexplained: Tcp.InErrs grew by 40 in 2.0 s"]);
        // Fewer than two a second are not a symptom, and still what the counter counts.
        assert_eq!(of(3, 4), <[String; 0]>::default());
    }

    #[test]
    fn a_syn_alone_is_lost_now_and_then() {
        let owner = |pid| Some(Owner { pid, name: "crawler".to_owned(), sockets: 1 });
        let unanswered = |sockets, retransmits, owner| {
            let destination = "10.0.0.2:80".parse().unwrap();
            Connections {
                unanswered: vec![Unanswered { sockets, retransmits, owner, ..silent(destination) }],
                ..Connections::default()
            }
        };
        let of = |connections: Connections| {
            found(&Snapshot {
                connections: Part::Seen(connections),
                ..snapshot(Vec::new(), &[("TcpExt.TCPSynRetrans", 20)])
            })
        };
        let [(verdict, evidence)] = &of(unanswered(2, 3, owner(7)))[..] else { panic!("one finding") };
        let expected = "unexplained: 2 connections of crawler[7] to 10.0.0.2:80 get no answer: their SYNs were sent again 3 times";
        assert_eq!(verdict, expected);
        assert!(evidence[0].starts_with("possible: the host is down"), "{evidence:?}");
        let alone = of(unanswered(1, 2, owner(7)));
        assert!(alone[0].0.ends_with("gets no answer: its SYN was sent again 2 times"), "{alone:?}");
        let mut cut = unanswered(2, 9, owner(7));
        cut.unanswered[0].established = true;
        let expected = "unexplained: 2 connections of crawler[7] to 10.0.0.2:80 get no acknowledgement: their data was sent again 9 times";
        assert_eq!(of(cut.clone())[0].0, expected);
        // Without a route, a firewall is not to blame for data that is not sent, nor for a SYN.
        (cut.unanswered[0].unsent, cut.unanswered[0].route) = (2, Some(errno::ENETUNREACH.to_owned()));
        let lost = "the cause here: no route leads to 10.0.0.2 any more, or it is of type";
        let [(verdict, evidence), ..] = &of(cut.clone())[..] else { panic!("a finding") };
        assert!(verdict.starts_with("2 connections") && evidence.len() == 1, "{verdict} {evidence:?}");
        assert!(evidence[0].starts_with(lost), "{evidence:?}");
        cut.unanswered[0].established = false;
        let evidence = &of(cut.clone())[0].1;
        assert!(
            evidence[0].starts_with(lost) && !evidence.iter().any(|fact| fact.contains(UNSENT)),
            "{evidence:?}"
        );
        cut.unanswered[0].route = Some("unicast".to_owned());
        assert!(of(cut)[0].1[0].contains(UNSENT));
        // Sent again once; by a process with other connections; to a server that has many.
        assert!(!of(unanswered(1, 1, owner(7)))[0].0.contains("no answer"));
        let open = |to: &str, number| Tuple {
            destination: to.parse().unwrap(),
            states: [("established".to_owned(), number)].into(),
            ..full_tuple(80, vec![owner(7).unwrap()])
        };
        for (sockets, tuple) in [(1, open("10.0.0.9:80", 1)), (2, open("10.0.0.2:80", 21))] {
            let connections = Connections { tuples: vec![tuple], ..unanswered(sockets, 4, owner(7)) };
            assert!(!of(connections)[0].0.contains("no answer"), "{sockets}");
        }
    }

    /// A proxy leaves the data of some connections unread while the server behind it is slow.
    #[test]
    fn processes_that_read_from_no_connection_are_a_symptom() {
        let nginx = |pid, sockets| Owner { pid, name: "nginx".to_owned(), sockets };
        let of = |sockets, sent_ns, state, waits_in: Option<&str>, standing| {
            let short = sockets / 2;
            let unread =
                Unread { port: 80, owner: nginx(7, sockets), short, oldest_ns: 3_000_000_000, sent_ns };
            let of_it = Process {
                pid: 7,
                name: "nginx".to_owned(),
                state,
                waits_in: waits_in.map(str::to_owned),
                cpu_ns: Some(if waits_in.is_none() { 1_980_000_000 } else { 0 }),
                ..Process::default()
            };
            let listener = Listener {
                address: "0.0.0.0:80".parse().unwrap(),
                cookie: 9,
                backlog: 511,
                waiting: standing,
                waiting_before: standing,
                standing,
                owners: vec![nginx(6, 1), nginx(7, 1)],
                ..Listener::default()
            };
            let connections = Connections { unread: vec![unread], ..Connections::default() };
            let found = found(&Snapshot {
                connections: Part::Seen(connections),
                listeners: Part::Seen(vec![listener]),
                processes: Part::Seen(vec![of_it]),
                ..snapshot(Vec::new(), &[])
            });
            found.into_iter().find(|(verdict, _)| verdict.contains("has not read"))
        };
        let (verdict, evidence) = of(34, 3_100_000_000, 'S', Some("futex_do_wait"), 0).unwrap();
        let expected = "34 connections of nginx[7] at port 80 have data that it has not read for up to 3.0 s";
        assert_eq!(verdict, expected);
        assert_eq!(evidence, ["nginx[7] is blocked in futex_do_wait(), not overloaded"]);
        let because = |waits_in| of(3, u64::MAX, 'R', waits_in, 0).unwrap().1.remove(0);
        assert!(because(None).starts_with("nginx[7] used 0.99 processors"), "{}", because(None));
        assert!(
            because(Some("ep_poll"))
                .starts_with("nginx[7] is waiting for events (ep_poll), but not for these")
        );
        // Silent: the server serves others meanwhile; two connections only; connections wait for accept() too, which A07 says.
        for (sockets, sent_ns, standing) in [(19, 2_900_000_000, 0), (2, u64::MAX, 0), (34, u64::MAX, 5)] {
            assert_eq!(of(sockets, sent_ns, 'S', Some("ep_poll"), standing), None, "{sockets} {standing}");
        }
        let (_, evidence) = of(20, 2_900_000_000, 'S', Some("futex_do_wait"), 0).unwrap();
        assert!(evidence[0].starts_with("nginx[7] serves other connections meanwhile: "), "{evidence:?}");
        let (verdict, evidence) = of(1, 0, 'T', None, 0).unwrap();
        assert!(verdict.starts_with("1 connection of nginx[7] at port 80 has data that"), "{verdict}");
        assert_eq!(evidence, ["nginx[7] is stopped by a signal (state T)"]);
    }

    #[test]
    fn a_process_that_is_not_visible_gets_no_command() {
        let owner = Owner { sockets: 12, ..Owner::default() };
        let unread = Unread { port: 80, owner, short: 12, oldest_ns: 3_000_000_000, sent_ns: 0 };
        let connections = Connections { unread: vec![unread], ..Connections::default() };
        let seen = Snapshot { connections: Part::Seen(connections), ..snapshot(Vec::new(), &[]) };
        let finding = diagnose(&seen, &Limits::default()).findings.pop().unwrap();
        assert!(
            finding.verdict.starts_with("12 connections of a process that is not visible at port 80 have")
        );
        assert_eq!(finding.now, []);
    }

    /// A busy server has datagrams in its queue at any time.
    #[test]
    fn datagrams_of_a_stopped_process_are_a_symptom() {
        let of = |state, queued_bytes, during| {
            let owner = Owner { pid: 7, name: "syslog".to_owned(), sockets: 1 };
            let socket = UdpSocketView {
                local: "0.0.0.0:514".parse().unwrap(),
                queued_bytes,
                drops: Some(Counter { total: 9, during }),
                owners: vec![owner],
                ..UdpSocketView::default()
            };
            let of_it = Process { pid: 7, name: "syslog".to_owned(), state, ..Process::default() };
            let found = found(&Snapshot {
                udp: Part::Seen(UdpSockets { total: 1, sockets: vec![socket], ..UdpSockets::default() }),
                processes: Part::Seen(vec![of_it]),
                ..snapshot(Vec::new(), &[])
            });
            found.into_iter().find(|(verdict, _)| verdict.contains("datagrams"))
        };
        let (verdict, evidence) = of('T', 832, 0).unwrap();
        assert_eq!(
            verdict,
            "the UDP socket 0.0.0.0:514 of syslog[7] has 832 bytes of datagrams that it does not read"
        );
        assert_eq!(evidence, ["syslog[7] is stopped by a signal (state T)"]);
        // It runs; nothing has come; the socket drops already (U01).
        for (state, queued, drops) in [('S', 832, 0), ('T', 0, 0), ('T', 832, 1)] {
            assert_eq!(of(state, queued, drops), None, "{state} {queued} {drops}");
        }
    }

    /// Clients go without a word at any time, with the rest of an answer on its way to them.
    #[test]
    fn clients_that_never_acknowledged_any_data_are_a_symptom() {
        let of = |sockets, none_acknowledged, unsent, established| {
            let found_there = Unanswered {
                destination: "192.0.2.7:40962".parse().unwrap(),
                service: Some(80),
                established: true,
                sockets,
                retransmits: sockets * 4,
                unsent,
                none_acknowledged,
                route: None,
                owner: None,
            };
            let service = Service {
                port: 80,
                states: [("established".to_owned(), established), ("time-wait".to_owned(), 20_000)].into(),
                closes_per_s: 0.0,
                workers: Vec::new(),
            };
            let listener = Listener {
                address: "0.0.0.0:80".parse().unwrap(),
                owners: vec![Owner { pid: 7, name: "nginx".to_owned(), sockets: 1 }],
                ..Listener::default()
            };
            let connections = Connections {
                services: vec![service],
                unanswered: vec![found_there],
                ..Connections::default()
            };
            found(&Snapshot {
                connections: Part::Seen(connections),
                listeners: Part::Seen(vec![listener]),
                ..snapshot(Vec::new(), &[("TcpExt.TCPRetransFail", 40)])
            })
        };
        let [(verdict, evidence), _] = &of(40, 3, 0, 300)[..] else { panic!("the counter, too") };
        let expected = "unexplained: 40 connections of nginx[7] at port 80 get no acknowledgement from clients such as 192.0.2.7: \
                        the data was sent again 160 times";
        assert_eq!(verdict, expected);
        let first = "the handshakes are complete, and of 3 connections no data was ever acknowledged";
        assert_eq!(evidence[0], first);
        assert!(!evidence.iter().any(|fact| fact.contains("accept queue")), "{evidence:?}");
        // A firewall has forgotten most of the connections.
        assert!(of(40, 0, 0, 80)[0].0.contains("get no acknowledgement"));
        // Gone in the middle of an answer; two scanners; three of many clients; all of a few.
        for (sockets, none, all) in [(40, 0, 100), (2, 2, 2), (3, 3, 301), (9, 0, 9)] {
            assert!(!of(sockets, none, 0, all)[0].0.contains("acknowledgement"), "{sockets}");
        }
        // What this host does not send is its own fault, also for one client; no counter stands beside it.
        let [(verdict, evidence)] = &of(1, 0, 1, 300)[..] else { panic!("one finding") };
        let expected = "1 connection of nginx[7] at port 80 gets no acknowledgement from 192.0.2.7: the data was sent again 4 times";
        assert_eq!(verdict, expected);
        assert_eq!(evidence, &[format!("the cause here: {UNSENT}")]);
        // Most were sent.
        let evidence = &of(8, 0, 2, 300)[0].1;
        assert!(!evidence.iter().any(|fact| fact.contains(UNSENT)), "{evidence:?}");
    }

    /// Programs close sockets that get no answer, as curl does 200 ms after its first address.
    #[test]
    fn connects_that_are_given_up_are_a_symptom() {
        let connects = |to: &str, failed, established| TracedConnects {
            owner: Owner { pid: 0, name: "curl".to_owned(), sockets: 9 },
            processes: 9,
            destination: to.parse().unwrap(),
            searches: 9,
            search_mean_ns: 1,
            search_p99_ns: 1,
            established,
            failed,
            ..TracedConnects::default()
        };
        let of = |connects: Vec<TracedConnects>, calls| {
            let mut snapshot = snapshot(calls, &[]);
            snapshot.traced = Part::Seen(Traced { connects, ..Traced::default() });
            found(&snapshot)
        };
        let first = || connects("[fd09::2]:8000", 9, 0);
        let both = of(vec![first(), connects("10.9.0.2:8000", 0, 9)], Vec::new());
        let [(verdict, evidence)] = &both[..] else { panic!("{both:?}") };
        let expected = "unexplained: 9 calls of connect() of curl (9 processes) to [fd09::2]:8000 got no answer until the program closed the socket, \
                        and none succeeded in 2.0 s";
        assert_eq!(verdict, expected);
        let instead = evidence.iter().find(|fact| fact.starts_with("it then uses 10.9.0.2:8000: "));
        assert!(instead.is_some(), "{evidence:?}");
        assert_eq!(
            of(vec![connects("[fd09::2]:8000", 2, 0), connects("10.9.0.2:8000", 0, 9)], Vec::new()),
            []
        );
        // The socket of the last connect, whose SYN was sent again, alone is not a symptom, and not another one.
        let mut last = snapshot(Vec::new(), &[]);
        let traced = vec![first(), connects("10.9.0.2:8000", 0, 9)];
        last.traced = Part::Seen(Traced { connects: traced, ..Traced::default() });
        let unanswered = Unanswered { owner: Some(first().owner), ..silent(first().destination) };
        last.connections = Part::Seen(Connections { unanswered: vec![unanswered], ..Connections::default() });
        assert_eq!(found(&last), both);
        let alone = of(vec![first(), connects("10.9.0.2:443", 0, 9)], Vec::new());
        assert!(alone.len() == 1 && !alone[0].1.iter().any(|fact| fact.contains("instead")), "{alone:?}");
        // Two of a client that waits for a second SYN each time, or one and the next.
        let few = |failed, searches, resent| {
            let mut snapshot = snapshot(Vec::new(), &[("TcpExt.TCPSynRetrans", resent)]);
            let connects = vec![TracedConnects { searches, ..connects("10.9.0.2:8000", failed, 0) }];
            snapshot.traced = Part::Seen(Traced { connects, ..Traced::default() });
            found(&snapshot).len()
        };
        assert_eq!([few(2, 1, 2), few(1, 2, 2)], [1, 1]);
        assert_eq!([few(2, 2, 1), few(1, 1, 2), few(0, 2, 2)], [0, 0, 0]);
        // Now and then; a server that answers others; and calls with an error, which have their own symptom.
        assert_eq!(of(vec![connects("[fd09::2]:8000", 2, 0)], Vec::new()), []);
        assert_eq!(of(vec![connects("[fd09::2]:8000", 9, 1)], Vec::new()), []);
        let refused = |number| vec![failed("connect", "ECONNREFUSED", "tcp", "[fd09::2]:8000", number)];
        assert_eq!(of(vec![first()], refused(1)), []);
        // A program that tries a server that is down each second; one that is restarted refuses a few.
        let down = of(vec![first()], refused(2));
        assert!(down.len() == 1 && down[0].0.contains("2 connect() of pgbouncer[812]"), "{down:?}");
        assert_eq!(of(vec![connects("[fd09::2]:8000", 2, 1)], refused(2)), []);
        let missing = |path| of(Vec::new(), vec![failed("connect", "ENOENT", "unix", path, 2)]).len();
        assert_eq!(["/run/php/fpm.sock", "/var/lib/sss/pipes/nss"].map(missing), [1, 0]);
    }

    #[test]
    fn connections_that_are_turned_away_are_a_symptom() {
        let of = |name: &str, accepts, closed| {
            let owner = Owner { pid: 7, name: name.to_owned(), sockets: 1 };
            let address = "0.0.0.0:22".parse().unwrap();
            let listener = Listener { address, cookie: 9, owners: vec![owner], ..Listener::default() };
            let turned_away = vec![TurnedAway { listener: 9, accepts, closed }];
            let accepts = Part::Seen(TracedAccepts { accepts, wait_p99_ns: None, turned_away });
            let seen =
                Snapshot { listeners: Part::Seen(vec![listener]), accepts, ..snapshot(Vec::new(), &[]) };
            let findings = diagnose(&seen, &Limits::default()).findings;
            findings.into_iter().find(|finding| finding.id == "X01")
        };
        let found = of("sshd", 30, 12).unwrap();
        let expected = "unexplained: sshd[7] closed 12 of 30 connections at 0.0.0.0:22 without having read from them in 2.0 s";
        assert_eq!(found.verdict, expected);
        assert!(
            found.proper[0].action.starts_with("sshd[7]: `MaxStartups`, if its log"),
            "{:?}",
            found.proper
        );
        let other = of("own", 30, 12).unwrap();
        assert!(other.proper[0].action.starts_with("own[7]: its setting for this"), "{:?}", other.proper);
        // A scanner now and then, and few of many.
        assert!(of("sshd", 4, 4).is_none() && of("sshd", 300, 29).is_none());
    }

    #[test]
    fn dns_queries_without_an_answer_are_a_symptom() {
        let of = |server: &str, sockets, drops, interval_ns| {
            let server = server.parse().unwrap();
            let owner = Some(Owner { pid: 7, name: "curl".to_owned(), sockets });
            let at =
                UdpSocketView { local: "0.0.0.0:53".parse().unwrap(), drops, ..UdpSocketView::default() };
            let queries = vec![UnansweredQueries { server, sockets, owner }];
            let udp = UdpSockets { total: 3, sockets: vec![at], queries, ..UdpSockets::default() };
            found(&Snapshot { udp: Part::Seen(udp), interval_ns, ..snapshot(Vec::new(), &[]) })
        };
        let expected =
            "unexplained: 1 DNS query of curl[7] to 10.0.0.53:53 has had no answer for a second or more";
        let verdict = |sockets| of("10.0.0.53:53", sockets, None, 2_000_000_000)[0].0.clone();
        assert_eq!(verdict(1), expected);
        assert!(verdict(2).contains("2 DNS queries of curl[7] to 10.0.0.53:53 have had"), "{}", verdict(2));
        // A server may need half a second; U01 explains queries that the server's socket drops.
        assert_eq!(of("10.0.0.53:53", 1, None, 500_000_000), []);
        let drops = Some(Counter { total: 9, during: 9 });
        let is_named =
            |server| of(server, 1, drops, 2_000_000_000).iter().any(|(verdict, _)| verdict.contains("DNS"));
        // The socket at all addresses is that of a server of this host only.
        assert!(!is_named("127.0.0.1:53") && is_named("10.0.0.53:53"));
    }

    /// On the server the counter means its SYN-ACKs: neither a server that is down nor a destination of this host.
    #[test]
    fn syn_acks_without_an_answer_are_of_a_listener() {
        let mut snapshot = snapshot(Vec::new(), &[("TcpExt.TCPSynRetrans", 80)]);
        let listener = Listener {
            address: "10.9.0.1:8000".parse().unwrap(),
            cookie: 1,
            backlog: 511,
            handshakes: 40,
            handshakes_resent: 33,
            resent_to: Some([10, 9, 0, 2].into()),
            owners: vec![Owner { pid: 7, name: "server".to_owned(), sockets: 1 }],
            ..Listener::default()
        };
        snapshot.listeners = Part::Seen(vec![listener]);
        snapshot.connections = Part::Seen(Connections::default());
        let of = found(&snapshot);
        let [(verdict, evidence)] = &of[..] else { panic!("{of:?}") };
        assert_eq!(verdict, "TcpExt.TCPSynRetrans grew by 80 in 2.0 s");
        let expected = "at 10.9.0.1:8000 of server[7] clients such as 10.9.0.2 have not answered the SYN-ACK: 33 of 40 handshakes in progress";
        assert_eq!(evidence[0], expected);
        // A connection of this host waits too: the counter may be of its SYN.
        let states = [("syn-sent".to_owned(), 1)].into();
        snapshot.connections = Part::Seen(Connections { states, ..Connections::default() });
        assert!(found(&snapshot)[0].0.starts_with("unexplained: TcpExt.TCPSynRetrans"));
    }

    #[test]
    fn a_listener_explains_syns_to_this_host_only() {
        let destination = "10.0.0.2:80".parse().unwrap();
        let unanswered = vec![Unanswered { sockets: 2, ..silent(destination) }];
        // Another error of the same destination is another symptom.
        let mut snapshot = snapshot(vec![failed("connect", "ECONNREFUSED", "tcp", "10.0.0.2:80", 9)], &[]);
        snapshot.connections = Part::Seen(Connections { unanswered, ..Connections::default() });
        let rest = |snapshot: &Snapshot| {
            let mut account = Account::of(snapshot);
            account.explain("A01", &What::Unanswered(Some("0.0.0.0:80".parse().unwrap())), u64::MAX);
            let is_syns = |item: &&Item<'_>| matches!(item.symptom, Symptom::Unanswered { .. });
            account.items.iter().find(is_syns).unwrap().rest
        };
        assert_eq!(rest(&snapshot), 2);
        let address = destination.ip();
        snapshot.addresses =
            Part::Seen(vec![LocalAddress { address, prefix: 24, tentative: false, device: None }]);
        assert_eq!(rest(&snapshot), 0);
        snapshot.failures = Part::Seen(Failures {
            calls: vec![failed("connect", "ETIMEDOUT", "tcp", "10.0.0.2:80", 1)],
            ..Failures::default()
        });
        assert!(Account::of(&snapshot).items.iter().all(|item| matches!(item.symptom, Symptom::Calls(_))));
    }

    #[test]
    fn a_listener_of_all_addresses_explains_calls_to_each() {
        let address: IpAddr = "10.0.0.2".parse().unwrap();
        let of = |to: &str| {
            let mut snapshot = snapshot(vec![failed("connect", "ETIMEDOUT", "tcp", to, 9)], &[]);
            snapshot.addresses =
                Part::Seen(vec![LocalAddress { address, prefix: 24, tentative: false, device: None }]);
            snapshot.listeners = Part::Seen(vec![Listener {
                address: "0.0.0.0:80".parse().unwrap(),
                cookie: 7,
                waiting: 17,
                waiting_before: 17,
                standing: 17,
                backlog: 16,
                drops: Some(Counter { total: 9, during: 9 }),
                owners: vec![Owner { pid: 7, name: "nginx".to_owned(), sockets: 1 }],
                ..Listener::default()
            }]);
            found(&snapshot).len()
        };
        assert_eq!(["10.0.0.2:80", "10.0.0.9:80", "10.0.0.2:81", "[::1]:80"].map(of), [0, 1, 1, 1]);
    }

    #[test]
    fn a_rule_without_a_finding_excludes_its_cause() {
        let mut snapshot = snapshot(vec![failed("connect", "ETIMEDOUT", "tcp", "10.0.0.2:80", 3)], &[]);
        snapshot.listeners = Part::Seen(Vec::new());
        snapshot.unix_listeners = Part::Seen(Vec::new());
        let queue = |snapshot: &Snapshot| {
            let evidence = &found(snapshot)[0].1;
            assert!(evidence[0].starts_with("possible: the host is down"), "{evidence:?}");
            let is_queue = |fact: &&String| fact.ends_with("the accept queue of the server is full");
            evidence.iter().find(is_queue).cloned().unwrap()
        };
        // The listeners of another host were not looked at.
        assert!(queue(&snapshot).starts_with("possible: "));
        let address = "10.0.0.2".parse().unwrap();
        snapshot.addresses =
            Part::Seen(vec![LocalAddress { address, prefix: 24, tentative: false, device: None }]);
        assert!(queue(&snapshot).starts_with("excluded by A01: "));
        let finding = diagnose(&snapshot, &Limits::default()).findings.pop().unwrap();
        let change = "`traceroute -T -p 80 10.0.0.2` shows where the packets end: start the host, or accept port 80 in the firewall there; \
                      Recv-Q above Send-Q in `ss -ltn` of the host is a full queue";
        assert_eq!(finding.proper[0].action, change);
    }

    #[test]
    fn calls_of_other_namespaces_are_one_finding_each() {
        let mut snapshot = snapshot(Vec::new(), &[]);
        let none = failed("connect", "EADDRNOTAVAIL", "tcp", "10.0.0.2:80", 300);
        let early = FailedCall { before_search: true, ..none.clone() };
        let calls = vec![
            early,
            none,
            failed("bind", "EADDRINUSE", "tcp", "0.0.0.0:80", 2),
            failed("connect", "ECONNREFUSED", "tcp", "10.0.0.3:80", 900),
        ];
        let elsewhere =
            vec![FailedElsewhere { pid: 7, calls }, FailedElsewhere { pid: 9, calls: Vec::new() }];
        snapshot.failures = Part::Seen(Failures { elsewhere, ..Failures::default() });
        let finding = diagnose(&snapshot, &Limits::default()).findings.pop().unwrap();
        let expected = "unexplained: in another network namespace 300 connect() of pgbouncer[812] to 10.0.0.2:80 failed with EADDRNOTAVAIL, \
                        and 2 more calls in 2.0 s";
        assert_eq!(finding.verdict, expected);
        assert_eq!(finding.evidence, ["2 bind() of pgbouncer[812] to 0.0.0.0:80 failed with EADDRINUSE"]);
        assert!(finding.now[0].action.ends_with("doctor --pid 7"), "{:?}", finding.now);
        assert_eq!(found(&snapshot).len(), 1);
    }

    #[test]
    fn findings_take_what_they_explain() {
        let mut snapshot = snapshot(
            vec![
                failed("connect", "EADDRNOTAVAIL", "tcp", "10.0.0.2:80", 300),
                failed("connect", "EHOSTUNREACH", "tcp", "10.0.0.3:80", 7),
            ],
            &[("TcpExt.ListenOverflows", 4)],
        );
        snapshot.ports = Part::Seen(EphemeralPorts { low: 32_768, high: 32_867, reserved: Vec::new() });
        snapshot.connections = Part::Seen(Connections {
            tuples: vec![Tuple {
                states: [("established".to_owned(), 100)].into(),
                ..full_tuple(80, Vec::new())
            }],
            ..Connections::default()
        });
        let diagnosis = diagnose(&snapshot, &Limits::default());
        let ids: Vec<&str> = diagnosis.findings.iter().map(|finding| finding.id.as_str()).collect();
        assert!(ids.starts_with(&["P01"]) && ids.ends_with(&["X01", "X01"]), "{ids:?}");
        let of = found(&snapshot);
        assert!(of[0].0.contains("7 connect()") && of[0].0.contains("10.0.0.3:80"), "{of:?}");
        assert!(of[1].0.contains("TcpExt.ListenOverflows grew by 4"), "{of:?}");
        assert!(of[1].1.iter().any(|fact| fact.starts_with("an accept queue was full")), "{of:?}");
    }

    #[test]
    fn ports_that_run_out_within_a_minute_are_a_symptom() {
        let of = |in_use: u32, growth_per_s: f64| {
            let states = [("established".to_owned(), u64::from(in_use))].into();
            let tuple = Tuple { in_use, states, growth_per_s, ..full_tuple(80, Vec::new()) };
            let mut snapshot = snapshot(Vec::new(), &[]);
            snapshot.ports = Part::Seen(EphemeralPorts { low: 20_000, high: 20_999, reserved: Vec::new() });
            snapshot.connections = Part::Seen(Connections { tuples: vec![tuple], ..Connections::default() });
            found(&snapshot)
        };
        let expected = (
            "unexplained: 10.0.0.1 → 10.0.0.2:80 took 40 further ports in 2.0 s".to_owned(),
            vec!["at this rate the last port is taken in 30 s".to_owned()],
        );
        assert_eq!(of(400, 20.0), [expected]);
        assert_eq!(of(400, 10.0), [], "in 60 s");
        assert_eq!(of(500, 20.0), [], "P10 explains it");
    }

    #[test]
    fn a_queue_that_stands_is_a_symptom() {
        let listener = Listener {
            address: "0.0.0.0:80".parse().unwrap(),
            cookie: 7,
            waiting: 4,
            waiting_before: 4,
            standing: 4,
            backlog: 511,
            owners: vec![Owner { pid: 7, name: "nginx".to_owned(), sockets: 1 }],
            ..Listener::default()
        };
        let mut snapshot = Snapshot { listeners: Part::Seen(vec![listener]), ..snapshot(Vec::new(), &[]) };
        assert_eq!(found(&snapshot), [], "A07 explains it");
        let mut limits = Limits::default();
        limits.set("A07", 5_000.0).unwrap();
        let of = |snapshot: &Snapshot| {
            let findings = diagnose(snapshot, &limits).findings.into_iter();
            findings.filter(|finding| finding.id == "X01").collect::<Vec<_>>()
        };
        let all = of(&snapshot);
        let [finding] = &all[..] else { panic!("{all:?}") };
        let expected =
            "unexplained: 4 connections at 0.0.0.0:80 of nginx[7] waited for accept() all the time in 2.0 s";
        assert_eq!(finding.verdict, expected);
        assert!(finding.now[0].action.ends_with("trace accept --port 80 --for 10s"), "{:?}", finding.now);
        // Of half a second the readings say little.
        snapshot.interval_ns = 500_000_000;
        assert_eq!(of(&snapshot), []);
    }

    #[test]
    fn drops_of_a_queue_are_one_finding_with_their_counters() {
        let counters = [
            ("qdisc.eth0.7.tbf.drops", 490),
            ("qdisc.eth0.7.tbf.packets", 10),
            ("Ip.OutDiscards", 560),
            // Read a moment later.
            ("Udp.SndbufErrors", 494),
        ];
        let of = found(&snapshot(Vec::new(), &counters));
        let verdicts: Vec<&str> = of.iter().map(|(verdict, _)| verdict.as_str()).collect();
        let expected = [
            "unexplained: the queueing discipline tbf of eth0.7 dropped 490 packets in 2.0 s",
            "unexplained: Ip.OutDiscards grew by 70 in 2.0 s",
        ];
        assert_eq!(verdicts, expected);
        assert!(of[0].1[0].starts_with("in practice: a shaper was full"), "{of:?}");
        // A queue that is full now and then.
        for few in [
            [("qdisc.eth0.fq.drops", 90), ("qdisc.eth0.fq.packets", 9_000)],
            [("qdisc.eth0.fq.drops", 9), ("qdisc.eth0.fq.packets", 9)],
        ] {
            assert_eq!(found(&snapshot(Vec::new(), &few)), Vec::new());
        }
    }

    #[test]
    fn honest_errors_are_silent() {
        let calls = vec![
            failed("connect", "ENETUNREACH", "udp", "[2001:db8::1]:53", 400),
            failed("connect", "ENOENT", "unix", "/var/run/nscd/socket", 50),
            failed("recv", "ECONNRESET", "tcp", "10.0.0.2:80", 900),
            failed("socket", "EAFNOSUPPORT", "tcp", "", 9),
            failed("connect", "ECONNREFUSED", "tcp", "10.0.0.2:80", 2),
            failed("bind", "EADDRINUSE", "other", "", 9),
        ];
        let counters = [("Tcp.EstabResets", 900), ("Udp.NoPorts", 9), ("TcpExt.TCPSynRetrans", 3)];
        let mut snapshot = snapshot(calls, &counters);
        assert_eq!(found(&snapshot), Vec::new());
        // A name with an IPv6 and an IPv4 address, of which only the latter has a server.
        snapshot.failures = Part::Seen(Failures {
            calls: vec![failed("connect", "ECONNREFUSED", "tcp", "[::1]:80", 500)],
            ..Failures::default()
        });
        assert_eq!(found(&snapshot).len(), 1);
        snapshot.traced = Part::Seen(Traced {
            connects: vec![TracedConnects {
                processes: 1,
                owner: Owner { pid: 812, name: "pgbouncer".to_owned(), sockets: 500 },
                destination: ([127, 0, 0, 1], 80).into(),
                searches: 500,
                search_mean_ns: 1,
                search_p99_ns: 1,
                established: 5,
                ..TracedConnects::default()
            }],
            ..Traced::default()
        });
        assert_eq!(found(&snapshot), Vec::new());
        // A crawler that tries the IPv6 address of each host first: the trace lists the calls for some of the other addresses.
        let further = failed("connect", "ENETUNREACH", "tcp", "[2001:db8::1]:80", 700);
        let calls = vec![FailedCall { addresses: 700, ..further }];
        snapshot.failures = Part::Seen(Failures { calls, ..Failures::default() });
        let with = |searches| {
            let Part::Seen(traced) = &snapshot.traced else { panic!("a trace") };
            let traced = Traced { searches, ..traced.clone() };
            found(&Snapshot { traced: Part::Seen(traced), ..snapshot.clone() })
        };
        assert_eq!(with(700), Vec::new());
        let expected = "700 connect() of pgbouncer[812] to 700 addresses such as [2001:db8::1]:80 failed with ENETUNREACH";
        assert!(with(699)[0].0.contains(expected), "{:?}", with(699));
    }

    #[test]
    fn silence_without_a_trace_is_not_checked() {
        let mut snapshot = snapshot(Vec::new(), &[]);
        snapshot.failures = Part::Hidden("--no-trace".to_owned());
        let diagnosis = diagnose(&snapshot, &Limits::default());
        let unchecked = diagnosis.unchecked.iter().find(|unchecked| unchecked.id == "X01").unwrap();
        assert!(unchecked.reason.starts_with("--no-trace; "), "{}", unchecked.reason);
    }
}
