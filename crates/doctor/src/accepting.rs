//! Listeners, their SO_REUSEPORT groups and their processes, as several rules see them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::{Listener, Owner, Process, Snapshot};

use crate::draft::{Draft, Remedy};
use crate::words::process;

/// Returns the processes of a socket: `nginx[812]`, `nginx[812] and 3 more`.
pub(crate) fn holders(owners: &[Owner]) -> String {
    match owners {
        [] => "a process that is not visible".to_owned(),
        [only] => process(only),
        [first, rest @ ..] => format!("{} and {} more", process(first), rest.len()),
    }
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

/// Returns the first of the processes that a signal has stopped.
pub(crate) fn stopped<'a>(snapshot: &Snapshot, owners: &'a [Owner]) -> Option<&'a Owner> {
    owners.iter().find(|owner| process_of(snapshot, owner.pid).is_some_and(|process| process.state == 'T'))
}

/// Returns the SO_REUSEPORT groups: the listeners of each address that has several.
pub(crate) fn groups(listeners: &[Listener]) -> Vec<Vec<&Listener>> {
    let mut groups: BTreeMap<(SocketAddr, u32), Vec<&Listener>> = BTreeMap::new();
    for listener in listeners {
        groups.entry((listener.address, listener.interface)).or_default().push(listener);
    }
    groups.into_values().filter(|group| group.len() > 1).collect()
}

/// Returns a name of a listener that no other listener has.
pub(crate) fn subject(listener: &Listener) -> String {
    format!("{} (socket {:#x})", listener.address, listener.cookie)
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

/// Adds what helps a listener whose accept queue is too short or is emptied too slowly.
pub(crate) fn empty_faster(draft: Draft, snapshot: &Snapshot, listener: &Listener) -> Draft {
    let port = listener.address.port();
    let server = holders(&listener.owners);
    let somaxconn = snapshot.number("net.core.somaxconn").unwrap_or(u64::from(u32::MAX));
    let is_cut = u64::from(listener.backlog) >= somaxconn;
    let mut draft = match stopped(snapshot, &listener.owners) {
        Some(owner) => draft
            .because(format!("{} is stopped by a signal (state T)", process(owner)))
            .now(Remedy::unproven(format!("kill -CONT {}", owner.pid), "lets the process accept again")),
        None => draft,
    };
    draft = draft.now(Remedy::unproven(
        format!("fourtuple trace accept --port {port} --for 10s"),
        "shows how long connections wait, and which worker accepts how many",
    ));
    if is_cut {
        draft = draft.now(Remedy::unproven(
            format!("sysctl -w net.core.somaxconn={}", (somaxconn * 8).max(4096)),
            format!("a longer queue for bursts, after a restart of {server}: listen() reads the limit"),
        ));
    }
    let workers = "more workers, or no blocking work in the thread that calls accept()";
    let backlog = "nginx: `listen ... backlog=N`, HAProxy: `backlog N`, Python: `listen(N)`; the kernel cuts N to net.core.somaxconn";
    draft
        .proper(Remedy::advice(format!("{server}: {workers}"), "a queue that is emptied as fast as it fills"))
        .proper(Remedy::advice(
            format!("{server}: a greater backlog ({backlog})"),
            "room for bursts, not for overload",
        ))
}
