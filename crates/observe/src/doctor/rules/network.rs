//! Connection tracking, and datagrams that are dropped or that a wrong socket gets.

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{
    Conntrack, FailedCall, Owner, Part, Process, Snapshot, Translated, UdpSocketView, UdpSockets,
};

use crate::doctor::accepting::{continued, groups as listener_groups, holders, process_of, stopped, time};
use crate::doctor::attribute::processes_to;
use crate::doctor::command::{Scope, Setting};
use crate::doctor::datagram::{Counted, groups, groups as udp_groups};
use crate::doctor::draft::{Draft, Remedy, What};
use crate::doctor::rules::{Checked, Rule, Threshold, of_visible};
use crate::doctor::symptom::failed_calls;
use crate::doctor::words::{self, count, counted, doing, percent, process};
use fourtuple_record::errno;

pub(super) const N01: Rule = Rule {
    id: "N01",
    title: "the table of tracked connections is full",
    source: "net.netfilter.nf_conntrack_count, net.netfilter.nf_conntrack_max, /proc/net/stat/nf_conntrack",
    threshold: Some(Threshold { default: 90.0, unit: "% of net.netfilter.nf_conntrack_max" }),
    explanation: &[
        "Connection tracking (nf_conntrack) has an entry for each connection that passes a rule of the firewall with state, or NAT. If \
         the table has net.netfilter.nf_conntrack_max entries, the kernel removes an unconfirmed or closing entry of the same hash chain \
         (early_drop) or drops the packet (__nf_conntrack_alloc: \"nf_conntrack: table full, dropping packet\" in the kernel log). \
         connect() then waits for a SYN to be sent again.",
        "Entries outlive their connections: 120 s after a close (nf_conntrack_tcp_timeout_time_wait), 5 days for an established \
         connection whose end was not seen (nf_conntrack_tcp_timeout_established), 30 s for a UDP request.",
        "What helps: a greater net.netfilter.nf_conntrack_max (about 0.3 KiB for an entry; the sysctl belongs to the initial network \
         namespace), with net.netfilter.nf_conntrack_buckets not far below it; shorter timeouts; no tracking for traffic that needs none \
         (nft: notrack; iptables: -t raw -j CT --notrack).",
        "What does not help: more ports or another port range; the table counts connections of all ports, forwarded ones too.",
    ],
    check: n01,
};

fn n01(snapshot: &Snapshot, limit: f64) -> Checked {
    let conntrack = snapshot.conntrack.seen()?;
    // A host without nf_conntrack has no limit; 0 is also the value of "unlimited".
    if conntrack.limit == 0 {
        return Ok(Vec::new());
    }
    let during = |name: &str| conntrack.counters.get(name).map_or(0, |counter| counter.during);
    // Collisions (N02) count as drops as well.
    let dropped = during("drop").saturating_sub(during("insert_failed"));
    let early = during("early_drop");
    let is_near = conntrack.count as f64 >= conntrack.limit as f64 * limit / 100.0;
    if !is_near {
        return Ok(Vec::new());
    }
    let severity = if dropped + early > 0 { Severity::Critical } else { Severity::Warning };
    let mut verdict = format!(
        "{} of {} entries of nf_conntrack are in use, {}",
        count(conntrack.count),
        count(conntrack.limit),
        percent(conntrack.count, conntrack.limit)
    );
    if dropped + early > 0 {
        verdict += &format!(
            "; {} of new connections dropped and {} evicted in {}",
            counted(dropped, "packet"),
            counted(early, "entry"),
            time(snapshot.interval_ns)
        );
    }
    let draft = Draft::new(severity, "nf_conntrack", verdict)
        .explains_up_to(What::Counter("conntrack.drop"), dropped)
        .explains(What::Counter("conntrack.early_drop"))
        .explains(What::Counter("TcpExt.TCPSynRetrans"))
        .explains(What::Unanswered(None))
        .explains(What::calls("connect", errno::ETIMEDOUT))
        .explains(What::calls("send", errno::EPERM));
    Ok(vec![draft.now(wider(conntrack)).proper(Remedy::advice(
        "no tracking for traffic that needs no firewall state: a rule with `notrack` (nft) or `-t raw -j CT --notrack` (iptables)",
        "the connections take no entry",
    ))])
}

fn wider(conntrack: &Conntrack) -> Remedy {
    let limit = conntrack.limit * 2;
    let old = Some(conntrack.limit.to_string());
    let setting = Setting { old, ..Setting::new("net.netfilter.nf_conntrack_max", limit.to_string()) };
    let effect = format!("{}; in a container, to be set on the host", counted(limit, "entry"));
    Remedy::sysctls(vec![setting], effect).with(move |snapshot| {
        if let Part::Seen(conntrack) = &mut snapshot.conntrack {
            conntrack.limit = limit;
        }
    })
}

pub(super) const N02: Rule = Rule {
    id: "N02",
    title: "tracked connections collide",
    source: "insert_failed and clashres of /proc/net/stat/nf_conntrack, /proc/net/nf_conntrack",
    threshold: Some(Threshold { default: 1.0, unit: "collisions in the interval" }),
    explanation: &[
        "nf_conntrack inserts an entry when the first packet of a connection leaves the host (__nf_conntrack_confirm). If another entry \
         with the same tuple was inserted in the meantime, the packet is dropped (insert_failed), unless both belong to the same flow \
         (nf_ct_resolve_clash counts it in clashres; the packet passes).",
        "Two cases are frequent: a resolver sends the queries for A and AAAA at once from one UDP socket through DNAT, which costs a \
         timeout of 5 s; and SNAT (masquerade) gives two connections the same source port in parallel.",
        "SNAT has as many ports to one destination as its rule allows. If all are in use, each new connection collides: the rule says so, from the \
         table (/proc/net/nf_conntrack), and names the address, the destination, the ports, and the processes of the namespace that connect to it. Connections that the host forwards have no \
         process here.",
        "What helps against the first: a DNS cache on the host, or `options single-request-reopen` in resolv.conf (glibc). Against the \
         second: masquerade with random ports (iptables: --random-fully; nft: masquerade random,fully-random), more source addresses for \
         SNAT.",
        "What does not help: a greater nf_conntrack_max; clashres alone needs no action.",
    ],
    check: n02,
};

fn n02(snapshot: &Snapshot, limit: f64) -> Checked {
    let conntrack = snapshot.conntrack.seen()?;
    if conntrack.limit == 0 {
        return Ok(Vec::new());
    }
    let Some(failed) = conntrack.counters.get("insert_failed") else {
        return Err("this kernel has no /proc/net/stat/nf_conntrack (CONFIG_NF_CONNTRACK_PROCFS)".to_owned());
    };
    if (failed.during as f64) < limit {
        return Ok(Vec::new());
    }
    let resolved = ["clashres", "clash_resolve"].iter().filter_map(|name| conntrack.counters.get(*name));
    let resolved: u64 = resolved.map(|counter| counter.during).sum();
    let verdict = format!(
        "nf_conntrack dropped {} in {} because another connection had the same tuple",
        counted(failed.during, "packet"),
        time(snapshot.interval_ns)
    );
    let draft = |verdict: String| {
        let draft = Draft::new(Severity::Warning, "nf_conntrack collisions", verdict);
        let more =
            format!("{} resolved without a drop (clashres)", doing(resolved, "more collision", "were"));
        let draft = if resolved > 0 { draft.because(more) } else { draft };
        draft
            .explains(What::Counter("conntrack.insert_failed"))
            .explains_up_to(What::Counter("conntrack.drop"), failed.during)
            .explains(What::Counter("TcpExt.TCPSynRetrans"))
            .explains(What::Unanswered(None))
            .explains(What::calls("send", errno::EPERM))
            .because(format!("since boot: {} of this kind", counted(failed.total, "drop")))
    };
    if let Some(full) = conntrack.translated.iter().flatten().find(|found| is_exhausted(found)) {
        let known = processes_to(snapshot, full.destination);
        let mut draft = draft(exhaustion(full, failed.during, snapshot.interval_ns));
        for (owner, how) in known.iter().take(3) {
            draft = draft.because(format!("{}: {how}", process(owner)));
        }
        if known.is_empty() {
            draft = draft.because(format!(
                "no visible process of this namespace has to do with {}: the connections seem to be forwarded",
                full.destination
            ));
        }
        return Ok(vec![exhausted(draft, snapshot, full)]);
    }
    // A datagram that is dropped before it leaves the host gives EPERM to its sender.
    let calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    let refused: Vec<&FailedCall> =
        calls.filter(|call| call.call == "send" && call.errno == errno::EPERM).take(3).collect();
    let draft =
        refused.iter().fold(draft(verdict), |draft, call| draft.because(failed_calls(call, call.failed)));
    let dns = Remedy::privileged(
        Scope::Host,
        "grep -q single-request-reopen /etc/resolv.conf || echo 'options single-request-reopen' >> /etc/resolv.conf",
        "glibc sends the queries for A and AAAA from two sockets, if DNS queries collide",
    );
    let draft = match conntrack.translated.is_some() || !refused.is_empty() {
        true => draft.now(dns),
        false => draft
            .because("whether SNAT has a port left is not known: /proc/net/nf_conntrack was not read")
            .now(Remedy::privileged(
                Scope::Namespace,
                "conntrack -L --src-nat",
                "lists the connections whose source SNAT has replaced: none to their destination has a port left if they have all of the rule",
            ))
            .proper(dns),
    };
    Ok(vec![draft.proper(Remedy::advice(
        "a DNS cache on the host; masquerade with random ports (iptables: --random-fully; nft: masquerade random,fully-random)",
        "fewer connections get the same tuple at the same time",
    ))])
}

/// Fewer ports are not a range of SNAT.
const MIN_PORTS: u32 = 32;

/// Returns whether SNAT uses nearly all ports between the lowest and the highest one.
fn is_exhausted(found: &Translated) -> bool {
    let span = u32::from(found.high - found.low) + 1;
    found.ports >= MIN_PORTS && found.ports * 20 >= span * 19
}

fn exhaustion(full: &Translated, failed: u64, interval_ns: u64) -> String {
    format!(
        "SNAT has no port left: {} → {} uses {} of the {} {} ports {}-{}; nf_conntrack dropped {} in {}",
        full.source,
        full.destination,
        count(full.ports.into()),
        count(u64::from(full.high - full.low) + 1),
        full.protocol,
        full.low,
        full.high,
        counted(failed, "packet"),
        time(interval_ns)
    )
}

fn exhausted(mut draft: Draft, snapshot: &Snapshot, full: &Translated) -> Draft {
    let Translated { source, destination, protocol, closed, .. } = full;
    let (list_effect, of_closed) = match closed {
        0 => (
            "lists the connections with their states",
            "all are of open connections: shorter timeouts would free none".to_owned(),
        ),
        _ => (
            "lists the connections with their states: those in TIME_WAIT are closed",
            format!(
                "{} of closed connections (TIME_WAIT of nf_conntrack)",
                doing((*closed).into(), "port", "are")
            ),
        ),
    };
    draft.evidence.insert(0, of_closed);
    let list = format!(
        "conntrack -L -p {protocol} --reply-dst {source} --dst {} --dport {}",
        destination.ip(),
        destination.port()
    );
    draft = draft
        .because("the connections behind SNAT share one port for each connection to a destination; a SYN without a port is dropped silently")
        .now(Remedy::privileged(Scope::Namespace, list, list_effect));
    draft.now.extend(shorter_time_wait(snapshot, *closed));
    let wider = Remedy::advice(
        "a wider port range in the rule, which `nft -a list ruleset` or `iptables-save -t nat` shows (`masquerade to :1024-65535`)",
        "new connections have ports at once; the file of the ruleset keeps it",
    );
    // With ports of closed connections a command comes first.
    let draft = if *closed > 0 { draft.proper(wider) } else { draft.now(wider) };
    draft
        .proper(Remedy::advice(
            "the programs behind SNAT keep connections and use them again (keep-alive, a pool)",
            "fewer ports at a time",
        ))
        .proper(Remedy::advice(
            format!("more source addresses for SNAT (nft: `snat to {source}-LAST`, iptables: `--to-source {source}-LAST`)"),
            "each address has all ports of the rule to each destination",
        ))
}

/// The time for which connection tracking keeps a closed connection, where that has taken ports.
fn shorter_time_wait(snapshot: &Snapshot, closed: u32) -> Option<Remedy> {
    const NAME: &str = "net.netfilter.nf_conntrack_tcp_timeout_time_wait";
    const SHORT_S: u64 = 30;
    // The default of the kernel, where the sysctl is not visible.
    let now_s = snapshot.number(NAME).unwrap_or(120);
    (closed > 0 && now_s > SHORT_S).then(|| {
        let effect = format!(
            "closed connections give {} back after {SHORT_S} s instead of {now_s} s; no effect on open connections",
            counted(closed.into(), "port")
        );
        Remedy::sysctl(NAME, SHORT_S.to_string(), effect).unproven()
    })
}

pub(super) const U01: Rule = Rule {
    id: "U01",
    title: "a UDP socket drops datagrams",
    source: "sock_diag(7) (sk_drops and sk_rcvbuf of each socket, read twice); Udp.InErrors and RcvbufErrors of /proc/net/snmp and snmp6",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "The kernel drops a datagram if the receive queue of the socket is full: the memory of the queued packets exceeds sk_rcvbuf \
         (__udp_enqueue_schedule_skb). The sender does not learn of it. sk_drops counts the drops of each socket, Udp.RcvbufErrors those \
         of the network namespace.",
        "Linux 6.18 has a second queue for each NUMA node in front of the receive queue; drops there are in sk_drops, but in no counter \
         of /proc/net/snmp until Linux 7.0. Tools that read only the counters do not see them. The rule compares both.",
        "Udp.InErrors without RcvbufErrors are datagrams with a wrong checksum, and datagrams that a filter of the socket refuses on purpose \
         (SO_ATTACH_FILTER, udp_queue_rcv_one_skb). If these explain all drops, the rule has no finding.",
        "What helps: a process that reads faster (recvmmsg, UDP_GRO, a thread that only reads); several sockets with SO_REUSEPORT, and \
         `fourtuple fix accept --select` for flows that the hash puts on one of them; a greater SO_RCVBUF, up to net.core.rmem_max, against \
         bursts. What does not help: net.ipv4.udp_mem, the limit of the whole host, unless Udp.MemErrors grows; net.core.rmem_max alone, \
         because the program must ask for the buffer; net.core.rmem_default for sockets that exist.",
    ],
    check: u01,
};

fn u01(snapshot: &Snapshot, limit: f64) -> Checked {
    let udp = snapshot.udp.seen()?;
    if !udp.sockets.is_empty() && udp.sockets.iter().all(|socket| socket.drops.is_none()) {
        return Err("sock_diag(7) of this kernel does not tell the drops of a socket (INET_DIAG_SKMEMINFO)"
            .to_owned());
    }
    let drops = |socket: &UdpSocketView| socket.drops.map_or(0, |drops| drops.during);
    let total: u64 = udp.sockets.iter().map(drops).sum();
    let counted = Counted::of(snapshot);
    if total <= counted.refused() {
        return Ok(Vec::new());
    }
    let dropping = udp.sockets.iter().filter(|socket| drops(socket) as f64 >= limit);
    Ok(dropping.map(|socket| draft_u01(snapshot, socket, drops(socket), total, &counted)).collect())
}

fn draft_u01(
    snapshot: &Snapshot,
    socket: &UdpSocketView,
    drops: u64,
    total: u64,
    counted: &Counted,
) -> Draft {
    let server = holders(&socket.owners);
    let interval = time(snapshot.interval_ns);
    let limit = socket.limit_bytes.unwrap_or(0);
    let verdict = format!(
        "the UDP socket {} of {server} dropped {} in {interval}; its queue holds {} of {} bytes ({})",
        socket.local,
        words::counted(drops, "datagram"),
        count(socket.queued_bytes),
        count(limit),
        percent(socket.queued_bytes, limit)
    );
    let seen = if total > counted.errors {
        format!("{} of the drops are in no counter of /proc/net/snmp", count(total - counted.errors))
    } else {
        "the counters have them all".to_owned()
    };
    let mut draft =
        Draft::new(Severity::Warning, format!("{} (socket {:#x})", socket.local, socket.cookie), verdict)
            .because(format!(
                "all sockets: {}; Udp.InErrors {}, Udp.RcvbufErrors {}: {seen}",
                words::counted(total, "drop"),
                count(counted.errors),
                count(counted.full)
            ));
    draft = draft.explains(What::Drops(socket.cookie));
    for counter in ["Udp.RcvbufErrors", "Udp6.RcvbufErrors", "Udp.MemErrors", "Udp6.MemErrors"] {
        draft = draft.explains_up_to(What::Counter(counter), drops);
    }
    if let Some(owner) = stopped(snapshot, &socket.owners) {
        draft = continued(draft, snapshot, owner, "it reads again");
    }
    // The kernel doubles the number of SO_RCVBUF for its own overhead (sock_setsockopt); a socket that did not ask has the default as it is.
    let is_default = snapshot.number("net.core.rmem_default").is_ok_and(|default| default == limit);
    let asked = if is_default { 0 } else { limit / 2 };
    let has = match is_default {
        true => format!("the socket did not ask and has net.core.rmem_default, {}", count(limit)),
        false => format!("the socket asked for {}", count(asked)),
    };
    let buffer = match snapshot.number("net.core.rmem_max") {
        Ok(most) if asked < most => Remedy::advice(
            format!(
                "{server}: a greater SO_RCVBUF, up to {} (net.core.rmem_max; Unbound: `so-rcvbuf`), and a restart; {has}",
                count(most)
            ),
            "space for bursts, not for a load that the process cannot read",
        ),
        _ => {
            let wanted = asked.max(1 << 16) * 8;
            Remedy::sysctl("net.core.rmem_max", wanted.to_string(), format!(
                    "{server} may ask for SO_RCVBUF {wanted} after a restart, against bursts only; in a container, to be set on the host"
                ),).unproven()
        }
    };
    draft.now(buffer).proper(Remedy::advice(
        format!("{server}: read in batches (recvmmsg, UDP_GRO), or use several sockets with SO_REUSEPORT"),
        "the queue is emptied faster",
    ))
}

pub(super) const U02: Rule = Rule {
    id: "U02",
    title: "a connected UDP socket takes the datagrams of a peer out of its group",
    source: "sock_diag(7) (local address, peer, queue and sk_drops of each UDP socket)",
    threshold: None,
    explanation: &[
        "The kernel distributes datagrams over the unconnected sockets of a SO_REUSEPORT group by a hash of the 4-tuple or by a BPF \
         program. A socket of the group that has called connect() matches its peer better than all others (compute_score, \
         udp4_lib_lookup2): it gets all datagrams of this peer, and no other datagram. Hash and program have no say in it.",
        "Measured with Linux 6.18, 4 sockets and a program that chooses at random: of 100 datagrams of one peer 25, 26, 22 and 27 reach \
         the sockets; 100, 0, 0 and 0 once the first socket is connected to this peer. Datagrams of other peers are spread over the other \
         three. If all traffic has one 4-tuple, as in a tunnel, one connected socket switches the balancing off.",
        "The group also keeps the mark has_conns (reuseport_has_conns_set), with which the kernel compares the sockets of the group one \
         by one for each datagram; since Linux 6.6 a lookup in such a group costs 7 to 12% more.",
        "Servers with a connected socket for each client (DTLS, QUIC) do this on purpose: the rule is silent if there are more connected \
         than unconnected sockets, unless the connected ones drop. It is a notice otherwise, and a warning if a connected socket dropped \
         datagrams during the interval.",
        "What helps: sendto() and recvfrom() instead of connect() in the group, or another local port for connected sockets. What does \
         not help: more sockets in the group; a selector (`fourtuple fix accept`), which the kernel does not use for this peer.",
    ],
    check: u02,
};

fn u02(snapshot: &Snapshot, _limit: f64) -> Checked {
    let udp = snapshot.udp.seen()?;
    let mut drafts = Vec::new();
    for group in groups(udp) {
        let Some(first) = group.first() else { continue };
        // connect() replaces the unspecified local address of a socket by a specific one.
        let is_member = |socket: &&UdpSocketView| {
            socket.remote.is_some()
                && socket.local.port() == first.local.port()
                && socket.local.is_ipv4() == first.local.is_ipv4()
                && socket.interface == first.interface
                && (socket.local == first.local || first.local.ip().is_unspecified())
        };
        let connected: Vec<&UdpSocketView> = udp.sockets.iter().filter(is_member).collect();
        drafts.extend(draft_u02(snapshot, &group, &connected));
    }
    of_listed(drafts, udp)
}

/// Returns the findings of a rule about UDP sockets that share a port; without any, the rule is unchecked if sockets are not listed.
fn of_listed(found: Vec<Draft>, udp: &UdpSockets) -> Checked {
    if found.is_empty() && udp.left_out > 0 {
        return Err(format!("{} not listed", doing(udp.left_out, "UDP socket", "are")));
    }
    Ok(found)
}

fn draft_u02(snapshot: &Snapshot, group: &[&UdpSocketView], connected: &[&UdpSocketView]) -> Option<Draft> {
    let drops_of = |socket: &UdpSocketView| socket.drops.map_or(0, |drops| drops.during);
    let drops: u64 = connected.iter().map(|socket| drops_of(socket)).sum();
    if drops == 0 && connected.len() > group.len() {
        return None;
    }
    let first = group[0];
    let busiest = connected.iter().max_by_key(|socket| (drops_of(socket), socket.queued_bytes))?;
    let peer = busiest.remote.map_or_else(String::new, |peer| peer.to_string());
    let server = holders(&busiest.owners);
    let mut verdict = format!(
        "a UDP socket of {server} is connected to {peer} and shares {} with {}: it alone gets the datagrams of this peer",
        first.local,
        counted(group.len() as u64, "unconnected socket")
    );
    if drops > 0 {
        verdict += &format!("; {} were dropped in {}", count(drops), time(snapshot.interval_ns));
    }
    let severity = if drops > 0 { Severity::Warning } else { Severity::Notice };
    let queues: Vec<String> = group.iter().take(16).map(|socket| count(socket.queued_bytes)).collect();
    Some(
        Draft::new(severity, first.local.to_string(), verdict)
            .because(format!("{} of the sockets at this port are connected", count(connected.len() as u64)))
            .because(format!(
                "bytes in the queue of the connected socket: {}, of the unconnected sockets: {}",
                count(busiest.queued_bytes),
                queues.join(", ")
            ))
            .proper(Remedy::advice(
                format!("{server}: sendto() and recvfrom() instead of connect() on sockets of the group, or another local port"),
                "hash or selector chooses for this peer too",
            )),
    )
}

pub(super) const U03: Rule = Rule {
    id: "U03",
    title: "an unrelated process shares the address of a server",
    source: "sock_diag(7) (address and user ID of each socket), /proc/PID/stat (parent and process group), /proc/PID/exe, \
             /proc/PID/cgroup",
    threshold: None,
    explanation: &[
        "Any process of the same user may open another socket with SO_REUSEPORT at an address whose sockets have the option \
         (inet_csk_get_port, udp_lib_get_port compare the user IDs). The kernel then gives that socket its share of the connections or \
         datagrams, without a message to the server. With SO_REUSEADDR on UDP sockets even another user's process can, and the newest \
         socket gets all unicast datagrams.",
        "Typical causes: a second copy of a server that was started by hand, a test or a debugging tool with the default port, an old \
         process that did not end. The clients that reach it see wrong or missing answers, at random.",
        "The rule has a finding if two processes that share an address have different process groups, neither is the parent of the second, and \
         they differ in name or parent, or if they have different users. Two processes with the same name in different cgroups, as two units of \
         systemd or two containers, are instances of a service, unless one of them belongs to a login session, a terminal or `systemd-run --scope`. \
         Two daemons of init with the same name and executable are a server and its stale copy if they started 10 s or more apart in the same \
         cgroup; without cgroups, if the file of the older one was replaced since (/proc/PID/exe is deleted). A supervisor restarts its instances one by one: \
         children of another parent than init are not copies. Ports for multicast discovery (mDNS, SSDP, LLMNR) and DHCP are left out, because programs \
         share them on purpose.",
        "What helps: ending the foreign process, or giving it another port; a user ID for each service, which the kernel then enforces. \
         What does not help: `fourtuple fix accept`, which treats all sockets of the group as workers.",
    ],
    check: u03,
};

/// A socket of a group: its holders, and its user if the transport lets several users share an address.
struct Member<'a> {
    owners: &'a [Owner],
    user: Option<u32>,
}

fn u03(snapshot: &Snapshot, _limit: f64) -> Checked {
    let (mut drafts, mut is_hidden) = (Vec::new(), false);
    let is_unknown = |member: &Member<'_>| member.owners.is_empty();
    for group in listener_groups(snapshot.listeners.seen()?) {
        let members: Vec<Member<'_>> =
            group.iter().map(|listener| Member { owners: &listener.owners, user: None }).collect();
        is_hidden |= members.iter().any(is_unknown);
        drafts.extend(draft_u03(snapshot, &format!("TCP {}", group[0].address), &members));
    }
    let udp = snapshot.udp.seen()?;
    for group in udp_groups(udp) {
        let members: Vec<Member<'_>> =
            group.iter().map(|socket| Member { owners: &socket.owners, user: Some(socket.user) }).collect();
        is_hidden |= members.iter().any(is_unknown);
        drafts.extend(draft_u03(snapshot, &format!("UDP {}", group[0].local), &members));
    }
    of_visible(of_listed(drafts, udp)?, is_hidden)
}

fn draft_u03(snapshot: &Snapshot, address: &str, members: &[Member<'_>]) -> Option<Draft> {
    // The server is the process that has been there for longest.
    let started = |member: &&Member<'_>| {
        let starts = member.owners.iter().filter_map(|owner| process_of(snapshot, owner.pid));
        starts.map(|process| process.started_ns).min().unwrap_or(u64::MAX)
    };
    let mut known: Vec<&Member<'_>> = members.iter().filter(|member| !member.owners.is_empty()).collect();
    known.sort_by_key(started);
    let oldest = *known.first()?;
    let is_foreign = |server: &Member<'_>, member: &Member<'_>| {
        member.user != server.user
            || !pairs(server, member).any(|(one, other)| are_related(snapshot, one, other))
    };
    let foreign = known.iter().find(|member| is_foreign(oldest, member)).map(|member| (oldest, *member));
    // A copy may be related to the oldest process, another instance of the service, and not to the one that took its place.
    let copies = || {
        let younger = known
            .iter()
            .enumerate()
            .flat_map(|(at, old)| known[at + 1..].iter().map(move |new| (*old, *new)));
        let is_copy = |one: &Owner, other: &Owner| {
            let both = process_of(snapshot, one.pid).zip(process_of(snapshot, other.pid));
            one.name == other.name && both.is_some_and(|(a, b)| a.parent == b.parent && is_stale_copy(a, b))
        };
        let mut copies = younger.filter(|(old, new)| pairs(old, new).any(|(one, other)| is_copy(one, other)));
        copies.find(|(old, new)| is_foreign(old, new))
    };
    let (server, foreign) = foreign.or_else(copies)?;
    let (mut own, mut other) = (server.owners.first()?, foreign.owners.first()?);
    let is_copy = own.name == other.name && server.user == foreign.user;
    let by_hand = [own, other].map(|owner| process_of(snapshot, owner.pid).is_some_and(is_started_by_hand));
    let why = match by_hand {
        // The one of a service is not the one to end.
        [false, true] if is_copy => "by hand: it belongs to a login session or a terminal",
        _ if is_copy => "and of two copies the older one was probably left behind",
        _ => "and the older one is taken for the server",
    };
    if is_copy && by_hand != [false, true] {
        (own, other) = (other, own);
    }
    let shared =
        members.iter().filter(|member| member.owners.iter().any(|owner| owner.pid == other.pid)).count();
    let verdict = format!(
        "{} has {shared} of the {} sockets at {address}, which {} serves: it gets a share of the traffic",
        process(other),
        members.len(),
        process(own)
    );
    let mut draft = Draft::new(Severity::Warning, address, verdict);
    let both = process_of(snapshot, own.pid).zip(process_of(snapshot, other.pid));
    if let Some((first, second)) = both {
        let names = if is_copy { format!("both are called {}: ", own.name) } else { String::new() };
        let parents = match (first.parent == second.parent, &first.parent_name) {
            (true, Some(name)) => format!("both children of {name}"),
            (true, None) => format!("both children of process {}", first.parent),
            (false, _) => format!("parents {} and {}", first.parent, second.parent),
        };
        draft = draft.because(format!(
            "{names}{} started {} {} {}, {why}; process groups {} and {}, {parents}",
            process(other),
            time(second.started_ns.abs_diff(first.started_ns)),
            if second.started_ns < first.started_ns { "before" } else { "after" },
            process(own),
            first.group,
            second.group,
        ));
    }
    if let Some(file) = both.and_then(|(own, other)| replaced(own, other)) {
        draft = draft
            .because(format!("{} runs a file that was replaced since its start: {file}", process(other)));
    }
    if let (Some(user), Some(foreign)) = (server.user, foreign.user)
        && user != foreign
    {
        draft = draft.because(format!("user IDs {user} and {foreign}"));
    }
    let command_line = process_of(snapshot, other.pid).and_then(|process| process.command_line.as_ref());
    if let Some(line) = command_line {
        draft.evidence.insert(0, format!("the command line of {}: {line}", process(other)));
    }
    Some(
        draft
            .now(Remedy::other(
                Scope::Process,
                format!("ps -o pid,ppid,user,lstart,unit,args -p {},{}", own.pid, other.pid),
                "shows which of them belongs to the service",
            ))
            .now(Remedy::privileged(
                Scope::Process,
                format!("kill {}", other.pid),
                "only if the process should not be there: its sockets leave the port; its connections are reset, and nothing undoes it",
            ))
            .proper(Remedy::advice(
                "another port for the foreign process, and a user ID for each service",
                "the kernel refuses SO_REUSEPORT across users",
            )),
    )
}

fn pairs<'a>(one: &Member<'a>, other: &Member<'a>) -> impl Iterator<Item = (&'a Owner, &'a Owner)> {
    let (one, other) = (one.owners, other.owners);
    one.iter().flat_map(move |first| other.iter().map(move |second| (first, second)))
}

fn are_related(snapshot: &Snapshot, one: &Owner, other: &Owner) -> bool {
    if one.pid == other.pid {
        return true;
    }
    match (process_of(snapshot, one.pid), process_of(snapshot, other.pid)) {
        // Instances of one service have the same name, and the same parent or a unit each.
        (Some(a), Some(b)) => {
            let is_of_one = || a.parent == b.parent && !is_stale_copy(a, b);
            // What somebody started is not an instance of a service, whatever file it runs.
            let is_service = || {
                are_units(a, b) == Some(true) || is_started_by_hand(a) == is_started_by_hand(b) && is_of_one()
            };
            a.group == b.group
                || a.parent == b.pid
                || b.parent == a.pid
                || one.name == other.name && is_service()
        }
        // A process that ended meanwhile, or that is not visible, is not foreign for that reason.
        _ => true,
    }
}

/// Time by which a stale copy is older. The processes of one start come within seconds.
const STALE_NS: u64 = 10_000_000_000;

/// Returns whether one of two processes with the same name and parent is a copy that an earlier start left behind.
fn is_stale_copy(a: &Process, b: &Process) -> bool {
    let (old, new) = if a.started_ns <= b.started_ns { (a, b) } else { (b, a) };
    // Another parent is a supervisor, which restarts one instance at a time.
    let is_of_init = matches!(new.parent_name.as_deref(), Some("systemd" | "init"));
    let file = |process: &Process| Some(process.executable.as_ref()?.trim_end_matches(DELETED).to_owned());
    let is_same_file = file(old) == file(new);
    let is_apart = new.started_ns - old.started_ns >= STALE_NS;
    is_of_init
        && is_same_file
        && is_apart
        && match are_units(old, new) {
            Some(are_units) => !are_units,
            None => replaced(new, old).is_some(),
        }
}

/// What the kernel appends to the path of a file that was removed.
const DELETED: &str = " (deleted)";

/// Returns the path of the executable of `old` if another file has taken its place, which `new` runs.
fn replaced<'a>(new: &Process, old: &'a Process) -> Option<&'a str> {
    let path = old.executable.as_ref()?.strip_suffix(DELETED)?;
    (new.executable.as_deref() == Some(path)).then_some(path)
}

/// Returns whether two processes are in different units of a service manager, or in different containers; `None`: their cgroups are unknown.
fn are_units(a: &Process, b: &Process) -> Option<bool> {
    let (first, second) = (a.cgroup.as_deref()?, b.cgroup.as_deref()?);
    // The root has processes that nobody put elsewhere, such as all of a container.
    if first == "/" && second == "/" {
        return None;
    }
    let is_unit = |process: &Process, cgroup: &str| cgroup != "/" && !is_started_by_hand(process);
    Some(first != second && is_unit(a, first) && is_unit(b, second))
}

/// Returns whether somebody started the process, and no service manager did.
fn is_started_by_hand(process: &Process) -> bool {
    let last = process.cgroup.as_deref().and_then(|cgroup| cgroup.rsplit('/').next()).unwrap_or("");
    last.ends_with(".scope") && BY_HAND.iter().any(|begin| last.starts_with(begin))
}

/// Names of scopes of programs that somebody started: a login, a pane of tmux, a tab or an application of a desktop, `systemd-run --scope`.
const BY_HAND: [&str; 5] = ["session-", "tmux-spawn-", "vte-spawn-", "app-", "run-"];

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Listener, Part};

    use super::*;

    #[test]
    fn a_stale_copy_with_the_same_name_is_named() {
        let process = |pid, parent, started_s: u64| Process {
            pid,
            name: "server".to_owned(),
            parent,
            group: pid,
            started_ns: started_s * 1_000_000_000,
            ..Process::default()
        };
        let listener = |cookie, pid| Listener {
            address: "127.0.0.1:4000".parse().unwrap(),
            cookie,
            backlog: 128,
            owners: vec![Owner { pid, name: "server".to_owned(), sockets: 1 }],
            ..Listener::default()
        };
        let with = |parent, change: &dyn Fn(&mut [Process])| {
            let mut processes = vec![process(70, 1, 100), process(90, parent, 7_300)];
            change(&mut processes);
            let snapshot = Snapshot {
                listeners: Part::Seen(vec![listener(1, 70), listener(2, 90)]),
                udp: Part::Seen(Default::default()),
                processes: Part::Seen(processes),
                ..Snapshot::default()
            };
            u03(&snapshot, 0.0).unwrap_or_default()
        };
        assert!(with(1, &|_| ()).is_empty(), "instances of one service");
        let found = with(80, &|_| ());
        assert_eq!(found.len(), 1);
        assert!(found[0].verdict.starts_with("server[70] has 1 of the 2 sockets"), "{}", found[0].verdict);
        let evidence = &found[0].evidence;
        let start =
            "both are called server: server[70] started 7200.0 s before server[90], and of two copies";
        assert!(evidence[0].starts_with(start), "{evidence:?}");
        // Daemons of init: a unit each, or one unit whose earlier start left a copy behind.
        let found = |cgroups: [&str; 2], change: fn(&mut [Process])| {
            let drafts = with(1, &|processes| {
                for (process, cgroup) in processes.iter_mut().zip(cgroups) {
                    process.cgroup = Some(cgroup.to_owned()).filter(|cgroup| !cgroup.is_empty());
                    process.parent_name = Some("systemd".to_owned());
                    process.executable = Some("/usr/sbin/server".to_owned());
                }
                change(processes);
            });
            drafts.first().map(|draft| format!("{}\n{}\n", draft.verdict, draft.evidence.join("\n")))
        };
        let (web, other) = ("/system.slice/web.service", "/system.slice/web@2.service");
        let session = "/user.slice/user-0.slice/session-7.scope";
        let tmux = "/user.slice/user-1000.slice/user@1000.service/tmux-spawn-0f2d.scope";
        let run = "/system.slice/run-r3f.scope";
        let container = "/system.slice/docker-3f.scope";
        let nothing: fn(&mut [Process]) = |_| ();
        let other_file: fn(&mut [Process]) = |all| all[1].executable = Some("/opt/server".to_owned());
        let young: fn(&mut [Process]) = |all| all[0].started_ns = all[1].started_ns - 1_000_000_000;
        let supervised: fn(&mut [Process]) = |all| all[1].parent_name = Some("supervisord".to_owned());
        let replaced: fn(&mut [Process]) =
            |all| all[0].executable = Some("/usr/sbin/server (deleted)".to_owned());
        // Containers with the network of the host have different parents.
        let apart: fn(&mut [Process]) = |all| all[1].parent = 80;
        let (old, new) = ("server[70] has 1 of the 2 sockets", "server[90] has 1 of the 2 sockets");
        let same = "\nboth are called server: ";
        let was_replaced = "a file that was replaced since its start: /usr/sbin/server\n";
        for (name, cgroups, change, expected) in [
            ("a unit each", [web, other], nothing, None),
            ("a copy in the same unit", [web, web], nothing, Some(same)),
            ("the older was started in a session", [session, web], nothing, Some(old)),
            ("the younger was started in a session", [web, session], nothing, Some(new)),
            ("the older was started in tmux", [tmux, web], nothing, Some(old)),
            ("the younger was started in tmux", [web, tmux], nothing, Some(new)),
            ("the older was started by systemd-run", [run, web], nothing, Some(old)),
            ("the younger was started by systemd-run", [web, run], nothing, Some(new)),
            ("started by hand from another file", [web, session], other_file, Some("")),
            ("two programs of a unit", [web, web], other_file, None),
            ("a container", [container, web], nothing, None),
            ("one start", [web, web], young, None),
            ("an instance was restarted", [web, web], supervised, None),
            ("an upgrade restarts unit by unit", [web, other], replaced, None),
            ("nothing tells the copy", ["", ""], nothing, None),
            ("a copy from before an upgrade", ["", ""], replaced, Some(was_replaced)),
            ("a copy from before an upgrade, in the root cgroup", ["/", "/"], replaced, Some("")),
            ("units with different parents", [web, other], apart, None),
            ("a unit with different parents", [web, web], apart, Some("")),
        ] {
            let found = found(cgroups, change);
            assert_eq!(found.is_some(), expected.is_some(), "{name}: {found:?}");
            assert!(found.is_none_or(|text| text.contains(expected.unwrap())), "{name}: not {expected:?}");
        }
        // Another instance is the oldest process, and related to the copy and to the process that took its place.
        let mut snapshot = Snapshot {
            listeners: Part::Seen(vec![listener(1, 60), listener(2, 70), listener(3, 90)]),
            udp: Part::Seen(Default::default()),
            ..Snapshot::default()
        };
        let of = |pid, started_s, cgroup: &str| Process {
            cgroup: Some(format!("/system.slice/{cgroup}")),
            parent_name: Some("systemd".to_owned()),
            ..process(pid, 1, started_s)
        };
        let (first, copy) = (of(60, 90, "web@1.service"), of(70, 100, "web@2.service"));
        for (started_s, number) in [(7_300, 1), (101, 0)] {
            let processes = vec![first.clone(), copy.clone(), of(90, started_s, "web@2.service")];
            snapshot.processes = Part::Seen(processes);
            let found = u03(&snapshot, 0.0).unwrap();
            let verdict = "server[70] has 1 of the 3 sockets at TCP 127.0.0.1:4000, which server[90] serves";
            assert_eq!(found.iter().filter(|draft| draft.verdict.starts_with(verdict)).count(), number);
            assert_eq!(found.len(), number);
        }
    }
}
