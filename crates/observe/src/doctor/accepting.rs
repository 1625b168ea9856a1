//! Listeners, their SO_REUSEPORT groups and their processes, as several rules see them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::{FailedCall, Listener, Owner, Process, Snapshot, UnixListener};

use crate::doctor::attribute::is_own;
use crate::doctor::command::Scope;
use crate::doctor::draft::{Draft, Remedy, What};
use crate::doctor::words::{count, counted, filled, process};
use fourtuple_record::errno;

/// Returns the processes of a socket: `nginx[812]`, `nginx[812] and 3 more`.
pub(crate) fn holders(owners: &[Owner]) -> String {
    match owners {
        [] => "a process that is not visible".to_owned(),
        [only] => process(only),
        [first, rest @ ..] => format!("{} and {} more", process(first), rest.len()),
    }
}

/// Returns the processes that accept from a listener: `nginx[813] and 3 more`.
pub(crate) fn acceptors(snapshot: &Snapshot, listener: &Listener) -> String {
    holders(&workers_of(snapshot, &listener.owners, accepted(snapshot, listener)))
}

/// Returns the processes that hold connections at the port of a listener.
fn accepted<'a>(snapshot: &'a Snapshot, listener: &Listener) -> &'a [Owner] {
    let services = snapshot.connections.seen().map(|all| all.services.as_slice()).unwrap_or_default();
    let service = services.iter().find(|service| service.port == listener.address.port());
    service.map(|service| service.workers.as_slice()).unwrap_or_default()
}

/// Returns the processes that accept from a unix listener.
pub(crate) fn unix_acceptors(snapshot: &Snapshot, listener: &UnixListener) -> String {
    holders(&workers_of(snapshot, &listener.owners, &listener.workers))
}

/// Returns the processes that hold a listener, without a master that holds it for its workers only. A child that was not there at the first
/// reading may be about to execute another program: it does not count as a worker. `accepted`: the processes that hold accepted connections.
fn workers_of(snapshot: &Snapshot, owners: &[Owner], accepted: &[Owner]) -> Vec<Owner> {
    masters_and_workers(snapshot, owners, accepted).1
}

/// Servers whose masters never accept.
const PREFORK: [&str; 5] = ["apache2", "gunicorn", "httpd", "nginx", "php-fpm"];

/// Returns whether a process is systemd, which holds the listeners of its .socket units for the services that accept from them.
fn is_activator(owner: &Owner) -> bool {
    owner.name == "systemd"
}

/// Returns the masters among the processes that hold a listener, and the others.
fn masters_and_workers(
    snapshot: &Snapshot,
    owners: &[Owner],
    accepted: &[Owner],
) -> (Vec<Owner>, Vec<Owner>) {
    let has_accepted = |pid: u32| accepted.iter().any(|worker| worker.pid == pid && worker.sockets > 0);
    // Gunicorn calls its processes `gunicorn: master` and `gunicorn: worker`.
    let program = |owner: &Owner| owner.name.split([':', ' ']).next().map(str::to_owned);
    let is_worker_of = |owner: &Owner, master: &Owner| {
        let process = process_of(snapshot, owner.pid);
        program(owner) == program(master)
            && process.is_some_and(|process| process.parent == master.pid && process.cpu_ns.is_some())
    };
    let is_master = |master: &&Owner| {
        let mut workers = owners.iter().filter(|owner| is_worker_of(owner, master));
        let accepting = workers.clone().any(|worker| has_accepted(worker.pid));
        // Of two processes that have accepted nothing, one may be a helper of the other.
        let least = usize::from(!PREFORK.iter().any(|name| master.name.starts_with(name)));
        let activates = is_activator(master) && !owners.iter().all(is_activator);
        activates || !has_accepted(master.pid) && (accepting || workers.nth(least).is_some())
    };
    owners.iter().cloned().partition(|owner| is_master(&owner))
}

/// Returns a sentence about the master of the processes that accept: the process to restart or to reload.
fn master(snapshot: &Snapshot, owners: &[Owner], accepted: &[Owner]) -> Option<String> {
    let (masters, _) = masters_and_workers(snapshot, owners, accepted);
    let first = masters.first()?;
    let role = match is_activator(first) {
        true => "has opened the listener (socket activation): the backlog is a setting of its .socket unit",
        false => "is the master of these processes: it has their settings, and does not accept itself",
    };
    Some(format!("{} {role}", process(first)))
}

/// Returns a duration with a unit that suits it: `120 ms`, `10.0 s`.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{} ms", ns / 1_000_000),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Returns whether the accept queue takes no more connections: `sk_acceptq_is_full`, which admits one more than the backlog.
pub(crate) fn is_full(waiting: u32, backlog: u32) -> bool {
    waiting > backlog
}

/// Returns the events of a counter during the interval, 0 for a counter that the kernel lacks.
pub(crate) fn during(snapshot: &Snapshot, counter: &str) -> u64 {
    snapshot.counter(counter).map_or(0, |counter| counter.during)
}

/// Returns the most SYNs and last ACKs that a listener can have dropped during the interval. Its sk_drops has more events than drops: SYNs
/// that are sent again, RSTs of handshakes, the last ACKs that TCP_DEFER_ACCEPT ignores, and a dropped last ACK twice (tcp_check_req,
/// discard_and_relse). TcpExt.ListenDrops counts drops only, of all listeners of the namespace (tcp_listendrop).
pub(crate) fn drops(snapshot: &Snapshot, listener: &Listener) -> u64 {
    listener.drops.map_or(0, |drops| drops.during.min(during(snapshot, "TcpExt.ListenDrops")))
}

/// Returns the handshakes in progress that a listener takes (`inet_csk_reqsk_queue_is_full`); without SYN cookies the kernel keeps a quarter of
/// net.ipv4.tcp_max_syn_backlog for clients that it knows (`tcp_conn_request`).
pub(crate) fn handshakes_allowed(snapshot: &Snapshot, listener: &Listener) -> u64 {
    let has_cookies = snapshot.number("net.ipv4.tcp_syncookies") != Ok(0);
    match snapshot.number("net.ipv4.tcp_max_syn_backlog") {
        Ok(most) if !has_cookies => (most - most / 4).min(listener.backlog.into()),
        _ => listener.backlog.into(),
    }
}

/// Returns the drops of the interval that are neither overflows of an accept queue nor of a full SYN queue.
pub(crate) fn other_drops(snapshot: &Snapshot) -> u64 {
    let counted = |name| during(snapshot, name);
    let known = counted("TcpExt.ListenOverflows") + counted("TcpExt.TCPReqQFullDrop");
    counted("TcpExt.ListenDrops").saturating_sub(known)
}

/// Returns the listener whose handshakes in progress are the cause of [`other_drops`]: SYN cookies are off, and the kernel drops SYNs of clients
/// that it does not know.
pub(crate) fn flooded(snapshot: &Snapshot) -> Option<&Listener> {
    let is_full = |listener: &&Listener| {
        // Handshakes end between the last drop and the reading.
        u64::from(listener.handshakes) * 10 >= handshakes_allowed(snapshot, listener) * 9
    };
    let is_possible = snapshot.number("net.ipv4.tcp_syncookies") == Ok(0) && other_drops(snapshot) > 0;
    let listeners = snapshot.listeners.seen().ok()?.iter().filter(|_| is_possible);
    listeners
        .filter(|listener| listener.handshakes > 0)
        .filter(is_full)
        .max_by_key(|listener| listener.handshakes)
}

/// Returns the connections in the accept queue that were there at the first reading, as a lower bound.
pub(crate) fn kept_waiting(snapshot: &Snapshot, listener: &Listener) -> u64 {
    // The queue is served in order: with fewer arrivals than connections in the queue, the others were there at the first reading.
    let both = u64::from(listener.waiting.min(listener.waiting_before));
    let opens = snapshot.counter("Tcp.PassiveOpens").map(|opens| opens.during);
    opens.map_or(0, |opens| both.saturating_sub(opens)).max(listener.standing.into())
}

/// Declares what a listener that drops explains: its drops, its queue, and the SYNs that clients of this host send again.
pub(crate) fn explains_listener(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    // A kernel that does not tell the drops of a listener has the sums only.
    let amount = if listener.drops.is_some() { drops(snapshot, listener) } else { u64::MAX };
    let draft = draft
        .explains_up_to(What::Counter("TcpExt.ListenOverflows"), amount)
        .explains_up_to(What::Counter("TcpExt.ListenDrops"), amount)
        .explains(What::Drops(listener.cookie))
        .explains(What::Queue(listener.cookie))
        .explains(What::Counter("TcpExt.TCPSynRetrans"))
        .explains(What::Unanswered(Some(listener.address)))
        .explains(What::Counter("Tcp.AttemptFails"));
    let failures = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    let to_it = failures.filter(|call| {
        let to = call.address.as_ref().and_then(|address| address.parse().ok());
        to.is_some_and(|to| serves(snapshot, listener, to))
    });
    to_it.fold(draft, |draft, call| {
        let address = call.address.clone();
        draft.explains(What::Calls { call: "connect", errno: errno::ETIMEDOUT, process: None, address })
    })
}

/// Returns whether connections to an address of this host come to the listener.
fn serves(snapshot: &Snapshot, listener: &Listener, to: SocketAddr) -> bool {
    is_listener_at(listener, to) && (!listener.address.ip().is_unspecified() || is_own(snapshot, to.ip()))
}

/// Returns whether a listener has the address and port `to`, also among others.
pub(crate) fn is_listener_at(listener: &Listener, to: SocketAddr) -> bool {
    is_at(listener.address, to) && !(listener.ipv6_only && to.is_ipv4())
}

/// Returns whether a socket that is bound to `own` has the address and port `to`; `[::]` may have those of IPv4, too.
pub(crate) fn is_at(own: SocketAddr, to: SocketAddr) -> bool {
    let is_any = own.ip().is_unspecified() && (own.is_ipv6() || to.is_ipv4());
    own.port() == to.port() && (is_any || own.ip().to_canonical() == to.ip().to_canonical())
}

/// Declares what a unix listener with a full queue explains: its queue, and the calls of connect() that failed.
pub(crate) fn explains_unix(draft: Draft, listener: &UnixListener) -> Draft {
    let address = Some(called(listener));
    draft.explains(What::Queue(listener.cookie)).explains(What::Calls {
        call: "connect",
        errno: errno::EAGAIN,
        process: None,
        address,
    })
}

/// Returns the path of a listener as failed calls have it.
fn called(listener: &UnixListener) -> String {
    listener.path.escape_debug().to_string()
}

/// Returns the calls of connect() to a unix listener that found its queue full (`unix_stream_connect` of a non-blocking socket).
pub(crate) fn refused<'a>(
    snapshot: &'a Snapshot,
    listener: &UnixListener,
) -> impl Iterator<Item = &'a FailedCall> {
    let path = called(listener);
    let calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    calls.filter(move |call| {
        call.protocol == "unix"
            && call.call == "connect"
            && call.errno == errno::EAGAIN
            && call.address.as_ref() == Some(&path)
    })
}

/// Returns `up to ` if the drops of the interval may be of another listener.
pub(crate) fn up_to(snapshot: &Snapshot) -> &'static str {
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
    let number = listeners.iter().filter(|listener| drops(snapshot, listener) > 0).count();
    if number > 1 { "up to " } else { "" }
}

/// Returns the process with this ID.
pub(crate) fn process_of(snapshot: &Snapshot, pid: u32) -> Option<&Process> {
    snapshot.processes.seen().ok()?.iter().find(|process| process.pid == pid)
}

/// What keeps all threads of a process from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Halt {
    Signal,
    Debugger,
    /// The freezer of its cgroup.
    Freezer,
}

impl Halt {
    fn of(process: &Process) -> Option<Halt> {
        // Of the freezer of cgroup version 2 (do_freezer_trap, which is inlined), and of version 1.
        const FROZEN: [&str; 3] = ["get_signal", "do_freezer_trap", "__refrigerator"];
        match process.state {
            'T' => Some(Halt::Signal),
            't' => Some(Halt::Debugger),
            _ => process
                .waits_in
                .as_deref()
                .filter(|function| FROZEN.contains(function))
                .map(|_| Halt::Freezer),
        }
    }
}

/// Returns the first of the processes that are stopped.
pub(crate) fn stopped<'a>(snapshot: &Snapshot, owners: &'a [Owner]) -> Option<&'a Owner> {
    owners.iter().find(|owner| process_of(snapshot, owner.pid).and_then(Halt::of).is_some())
}

/// Returns the SO_REUSEPORT groups: the listeners of each address that has several.
pub(crate) fn groups<'a>(listeners: impl IntoIterator<Item = &'a Listener>) -> Vec<Vec<&'a Listener>> {
    let mut groups: BTreeMap<(SocketAddr, u32), Vec<&Listener>> = BTreeMap::new();
    for listener in listeners {
        groups.entry((listener.address, listener.interface)).or_default().push(listener);
    }
    groups.into_values().filter(|group| group.len() > 1).collect()
}
/// Returns whether a member of a group has a queue that does not shrink while the queues of the others are short.
pub(crate) fn lags(member: &Listener, group: &[&Listener]) -> bool {
    let others = group.iter().filter(|other| other.cookie != member.cookie);
    let longest = others.map(|other| other.waiting).max().unwrap_or(0);
    member.waiting_before > 0 && member.waiting >= member.waiting_before && longest <= member.waiting / 8
}

/// Time by which the processes of an old generation are older than the processes of the new one.
const GENERATION_NS: u64 = 1_000_000_000;

/// Returns whether the processes of a lagging member began before all processes of the other members: an old generation of the server.
pub(crate) fn is_left_behind(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> bool {
    let starts = |listener: &Listener| -> Vec<u64> {
        let processes = listener.owners.iter().filter_map(|owner| process_of(snapshot, owner.pid));
        processes.map(|process| process.started_ns).collect()
    };
    let others = group.iter().filter(|other| other.cookie != member.cookie);
    let oldest = others.flat_map(|other| starts(other)).min();
    let youngest = starts(member).into_iter().max();
    let is_older = youngest.zip(oldest).is_some_and(|(own, other)| own + GENERATION_NS <= other);
    is_older && lags(member, group)
}

/// How long connections wait in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// For moments.
    Briefly,
    /// Half of the queue or more is in use at both readings, perhaps by other connections.
    Filled,
    /// Some have waited for the whole interval.
    Throughout,
}

impl Waiting {
    fn of(kept: u64, is_filled: bool) -> Waiting {
        match (kept, is_filled) {
            (1.., _) => Waiting::Throughout,
            (0, true) => Waiting::Filled,
            (0, false) => Waiting::Briefly,
        }
    }
}

/// Whether processes that hold a listener could accept.
enum Workers {
    Running,
    /// A signal has stopped all that accept: nothing else helps.
    Stopped,
}

/// Adds what the processes that hold a listener do instead of accepting. `accepted`: those that hold accepted connections.
fn state_of(
    draft: Draft,
    snapshot: &Snapshot,
    owners: &[Owner],
    accepted: &[Owner],
    waiting: Waiting,
) -> (Draft, Workers) {
    let workers = workers_of(snapshot, owners, accepted);
    let draft = busy(draft, snapshot, &workers, waiting).because_if(master(snapshot, owners, accepted));
    match stopped(snapshot, owners) {
        Some(owner) if is_idle(snapshot, owners) => {
            (continued(draft, snapshot, owner, "it accepts again"), Workers::Stopped)
        }
        Some(owner) => (continued(draft, snapshot, owner, "it accepts again"), Workers::Running),
        None => (draft, Workers::Running),
    }
}

/// Adds what helps a listener whose connections wait for accept() all the time, without a full queue.
pub(crate) fn accept_sooner(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    let accepted = accepted(snapshot, listener);
    let waiting = Waiting::of(kept_waiting(snapshot, listener), false);
    let draft = match state_of(draft, snapshot, &listener.owners, accepted, waiting) {
        (draft, Workers::Stopped) => return draft,
        (draft, Workers::Running) => draft,
    };
    let workers = workers_of(snapshot, &listener.owners, accepted);
    let more = more_workers(&workers);
    draft
        .now(Remedy::own(
            format!("trace accept --port {} --for 10s", listener.address.port()),
            "shows the wait of each connection, and which worker accepts",
        ))
        .proper(Remedy::advice(
            format!("{}: {more}; for a SO_REUSEPORT group `fourtuple fix accept`", holders(&workers)),
            "a worker is free when a connection arrives",
        ))
}

/// Returns the setting of a server for twice as many workers.
fn more_workers(workers: &[Owner]) -> String {
    workers.first().and_then(|owner| Settings::of(&owner.name)).map_or_else(
        || "more workers, or no blocking work in the thread that calls accept()".to_owned(),
        |settings| with_number(settings.workers, 2 * workers.len() as u64),
    )
}

/// Adds what helps a listener whose accept queue is too short or is emptied too slowly.
pub(crate) fn empty_faster(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    let port = listener.address.port();
    let workers = workers_of(snapshot, &listener.owners, accepted(snapshot, listener));
    let server = holders(&workers);
    let somaxconn = snapshot.number("net.core.somaxconn").unwrap_or(u64::from(u32::MAX));
    let is_cut = u64::from(listener.backlog) >= somaxconn;
    let readings = [listener.waiting_before, listener.waiting];
    let waiting = Waiting::of(kept_waiting(snapshot, listener), is_filled(readings, listener.backlog));
    let mut draft = match state_of(draft, snapshot, &listener.owners, accepted(snapshot, listener), waiting) {
        (draft, Workers::Stopped) => return draft,
        (draft, Workers::Running) => draft,
    };
    draft = draft.now(Remedy::own(
        format!("trace accept --port {port} --for 10s"),
        "shows how long connections wait, and which worker accepts how many",
    ));
    if is_cut {
        draft = draft.now(
            Remedy::sysctl(
                "net.core.somaxconn",
                (somaxconn * 8).max(4096).to_string(),
                format!("a longer queue for bursts, after a restart of {server}: listen() reads the limit"),
            )
            .unproven(),
        );
    }
    let has_burst = drops(snapshot, listener) > 0 && waiting == Waiting::Briefly;
    with_settings(draft, snapshot, (&listener.owners, &workers), has_burst, listener.backlog)
}

/// Returns whether half of a queue was in use at both readings.
fn is_filled(readings: [u32; 2], backlog: u32) -> bool {
    readings.iter().all(|waiting| waiting * 2 > backlog)
}

/// Adds what helps a unix listener whose accept queue is full.
pub(crate) fn empty_unix(draft: Draft, snapshot: &Snapshot, listener: &UnixListener) -> Draft {
    let workers = workers_of(snapshot, &listener.owners, &listener.workers);
    let server = holders(&workers);
    // Clients that give up leave their places to others.
    let is_filled = is_filled([listener.waiting_before, listener.waiting], listener.backlog);
    let waiting = Waiting::of(listener.standing.into(), is_filled);
    let mut draft = match state_of(draft, snapshot, &listener.owners, &listener.workers, waiting) {
        (draft, Workers::Stopped) => return draft,
        (draft, Workers::Running) => draft,
    };
    let somaxconn = snapshot.number("net.core.somaxconn").unwrap_or(u64::from(u32::MAX));
    if u64::from(listener.backlog) >= somaxconn {
        let longer = (somaxconn * 8).max(4096).to_string();
        let effect =
            format!("a longer queue for bursts, after a restart of {server}: listen() reads the limit");
        draft = draft.now(Remedy::sysctl("net.core.somaxconn", longer, effect).unproven());
    }
    let has_burst = refused(snapshot, listener).next().is_some() && waiting == Waiting::Briefly;
    with_settings(draft, snapshot, (&listener.owners, &workers), has_burst, listener.backlog)
}

/// Returns the processor time of the workers during the interval, in processors; `None`: that of one of them is not known.
fn processors_used(snapshot: &Snapshot, workers: &[Owner]) -> Option<f64> {
    let used = |worker: &Owner| process_of(snapshot, worker.pid)?.cpu_ns;
    let used_ns: u64 = workers.iter().map(used).sum::<Option<u64>>()?;
    (!workers.is_empty() && snapshot.interval_ns > 0).then(|| used_ns as f64 / snapshot.interval_ns as f64)
}

/// Adds the number of the workers and their processor time, as the first fact.
fn busy(mut draft: Draft, snapshot: &Snapshot, workers: &[Owner], waiting: Waiting) -> Draft {
    if let Some(used) = processors_used(snapshot, workers) {
        let number = counted(workers.len() as u64, "worker");
        let all = counted(snapshot.processors.max(1).into(), "processor");
        // Workers that accept nothing although they have a processor wait for something else.
        let is_blocked = waiting != Waiting::Briefly
            && stopped(snapshot, workers).is_none()
            && used < 0.1 * workers.len() as f64;
        // Where the queue is filled again and again, a worker may have looked at it a moment ago.
        let is_left_alone = is_blocked && waiting == Waiting::Throughout;
        let waits_in = waits_in(snapshot, workers).filter(|_| is_left_alone);
        let is_for_events = waits_in.is_some_and(waits_for_events);
        let why = match waits_in {
            _ if !is_blocked => String::new(),
            Some(function) if is_for_events => format!(
                ", waiting for events ({function}), but not for this listener: at a limit of connections, or no server but a program that has inherited the \
                 socket from one"
            ),
            Some(function) => format!(": blocked in {function}(), not overloaded"),
            None => ": blocked (a database, a lock, a sleep), not overloaded".to_owned(),
        };
        draft.evidence.insert(0, format!("{number} used {used:.2} of {all}{why}"));
        let idle = waits_in.is_some_and(|function| is_for_events || is_idle_in(function));
        if let [only] = workers
            && idle
            && Settings::of(&only.name).is_none()
        {
            let action = format!(
                "if {} is not the server, but was started by it: `kill {}`; in the server SOCK_CLOEXEC for the listener",
                process(only),
                only.pid
            );
            draft = draft.proper(Remedy::advice(
                action,
                "the server can listen again, and clients are refused at once until then",
            ));
        }
        if let Some(worker) = workers.first().filter(|_| is_blocked && !is_for_events) {
            draft = draft.now(in_kernel(worker));
        }
    }
    draft
}

/// Says why a process does not read from its sockets.
pub(crate) fn reads_nothing(draft: Draft, snapshot: &Snapshot, owner: &Owner) -> Draft {
    let owners = std::slice::from_ref(owner);
    if stopped(snapshot, owners).is_some() {
        return continued(draft, snapshot, owner, "it serves again");
    }
    let (name, used) = (process(owner), processors_used(snapshot, owners).unwrap_or(0.0));
    let why = match waits_in(snapshot, owners) {
        Some(function) if waits_for_events(function) => format!(
            "{name} is waiting for events ({function}), but not for these: at a limit of its own, or a server behind it takes no data"
        ),
        Some(function) => format!("{name} is blocked in {function}(), not overloaded"),
        None if used > 0.9 => {
            format!("{name} used {used:.2} processors: it computes and looks at no connection")
        }
        None => "possible: its threads are busy, or wait for something else (a database, a lock, a sleep)"
            .to_owned(),
    };
    looked_into(draft.because(why), owner)
}

/// Says why requests wait at a process that serves others.
pub(crate) fn reads_late(draft: Draft, snapshot: &Snapshot, owner: &Owner) -> Draft {
    let owners = std::slice::from_ref(owner);
    if stopped(snapshot, owners).is_some() {
        return reads_nothing(draft, snapshot, owner);
    }
    let name = process(owner);
    let used = processors_used(snapshot, owners);
    looked_into(draft, owner)
        .because(format!(
            "{name} serves other connections meanwhile: each of its threads has a request, and these wait for a thread"
        ))
        .because_if(used.map(|used| match used > 0.9 {
            true => format!("{name} used {used:.2} processors: it computes"),
            false => format!("{name} used {used:.2} processors: its threads wait for something else"),
        }))
        .proper(Remedy::advice(format!("{name}: {}", more_workers(owners)), "more requests at a time"))
        .proper(Remedy::advice(
            "or requests that take less time: what they wait for is often a server behind this one",
            "each thread serves more requests",
        ))
}

/// Adds the command that shows what a process waits for, if the process is visible.
fn looked_into(draft: Draft, owner: &Owner) -> Draft {
    if owner.pid == 0 { draft } else { draft.now(in_kernel(owner)) }
}

/// Returns the command that shows what a process waits for.
fn in_kernel(worker: &Owner) -> Remedy {
    let effect = "shows what it waits for in the kernel: a socket (tcp_recvmsg), a lock (futex), a sleep";
    Remedy::privileged(Scope::Process, format!("cat /proc/{}/stack", worker.pid), effect)
}

/// Returns whether threads wait in a function of the kernel for events of descriptors: epoll_wait(2), poll(2), select(2), io_uring_enter(2).
/// Compilers inline some functions, so that kernels have ep_poll or do_epoll_wait.
fn waits_for_events(function: &str) -> bool {
    ["ep_poll", "epoll", "poll_schedule_timeout", "do_poll", "sys_poll", "select", "cqring_wait"]
        .iter()
        .any(|part| function.contains(part))
}

/// The same of functions in which programs wait that serve nobody: sleep(3), wait(2), pause(2), sigwait(3).
fn is_idle_in(function: &str) -> bool {
    let parts = ["nanosleep", "pause", "sigsuspend", "sigtimedwait", "wait4", "waitid"];
    function == "do_wait" || parts.iter().any(|part| function.contains(part))
}

/// Returns the function of the kernel in which all of the processes wait.
fn waits_in<'a>(snapshot: &'a Snapshot, workers: &[Owner]) -> Option<&'a str> {
    let mut all = workers.iter().map(|worker| process_of(snapshot, worker.pid)?.waits_in.as_deref());
    let first = all.next()??;
    all.all(|other| other == Some(first)).then_some(first)
}

/// Returns whether a process is stopped and no worker runs beside it: at most a master, which does not accept. More workers or a longer queue
/// would not help.
fn is_idle(snapshot: &Snapshot, owners: &[Owner]) -> bool {
    let is_stopped = |owner: &&Owner| stopped(snapshot, std::slice::from_ref(*owner)).is_some();
    let all = owners.iter().filter(is_stopped).count();
    all > 0 && owners.len() - all <= 1
}

/// Adds that a process is stopped, as the first fact, and what continues it. `again`: what it then does.
pub(crate) fn continued(draft: Draft, snapshot: &Snapshot, owner: &Owner, again: &str) -> Draft {
    let (name, pid) = (process(owner), owner.pid);
    let process = process_of(snapshot, pid);
    match process.and_then(Halt::of) {
        None | Some(Halt::Signal) => {
            let command = Remedy::privileged(Scope::Process, format!("kill -CONT {pid}"), again);
            draft
                .because_first(format!("{name} is stopped by a signal (state T)"))
                .now(command.undone_by(Scope::Process, format!("kill -STOP {pid}")))
                .proper(Remedy::advice(
                    "find what stopped it (SIGSTOP of a person or a program, a debugger, or SIGTTIN and SIGTTOU of a job in the background)",
                    "it will stop again otherwise",
                ))
        }
        Some(Halt::Debugger) => {
            draft.because_first(format!("{name} is stopped by a debugger (state t)")).now(Remedy::advice(
                format!(
                    "let the debugger continue it or detach: `grep TracerPid /proc/{pid}/status` names it"
                ),
                again,
            ))
        }
        Some(Halt::Freezer) => {
            let cgroup = process.and_then(|process| process.cgroup.as_ref());
            let cgroup = cgroup.map_or_else(String::new, |cgroup| format!(", {cgroup}"));
            draft
                .because_first(format!("{name} is frozen with its cgroup{cgroup}"))
                .now(Remedy::advice(
                    "`docker unpause`, `podman unpause` or `systemctl thaw`, with what froze it, or `echo 0 > cgroup.freeze` in the cgroup",
                    again,
                ))
        }
    }
}

/// Adds the settings of the server that empty an accept queue faster or make it longer, with their numbers. `has_burst`: the queue was full,
/// but for moments only.
fn with_settings(
    mut draft: Draft,
    snapshot: &Snapshot,
    (owners, workers): (&[Owner], &[Owner]),
    has_burst: bool,
    backlog: u32,
) -> Draft {
    let server = holders(workers);
    // More processes share the processors that the others leave.
    let used = processors_used(snapshot, workers);
    let is_exhausted =
        used.is_some_and(|used| snapshot.processors > 0 && used >= f64::from(snapshot.processors) * 0.9);
    let is_burst = has_burst && used.is_some_and(|used| used < 0.5 * workers.len() as f64);
    let effect = match is_exhausted {
        true => "little: the processes use all processors, and requests have to become cheaper",
        false => "twice as many connections at a time; more if the queue stays full",
    };
    let more = more_workers(workers);
    // The default of most servers, or space for a burst that is eight times as long.
    let longer = if backlog < 511 { 511 } else { (u64::from(backlog) * 8).max(4096) };
    let backlog = Settings::of_listener(owners)
        // Programs in Go have no setting: the library reads net.core.somaxconn.
        .map_or_else(
            || format!("listen(fd, {longer}), which in Go is net.core.somaxconn"),
            |settings| with_number(settings.backlog, longer),
        );
    let more = Remedy::advice(format!("{server}: {more}"), effect);
    let somaxconn = match snapshot.number("net.core.somaxconn") {
        Ok(most) if most >= longer => format!("net.core.somaxconn, {}, allows it", count(most)),
        Ok(most) => format!("net.core.somaxconn, {}, cuts it: raise that first", count(most)),
        Err(_) => "the kernel cuts it to net.core.somaxconn".to_owned(),
    };
    let longer = Remedy::advice(
        format!("{server}: {backlog}; a restart is needed, and {somaxconn}"),
        "bursts have a place; it does not help against overload",
    );
    if is_burst {
        let fact = "the queue is not full between the drops: connections come in bursts that are longer than the backlog";
        draft.evidence.insert(0, fact.to_owned());
        return draft.proper(longer).proper(more);
    }
    draft.proper(more).proper(longer)
}

/// Returns a setting with the number that it gets in place of `N`.
pub(crate) fn with_number(setting: &str, number: u64) -> String {
    filled(setting, "N", &number.to_string())
}

/// The settings of a server for its accept queue.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    /// The start of the name of its processes (comm).
    name: &'static str,
    /// The setting of the backlog of listen().
    pub(crate) backlog: &'static str,
    /// The setting for more accepts, or more connections, at a time.
    workers: &'static str,
}

/// The program that opens the listeners of others. Services such as systemd-resolved have their own.
const SYSTEMD: Settings = Settings {
    name: "systemd",
    backlog: "`Backlog=N` of the .socket unit of systemd",
    workers: "`MaxConnections=N` of the .socket unit (with `Accept=yes`)",
};

/// Rows of the table: `NAME: BACKLOG, WORKERS;`.
macro_rules! settings {
    ($($name:literal: $backlog:expr, $workers:expr;)*) => {
        &[$(Settings { name: $name, backlog: $backlog, workers: $workers }),*]
    };
}

/// From the documentation of each server. A name that starts with another one comes before it.
const SETTINGS: &[Settings] = settings! {
    "nginx": "`backlog=N` of `listen` (511 by default)", "more `worker_processes`";
    "haproxy": "`backlog N` of the frontend (`maxconn` by default)", "a higher `nbthread`, and `maxconn`";
    "redis": "`tcp-backlog N` of redis.conf (511 by default)", "fewer slow commands: one thread serves all clients";
    "valkey": "`tcp-backlog N` of valkey.conf (511 by default)", "fewer slow commands: one thread serves all clients";
    "gunicorn": "`--backlog N` (2,048 by default)", "more `--workers` or `--threads`";
    "uvicorn": "`--backlog N` (2,048 by default)", "more `--workers`";
    "uwsgi": "`listen = N` (100 by default)", "more `processes` or `threads`";
    "apache2": "`ListenBacklog N` (511 by default)", "a higher `MaxRequestWorkers`";
    "httpd": "`ListenBacklog N` (511 by default)", "a higher `MaxRequestWorkers`";
    "php-fpm": "`listen.backlog = N` of the pool (511 by default)", "`pm.max_children = N` of the pool";
    "lighttpd": "`server.listen-backlog = N` (1,024 by default)", "a higher `server.max-connections`";
    "varnish": "the parameter `listen_depth` (1,024 by default)", "a higher `thread_pool_max`";
    "squid": "more `workers` (squid takes the backlog from its descriptor limit)", "more `workers`";
    "envoy": "`tcp_backlog_size` of the listener (net.core.somaxconn by default)", "a higher `--concurrency`";
    "pgbouncer": "`listen_backlog = N` (128 by default)", "more processes with `so_reuseport = 1`";
    "mysqld": "`back_log = N`", "fewer new connections: a pool in the client";
    "mariadbd": "`back_log = N`", "fewer new connections: a pool in the client";
    "memcached": "`-b N` (1,024 by default)", "a higher `-t`";
    "puma": "`backlog=N` in the address of `bind` (1,024 by default)", "more `workers` or `threads`";
    "node": "`server.listen({ port, backlog: N })` (511 by default)", "more processes (`node:cluster`), or no blocking work in the event loop";
    "java": "the backlog of the server (Tomcat `acceptCount`, 100; Netty `SO_BACKLOG`)", "more threads that accept, or no blocking work in them";
    "python": "`listen(N)`, in asyncio `backlog=N` (100 by default)", "more processes, or no blocking work in the thread that calls accept()";
};

/// The settings that limit the connections of servers which close what exceeds them, by the start of their name.
const LIMITS: [(&str, &str); 10] = [
    ("haproxy", "`tcp-request connection reject`"),
    ("mariadbd", "`max_connections` and `max_user_connections`"),
    ("mongod", "`net.maxIncomingConnections`"),
    ("mysqld", "`max_connections` and `max_user_connections`"),
    ("nginx", "`worker_connections`"),
    ("redis", "`maxclients`"),
    ("sshd", "`MaxStartups`"),
    ("valkey", "`maxclients`"),
    ("vsftpd", "`max_clients` and `max_per_ip`"),
    ("xinetd", "`instances`, `per_source` and `cps`"),
];

/// Returns the setting that limits the connections of a server.
pub(crate) fn limit_of(owners: &[Owner]) -> Option<&'static str> {
    let is_named = |name| owners.iter().any(|owner| owner.name.starts_with(name));
    LIMITS.iter().find(|(name, _)| is_named(*name)).map(|(_, setting)| *setting)
}

impl Settings {
    /// Returns the settings of a server that is known by the name of its process.
    pub(crate) fn of(process: &str) -> Option<Settings> {
        if process == SYSTEMD.name {
            return Some(SYSTEMD);
        }
        SETTINGS.iter().copied().find(|settings| process.starts_with(settings.name))
    }

    /// Returns the settings of the program that called listen().
    pub(crate) fn of_listener(owners: &[Owner]) -> Option<Settings> {
        let opener = owners.iter().find(|owner| is_activator(owner)).or(owners.first())?;
        Settings::of(&opener.name)
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Counter, Part};

    use super::*;

    /// The names of Debian's kernels 6.1 and 6.12, and of a kernel 6.18 of another compiler.
    #[test]
    fn functions_that_wait_are_known() {
        let events = ["ep_poll", "do_epoll_wait", "poll_schedule_timeout", "do_select", "io_cqring_wait"];
        let idle =
            ["hrtimer_nanosleep", "do_wait", "do_pause", "__do_sys_pause", "sigsuspend", "do_sigtimedwait"];
        let blocked = [
            "futex_do_wait",
            "futex_wait_queue",
            "inet_csk_accept",
            "anon_pipe_read",
            "sk_wait_data",
            "unix_stream_read_generic",
        ];
        assert!(events.iter().all(|function| waits_for_events(function) && !is_idle_in(function)));
        assert!(idle.iter().all(|function| is_idle_in(function) && !waits_for_events(function)));
        assert!(!blocked.iter().any(|function| is_idle_in(function) || waits_for_events(function)));
    }

    #[test]
    fn the_master_of_one_idle_worker_is_known_by_its_name() {
        let judged = |[first, second]: [&str; 2]| {
            let owner = |pid, name: &str| Owner { pid, name: name.to_owned(), sockets: 1 };
            let process = |pid, parent, name: &str| Process {
                pid,
                parent,
                name: name.to_owned(),
                cpu_ns: Some(0),
                ..Process::default()
            };
            let processes = Part::Seen(vec![process(70, 1, first), process(71, 70, second)]);
            let snapshot = Snapshot { processes, ..Snapshot::default() };
            let owners = [owner(70, first), owner(71, second)];
            let (masters, workers) = masters_and_workers(&snapshot, &owners, &[]);
            [masters, workers].map(|owners| owners.iter().map(|owner| owner.pid).collect::<Vec<_>>())
        };
        let all = [vec![], vec![70, 71]];
        assert_eq!(judged(["php-fpm8.2"; 2]), [vec![70], vec![71]]);
        // The kernel cuts the names that gunicorn sets to 15 characters.
        let [arbiter, worker] = ["gunicorn: master", "gunicorn: worker"].map(|name| &name[..15]);
        assert_eq!(judged([arbiter, worker]), [vec![70], vec![71]]);
        assert_eq!(judged([arbiter, "nginx"]), all, "another program that it has started");
        assert_eq!(judged(["systemd"; 2]), all, "two of a user do not accept for each other");
        assert_eq!(judged(["server"; 2]), all);
    }

    /// Returns the changes of a finding in words, a line each.
    fn proper(draft: &Draft) -> String {
        let words = draft.proper.iter().map(|remedy| match &remedy.action {
            crate::doctor::draft::Action::Words(words) => words.clone(),
            crate::doctor::draft::Action::Steps(_) => String::new(),
        });
        words.collect::<Vec<_>>().join("\n")
    }

    /// Socket activation: process 1 holds the listener too, and neither accepts nor listens with the number of the service.
    #[test]
    fn of_a_socket_unit_the_service_accepts() {
        let owner = |pid, name: &str| Owner { pid, name: name.to_owned(), sockets: 1 };
        let owners = vec![owner(1, "systemd"), owner(70, "webapp")];
        let process = |pid| Process { pid, parent: 1, cpu_ns: Some(0), ..Process::default() };
        let snapshot = Snapshot {
            processes: Part::Seen(vec![process(1), process(70)]),
            interval_ns: 2_000_000_000,
            processors: 2,
            ..Snapshot::default()
        };
        let listener =
            UnixListener { backlog: 8, waiting: 9, waiting_before: 9, owners, ..UnixListener::default() };
        assert_eq!(unix_acceptors(&snapshot, &listener), "webapp[70]");
        let draft = Draft::new(fourtuple_record::Severity::Critical, "socket", "full");
        let draft = empty_unix(draft, &snapshot, &listener);
        let words = proper(&draft);
        assert!(words.contains("webapp[70]: `Backlog=511` of the .socket unit"), "{words}");
        assert!(
            draft.evidence[0].contains("1 worker used") && draft.evidence[1].contains("socket activation"),
            "{:?}",
            draft.evidence
        );
        assert!(Settings::of("systemd-resolve").is_none());
    }

    #[test]
    fn settings_have_their_numbers() {
        let backlog = |process| with_number(Settings::of(process).unwrap().backlog, 511);
        for (process, part) in [
            ("nginx", "`backlog=511` of"),
            ("node", "backlog: 511 })"),
            ("java", "Netty `SO_BACKLOG`"),
            ("python3", "`listen(511)`"),
            ("php-fpm8.2", "`listen.backlog = 511` of the pool"),
        ] {
            assert!(backlog(process).contains(part), "{}", backlog(process));
        }
        // Each setting with a number has one place for it.
        for settings in SETTINGS {
            let text = with_number(settings.backlog, 7) + &with_number(settings.workers, 7);
            assert_eq!(with_number(&text, 8), text, "{}", settings.name);
        }
        // The advice of a finding; a program in Go has no setting.
        for (process, longer, more) in [
            ("apache2", "`ListenBacklog 511`", "a higher `MaxRequestWorkers`"),
            ("haproxy", "`backlog 511` of the frontend", "a higher `nbthread`, and `maxconn`"),
            ("gunicorn: maste", "`--backlog 511`", "more `--workers` or `--threads`"),
            ("gateway", "listen(fd, 511), which in Go is net.core.somaxconn", "more workers, or no blocking"),
        ] {
            let owners = [Owner { pid: 70, name: process.to_owned(), sockets: 1 }];
            let draft = Draft::new(fourtuple_record::Severity::Warning, "drops", "drops");
            let draft = with_settings(draft, &Snapshot::default(), (&owners, &owners), false, 128);
            let words = proper(&draft);
            for part in [longer, more] {
                assert!(words.contains(&format!("{process}[70]: {part}")), "{part} in {words}");
            }
        }
    }

    /// The numbers for a pool whose workers wait for something else than the processor, and for one that uses all processors.
    #[test]
    fn the_workers_of_a_full_queue_are_counted() {
        let owner = |pid| Owner { pid, name: "php-fpm8.2".to_owned(), sockets: 1 };
        let with = |cpu_ns, filled| {
            let process = |pid, parent| Process {
                pid,
                parent,
                name: "php-fpm8.2".to_owned(),
                cpu_ns,
                ..Process::default()
            };
            let processes = Part::Seen(vec![process(70, 1), process(71, 70), process(72, 70)]);
            let snapshot =
                Snapshot { processes, interval_ns: 2_000_000_000, processors: 2, ..Snapshot::default() };
            let owners = vec![owner(70), owner(71), owner(72)];
            let listener = UnixListener {
                backlog: 8,
                waiting: 9,
                waiting_before: filled,
                owners,
                ..UnixListener::default()
            };
            let draft =
                Draft::new(fourtuple_record::Severity::Critical, "pool", "full").because("first reading");
            let draft = empty_unix(draft, &snapshot, &listener);
            let words = draft.proper.iter().map(|remedy| match &remedy.action {
                crate::doctor::draft::Action::Words(words) => format!("{words}: {}", remedy.effect),
                crate::doctor::draft::Action::Steps(_) => String::new(),
            });
            (draft.evidence[0].clone(), words.collect::<Vec<_>>().join("\n"), draft.now.len())
        };
        let (fact, proper, commands) = with(Some(60_000_000), 0);
        assert_eq!(commands, 0, "nothing shows that they are blocked");
        assert_eq!(fact, "2 workers used 0.06 of 2 processors");
        for part in ["`pm.max_children = 4` of the pool: twice as many", "`listen.backlog = 511` of the pool"]
        {
            assert!(proper.contains(part), "{proper}");
        }
        let blocked =
            "2 workers used 0.06 of 2 processors: blocked (a database, a lock, a sleep), not overloaded";
        let (fact, _, commands) = with(Some(60_000_000), 9);
        assert_eq!((fact.as_str(), commands), (blocked, 1));
        let (fact, proper, _) = with(Some(1_900_000_000), 9);
        assert_eq!(fact, "2 workers used 1.90 of 2 processors");
        assert!(proper.contains("`pm.max_children = 4` of the pool: little: "), "{proper}");
        assert_eq!(with(None, 9).0, "first reading");
    }

    #[test]
    fn a_burst_needs_a_backlog_and_a_queue_that_stays_needs_workers() {
        let owner = Owner { pid: 70, name: "redis-server".to_owned(), sockets: 1 };
        let first = |standing: u32, cpu_ns: u64| {
            let process = Process {
                pid: 70,
                name: "redis-server".to_owned(),
                cpu_ns: Some(cpu_ns),
                ..Process::default()
            };
            let five = Counter { total: 5, during: 5 };
            let snapshot = Snapshot {
                processes: Part::Seen(vec![process]),
                counters: Part::Seen([("TcpExt.ListenDrops".to_owned(), five)].into()),
                interval_ns: 2_000_000_000,
                processors: 2,
                ..Snapshot::default()
            };
            let owners = vec![owner.clone()];
            let listener = Listener {
                address: ([127, 0, 0, 1], 4_020).into(),
                cookie: 1,
                waiting: standing,
                waiting_before: standing,
                standing,
                backlog: 16,
                drops: Some(five),
                owners,
                ..Listener::default()
            };
            let draft = Draft::new(fourtuple_record::Severity::Warning, "drops", "drops");
            let draft = empty_faster(draft, &snapshot, &listener);
            let crate::doctor::draft::Action::Words(words) = &draft.proper[0].action else { panic!() };
            (words.contains("tcp-backlog 511"), draft.evidence[0].contains("bursts"))
        };
        assert_eq!(first(0, 100_000_000), (true, true));
        assert_eq!(first(5, 100_000_000), (false, false), "connections wait");
        assert_eq!(first(0, 1_900_000_000), (false, false), "the worker has no time");
    }

    #[test]
    fn servers_are_known_by_their_processes() {
        let backlog = |process| Settings::of(process).map(|settings| settings.backlog);
        assert!(backlog("redis-server").unwrap().contains("tcp-backlog"));
        assert!(backlog("php-fpm8.2").unwrap().contains("listen.backlog"));
        assert!(backlog("python3").unwrap().contains("listen(N)"));
        assert_eq!(backlog("myserver"), None);
    }
}
