use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot, UnixListener};

use crate::accepting::{
    acceptors, drops, during, empty_faster, empty_unix, explains_listener, explains_unix, is_full, refused,
    subject, time, unix_acceptors, up_to,
};
use crate::draft::Draft;
use crate::rule::{Checked, Rule, Threshold, joined};
use crate::words::{count, counted, doing, process, segments};

pub(super) const RULE: Rule = Rule {
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
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp(snapshot, limit), of_unix(snapshot, limit))
}

/// Looks for unix listeners that a trace saw refuse connections. Without a trace none is known.
fn of_unix(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default();
    Ok(listeners.iter().filter_map(|listener| unix_draft(snapshot, listener, limit)).collect())
}

fn unix_draft(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Draft> {
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
    let draft = Draft::new(Severity::Warning, listener.path.clone(), verdict).because(fact);
    Some(empty_unix(explains_unix(draft, listener), snapshot, listener))
}

fn of_tcp(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    if !listeners.is_empty() && listeners.iter().all(|listener| listener.drops.is_none()) {
        return Err(
            "sock_diag(7) of this kernel does not tell the drops of a listener (INET_DIAG_SKMEMINFO)"
                .to_owned(),
        );
    }
    snapshot.counter("TcpExt.ListenDrops")?;
    // A03 and A05 have the drops that an accept queue with room did not cause.
    let overflows = snapshot.counter("TcpExt.ListenOverflows")?.during;
    let found = listeners.iter().map(|listener| (listener, drops(snapshot, listener).min(overflows)));
    let dropping = found.filter(|(_, drops)| *drops > 0 && *drops as f64 >= limit);
    Ok(dropping.map(|(listener, drops)| draft(snapshot, listener, drops)).collect())
}

fn draft(snapshot: &Snapshot, listener: &Listener, drops: u64) -> Draft {
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
    let draft = Draft::new(Severity::Warning, subject(listener), verdict)
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
