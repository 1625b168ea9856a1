use fourtuple_record::snapshot::Snapshot;

use crate::balance::{Skew, load, shares, skews};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted};

pub(super) const RULE: Rule = Rule {
    id: "B02",
    title: "workers of a shared listener are woken in a fixed order",
    source: "sock_diag(7) and unix_diag, /proc/PID/fd, /proc/PID/stat",
    threshold: Some(Threshold { default: 0.7, unit: "(Jain's index of the connections per worker)" }),
    explanation: &[
        "Workers that share one listener and wait for it with EPOLLEXCLUSIVE are woken in the order in which they registered \
         (__wake_up_common walks the wait queue from its head, ep_poll_callback wakes the first that waits). A worker that waits again is \
         at the same place. With light load one worker accepts everything; with more load the shares fall from worker to worker like a \
         ladder.",
        "The rule has a finding if several processes hold the same listener, their connections rise or fall in the order of their start, \
         and Jain's index is below the threshold; with the same conditions as B01: a busy first worker, or a notice for three \
         workers or more.",
        "What helps: SO_REUSEPORT, a listener for each worker (nginx: reuseport in the directive listen; Gunicorn: --reuse-port); with it \
         `fourtuple fix accept` can choose the least busy worker. A program that is under your control can remove and add the listener \
         after each accept (EPOLL_CTL_DEL, EPOLL_CTL_ADD), which makes the order rotate; nginx does so after each 16th accept since \
         1.21.6. It is the only one for unix sockets, which have no SO_REUSEPORT, beside a path for each worker.",
        "What does not help: a greater backlog; more workers, which come last. Workers that block in accept() are woken in turn and have \
         no ladder.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    Ok(skews(snapshot, limit)?.iter().filter(|skew| skew.is_ladder).map(draft).collect())
}

fn draft(skew: &Skew) -> Draft {
    let name = skew.workers.first().map_or("", |worker| worker.name.as_str());
    let place = &skew.place;
    let verdict = format!(
        "the {} of {name} share the listener at {place}; their connections in the order of their start: {}, {} in all \
         (Jain's index {:.2})",
        counted(skew.workers.len() as u64, "worker"),
        shares(&skew.workers),
        count(skew.total),
        skew.jain
    );
    let mut draft = Draft::new(skew.severity, place.clone(), verdict);
    if let Some(load) = load(&skew.workers) {
        draft = draft.because(load);
    }
    let Some(port) = skew.port else {
        return draft.proper(Remedy::advice(
            "EPOLL_CTL_DEL and EPOLL_CTL_ADD of the listener after each accept, or a path for each worker and a proxy that knows them all",
            "the order rotates, or each worker has its own queue; unix sockets have no SO_REUSEPORT",
        ));
    };
    let setting = match name {
        "nginx" => "nginx: `reuseport` in the directive `listen`, then a restart",
        "gunicorn" => "Gunicorn: `--reuse-port` and a process for each listener",
        "haproxy" => "HAProxy: `shards by-thread` in the line `bind`",
        _ => "setsockopt(SO_REUSEPORT) before bind(), and a listener for each worker",
    };
    draft
        .now(Remedy::own(
            format!("trace accept --port {port} --for 10s"),
            "shows the order of the workers by their accepts",
        ))
        .proper(Remedy::advice(
            setting,
            "each worker has its own queue; `fourtuple fix accept` then chooses the least busy one",
        ))
}
