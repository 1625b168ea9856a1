use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot, UnixListener};

use crate::accepting::{
    acceptors, drops, empty_faster, empty_unix, explains_listener, explains_unix, holders, is_full, refused,
    subject, time, unix_acceptors, up_to,
};
use crate::draft::Draft;
use crate::rule::{Checked, Rule, Threshold, joined};
use crate::words::{count, counted, doing, percent, segments};

pub(super) const RULE: Rule = Rule {
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
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp(snapshot, limit), of_unix(snapshot, limit))
}

/// Looks for full queues of unix sockets, whose drops the kernel does not count.
fn of_unix(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.unix_listeners.seen()?.iter();
    Ok(listeners.filter_map(|listener| unix_draft(snapshot, listener, limit)).collect())
}

fn unix_draft(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Draft> {
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
    let draft = Draft::new(severity, path.clone(), verdict)
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

fn of_tcp(snapshot: &Snapshot, limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    Ok(listeners.iter().filter_map(|listener| draft(snapshot, listener, limit)).collect())
}

fn draft(snapshot: &Snapshot, listener: &Listener, limit: f64) -> Option<Draft> {
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
    let mut draft = Draft::new(severity, subject(listener), verdict).because(format!(
        "first reading: {} in the queue ({} of the backlog), second reading: {}",
        counted(waiting_before.into(), "connection"),
        percent(waiting_before.into(), backlog.into()),
        count(waiting.into())
    ));
    let growth = f64::from(waiting.saturating_sub(waiting_before)) * 1e9 / snapshot.interval_ns.max(1) as f64;
    if growth > 0.0 && !is_full(waiting, backlog) {
        let left = f64::from(backlog + 1 - waiting) / growth;
        draft = draft.because(format!("the queue grows by {growth:.0}/s and is full in {left:.0} s"));
    }
    Some(empty_faster(explains_listener(draft, snapshot, listener), snapshot, listener))
}
