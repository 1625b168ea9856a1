use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot};

use crate::accepting::{holders, subject, time};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::count;

pub(super) const RULE: Rule = Rule {
    id: "A07",
    title: "connections wait long for accept()",
    source: "the tracer of `fourtuple trace accept`; without it sock_diag(7) (sk_ack_backlog, read twice) and Tcp.PassiveOpens of \
         /proc/net/snmp",
    threshold: Some(Threshold { default: 100.0, unit: "ms" }),
    explanation: &[
        "The accept wait is the time from the end of the handshake to the return of accept(). The client counts it as the time of its \
         first answer; connect() does not contain it. No counter of the kernel has the accept wait; the tracer measures it for each \
         connection (sk_data_ready of the listener to the exit of accept).",
        "Without the tracer the rule has a lower bound: the queue is served in order, so that with fewer new connections of the namespace \
         (Tcp.PassiveOpens) than connections in the queue, some of the queue were there at the first reading and have waited for the \
         whole interval. Shorter waits are not visible without the tracer, and the rule says then that it could not be checked.",
        "What helps: workers that are not blocked when a connection arrives. A SO_REUSEPORT group gives connections to blocked workers as \
         readily as to idle ones: fourtuple fix accept chooses the least busy. On a shared listener the next free worker accepts.",
        "What does not help: a greater backlog, with which more connections wait for longer.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let limit_ns = limit * 1e6;
    let untraced = match snapshot.accepts.seen() {
        Ok(traced) => {
            let wait = traced.wait_p99_ns.filter(|wait| *wait as f64 >= limit_ns);
            return Ok(wait.map(|wait| measured(snapshot, wait, traced.accepts)).into_iter().collect());
        }
        Err(reason) => reason,
    };
    let opens = snapshot.counter("Tcp.PassiveOpens")?.during;
    // The queue is served in order: with fewer arrivals than connections in the queue, the others were there at the first reading.
    let old =
        |listener: &Listener| u64::from(listener.waiting.min(listener.waiting_before)).saturating_sub(opens);
    let is_long = snapshot.interval_ns as f64 >= limit_ns;
    let listeners = snapshot.listeners.seen()?.iter().filter(|listener| is_long && old(listener) > 0);
    let long: Vec<Draft> = listeners.map(|listener| estimated(snapshot, listener, old(listener))).collect();
    if long.is_empty() {
        return Err(format!(
            "{untraced}; `fourtuple trace accept --for 10s`, as root, shows how long connections wait"
        ));
    }
    Ok(long)
}

fn measured(snapshot: &Snapshot, wait: u64, accepts: u64) -> Draft {
    let verdict =
        format!("1% of {} connections waited {} or longer for accept()", count(accepts), time(wait));
    let longest =
        snapshot.listeners.seen().ok().and_then(|all| all.iter().max_by_key(|listener| listener.waiting));
    let draft = match longest.filter(|listener| listener.waiting > 0) {
        Some(listener) => {
            advise(Draft::new(Severity::Warning, "accept wait", verdict), listener).because(format!(
                "{} ({}) has the longest accept queue: {} connections",
                listener.address,
                holders(&listener.owners),
                count(listener.waiting.into())
            ))
        }
        None => Draft::new(Severity::Warning, "accept wait", verdict)
            .now(Remedy::unproven("fourtuple trace accept --for 10s", "shows the listener and the workers")),
    };
    draft.proper(unblocked())
}

fn estimated(snapshot: &Snapshot, listener: &Listener, old: u64) -> Draft {
    let verdict = format!(
        "{} connections at {} have waited at least {} for accept() of {}",
        count(old),
        listener.address,
        time(snapshot.interval_ns),
        holders(&listener.owners)
    );
    let draft = Draft::new(Severity::Warning, subject(listener), verdict).because(format!(
        "{} connections were in the queue at the first reading, {} at the second; the namespace accepted fewer new ones between",
        count(listener.waiting_before.into()),
        count(listener.waiting.into())
    ));
    advise(draft, listener).proper(unblocked())
}

fn advise(draft: Draft, listener: &Listener) -> Draft {
    draft.now(Remedy::unproven(
        format!("fourtuple trace accept --port {} --for 10s", listener.address.port()),
        "shows the wait of each connection, and which worker accepts",
    ))
}

fn unblocked() -> Remedy {
    Remedy::advice(
        "more workers, or no blocking work in the thread that calls accept(); for a SO_REUSEPORT group `fourtuple fix accept`",
        "a worker is free when a connection arrives",
    )
}
