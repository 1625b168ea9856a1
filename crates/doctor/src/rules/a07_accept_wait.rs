use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot, UnixListener};

use crate::accepting::{acceptors, empty_unix, holders, kept_waiting, subject, time, unix_acceptors};
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule, Threshold, joined};
use crate::words::{count, counted};

pub(super) const RULE: Rule = Rule {
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
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
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
    let mut draft = Draft::new(Severity::Warning, path.clone(), verdict).because(format!(
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
    let draft = match longest.filter(|listener| listener.waiting > 0) {
        Some(listener) => {
            advise(Draft::new(Severity::Warning, "accept wait", verdict), listener).because(format!(
                "{} ({}) has the longest accept queue: {}",
                listener.address,
                acceptors(snapshot, listener),
                counted(listener.waiting.into(), "connection")
            ))
        }
        None => Draft::new(Severity::Warning, "accept wait", verdict)
            .now(Remedy::own("trace accept --for 10s", "shows the listener and the workers")),
    };
    draft.proper(unblocked())
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
    let mut draft = Draft::new(Severity::Warning, subject(listener), verdict).because(format!(
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
    advise(draft, listener).proper(unblocked()).explains(What::Queue(listener.cookie))
}

fn advise(draft: Draft, listener: &Listener) -> Draft {
    draft.now(Remedy::own(
        format!("trace accept --port {} --for 10s", listener.address.port()),
        "shows the wait of each connection, and which worker accepts",
    ))
}

fn unblocked() -> Remedy {
    Remedy::advice(
        "more workers, or no blocking work in the thread that calls accept(); for a SO_REUSEPORT group `fourtuple fix accept`",
        "a worker is free when a connection arrives",
    )
}
