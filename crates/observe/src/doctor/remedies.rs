//! Remedies that several rules share.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fourtuple_record::snapshot::{
    EphemeralPorts, FailedCall, LocalAddress, Owner, Part, RunningFix, Snapshot, Source, Traced,
    TracedConnects, Tuple, merged,
};

use crate::doctor::attribute::{Callers, Growth, Stuck};
use crate::doctor::budget::{Budget, TIME_WAIT_SECONDS, delay_s};
use crate::doctor::causes::{Judged, is_taken, judged, timed_out};
use crate::doctor::command::{Cure, Scope, Setting};
use crate::doctor::draft::{Draft, Remedy};
use crate::doctor::words::{caller, count, counted, process, rate, time};

/// Ports of Kubernetes services (--service-node-port-range of kube-apiserver).
pub(crate) const NODE_PORTS: (u16, u16) = (30_000, 32_767);
pub(crate) const RANGE: &str = "net.ipv4.ip_local_port_range";
/// The kernel's default range, and its ports.
pub(crate) const DEFAULT_RANGE: &str = "32768 60999";
pub(crate) const DEFAULT_PORTS: u32 = 28_232;
const RESERVED: &str = "net.ipv4.ip_local_reserved_ports";
/// Maximum number of blocks of reserved ports in a command.
const MAX_BLOCKS: usize = 40;

/// Adds what gives a tuple more ports, or ports sooner again.
pub(crate) fn more_ports(mut draft: Draft, snapshot: &Snapshot, tuple: &Tuple) -> Draft {
    let budget = Budget::of(snapshot, tuple).ok();
    let growth = budget.and_then(|budget| Growth::of(snapshot, tuple, &budget));
    if let Some(growth) = growth.filter(|growth| growth.idle_s.is_some()) {
        return end_leak(draft, snapshot, tuple, &growth);
    }
    if let Some(stuck) = Stuck::of(snapshot, tuple) {
        return free(draft, snapshot, tuple, stuck);
    }
    draft = draft.because_if(running_fix(tuple));
    // First what a file of sysctl.d(5) keeps.
    draft.now.extend(reuse(snapshot, tuple));
    draft.now.extend(more_sources(snapshot, tuple));
    draft.now.extend(wider_range(snapshot, Some(tuple)));
    draft.proper.extend(printed(snapshot, tuple));
    if budget.is_some_and(|budget| budget.time_wait * 2 > budget.in_use) {
        draft = draft.proper(keep_connections(tuple));
    }
    draft.proper(Remedy::advice(
        "more source addresses (`ip addr add`), or more addresses or ports of the destination",
        "each pair of addresses and destination port has the whole range",
    ))
}

/// Adds what ends a leak of connections: more ports only postpone the end.
fn end_leak(mut draft: Draft, snapshot: &Snapshot, tuple: &Tuple, leak: &Growth) -> Draft {
    let callers = Callers::of(snapshot, tuple);
    let name = callers.as_ref().map_or_else(|| "the process".to_owned(), Callers::to_string);
    let are_many = callers.as_ref().is_some_and(|callers| callers.are_many);
    let of_process = callers.filter(|callers| callers.owner.pid != 0 && !callers.are_many);
    let of_process =
        of_process.map_or(String::new(), |callers| format!(" | grep pid={},", callers.owner.pid));
    let to = quoted(tuple.destination);
    draft = draft
        .because_first("more ports do not end a leak: they postpone the failure")
        .now(Remedy::other(
            Scope::Namespace,
            format!("ss -tnpoi state established dst {to}{of_process}"),
            "lists the connections with their descriptors; lastsnd and lastrcv are their idle times in ms",
        ))
        .now(Remedy::advice(
            format!("restart {name}"),
            format!("frees the ports for {}", time(f64::from(tuple.in_use) / leak.per_s)),
        ));
    draft.now.extend(wider_range(snapshot, Some(tuple)));
    let pool = match are_many {
        true => "each process has its own: fewer processes, or a pool for all of them (a proxy)",
        false => "limit the size and the idle time of its pool",
    };
    draft.proper(Remedy::advice(
        format!("in {name}: close connections that are no longer needed, also on error paths; {pool}"),
        "no timer of the kernel ends an open connection",
    ))
}

/// Adds what frees ports that stay in use for another reason than their number.
fn free(mut draft: Draft, snapshot: &Snapshot, tuple: &Tuple, (stuck, sockets): (Stuck, u64)) -> Draft {
    let to = tuple.destination;
    let callers = Callers::of(snapshot, tuple);
    let name = callers.as_ref().map_or_else(|| "the process".to_owned(), Callers::to_string);
    let why = match stuck {
        Stuck::Opening | Stuck::Closing => format!("wait for an answer of {to}"),
        Stuck::Peer => format!("wait until {to} closes its side, too (FIN_WAIT_2)"),
        Stuck::Program => format!("wait for close() of {name}: the peer has closed (CLOSE_WAIT)"),
    };
    draft
        .evidence
        .insert(0, format!("more ports do not help: {} of them {why}, and more would", count(sockets)));
    let list = |state: &str, effect: &str| {
        Remedy::other(Scope::Namespace, format!("ss -tnpo state {state} dst {}", quoted(to)), effect)
    };
    match stuck {
        Stuck::Opening => {
            let owner = callers.map(|callers| callers.owner).unwrap_or_default();
            let call = timed_out(&owner, 1, to, sockets);
            let judgement = judged(snapshot, &call, &[]);
            draft.evidence.extend(judgement.facts(snapshot, &call));
            draft.proper.extend(judgement.cures(snapshot, &call));
            draft.now(list("syn-sent", "the connections, and when their SYN is sent again")).proper(Remedy::advice(
                "in the program: a time limit for connect(), and fewer attempts at a time to a server that does not answer",
                "a port is free when the attempt ends; the kernel tries for two minutes (net.ipv4.tcp_syn_retries)",
            ))
        }
        Stuck::Closing => {
            let effect = "what the program has closed and nobody answers ends after seconds, not minutes; that of now with its next retransmission";
            draft
                .because("possible: the host is down, or a firewall drops the packets or has forgotten the connections")
                .now(Remedy::sysctl("net.ipv4.tcp_orphan_retries", "3", effect).unproven())
        }
        Stuck::Peer => {
            let now = snapshot.number("net.ipv4.tcp_fin_timeout").unwrap_or(60);
            let effect = format!(
                "what the program has closed is free after 10 s, not {now}; that of now keeps its time"
            );
            let shorter = Remedy::sysctl("net.ipv4.tcp_fin_timeout", "10", effect).unproven();
            draft.now.extend((now > 10).then_some(shorter));
            draft.proper(Remedy::advice(
                format!("in the server at {to}: close() when recv() returns 0; its sockets are in CLOSE_WAIT, and `fourtuple doctor` there names them (T07)"),
                "both sides are closed, and the port is free after TIME_WAIT",
            ))
        }
        Stuck::Program => draft
            .now(list("close-wait", "the connections with their descriptors"))
            .now(Remedy::advice(format!("restart {name}"), "frees the ports, until as many wait again"))
            .proper(close_after_peer(&name)),
    }
}

/// The change in a program that does not close what its peers have closed.
pub(crate) fn close_after_peer(program: &str) -> Remedy {
    Remedy::advice(
        format!(
            "in {program}: close() when read() returns 0, also on error paths and for idle connections of a pool"
        ),
        "no timer of the kernel ends CLOSE_WAIT",
    )
}

/// Connections that carry more than one request.
pub(crate) fn keep_connections(tuple: &Tuple) -> Remedy {
    let program = tuple.owners.first().map(|owner| owner.name.as_str()).unwrap_or_default();
    let how = match print_name(program) {
        Some("nginx") => {
            "keep connections: `keepalive N;` in the upstream, `proxy_http_version 1.1;`, `proxy_set_header Connection \"\";`"
        }
        Some("haproxy") => {
            "keep connections: `http-reuse always`, and no `option httpclose` or `option http-server-close`"
        }
        Some("envoy") => {
            "keep connections: no max_requests_per_connection in the cluster; HTTP/2 to the upstream"
        }
        Some("python") => {
            "keep connections: one Session (requests), Client (httpx) or PoolManager (urllib3) for all requests"
        }
        _ => "keep connections: reuse each for many requests (HTTP keep-alive, a connection pool, HTTP/2)",
    };
    Remedy::advice(how, format!("fewer connections to {}, and so fewer in TIME_WAIT", tuple.destination))
}

/// `fourtuple fix ports` with the other addresses of the host in the prefix of the tuple's source.
pub(crate) fn more_sources(snapshot: &Snapshot, tuple: &Tuple) -> Option<Remedy> {
    let callers = Callers::of(snapshot, tuple)?;
    let owner = &callers.owner;
    let (prefix, others) = lasting_sources(snapshot, tuple)?;
    let has_sources = tuple.fix.as_ref().is_some_and(|fix| fix.source.is_some());
    // Short processes end before a fix finds them.
    if owner.pid == 0 || has_sources {
        return None;
    }
    let needed = demand(snapshot, tuple, others + 1)?;
    let (source, destination) = (tuple.source, tuple.destination);
    let to = quoted(destination);
    let factor = others as u32 + 1;
    let effect = format!(
        "new connections of {callers} to {destination} use {}: {factor} times the ports",
        counted(factor.into(), "source address")
    );
    let remedy = match tuple.fix.as_ref().filter(|fix| fix.guard) {
        Some(RunningFix { pid, .. }) => Remedy::advice(
            format!(
                "set `source = \"{prefix}\"` below [fix-ports] in the policy of guard[{pid}], then `sudo kill -HUP {pid}`"
            ),
            effect,
        ),
        None => Remedy::own(
            format!("fix ports --pid {} --source {prefix} --to {to}", owner.pid),
            format!("{effect}; no restart, ends with Ctrl-C"),
        ),
    };
    Some(remedy.with(move |snapshot| {
        // What the sources have in use once the sockets of now, which stay where they are, have ended.
        each_tuple(snapshot, source, destination, |tuple| {
            let then = (needed / f64::from(factor)).ceil();
            let share = then / f64::from(tuple.in_use.max(1));
            tuple.in_use = then as u32;
            tuple.low_parity = (f64::from(tuple.low_parity) * share) as u32;
            tuple.closes_per_s /= f64::from(factor);
            tuple.growth_per_s /= f64::from(factor);
            tuple.states.values_mut().for_each(|sockets| *sockets = (*sockets as f64 * share) as u64);
        });
    }))
}

/// Returns a sentence about a `fix ports` that works on new connections of a tuple already.
pub(crate) fn running_fix(tuple: &Tuple) -> Option<String> {
    let fix = tuple.fix.as_ref()?;
    let how = match &fix.source {
        Some(source) => format!("from the addresses of {source}"),
        None => "from free ports that it draws".to_owned(),
    };
    let who = match fix.guard {
        true => format!("fixed by guard[{}], which", fix.pid),
        false => format!("`fourtuple fix ports` (process {})", fix.pid),
    };
    Some(format!(
        "{who} opens its new connections {how}; sockets of before stay until they end, in TIME_WAIT up to 60 s"
    ))
}

/// `fourtuple fix ports`, which draws free ports instead of the kernel's search.
pub(crate) fn drawn_ports(snapshot: &Snapshot, tuple: &Tuple) -> Option<Remedy> {
    if tuple.fix.is_some() {
        return None;
    }
    Some(drawn_ports_to(&Callers::of(snapshot, tuple)?.owner, tuple.destination))
}

/// Adds what makes the longest of the traced searches shorter: draws, or a search port by port, where free ports are there to be found.
pub(crate) fn shorter_searches(mut draft: Draft, snapshot: &Snapshot, traced: &Traced) -> Draft {
    let linear = Remedy::advice(
        "in the program: IP_LOCAL_PORT_RANGE (51) with 0xFFFF0000 before connect(), or a start with `fourtuple run -- PROGRAM`",
        "the search goes port by port (Linux 6.8 and later)",
    );
    let time = |connects: &&TracedConnects| connects.searches.saturating_mul(connects.search_mean_ns);
    let Some(longest) = traced.connects.iter().max_by_key(time).filter(|longest| time(longest) > 0) else {
        return draft.proper(linear);
    };
    let tuples = snapshot.connections.seen().map(|all| all.tuples.as_slice()).unwrap_or_default();
    // The first has the most ports in use.
    let tuple = tuples.iter().find(|tuple| tuple.destination == longest.destination);
    let budget = tuple.and_then(|tuple| Some((tuple, Budget::of(snapshot, tuple).ok()?)));
    if let Some(tuple) = tuple {
        // What takes its ports is the cause.
        draft.subject = tuple.into();
    }
    match budget {
        Some((tuple, _)) if tuple.fix.is_some() => draft.because_if(running_fix(tuple)).proper(linear),
        Some((tuple, budget)) if !budget.draws_pay() => {
            let (in_use, total) = (count(budget.in_use.into()), count(budget.total.into()));
            draft = draft.because(format!(
                "{tuple} uses {in_use} of {total} ports: there is no free port that `fix ports` could draw"
            ));
            draft.proper(match budget.time_wait * 2 > budget.in_use {
                true => keep_connections(tuple),
                false => Remedy::advice(
                    format!("fewer connections to {} at a time, or more source addresses", tuple.destination),
                    "a search ends at the first port that is free",
                ),
            })
        }
        _ => {
            // How much shorter the searches become is not in a snapshot.
            let owner = caller(&longest.owner, longest.processes);
            let remedy = drawn_ports_to(&owner, longest.destination);
            draft.now(remedy.unproven()).proper(linear)
        }
    }
}

/// `fourtuple fix ports` for a process and a destination.
fn drawn_ports_to(owner: &Owner, destination: SocketAddr) -> Remedy {
    let effect = format!(
        "new connections of {} draw a free port at random, without the search; no restart, ends with Ctrl-C",
        process(owner)
    );
    let remedy = match owner.pid {
        // Short processes end before a fix finds them: their parent hands it on.
        0 => Remedy::advice(
            format!("start what starts {} with `fourtuple run -- PROGRAM`", owner.name),
            "its processes draw a free port at random, without the search",
        ),
        pid => Remedy::own(format!("fix ports --pid {pid} --to {}", quoted(destination)), effect),
    };
    remedy.with(|snapshot| {
        if let Part::Seen(search) = &mut snapshot.search {
            search.default = "linear".to_owned();
        }
    })
}

/// net.ipv4.tcp_tw_reuse, where the tuple has ports in TIME_WAIT that connect() may not take.
pub(crate) fn reuse(snapshot: &Snapshot, tuple: &Tuple) -> Option<Remedy> {
    let budget = Budget::of(snapshot, tuple).ok()?;
    let has_timestamps = snapshot.number("net.ipv4.tcp_timestamps").is_ok_and(|value| value != 0);
    let is_off = snapshot.number("net.ipv4.tcp_tw_reuse").is_ok_and(|value| value != 1);
    let delay = delay_s(snapshot);
    // At a higher rate the ports run out all the same.
    let lasts = Budget { wait_s: delay, ..budget }.plateau() <= f64::from(budget.total);
    let helps = has_timestamps
        && is_off
        && lasts
        && budget.time_wait > 0
        && budget.reusable == 0
        && !budget.is_plain();
    helps.then(|| {
        let ceiling = f64::from(budget.total) / delay;
        let peer = match tuple.time_wait_plain {
            Some(_) => "the peer has TCP timestamps",
            None => "if the peer has TCP timestamps",
        };
        let effect = format!(
            "ports in TIME_WAIT are free after {delay} s, not 60 s ({peer}): up to {} instead of {}",
            rate(ceiling),
            rate(budget.ceiling_per_s())
        );
        let remedy = Remedy::sysctl("net.ipv4.tcp_tw_reuse", "1", effect);
        // Neither a calculation nor a test has a peer like this one.
        if tuple.time_wait_plain.is_none() { remedy.unproven() } else { remedy.tried(Cure::Reuse) }
    })
}

/// A wider range, with the ports of listeners reserved, and the time for which it lasts while the connections of `tuple` grow; `None` if the
/// range has all ports already, if the rate at which `tuple` closes fills the wider range too, or if the listeners are not known.
pub(crate) fn wider_range(snapshot: &Snapshot, tuple: Option<&Tuple>) -> Option<Remedy> {
    let needed = tuple.and_then(|tuple| demand(snapshot, tuple, 1)).unwrap_or(0.0);
    let lasts = tuple.and_then(|tuple| lasts(snapshot, &[tuple], tuple.in_use));
    widest_range(snapshot, needed, &lasts.unwrap_or_default())
}

/// The same for a source whose destinations share no port, because bind() chose them.
pub(crate) fn wider_range_of_bound(snapshot: &Snapshot, source: &Source) -> Option<Remedy> {
    let tuples = &snapshot.connections.seen().ok()?.tuples;
    let tuples: Vec<&Tuple> = tuples.iter().filter(|tuple| tuple.source == source.address).collect();
    let budgets = tuples.iter().filter_map(|tuple| Budget::of(snapshot, tuple).ok());
    // Unlike connect(), bind() takes no port in TIME_WAIT again.
    let needed = budgets.map(|budget| Budget { wait_s: TIME_WAIT_SECONDS, ..budget }.plateau()).sum();
    let lasts = lasts(snapshot, &tuples, source.in_use);
    widest_range(snapshot, needed, &lasts.unwrap_or_default())
}

fn widest_range(snapshot: &Snapshot, needed: f64, lasts: &str) -> Option<Remedy> {
    let ports = snapshot.ports.seen().ok()?;
    // The parity of the first port stays: the search begins with it.
    let low = ports.low.min(1024 | ports.low & 1);
    let wide = EphemeralPorts { low, high: 65_535, reserved: reserved_with_listeners(snapshot, low)? };
    let (now, then) = (ports.usable(), wide.usable());
    if then < now + now / 4 || needed > f64::from(then) {
        return None;
    }
    let more = format!("{} instead of {}", counted(then.into(), "port"), count(now.into()));
    if wide.reserved.len() > MAX_BLOCKS {
        // Too long to be read in a command.
        let effect = format!(
            "prints a file of sysctl.d(5) to be read and loaded: {more}, the ports of listeners reserved; net.ipv4.tcp_tw_reuse is in it, too{lasts}"
        );
        return Some(Remedy::own("fix --print sysctl", effect));
    }
    let range = format!("{low} 65535");
    let reserved = blocks(&wide.reserved);
    let effect = format!("{more}, for new connections at once");
    let added = |port: u16| wide.contains(port) && !(ports.low..=ports.high).contains(&port);
    let condition = known_servers(added);
    if wide.reserved == ports.reserved || reserved.is_empty() {
        return Some(Remedy::sysctl(RANGE, range, effect + lasts).provided(condition).tried(Cure::Range));
    }
    let settings = vec![Setting::new(RESERVED, reserved), Setting::new(RANGE, range)];
    let effect = format!("{effect}; the ports of listeners stay reserved{lasts}");
    Some(Remedy::sysctls(settings, effect).provided(condition).tried(Cure::Range))
}

/// The kernel's default range, where it has more ports and they last for a tuple: it takes no port that a server below 32768 needs.
pub(crate) fn default_range(snapshot: &Snapshot, tuple: &Tuple) -> Option<Remedy> {
    let ports = snapshot.ports.seen().ok()?;
    let is_cure = ports.range() < DEFAULT_PORTS && is_lasting(snapshot, tuple, 1, DEFAULT_PORTS);
    is_cure.then(|| {
        let lasts = lasts(snapshot, &[tuple], tuple.in_use).unwrap_or_default();
        let effect = format!("the kernel's default, for new connections at once{lasts}");
        Remedy::sysctl(RANGE, DEFAULT_RANGE, effect).tried(Cure::Range)
    })
}

/// Says how long more ports last while the connections of these tuples grow, which have `in_use` ports.
fn lasts(snapshot: &Snapshot, tuples: &[&Tuple], in_use: u32) -> Option<String> {
    let growing = tuples.iter().filter_map(|tuple| {
        let growth = Growth::of(snapshot, tuple, &Budget::of(snapshot, tuple).ok()?)?;
        (growth.idle_s.is_some() || tuple.growth_per_s > 0.0).then_some(growth)
    });
    let growth = growing.reduce(|all, one| Growth { per_s: all.per_s + one.per_s, ..all })?;
    let more = most_ports(snapshot).saturating_sub(in_use);
    Some(format!("; this lasts {}", growth.lasts(more)))
}

/// The command that keeps connect() from the port of a bind() that failed, if a connection has taken it from the range.
pub(crate) fn reserve(snapshot: &Snapshot, call: &FailedCall) -> Option<Remedy> {
    let is_chosen = call.protocol == "tcp" && is_taken(snapshot, call) == Judged::Yes;
    let port = call.address.as_ref().filter(|_| is_chosen)?.parse::<SocketAddr>().ok()?.port();
    let ports = snapshot.ports.seen().ok().filter(|ports| ports.contains(port))?;
    let mut reserved = ports.reserved.clone();
    reserved.push((port, port));
    let effect =
        format!("connect() does not choose {port} any more; the connection of now keeps it until its end");
    Some(Remedy::sysctl(RESERVED, blocks(&merged(reserved)), effect).unproven())
}

/// Well-known ports of servers at 1024 and above.
const SERVERS: [(u16, &str); 20] = [
    (1433, "mssql"),
    (1521, "oracle"),
    (2049, "nfs"),
    (2379, "etcd"),
    (3000, "node"),
    (3306, "mysql"),
    (5432, "postgresql"),
    (5672, "amqp"),
    (6379, "redis"),
    (6443, "kube-apiserver"),
    (8000, "http"),
    (8080, "http"),
    (8443, "https"),
    (9000, "php-fpm"),
    (9090, "prometheus"),
    (9092, "kafka"),
    (9200, "elasticsearch"),
    (10_250, "kubelet"),
    (11_211, "memcached"),
    (27_017, "mongodb"),
];

/// Returns a warning about servers that do not run now and need one of these ports later; their ports are not known from listeners.
fn known_servers(is_added: impl Fn(u16) -> bool) -> Option<String> {
    let added = SERVERS.iter().filter(|(port, _)| is_added(*port));
    let named: Vec<String> = added.map(|(port, name)| format!("{port} ({name})")).collect();
    let (last, others) = named.split_last()?;
    let list = if others.is_empty() { last.clone() } else { format!("{} or {last}", others.join(", ")) };
    Some(format!("reserve the port of a server that is down now as well: it may need {list}"))
}

/// Returns the prefix of the host's addresses beside the source of a tuple and the number of the others, if the connections fit into their ports.
fn lasting_sources(snapshot: &Snapshot, tuple: &Tuple) -> Option<(String, usize)> {
    let (prefix, others) = siblings(snapshot.addresses.seen().ok()?, tuple.source)?;
    let ports = Budget::of(snapshot, tuple).ok()?.total;
    is_lasting(snapshot, tuple, others + 1, ports).then_some((prefix, others))
}

/// Returns whether `addresses` sources with this number of ports each last for the connections that go to the destination of a tuple from
/// the sources in its place, including the sockets in TIME_WAIT that their closes lead to.
pub(crate) fn is_lasting(snapshot: &Snapshot, tuple: &Tuple, addresses: usize, ports: u32) -> bool {
    demand(snapshot, tuple, addresses).is_none_or(|demand| demand <= f64::from(ports) * addresses as f64)
}

/// Returns the ports that all connections to the destination of a tuple need at their rates, over its source and `addresses` - 1 others of
/// the same family; `None`: not known.
fn demand(snapshot: &Snapshot, tuple: &Tuple, addresses: usize) -> Option<f64> {
    let budget = Budget::of(snapshot, tuple).ok()?;
    if addresses == 1 {
        return Some(budget.plateau());
    }
    // Connections that fail now are closed first once they succeed, as the others were.
    let failing = failing_per_s(snapshot, tuple).filter(|_| budget.time_wait * 2 > budget.in_use);
    let closes_per_s = budget.closes_per_s.max(failing.unwrap_or(0.0));
    let own = Budget { closes_per_s, ..budget }.plateau();
    let others = snapshot.connections.seen().ok()?.tuples.iter();
    let others = others.filter(|other| {
        other.destination == tuple.destination && other.source != tuple.source && !other.source.is_loopback()
    });
    let others = others.filter_map(|other| Some(Budget::of(snapshot, other).ok()?.plateau()));
    Some(own + others.sum::<f64>())
}

/// Returns the calls of connect() to the destination that failed for lack of a port, per second of a trace.
fn failing_per_s(snapshot: &Snapshot, tuple: &Tuple) -> Option<f64> {
    let failed = snapshot.failures.seen().ok()?.without_port();
    let failed = failed.filter(|(_, destination)| *destination == tuple.destination);
    let failed: u64 = failed.map(|(call, _)| call.failed).sum();
    Some(failed as f64 * 1e9 / snapshot.interval_ns.max(1) as f64)
}

/// Maximum number of ports that a range can have on this host.
pub(crate) fn most_ports(snapshot: &Snapshot) -> u32 {
    let reserved = reserved_with_listeners(snapshot, 1024).unwrap_or_default();
    EphemeralPorts { low: 1024, high: 65_535, reserved }.usable()
}

/// `fourtuple fix --print` for a program that it knows.
pub(crate) fn printed(snapshot: &Snapshot, tuple: &Tuple) -> Option<Remedy> {
    let owner = tuple.owners.first()?;
    let name = print_name(&owner.name)?;
    let (source, effect) = match lasting_sources(snapshot, tuple) {
        Some((prefix, others)) => {
            (format!(" --source {prefix}"), format!("with {}", counted(others as u64 + 1, "source address")))
        }
        None => (String::new(), "with this host's numbers".to_owned()),
    };
    Some(Remedy::own(
        format!("fix --print {name} --to {}{source}", quoted(tuple.destination)),
        format!("prints the configuration or code of {name} {effect}, ready to paste"),
    ))
}

/// Returns the name in `fix --print` of a process.
pub(crate) fn print_name(process: &str) -> Option<&'static str> {
    const NAMES: [(&str, &str); 9] = [
        ("nginx", "nginx"),
        ("haproxy", "haproxy"),
        ("envoy", "envoy"),
        ("python", "python"),
        ("gunicorn", "python"),
        ("uvicorn", "python"),
        ("celery", "python"),
        ("uwsgi", "python"),
        ("java", "netty"),
    ];
    NAMES.iter().find(|(start, _)| process.starts_with(start)).map(|(_, name)| *name)
}

/// Applies a change to the tuple of a source and a destination.
pub(crate) fn each_tuple(
    snapshot: &mut Snapshot,
    source: IpAddr,
    destination: SocketAddr,
    change: impl Fn(&mut Tuple),
) {
    let Part::Seen(connections) = &mut snapshot.connections else { return };
    let of_subject = |tuple: &&mut Tuple| tuple.source == source && tuple.destination == destination;
    connections.tuples.iter_mut().filter(of_subject).for_each(change);
}

/// Returns reserved ports as the sysctl has them: `8080,9000-9100`.
pub(crate) fn blocks(reserved: &[(u16, u16)]) -> String {
    let block = |&(first, last): &(u16, u16)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    reserved.iter().map(block).collect::<Vec<_>>().join(",")
}

/// Returns the TCP ports of listeners, in ascending order, or `None` if the listeners were not read.
pub(crate) fn listening_ports(snapshot: &Snapshot) -> Option<Vec<u16>> {
    let listeners = snapshot.listeners.seen().ok()?.iter().map(|listener| listener.address.port());
    let held = snapshot.connections.seen().map(|connections| connections.held.as_slice()).unwrap_or_default();
    let held = held.iter().filter(|held| held.kind == "listening").map(|held| held.port);
    let mut ports: Vec<u16> = listeners.chain(held).collect();
    ports.sort_unstable();
    ports.dedup();
    Some(ports)
}

/// Returns the processes of Kubernetes that serve NodePorts.
pub(crate) fn node_port_server(snapshot: &Snapshot) -> Option<String> {
    const NAMES: [&str; 4] = ["kube-proxy", "kube-router", "cilium-agent", "k3s-server"];
    let processes = snapshot.processes.seen().ok()?;
    let found = processes.iter().find(|process| NAMES.contains(&process.name.as_str()))?;
    Some(format!("{}[{}]", found.name, found.pid))
}

/// Returns the reserved ports together with the ports of listeners from `low` on, merged; `None` if the listeners were not read.
fn reserved_with_listeners(snapshot: &Snapshot, low: u16) -> Option<Vec<(u16, u16)>> {
    let mut reserved = snapshot.ports.seen().ok()?.reserved.clone();
    let listeners = listening_ports(snapshot)?.into_iter().filter(|port| *port >= low);
    reserved.extend(listeners.map(|port| (port, port)));
    if node_port_server(snapshot).is_some() {
        reserved.push(NODE_PORTS);
    }
    Some(merged(reserved))
}

/// Returns a destination for a shell, which could take brackets for a pattern.
fn quoted(destination: SocketAddr) -> String {
    if destination.is_ipv4() { destination.to_string() } else { format!("'{destination}'") }
}

/// Returns the prefix of a source address, and the number of other addresses of the host in it, if there are any.
fn siblings(addresses: &[LocalAddress], source: IpAddr) -> Option<(String, usize)> {
    let own = addresses.iter().find(|local| local.address == source)?;
    let network = network(source, own.prefix);
    let is_other = |local: &&LocalAddress| {
        local.address != source
            && local.address.is_ipv4() == source.is_ipv4()
            && self::network(local.address, own.prefix) == network
    };
    let others = addresses.iter().filter(is_other).count();
    // `fix ports` uses at most 64 addresses.
    (others > 0).then(|| (format!("{network}/{}", own.prefix), others.min(63)))
}

pub(crate) fn network(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() & mask).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Connections, HeldPort, Process};

    use super::*;
    use crate::doctor::command::Place;
    use crate::doctor::diagnose;
    use crate::doctor::draft::Action;
    use crate::doctor::rules::Limits;

    fn local(address: &str, prefix: u8) -> LocalAddress {
        LocalAddress { address: address.parse().unwrap(), prefix, tentative: false, device: None }
    }

    #[test]
    fn siblings_are_in_the_prefix_of_the_source() {
        let addresses =
            [local("10.0.0.9", 24), local("10.0.0.10", 32), local("10.0.1.1", 24), local("2001:db8::1", 64)];
        let of = |source: &str| siblings(&addresses, source.parse().unwrap());
        assert_eq!(of("10.0.0.9"), Some(("10.0.0.0/24".to_owned(), 1)));
        assert_eq!(of("10.0.0.10"), None, "a prefix of one address");
        assert_eq!(of("10.0.1.1"), None);
        assert_eq!(of("10.0.9.9"), None, "not an address of the host");
        let v6 = [local("2001:db8::1", 64), local("2001:db8::2", 64), local("::1", 128)];
        assert_eq!(siblings(&v6, v6[0].address), Some(("2001:db8::/64".to_owned(), 1)));
        assert_eq!(network("10.9.8.7".parse().unwrap(), 0), "0.0.0.0".parse::<IpAddr>().unwrap());
    }

    fn with_range(low: u16, high: u16, reserved: Vec<(u16, u16)>) -> Snapshot {
        let listening = |port| HeldPort {
            port,
            address: "0.0.0.0".parse().unwrap(),
            kind: "listening".to_owned(),
            owner: None,
        };
        Snapshot {
            ports: Part::Seen(EphemeralPorts { low, high, reserved }),
            listeners: Part::Seen(Vec::new()),
            connections: Part::Seen(Connections { held: vec![listening(33_000)], ..Connections::default() }),
            ..Snapshot::default()
        }
    }

    #[test]
    fn a_wider_range_keeps_ports_of_servers_out() {
        let snapshot = with_range(32_769, 60_999, vec![(8_080, 8_081)]);
        let remedy = wider_range(&snapshot, None).unwrap();
        let expected = "sysctl -w net.ipv4.ip_local_reserved_ports=8080-8081,33000 net.ipv4.ip_local_port_range=\"1025 65535\"";
        let command = |remedy: &Remedy| {
            let Action::Steps(steps) = &remedy.action else { panic!("no command") };
            Place::default().render(steps, &snapshot).unwrap().command
        };
        assert_eq!(command(&remedy), expected);
        let condition = remedy.condition.as_deref().unwrap();
        for server in ["3306 (mysql), ", " or 27017 (mongodb)"] {
            assert!(condition.contains(server), "{condition}");
        }
        assert!(!condition.contains("8080"), "reserved: {condition}");
        let mut changed = snapshot.clone();
        remedy.change.unwrap()(&mut changed);
        let ports = changed.ports.seen().unwrap();
        assert_eq!((ports.low, ports.high, ports.usable()), (1_025, 65_535, 64_511 - 3));
        assert!(wider_range(&with_range(1_024, 65_535, Vec::new()), None).is_none(), "wide already");
        assert!(wider_range(&with_range(1_024, 60_999, Vec::new()), None).is_none(), "not by a quarter");
        let unknown = Snapshot { listeners: Part::Hidden("EPERM".to_owned()), ..snapshot.clone() };
        assert!(wider_range(&unknown, None).is_none(), "a server could lose its port");
        let proxy = Process { pid: 1, name: "kube-proxy".to_owned(), ..Process::default() };
        let node = Snapshot { processes: Part::Seen(vec![proxy]), ..snapshot.clone() };
        assert!(command(&wider_range(&node, None).unwrap()).contains("30000-32767"));
    }

    #[test]
    fn a_range_without_usable_ports_is_no_panic() {
        let mut snapshot = with_range(20_000, 20_000, vec![(1, 65_535)]);
        for (name, value) in [("tcp_tw_reuse", "1"), ("tcp_timestamps", "1"), ("tcp_max_tw_buckets", "0")] {
            snapshot.sysctls.insert(format!("net.ipv4.{name}"), value.to_owned());
        }
        diagnose(&snapshot, &Limits::default());
        diagnose(&Snapshot::default(), &Limits::default());
    }
}
