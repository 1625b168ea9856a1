use fourtuple_record::snapshot::Snapshot;

use crate::accepting::groups;
use crate::balance::{Skew, load, shares, skews};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, doing};

pub(super) const RULE: Rule = Rule {
    id: "B01",
    title: "the connections of a service are on few of its workers",
    source: "sock_diag(7) and unix_diag, /proc/PID/fd, /proc/PID/stat",
    threshold: Some(Threshold { default: 0.7, unit: "(Jain's index of the connections per worker)" }),
    explanation: &[
        "A connection stays with the worker that accepted it. If one worker has most of the connections, its requests wait for one \
         processor while other processors are idle. Jain's index is (sum x)² / (n · sum x²): 1 for equal shares, 1 / n if one worker has \
         all.",
        "The rule has a finding if the index is below the threshold with at least 10 connections for each worker, and the worker with the \
         most connections used 70% of a processor or more during the interval; for three workers or more also as a notice if the index is \
         far below the threshold.",
        "Causes: workers that register with EPOLLEXCLUSIVE in a fixed order (B02); long connections that were all made while one worker \
         was free, for example after a restart; a SO_REUSEPORT group that clients reach from few addresses and ports, because the hash of \
         the 4-tuple chooses (reuseport_select_sock).",
        "What helps: closing connections after a number of requests or a time (nginx keepalive_requests and keepalive_time), so that they \
         are distributed again; a SO_REUSEPORT group with `fourtuple fix accept`, which gives each new connection to the least busy worker. \
         What does not help: more workers, or a greater backlog.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let skews = skews(snapshot, limit)?.into_iter();
    // B02 has the shares that follow the order of the workers.
    Ok(skews.filter(|skew| !skew.is_ladder).filter_map(|skew| draft(snapshot, &skew)).collect())
}

fn draft(snapshot: &Snapshot, skew: &Skew) -> Option<Draft> {
    let first = skew.workers.iter().max_by_key(|worker| worker.connections)?;
    let place = &skew.place;
    let verdict = format!(
        "{}[{}] has {} of {} connections at {place}; the {} {} (Jain's index {:.2})",
        first.name,
        first.pid,
        count(first.connections),
        count(skew.total),
        doing(skew.workers.len() as u64, "worker", "have"),
        shares(&skew.workers),
        skew.jain
    );
    let mut draft = Draft::new(skew.severity, place.clone(), verdict);
    if let Some(load) = load(&skew.workers) {
        draft = draft.because(load);
    }
    if let Some(port) = skew.port {
        draft = draft.now(Remedy::own(
            format!("trace accept --port {port} --for 10s"),
            "shows which worker accepts new connections, and how long they wait",
        ));
    }
    let listeners = snapshot.listeners.seen().ok()?.iter();
    let listeners = listeners.filter(|listener| Some(listener.address.port()) == skew.port);
    // `fix accept` needs a SO_REUSEPORT group.
    for group in groups(listeners) {
        draft = draft.now(Remedy::own(
            format!("fix accept --listen {} --select least-busy", group[0].address),
            "gives each new connection to the least busy worker; connections that exist stay",
        ));
    }
    Some(draft.proper(Remedy::advice(
        "close connections after a number of requests (nginx: keepalive_requests, keepalive_time)",
        "connections are distributed again",
    )))
}
