use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot};

use crate::accepting::{acceptors, drops, during, empty_faster, explains_listener, subject, time, up_to};
use crate::draft::Draft;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, doing};

pub(super) const RULE: Rule = Rule {
    id: "A02",
    title: "a listener drops connections",
    source: "sock_diag(7) (sk_drops of the listener in INET_DIAG_SKMEMINFO), TcpExt.ListenDrops and ListenOverflows of /proc/net/netstat, read twice",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "The kernel counts each SYN and each last ACK of a handshake that it drops in TcpExt.ListenDrops, for all listeners of the network \
         namespace, and in sk_drops of the listener (tcp_listendrop).",
        "sk_drops names the listener, but also counts packets that are no loss: SYNs that are sent again, RSTs of half-open checks and scans, \
         the last ACKs that TCP_DEFER_ACCEPT ignores, and a dropped last ACK a second time (tcp_check_req, discard_and_relse of \
         tcp_v4_rcv). The rule therefore has a finding only if ListenOverflows grew too, and no listener has more drops than that.",
        "A dropped SYN costs the client 1 s (TCP_TIMEOUT_INIT), and each further one 1 s or more. A dropped last ACK costs at least the \
         time until the kernel sends its SYN-ACK again, 1 s.",
        "The rule has the drops that met a full accept queue (A01): the process calls accept() too slowly, or the backlog is too small for \
         bursts. A03 and A05 have the other causes: the SYN queue, memory, routes.",
        "What does not help: longer timeouts of the client. The count does not contain packets that a firewall or the network drops \
         before TCP sees them.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
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
        "{} of {} dropped {}{} SYNs and ACKs in {interval}; {}, the backlog is {}",
        listener.address,
        acceptors(snapshot, listener),
        up_to(snapshot),
        count(drops),
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
