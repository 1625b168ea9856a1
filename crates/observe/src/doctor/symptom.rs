//! The account of symptoms: counters of failures that grew, calls that failed, packets that sockets dropped, queues that do not move. Rules
//! declare which symptoms their findings explain (`Draft::explains`); X01 reports what remains.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::slice;

use fourtuple_record::TraceSymptom;
use fourtuple_record::errno;
use fourtuple_record::snapshot::{
    Counter, FailedCall, Listener, Owner, Snapshot, TracedConnects, Tuple, UdpSocketView, Unanswered,
    UnansweredQueries, Unread,
};

use crate::doctor::accepting::{acceptors, drops, holders, is_at, kept_waiting, stopped, time};
use crate::doctor::attribute::is_own;
use crate::doctor::budget::Budget;
use crate::doctor::causes::{Noise, is_never_normal, may_be_symptom, row_of};
use crate::doctor::counters::COUNTERS;
use crate::doctor::datagram::{Counted, sockets_at};
use crate::doctor::draft::{Subject, What};
use crate::doctor::words::{callers, count, counted, process};

/// A symptom in a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Symptom<'a> {
    Counter {
        name: &'static str,
        counter: Counter,
    },
    /// Drops of a queueing discipline that passed on some packets.
    Qdisc {
        device: &'a str,
        kind: &'a str,
        drops: Counter,
        packets: u64,
    },
    Calls(&'a FailedCall),
    Drops {
        cookie: u64,
        socket: String,
    },
    /// The queue of a listener at an address; without a port it is a unix listener.
    Queue {
        cookie: u64,
        address: String,
        port: Option<u16>,
        owners: &'a [Owner],
    },
    Growth {
        tuple: Subject,
        seconds: u64,
    },
    /// Calls in another network namespace; the first is the most frequent of those that count.
    Elsewhere {
        pid: u32,
        calls: Vec<&'a FailedCall>,
    },
    /// Connects to a destination that a program closes before an answer, each of them.
    GivenUp {
        connects: &'a TracedConnects,
        /// The address of another family, at the same port, that answers the program.
        instead: Option<SocketAddr>,
    },
    /// Connections without an answer; `is_here`: the destination is this host.
    Unanswered {
        found: &'a Unanswered,
        is_here: bool,
    },
    /// Connections of a server of this host whose clients do not acknowledge its data.
    Unacknowledged {
        found: &'a Unanswered,
        port: u16,
        owners: &'a [Owner],
    },
    /// A process that does not read from its connections.
    Unread(&'a Unread),
    /// A UDP socket whose process is stopped, with datagrams.
    Datagrams(&'a UdpSocketView),
    /// DNS queries without an answer.
    Queries(&'a UnansweredQueries),
    /// Connections that a server closes without having read from them.
    TurnedAway {
        listener: &'a Listener,
        accepts: u64,
    },
}

/// A symptom with its events, and what no finding explains.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item<'a> {
    pub(crate) symptom: Symptom<'a>,
    /// Events during the interval.
    pub(crate) amount: u64,
    /// Events that no finding explains.
    pub(crate) rest: u64,
    /// Rules whose findings explain events.
    pub(crate) by: Vec<&'static str>,
    /// Addresses, of which that of the symptom is one, if calls or connects of several are one item, with the number that each stands for.
    addresses: BTreeMap<String, u32>,
    /// Processes of one name by a process that is known, as many as each stands for.
    processes: BTreeMap<u32, u32>,
    /// Fewer events than are a symptom: those of one program can be one together.
    is_faint: bool,
}

/// A symptom, and the events that no finding explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unexplained {
    /// The kind, without process and address: `connect EADDRNOTAVAIL`, `TcpExt.ListenOverflows`, `qdisc eth0 tbf`, `accept queue`.
    pub symptom: String,
    /// Name of the process; empty if the kernel does not tell it.
    pub process: String,
    /// Events during the interval.
    pub events: u64,
    /// The symptom in one line, with process, address and number of events.
    pub sentence: String,
}

/// All symptoms of a snapshot, also those that are above the noise of a healthy host only together with others (`rest`).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Account<'a> {
    snapshot: &'a Snapshot,
    pub(crate) items: Vec<Item<'a>>,
}

/// Calls that failed with an errno, the counters that count the same failures, and the events that a call stands for at most: the counters
/// are read before the calls are counted and after that, and a SYN is sent again several times.
const COUNTED_TOO: &[(&str, &str, &[&str], u64)] = &[
    ("connect", errno::ECONNREFUSED, &["Tcp.AttemptFails"], 2),
    ("connect", errno::ECONNRESET, &["Tcp.AttemptFails"], 2),
    ("connect", errno::EHOSTUNREACH, &["Tcp.AttemptFails"], 2),
    ("connect", errno::ENETUNREACH, &["Tcp.AttemptFails", "Ip.OutNoRoutes", "Ip6.OutNoRoutes"], 2),
    ("connect", errno::ETIMEDOUT, &["Tcp.AttemptFails", "TcpExt.TCPAbortOnTimeout"], 2),
    ("connect", errno::ETIMEDOUT, &["TcpExt.TCPSynRetrans"], 8),
    ("send", errno::ENETUNREACH, &["Ip.OutNoRoutes", "Ip6.OutNoRoutes"], 2),
    // The socket has an ICMP error, which the next datagram meets when it is built (sock_alloc_send_pskb in __ip_append_data).
    ("send", errno::ECONNREFUSED, &["Ip.OutDiscards", "Ip6.OutDiscards"], 2),
    ("send", errno::EHOSTUNREACH, &["Ip.OutDiscards", "Ip6.OutDiscards"], 2),
    ("send", errno::ENOBUFS, &["Udp.SndbufErrors", "Udp6.SndbufErrors"], 2),
    ("send", errno::ETIMEDOUT, &["TcpExt.TCPAbortOnTimeout"], 2),
    ("recv", errno::ETIMEDOUT, &["TcpExt.TCPAbortOnTimeout"], 2),
];

/// Addresses that fail for a program in the same way, each of which has a finding.
const MAX_APART: usize = 3;

/// Connections of a server of whose data clients have never acknowledged any, from which on that is a symptom.
const UNACKNOWLEDGED: u32 = 3;
/// Connections of a server without an acknowledgement that are a symptom if they are half of those that it has: its clients do not all go
/// at the same time, but a firewall forgets all of them.
const CUT: u32 = 10;
/// Connections with data that a process leaves unread, from which on that is a symptom.
const UNREAD: u32 = 3;
/// Connections with a request that waits though the process serves others: its threads do not suffice.
const WAITING: u32 = 10;
/// Connects without an answer that are a symptom: one SYN is lost now and then.
const GIVEN_UP: u64 = 3;

/// Connections closed unread that are a symptom.
const TURNED_AWAY: u64 = 5;

/// Time until the last port below which growth is a symptom. Connections that a program opens at its start grow, too.
const SOON_S: f64 = 60.0;

impl<'a> Account<'a> {
    /// Collects the symptoms of a snapshot. A part that was not read has none.
    pub(crate) fn of(snapshot: &'a Snapshot) -> Account<'a> {
        let mut account = Account { snapshot, items: Vec::new() };
        if let Ok(failures) = snapshot.failures.seen() {
            for call in failures.calls.iter().filter(|call| may_be_symptom(snapshot, call)) {
                account.add(Symptom::Calls(call), call.failed);
            }
            for found in &failures.elsewhere {
                let calls: Vec<&FailedCall> =
                    found.calls.iter().filter(|call| is_never_normal(snapshot, call)).collect();
                let amount = calls.iter().map(|call| call.failed).sum();
                account.add(Symptom::Elsewhere { pid: found.pid, calls }, amount);
            }
        }
        for row in COUNTERS {
            let Some(counter) = row.read(snapshot) else { continue };
            if row.noise.is_exceeded(snapshot, counter.during) {
                account.add(Symptom::Counter { name: row.name, counter }, counter.during);
            }
        }
        account.subtract_counted(snapshot);
        account.add_qdiscs(snapshot);
        account.add_sockets(snapshot);
        account.add_growth(snapshot);
        account.add_unanswered(snapshot);
        account.add_unread(snapshot);
        account.add_given_up(snapshot);
        account.add_queries(snapshot);
        account.add_turned_away(snapshot);
        account
    }

    /// Subtracts from the counters what failed calls and other counters say too, also those that are no symptom.
    fn subtract_counted(&mut self, snapshot: &Snapshot) {
        // tcp_validate_incoming counts the SYN in both.
        let challenges = snapshot.counter("TcpExt.TCPSYNChallenge").map_or(0, |counter| counter.during);
        self.explain("X01", &What::Counter("Tcp.InErrs"), challenges);
        for call in snapshot.failures.seen().map(|failures| failures.calls.as_slice()).unwrap_or_default() {
            let same = |row: &&(&str, &str, _, _)| (row.0, row.1) == (&*call.call, &*call.errno);
            for (_, _, counters, most) in COUNTED_TOO.iter().filter(same) {
                for counter in *counters {
                    self.explain("X01", &What::Counter(counter), call.failed.saturating_mul(*most));
                }
            }
        }
    }

    /// Adds drops that are more than 5 a second and 1% of the packets: a queue that is full now and then tells senders of TCP to slow down.
    fn add_qdiscs(&mut self, snapshot: &'a Snapshot) {
        for (name, &drops) in snapshot.counters.seen().into_iter().flatten() {
            let words = || name.strip_prefix("qdisc.")?.strip_suffix(".drops")?.rsplit_once('.');
            let Some((device, kind)) = words() else { continue };
            let packets = snapshot.counter(&format!("qdisc.{device}.{kind}.packets"));
            let packets = packets.map_or(0, |packets| packets.during);
            if !Noise::PerSecond(5.0).is_exceeded(snapshot, drops.during) || drops.during * 99 <= packets {
                continue;
            }
            // In front of the counters that it explains.
            let (symptom, amount) = (Symptom::Qdisc { device, kind, drops, packets }, drops.during);
            self.items.insert(0, Item::new(symptom, amount));
            // The same packets, where they were sent.
            for counter in ["Ip.OutDiscards", "Ip6.OutDiscards", "Udp.SndbufErrors", "Udp6.SndbufErrors"] {
                self.explain("X01", &What::Counter(counter), drops.during);
            }
        }
    }

    fn add_sockets(&mut self, snapshot: &'a Snapshot) {
        for listener in snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default() {
            let socket = || format!("the listener {} of {}", listener.address, acceptors(snapshot, listener));
            self.add(Symptom::Drops { cookie: listener.cookie, socket: socket() }, drops(snapshot, listener));
            if snapshot.interval_ns >= 1_000_000_000 {
                let queue = Symptom::Queue {
                    cookie: listener.cookie,
                    address: listener.address.to_string(),
                    port: Some(listener.address.port()),
                    owners: &listener.owners,
                };
                self.add(queue, kept_waiting(snapshot, listener));
            }
        }
        let unix = snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default();
        for listener in unix.iter().filter(|_| snapshot.interval_ns >= 1_000_000_000) {
            let (cookie, address) = (listener.cookie, listener.path.clone());
            let owners = &listener.owners;
            self.add(Symptom::Queue { cookie, address, port: None, owners }, listener.standing.into());
        }
        let sockets = snapshot.udp.seen().map(|udp| udp.sockets.as_slice()).unwrap_or_default();
        let during = |socket: &UdpSocketView| socket.drops.map_or(0, |drops| drops.during);
        if sockets.iter().map(during).sum::<u64>() <= Counted::of(snapshot).refused() {
            return;
        }
        for socket in sockets {
            let name = format!("the UDP socket {} of {}", socket.local, holders(&socket.owners));
            self.add(Symptom::Drops { cookie: socket.cookie, socket: name }, during(socket));
        }
    }

    fn add_growth(&mut self, snapshot: &'a Snapshot) {
        let Ok(connections) = snapshot.connections.seen() else { return };
        for tuple in &connections.tuples {
            let Ok(budget) = Budget::of(snapshot, tuple) else { continue };
            let left = f64::from(budget.total.saturating_sub(budget.taken()));
            let seconds = left / tuple.growth_per_s;
            if tuple.growth_per_s > 1.0 && seconds < SOON_S && !budget.is_bounded() {
                let ports = tuple.growth_per_s * snapshot.interval_ns as f64 / 1e9;
                let growth = Symptom::Growth { tuple: tuple.into(), seconds: seconds as u64 };
                self.add(growth, ports as u64);
            }
        }
    }

    /// Adds destinations that answer no SYNs, or no data. A single SYN is lost now and then, and one of the many hosts that a crawler or a
    /// proxy connects to may be down: one socket alone counts only if its process has no connection.
    fn add_unanswered(&mut self, snapshot: &'a Snapshot) {
        let Ok(connections) = snapshot.connections.seen() else { return };
        let established = |of: &dyn Fn(&Tuple) -> bool| {
            let tuples = connections.tuples.iter().filter(|tuple| of(tuple));
            tuples.filter_map(|tuple| tuple.states.get("established")).sum::<u64>()
        };
        let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
        for found in &connections.unanswered {
            if found.unsent > 0 {
                let again = match found.established {
                    true => u64::MAX,
                    false => snapshot.counter("TcpExt.TCPSynRetrans").map_or(0, |counter| counter.during),
                };
                self.explain("X01", &What::Counter("TcpExt.TCPRetransFail"), again);
            }
            if let Some(port) = found.service {
                // Clients go without a word at any time, most of them after they had data; a scanner leaves one connection.
                let services = connections.services.iter().filter(|service| service.port == port);
                let states = services.flat_map(|service| &service.states);
                let open: u64 =
                    states.filter(|(state, _)| *state != "time-wait").map(|(_, number)| number).sum();
                let none = found.none_acknowledged;
                let is_path = none >= UNACKNOWLEDGED && u64::from(none) * 100 >= open;
                let is_cut = found.sockets >= CUT && u64::from(found.sockets) * 2 >= open;
                if found.unsent > 0 || is_path || is_cut {
                    let listener = listeners.iter().find(|listener| listener.address.port() == port);
                    let owners = listener.map_or(&[][..], |listener| &listener.owners);
                    self.add(Symptom::Unacknowledged { found, port, owners }, found.sockets.into());
                }
                continue;
            }
            let there = established(&|tuple| tuple.destination == found.destination);
            let is_alone = found.sockets == 1;
            let has_others = found.owner.as_ref().is_none_or(|owner| {
                established(&|tuple| tuple.owners.iter().any(|of| of.pid == owner.pid)) > 0
            });
            if found.retransmits < 2
                || u64::from(found.sockets) * 10 < there
                || (found.established && is_alone && has_others)
            {
                continue;
            }
            let symptom = Symptom::Unanswered { found, is_here: is_own(snapshot, found.destination.ip()) };
            let amount = u64::from(found.sockets);
            if found.established {
                self.add(symptom, amount);
                continue;
            }
            // A call that failed for want of an answer says the same.
            let address = found.destination.to_string();
            let is_said = self.items.iter().any(|item| match item.symptom {
                Symptom::Calls(call) => {
                    call.call == "connect"
                        && [errno::ETIMEDOUT, errno::EHOSTUNREACH].contains(&&*call.errno)
                        && call.address.as_ref() == Some(&address)
                }
                _ => false,
            });
            if !is_said {
                self.items.push(Item { is_faint: is_alone, ..Item::new(symptom, amount) });
            }
            if !is_alone {
                self.explain_resent();
            }
        }
    }

    /// Adds processes that serve none of their connections, or have many requests waiting. One that sends on some may leave others unread
    /// because it has no place for their data, as a proxy in front of a slow server. Connections that it does not accept say the same (A07).
    fn add_unread(&mut self, snapshot: &'a Snapshot) {
        let Ok(connections) = snapshot.connections.seen() else { return };
        for unread in &connections.unread {
            let of_it = slice::from_ref(&unread.owner);
            let is_queue = |item: &Item<'_>| match &item.symptom {
                Symptom::Queue { port, owners, .. } => {
                    let is_its = |owner: &Owner| owner.pid == unread.owner.pid;
                    *port == Some(unread.port) && (owners.is_empty() || owners.iter().any(is_its))
                }
                _ => false,
            };
            let is_slow =
                unread.short >= WAITING || (unread.owner.sockets >= UNREAD && !serves_others(unread));
            if (is_slow || stopped(snapshot, of_it).is_some()) && !self.items.iter().any(is_queue) {
                self.add(Symptom::Unread(unread), unread.owner.sockets.into());
            }
        }
    }

    /// Adds destinations that answer none of several connects, if the program gives them up with a short time limit, or as programs do that try
    /// the addresses of a name at the same time (RFC 8305).
    fn add_given_up(&mut self, snapshot: &'a Snapshot) {
        let connects = snapshot.traced.seen().map(|traced| traced.connects.as_slice()).unwrap_or_default();
        let resent = snapshot.counter("TcpExt.TCPSynRetrans").map_or(0, |counter| counter.during);
        let is_faint = |of: &TracedConnects| {
            // Two are enough if SYNs were sent again: the only client of a destination makes no more in an interval.
            let is_waiting = of.failed.max(of.searches + of.given_port) >= 2 && resent >= 2;
            of.failed < GIVEN_UP && !is_waiting
        };
        for given_up in connects.iter().filter(|of| of.established == 0 && of.failed > 0) {
            let address = given_up.destination.to_string();
            let is_faint = is_faint(given_up);
            let is_said = self.items.iter().any(|item| match item.symptom {
                Symptom::Unanswered { found, .. } => {
                    found.destination == given_up.destination && (is_faint || !item.is_faint)
                }
                _ => false,
            });
            let failures = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
            let has_errno = failures
                .filter(|call| call.call == "connect")
                .any(|call| call.address.as_ref() == Some(&address));
            // Without the account of failed calls, a refusal cannot be told from no answer.
            if is_said || has_errno || snapshot.failures.seen().is_err() {
                continue;
            }
            let instead = connects.iter().find(|other| {
                let (own, other_to) = (given_up.destination, other.destination);
                other.owner.name == given_up.owner.name
                    && other.established > 0
                    && own.port() == other_to.port()
                    && own.is_ipv4() != other_to.is_ipv4()
            });
            let instead = instead.map(|other| other.destination);
            let symptom = Symptom::GivenUp { connects: given_up, instead };
            self.items.push(Item { is_faint, ..Item::new(symptom, given_up.failed) });
            if !is_faint {
                self.explain("X01", &What::Counter("Tcp.AttemptFails"), given_up.failed);
                // The socket of its last connect says the same.
                self.explain("X01", &What::Silent(given_up.destination), u64::MAX);
            }
        }
    }

    /// Adds DNS queries that have waited for a second or more, and UDP sockets of stopped processes. A socket of the server that drops
    /// datagrams says more (U01).
    fn add_queries(&mut self, snapshot: &'a Snapshot) {
        let Ok(udp) = snapshot.udp.seen() else { return };
        let drops = |server| {
            sockets_at(snapshot, server).filter_map(|socket| socket.drops).any(|drops| drops.during > 0)
        };
        let is_long = snapshot.interval_ns >= 1_000_000_000;
        for queries in udp.queries.iter().filter(|queries| is_long && !drops(queries.server)) {
            self.add(Symptom::Queries(queries), queries.sockets.into());
        }
        // Their queries, or drops, say more of a socket.
        let is_said = |at: &UdpSocketView| {
            at.drops.is_some_and(|drops| drops.during > 0)
                || udp
                    .queries
                    .iter()
                    .flat_map(|of| sockets_at(snapshot, of.server))
                    .any(|of| of.cookie == at.cookie)
        };
        let is_stopped = |at: &&UdpSocketView| at.queued_bytes > 0 && stopped(snapshot, &at.owners).is_some();
        for socket in udp.sockets.iter().filter(is_stopped).filter(|socket| !is_said(socket)) {
            self.add(Symptom::Datagrams(socket), socket.queued_bytes);
        }
    }

    /// Adds listeners whose programs close connections unread. A few are of scanners and of clients that a list excludes.
    fn add_turned_away(&mut self, snapshot: &'a Snapshot) {
        let (Ok(traced), Ok(listeners)) = (snapshot.accepts.seen(), snapshot.listeners.seen()) else {
            return;
        };
        for of in
            traced.turned_away.iter().filter(|of| of.closed >= TURNED_AWAY && of.closed * 10 >= of.accepts)
        {
            if let Some(listener) = listeners.iter().find(|listener| listener.cookie == of.listener) {
                self.add(Symptom::TurnedAway { listener, accepts: of.accepts }, of.closed);
            }
        }
    }

    fn add(&mut self, symptom: Symptom<'a>, amount: u64) {
        if amount > 0 {
            self.items.push(Item::new(symptom, amount));
        }
    }

    /// Returns the symptoms of which something remains.
    pub(crate) fn unexplained(&self) -> Vec<Unexplained> {
        let unexplained = |item: &Item<'_>| Unexplained {
            symptom: item.kind(),
            process: item.process().to_owned(),
            events: item.rest,
            sentence: item.sentence(),
        };
        self.rest().iter().map(unexplained).collect()
    }

    /// Returns the symptoms of which something remains. Calls and connects of processes of one name for one address are one symptom. So are
    /// those for several addresses of which none alone is one, or more than three are.
    pub(crate) fn rest(&self) -> Vec<Item<'a>> {
        let rest = self.items.iter().filter(|item| item.rest > 0).cloned();
        let (calls, items): (Vec<_>, Vec<_>) = rest.partition(|item| item.program().is_some());
        let mut by_address = joined(calls, |item| (item.program(), item.addresses.clone()));
        let mut addresses: BTreeMap<Option<String>, usize> = BTreeMap::new();
        for item in &mut by_address {
            if let Symptom::Calls(call) = item.symptom {
                let is_exceeded = row_of(call).noise.is_exceeded(self.snapshot, item.rest);
                // Calls for further addresses are a row, and no address of them has many.
                item.is_faint = call.addresses > 1 || (!is_exceeded && !self.is_retried(call, item.rest));
            }
            *addresses.entry(item.program()).or_default() += usize::from(!item.is_faint);
        }
        let is_apart = |item: &Item<'_>| !item.is_faint && addresses[&item.program()] <= MAX_APART;
        let (mut found, others_of_program): (Vec<_>, Vec<_>) = by_address.into_iter().partition(is_apart);
        let together = joined(others_of_program, Item::program).into_iter();
        let together: Vec<_> = together.filter(|item| self.is_together(item)).collect();
        let mut others = Account { snapshot: self.snapshot, items };
        for item in &together {
            match item.symptom {
                Symptom::Unanswered { .. } => others.explain_resent(),
                Symptom::GivenUp { .. } => {
                    others.explain("X01", &What::Counter("Tcp.AttemptFails"), item.rest)
                }
                _ => {}
            }
        }
        found.extend(together);
        found.sort_by_key(|item| Reverse(item.rest));
        found.extend(others.items.into_iter().filter(|item| item.rest > 0 && !item.is_faint));
        found
    }

    /// Subtracts from the counters what connects without an answer say too.
    fn explain_resent(&mut self) {
        for counter in ["TcpExt.TCPSynRetrans", "Tcp.AttemptFails"] {
            self.explain("X01", &What::Counter(counter), u64::MAX);
        }
    }

    /// Returns whether a program tries a server that is down or not reachable again and again: if it waits a second between two attempts, it
    /// has few failures.
    fn is_retried(&self, call: &FailedCall, failed: u64) -> bool {
        let Ok(traced) = self.snapshot.traced.seen() else { return false };
        let is_up = |connects: &TracedConnects| {
            connects.established > 0 && call.address == Some(connects.destination.to_string())
        };
        call.call == "connect"
            && [errno::ECONNREFUSED, errno::ENETUNREACH, errno::ENOENT].contains(&&*call.errno)
            && failed >= 2
            && !traced.connects.iter().any(is_up)
    }

    /// Returns whether events of a program that are few for each address are a symptom: of the hosts that a crawler or a proxy knows some are
    /// down.
    fn is_together(&self, item: &Item<'_>) -> bool {
        match item.symptom {
            _ if !item.is_faint => true,
            Symptom::Calls(call) => {
                row_of(call).noise.is_exceeded(self.snapshot, item.rest)
                    && (call.call != "connect" || item.rest * 10 >= self.succeeded(item))
            }
            Symptom::GivenUp { .. } => item.rest >= GIVEN_UP && item.rest >= self.succeeded(item),
            Symptom::Unanswered { .. } => {
                let open = self.open(item);
                open == 0 || (item.rest > 1 && item.rest * 10 >= open)
            }
            _ => false,
        }
    }

    /// Returns the connects of a program that have succeeded in the interval. Destinations that the trace does not list may all be its.
    fn succeeded(&self, item: &Item<'_>) -> u64 {
        let Ok(traced) = self.snapshot.traced.seen() else { return 0 };
        let sum = |is_counted: &dyn Fn(&&TracedConnects) -> bool| -> u64 {
            traced.connects.iter().filter(is_counted).map(|connects| connects.established).sum()
        };
        let others = sum(&|connects| connects.owner.name != item.process());
        traced.established.max(sum(&|_| true)) - others
    }

    /// Returns the open connections of a program, with those that the snapshot does not list.
    fn open(&self, item: &Item<'_>) -> u64 {
        let Ok(connections) = self.snapshot.connections.seen() else { return 0 };
        // Of a process that is not known each connection may be.
        let name = item.process();
        let is_its = |tuple: &&Tuple| name.is_empty() || tuple.owners.iter().any(|owner| owner.name == name);
        let its = connections.tuples.iter().filter(is_its).map(|tuple| &tuple.states);
        let all = its.chain([&connections.tuples_left_out_states]);
        all.filter_map(|states| states.get("established")).sum()
    }

    /// Returns the symptoms other than failed calls, and than counters that only say what the failed calls say.
    pub(crate) fn beside_calls(&self) -> Vec<TraceSymptom> {
        let rules = |item: &Item<'_>| {
            item.by.iter().filter(|rule| **rule != "X01").map(|rule| (*rule).to_owned()).collect()
        };
        let symptom = |item: Item<'_>| {
            let (amount, rules): (u64, Vec<String>) = (item.amount, rules(&item));
            let is_call = matches!(item.symptom, Symptom::Calls(_) | Symptom::Elsewhere { .. });
            let is_said = item.rest == 0 && rules.is_empty();
            (!is_call && !is_said)
                .then(|| TraceSymptom { sentence: Item { rest: amount, ..item }.sentence(), rules })
        };
        let explained = self.items.iter().filter(|item| item.rest == 0).cloned();
        self.rest().into_iter().chain(explained).filter_map(symptom).collect()
    }

    /// Returns the failed calls that are included.
    pub(crate) fn calls(&self, what: &What) -> impl Iterator<Item = &'a FailedCall> {
        self.items.iter().filter_map(move |item| match item.symptom {
            Symptom::Calls(call) if includes(what, &item.symptom) => Some(call),
            _ => None,
        })
    }

    /// Subtracts what a finding explains.
    pub(crate) fn explain(&mut self, rule: &'static str, what: &What, amount: u64) {
        let mut left = amount;
        for item in self.items.iter_mut().filter(|item| includes(what, &item.symptom)) {
            let explained = item.rest.min(left);
            if explained > 0 && !item.by.contains(&rule) {
                item.by.push(rule);
            }
            item.rest -= explained;
            // The counters are not read at the same moment as what explains them.
            if matches!(item.symptom, Symptom::Counter { .. })
                && explained > 0
                && item.rest * 10 <= item.amount
            {
                item.rest = 0;
            }
            left -= if left == u64::MAX { 0 } else { explained };
        }
    }
}

/// Returns items of which those with an equal key are one: that with most events, with the sums.
fn joined<'a, K: Ord>(items: Vec<Item<'a>>, key: impl Fn(&Item<'a>) -> K) -> Vec<Item<'a>> {
    let mut groups: BTreeMap<K, Item<'a>> = BTreeMap::new();
    for item in items {
        let key = key(&item);
        let joined = match groups.remove(&key) {
            Some(other) => other.with(item),
            None => item,
        };
        groups.insert(key, joined);
    }
    groups.into_values().collect()
}

impl<'a> Item<'a> {
    fn new(symptom: Symptom<'a>, amount: u64) -> Item<'a> {
        let one = |address: String| Some((address, 1));
        let (address, processes) = match &symptom {
            Symptom::Calls(call) => {
                let address = call.address.clone().map(|address| (address, call.addresses.max(1)));
                (address, [(call.owner.pid, call.processes)].into())
            }
            Symptom::GivenUp { connects: of, .. } => {
                (one(of.destination.to_string()), [(of.owner.pid, of.processes)].into())
            }
            Symptom::Unanswered { found, .. } => {
                let processes = found.owner.iter().map(|owner| (owner.pid, 1)).collect();
                (one(found.destination.to_string()), processes)
            }
            _ => (None, BTreeMap::new()),
        };
        let addresses = address.into_iter().collect();
        Item { symptom, amount, rest: amount, by: Vec::new(), addresses, processes, is_faint: false }
    }

    /// Returns the symptom with the events of another one of the same program.
    fn with(self, other: Item<'a>) -> Item<'a> {
        // Routes and holders of ports are looked up for the first of many calls only, and not for a row of further addresses.
        let weight = |item: &Item<'_>| match item.symptom {
            Symptom::Calls(call) if call.addresses > 1 => (false, 0),
            Symptom::Calls(call) => (call.route.is_some() || call.holder.is_some(), item.amount),
            _ => (false, item.amount),
        };
        let (mut most, less) = if weight(&other) > weight(&self) { (other, self) } else { (self, other) };
        most.amount += less.amount;
        most.rest += less.rest;
        most.by.extend(less.by);
        most.by.sort_unstable();
        most.by.dedup();
        most.addresses.extend(less.addresses);
        most.is_faint &= less.is_faint;
        for (process, number) in less.processes {
            let known = most.processes.entry(process).or_default();
            *known = number.max(*known);
        }
        most
    }

    /// Returns what calls or connects have in common if they can be one symptom.
    fn program(&self) -> Option<String> {
        let (kind, process) = (self.kind(), self.process());
        match self.symptom {
            Symptom::Calls(call) => {
                Some(format!("{kind} {} {} {process}", call.protocol, call.before_search))
            }
            Symptom::Unanswered { found, .. } if found.established => None,
            Symptom::Unanswered { .. } | Symptom::GivenUp { instead: None, .. } => {
                Some(format!("{kind} {process}"))
            }
            _ => None,
        }
    }

    /// Returns the number of processes of the program that have the symptom.
    pub(crate) fn processes(&self) -> u32 {
        self.processes.values().sum()
    }

    /// Returns `10.0.0.2:80`, or `7 addresses such as 10.0.0.2:80`.
    fn addresses(&self, such: &str) -> String {
        match self.addresses.values().sum() {
            0 | 1 => such.to_owned(),
            several => format!("{} such as {such}", counted(u64::from(several), "address")),
        }
    }

    /// Returns the symptom in one line, with the events that no finding explains.
    pub(crate) fn sentence(&self) -> String {
        let rest = self.rest;
        match &self.symptom {
            Symptom::Calls(call) => {
                let address = call.address.as_ref().map(|address| self.addresses(address));
                failed_calls(&FailedCall { processes: self.processes(), address, ..(*call).clone() }, rest)
            }
            Symptom::Counter { name, .. } => format!("{name} grew by {}", count(rest)),
            Symptom::Qdisc { device, kind, .. } => {
                format!("the queueing discipline {kind} of {device} dropped {}", counted(rest, "packet"))
            }
            Symptom::Drops { socket, .. } => format!("{socket} dropped {}", counted(rest, "packet")),
            Symptom::Queue { address, owners, .. } => format!(
                "{} at {address} of {} waited for accept() all the time",
                counted(rest, "connection"),
                holders(owners)
            ),
            Symptom::Elsewhere { calls, .. } => {
                let most = calls.first().map(|call| failed_calls(call, call.failed)).unwrap_or_default();
                let more = rest - calls.first().map_or(0, |call| call.failed);
                let more =
                    if more == 0 { String::new() } else { format!(", and {}", counted(more, "more call")) };
                format!("in another network namespace {most}{more}")
            }
            Symptom::Growth { tuple, .. } => format!("{tuple} took {}", counted(rest, "further port")),
            Symptom::GivenUp { connects, .. } => {
                let owner = callers(&connects.owner, self.processes());
                let what = if rest == 1 { "connect()" } else { "calls of connect()" };
                let to = self.addresses(&connects.destination.to_string());
                let what = format!("{} {what} of {owner} to {to}", count(rest));
                format!("{what} got no answer until the program closed the socket, and none succeeded")
            }
            Symptom::Unanswered { found, .. } => {
                let owner = found.owner.as_ref();
                let owner = owner.map_or_else(|| "a process".to_owned(), |of| callers(of, self.processes()));
                let to = self.addresses(&found.destination.to_string());
                let times = match self.addresses.len() {
                    1 => format!(" {}", counted(found.retransmits.into(), "time")),
                    _ => String::new(),
                };
                let what = match (found.established, rest) {
                    (false, 1) => "gets no answer: its SYN was",
                    (false, _) => "get no answer: their SYNs were",
                    (true, 1) => "gets no acknowledgement: its data was",
                    (true, _) => "get no acknowledgement: their data was",
                };
                format!("{} of {owner} to {to} {what} sent again{times}", counted(rest, "connection"))
            }
            Symptom::Unacknowledged { found, port, owners } => format!(
                "{} of {} at port {port} {} no acknowledgement from {}: the data was sent again {}",
                counted(rest, "connection"),
                holders(owners),
                if rest == 1 { "gets" } else { "get" },
                match rest {
                    1 => found.destination.ip().to_string(),
                    _ => format!("clients such as {}", found.destination.ip()),
                },
                counted(found.retransmits.into(), "time"),
            ),
            Symptom::Unread(unread) => {
                let (has, oldest) = (if rest == 1 { "has" } else { "have" }, time(unread.oldest_ns));
                let of = format!(
                    "{} of {} at port {}",
                    counted(rest, "connection"),
                    process(&unread.owner),
                    unread.port
                );
                format!("{of} {has} data that it has not read for up to {oldest}")
            }
            Symptom::Datagrams(socket) => format!(
                "the UDP socket {} of {} has {} of datagrams that it does not read",
                socket.local,
                holders(&socket.owners),
                counted(rest, "byte")
            ),
            Symptom::TurnedAway { listener, accepts } => {
                let all = counted((*accepts).max(rest), "connection");
                let (owners, at) = (holders(&listener.owners), listener.address);
                format!("{owners} closed {} of {all} at {at} without having read from them", count(rest))
            }
            Symptom::Queries(queries) => {
                let owner = queries.owner.as_ref().map_or_else(|| "a process".to_owned(), Owner::to_string);
                let has = if rest == 1 { "has" } else { "have" };
                let number = counted(rest, "DNS query");
                format!("{number} of {owner} to {} {has} had no answer for a second or more", queries.server)
            }
        }
    }

    /// Returns the kind of the symptom, which processes and addresses share.
    fn kind(&self) -> String {
        match &self.symptom {
            Symptom::Calls(call) => format!("{} {}", call.call, call.errno),
            Symptom::Counter { name, .. } => (*name).to_owned(),
            Symptom::Qdisc { device, kind, .. } => format!("qdisc {device} {kind}"),
            Symptom::Drops { .. } => "drops of sockets".to_owned(),
            Symptom::Queue { .. } => "accept queue".to_owned(),
            Symptom::Elsewhere { .. } => "calls in another network namespace".to_owned(),
            Symptom::Growth { .. } => "ports run out".to_owned(),
            Symptom::Unanswered { found, .. } if found.established => "data unanswered".to_owned(),
            Symptom::Unanswered { .. } => "connect unanswered".to_owned(),
            Symptom::Unacknowledged { .. } => "answers unacknowledged".to_owned(),
            Symptom::Unread(_) => "data unread".to_owned(),
            Symptom::Datagrams(_) => "datagrams unread".to_owned(),
            Symptom::GivenUp { .. } => "connect given up".to_owned(),
            Symptom::Queries(_) => "DNS unanswered".to_owned(),
            Symptom::TurnedAway { .. } => "connections turned away".to_owned(),
        }
    }

    fn process(&self) -> &str {
        match &self.symptom {
            Symptom::Calls(call) => &call.owner.name,
            Symptom::Elsewhere { calls, .. } => calls.first().map_or("", |call| &call.owner.name),
            Symptom::GivenUp { connects, .. } => &connects.owner.name,
            Symptom::Queue { owners, .. } | Symptom::Unacknowledged { owners, .. } => {
                owners.first().map_or("", |owner| &owner.name)
            }
            Symptom::Unanswered { found, .. } => found.owner.as_ref().map_or("", |owner| &owner.name),
            Symptom::TurnedAway { listener, .. } => listener.owners.first().map_or("", |owner| &owner.name),
            Symptom::Unread(unread) => &unread.owner.name,
            Symptom::Datagrams(socket) => socket.owners.first().map_or("", |owner| &owner.name),
            Symptom::Queries(queries) => queries.owner.as_ref().map_or("", |owner| &owner.name),
            _ => "",
        }
    }

    /// Returns a name that no other symptom of the snapshot has.
    pub(crate) fn subject(&self) -> String {
        match &self.symptom {
            Symptom::Calls(call) => format!(
                "{} {} {} {}",
                call.call,
                call.errno,
                call.owner,
                call.address.as_deref().unwrap_or("")
            ),
            Symptom::Counter { name, .. } => (*name).to_owned(),
            Symptom::Qdisc { device, kind, .. } => format!("drops of {kind} of {device}"),
            Symptom::Drops { cookie, .. } => format!("drops of socket {cookie:#x}"),
            Symptom::Queue { cookie, .. } => format!("queue of socket {cookie:#x}"),
            Symptom::Elsewhere { pid, .. } => format!("network namespace of process {pid}"),
            Symptom::Growth { tuple, .. } => tuple.to_string(),
            Symptom::Unanswered { found, .. } => format!("{} {}", self.kind(), found.destination),
            Symptom::Unacknowledged { port, .. } => format!("{} at port {port}", self.kind()),
            Symptom::Datagrams(socket) => format!("{} of socket {:#x}", self.kind(), socket.cookie),
            Symptom::Unread(unread) => format!("{} at port {} of {}", self.kind(), unread.port, unread.owner),
            Symptom::GivenUp { connects, .. } => format!("{} {}", self.kind(), connects.destination),
            Symptom::Queries(queries) => format!("{} {}", self.kind(), queries.server),
            Symptom::TurnedAway { listener, .. } => format!("closes unread of socket {:#x}", listener.cookie),
        }
    }
}

/// Returns whether the process has sent data on a connection since those that it does not read have had theirs.
pub(crate) fn serves_others(unread: &Unread) -> bool {
    unread.sent_ns < unread.oldest_ns
}

/// Returns `320 connect() of pgbouncer[812] to [::1]:6432 failed with EADDRNOTAVAIL`.
pub(crate) fn failed_calls(call: &FailedCall, number: u64) -> String {
    let process = callers(&call.owner, call.processes);
    let preposition = match call.call.as_str() {
        "connect" | "send" | "bind" => "to",
        "recv" => "from",
        _ => "at",
    };
    let address =
        call.address.as_ref().map_or_else(String::new, |address| format!(" {preposition} {address}"));
    format!("{} {}() of {process}{address} failed with {}", count(number), call.call, call.errno)
}

/// Returns whether a rule means this symptom.
fn includes(what: &What, symptom: &Symptom<'_>) -> bool {
    match (what, symptom) {
        (What::Counter(name), Symptom::Counter { name: counted, .. }) => name == counted,
        (What::Calls { call, errno, process, address }, Symptom::Calls(failed)) => {
            failed.call == *call
                && failed.errno == *errno
                && process.is_none_or(|process| process == failed.owner.pid)
                && address.as_ref().is_none_or(|address| {
                    // Of operations of io_uring only the process is known.
                    failed.address.as_ref().map_or(process.is_some(), |of| of == address)
                })
        }
        (What::Drops(cookie), Symptom::Drops { cookie: of, .. })
        | (What::Queue(cookie), Symptom::Queue { cookie: of, .. }) => cookie == of,
        (What::Growth(tuple), Symptom::Growth { tuple: growing, .. }) => tuple == growing,
        // A full table of tracked connections drops the packets of UDP as well, and those of one socket to one server collide.
        (What::Unanswered(None), Symptom::Queries(_)) => true,
        (What::Silent(destination), Symptom::Unanswered { found, .. }) => found.destination == *destination,
        (What::Unanswered(listener), Symptom::Unanswered { found, is_here }) if !found.established => {
            let to = found.destination;
            // Another host may have a server at the port, too.
            listener.is_none_or(|at| *is_here && is_at(at, to))
        }
        _ => false,
    }
}
