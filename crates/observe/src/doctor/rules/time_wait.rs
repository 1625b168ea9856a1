//! TIME_WAIT, its settings, and who closes first.

use std::collections::BTreeMap;

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{
    CloseWait, ConfiguredSysctl, Owner, Part, Process, Service, Snapshot, Tuple, UnixCloseWait,
};

use crate::doctor::attribute::{Callers, is_local, left_behind};
use crate::doctor::budget::{Budget, RECENT_SECONDS, delay_s, is_relieved, reuse_delay_s};
use crate::doctor::command::Scope;
use crate::doctor::draft::{Draft, Remedy, What};
use crate::doctor::remedies::{close_after_peer, keep_connections, print_name, printed, reuse};
use crate::doctor::rules::{Checked, Rule, Threshold, joined};
use crate::doctor::words::{callers, count, counted, doing, percent, process, rate, time};

pub(super) const T01: Rule = Rule {
    id: "T01",
    title: "the TIME_WAIT sockets come near net.ipv4.tcp_max_tw_buckets",
    source: "/proc/net/sockstat (tw), net.ipv4.tcp_max_tw_buckets",
    threshold: Some(Threshold { default: 80.0, unit: "% of net.ipv4.tcp_max_tw_buckets" }),
    explanation: &[
        "A network namespace has at most net.ipv4.tcp_max_tw_buckets sockets in TIME_WAIT (inet_twsk_alloc). Beyond, a connection that is closed skips \
         TIME_WAIT (tcp_time_wait), and TcpExt.TCPTimeWaitOverflow counts it: rule T02.",
        "TIME_WAIT protects the next connection with the same addresses and ports from late segments of the previous one (RFC 9293, section 3.6.1), \
         and answers a retransmitted FIN. Without it a peer can get RST where it waits for an ACK, and with sequence numbers that happen to match, \
         old data.",
        "What helps: a higher limit. A socket in TIME_WAIT takes about 250 bytes, so that 262,144 of them take 64 MiB at most. Connections that are used \
         again help too.",
        "What does not help: a lower limit as a means to get rid of TIME_WAIT; net.ipv4.tcp_fin_timeout, which is another state.",
    ],
    check: t01,
};

const NAME: &str = "net.ipv4.tcp_max_tw_buckets";

fn t01(snapshot: &Snapshot, percent_limit: f64) -> Checked {
    let time_wait = snapshot.memory.seen()?.time_wait;
    let limit = snapshot.number(NAME)?;
    if time_wait == 0 || (time_wait as f64) < limit as f64 * percent_limit / 100.0 {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} in TIME_WAIT, {} of the {} that {NAME} allows",
        doing(time_wait, "socket", "are"),
        percent(time_wait, limit),
        count(limit)
    );
    Ok(vec![
        Draft::new(Severity::Warning, NAME, verdict)
            .because("beyond the limit connections skip TIME_WAIT (T02)")
            .now(raise(time_wait, limit)),
    ])
}

/// A limit of twice the sockets, at least the kernel's usual 262,144.
fn higher(time_wait: u64, limit: u64) -> u64 {
    (time_wait.max(limit) * 2).next_power_of_two().max(262_144)
}

pub(super) fn raise(time_wait: u64, limit: u64) -> Remedy {
    let higher = higher(time_wait, limit);
    let effect =
        format!("space for {}, at most {} MiB of memory", counted(higher, "socket"), (higher * 256) >> 20);
    Remedy::sysctl(NAME, higher.to_string(), effect)
}

pub(super) const T02: Rule = Rule {
    id: "T02",
    title: "TIME_WAIT is cut short",
    source: "/proc/net/netstat (TcpExt.TCPTimeWaitOverflow), /proc/net/sockstat (tw), net.ipv4.tcp_max_tw_buckets",
    threshold: None,
    explanation: &[
        "TcpExt.TCPTimeWaitOverflow counts connections that skipped TIME_WAIT, because the namespace had net.ipv4.tcp_max_tw_buckets such sockets \
         already or no memory for one (tcp_time_wait).",
        "The socket is gone at once. A FIN that the peer sends again is answered with RST, which programs see as ECONNRESET after a complete exchange. \
         Late segments can reach a new connection with the same addresses and ports. As the ports are free sooner, the overflow hides exhausted \
         ports (P01), sometimes on purpose.",
        "The rule has a finding if the counter grows, or if it is not 0 and the sockets are at half of the limit again.",
        "What helps: a higher net.ipv4.tcp_max_tw_buckets (about 250 bytes of memory for each socket), fewer connections, net.ipv4.tcp_tw_reuse \
         instead of the overflow where ports are short: it checks timestamps.",
        "What does not help: SO_LINGER with time 0, which also skips TIME_WAIT and sends RST to the peer.",
    ],
    check: t02,
};

fn t02(snapshot: &Snapshot, _: f64) -> Checked {
    let overflow = snapshot.counter("TcpExt.TCPTimeWaitOverflow")?;
    let time_wait = snapshot.memory.seen()?.time_wait;
    let limit = snapshot.number("net.ipv4.tcp_max_tw_buckets")?;
    let is_full = time_wait >= limit;
    let verdict = if overflow.during > 0 {
        let seconds = snapshot.interval_ns as f64 / 1e9;
        format!(
            "{} skipped TIME_WAIT in {seconds:.1} s: net.ipv4.tcp_max_tw_buckets is {}",
            counted(overflow.during, "connection"),
            count(limit)
        )
    } else if overflow.total > 0 && time_wait * 2 >= limit {
        format!(
            "{} skipped TIME_WAIT so far: net.ipv4.tcp_max_tw_buckets is {}, with {} in TIME_WAIT",
            counted(overflow.total, "connection"),
            count(limit),
            counted(time_wait, "socket")
        )
    } else {
        return Ok(Vec::new());
    };
    // With space for more sockets no further connection skips the state.
    let severity = if overflow.during > 0 && is_full { Severity::Warning } else { Severity::Notice };
    Ok(vec![
        Draft::new(severity, "TIME_WAIT", verdict)
            .explains(What::Counter("TcpExt.TCPTimeWaitOverflow"))
            .because(format!("{} in TIME_WAIT", counted(time_wait, "socket")))
            .because(format!(
                "{} since the namespace was created",
                counted(overflow.total, "such connection")
            ))
            .now(raise(time_wait, limit)),
    ])
}

pub(super) const T03: Rule = Rule {
    id: "T03",
    title: "net.ipv4.tcp_tw_reuse would give ports back",
    source: "sock_diag(7) (inet_diag), net.ipv4.tcp_tw_reuse, net.ipv4.tcp_tw_reuse_delay, net.ipv4.tcp_timestamps",
    threshold: Some(Threshold { default: 50.0, unit: "% of the usable ports" }),
    explanation: &[
        "With net.ipv4.tcp_tw_reuse = 1 connect() may take a port whose connection to the same destination is in TIME_WAIT, once a second has \
         passed since the last packet, if that connection had TCP timestamps (tcp_twsk_unique). The default is 2: over loopback only. \
         0 forbids it.",
        "The delay is 1 s, since Linux 6.14 net.ipv4.tcp_tw_reuse_delay in milliseconds. The ceiling of a client that closes first then is the number of \
         ports per second instead of per minute.",
        "It is safe for clients: the new connection begins with a greater timestamp, and PAWS (RFC 7323) refuses segments of the old one. The peer \
         must have timestamps too; nearly all systems have. A NAT device that rewrites timestamps, or a load balancer without them, prevents it.",
        "The rule has a finding if a source and a destination that connect() may not reuse have more TIME_WAIT sockets than half of their ports in use, \
         and the ports in use are past the threshold. It also has one if the delay is longer than 1 s and the ports last no longer for it.",
        "What does not help: the sysctl on a server for its accepted connections, as it concerns connect() only; net.ipv4.tcp_tw_recycle, which \
         is gone since Linux 4.12. The search still passes over each port in TIME_WAIT and costs more there: see P02 and P09.",
    ],
    check: t03,
};

fn t03(snapshot: &Snapshot, limit: f64) -> Checked {
    let mode = snapshot.number("net.ipv4.tcp_tw_reuse")?;
    if snapshot.number("net.ipv4.tcp_timestamps")? == 0 {
        // T04.
        return Ok(Vec::new());
    }
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        // Without timestamps: T04.
        let is_waiting = budget.time_wait * 2 > budget.in_use
            && budget.is_past(limit)
            && !budget.is_plain()
            && !is_relieved(snapshot, tuple);
        let is_on = reuse_delay_s(snapshot, tuple).is_some();
        if is_waiting && (!is_on || delay_s(snapshot) > 1.0) {
            drafts.push(draft_t03(snapshot, tuple, &budget, mode, is_on));
        }
    }
    Ok(drafts)
}

fn draft_t03(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, mode: u64, is_on: bool) -> Draft {
    let waiting = percent(budget.time_wait.into(), budget.total.into());
    let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
    if is_on {
        let delay = delay_s(snapshot);
        let verdict = format!(
            "net.ipv4.tcp_tw_reuse_delay is {delay} s: {} has {waiting} of its ports in TIME_WAIT, and connect() takes them again only after this time",
            subject
        );
        let effect = format!(
            "1 s, the default: up to {} instead of {}",
            rate(budget.total.into()),
            rate(budget.ceiling_per_s())
        );
        return Draft::new(severity, subject, verdict).now(Remedy::sysctl(
            "net.ipv4.tcp_tw_reuse_delay",
            "1000",
            effect,
        ));
    }
    let meaning = if mode == 2 { "2 (loopback only)" } else { "0 (never)" };
    let verdict = format!(
        "net.ipv4.tcp_tw_reuse is {meaning}: {} has {waiting} of its ports in TIME_WAIT; with 1 connect() takes them again after {} s",
        subject,
        delay_s(snapshot)
    );
    let mut draft = Draft::new(severity, subject, verdict).because(match subject.time_wait_plain {
        Some(_) => "the connections had TCP timestamps, which both sides need",
        None => "net.ipv4.tcp_timestamps is on here; the peer needs TCP timestamps too",
    });
    draft.now.extend(reuse(snapshot, subject));
    draft.proper(keep_connections(subject))
}

pub(super) const T04: Rule = Rule {
    id: "T04",
    title: "net.ipv4.tcp_tw_reuse has no effect without timestamps",
    source: "net.ipv4.tcp_timestamps, net.ipv4.tcp_tw_reuse, sock_diag(7) (inet_diag), tw_ts_recent_stamp (BPF iterator over TCP sockets)",
    threshold: Some(Threshold { default: 10.0, unit: "% of the usable ports" }),
    explanation: &[
        "connect() takes a port in TIME_WAIT again only if the old connection had TCP timestamps (tw_ts_recent_stamp in tcp_twsk_unique). With \
         net.ipv4.tcp_timestamps = 0 no connection of the namespace has them, and net.ipv4.tcp_tw_reuse = 1 does nothing.",
        "Timestamps were switched off for CPU time or against the disclosure of the uptime. Since Linux 4.10 their start is random for each pair of \
         addresses (secure_tcp_ts_off), and their cost is 12 bytes a segment. Without them PAWS (RFC 7323) is missing too, which protects \
         fast connections from old segments.",
        "The rule has a finding if reuse is allowed for a source and a destination whose TIME_WAIT sockets are past the threshold.",
        "Both sides need timestamps: many load balancers and appliances have none, and some NAT devices and firewalls remove the option. The \
         TIME_WAIT sockets tell (tw_ts_recent_stamp, by a BPF iterator as root), or the open connections of the same source and destination \
         (tcpi_options). If neither can be read, the rule goes by TcpExt.TWRecycled: it is 0 if no port in TIME_WAIT was ever taken again.",
        "What helps: net.ipv4.tcp_timestamps = 1, the default, on both sides. It acts on new connections.",
        "What does not help: a lower net.ipv4.tcp_tw_reuse_delay.",
    ],
    check: t04,
};

fn t04(snapshot: &Snapshot, limit: f64) -> Checked {
    let mode = snapshot.number("net.ipv4.tcp_tw_reuse")?;
    if snapshot.number("net.ipv4.tcp_timestamps")? != 0 {
        return of_peers(snapshot, limit);
    }
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let is_loopback = tuple.source.is_loopback() || tuple.destination.ip().is_loopback();
        let is_allowed = mode == 1 || mode == 2 && is_loopback;
        let is_past = f64::from(budget.time_wait) >= f64::from(budget.total) * limit / 100.0;
        if is_allowed && is_past && budget.time_wait > 0 {
            let verdict = format!(
                "net.ipv4.tcp_tw_reuse is {mode} but net.ipv4.tcp_timestamps is 0: connect() takes no port in TIME_WAIT again, and {} has {} of its ports there",
                tuple,
                percent(budget.time_wait.into(), budget.total.into())
            );
            let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
            return Ok(vec![
                Draft::new(severity, "net.ipv4.tcp_timestamps", verdict)
                    .now(Remedy::sysctl(
                        "net.ipv4.tcp_timestamps",
                        "1",
                        "new connections have timestamps, and their ports can be taken again after 1 s",
                    ))
                    .proper(Remedy::advice(
                        "remove net.ipv4.tcp_timestamps = 0 from /etc/sysctl.conf and /etc/sysctl.d",
                        "the default is 1",
                    )),
            ]);
        }
    }
    Ok(Vec::new())
}

/// Tuples whose peer, or a device on the way to it, has no timestamps, although this host has them and would reuse their ports.
fn of_peers(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let is_past = f64::from(budget.time_wait) >= f64::from(budget.total) * limit / 100.0;
        // Without timestamps in the past: those sockets are gone in a minute.
        if is_local(snapshot, tuple)
            || budget.time_wait == 0
            || !is_past
            || !budget.is_plain()
            || budget.is_presumed
            || reuse_delay_s(snapshot, tuple).is_none()
        {
            continue;
        }
        let seems = if tuple.time_wait_plain.is_some() { "uses" } else { "seems to use" };
        let verdict = format!(
            "{} {seems} no TCP timestamps: connect() takes none of the {} ports in TIME_WAIT again before 60 s have passed, in spite of net.ipv4.tcp_tw_reuse = {}",
            tuple,
            count(budget.plain.into()),
            snapshot.number("net.ipv4.tcp_tw_reuse")?
        );
        let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
        let guess = tuple.time_wait_plain.is_none();
        drafts.push(
            Draft::new(severity, tuple, verdict)
                .because("net.ipv4.tcp_timestamps is 1 here, so the peer, or a device on the way, lacks them")
                .because_if(guess.then(|| {
                    "no port in TIME_WAIT was ever taken again (TcpExt.TWRecycled is 0); the sockets themselves are visible to root only".to_owned()
                }))
                .proper(Remedy::advice(
                    format!("switch on TCP timestamps at {}, or at the load balancer or firewall before it", tuple.destination),
                    "ports in TIME_WAIT can then be taken again after 1 s",
                ))
                .proper(keep_connections(tuple)),
        );
    }
    Ok(drafts)
}

pub(super) const T05: Rule = Rule {
    id: "T05",
    title: "sysctls that do not shorten TIME_WAIT",
    source: "net.ipv4.tcp_fin_timeout, /etc/sysctl.conf and sysctl.d(5), /proc/net/sockstat (tw), sock_diag(7) (inet_diag)",
    threshold: Some(Threshold {
        default: 25.0,
        unit: "% of the usable ports, the number of TIME_WAIT sockets",
    }),
    explanation: &[
        "TIME_WAIT lasts 60 s: TCP_TIMEWAIT_LEN is a constant (include/net/tcp.h). No sysctl changes it.",
        "net.ipv4.tcp_fin_timeout is the time in FIN_WAIT_2 of a socket that the program has closed, while the peer has not (tcp_rcv_state_process, \
         inet_csk_reset_keepalive_timer; TIME_WAIT sockets with the substate FIN_WAIT_2). Lower values make the kernel forget such connections \
         sooner, so that a slow peer gets RST. The number of TIME_WAIT sockets stays.",
        "net.ipv4.tcp_tw_recycle was removed in Linux 4.12. Before, it refused connections of clients behind a NAT device, because it compared their \
         timestamps by address. A line in a file of sysctl.d now only makes `sysctl --system` print an error.",
        "The rule has a finding only while TIME_WAIT sockets are many, because only then was the setting meant to help, and for \
         net.ipv4.tcp_fin_timeout only while sockets in FIN_WAIT_2 are less than a tenth of them.",
        "What helps against many TIME_WAIT sockets: connections that are used again, net.ipv4.tcp_tw_reuse for clients (T03), a peer that closes first \
         (T06). By themselves TIME_WAIT sockets are harmless: they take about 250 bytes each and no processor time.",
    ],
    check: t05,
};

const FIN_TIMEOUT: &str = "net.ipv4.tcp_fin_timeout";
const RECYCLE: &str = "net.ipv4.tcp_tw_recycle";
/// TCP_FIN_TIMEOUT in seconds, the default.
const DEFAULT: u64 = 60;

fn t05(snapshot: &Snapshot, limit: f64) -> Checked {
    let time_wait = snapshot.memory.seen()?.time_wait;
    let usable = snapshot.ports.seen()?.usable();
    if time_wait == 0 || (time_wait as f64) < f64::from(usable) * limit / 100.0 {
        return Ok(Vec::new());
    }
    // A container without the files has no lines.
    let configured = snapshot.configured.seen().map(Vec::as_slice).unwrap_or_default();
    let lines = |name: &str| configured.iter().filter(|line| line.name == name).cloned().collect::<Vec<_>>();
    let now = snapshot.number(FIN_TIMEOUT)?;
    let mut drafts = Vec::new();
    // Where sockets are in FIN_WAIT_2, the sysctl has the effect that it is for.
    let connections = snapshot.connections.seen()?;
    let half_closed = connections.states.get("fin-wait-2").copied().unwrap_or(0);
    if now != DEFAULT && half_closed * 10 < time_wait {
        drafts.push(fin_timeout(now, time_wait, &lines(FIN_TIMEOUT)));
    }
    let has_sysctl = snapshot.sysctls.contains_key(RECYCLE);
    if let (Some(line), false) = (lines(RECYCLE).first(), has_sysctl) {
        drafts.push(recycle(line, time_wait));
    }
    Ok(drafts)
}

fn fin_timeout(now: u64, time_wait: u64, lines: &[ConfiguredSysctl]) -> Draft {
    let verdict = format!(
        "{FIN_TIMEOUT} is {now} s instead of {DEFAULT} s and does not shorten TIME_WAIT, which has {}: it is the time in FIN_WAIT_2",
        counted(time_wait, "socket")
    );
    let mut draft = Draft::new(Severity::Notice, FIN_TIMEOUT, verdict);
    for line in lines {
        draft = draft.because(format!("{}:{} sets {}", line.file, line.line, line.value));
    }
    let effect = "the default; TIME_WAIT lasts 60 s with any value";
    draft.now(Remedy::sysctl(FIN_TIMEOUT, DEFAULT.to_string(), effect)).proper(Remedy::advice(
        format!("remove {FIN_TIMEOUT} from /etc/sysctl.conf and /etc/sysctl.d, unless FIN_WAIT_2 was meant"),
        "the default is 60 s",
    ))
}

fn recycle(line: &ConfiguredSysctl, time_wait: u64) -> Draft {
    let ConfiguredSysctl { file, line: number, .. } = line;
    let verdict = format!(
        "{file}:{number} sets {RECYCLE}, which Linux 4.12 removed: it does nothing about {} in TIME_WAIT",
        counted(time_wait, "socket")
    );
    let path = file.clone();
    let remove = move |snapshot: &mut Snapshot| {
        if let Part::Seen(lines) = &mut snapshot.configured {
            lines.retain(|line| line.name != RECYCLE || line.file != path);
        }
    };
    Draft::new(Severity::Notice, RECYCLE, verdict).proper(
        Remedy::privileged(
            Scope::Host,
            format!("sed -i -E '/^[[:space:]]*-?net[./]ipv4[./]tcp_tw_recycle/d' {file}"),
            "removes the line",
        )
        .with(remove),
    )
}

pub(super) const T06: Rule = Rule {
    id: "T06",
    title: "this side closes first",
    source: "TIME_WAIT sockets and their remaining times in sock_diag(7) (inet_diag), net.ipv4.tcp_max_tw_buckets",
    threshold: Some(Threshold {
        default: 50.0,
        unit: "% of the ports of a tuple, or of net.ipv4.tcp_max_tw_buckets, in TIME_WAIT",
    }),
    explanation: &[
        "The side that sends its FIN first has the socket in TIME_WAIT (RFC 9293, figure 5). On a client each such socket takes a source port towards the \
         destination for 60 s. On a server it takes memory and a place within net.ipv4.tcp_max_tw_buckets, but no port, since all accepted \
         connections have the port of the listener. So for ports it is better if the server closes first.",
        "The number in the verdict counts the sockets that entered TIME_WAIT in the last 10 s, from their remaining times. The process is one that \
         has open connections of the same kind, as TIME_WAIT sockets belong to no process.",
        "The rule has a finding only if TIME_WAIT takes half of the ports of a tuple that connect() may not take again, or half of the \
         TIME_WAIT sockets that the namespace may have.",
        "What helps on a client: connections that are used again; a server that closes idle connections first (its keepalive time shorter than the client's, at the price of a rare request on a closing connection). On a server: HTTP keep-alive, a longer keepalive time, \
         a higher net.ipv4.tcp_max_tw_buckets.",
        "What does not help: shutdown() before close(), which sends the same FIN first; SO_LINGER with time 0, which replaces TIME_WAIT by RST and can \
         destroy data that the peer has not read.",
    ],
    check: t06,
};

fn t06(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let mut drafts = Vec::new();
    for tuple in &connections.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let waiting = budget.time_wait - budget.reusable;
        let is_past = f64::from(waiting) >= f64::from(budget.total) * limit / 100.0;
        if budget.total > 0 && waiting > 0 && is_past {
            drafts.push(client(snapshot, tuple, &budget));
        }
    }
    if let Ok(allowed) = snapshot.number("net.ipv4.tcp_max_tw_buckets") {
        let waiting = |service: &Service| service.states.get("time-wait").copied().unwrap_or(0);
        let is_past = |service: &&Service| {
            waiting(service) > 0 && waiting(service) as f64 >= allowed as f64 * limit / 100.0
        };
        drafts.extend(
            connections.services.iter().filter(is_past).map(|found| server(found, waiting(found), allowed)),
        );
    }
    Ok(drafts)
}

fn client(snapshot: &Snapshot, subject: &Tuple, budget: &Budget) -> Draft {
    let closer = Callers::closers(snapshot, subject);
    let verdict = format!(
        "{closer} closes its connections to {} first{}: {} of the {} ports of {} are in TIME_WAIT",
        subject.destination,
        lately(budget.closes_per_s, Some(budget.closed_last_s)),
        percent(budget.time_wait.into(), budget.total.into()),
        count(budget.total.into()),
        subject
    );
    let mut draft = Draft::new(Severity::Notice, subject, verdict)
        .because_if(left_behind(snapshot, subject))
        .proper(keep_connections(subject));
    draft.proper.extend(printed(snapshot, subject));
    draft.proper(Remedy::advice(
        "let the server close first, with a shorter keepalive time than the client's",
        "TIME_WAIT then is on the server, where it takes no port",
    ))
}

fn server(service: &Service, waiting: u64, allowed: u64) -> Draft {
    let owner = service.workers.first();
    let closer = owner.map_or_else(|| "the server".to_owned(), process);
    let verdict = format!(
        "{closer} on port {} closes first{}: {} in TIME_WAIT, {} of the {} that net.ipv4.tcp_max_tw_buckets allows",
        service.port,
        lately(service.closes_per_s, None),
        counted(waiting, "socket"),
        percent(waiting, allowed),
        count(allowed)
    );
    let how = match owner.and_then(|owner| print_name(&owner.name)) {
        Some("nginx") => "`keepalive_timeout` and `keepalive_requests` higher; no `keepalive_timeout 0`",
        Some("haproxy") => {
            "`option http-keep-alive` and a longer `timeout http-keep-alive`; no `option httpclose`"
        }
        Some("envoy") => "a longer idle_timeout of the HTTP connection manager; no max_connection_duration",
        _ => "HTTP keep-alive with a longer time on the server",
    };
    Draft::new(Severity::Notice, format!("port {}", service.port), verdict)
        .proper(Remedy::advice(how, "fewer connections, and so fewer in TIME_WAIT"))
}

/// Returns the numbers of the last 10 s and of the last one in parentheses, or nothing if no connection was closed in that time.
fn lately(closes_per_s: f64, last: Option<u32>) -> String {
    match ((closes_per_s * RECENT_SECONDS).round() as u64, last) {
        (0, _) => String::new(),
        (closed, None) => format!(" ({} in the last 10 s)", count(closed)),
        (closed, Some(last)) => {
            format!(" ({} in the last 10 s, {} in the last second)", count(closed), count(last.into()))
        }
    }
}

pub(super) const T07: Rule = Rule {
    id: "T07",
    title: "a process does not close connections that the peer has closed",
    source: "sock_diag(7) (inet_diag, tcpi_last_data_recv and tcpi_last_ack_recv), descriptors in /proc/PID/fd; unix_diag \
             (UNIX_DIAG_SHUTDOWN, UNIX_DIAG_PEER), read twice",
    threshold: Some(Threshold { default: 50.0, unit: "sockets in CLOSE_WAIT for a minute or more" }),
    explanation: &[
        "CLOSE_WAIT means: the peer has sent FIN, and the program has not called close(). The kernel waits for the program without a limit; no timer \
         ends the state. Each socket keeps a descriptor, memory and, on a client, a source port.",
        "Many sockets that stay in CLOSE_WAIT are a fault of the program: it does not read to the end of the stream (read() returns 0), it lost the \
         descriptor on an error path, a thread is blocked, or a pool of connections keeps closed ones until it needs one. A few sockets of a \
         pool are normal. At the end the program has no descriptor left (EMFILE, rule F01) or no source port (P01).",
        "The age is the time since the last packet of the peer, which is its FIN or later. The rule counts sockets with an age of a minute or more by \
         process, and by name if each process has fewer. As many sockets with an age of 5 s or more are a notice: a program may be slow to close, \
         or have begun to leak.",
        "Unix sockets have no such state and no times: the rule counts sockets whose peer had closed at both readings (unix_release_sock). They are a \
         notice; with an interval of a minute (`doctor --for 60s`) they are a leak.",
        "What helps: the change in the program; as a pool, a check of idle connections (an idle timeout below the server's). A restart of the process \
         frees the sockets.",
        "What does not help: net.ipv4.tcp_fin_timeout and net.ipv4.tcp_keepalive_time. Keepalives end such a connection only if the peer answers \
         with RST, and the descriptor stays with the program also then.",
    ],
    check: t07,
};

fn t07(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let processes = snapshot.processes.seen().map(Vec::as_slice).unwrap_or_default();
    let tcp = together(&connections.close_wait, |leak| (&leak.owner, leak.settled.max(leak.old)), limit);
    let tcp = tcp.iter().map(|leaks| draft_t07(leaks, limit, processes)).collect();
    let unix = together(&connections.unix_close_wait, |leak| (&leak.owner, leak.settled), limit);
    let unix = unix.iter().filter_map(|leaks| of_unix(leaks, processes)).collect();
    // The same kernel interface has both.
    joined(Ok(tcp), snapshot.unix_listeners.seen().map(|_| unix))
}

/// Returns processes with at least as many sockets, each alone, and the processes of one name that have fewer each and as many together.
fn together<T>(leaks: &[T], of: fn(&T) -> (&Owner, u32), limit: f64) -> Vec<Vec<&T>> {
    let mut found = Vec::new();
    let mut few: BTreeMap<&str, Vec<&T>> = BTreeMap::new();
    for leak in leaks {
        match of(leak) {
            (_, sockets) if f64::from(sockets) >= limit => found.push(vec![leak]),
            (owner, _) => few.entry(&owner.name).or_default().push(leak),
        }
    }
    let sockets = |leaks: &Vec<&T>| f64::from(leaks.iter().map(|leak| of(leak).1).sum::<u32>());
    found.extend(few.into_values().filter(|leaks| sockets(leaks) >= limit));
    found
}

/// Returns `gunicorn[812]`, or `gunicorn (16 processes)`, and the sockets of all.
fn named<'a>(mut owners: impl ExactSizeIterator<Item = &'a Owner>) -> (String, u32) {
    let number = owners.len() as u32;
    let Some(first) = owners.next() else { return Default::default() };
    let name = match first.pid {
        // The census cannot see the process.
        0 => "a process of another user or namespace".to_owned(),
        _ => callers(first, number),
    };
    (name, owners.fold(first.sockets, |sockets, owner| sockets + owner.sockets))
}

/// Closed peers of unix sockets that are younger may be on their way to close().
const MIN_UNIX_NS: u64 = 1_000_000_000;

fn of_unix(leaks: &[&UnixCloseWait], processes: &[Process]) -> Option<Draft> {
    let leak = leaks.first()?;
    let seconds = leak.settled_ns as f64 / 1e9;
    let is_leak = seconds >= 60.0;
    if leak.settled_ns < MIN_UNIX_NS {
        return None;
    }
    let is_one = leaks.len() == 1;
    let (name, sockets) = named(leaks.iter().map(|leak| &leak.owner));
    let settled: u32 = leaks.iter().map(|leak| leak.settled).sum();
    let at = match leak.path.as_str() {
        "" => "without a path of their own".to_owned(),
        path => format!("most at {path}"),
    };
    let verdict = format!(
        "{name} has not closed {} whose peer closed {} ago or more, {at}",
        counted(settled.into(), "unix socket"),
        time(seconds)
    );
    let severity = if is_leak { Severity::Warning } else { Severity::Notice };
    let draft = Draft::new(severity, format!("{name} unix"), verdict)
        .because(format!("{} whose peer has closed in all", counted(sockets.into(), "unix socket")))
        .because_if(is_one.then(|| share(&leak.owner, processes)).flatten());
    if !is_leak {
        return Some(draft.now(Remedy::own(
            "doctor --for 60s",
            "shows whether the sockets stay for a minute, which the rule then calls a leak",
        )));
    }
    Some(
        draft
            .now(Remedy::advice("restart the process", "frees the sockets and their descriptors; it can wait while they take few"))
            .proper(Remedy::advice(
                "in the program: close() when read() returns 0, also on error paths and for idle connections of a pool",
                "no timer of the kernel closes a unix socket",
            )),
    )
}

/// Returns the share of the descriptors of a process that its sockets take.
fn share(owner: &Owner, processes: &[Process]) -> Option<String> {
    let process = processes.iter().find(|process| process.pid == owner.pid)?;
    Some(format!(
        "they take {} of the {} descriptors of the process (RLIMIT_NOFILE)",
        count(owner.sockets.into()),
        count(process.descriptor_limit?)
    ))
}

fn draft_t07(leaks: &[&CloseWait], limit: f64, processes: &[Process]) -> Draft {
    let (leak, is_one) = (leaks[0], leaks.len() == 1);
    let (name, all) = named(leaks.iter().map(|leak| &leak.owner));
    let old: u32 = leaks.iter().map(|leak| leak.old).sum();
    let settled: u32 = leaks.iter().map(|leak| leak.settled).sum();
    let oldest_ns = leaks.iter().map(|leak| leak.oldest_ns).max().unwrap_or(0);
    let is_leak = f64::from(old) >= limit;
    let (severity, sockets, ago) = match is_leak {
        true => (Severity::Warning, old, "a minute ago or more"),
        false => (Severity::Notice, settled, "5 s ago or more"),
    };
    let verdict = format!(
        "{name} has not closed {} that the peer closed {ago} (CLOSE_WAIT), the oldest silent for {}, most with {}",
        counted(sockets.into(), "connection"),
        time(oldest_ns as f64 / 1e9),
        // A client has one port of the server; a server has many ports of a client.
        if leak.remote.port() == 0 { leak.remote.ip().to_string() } else { leak.remote.to_string() }
    );
    let list = match leak.owner.pid {
        1.. if is_one => format!("ss -tnp state close-wait | grep pid={},", leak.owner.pid),
        _ => "ss -tnp state close-wait".to_owned(),
    };
    let draft = Draft::new(severity, name, verdict)
        .because(format!("{} in CLOSE_WAIT in all", counted(all.into(), "socket")))
        .because_if(is_one.then(|| share(&leak.owner, processes)).flatten());
    if !is_leak {
        return draft.now(Remedy::own(
            "doctor",
            "in a minute: shows whether the sockets stay, which the rule then calls a leak",
        ));
    }
    draft
        .now(Remedy::other(Scope::Namespace, list, "lists the connections, with the descriptors"))
        .now(Remedy::advice("restart the process", "frees the sockets, their descriptors and ports"))
        .proper(close_after_peer("the program"))
}
