//! The processes of tuples and sources whose sockets belong to no process.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::{Owner, Part, Snapshot, Source, Tuple};

use crate::doctor::accepting::process_of;
use crate::doctor::budget::{Budget, state};
use crate::doctor::words::{caller, count, counted, process, rate, time};

/// Returns a copy of the snapshot in which tuples without a process have the processes that the tracer saw calling connect() to the same
/// destination, and sources without a process those that used it during the trace, each with 0 sockets; `None` if there is nothing to add. TIME_WAIT
/// sockets belong to no process, so that a tuple full of them has none.
pub fn with_callers(snapshot: &Snapshot) -> Option<Snapshot> {
    let connections = snapshot.connections.seen().ok()?;
    let is_known = |tuple: &Tuple| !tuple.owners.is_empty() || callers(snapshot, tuple).is_empty();
    let is_used = |source: &Source| !source.owners.is_empty() || users(snapshot, source.address).is_empty();
    if connections.tuples.iter().all(is_known) && connections.sources.iter().all(is_used) {
        return None;
    }
    let mut attributed = snapshot.clone();
    if let Part::Seen(connections) = &mut attributed.connections {
        for tuple in connections.tuples.iter_mut().filter(|tuple| tuple.owners.is_empty()) {
            tuple.owners = callers(snapshot, tuple);
        }
        for source in connections.sources.iter_mut().filter(|source| source.owners.is_empty()) {
            source.owners = users(snapshot, source.address).into_iter().map(|(owner, _)| owner).collect();
        }
    }
    Some(attributed)
}

/// Adds a process with 0 sockets, unless it is there.
fn add(known: &mut Vec<(Owner, String)>, owner: Owner, how: String) {
    if !known.iter().any(|(known, _)| is_same(known, &owner)) {
        known.push((Owner { sockets: 0, ..owner }, how));
    }
}

/// Returns whether two owners are one process, or the short processes of one name.
fn is_same(one: &Owner, other: &Owner) -> bool {
    one.pid == other.pid && (one.pid != 0 || one.name == other.name)
}

/// Returns the processes that use a source address whose sockets are all in TIME_WAIT, and how that is known: their bind() to it failed, or they
/// called connect() to a destination of its connections, first those that did so from a port of bind().
pub(crate) fn users(snapshot: &Snapshot, source: IpAddr) -> Vec<(Owner, String)> {
    let mut known = Vec::new();
    let calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    let is_bound = |address: &String| address.parse().is_ok_and(|address: SocketAddr| address.ip() == source);
    for call in calls.filter(|call| call.call == "bind" && call.address.as_ref().is_some_and(is_bound)) {
        let how = format!(
            "{} of bind() to {source} failed with {} during the trace",
            counted(call.failed, "call"),
            call.errno
        );
        add(&mut known, caller(&call.owner, call.processes), how);
    }
    let tuples = snapshot.connections.seen().map(|all| all.tuples.as_slice()).unwrap_or_default();
    let of_source: Vec<SocketAddr> =
        tuples.iter().filter(|tuple| tuple.source == source).map(|tuple| tuple.destination).collect();
    let connects = snapshot.traced.seen().map(|traced| traced.connects.as_slice()).unwrap_or_default();
    let mut connects: Vec<_> =
        connects.iter().filter(|connects| of_source.contains(&connects.destination)).collect();
    connects.sort_by_key(|connects| connects.given_port == 0);
    for connects in connects {
        let how = format!("it called connect() to {} during the trace", connects.destination);
        add(&mut known, caller(&connects.owner, connects.processes), how);
    }
    known
}

/// Returns why the process of a source address is not known, and the processes that may be it, with what speaks for each: sockets bound to the
/// address, connections to its destinations from another address, or that no other process has sockets of TCP.
pub(crate) fn unknown_user(snapshot: &Snapshot, source: IpAddr) -> (String, Vec<(Owner, String)>) {
    let Ok(connections) = snapshot.connections.seen() else { return Default::default() };
    let of_source = || connections.tuples.iter().filter(|tuple| tuple.source == source);
    let is_left_behind =
        of_source().all(|tuple| state(tuple, "time-wait") == tuple.states.values().sum::<u64>());
    let calls = match (snapshot.traced.seen(), snapshot.failures.seen()) {
        (Ok(_), Ok(_)) => "the trace saw no connect() and no failed bind() for it".to_owned(),
        (Err(reason), _) | (_, Err(reason)) => format!("calls were not traced ({reason})"),
    };
    let sockets = match (is_left_behind, connections.processes_hidden) {
        (true, _) => "its sockets are in TIME_WAIT, which belong to no process",
        (false, 0) => "no visible process holds its sockets",
        (false, _) => "the processes of other users are not visible",
    };
    let why = format!("the process that uses {source} is not known: {sockets}, and {calls}");
    let mut known = Vec::new();
    let held = connections.held.iter().filter(|held| held.address == source);
    for (owner, held) in held.filter_map(|held| Some((held.owner.clone()?, held))) {
        add(&mut known, owner, format!("it holds {source}:{}", held.port));
    }
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
    for listener in listeners.iter().filter(|listener| listener.address.ip() == source) {
        for owner in &listener.owners {
            add(&mut known, owner.clone(), format!("it listens at {}", listener.address));
        }
    }
    for destination in of_source().map(|tuple| tuple.destination) {
        let others = connections.tuples.iter();
        let others = others.filter(|other| other.destination == destination && other.source != source);
        for (owner, other) in others.flat_map(|other| other.owners.iter().map(move |owner| (owner, other))) {
            let sockets = counted(owner.sockets.into(), "connection");
            add(
                &mut known,
                owner.clone(),
                format!("it has {sockets} from {} to {destination}", other.source),
            );
        }
    }
    if known.is_empty() && connections.processes_hidden == 0 {
        let all = listeners.iter().flat_map(|listener| &listener.owners);
        let all = all.chain(connections.tuples.iter().flat_map(|tuple| &tuple.owners));
        let all = all.chain(connections.services.iter().flat_map(|service| &service.workers));
        let mut all = all.chain(connections.held.iter().filter_map(|held| held.owner.as_ref()));
        if let Some(first) = all.next().filter(|first| first.pid != 0)
            && all.all(|owner| owner.pid == first.pid)
        {
            let how = "no other process of this network namespace has sockets of TCP".to_owned();
            add(&mut known, first.clone(), how);
        }
    }
    (why, known)
}

/// Returns the processes of this namespace that have to do with a destination, and how that is known: open connections, then calls that a trace saw.
pub(crate) fn processes_to(snapshot: &Snapshot, destination: SocketAddr) -> Vec<(Owner, String)> {
    let mut known = Vec::new();
    let tuples = snapshot.connections.seen().map(|all| all.tuples.as_slice()).unwrap_or_default();
    let tuples = tuples.iter().filter(|tuple| tuple.destination == destination);
    for owner in tuples.flat_map(|tuple| &tuple.owners).filter(|owner| owner.sockets > 0) {
        add(
            &mut known,
            owner.clone(),
            format!("it has {} to {destination}", counted(owner.sockets.into(), "connection")),
        );
    }
    for connects in snapshot.traced.seen().into_iter().flat_map(|traced| &traced.connects) {
        if connects.destination == destination {
            let how = format!("it called connect() to {destination} during the trace");
            add(&mut known, caller(&connects.owner, connects.processes), how);
        }
    }
    let address = destination.to_string();
    for call in snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls) {
        if call.address.as_ref() == Some(&address) && matches!(call.call.as_str(), "connect" | "send") {
            let how = format!(
                "{} of {}() to {destination} failed with {} during the trace",
                counted(call.failed, "call"),
                call.call,
                call.errno
            );
            add(&mut known, caller(&call.owner, call.processes), how);
        }
    }
    known
}

/// Returns the processes that called connect() to the destination of a tuple, the one with the most calls first.
fn callers(snapshot: &Snapshot, tuple: &Tuple) -> Vec<Owner> {
    let connects = snapshot.traced.seen().into_iter().flat_map(|traced| &traced.connects);
    let connects =
        connects.map(|connects| (caller(&connects.owner, connects.processes), connects.destination));
    let failed = snapshot.failures.seen().into_iter().flat_map(|failures| failures.without_port());
    let failed = failed.map(|(call, destination)| (caller(&call.owner, call.processes), destination));
    let mut owners: Vec<Owner> = Vec::new();
    for (owner, destination) in connects.chain(failed) {
        if destination == tuple.destination && !owners.iter().any(|known| is_same(known, &owner)) {
            owners.push(Owner { sockets: 0, ..owner });
        }
    }
    owners
}

/// Returns a sentence about a tuple whose sockets are all in TIME_WAIT: that they belong to no process, and which processes have to do
/// with its destination. `None` for other tuples.
pub(crate) fn left_behind(snapshot: &Snapshot, tuple: &Tuple) -> Option<String> {
    let sockets: u64 = tuple.states.values().sum();
    if sockets == 0 || state(tuple, "time-wait") < sockets {
        return None;
    }
    let destination = tuple.destination;
    let mut known: Vec<String> = Vec::new();
    if let Some(caller) = tuple.owners.first() {
        known.push(format!("{} called connect() to {destination} during the trace", process(caller)));
    }
    let others = snapshot.connections.seen().map(|all| all.tuples.as_slice()).unwrap_or_default();
    let others =
        others.iter().filter(|other| other.destination == destination && other.source != tuple.source);
    let others =
        others.filter_map(|other| Some((other.owners.first().filter(|its| its.sockets > 0)?, other)));
    known.extend(others.take(2).map(|(owner, other)| {
        let sockets = counted(owner.sockets.into(), "connection");
        format!("{} has {sockets} from {} to {destination}", process(owner), other.source)
    }));
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
    let serves = |address: &SocketAddr| {
        *address == destination
            || address.port() == destination.port()
                && address.ip().is_unspecified()
                && is_local(snapshot, tuple)
    };
    let server = listeners.iter().find(|listener| serves(&listener.address));
    known.extend(
        server
            .and_then(|listener| listener.owners.first())
            .map(|owner| format!("{} listens at {destination}, on this host", process(owner))),
    );
    if tuple.owners.is_empty() && known.is_empty() {
        known.push(format!("no visible process has a connection to {destination} now"));
    }
    let known = known.join("; ");
    Some(format!("all of the sockets are in TIME_WAIT, which belong to no process; {known}"))
}

/// Open connections whose number grows, or has grown until no port was left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// Half of the connections have been idle for this time or longer, in seconds: they seem to be a leak. `None`: they are used.
    pub(crate) idle_s: Option<f64>,
    /// More connections per second: now, or on average if no port is left for more.
    pub(crate) per_s: f64,
    /// Descriptors that the process has left, and its limit; `None`: not known or without a limit.
    pub(crate) descriptors: Option<(u64, u64)>,
}

/// The processes that connect to a destination, as a finding names them.
#[derive(Clone, Debug)]
pub(crate) struct Callers {
    /// The process for commands: that with the most connections, or the parent of many.
    pub(crate) owner: Owner,
    /// Whether they are many with some connections each, such as the workers of php-fpm or the children of socat. No command about one of them
    /// helps then.
    pub(crate) are_many: bool,
    name: String,
}

/// The name of processes that are not known.
const HOST: &str = "this host";

/// Number of processes of a name from which they count as many.
const MANY: usize = 3;

impl Callers {
    /// `None`: no process is known.
    pub(crate) fn of(snapshot: &Snapshot, tuple: &Tuple) -> Option<Callers> {
        let first = tuple.owners.first()?;
        let held: u32 = tuple.owners.iter().map(|owner| owner.sockets).sum();
        let alike = || tuple.owners.iter().filter(|owner| owner.name == first.name && owner.pid != 0);
        if first.pid == 0 || first.sockets * 2 >= held || alike().count() < MANY {
            return Some(Callers { owner: first.clone(), are_many: false, name: process(first) });
        }
        // Of those whose parent was read, which are those with the most connections.
        let roots = alike().filter_map(|owner| {
            let process = process_of(snapshot, owner.pid)?;
            let has_same_name = *process.parent_name.as_ref()? == first.name;
            Some(if has_same_name { process.parent } else { process.pid })
        });
        let roots: BTreeSet<u32> = roots.collect();
        Some(match roots.first() {
            Some(root) if roots.len() == 1 => {
                let owner = Owner { pid: *root, ..first.clone() };
                Callers { name: format!("{} (with its children)", process(&owner)), owner, are_many: true }
            }
            _ => Callers {
                owner: first.clone(),
                are_many: true,
                name: format!("{} (several processes)", first.name),
            },
        })
    }

    /// Returns whether they can have closed the sockets in TIME_WAIT that are counted: they have connections, the trace saw them connect, or the
    /// process is older than what is counted. A process whose connect() only fails may have found the ports taken.
    fn have_closed(&self, snapshot: &Snapshot, tuple: &Tuple) -> bool {
        let connects = snapshot.traced.seen().into_iter().flat_map(|traced| &traced.connects);
        let mut connects = connects.filter(|connects| connects.destination == tuple.destination);
        let failures = snapshot.failures.seen().into_iter().flat_map(|failures| failures.without_port());
        let mut failures = failures.filter(|(_, destination)| *destination == tuple.destination);
        self.owner.sockets > 0
            || connects.any(|connects| {
                connects.established > 0 && is_same(&caller(&connects.owner, connects.processes), &self.owner)
            })
            || failures.any(|(call, _)| {
                let is_older = call.running_ns.is_some_and(|ns| ns >= tuple.closing_ns);
                is_older && is_same(&caller(&call.owner, call.processes), &self.owner)
            })
    }

    /// Returns who closed what of a tuple, and who else connects to its destination.
    pub(crate) fn closed(snapshot: &Snapshot, tuple: &Tuple, budget: &Budget) -> String {
        let closed = budget.closed();
        match Callers::of(snapshot, tuple) {
            Some(callers) if callers.have_closed(snapshot, tuple) => format!("{callers} {closed}"),
            Some(callers) => format!("{HOST} {closed}; {callers} calls connect()"),
            None => format!("{HOST} {closed}"),
        }
    }

    /// Returns the name of those that closed the sockets in TIME_WAIT of a tuple: the processes, if they can have, or the host.
    pub(crate) fn closers(snapshot: &Snapshot, tuple: &Tuple) -> String {
        let callers = Callers::of(snapshot, tuple).filter(|callers| callers.have_closed(snapshot, tuple));
        callers.map_or_else(|| HOST.to_owned(), |callers| callers.to_string())
    }

    /// Returns their name, or that of the host.
    pub(crate) fn name(snapshot: &Snapshot, tuple: &Tuple) -> String {
        Callers::of(snapshot, tuple).map_or_else(|| HOST.to_owned(), |callers| callers.to_string())
    }
}

impl fmt::Display for Callers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)
    }
}

/// Connections that have been idle for less may be used again.
const MIN_IDLE_S: f64 = 5.0;

impl Growth {
    /// Returns the growth of a tuple whose ports nearly all are in ESTABLISHED. It is a leak if half of them have been idle for
    /// [`MIN_IDLE_S`] or longer: a pool whose connections are used, or whose size is constant, is none.
    pub(crate) fn of(snapshot: &Snapshot, tuple: &Tuple, budget: &Budget) -> Option<Growth> {
        let idle = tuple.idle?;
        let is_open = state(tuple, "established") * 10 >= u64::from(tuple.in_use) * 9;
        let grows = budget.growth_per_s.is_some_and(|growth| growth > 0.0);
        if !is_open || !(grows || budget.is_full()) {
            return None;
        }
        let idle_s = Some(idle.median_ns as f64 / 1e9).filter(|idle_s| *idle_s >= MIN_IDLE_S);
        let mean = f64::from(tuple.in_use) / (idle.longest_ns as f64 / 1e9);
        let per_s = budget.growth_per_s.filter(|growth| *growth > 0.0).unwrap_or(mean);
        // The limit of one of many processes says nothing of them all.
        let callers = Callers::of(snapshot, tuple).filter(|callers| !callers.are_many);
        let process = callers.and_then(|callers| process_of(snapshot, callers.owner.pid));
        let descriptors = process.and_then(|process| {
            let limit = process.descriptor_limit?;
            Some((limit.saturating_sub(process.descriptors.into()), limit))
        });
        Some(Growth { idle_s, per_s, descriptors })
    }

    /// Returns what the idle times mean, if the connections seem to be a leak.
    pub(crate) fn leak(&self) -> Option<String> {
        let idle = time(self.idle_s?);
        Some(format!("seems to leak connections: half of them have carried no data for {idle} or longer"))
    }

    /// Returns how long more ports last, and why: `12 s at 165/s`.
    pub(crate) fn lasts(&self, ports: u32) -> String {
        let time = |number: f64| time(number / self.per_s);
        let at = rate(self.per_s);
        match self.descriptors {
            Some((left, limit)) if left < ports.into() => format!(
                "{} at {at}: then the process has no descriptor left of {} (RLIMIT_NOFILE, EMFILE)",
                time(left as f64),
                count(limit)
            ),
            _ => format!("{} at {at}", time(ports.into())),
        }
    }
}

/// Why most ports of a tuple stay in use, if more ports would stay so too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stuck {
    /// SYN_SENT: the peer does not answer SYNs, which were sent again.
    Opening,
    /// FIN_WAIT_1, CLOSING, LAST_ACK: the peer does not answer the FIN of this side. One that answers ends these states in a round trip.
    Closing,
    /// FIN_WAIT_2: this side has closed, and the peer has not.
    Peer,
    /// CLOSE_WAIT: the peer has closed, and the program has not.
    Program,
}

impl Stuck {
    /// Returns the reason that most ports have, and how many have it.
    pub(crate) fn of(snapshot: &Snapshot, tuple: &Tuple) -> Option<(Stuck, u64)> {
        let unanswered = &snapshot.connections.seen().ok()?.unanswered;
        let resent = unanswered.iter().find(|of| !of.established && of.destination == tuple.destination);
        let resent = resent.map_or(0, |of| u64::from(of.sockets));
        let closing = ["fin-wait-1", "closing", "last-ack"].map(|name| state(tuple, name)).iter().sum();
        let reasons = [
            (Stuck::Opening, state(tuple, "syn-sent").min(resent)),
            (Stuck::Closing, closing),
            (Stuck::Peer, state(tuple, "fin-wait-2")),
            (Stuck::Program, state(tuple, "close-wait")),
        ];
        reasons.into_iter().find(|(_, sockets)| sockets * 2 > u64::from(tuple.in_use))
    }

    /// Returns whether the peer does not answer.
    pub(crate) fn is_silent(self) -> bool {
        matches!(self, Stuck::Opening | Stuck::Closing)
    }
}

/// Returns whether the peer of a tuple is this host.
pub(crate) fn is_local(snapshot: &Snapshot, tuple: &Tuple) -> bool {
    is_own(snapshot, tuple.destination.ip())
}

/// Returns whether an address is one of this host.
pub(crate) fn is_own(snapshot: &Snapshot, address: IpAddr) -> bool {
    let addresses = snapshot.addresses.seen().map(Vec::as_slice).unwrap_or_default();
    address.is_loopback() || addresses.iter().any(|local| local.address == address)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use fourtuple_record::snapshot::{Connections, FailedCall, Failures, Traced, TracedConnects};

    use super::*;

    /// Returns a tuple whose hundred ports are in TIME_WAIT.
    pub(in crate::doctor) fn full_tuple(port: u16, owners: Vec<Owner>) -> Tuple {
        Tuple {
            source: [10, 0, 0, 1].into(),
            destination: ([10, 0, 0, 2], port).into(),
            in_use: 100,
            low_parity: 50,
            states: BTreeMap::from([("time-wait".to_owned(), 100)]),
            owners,
            ..Tuple::default()
        }
    }

    #[test]
    fn callers_of_connect_own_a_tuple_without_a_process() {
        let owner = |pid| Owner { pid, name: "nginx".to_owned(), sockets: 7 };
        let failed = |pid, port| FailedCall {
            call: "connect".to_owned(),
            errno: "EADDRNOTAVAIL".to_owned(),
            protocol: "tcp".to_owned(),
            owner: owner(pid),
            processes: 1,
            address: Some(format!("10.0.0.2:{port}")),
            failed: 3,
            ..FailedCall::default()
        };
        let tuples =
            vec![full_tuple(80, Vec::new()), full_tuple(81, vec![owner(3)]), full_tuple(82, Vec::new())];
        let calls = vec![failed(1, 80), failed(1, 80), failed(2, 80), failed(1, 81)];
        let mut snapshot = Snapshot {
            connections: Part::Seen(Connections { tuples, ..Connections::default() }),
            ..Snapshot::default()
        };
        assert_eq!(with_callers(&snapshot), None, "nothing was traced");
        snapshot.failures = Part::Seen(Failures { calls, ..Failures::default() });
        let attributed = with_callers(&snapshot).unwrap();
        let owners = |index: usize| {
            let owners = &attributed.connections.seen().unwrap().tuples[index].owners;
            owners.iter().map(|owner| (owner.pid, owner.sockets)).collect::<Vec<_>>()
        };
        assert_eq!((owners(0), owners(1), owners(2)), (vec![(1, 0), (2, 0)], vec![(3, 7)], vec![]));
        // Connections are closed by a process that had some, or that is older than what is counted.
        let closer = |running_ns, established| {
            let mut snapshot = with_callers(&snapshot).unwrap();
            if let (Part::Seen(failures), Part::Seen(connections)) =
                (&mut snapshot.failures, &mut snapshot.connections)
            {
                failures.calls[0].running_ns = running_ns;
                connections.tuples[0].closing_ns = 9;
            }
            let connects = vec![TracedConnects {
                owner: owner(1),
                processes: 1,
                destination: ([10, 0, 0, 2], 80).into(),
                established,
                ..TracedConnects::default()
            }];
            snapshot.traced = Part::Seen(Traced { connects, ..Traced::default() });
            Callers::closers(&snapshot, &snapshot.connections.seen().unwrap().tuples[0])
        };
        assert_eq!([closer(None, 0), closer(Some(8), 0)], ["this host", "this host"]);
        assert_eq!([closer(Some(9), 0), closer(Some(8), 1)], ["nginx[1]", "nginx[1]"]);
        let known = processes_to(&snapshot, ([10, 0, 0, 2], 81).into());
        let how: Vec<_> = known.iter().map(|(owner, how)| (owner.pid, how.as_str())).collect();
        let failed = "3 calls of connect() to 10.0.0.2:81 failed with EADDRNOTAVAIL during the trace";
        assert_eq!(how, [(3, "it has 7 connections to 10.0.0.2:81"), (1, failed)]);
    }
}
