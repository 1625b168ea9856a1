use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot};

use crate::accepting::{acceptors, during, flooded, handshakes_allowed, other_drops, time};
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, doing};

pub(super) const RULE: Rule = Rule {
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
    check,
};

/// Fewer handshakes in progress than this are not a full queue, even with a smaller backlog.
const FEW: u32 = 16;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
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
    draft
        .explains_up_to(What::Counter("TcpExt.ListenDrops"), during(snapshot, "TcpExt.TCPReqQFullDrop"))
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
            "the handshakes have room",
        ))
        .proper(Remedy::advice(
            "if the SYNs come from addresses that never answer (ss -tn state syn-recv), a filter for them in front of the host",
            "a flood does not reach the queue",
        ))
}
