use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot};

use crate::accepting::{
    acceptors, explains_listener, groups, is_full, is_left_behind, lags, stopped, subject,
};
use crate::command::Scope;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, doing, process};

pub(super) const RULE: Rule = Rule {
    id: "B03",
    title: "a listener of a SO_REUSEPORT group is stuck",
    source: "sock_diag(7) (sk_ack_backlog of each listener, read twice), /proc/PID/stat",
    threshold: Some(Threshold { default: 8.0, unit: "connections in the queue" }),
    explanation: &[
        "With SO_REUSEPORT the kernel chooses the listener at the SYN by a hash of the 4-tuple (reuseport_select_sock), without regard to \
         the queue of the listener or the state of its worker. A worker that is blocked, stopped or without an event loop keeps its \
         share: with N listeners 1 of N connections waits for accept(), and fails when the queue is full.",
        "The rule has a finding if the queue of one listener did not shrink between the readings and is 8 times as long as the longest \
         other queue of the group, and it holds as many connections as the threshold or its process is stopped. A listener whose \
         processes belong to an old generation of the server is B04.",
        "What helps at once: the worker accepts again (SIGCONT if it is stopped), or ends: its queue is then reset unless \
         net.ipv4.tcp_migrate_req is 1. `fourtuple fix accept` gives new connections to listeners with short queues. What lasts: no \
         blocking work in the event loop of a worker.",
        "What does not help: a greater backlog, because the queue is not served; more listeners, which only lower the share of clients \
         that are affected.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").is_ok_and(|value| value != 0);
    let mut drafts = Vec::new();
    for group in groups(snapshot.listeners.seen()?) {
        for member in &group {
            let is_stuck = f64::from(member.waiting) >= limit || stopped(snapshot, &member.owners).is_some();
            // B04 has the listeners of an old generation.
            let is_old = !migrates && is_left_behind(snapshot, member, &group);
            if is_stuck && lags(member, &group) && !is_old {
                drafts.push(draft(snapshot, member, &group));
            }
        }
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> Draft {
    let stopped = stopped(snapshot, &member.owners);
    let is_failing = is_full(member.waiting, member.backlog) || stopped.is_some();
    let severity = if is_failing { Severity::Critical } else { Severity::Warning };
    let others = group.iter().filter(|other| other.cookie != member.cookie);
    let longest = others.map(|other| other.waiting).max().unwrap_or(0);
    let verdict = format!(
        "1 of {} listeners at {} is stuck: {} for {}, at most {} for each of the others",
        group.len(),
        member.address,
        doing(member.waiting.into(), "connection", "wait"),
        // Workers of nginx hold the listeners of all workers.
        stopped.map_or_else(|| acceptors(snapshot, member), process),
        count(longest.into())
    );
    let mut draft = Draft::new(severity, subject(member), verdict).because(format!(
        "its queue held {} at the first reading; the backlog is {}",
        count(member.waiting_before.into()),
        count(member.backlog.into())
    ));
    if let Some(owner) = stopped {
        draft = draft.because(format!("{} is stopped by a signal (state T)", process(owner))).now(
            Remedy::privileged(
                Scope::Process,
                format!("kill -CONT {}", owner.pid),
                "the process accepts again",
            ),
        );
    } else if let [owner] = &member.owners[..] {
        draft = draft.now(Remedy::privileged(
            Scope::Process,
            format!("cat /proc/{}/stack", owner.pid),
            "shows where the process waits in the kernel instead of accepting",
        ));
    } else {
        draft = draft.now(Remedy::own(
            format!("trace accept --port {} --for 10s", member.address.port()),
            "shows which of the workers accepts nothing",
        ));
    }
    explains_listener(draft, snapshot, member)
        .now(Remedy::own(
            format!("fix accept --listen {} --select least-busy", member.address),
            "gives new connections to listeners with short queues",
        ))
        .proper(Remedy::advice(
            format!("{}: no blocking work in the thread that accepts", acceptors(snapshot, member)),
            "the queue is served",
        ))
}
