//! Accept queues, listeners and the time until accept().

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Owner, Snapshot, UnixListener};

use crate::doctor::accepting::{
    self, Settings, accept_sooner, acceptors, drops, during, empty_faster, empty_unix, explains_listener,
    explains_unix, flooded, handshakes_allowed, holders, is_full, kept_waiting, other_drops, refused, time,
    unix_acceptors, up_to, with_number,
};
use crate::doctor::draft::{Draft, Remedy, Subject, What};
use crate::doctor::rules::{Checked, Rule, Threshold, joined};
use crate::doctor::words::{count, counted, doing, percent, process, segments};

pub(super) const A01: Rule = Rule {
    id: "A01",
    title: "an accept queue is full or fills",
    source: "sock_diag(7) (sk_ack_backlog, sk_max_ack_backlog; UNIX_DIAG_RQLEN), read twice",
    threshold: Some(Threshold { default: 80.0, unit: "% of the backlog" }),
    explanation: &[
        "A connection whose handshake is complete waits in the accept queue of its listener until accept() takes it \
         (inet_csk_reqsk_queue_add, inet_csk_accept). The queue holds one connection more than the backlog of listen(), which the kernel \
         cuts to net.core.somaxconn.",
        "While the queue is full, the kernel drops the last ACK of a handshake and each new SYN (tcp_v4_syn_recv_sock, tcp_conn_request). \
         The client sends its SYN again after 1 s, then each second (Linux 6.5, net.ipv4.tcp_syn_linear_timeouts) or at doubled \
         intervals, so that connect() takes seconds or ends with ETIMEDOUT. The client may also believe that it is connected, because the \
         SYN-ACK arrived, and then waits for an answer.",
        "The queue of a unix socket has the same limit (unix_recvq_full). A blocking connect() waits while it is full, a non-blocking one fails with \
         EAGAIN, which nginx answers with 502. The kernel counts nothing: the queue is full if it was at both readings, or if it is and a trace saw \
         connect() fail.",
        "What helps: a process that calls accept() faster: more workers, no blocking work between two calls of accept(), a process that \
         is not stopped. A greater backlog helps against bursts only: a queue that is full at two readings is full because connections \
         arrive faster than the process accepts them.",
        "What does not help: net.ipv4.tcp_max_syn_backlog and SYN cookies, which concern handshakes in progress; a greater \
         net.core.somaxconn without a restart, because listen() reads the value once.",
    ],
    check: a01,
};

fn a01(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp_a01(snapshot, limit), of_unix_a01(snapshot, limit))
}

/// Looks for full queues of unix sockets, whose drops the kernel does not count.
fn of_unix_a01(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.unix_listeners.seen()?.iter();
    Ok(listeners.filter_map(|listener| unix_draft_a01(snapshot, listener, limit)).collect())
}

fn unix_draft_a01(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Draft> {
    let &UnixListener { waiting, waiting_before, backlog, ref path, .. } = listener;
    let standing = waiting.min(waiting_before);
    let failed: u64 = refused(snapshot, listener).map(|call| call.failed).sum();
    // Between an accept and the next connection one place is free.
    let was_full = failed > 0 && (is_full(waiting, backlog) || standing >= backlog);
    let (severity, state) = if is_full(standing, backlog) || was_full {
        (Severity::Critical, "is full")
    } else if standing > 0 && f64::from(standing) >= f64::from(backlog) * limit / 100.0 {
        (Severity::Warning, "fills")
    } else {
        return None;
    };
    let server = unix_acceptors(snapshot, listener);
    let mut verdict = format!(
        "the accept queue of {path} {state}: {} for {server}, the backlog is {}",
        match waiting {
            1 => "1 connection waits".to_owned(),
            _ => doing(waiting.into(), "connection", "wait"),
        },
        count(backlog.into())
    );
    if failed > 0 {
        let interval = time(snapshot.interval_ns);
        verdict += &format!("; {} of connect() failed with EAGAIN in {interval}", counted(failed, "call"));
    }
    let draft = Draft::new(severity, Subject::Unix(path.clone()), verdict)
        .because(format!(
            "first reading: {} in the queue, second reading: {}",
            counted(waiting_before.into(), "connection"),
            count(waiting.into())
        ))
        .because("with a full queue, connect() of a non-blocking client fails with EAGAIN (nginx answers 502), and other clients wait");
    let clients = holders(&listener.clients);
    let draft =
        draft.because_if((!listener.clients.is_empty()).then(|| format!("the connections are of {clients}")));
    Some(empty_unix(explains_unix(draft, listener), snapshot, listener))
}

fn of_tcp_a01(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    Ok(listeners.iter().filter_map(|listener| draft_a01(snapshot, listener, limit)).collect())
}

fn draft_a01(snapshot: &Snapshot, listener: &Listener, limit: f64) -> Option<Draft> {
    let &Listener { address, waiting, waiting_before, backlog, .. } = listener;
    let drops = drops(snapshot, listener);
    let standing = waiting.min(waiting_before);
    let is_overflowing = is_full(waiting, backlog) && (is_full(waiting_before, backlog) || drops > 0);
    let is_filling = standing > 0 && f64::from(standing) >= f64::from(backlog) * limit / 100.0;
    let (severity, state) = match (is_overflowing, is_filling) {
        (true, _) => (Severity::Critical, "is full"),
        (false, true) => (Severity::Warning, "fills"),
        (false, false) => return None,
    };
    let mut verdict = format!(
        "the accept queue of {address} {state}: {} for {}, the backlog is {}",
        doing(waiting.into(), "connection", "wait"),
        acceptors(snapshot, listener),
        count(backlog.into())
    );
    if drops > 0 {
        let (up_to, interval) = (up_to(snapshot), time(snapshot.interval_ns));
        verdict += &format!(
            "; {up_to}{} {} dropped in {interval}",
            segments(drops),
            if drops == 1 { "was" } else { "were" }
        );
    }
    let share = match is_full(waiting_before, backlog) {
        true => "full".to_owned(),
        false => format!("{} of the backlog", percent(waiting_before.into(), backlog.into())),
    };
    let mut draft = Draft::new(severity, listener, verdict).because(format!(
        "first reading: {} in the queue ({share}), second reading: {}",
        counted(waiting_before.into(), "connection"),
        count(waiting.into())
    ));
    let growth = f64::from(waiting.saturating_sub(waiting_before)) * 1e9 / snapshot.interval_ns.max(1) as f64;
    if growth > 0.0 && !is_full(waiting, backlog) {
        let left = f64::from(backlog + 1 - waiting) / growth;
        draft = draft.because(format!("the queue grows by {growth:.0}/s and is full in {left:.0} s"));
    }
    Some(empty_faster(explains_listener(draft, snapshot, listener), snapshot, listener))
}

pub(super) const A02: Rule = Rule {
    id: "A02",
    title: "a listener drops connections",
    source: "sock_diag(7) (sk_drops of the listener in INET_DIAG_SKMEMINFO), TcpExt.ListenDrops and ListenOverflows of /proc/net/netstat, read twice; for unix listeners \
             calls of connect() in a trace",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "The kernel counts each SYN and each last ACK of a handshake that it drops in TcpExt.ListenDrops, for all listeners of the network \
         namespace, and in sk_drops of the listener (tcp_listendrop).",
        "sk_drops names the listener, but also counts packets that are not losses: SYNs that are sent again, RSTs of half-open checks and scans, \
         the last ACKs that TCP_DEFER_ACCEPT ignores, and a dropped last ACK a second time (tcp_check_req, discard_and_relse of \
         tcp_v4_rcv). The rule therefore has a finding only if ListenOverflows grew too, and no listener has more drops than that.",
        "A dropped SYN costs the client 1 s (TCP_TIMEOUT_INIT), and each further one 1 s or more. A dropped last ACK costs at least the \
         time until the kernel sends its SYN-ACK again, 1 s.",
        "The kernel counts no drops of a unix listener. A trace sees them: calls of connect() that failed with EAGAIN because the queue was full. \
         Blocking clients wait instead.",
        "The rule has the drops that met a full accept queue (A01): the process calls accept() too slowly, or the backlog is too small for \
         bursts. A03 and A05 have the other causes: the SYN queue, memory, routes.",
        "What does not help: longer timeouts of the client. The count does not contain packets that a firewall or the network drops \
         before TCP sees them.",
    ],
    check: a02,
};

fn a02(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp_a02(snapshot, limit), of_unix_a02(snapshot, limit))
}

/// Looks for unix listeners that a trace saw refuse connections.
fn of_unix_a02(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.unix_listeners.seen()?;
    if let (false, Err(reason)) = (listeners.is_empty(), snapshot.failures.seen()) {
        return Err(format!(
            "{reason}; `fourtuple trace connect --for 10s` shows connections that unix listeners refuse"
        ));
    }
    Ok(listeners.iter().filter_map(|listener| unix_draft_a02(snapshot, listener, limit)).collect())
}

fn unix_draft_a02(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Draft> {
    let failed: u64 = refused(snapshot, listener).map(|call| call.failed).sum();
    let client = refused(snapshot, listener).max_by_key(|call| call.failed)?;
    // A01 has a queue that is full now.
    if (failed as f64) < limit || is_full(listener.waiting, listener.backlog) {
        return None;
    }
    let verdict = format!(
        "{} of {} refused {} in {}; {}, the backlog is {}",
        listener.path,
        unix_acceptors(snapshot, listener),
        counted(failed, "connection"),
        time(snapshot.interval_ns),
        doing(listener.waiting.into(), "connection", "wait"),
        count(listener.backlog.into())
    );
    let fact = format!(
        "connect() of {} failed with EAGAIN {} (nginx answers 502)",
        process(&client.owner),
        counted(client.failed, "time")
    );
    let draft = Draft::new(Severity::Warning, Subject::Unix(listener.path.clone()), verdict).because(fact);
    Some(empty_unix(explains_unix(draft, listener), snapshot, listener))
}

fn of_tcp_a02(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    if !listeners.is_empty() && listeners.iter().all(|listener| listener.drops.is_none()) {
        return Err(
            "sock_diag(7) of this kernel does not tell the drops of a listener (INET_DIAG_SKMEMINFO)"
                .to_owned(),
        );
    }
    snapshot.counter("TcpExt.ListenDrops")?;
    // A03 and A05 have the drops that a full accept queue did not cause.
    let overflows = snapshot.counter("TcpExt.ListenOverflows")?.during;
    let found = listeners.iter().map(|listener| (listener, drops(snapshot, listener).min(overflows)));
    let dropping = found.filter(|(_, drops)| *drops > 0 && *drops as f64 >= limit);
    Ok(dropping.map(|(listener, drops)| draft_a02(snapshot, listener, drops)).collect())
}

fn draft_a02(snapshot: &Snapshot, listener: &Listener, drops: u64) -> Draft {
    let interval = time(snapshot.interval_ns);
    let verdict = format!(
        "{} of {} dropped {}{} in {interval}; {}, the backlog is {}",
        listener.address,
        acceptors(snapshot, listener),
        up_to(snapshot),
        segments(drops),
        doing(listener.waiting.into(), "connection", "wait"),
        count(listener.backlog.into())
    );
    let draft = Draft::new(Severity::Warning, listener, verdict)
        .because(format!(
            "all listeners of the namespace: ListenDrops {}, of these ListenOverflows {}",
            count(during(snapshot, "TcpExt.ListenDrops")),
            count(during(snapshot, "TcpExt.ListenOverflows"))
        ))
        .because(format!(
            "since the listener was created: sk_drops {}",
            count(listener.drops.map_or(0, |drops| drops.total))
        ));
    empty_faster(explains_listener(draft, snapshot, listener), snapshot, listener)
}

pub(super) const A03: Rule = Rule {
    id: "A03",
    title: "connections are dropped although the accept queue is not full",
    source: "TcpExt.ListenDrops, ListenOverflows and TCPReqQFullDrop of /proc/net/netstat",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "TcpExt.ListenDrops counts all SYNs and last ACKs that listeners dropped (tcp_listendrop), TcpExt.ListenOverflows the drops that met \
         a full accept queue (sk_acceptq_is_full). The difference has other causes, against which neither accept() nor the backlog helps.",
        "The other causes, in the order of tcp_conn_request: the SYN queue is full and SYN cookies are off (TCPReqQFullDrop); no memory \
         for the request (inet_reqsk_alloc); no route back to the client; SYN cookies are off and three quarters of \
         net.ipv4.tcp_max_syn_backlog are in use, so that only clients are served whose earlier connections the kernel remembers \
         (tcp_peer_is_proven); no memory for the new socket in tcp_v4_syn_recv_sock; an ICMP error for the client (tcp_req_err); a SYN to \
         a broadcast or multicast address.",
        "What helps: net.ipv4.tcp_syncookies=1 if it is 0; a route back to the clients (ip route get ADDRESS); memory (F02). What does \
         not help: a greater net.core.somaxconn.",
    ],
    check: a03,
};

fn a03(snapshot: &Snapshot, limit: f64) -> Checked {
    let drops = snapshot.counter("TcpExt.ListenDrops")?.during;
    let overflows = snapshot.counter("TcpExt.ListenOverflows")?.during;
    let full = during(snapshot, "TcpExt.TCPReqQFullDrop");
    // A05 has the drops of a full SYN queue.
    let others = other_drops(snapshot);
    if (others as f64) < limit || flooded(snapshot).is_some() {
        return Ok(Vec::new());
    }
    let interval = time(snapshot.interval_ns);
    let by_listener: Vec<String> = snapshot
        .listeners
        .seen()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(|listener| (listener.address, accepting::drops(snapshot, listener)))
        .filter(|(_, drops)| *drops > 0)
        .map(|(address, drops)| format!("{address} dropped {}{}", up_to(snapshot), count(drops)))
        .collect();
    let verdict = format!(
        "{} {} dropped in {interval} although the accept queue was not full",
        segments(others),
        if others == 1 { "was" } else { "were" }
    );
    let mut draft = Draft::new(Severity::Warning, "drops without overflow", verdict).because(format!(
        "ListenDrops {}, ListenOverflows {}, TCPReqQFullDrop {}",
        count(drops),
        count(overflows),
        count(full)
    ));
    draft = draft
        .explains_up_to(What::Counter("TcpExt.ListenDrops"), others)
        .explains(What::Counter("TcpExt.TCPSynRetrans"));
    for listener in snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default() {
        draft =
            draft.explains(What::Drops(listener.cookie)).explains(What::Unanswered(Some(listener.address)));
    }
    if !by_listener.is_empty() {
        draft = draft.because(by_listener.join(", "));
    }
    // inet_csk_route_req and inet6_csk_route_req count what they do not find.
    let without_route = ["Ip.OutNoRoutes", "Ip6.OutNoRoutes"].map(|counter| during(snapshot, counter));
    let no_route: u64 = without_route.iter().sum();
    if no_route * 10 >= others * 9 {
        let fact = format!("as many packets had no route, {}: the SYN-ACKs to the clients", count(no_route));
        return Ok(vec![
            draft
                .because_first(fact)
                .explains_up_to(What::Counter("Ip.OutNoRoutes"), others)
                .explains_up_to(What::Counter("Ip6.OutNoRoutes"), others)
                .proper(Remedy::advice(
                    "a route back to the clients: `ip route get ADDRESS` of one of them fails",
                    "the SYN is answered",
                )),
        ]);
    }
    if let Ok(memory) = snapshot.memory.seen()
        && memory.limits_pages[1] > 0
    {
        draft = draft.because(format!(
            "TCP memory: {}, pressure from {} on",
            counted(memory.pages, "page"),
            count(memory.limits_pages[1])
        ));
    }
    if snapshot.number("net.ipv4.tcp_syncookies") == Ok(0) {
        draft = draft
            .because("net.ipv4.tcp_syncookies is 0: a quarter of net.ipv4.tcp_max_syn_backlog is kept for known clients")
            .now(Remedy::sysctl("net.ipv4.tcp_syncookies", "1", "SYNs are answered when the SYN queue is full").unproven());
    }
    Ok(vec![draft.proper(Remedy::advice(
        "look for a missing route back to the clients (ip route get ADDRESS), and for memory (`fourtuple explain F02`)",
        "the SYN is answered",
    ))])
}

pub(super) const A04: Rule = Rule {
    id: "A04",
    title: "net.core.somaxconn cuts a backlog",
    source: "sock_diag(7) (sk_max_ack_backlog, UNIX_DIAG_RQLEN), net.core.somaxconn",
    threshold: Some(Threshold { default: 50.0, unit: "% of the backlog" }),
    explanation: &[
        "listen(fd, backlog) stores the lower of backlog and net.core.somaxconn (__sys_listen) and reports no error. A listener whose \
         limit equals net.core.somaxconn was probably meant to have a longer queue: the kernel does not keep the value that the program asked \
         for, and a program may have chosen the same one, as Go does. The default is 4096 since Linux 5.4 and 128 before.",
        "The rule has a finding only if the cut matters: the queue held this share of the limit at both readings, or the listener dropped \
         connections during the interval while the namespace had overflows.",
        "What helps: a greater net.core.somaxconn, then a restart of the server, because the value is read by listen() only. In a \
         container the sysctl belongs to the network namespace of the container (Kubernetes: securityContext.sysctls; Docker: --sysctl).",
        "What does not help: a greater backlog in the program alone, and a longer queue for a server that is overloaded: connections then \
         wait longer.",
    ],
    check: a04,
};

fn a04(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp_a04(snapshot, limit), of_unix_a04(snapshot, limit))
}

fn of_unix_a04(snapshot: &Snapshot, limit: f64) -> Checked {
    let somaxconn = snapshot.number("net.core.somaxconn")?;
    let matters = |listener: &&UnixListener| {
        let standing = f64::from(listener.waiting.min(listener.waiting_before));
        standing > 0.0 && standing >= f64::from(listener.backlog) * limit / 100.0
    };
    let is_cut = |listener: &&UnixListener| u64::from(listener.backlog) == somaxconn;
    let listeners = snapshot.unix_listeners.seen()?.iter().filter(is_cut).filter(matters);
    let drafts = listeners.map(|listener| {
        let UnixListener { path, owners, waiting, .. } = listener;
        draft_a04(
            Subject::Unix(path.clone()),
            path,
            owners,
            &unix_acceptors(snapshot, listener),
            *waiting,
            somaxconn,
        )
    });
    Ok(drafts.collect())
}

fn of_tcp_a04(snapshot: &Snapshot, limit: f64) -> Checked {
    let somaxconn = snapshot.number("net.core.somaxconn")?;
    let overflows = during(snapshot, "TcpExt.ListenOverflows");
    let matters = |listener: &&Listener| {
        let standing = listener.waiting.min(listener.waiting_before);
        let has_drops = overflows > 0 && drops(snapshot, listener) > 0;
        has_drops || (standing > 0 && f64::from(standing) >= f64::from(listener.backlog) * limit / 100.0)
    };
    let is_cut = |listener: &&Listener| u64::from(listener.backlog) == somaxconn;
    let listeners = snapshot.listeners.seen()?.iter();
    Ok(listeners
        .filter(is_cut)
        .filter(matters)
        .map(|listener| {
            let server = acceptors(snapshot, listener);
            let address = listener.address.to_string();
            draft_a04(listener.into(), &address, &listener.owners, &server, listener.waiting, somaxconn)
        })
        .collect())
}

fn draft_a04(
    subject: Subject,
    address: &str,
    owners: &[Owner],
    server: &str,
    waiting: u32,
    somaxconn: u64,
) -> Draft {
    let verdict = format!(
        "the backlog of {address} ({server}) is net.core.somaxconn, {}: the kernel has probably cut it; {}",
        count(somaxconn),
        doing(waiting.into(), "connection", "wait")
    );
    let wider = (somaxconn * 8).max(4096);
    let settings = Settings::of_listener(owners);
    // Programs in Go have no setting: the library reads net.core.somaxconn.
    let backlog = settings.map_or_else(
        || "the argument of listen() (Go takes net.core.somaxconn)".to_owned(),
        |settings| with_number(settings.backlog, wider),
    );
    Draft::new(Severity::Notice, subject, verdict)
        .now(Remedy::sysctl(
            "net.core.somaxconn",
            wider.to_string(),
            format!("a queue of up to {}, after a restart of {server}", counted(wider, "connection")),
        ))
        .proper(Remedy::advice(
            format!("for {server} {backlog}, and the sysctl in a file of /etc/sysctl.d"),
            "the limit is there before the server starts",
        ))
}

pub(super) const A05: Rule = Rule {
    id: "A05",
    title: "the SYN queue is full",
    source: "TcpExt.TCPReqQFullDoCookies, TCPReqQFullDrop, SyncookiesSent of /proc/net/netstat; sock_diag(7) (SYN_RECV); \
         net.ipv4.tcp_syncookies, net.ipv4.tcp_max_syn_backlog",
    threshold: Some(Threshold { default: 75.0, unit: "% of the limit of handshakes" }),
    explanation: &[
        "A handshake in progress is a request socket in SYN_RECV. A listener takes as many as its backlog (inet_csk_reqsk_queue_is_full). \
         Beyond that the kernel answers with a SYN cookie and keeps no state if net.ipv4.tcp_syncookies is 1 (TCPReqQFullDoCookies), and \
         drops the SYN if it is 0 (TCPReqQFullDrop). With 0 it also drops SYNs of unknown clients from three quarters of \
         net.ipv4.tcp_max_syn_backlog on (tcp_conn_request).",
        "A full SYN queue means a SYN flood, clients whose ACKs do not arrive (asymmetric routes, a firewall), or a backlog that is small \
         for the round-trip time: rate of new connections times round-trip time is the number of handshakes in progress.",
        "A connection by a cookie works but lacks window scaling and SACK unless the client sends timestamps (cookie_timestamp_decode). A \
         lost last ACK is not repaired: the kernel does not send the SYN-ACK again.",
        "What helps: net.ipv4.tcp_syncookies=1; a greater backlog of listen(), which limits both queues; net.core.somaxconn. What does \
         not help: net.ipv4.tcp_max_syn_backlog while cookies are on (it is not read then); net.ipv4.tcp_syncookies=2 sends cookies to \
         all clients and is for tests.",
    ],
    check: a05,
};

/// Fewer handshakes in progress than this are not a full queue, even with a smaller backlog.
const FEW: u32 = 16;

fn a05(snapshot: &Snapshot, limit: f64) -> Checked {
    let cookies = snapshot.number("net.ipv4.tcp_syncookies")?;
    let dropped = snapshot.counter("TcpExt.TCPReqQFullDrop")?.during;
    let answered = during(snapshot, "TcpExt.TCPReqQFullDoCookies");
    let sent = during(snapshot, "TcpExt.SyncookiesSent");
    let interval = time(snapshot.interval_ns);
    let mut drafts = Vec::new();
    if cookies == 0 && dropped > 0 {
        let verdict = format!(
            "{} dropped in {interval}: the SYN queue is full and SYN cookies are off",
            doing(dropped, "SYN", "were")
        );
        drafts.push(
            with_limits(Draft::new(Severity::Critical, "SYN queue", verdict), snapshot).now(cookies_on()),
        );
    } else if cookies == 2 && sent > 0 {
        let verdict = format!(
            "net.ipv4.tcp_syncookies is 2: {} got a cookie in {interval} without need",
            counted(sent, "SYN")
        );
        drafts.push(Draft::new(Severity::Notice, "SYN queue", verdict).now(cookies_on()));
    } else if dropped + answered + if cookies == 1 { sent } else { 0 } > 0 {
        let verdict = format!(
            "the SYN queue was full: {} got a cookie instead of a place in {interval}, {} dropped",
            counted(answered.max(sent), "SYN"),
            count(dropped)
        );
        drafts.push(with_limits(Draft::new(Severity::Warning, "SYN queue", verdict), snapshot));
    }
    if let Some(listener) = flooded(snapshot).filter(|_| drafts.is_empty()) {
        let verdict = format!(
            "{} dropped in {interval}: {} in progress at {} ({}), which takes {} from clients that the kernel does not \
             know, and SYN cookies are off",
            doing(other_drops(snapshot), "SYN", "were"),
            doing(listener.handshakes.into(), "handshake", "are"),
            listener.address,
            acceptors(snapshot, listener),
            count(handshakes_allowed(snapshot, listener))
        );
        let draft = Draft::new(Severity::Critical, "SYN queue", verdict)
            .explains_up_to(What::Counter("TcpExt.ListenDrops"), other_drops(snapshot))
            .explains(What::Drops(listener.cookie));
        drafts.push(with_limits(draft, snapshot).now(cookies_on()));
    }
    let listeners = snapshot.listeners.seen()?;
    let allowed = |listener: &Listener| handshakes_allowed(snapshot, listener);
    let is_near = |listener: &Listener| {
        listener.handshakes >= FEW
            && f64::from(listener.handshakes) >= allowed(listener) as f64 * limit / 100.0
    };
    let mut seen = Vec::new();
    for listener in listeners.iter().filter(|listener| is_near(listener)) {
        // The listeners of a SO_REUSEPORT group have the same number.
        if seen.contains(&listener.address) || drafts.iter().any(|draft| draft.severity < Severity::Warning) {
            continue;
        }
        seen.push(listener.address);
        let verdict = format!(
            "{} in progress at {} ({}), which takes {}",
            doing(listener.handshakes.into(), "handshake", "are"),
            listener.address,
            acceptors(snapshot, listener),
            count(allowed(listener))
        );
        drafts.push(with_limits(
            Draft::new(Severity::Warning, listener.address.to_string(), verdict),
            snapshot,
        ));
    }
    Ok(drafts)
}

fn cookies_on() -> Remedy {
    Remedy::sysctl(
        "net.ipv4.tcp_syncookies",
        "1",
        "a full SYN queue answers with cookies instead of dropping, and only then",
    )
}

fn with_limits(draft: Draft, snapshot: &Snapshot) -> Draft {
    let busiest =
        snapshot.listeners.seen().ok().and_then(|all| all.iter().max_by_key(|listener| listener.handshakes));
    let draft = match busiest.filter(|listener| listener.handshakes > 0) {
        Some(listener) => draft.because(format!(
            "{} in progress at {} ({}), backlog {}",
            counted(listener.handshakes.into(), "handshake"),
            listener.address,
            acceptors(snapshot, listener),
            count(listener.backlog.into())
        )),
        None => draft,
    };
    let value = |name| snapshot.sysctls.get(name).map_or("not readable", String::as_str);
    let dropped = during(snapshot, "TcpExt.TCPReqQFullDrop");
    // Each of these SYNs counts in sk_drops of its listener too (tcp_listendrop).
    let listeners = snapshot.listeners.seen().into_iter().flatten();
    let full = listeners.filter(|listener| listener.handshakes > 0 && dropped > 0);
    let explained = full.fold(draft, |draft, listener| {
        draft.explains(What::Drops(listener.cookie)).explains(What::Unanswered(Some(listener.address)))
    });
    explained
        .explains_up_to(What::Counter("TcpExt.ListenDrops"), dropped)
        .explains(What::Counter("TcpExt.TCPReqQFullDrop"))
        .explains(What::Counter("TcpExt.TCPReqQFullDoCookies"))
        .explains(What::Counter("TcpExt.SyncookiesFailed"))
        .explains(What::Counter("TcpExt.TCPSynRetrans"))
        .explains(What::Counter("Tcp.AttemptFails"))
        .because(format!(
            "net.ipv4.tcp_syncookies {}, net.ipv4.tcp_max_syn_backlog {}, net.core.somaxconn {}",
            value("net.ipv4.tcp_syncookies"),
            value("net.ipv4.tcp_max_syn_backlog"),
            value("net.core.somaxconn")
        ))
        .proper(Remedy::advice(
            "a backlog of at least new connections per second times round-trip time in the configuration of the server, and \
             net.core.somaxconn not below it",
            "the handshakes have space",
        ))
        .proper(Remedy::advice(
            "if the SYNs come from addresses that never answer (ss -tn state syn-recv), a filter for them in front of the host",
            "a flood does not reach the queue",
        ))
}

pub(super) const A06: Rule = Rule {
    id: "A06",
    title: "a full accept queue resets connections",
    source: "net.ipv4.tcp_abort_on_overflow, TcpExt.ListenOverflows of /proc/net/netstat",
    threshold: None,
    explanation: &[
        "With net.ipv4.tcp_abort_on_overflow=1 the kernel answers the last ACK of a handshake with RST if the accept queue is full \
         (tcp_check_req). The client sees ECONNRESET after a connect() that succeeded. With 0, the default, the kernel drops the ACK, and \
         the connection is established when the SYN-ACK is sent again and the queue has space by then.",
        "The setting turns a short burst into errors. It is useful only where a client shall try another server at once.",
        "What helps: net.ipv4.tcp_abort_on_overflow=0, and what helps against full accept queues (A01). What does not help: SYN cookies, \
         because the reset concerns complete handshakes.",
    ],
    check: a06,
};

fn a06(snapshot: &Snapshot, _limit: f64) -> Checked {
    if snapshot.number("net.ipv4.tcp_abort_on_overflow")? == 0 {
        return Ok(Vec::new());
    }
    let overflows = during(snapshot, "TcpExt.ListenOverflows");
    let draft = if overflows > 0 {
        let verdict = format!(
            "net.ipv4.tcp_abort_on_overflow is 1, and accept queues were full {} in {}: a last ACK then gets RST",
            counted(overflows, "time"),
            time(snapshot.interval_ns)
        );
        Draft::new(Severity::Critical, "net.ipv4.tcp_abort_on_overflow", verdict)
    } else {
        let verdict =
            "net.ipv4.tcp_abort_on_overflow is 1: a burst that fills an accept queue resets connections";
        Draft::new(Severity::Notice, "net.ipv4.tcp_abort_on_overflow", verdict)
    };
    Ok(vec![draft.now(Remedy::sysctl(
        "net.ipv4.tcp_abort_on_overflow",
        "0",
        "a full accept queue delays connections instead of resetting them",
    ))])
}

pub(super) const A07: Rule = Rule {
    id: "A07",
    title: "connections wait long for accept()",
    source: "sock_diag(7) (sk_ack_backlog, read twice, and the last packets of waiting connections), unix_diag \
             (UNIX_DIAG_ICONS), Tcp.PassiveOpens of /proc/net/snmp; the \
         tracer of `fourtuple trace accept`",
    threshold: Some(Threshold { default: 100.0, unit: "ms" }),
    explanation: &[
        "The accept wait is the time from the end of the handshake to the return of accept(). The client counts it as the time of its \
         first answer; connect() does not contain it. No counter of the kernel has the accept wait; the tracer measures it for each \
         connection (sk_data_ready of the listener to the exit of accept).",
        "The tracer measures only connections that are accepted. Connections that wait on are seen in the queue: those whose peers have \
         sent nothing since the first reading (tcpi_last_data_recv, tcpi_last_ack_recv) have waited for the whole interval. Also, the queue is \
         served in order, so that with fewer new connections of the namespace (Tcp.PassiveOpens) than connections in the queue, the others \
         were there at the first reading. Shorter waits are not visible without the tracer, and the rule says then that it could not be checked.",
        "Unix listeners: unix_diag has the client of each connection in the queue, in the order of the queue. A client that was in the queue at both \
         readings has waited for the whole interval, and so have those before it. A client that has closed is not recognised; the tracer sees TCP \
         only.",
        "What helps: workers that are not blocked when a connection arrives. A SO_REUSEPORT group gives connections to blocked workers as \
         readily as to idle ones: `fourtuple fix accept` chooses the least busy. On a shared listener the next free worker accepts.",
        "What does not help: a greater backlog, with which more connections wait for longer.",
    ],
    check: a07,
};

fn a07(snapshot: &Snapshot, limit: f64) -> Checked {
    let limit_ns = limit * 1e6;
    let queues = joined(in_queues(snapshot, limit_ns), in_unix_queues(snapshot, limit_ns));
    joined(queues, in_trace(snapshot, limit_ns))
}

/// Looks for connections that were in a queue at both readings.
fn in_queues(snapshot: &Snapshot, limit_ns: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    let is_long = snapshot.interval_ns as f64 >= limit_ns;
    let found = listeners.iter().map(|listener| (listener, kept_waiting(snapshot, listener)));
    let found = found.filter(|(_, old)| is_long && *old > 0);
    Ok(found.map(|(listener, old)| standing(snapshot, listener, old)).collect())
}

/// Looks for connections that were in the queue of a unix listener at both readings.
fn in_unix_queues(snapshot: &Snapshot, limit_ns: f64) -> Checked {
    let is_long = snapshot.interval_ns as f64 >= limit_ns;
    let found = snapshot.unix_listeners.seen()?.iter();
    let found = found.filter(|listener| is_long && listener.standing > 0);
    Ok(found.map(|listener| unix_standing(snapshot, listener)).collect())
}

fn unix_standing(snapshot: &Snapshot, listener: &UnixListener) -> Draft {
    let (path, old) = (&listener.path, u64::from(listener.standing));
    let verdict = format!(
        "{} at {path} {} waited at least {} for accept() of {}",
        counted(old, "connection"),
        if old == 1 { "has" } else { "have" },
        time(snapshot.interval_ns),
        unix_acceptors(snapshot, listener)
    );
    let mut draft = Draft::new(Severity::Warning, Subject::Unix(path.clone()), verdict).because(format!(
        "{} in the queue at the first reading, {} at the second",
        counted(listener.waiting_before.into(), "connection"),
        count(listener.waiting.into())
    ));
    if !listener.clients.is_empty() {
        draft = draft.because(format!("the connections are of {}", holders(&listener.clients)));
    }
    if listener.given_up > 0 {
        let given_up = count(listener.given_up.into());
        draft = draft.because(format!("the clients of {given_up} of them have closed already"));
    }
    empty_unix(draft, snapshot, listener).explains(What::Queue(listener.cookie))
}

/// Looks for long waits among the connections that were accepted.
fn in_trace(snapshot: &Snapshot, limit_ns: f64) -> Checked {
    let traced = snapshot.accepts.seen().map_err(|reason| {
        format!("{reason}; `fourtuple trace accept --for 10s` shows how long connections wait")
    })?;
    let wait = traced.wait_p99_ns.filter(|wait| *wait as f64 >= limit_ns);
    Ok(wait.map(|wait| measured(snapshot, wait, traced.accepts)).into_iter().collect())
}

fn measured(snapshot: &Snapshot, wait: u64, accepts: u64) -> Draft {
    let verdict =
        format!("1% of {} waited {} or longer for accept()", counted(accepts, "connection"), time(wait));
    let longest =
        snapshot.listeners.seen().ok().and_then(|all| all.iter().max_by_key(|listener| listener.waiting));
    match longest.filter(|listener| listener.waiting > 0) {
        Some(listener) => {
            let fact = format!(
                "{} ({}) has the longest accept queue: {}",
                listener.address,
                acceptors(snapshot, listener),
                counted(listener.waiting.into(), "connection")
            );
            accept_sooner(Draft::new(Severity::Warning, "accept wait", verdict), snapshot, listener)
                .because(fact)
        }
        None => Draft::new(Severity::Warning, "accept wait", verdict)
            .now(Remedy::own("trace accept --for 10s", "shows the listener and the workers"))
            .proper(unblocked()),
    }
}

fn standing(snapshot: &Snapshot, listener: &Listener, old: u64) -> Draft {
    let waited = listener.waited_ns.max(snapshot.interval_ns);
    let verdict = format!(
        "{} at {} {} waited at least {} for accept() of {}",
        counted(old, "connection"),
        listener.address,
        if old == 1 { "has" } else { "have" },
        time(snapshot.interval_ns),
        acceptors(snapshot, listener)
    );
    let mut draft = Draft::new(Severity::Warning, listener, verdict).because(format!(
        "{} in the queue at the first reading, {} at the second; the oldest has waited {} or longer",
        counted(listener.waiting_before.into(), "connection"),
        count(listener.waiting.into()),
        time(waited)
    ));
    if listener.given_up > 0 {
        draft = draft.because(format!(
            "the peers of {} of them have closed already (CLOSE_WAIT in the accept queue)",
            count(listener.given_up.into())
        ));
    }
    accept_sooner(draft, snapshot, listener).explains(What::Queue(listener.cookie))
}

fn unblocked() -> Remedy {
    Remedy::advice(
        "more workers, or no blocking work in the thread that calls accept(); for a SO_REUSEPORT group `fourtuple fix accept`",
        "a worker is free when a connection arrives",
    )
}
