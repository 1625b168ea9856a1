//! How connections are shared among workers, and lost at a reload.

use std::net::SocketAddr;

use fourtuple_record::Severity;
use fourtuple_record::measure::balance::jain;
use fourtuple_record::snapshot::{Listener, Owner, Service, Snapshot, UnixListener};

use crate::doctor::accepting::{
    acceptors, continued, during, explains_listener, groups, holders, is_full, is_left_behind, lags,
    process_of, stopped, time,
};
use crate::doctor::command::{Scope, quoted};
use crate::doctor::draft::{Draft, Remedy, THEN, What};
use crate::doctor::rules::{Checked, Rule, Threshold, joined, of_visible};
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

/// Returns a sentence about a `fix accept` that works on new connections already.
fn running_fix(pid: Option<u32>) -> Option<String> {
    let pid = pid?;
    Some(format!(
        "`fourtuple fix accept` (process {pid}) gives new connections to workers; connections of before stay where they are"
    ))
}

/// Adds the selector that chooses the listener of each new connection, or what it needs.
fn with_selector(draft: Draft, listener: &Listener, effect: &'static str) -> Draft {
    if let Some(running) = running_fix(listener.fix) {
        return draft.because(running);
    }
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
        for (listener, fix) in shared(snapshot, skew) {
            draft = match running_fix(fix) {
                Some(running) => draft.because(running),
                None => draft.now(Remedy::own(
                    format!("fix accept --listen {listener} --select rotate"),
                    "the worker that accepted becomes the last to be woken, until the command ends (Ctrl-C); connections that exist stay",
                )),
            };
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

/// Returns the listeners of a ladder, as `--listen` names them, each with the process of its `fix accept`.
fn shared(snapshot: &Snapshot, skew: &Skew) -> Vec<(String, Option<u32>)> {
    let Some(port) = skew.port else {
        let mut unix = snapshot.unix_listeners.seen().into_iter().flatten();
        let fix = unix.find(|listener| listener.path == skew.place).and_then(|listener| listener.fix);
        return vec![(quoted(&format!("unix:{}", skew.place)), fix)];
    };
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default().iter();
    let own = listeners.filter(|listener| listener.address.port() == port && listener.owners.len() > 1);
    own.map(|listener| (listener.address.to_string(), listener.fix)).collect()
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
    let (mut drafts, mut is_hidden) = (Vec::new(), false);
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
            "the new queues have space",
        )));
    }
    // A kernel before Linux 5.14 has no such sysctl, and never moves a connection.
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").unwrap_or(0);
    if migrates == 0 {
        for group in groups(listeners) {
            let old = group.iter().filter(|member| is_left_behind(snapshot, member, &group));
            drafts.extend(old.map(|member| draft_b04(snapshot, member, &group)));
            let is_unknown = |member: &&Listener| member.owners.is_empty() && lags(member, &group);
            is_hidden |= group.iter().any(is_unknown);
        }
    }
    of_visible(drafts, is_hidden)
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

/// Connections for each worker, on average, below which shares say nothing.
const PER_WORKER: u64 = 10;
/// Connections of all workers below which shares say nothing.
const TOTAL: u64 = 40;
/// Workers that a snapshot lists for each service.
const LISTED: usize = 100;
/// Share of one processor from which on a worker is busy.
const BUSY: f64 = 0.7;

/// A worker and its connections.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) connections: u64,
    /// Share of one processor during the interval.
    pub(crate) cpu: Option<f64>,
}

/// Workers of a listener, or of the listeners of a port, with unequal numbers of connections.
pub(crate) struct Skew {
    /// Where they accept: `port 4020`, or the path of a unix listener.
    pub(crate) place: String,
    /// `None`: a unix listener.
    pub(crate) port: Option<u16>,
    /// In the order of their start.
    pub(crate) workers: Vec<Worker>,
    pub(crate) total: u64,
    pub(crate) jain: f64,
    /// `Warning` if the worker with the most connections is busy, `Notice` otherwise.
    pub(crate) severity: Severity,
    /// Whether all workers hold the same listener, and their shares rise or fall in the order of their start.
    pub(crate) is_ladder: bool,
}

/// Returns the services whose workers have unequal shares: Jain's index is below `limit` and the busiest worker is busy, or the index is
/// far below.
///
/// # Errors
///
/// There is none, and connections, listeners or processes are not visible.
fn skews(snapshot: &Snapshot, limit: f64) -> Result<Vec<Skew>, String> {
    joined(tcp_skews(snapshot, limit), unix_skews(snapshot, limit))
}

fn tcp_skews(snapshot: &Snapshot, limit: f64) -> Result<Vec<Skew>, String> {
    let listeners = snapshot.listeners.seen()?;
    let services = &snapshot.connections.seen()?.services;
    let skews = services.iter().filter_map(|service| of_port(snapshot, listeners, service, limit));
    let is_hidden = |service: &Service| {
        let mut own = listeners.iter().filter(|listener| listener.address.port() == service.port);
        service.states.values().sum::<u64>() >= TOTAL && own.any(|listener| listener.owners.is_empty())
    };
    of_visible(skews.collect(), services.iter().any(is_hidden))
}

fn unix_skews(snapshot: &Snapshot, limit: f64) -> Result<Vec<Skew>, String> {
    let listeners = snapshot.unix_listeners.seen()?;
    let skews = listeners.iter().filter_map(|listener| of_unix(snapshot, listener, limit));
    of_visible(skews.collect(), listeners.iter().any(|listener| listener.owners.is_empty()))
}

fn of_port(snapshot: &Snapshot, listeners: &[Listener], service: &Service, limit: f64) -> Option<Skew> {
    let own: Vec<&Listener> =
        listeners.iter().filter(|listener| listener.address.port() == service.port).collect();
    let owners: Vec<&[Owner]> = own.iter().map(|listener| listener.owners.as_slice()).collect();
    // Listeners of two families, as of `listen 80; listen [::]:80`, are not a group: each is shared.
    let is_shared = groups(own.iter().copied()).is_empty() && owners.iter().all(|owners| owners.len() > 1);
    let skew = skew(snapshot, &owners, &service.workers, limit)?;
    Some(Skew {
        place: format!("port {}", service.port),
        port: Some(service.port),
        is_ladder: is_shared && skew.is_ladder,
        ..skew
    })
}

/// Unix sockets have no SO_REUSEPORT: the workers of a listener share it.
fn of_unix(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Skew> {
    let skew = skew(snapshot, &[&listener.owners], &listener.workers, limit)?;
    Some(Skew { place: listener.path.clone(), ..skew })
}

/// Compares the shares of the processes that hold the listeners. `accepted`: the processes that hold accepted connections.
fn skew(snapshot: &Snapshot, owners: &[&[Owner]], accepted: &[Owner], limit: f64) -> Option<Skew> {
    let workers = workers(snapshot, owners, accepted);
    let total: u64 = workers.iter().map(|worker| worker.connections).sum();
    let number = workers.len() as u64;
    // The snapshot lists a bounded number of workers; the others would have no connections here.
    let is_cut = accepted.len() >= LISTED && workers.len() > accepted.len();
    if is_cut || number < 2 || total < TOTAL.max(number * PER_WORKER) {
        return None;
    }
    let counts: Vec<u64> = workers.iter().map(|worker| worker.connections).collect();
    let jain = jain(&counts).filter(|jain| *jain < limit)?;
    let first = workers.iter().max_by_key(|worker| worker.connections)?;
    let severity = if first.cpu.is_some_and(|cpu| cpu >= BUSY) {
        Severity::Warning
    } else if number > 2 && jain < limit * 0.7 {
        Severity::Notice
    } else {
        return None;
    };
    let slack = total / 20;
    let falls = counts.windows(2).all(|pair| pair[0] + slack >= pair[1]);
    let rises = counts.windows(2).all(|pair| pair[0] <= pair[1] + slack);
    Some(Skew { place: String::new(), port: None, workers, total, jain, severity, is_ladder: falls || rises })
}

/// Returns the processes that hold listeners, without a parent that accepts nothing.
fn workers(snapshot: &Snapshot, owners: &[&[Owner]], accepted: &[Owner]) -> Vec<Worker> {
    let mut workers: Vec<Worker> = Vec::new();
    for owner in owners.iter().copied().flatten() {
        if workers.iter().any(|worker| worker.pid == owner.pid) {
            continue;
        }
        let held = accepted.iter().find(|worker| worker.pid == owner.pid);
        let cpu = process_of(snapshot, owner.pid).and_then(|process| process.cpu_ns);
        workers.push(Worker {
            pid: owner.pid,
            name: owner.name.clone(),
            connections: held.map_or(0, |held| held.sockets.into()),
            cpu: cpu.map(|cpu| cpu as f64 / snapshot.interval_ns.max(1) as f64),
        });
    }
    let parents: Vec<u32> = workers
        .iter()
        .filter_map(|worker| process_of(snapshot, worker.pid))
        .map(|process| process.parent)
        .collect();
    workers.retain(|worker| worker.connections > 0 || !parents.contains(&worker.pid));
    // A child that executed another program may still hold the listener, but does not accept.
    let busiest = workers.iter().max_by_key(|worker| worker.connections).map(|worker| worker.name.clone());
    workers.retain(|worker| Some(&worker.name) == busiest.as_ref());
    by_start(snapshot, &mut workers);
    workers
}

/// Half of the process IDs that a kernel has at least (PID_MAX_DEFAULT).
const HALF_OF_PIDS: u32 = 16_384;

/// Sorts workers by their start. The clock of /proc/PID/stat has steps of 10 ms; within a step their process IDs decide, which begin again at
/// a low number.
fn by_start(snapshot: &Snapshot, workers: &mut [Worker]) {
    let started = |worker: &Worker| process_of(snapshot, worker.pid).map_or(0, |process| process.started_ns);
    // One that is not known leaves the process IDs.
    let is_known = workers.iter().all(|worker| started(worker) > 0);
    let time = |worker: &Worker| if is_known { started(worker) } else { 0 };
    workers.sort_by_key(|worker| (time(worker), worker.pid));
    for same in workers.chunk_by_mut(|one, next| time(one) == time(next)) {
        let newest = same.last().map_or(0, |worker| worker.pid);
        let oldest = same.partition_point(|worker| worker.pid + HALF_OF_PIDS < newest);
        same.rotate_left(oldest);
    }
}

/// Returns the connections of each worker: `48, 0, 0, 0`.
pub(crate) fn shares(workers: &[Worker]) -> String {
    const SHOWN: usize = 16;
    let shown = workers.iter().take(SHOWN).map(|worker| worker.connections.to_string());
    let rest = if workers.len() > SHOWN { ", ..." } else { "" };
    shown.collect::<Vec<_>>().join(", ") + rest
}

/// Returns the CPU time of the workers with the most and the fewest connections.
pub(crate) fn load(workers: &[Worker]) -> Option<String> {
    let first = workers.iter().max_by_key(|worker| worker.connections)?;
    let last = workers.iter().min_by_key(|worker| worker.connections)?;
    Some(format!(
        "{}[{}] used {:.0}% of a processor, {}[{}] {:.0}%",
        first.name,
        first.pid,
        first.cpu? * 100.0,
        last.name,
        last.pid,
        last.cpu? * 100.0
    ))
}

/// A SO_REUSEPORT group whose connections go where they should not.
#[derive(Clone, Debug)]
pub struct Imbalance<'a> {
    pub address: SocketAddr,
    /// A member of the group: the one that is stuck, or the first one.
    pub member: &'a Listener,
    pub kind: ImbalanceKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ImbalanceKind {
    /// The member does not accept.
    Stuck,
    /// One worker has most of the connections: Jain's index.
    Skewed(f64),
}

/// Returns the groups with a member that is stuck with `queue` connections or more, and those whose connections are on few workers, with
/// a Jain's index below `jain` and a busy worker.
///
/// # Errors
///
/// The listeners or the connections were not read, or no process is visible.
pub fn imbalances(snapshot: &Snapshot, queue: f64, jain: f64) -> Result<Vec<Imbalance<'_>>, String> {
    let listeners = snapshot.listeners.seen()?;
    let mut found: Vec<Imbalance<'_>> = stuck(snapshot, listeners, queue)
        .into_iter()
        .map(|(member, _)| Imbalance { address: member.address, member, kind: ImbalanceKind::Stuck })
        .collect();
    let skews = match tcp_skews(snapshot, jain) {
        Err(_) if !found.is_empty() => Vec::new(),
        skews => skews?,
    };
    for group in groups(listeners) {
        let address = group[0].address;
        let skew = skews.iter().find(|skew| !skew.is_ladder && skew.port == Some(address.port()));
        if let Some(skew) = skew.filter(|_| found.iter().all(|known| known.address != address)) {
            found.push(Imbalance { address, member: group[0], kind: ImbalanceKind::Skewed(skew.jain) });
        }
    }
    Ok(found)
}

/// Returns the members of SO_REUSEPORT groups that do not accept, each with its group: B03. B04 has the listeners of an old generation.
pub(crate) fn stuck<'a>(
    snapshot: &Snapshot,
    listeners: &'a [Listener],
    limit: f64,
) -> Vec<(&'a Listener, Vec<&'a Listener>)> {
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").is_ok_and(|value| value != 0);
    let mut found = Vec::new();
    for group in groups(listeners) {
        for member in &group {
            let is_stuck = f64::from(member.waiting) >= limit || stopped(snapshot, &member.owners).is_some();
            let is_old = !migrates && is_left_behind(snapshot, member, &group);
            if is_stuck && lags(member, &group) && !is_old {
                found.push((*member, group.clone()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Part, Process};

    use super::*;

    #[test]
    fn workers_are_in_the_order_of_their_start() {
        let sorted = |started: &[(u32, u64)]| {
            let process = |&(pid, started_ns): &(u32, u64)| Process { pid, started_ns, ..Process::default() };
            let processes = started.iter().filter(|(_, started)| *started > 0).map(process);
            let snapshot = Snapshot { processes: Part::Seen(processes.collect()), ..Snapshot::default() };
            let worker =
                |&(pid, _): &(u32, u64)| Worker { pid, name: String::new(), connections: 0, cpu: None };
            let mut workers: Vec<Worker> = started.iter().map(worker).collect();
            by_start(&snapshot, &mut workers);
            workers.iter().map(|worker| worker.pid).collect::<Vec<_>>()
        };
        assert_eq!(sorted(&[(7, 20), (32_767, 10), (302, 20)]), [32_767, 7, 302]);
        // The process IDs began again within a step of the clock.
        assert_eq!(sorted(&[(301, 10), (302, 10), (32_766, 10), (32_767, 10)]), [32_766, 32_767, 301, 302]);
        assert_eq!(sorted(&[(9, 10), (5, 10), (7, 10)]), [5, 7, 9]);
        assert_eq!(sorted(&[(9, 0), (5, 30), (7, 10)]), [5, 7, 9], "the start of one is not known");
    }
}
