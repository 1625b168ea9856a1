//! How connections are shared among workers, and lost at a reload.

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Owner, Snapshot};

use crate::doctor::accepting::{
    acceptors, continued, during, explains_listener, groups, holders, is_full, is_left_behind, stopped, time,
};
use crate::doctor::balance::{Skew, load, shares, skews};
use crate::doctor::command::{Scope, quoted};
use crate::doctor::draft::{Draft, Remedy, THEN, What};
use crate::doctor::repairable::stuck;
use crate::doctor::rule::{Checked, Rule, Threshold};
use crate::doctor::words::{count, counted, doing, process};

pub(super) const B01: Rule = Rule {
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
    check: b01,
};

fn b01(snapshot: &Snapshot, limit: f64) -> Checked {
    let skews = skews(snapshot, limit)?.into_iter();
    // B02 has the shares that follow the order of the workers.
    Ok(skews.filter(|skew| !skew.is_ladder).filter_map(|skew| draft_b01(snapshot, &skew)).collect())
}

fn draft_b01(snapshot: &Snapshot, skew: &Skew) -> Option<Draft> {
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
        let effect = "gives each new connection to the least busy worker; connections that exist stay";
        draft = with_selector(draft, group[0], effect);
    }
    Some(draft.proper(Remedy::advice(
        "close connections after a number of requests (nginx: keepalive_requests, keepalive_time)",
        "connections are distributed again",
    )))
}

/// Adds the selector that chooses the listener of each new connection, or what it needs.
fn with_selector(draft: Draft, listener: &Listener, effect: &'static str) -> Draft {
    if listener.mptcp {
        return draft.proper(Remedy::advice(
            format!(
                "{}: listen without MPTCP (in Go GODEBUG=multipathtcp=0 in the environment, then a restart)",
                holders(&listener.owners)
            ),
            "`fourtuple fix accept` can choose the listener of each connection; no selector can choose one of MPTCP",
        ));
    }
    draft.now(Remedy::own(format!("fix accept --listen {} --select least-busy", listener.address), effect))
}

pub(super) const B02: Rule = Rule {
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
        "What helps at once, for nginx: `fourtuple fix accept --select rotate`, which makes the worker that accepted the last to be woken, \
         also for unix sockets.",
        "What lasts: SO_REUSEPORT, a listener for each worker (nginx: reuseport in the directive listen; Gunicorn: --reuse-port); with it \
         `fourtuple fix accept` can choose the least busy worker. A program that is under your control can remove and add the listener \
         after each accept (EPOLL_CTL_DEL, EPOLL_CTL_ADD), which makes the order rotate; nginx does so after each 16th accept since \
         1.21.6. It is the only one for unix sockets, which have no SO_REUSEPORT, beside a path for each worker.",
        "What does not help: a greater backlog; more workers, which come last. Workers that block in accept() are woken in turn and have \
         no ladder.",
    ],
    check: b02,
};

fn b02(snapshot: &Snapshot, limit: f64) -> Checked {
    let skews = skews(snapshot, limit)?;
    Ok(skews.iter().filter(|skew| skew.is_ladder).map(|skew| draft_b02(snapshot, skew)).collect())
}

fn draft_b02(snapshot: &Snapshot, skew: &Skew) -> Draft {
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
    // Of the known servers only nginx waits with EPOLLEXCLUSIVE, which the command needs.
    if name == "nginx" {
        for listener in shared(snapshot, skew) {
            draft = draft.now(Remedy::own(
                format!("fix accept --listen {listener} --select rotate"),
                "the worker that accepted becomes the last to be woken, until the command ends (Ctrl-C); connections that exist stay",
            ));
        }
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

/// Returns the listeners of a ladder, as `--listen` names them.
fn shared(snapshot: &Snapshot, skew: &Skew) -> Vec<String> {
    let Some(port) = skew.port else { return vec![quoted(&format!("unix:{}", skew.place))] };
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default().iter();
    let own = listeners.filter(|listener| listener.address.port() == port && listener.owners.len() > 1);
    own.map(|listener| listener.address.to_string()).collect()
}

pub(super) const B03: Rule = Rule {
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
    check: b03,
};

fn b03(snapshot: &Snapshot, limit: f64) -> Checked {
    let stuck = stuck(snapshot, snapshot.listeners.seen()?, limit).into_iter();
    Ok(stuck.map(|(member, group)| draft_b03(snapshot, member, &group)).collect())
}

fn draft_b03(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> Draft {
    let stopped = stopped(snapshot, &member.owners);
    let is_failing = is_full(member.waiting, member.backlog) || stopped.is_some();
    let severity = if is_failing { Severity::Critical } else { Severity::Warning };
    let others = group.iter().filter(|other| other.cookie != member.cookie);
    let longest = others.map(|other| other.waiting).max().unwrap_or(0);
    let verdict = format!(
        "1 of {} listeners at {} is stuck: {} for {}, {} for each of the others",
        group.len(),
        member.address,
        doing(member.waiting.into(), "connection", "wait"),
        // Workers of nginx hold the listeners of all workers.
        stopped.map_or_else(|| acceptors(snapshot, member), process),
        if longest == 0 { "none".to_owned() } else { format!("at most {}", count(longest.into())) }
    );
    let mut draft = Draft::new(severity, member, verdict).because(format!(
        "its queue held {} at the first reading; the backlog is {}",
        count(member.waiting_before.into()),
        count(member.backlog.into())
    ));
    if let Some(owner) = stopped {
        draft = continued(draft, snapshot, owner, "it accepts again");
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
    let effect = "gives new connections to listeners with short queues until it ends (Ctrl-C); those that wait already stay";
    with_selector(explains_listener(draft, snapshot, member), member, effect)
        .proper(Remedy::advice(
            format!(
                "{}: restart it, which ends the connections that wait there; then no blocking work in the thread that accepts",
                acceptors(snapshot, member)
            ),
            "the queue is served",
        ))
}

pub(super) const B04: Rule = Rule {
    id: "B04",
    title: "a reload loses the connections of a queue",
    source: "sock_diag(7) (sk_ack_backlog, read twice), /proc/PID/stat (start time), net.ipv4.tcp_migrate_req, TcpExt.TCPMigrateReqFailure",
    threshold: None,
    explanation: &[
        "When a listener is closed, the kernel resets the connections that wait in its accept queue (inet_csk_listen_stop), and drops its \
         handshakes in progress. During a reload with SO_REUSEPORT the new processes have listeners at the same address already; the \
         clients of the old queue get ECONNRESET all the same.",
        "With net.ipv4.tcp_migrate_req=1 the kernel moves these connections and handshakes to another listener of the group \
         (reuseport_migrate_sock, Linux 5.14). The value is read when the listener is closed, so that it may be set during the reload. \
         TcpExt.TCPMigrateReqFailure counts connections that could not be moved.",
        "The rule has a finding if a listener with waiting connections, which did not become fewer, belongs to processes that started at \
         least 1 s before the processes of all other listeners of the address, and net.ipv4.tcp_migrate_req is 0; or if connections could not be \
         moved during the interval.",
        "What helps: net.ipv4.tcp_migrate_req=1; `fourtuple fix accept`, whose selector moves connections too; a server that accepts until \
         its queue is empty before it closes the listener, or that hands its listeners to the new process (HAProxy: expose-fd listeners; \
         systemd: socket activation). What does not help: a longer grace period for connections that are accepted already.",
    ],
    check: b04,
};

fn b04(snapshot: &Snapshot, _limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    let failed = during(snapshot, "TcpExt.TCPMigrateReqFailure");
    let mut drafts = Vec::new();
    if failed > 0 {
        let verdict = format!(
            "{} of closed listeners could not be moved to another listener in {}",
            counted(failed, "connection"),
            time(snapshot.interval_ns)
        );
        let draft = Draft::new(Severity::Warning, "migration", verdict)
            .explains(What::Counter("TcpExt.TCPMigrateReqFailure"));
        drafts.push(draft.proper(Remedy::advice(
            "let the server empty its accept queues before it closes its listeners, and raise the backlog of the new listeners",
            "the new queues have room",
        )));
    }
    // A kernel before Linux 5.14 has no such sysctl, and never moves a connection.
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").unwrap_or(0);
    if migrates == 0 {
        for group in groups(listeners) {
            let old = group.iter().filter(|member| is_left_behind(snapshot, member, &group));
            drafts.extend(old.map(|member| draft_b04(snapshot, member, &group)));
        }
    }
    Ok(drafts)
}

fn draft_b04(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> Draft {
    let successor = group.iter().find(|other| other.cookie != member.cookie);
    let reload = Remedy::sysctl(
        "net.ipv4.tcp_migrate_req",
        "1",
        "a listener that closes passes its queue on to the others, from now on",
    );
    let verdict = format!(
        "{} at {} {} for {}, which is older than {} and does not accept: they are reset when it closes its listener",
        counted(member.waiting.into(), "connection"),
        member.address,
        if member.waiting == 1 { "waits" } else { "wait" },
        acceptors(snapshot, member),
        successor.map_or_else(String::new, |other| acceptors(snapshot, other))
    );
    let is_stopped = stopped(snapshot, &member.owners);
    Draft::new(Severity::Warning, member, verdict)
        .explains(What::Queue(member.cookie))
        .because_if(is_stopped.map(|owner| format!("{} is stopped by a signal (state T)", process(owner))))
        .because(format!("its queue held {} at the first reading", count(member.waiting_before.into())))
        .now(reload)
        .now(end_old(snapshot, member, group).provided(Some(THEN.to_owned())))
        .proper(Remedy::advice(
            "a server that hands its listeners to the new process (HAProxy: expose-fd listeners; systemd: socket activation)",
            "reloads lose no connection, also without the sysctl",
        ))
}

/// The effect of the end of an old generation.
const MOVED: &str = "ends the old generation, which closes its listener; nothing undoes it";

/// Returns how to end the processes that hold a listener and no other of its group, after which the kernel closes it.
fn end_old(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> Remedy {
    let others =
        || group.iter().filter(|other| other.cookie != member.cookie).flat_map(|other| &other.owners);
    let old: Vec<&Owner> =
        member.owners.iter().filter(|owner| others().all(|other| other.pid != owner.pid)).collect();
    let Some(first) = old.first() else {
        return Remedy::advice("let the server close the listener of its old generation", MOVED);
    };
    let pids = old.iter().map(|owner| owner.pid.to_string()).collect::<Vec<_>>().join(" ");
    // The signals by which these servers serve open connections to the end.
    let signal = match first.name.as_str() {
        name if name.starts_with("nginx") || name.starts_with("php-fpm") => "QUIT",
        name if name.starts_with("haproxy") => "USR1",
        _ => "TERM",
    };
    let again = if stopped(snapshot, &member.owners).is_some() {
        format!(" && kill -CONT {pids}")
    } else {
        String::new()
    };
    Remedy::privileged(Scope::Process, format!("kill -{signal} {pids}{again}"), MOVED)
}
