//! The thresholds of the rules and what they say at them, on snapshots that no host has to make.

use std::collections::BTreeMap;

use fourtuple_record::snapshot::{
    CloseWait, Connections, Conntrack, Counter, EphemeralPorts, FailedCall, Failures, Listener, LockWaits,
    Owner, Part, Process, Service, Snapshot, Source, TcpMemory, Traced, TracedAccepts, TracedConnects,
    TracedLocks, Tuple, UdpSocketView, UdpSockets, Unanswered, UnixListener,
};

use crate::doctor::draft::{Action, Draft, Remedy};
use crate::doctor::rules::named;

/// Checks a rule. `wanted`: parts of the only finding, a part after `!` is not in it; empty: no finding.
#[track_caller]
fn expect(id: &str, limit: f64, snapshot: &Snapshot, wanted: &[&str]) {
    let found = (named(id).expect("a rule").check)(snapshot, limit).expect("checked");
    let found: Vec<String> = found.iter().map(text).collect();
    assert_eq!(found.len(), usize::from(!wanted.is_empty()), "{id}: {found:#?}");
    for part in wanted {
        let (part, is_there) = part.strip_prefix('!').map_or((*part, true), |part| (part, false));
        assert_eq!(found[0].contains(part), is_there, "{id}: {part:?} in {}", found[0]);
    }
}

fn text(draft: &Draft) -> String {
    let remedy = |remedy: &Remedy| match &remedy.action {
        Action::Words(words) => words.clone(),
        Action::Steps(steps) => format!("{steps:?}"),
    };
    let remedies = draft.now.iter().chain(&draft.proper).map(remedy).collect::<Vec<_>>();
    format!(
        "{:?} {}\n{}\n{}\n{:?}",
        draft.severity,
        draft.verdict,
        draft.evidence.join("\n"),
        remedies.join("\n"),
        draft.explained
    )
}

/// Returns a snapshot of half a second with these sysctls and these changes of counters.
fn snapshot(sysctls: &[(&str, u64)], counters: &[(&str, u64)]) -> Snapshot {
    let counter = |(name, during): &(&str, u64)| ((*name).to_owned(), Counter { total: 9, during: *during });
    Snapshot {
        interval_ns: 500_000_000,
        processors: 2,
        sysctls: sysctls.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect(),
        counters: Part::Seen(counters.iter().map(counter).collect()),
        processes: Part::Seen(Vec::new()),
        unix_listeners: Part::Seen(Vec::new()),
        ..Snapshot::default()
    }
}

fn owner(pid: u32, sockets: u32) -> Owner {
    Owner { pid, name: "server".to_owned(), sockets }
}

/// Returns a listener of the process with this number.
fn listener(pid: u32, [waiting_before, waiting, backlog]: [u32; 3], handshakes: u32, drops: u64) -> Listener {
    Listener {
        address: "127.0.0.1:4000".parse().unwrap(),
        cookie: pid.into(),
        waiting,
        waiting_before,
        backlog,
        handshakes,
        drops: Some(Counter { total: drops, during: drops }),
        owners: vec![owner(pid, 1)],
        ..Listener::default()
    }
}

/// Returns 40 calls of a process that failed.
fn failed(call: &str, errno: &str, protocol: &str, address: &str) -> Part<Failures> {
    let call = FailedCall {
        call: call.to_owned(),
        errno: errno.to_owned(),
        protocol: protocol.to_owned(),
        owner: owner(8, 1),
        address: Some(address.to_owned()),
        failed: 40,
        ..FailedCall::default()
    };
    Part::Seen(Failures { calls: vec![call], ..Failures::default() })
}

fn with(mut snapshot: Snapshot, listeners: &[Listener]) -> Snapshot {
    snapshot.listeners = Part::Seen(listeners.to_vec());
    snapshot
}

#[test]
fn accept_queues_at_their_limits() {
    let of = |queue, drops| {
        let counters = [("TcpExt.ListenDrops", drops), ("TcpExt.ListenOverflows", drops)];
        with(snapshot(&[("net.core.somaxconn", 4096)], &counters), &[listener(7, queue, 0, drops)])
    };
    // 20 more in half a second; 160 connections fit.
    let grows = ["Warning", "the queue grows by 40/s and is full in 3 s", "!dropped"];
    expect("A01", 10.0, &of([20, 40, 159], 0), &grows);
    expect("A01", 10.0, &of([40, 40, 159], 0), &["fills", "!grows"]);
    expect("A01", 10.0, &of([40, 20, 159], 0), &["fills", "!grows"]);
    let wanted = ["Critical", "; 2 SYNs and ACKs were dropped in 500 ms", "!grows"];
    expect("A01", 10.0, &of([4, 9, 8], 2), &wanted);
    expect("A01", 0.0, &of([0, 9, 20], 0), &[]);
    expect("A02", 0.0, &of([0, 0, 8], 0), &[]);
    expect("A02", 2.0, &of([0, 0, 8], 1), &[]);
    expect("A02", 2.0, &of([0, 0, 8], 2), &["dropped 2 SYNs and ACKs"]);
}

#[test]
fn drops_name_the_listeners_that_dropped() {
    let counters = [("TcpExt.ListenDrops", 3), ("TcpExt.ListenOverflows", 0)];
    let quiet = Listener { address: "127.0.0.1:4001".parse().unwrap(), ..listener(8, [0; 3], 0, 0) };
    let mut both = with(snapshot(&[], &counters), &[listener(7, [0, 0, 8], 0, 3), quiet]);
    both.memory = Part::Seen(TcpMemory::default());
    expect("A03", 1.0, &both, &["127.0.0.1:4000 dropped 3", "!127.0.0.1:4001 dropped", "!TCP memory"]);
    both.memory = Part::Seen(TcpMemory { limits_pages: [1, 2, 3], ..TcpMemory::default() });
    expect("A03", 3.0, &both, &["TCP memory: 0 pages, pressure from 2 on"]);
    expect("A03", 4.0, &both, &[]);
}

#[test]
fn a_backlog_that_was_cut_matters_when_it_is_used() {
    let of = |queue, overflows, drops| {
        let counters = [("TcpExt.ListenDrops", drops), ("TcpExt.ListenOverflows", overflows)];
        with(snapshot(&[("net.core.somaxconn", 8)], &counters), &[listener(7, queue, 0, drops)])
    };
    for (queue, overflows, drops, is_found) in [
        ([4, 4, 8], 0, 0, true),
        ([3, 4, 8], 0, 0, false),
        ([0, 0, 8], 2, 2, true),
        ([0, 0, 8], 0, 2, false),
        ([0, 0, 8], 2, 0, false),
        ([4, 4, 9], 2, 2, false),
    ] {
        let wanted: &[&str] = if is_found { &["cut it", "\"4096\""] } else { &[] };
        expect("A04", 50.0, &of(queue, overflows, drops), wanted);
        let [waiting_before, waiting, backlog] = queue;
        let path = "@web".to_owned();
        let owners = vec![owner(7, 1)];
        let mut unix = with(snapshot(&[("net.core.somaxconn", 8)], &[]), &[]);
        unix.unix_listeners = Part::Seen(vec![UnixListener {
            path,
            cookie: 1,
            waiting,
            waiting_before,
            backlog,
            owners,
            ..UnixListener::default()
        }]);
        expect("A04", 50.0, &unix, if overflows == 0 { wanted } else { &[] });
        if waiting == 0 {
            expect("A04", 0.0, &unix, &[]);
        }
    }
    expect("A04", 0.0, &of([0, 0, 8], 0, 0), &[]);
}

#[test]
fn syn_queues_at_their_limits() {
    let of = |cookies, [dropped, answered, sent]: [u64; 3], handshakes| {
        let counters = [
            ("TcpExt.TCPReqQFullDrop", dropped),
            ("TcpExt.TCPReqQFullDoCookies", answered),
            ("TcpExt.SyncookiesSent", sent),
        ];
        let sysctls = [("net.ipv4.tcp_syncookies", cookies), ("net.ipv4.tcp_max_syn_backlog", 4096)];
        with(snapshot(&sysctls, &counters), &[listener(7, [0, 0, 100], handshakes, 0)])
    };
    expect("A05", 75.0, &of(0, [5, 0, 0], 0), &["Critical 5 SYNs were dropped in 500 ms"]);
    // A queue that is full besides is the same fault.
    let wanted = ["Critical 5 SYNs were dropped", "100 handshakes in progress"];
    expect("A05", 75.0, &of(0, [5, 0, 0], 100), &wanted);
    expect("A05", 75.0, &of(0, [0, 0, 3], 0), &[]);
    let wanted = ["Warning", "3 SYNs got a cookie instead of a place", ", 0 dropped"];
    expect("A05", 75.0, &of(1, [0, 0, 3], 0), &wanted);
    let wanted = ["Warning", "2 SYNs got a cookie instead of a place", ", 1 dropped"];
    expect("A05", 75.0, &of(1, [1, 2, 0], 0), &wanted);
    expect("A05", 75.0, &of(2, [0, 0, 3], 0), &["Notice", "3 SYNs got a cookie in 500 ms without need"]);
    expect("A05", 75.0, &of(2, [0, 0, 0], 0), &[]);
    expect("A05", 75.0, &of(1, [0; 3], 75), &["Warning 75 handshakes are in progress", "which takes 100"]);
    expect("A05", 75.0, &of(1, [0; 3], 74), &[]);
    expect("A05", 10.0, &of(1, [0; 3], 15), &[]);
    expect("A05", 10.0, &of(1, [0; 3], 16), &["16 handshakes are in progress"]);
}

#[test]
fn the_longest_queue_of_a_long_wait_has_connections() {
    let mut waits = with(snapshot(&[], &[]), &[listener(7, [0, 0, 8], 0, 0)]);
    waits.accepts = Part::Seen(TracedAccepts {
        accepts: 100,
        wait_p99_ns: Some(200_000_000),
        ..TracedAccepts::default()
    });
    expect("A07", 200.0, &waits, &["1% of 100 connections waited 200 ms or longer", "!longest accept queue"]);
    expect("A07", 201.0, &waits, &[]);
    waits.listeners = Part::Seen(vec![listener(7, [0, 2, 8], 0, 0)]);
    expect("A07", 200.0, &waits, &["(server[7]) has the longest accept queue: 2 connections"]);
}

#[test]
fn an_old_generation_is_stuck_only_where_migration_is_on() {
    let process = |pid: u32, started_ns| Process { pid, started_ns, state: 'S', ..Process::default() };
    for (migrates, wanted) in [(0, &[][..]), (1, &["Warning 1 of 2 listeners", "20 connections wait"])] {
        let listeners = [listener(7, [20, 20, 100], 0, 0), listener(8, [0, 2, 100], 0, 0)];
        let mut group = with(snapshot(&[("net.ipv4.tcp_migrate_req", migrates)], &[]), &listeners);
        group.processes = Part::Seen(vec![process(7, 0), process(8, 5_000_000_000)]);
        expect("B03", 20.0, &group, wanted);
        expect("B03", 21.0, &group, &[]);
        let lost = ["20 connections at 127.0.0.1:4000 wait for server[7], which is older than server[8]"];
        expect("B04", 0.0, &group, if migrates == 0 { &lost } else { &[] });
    }
}

#[test]
fn a_running_selector_is_not_proposed_again() {
    let of = |fix| {
        let members = [listener(7, [9, 9, 128], 0, 0), listener(8, [0; 3], 0, 0)];
        with(snapshot(&[], &[]), &members.map(|member| Listener { fix, ..member }))
    };
    let proposed = "fix accept --listen 127.0.0.1:4000 --select least-busy";
    expect("B03", 8.0, &of(None), &[proposed, "!(process"]);
    let running = "`fourtuple fix accept` (process 5120) gives new connections to workers";
    expect("B03", 8.0, &of(Some(5_120)), &[running, "!fix accept --listen"]);
}

#[test]
fn descriptors_at_their_limits() {
    let of = |descriptors, descriptor_ceiling, highest| {
        let limit = Some(100);
        let process = Process {
            pid: 7,
            descriptors,
            descriptor_limit: limit,
            descriptor_ceiling,
            ..Process::default()
        };
        let listeners =
            [listener(7, [0, 0, 8], 0, 0), Listener { owners: Vec::new(), ..listener(8, [0; 3], 0, 0) }];
        let mut snapshot = with(snapshot(&[("fs.nr_open", highest)], &[]), &listeners);
        snapshot.processes = Part::Seen(vec![process]);
        snapshot
    };
    expect("F01", 90.0, &of(89, None, 1_000), &[]);
    unchecked("F01", 90.0, &of(0, None, 1_000), HIDDEN);
    let wanted = ["Warning", "90%", "--nofile=1000:\"", "Queue(7)", "!Queue(8)"];
    expect("F01", 90.0, &of(90, None, 1_000), &wanted);
    let wanted = ["Critical", "--nofile=1000:1000\"", "the hard limit is 100"];
    expect("F01", 90.0, &of(100, Some(100), 1_000), &wanted);
    expect("F01", 90.0, &of(99, Some(150), 1_000), &["Warning", "--nofile=150:\"", "LimitNOFILE=150"]);
    expect("F01", 90.0, &of(99, None, 300), &["--nofile=300:\"", "!fs.nr_open"]);
    expect("F01", 90.0, &of(99, None, 100), &["--nofile=4096:\"", "fs.nr_open"]);
    let mut forked = of(100, None, 1_000);
    let Part::Seen(processes) = &mut forked.processes else { panic!("made above") };
    processes.push(Process { pid: 8, parent: 7, ..processes[0].clone() });
    expect("F01", 90.0, &forked, &["[7] has 100 descriptors"]);
    // Sockets that the program does not close fill any limit.
    let leaking = |settled| {
        let leak = CloseWait {
            owner: owner(7, 60),
            remote: "10.0.0.2:80".parse().unwrap(),
            oldest_ns: 6_000_000_000,
            settled,
            old: 0,
        };
        let mut snapshot = of(100, None, 1_000);
        let tuples = vec![Tuple { owners: vec![owner(7, 60)], ..tuple(60, 0) }];
        let connections = Connections { tuples, close_wait: vec![leak], ..Connections::default() };
        snapshot.connections = Part::Seen(connections);
        snapshot
    };
    let wanted = [
        "a higher limit postpones the end",
        "restart [7]",
        "in [7]: close() when read() returns 0",
        "60 of them are connections to 10.0.0.2:80",
    ];
    expect("F01", 90.0, &leaking(60), &wanted);
    expect("F01", 90.0, &leaking(50), &["!postpones", "60 of them are connections to 10.0.0.2:80"]);
}

#[test]
fn memory_and_orphans_at_their_limits() {
    let of = |pages, limits_pages, orphans, aborts| {
        let mut snapshot =
            snapshot(&[("net.ipv4.tcp_max_orphans", 1_000)], &[("TcpExt.TCPAbortOnMemory", aborts)]);
        snapshot.memory = Part::Seen(TcpMemory { pages, limits_pages, orphans, ..TcpMemory::default() });
        snapshot
    };
    let limits = [100, 200, 300];
    expect("F02", 90.0, &of(199, limits, 899, 1), &[]);
    expect("F02", 90.0, &of(200, limits, 0, 1), &["Warning TCP sockets use 200 pages", "66%"]);
    expect("F02", 90.0, &of(270, limits, 0, 0), &["Critical TCP sockets use 270 pages", "200 400 600"]);
    let wanted = ["Warning 900 of 1,000 orphaned", "0 resets", "\"2000\""];
    expect("F02", 90.0, &of(0, [0, 0, 300], 900, 0), &wanted);
    expect("F02", 90.0, &of(0, limits, 900, 1), &["Critical 900 of 1,000 orphaned", "1 reset "]);
    let is_unchecked = |snapshot: &Snapshot| (named("F02").unwrap().check)(snapshot, 90.0).is_err();
    let mut hidden = of(0, limits, 0, 0);
    assert!(!is_unchecked(&hidden) && is_unchecked(&of(0, [0; 3], 0, 0)));
    hidden.sysctls.clear();
    assert!(is_unchecked(&hidden));
}

#[test]
fn each_class_of_locks_has_its_change() {
    for (class, change) in [
        ("listener", "a listener for each worker"),
        ("accept queue", "a listener for each worker"),
        ("ehash", "kept-alive connections"),
        ("time-wait", "kept-alive connections"),
        ("bhash", "a port range for each worker"),
        ("socket owner", "one thread for each connection"),
        ("neighbour", "look at the call paths"),
    ] {
        let mut locked = snapshot(&[], &[]);
        // 10% of two processors.
        let waits = LockWaits { waits: 4, waited_ns: 100_000_000 };
        let classes = BTreeMap::from([(class.to_owned(), waits)]);
        locked.locks = Part::Seen(TracedLocks { interval_ns: 500_000_000, classes });
        expect(
            "L01",
            10.0,
            &locked,
            &["0.2 of them at any time", "4 waits, 100 ms in 500 ms", "mean wait 25 ms", change],
        );
        expect("L01", 10.1, &locked, &[]);
    }
}

#[test]
fn a_listener_at_another_address_is_a_cause() {
    let of = |address: &str, to: &str| {
        let mut snapshot = snapshot(&[], &[]);
        let own = Listener { address: address.parse().unwrap(), ..listener(7, [0, 0, 100], 0, 0) };
        snapshot.listeners = Part::Seen(vec![own]);
        snapshot.failures = failed("connect", "ECONNREFUSED", "tcp", to);
        snapshot
    };
    for (to, wanted) in [
        ("127.0.0.1:80", "the cause here: server[7] listens at [::]:80 for IPv6 only (IPV6_V6ONLY"),
        ("[::1]:80", "possible: no socket listens"),
        ("10.0.0.3:80", "possible: no socket listens"),
    ] {
        let mut bound = of("[::]:80", to);
        let Part::Seen(listeners) = &mut bound.listeners else { panic!() };
        listeners[0].ipv6_only = true;
        expect("X01", 0.0, &bound, &[wanted]);
    }
    // SO_BINDTODEVICE: connections of this host arrive at lo, which is the first device of each namespace.
    for (interface, wanted) in [
        (1, "possible: no socket listens"),
        (2, "the cause here: server[7] listens at 0.0.0.0:80 by one device only (SO_BINDTODEVICE)"),
    ] {
        let mut bound = of("0.0.0.0:80", "127.0.0.1:80");
        let Part::Seen(listeners) = &mut bound.listeners else { panic!() };
        listeners[0].interface = interface;
        expect("X01", 0.0, &bound, &[wanted]);
    }
    let expect = |listener: &str, to: &str, wanted: &str| expect("X01", 0.0, &of(listener, to), &[wanted]);
    expect("127.0.0.1:80", "[::1]:80", "the cause here: server[7] listens at 127.0.0.1:80, not at ::1");
    expect("0.0.0.0:80", "[::1]:80", "the cause here: server[7] listens at 0.0.0.0:80, not at ::1");
    expect("127.0.0.1:81", "[::1]:80", "the cause here: no socket listens at the address on this host");
    // It may serve IPv4 too, and have begun after the calls.
    expect("[::]:80", "127.0.0.1:80", "possible: no socket listens");
    // Another host.
    expect("127.0.0.1:80", "10.0.0.3:80", "possible: no socket listens");
}

/// Of a unix socket no firewall and no port is the cause, and a missing service matters unless each program asks for it.
#[test]
fn paths_have_causes_of_their_own() {
    let of = |call: &str, errno: &str, path: &str, listener: bool| {
        let mut snapshot = snapshot(&[], &[]);
        let own =
            UnixListener { path: path.to_owned(), owners: vec![owner(7, 1)], ..UnixListener::default() };
        snapshot.unix_listeners = Part::Seen(if listener { vec![own] } else { Vec::new() });
        snapshot.failures = failed(call, errno, "unix", path);
        snapshot
    };
    let expect = |call: &str, errno: &str, path: &str, listener: bool, wanted: &[&str]| {
        expect("X01", 0.0, &of(call, errno, path, listener), wanted);
    };
    let ended = "possible: no program listens at the path: the socket file is of a server that has ended";
    expect("connect", "ECONNREFUSED", "/run/php.sock", false, &[ended]);
    expect(
        "connect",
        "ENOENT",
        "/run/php.sock",
        false,
        &["possible: the server has not started, or has another path"],
    );
    for service in ["/var/run/nscd/socket", "/dev/log", "/run/systemd/notify", "/run/user/0/bus"] {
        expect("connect", "ENOENT", service, false, &[]);
    }
    expect("connect", "ECONNREFUSED", "/dev/log", false, &[ended]);
    expect("bind", "EADDRINUSE", "/run/php.sock", true, &["the cause here: server[7] listens at the path"]);
    expect("bind", "EADDRINUSE", "/run/php.sock", false, &["`rm /run/php.sock`"]);
}

/// What has the port of a bind() that fails: a listener at any address that overlaps, connections of a former server, or something else.
#[test]
fn the_owner_of_a_port_is_a_cause() {
    let of = |at: &str, other: Option<&str>| {
        let mut snapshot = snapshot(&[], &[]);
        let own = |at: &str| Listener { address: at.parse().unwrap(), ..listener(7, [0, 0, 100], 0, 0) };
        snapshot.listeners = Part::Seen(other.map(own).into_iter().collect());
        let left = Service {
            port: 80,
            states: BTreeMap::from([("time-wait".to_owned(), 40)]),
            closes_per_s: 0.0,
            workers: Vec::new(),
        };
        let is_served = other.is_some_and(|other| other.ends_with(":80"));
        let left = if is_served { Vec::new() } else { vec![left] };
        snapshot.connections = Part::Seen(Connections { left, ..Connections::default() });
        snapshot.failures = failed("bind", "EADDRINUSE", "tcp", at);
        snapshot
    };
    // A listener of IPv6 has the port of IPv4 too, unless it excludes IPv4.
    for (ipv6_only, wanted) in
        [(false, "the cause here: server[7] listens at [::]:80"), (true, "possible: the port is taken")]
    {
        let mut both = of("0.0.0.0:80", Some("[::]:80"));
        let Part::Seen(listeners) = &mut both.listeners else { panic!() };
        listeners[0].ipv6_only = ipv6_only;
        expect("X01", 0.0, &both, &[wanted]);
    }
    let expect = |at: &str, other: Option<&str>, wanted: &str| expect("X01", 0.0, &of(at, other), &[wanted]);
    expect("0.0.0.0:80", Some("127.0.0.1:80"), "the cause here: server[7] listens at 127.0.0.1:80");
    expect("127.0.0.1:80", Some("0.0.0.0:80"), "the cause here: server[7] listens at 0.0.0.0:80");
    expect("[::]:80", Some("127.0.0.1:80"), "the cause here: server[7] listens at 127.0.0.1:80");
    let left = "the cause here: no program listens at the port, but it still has connections, 40 time-wait";
    expect("127.0.0.1:80", Some("127.0.0.1:81"), left);
    expect("127.0.0.1:80", None, left);
    expect("127.0.0.1:82", None, "possible: the port is taken");
    expect("127.0.0.1:80", Some("127.0.0.2:80"), "possible: the port is taken");
}

/// Ports whose connections wait for the peer or for close() are not a reason for more ports.
#[test]
fn ports_that_are_stuck() {
    let of = |name: &str, waiting: u32, resent: u32| {
        let states =
            [(name.to_owned(), u64::from(waiting)), ("established".to_owned(), u64::from(200 - waiting))];
        let tuple = Tuple { in_use: 200, states: states.into(), ..tuple(200, 0) };
        let unanswered = Unanswered {
            destination: tuple.destination,
            established: false,
            sockets: resent,
            retransmits: resent,
            unsent: 0,
            none_acknowledged: 0,
            route: None,
            service: None,
            owner: None,
        };
        let unanswered = if resent > 0 { vec![unanswered] } else { Vec::new() };
        let connections = Connections { tuples: vec![tuple], unanswered, ..Connections::default() };
        let mut snapshot = with(snapshot(&[], &[]), &[]);
        snapshot.connections = Part::Seen(connections);
        snapshot.ports = Part::Seen(EphemeralPorts { low: 20_000, high: 20_199, reserved: Vec::new() });
        snapshot
    };
    let silent = "more ports do not help: ";
    let wider = "!net.ipv4.ip_local_port_range";
    let cause = "possible: the host is down, or a firewall drops the packets";
    expect("P01", 90.0, &of("syn-sent", 200, 150), &[silent, wider, cause, "a time limit for connect()"]);
    expect(
        "P01",
        90.0,
        &of("fin-wait-1", 120, 0),
        &[silent, wider, "name: \"net.ipv4.tcp_orphan_retries\", value: \"3\""],
    );
    expect(
        "P01",
        90.0,
        &of("fin-wait-2", 120, 0),
        &[silent, wider, "net.ipv4.tcp_fin_timeout", "its sockets are in CLOSE_WAIT"],
    );
    expect(
        "P01",
        90.0,
        &of("close-wait", 120, 0),
        &[silent, wider, "ss -tnpo state close-wait dst 10.0.0.2:80"],
    );
    // SYNs that are on their way; and a few that are lost.
    expect(
        "P01",
        90.0,
        &of("syn-sent", 200, 0),
        &["!more ports do not help", "net.ipv4.ip_local_port_range"],
    );
    expect("P01", 90.0, &of("syn-sent", 200, 100), &["!more ports do not help"]);
    expect("P03", 1_000.0, &of("syn-sent", 200, 150), &[]);
    expect("P03", 1_000.0, &of("syn-sent", 200, 0), &["the range 20000-20199 has 200 usable ports"]);
}

#[test]
fn searches_at_their_limits() {
    let of = |searches, mean_ns: u64, search_p99_ns| {
        let mut snapshot = snapshot(&[], &[]);
        let search_ns = searches * mean_ns;
        snapshot.traced = Part::Seen(Traced { search_p99_ns, searches, search_ns, ..Traced::default() });
        snapshot
    };
    // 100 searches of 500 us are 5% of half a second of two processors, and 10% of one.
    let wanted = ["5% of the CPU time", "100 searches, 500 us each", "!1% of"];
    expect("L03", 5.0, &of(100, 500_000, None), &wanted);
    expect("L03", 5.1, &of(100, 500_000, None), &[]);
    let slow = ["searches 0.5 ms", "of 100 searches, mean 0.05 ms", "take 1% of one processor"];
    expect("P09", 500.0, &of(100, 50_000, Some(500_000)), &slow);
    expect("P09", 500.0, &of(99, 50_000, Some(500_000)), &[]);
    // The longer searches take, the fewer there are.
    let long = ["searches 0.5 ms", "(mean of 99 searches)", "take 9% of one processor"];
    expect("P09", 500.0, &of(99, 500_000, Some(500_000)), &long);
    expect("P09", 500.0, &of(10, 9_000_000, Some(9_000_000)), &["searches 9.0 ms", "(mean of 10 searches)"]);
    expect("P09", 500.0, &of(99, 499_999, Some(900_000)), &[]);
    expect("P09", 500.0, &of(9, 9_000_000, Some(9_000_000)), &[]);
    expect("P09", 500.0, &of(100, 50_000, Some(499_999)), &[]);
    expect("P09", 500.0, &of(100, 49_999, Some(500_000)), &[]);
}

#[test]
fn drops_of_udp_that_no_counter_has() {
    let of = |errors| {
        let mut snapshot = snapshot(&[], &[("Udp.InErrors", errors), ("Udp.RcvbufErrors", errors)]);
        let socket = UdpSocketView {
            local: "127.0.0.1:53".parse().unwrap(),
            cookie: 1,
            limit_bytes: Some(200),
            drops: Some(Counter { total: 9, during: 5 }),
            owners: vec![owner(7, 1)],
            ..UdpSocketView::default()
        };
        snapshot.udp = Part::Seen(UdpSockets { total: 1, sockets: vec![socket], ..UdpSockets::default() });
        snapshot
    };
    let unseen = ["dropped 5 datagrams", "all sockets: 5 drops", "2 of the drops are in no counter"];
    expect("U01", 5.0, &of(3), &unseen);
    expect("U01", 5.0, &of(5), &["dropped 5 datagrams", "the counters have them all"]);
    expect("U01", 6.0, &of(5), &[]);
    let mut cut = with(of(5), &[]);
    let Part::Seen(udp) = &mut cut.udp else { panic!("made above") };
    udp.left_out = 3;
    for id in ["U02", "U03"] {
        expect(id, 0.0, &with(of(5), &[]), &[]);
        unchecked(id, 0.0, &cut, "3 UDP sockets are not listed");
    }
}

#[test]
fn conntrack_at_its_limit() {
    let of = |entries, drop, early_drop, insert_failed| {
        let names = [("drop", drop), ("early_drop", early_drop), ("insert_failed", insert_failed)];
        let counter = |(name, during): (&str, u64)| (name.to_owned(), Counter { total: 9, during });
        let counters = names.map(counter).into();
        let mut snapshot = snapshot(&[], &[]);
        snapshot.conntrack =
            Part::Seen(Conntrack { count: entries, limit: 1_000, counters, translated: None });
        snapshot
    };
    expect("N01", 90.0, &of(899, 5, 5, 0), &[]);
    expect("N01", 90.0, &of(900, 0, 0, 0), &["Warning 900 of 1,000 entries", "90%", "!dropped", "\"2000\""]);
    // Collisions count as drops.
    expect("N01", 90.0, &of(900, 5, 0, 5), &["Warning", "!dropped"]);
    expect("N01", 90.0, &of(900, 7, 0, 5), &["Critical", "; 2 packets of new connections dropped and 0 "]);
    expect("N01", 90.0, &of(900, 0, 3, 0), &["Critical", "; 0 packets", "and 3 entries evicted"]);
}

/// Returns 10.0.0.1 → 10.0.0.2:80 with sockets in ESTABLISHED and in TIME_WAIT, each at a port of its own.
fn tuple(established: u32, time_wait: u32) -> Tuple {
    let states = [("established", established), ("time-wait", time_wait)];
    Tuple {
        source: [10, 0, 0, 1].into(),
        destination: "10.0.0.2:80".parse().unwrap(),
        in_use: established + time_wait,
        states: states.map(|(name, sockets)| (name.to_owned(), sockets.into())).into(),
        ..Tuple::default()
    }
}

/// Returns a snapshot with a range of 1,000 ports, of which some are reserved, and with these tuples.
fn connected(reserved: &[(u16, u16)], tuples: Vec<Tuple>) -> Snapshot {
    let mut snapshot =
        with(snapshot(&[("net.ipv4.tcp_tw_reuse", 0), ("net.ipv4.tcp_timestamps", 1)], &[]), &[]);
    snapshot.ports = Part::Seen(EphemeralPorts { low: 20_000, high: 20_999, reserved: reserved.to_vec() });
    snapshot.connections = Part::Seen(Connections { tuples, ..Connections::default() });
    snapshot
}

#[test]
fn ports_at_their_limits() {
    let of = |tuple: Tuple| connected(&[], vec![tuple]);
    expect("P01", 90.0, &of(tuple(899, 0)), &[]);
    expect("P01", 90.0, &of(tuple(900, 0)), &["Warning", "900 of 1,000 ports", "!hold", "!per second"]);
    expect("P01", 90.0, &of(tuple(1_000, 0)), &["Critical", "the next connect() fails"]);
    let grown = |growth_per_s| of(Tuple { growth_per_s, owners: vec![owner(7, 900)], ..tuple(900, 0) });
    let wanted = ["1 more port per second", "server[7] has 900 of the", "!trace connect"];
    expect("P01", 90.0, &grown(1.0), &wanted);
    expect("P01", 90.0, &grown(0.9), &["!per second"]);
    // Less than half of the range is not a reason to widen it.
    expect("P03", 1_001.0, &of(tuple(499, 0)), &[]);
    expect("P03", 1_000.0, &of(tuple(500, 0)), &[]);
    let wanted = ["Notice", "1,000 usable ports; 10.0.0.1 → 10.0.0.2:80 uses 500"];
    expect("P03", 1_001.0, &of(tuple(500, 0)), &wanted);
    expect("P03", 1_001.0, &of(tuple(1_000, 0)), &["Warning", "uses 1,000 of them"]);
    let closing = Tuple { closes_per_s: 20.0, closed_last_s: 3, growth_per_s: 20.0, ..tuple(50, 250) };
    let needs = ["Warning", "needs 1,250 at its rate of 20 closes/s (3 in the last second) and 60 s"];
    expect("P03", 1_001.0, &of(closing.clone()), &needs);
    // The range is not small, and the widest one would do; for 2,000 closes/s none would.
    expect("P03", 0.0, &of(closing.clone()), &needs);
    let fast = of(Tuple { closes_per_s: 2_000.0, growth_per_s: 2_000.0, ..closing });
    expect("P03", 0.0, &fast, &[]);
    // The default range would not do either.
    expect("P03", 1_001.0, &fast, &["Warning", "needs 120,050", "!\"32768 60999\""]);
    // Too many reserved blocks for the widest range.
    let blocks: Vec<(u16, u16)> = (0..1_000).map(|block| (30_000 + 2 * block, 30_000 + 2 * block)).collect();
    let wanted = ["Notice", "\"32768 60999\"", "fix --print sysctl"];
    expect("P03", 1_001.0, &connected(&blocks, vec![tuple(500, 0)]), &wanted);
    let two = connected(&[], vec![tuple(600, 0), Tuple { source: [10, 0, 0, 9].into(), ..tuple(600, 0) }]);
    expect("P03", 1_001.0, &two, &["10.0.0.1 → 10.0.0.2:80 uses 600"]);
}

#[test]
fn reserved_ports_at_their_limits() {
    // 250 of 1,000 ports are reserved, and blocks that end or begin outside of the range.
    let reserved = [(19_990, 20_099), (20_850, 21_010)];
    let of = |in_use| connected(&reserved, vec![tuple(in_use, 0)]);
    let inside = ["Notice", "251 of the 1,000 ports of the range are reserved (25%)", "uses 400 of the 749"];
    expect("P04", 25.0, &connected(&[(20_000, 20_250)], vec![tuple(400, 0)]), &inside);
    expect("P04", 25.2, &connected(&[(20_000, 20_250)], vec![tuple(400, 0)]), &[]);
    expect("P04", 0.0, &connected(&[], vec![tuple(400, 0)]), &[]);
    expect("P04", 25.0, &connected(&[(20_000, 20_249)], vec![tuple(187, 0)]), &[]);
    let kept = "\"19990-19999,21000-21010\"";
    expect("P04", 25.0, &of(674), &["Notice", kept]);
    expect("P04", 25.0, &of(675), &["Warning", "reserved inside of the range: 19990-20099,20850-21010"]);
    expect("P04", 25.0, &of(750), &["Critical"]);
    // Without the reservation the ports would be short too.
    let few = connected(&[(20_000, 20_059)], vec![tuple(940, 0)]);
    expect("P04", 5.0, &few, &["Warning", "uses 940 of the 940"]);
}

#[test]
fn sockets_bound_first_at_their_limits() {
    let of = |in_use, low_parity, tuples| {
        let mut snapshot = connected(&[], tuples);
        let Part::Seen(connections) = &mut snapshot.connections else { panic!("made above") };
        let address = [10, 0, 0, 1].into();
        connections.sources =
            vec![Source { address, in_use, low_parity, destinations: 2, owners: vec![owner(7, 3)] }];
        snapshot
    };
    let wanted = ["Notice", "190 of 200 ports are odd", "!EADDRINUSE\n", "process: Some(7)"];
    expect("P08", 20.0, &of(200, 10, Vec::new()), &wanted);
    expect("P08", 20.0, &of(200, 11, Vec::new()), &["Notice", "no two"][..0]);
    expect("P08", 20.0, &of(199, 0, Vec::new()), &[]);
    expect("P08", 0.0, &of(19, 0, Vec::new()), &[]);
    expect("P08", 0.0, &of(20, 0, Vec::new()), &["20 of 20 ports are odd"]);
    expect("P08", 20.0, &of(799, 0, Vec::new()), &["Notice"]);
    expect("P08", 20.0, &of(800, 0, Vec::new()), &["Warning", "!the next bind()"]);
    expect("P08", 20.0, &of(1_000, 0, Vec::new()), &["Critical", "the next bind() to this address"]);
    // Its closes, each of which keeps a port for a minute, need fewer ports than the widest range has, or more.
    for (closes_per_s, range) in
        [(1_000.0, "net.ipv4.ip_local_port_range"), (1_100.0, "!net.ipv4.ip_local_port_range")]
    {
        let mut closing = of(1_000, 10, vec![Tuple { closes_per_s, ..tuple(0, 1_000) }]);
        closing.sysctls.insert("net.ipv4.tcp_tw_reuse".to_owned(), "1".to_owned());
        expect("P08", 20.0, &closing, &["Critical", range]);
        closing.failures = failed("connect", "EADDRNOTAVAIL", "tcp", "10.0.0.4:80");
        expect("P07", 0.0, &closing, &["sockets that seem to have called bind() to 10.0.0.1 have", range]);
    }
    // Two destinations with 100 ports each would share 20 of 1,000.
    let two = |ports| {
        vec![tuple(ports, 0), Tuple { destination: "10.0.0.3:80".parse().unwrap(), ..tuple(ports, 0) }]
    };
    expect("P08", 10.0, &of(200, 100, two(100)), &["no two destinations share a port"]);
    expect("P08", 10.0, &of(199, 100, two(100)), &["no two destinations share a port"]);
    expect("P08", 10.0, &of(198, 100, two(100)), &[]);
    expect("P08", 10.0, &of(140, 70, two(70)), &[]);
    expect("P08", 10.0, &of(142, 71, two(71)), &["no two destinations share a port"]);
    // The trace saw calls of the process without bind(), and then also a bind() that failed.
    let mut traced = of(200, 10, vec![tuple(200, 0)]);
    let connects = |calls| TracedConnects {
        owner: owner(7, calls),
        processes: 1,
        destination: tuple(1, 0).destination,
        searches: 5,
        search_mean_ns: 1,
        search_p99_ns: 1,
        established: 5,
        ..TracedConnects::default()
    };
    let by = |calls| Part::Seen(Traced { connects: vec![connects(calls)], ..Traced::default() });
    traced.traced = by(19);
    expect("P08", 20.0, &traced, &["Notice", "0 of 19 calls of connect()"]);
    // A call that fails leaves no socket.
    let calls = TracedConnects { failed: 1, ..connects(20) };
    traced.traced = Part::Seen(Traced { connects: vec![calls], ..Traced::default() });
    expect("P08", 20.0, &traced, &["Notice", "0 of 19 calls of connect()"]);
    traced.traced = by(20);
    expect("P08", 20.0, &traced, &[]);
    let mut many = of(5_000, 10, vec![tuple(200, 0)]);
    many.traced = by(99);
    expect("P08", 20.0, &many, &["0 of 99 calls of connect()"]);
    many.traced = by(100);
    expect("P08", 20.0, &many, &[]);
    let refused = |errno: &str, pid| FailedCall {
        call: "bind".to_owned(),
        errno: errno.to_owned(),
        owner: owner(pid, 5),
        failed: 5,
        ..FailedCall::default()
    };
    for (errno, pid, found) in
        [("EADDRINUSE", 7, &["0 of 20 calls of connect()"][..]), ("EADDRINUSE", 8, &[]), ("EACCES", 7, &[])]
    {
        traced.failures = Part::Seen(Failures { calls: vec![refused(errno, pid)], ..Failures::default() });
        expect("P08", 20.0, &traced, found);
    }
}

#[test]
fn held_ports_at_their_limits() {
    let of = |held_bound| {
        let mut snapshot = connected(&[], Vec::new());
        snapshot.connections = Part::Seen(Connections { held_bound, ..Connections::default() });
        snapshot
    };
    expect("P06", 10.0, &of(99), &[]);
    expect("P06", 10.0, &of(100), &["Notice bind() holds 100 of 1,000 ports without a connection:"]);
    expect("P06", 10.0, &of(499), &["Notice"]);
    expect("P06", 10.0, &of(500), &["Warning"]);
    expect("P06", 0.0, &of(0), &[]);
}

#[test]
fn growth_and_shares_at_their_limits() {
    let of = |growth_per_s, established| {
        connected(
            &[],
            vec![Tuple { growth_per_s, owners: vec![owner(7, established)], ..tuple(established, 0) }],
        )
    };
    expect("P10", 600.0, &of(1.0, 500), &["uses 500 of 1,000 ports", "about 8 min", "opens 1.0/s more"]);
    expect("P10", 600.0, &of(1.0, 499), &[]);
    expect("P10", 499.0, &of(1.0, 500), &[]);
    expect("P10", 600.0, &of(0.0, 500), &[]);
    expect("P10", 600.0, &of(1.0, 899), &["about 101 s"]);
    expect("P10", 600.0, &of(1.0, 900), &[]);
    expect("P10", 600.0, &of(1.0, 1_001), &[]);
    // Half of the sockets are not most of them: the others stay.
    let half = Tuple { growth_per_s: 1.0, ..tuple(250, 250) };
    expect("P10", 600.0, &connected(&[], vec![half]), &["uses 500 of 1,000 ports", "about 8 min"]);
    // 60 s of these closes need 600 or 1,200 ports: growth that ends below the ports is not a symptom.
    for (closes_per_s, wanted) in [(10.0, &[][..]), (20.0, &["took 10 further ports"])] {
        let mut closing = connected(&[], vec![Tuple { growth_per_s: 20.0, closes_per_s, ..tuple(0, 600) }]);
        closing.failures = Part::Seen(Failures::default());
        expect("X01", 0.0, &closing, wanted);
    }
    let shared = |sockets: &[u32], established| {
        let owners = (1..).zip(sockets).map(|(pid, sockets)| owner(pid, *sockets)).collect();
        connected(&[], vec![Tuple { owners, ..tuple(established, 100) }])
    };
    let wanted = ["2 processes share the 1,000 ports", "50% are", "!more;"];
    expect("P12", 50.0, &shared(&[200, 200], 400), &wanted);
    expect("P12", 50.0, &shared(&[367, 33], 400), &[]);
    expect("P12", 50.0, &shared(&[270, 30], 400), &["server[1] 270, server[2] 30"]);
    expect("P12", 50.0, &shared(&[200, 199], 399), &[]);
    // Inherited descriptors count twice.
    expect("P12", 50.0, &shared(&[220, 220], 400), &["2 processes share"]);
    expect("P12", 50.0, &shared(&[221, 220], 400), &[]);
    expect("P12", 50.0, &shared(&[100, 100, 100, 100], 400), &["server[3] 100 and 1 more;"]);
    expect("P12", 50.0, &shared(&[100, 100, 100], 400), &["server[3] 100;"]);
    unchecked("P12", 50.0, &shared(&[], 400), HIDDEN);
    unchecked("P12", 50.0, &shared(&[399], 400), HIDDEN);
    expect("P12", 50.0, &shared(&[], 0), &[]);
}

const HIDDEN: &str = "some processes are not visible";

#[track_caller]
fn unchecked(id: &str, limit: f64, snapshot: &Snapshot, reason: &str) {
    let found = (named(id).expect("a rule").check)(snapshot, limit);
    let found = found.map(|found| found.iter().map(text).collect::<Vec<_>>());
    assert!(found.as_ref().is_err_and(|found| found.contains(reason)), "{id}: {found:#?}");
}

#[test]
fn without_visible_processes_silence_is_not_health() {
    let mut of = with(snapshot(&[("net.ipv4.tcp_migrate_req", 0)], &[]), &[]);
    of.udp = Part::Seen(UdpSockets::default());
    of.connections = Part::Seen(Connections::default());
    let of_unix = |owners| UnixListener { path: "@web".to_owned(), owners, ..UnixListener::default() };
    of.unix_listeners = Part::Seen(vec![of_unix(vec![owner(7, 1)])]);
    for id in ["F01", "B01", "B02", "B04", "U03"] {
        expect(id, 0.7, &of, &[]);
    }
    let states = [("established".to_owned(), 40)].into();
    let services = vec![Service { port: 4000, states, closes_per_s: 0.0, workers: Vec::new() }];
    of.connections = Part::Seen(Connections { processes_hidden: 1, services, ..Connections::default() });
    let without_owner = |cookie, queue| Listener { cookie, owners: Vec::new(), ..listener(7, queue, 0, 0) };
    let group = [without_owner(1, [9, 9, 128]), without_owner(2, [0; 3])];
    for id in ["F01", "B01", "B02", "B04", "U03"] {
        unchecked(id, 0.7, &with(of.clone(), &group), HIDDEN);
    }
    // Fewer connections than any rule looks at.
    of.connections = Part::Seen(Connections::default());
    expect("B01", 0.7, &with(of.clone(), &group), &[]);
    of.unix_listeners = Part::Seen(vec![of_unix(Vec::new())]);
    for id in ["B01", "B02"] {
        unchecked(id, 0.7, &of, HIDDEN);
    }
}

#[test]
fn without_a_trace_silence_about_calls_is_not_health() {
    let mut of = connected(&[], Vec::new());
    (of.lost_sources, of.addresses) = (Part::Seen(Vec::new()), Part::Seen(Vec::new()));
    of.failures = Part::Hidden("--no-trace".to_owned());
    of.counters = snapshot(&[], &[("TcpExt.ListenDrops", 0), ("TcpExt.ListenOverflows", 0)]).counters;
    expect("A02", 1.0, &of, &[]);
    unchecked(
        "P11",
        0.0,
        &of,
        "--no-trace; `fourtuple trace connect --for 10s` shows failed calls of bind()",
    );
    of.unix_listeners = Part::Seen(vec![UnixListener::default()]);
    unchecked("A02", 1.0, &of, "--no-trace; `fourtuple trace connect --for 10s` shows connections that unix");
    of.failures = Part::Seen(Failures::default());
    for id in ["A02", "P11"] {
        expect(id, 1.0, &of, &[]);
    }
    // A source whose tuples are not among those with the most ports in use.
    let mut cut = connected(&[], Vec::new());
    let address = [10, 0, 0, 77].into();
    (cut.lost_sources, cut.addresses) = (Part::Seen(vec![address]), Part::Seen(Vec::new()));
    let source = Source { address, in_use: 3, low_parity: 0, destinations: 3, owners: vec![owner(7, 3)] };
    let (sources, tuples_left_out) = (vec![source], 1);
    cut.connections = Part::Seen(Connections { sources, tuples_left_out, ..Connections::default() });
    let wanted = ["server[7] has connections from 10.0.0.77", "(their destinations are not listed)"];
    expect("P11", 1.0, &Snapshot { failures: of.failures.clone(), ..cut }, &wanted);
    unchecked("T07", 1.0, &Snapshot { unix_listeners: Part::default(), ..of }, "not read");
}

#[test]
fn time_wait_at_its_limits() {
    let of = |time_wait, overflow: Counter| {
        let mut snapshot = snapshot(&[("net.ipv4.tcp_max_tw_buckets", 1_000)], &[]);
        let counters = BTreeMap::from([("TcpExt.TCPTimeWaitOverflow".to_owned(), overflow)]);
        snapshot.counters = Part::Seen(counters);
        snapshot.memory = Part::Seen(TcpMemory { time_wait, ..TcpMemory::default() });
        snapshot
    };
    let none = Counter::default();
    expect("T01", 80.0, &of(799, none), &[]);
    expect("T01", 0.0, &of(0, none), &[]);
    let wanted = ["Warning 800 sockets are in TIME_WAIT, 80% of the 1,000", "\"262144\""];
    expect("T01", 80.0, &of(800, none), &wanted);
    expect("T01", 80.0, &of(200_000, none), &["\"524288\""]);
    let past = Counter { total: 5, during: 0 };
    let now = Counter { total: 5, during: 3 };
    expect("T02", 0.0, &of(1_000, none), &[]);
    expect("T02", 0.0, &of(499, past), &[]);
    let wanted = ["Notice 5 connections skipped TIME_WAIT so far", "with 500 sockets in"];
    expect("T02", 0.0, &of(500, past), &wanted);
    expect("T02", 0.0, &of(1_000, past), &["Notice"]);
    expect("T02", 0.0, &of(999, now), &["Notice 3 connections skipped TIME_WAIT in 0.5 s"]);
    expect("T02", 0.0, &of(1_000, now), &["Warning 3 connections skipped TIME_WAIT in 0.5 s"]);
    let waiting = |established, time_wait, delay: Option<u64>| {
        let mut snapshot = connected(&[], vec![tuple(established, time_wait)]);
        if let Some(delay) = delay {
            snapshot.sysctls.insert("net.ipv4.tcp_tw_reuse".to_owned(), "1".to_owned());
            snapshot.sysctls.insert("net.ipv4.tcp_tw_reuse_delay".to_owned(), delay.to_string());
        }
        snapshot
    };
    let wanted = ["Notice", "is 0 (never)", "25% of its ports in TIME_WAIT"];
    expect("T03", 50.0, &waiting(249, 251, None), &wanted);
    expect("T03", 50.0, &waiting(250, 250, None), &[]);
    expect("T03", 50.0, &waiting(248, 251, None), &[]);
    expect("T03", 50.0, &waiting(0, 900, None), &["Warning", "90% of its ports in TIME_WAIT"]);
    let reuse = "\"net.ipv4.tcp_tw_reuse\"";
    let at = |closes_per_s| connected(&[], vec![Tuple { closes_per_s, ..tuple(0, 900) }]);
    expect("T03", 50.0, &at(1_000.0), &["Warning", reuse]);
    let closed = Tuple { closes_per_s: 30.0, closed_last_s: 3, ..tuple(0, 900) };
    expect("T06", 50.0, &connected(&[], vec![closed]), &["(300 in the last 10 s, 3 in the last second)"]);
    // The ports would run out in a second.
    expect("T03", 50.0, &at(1_001.0), &["Warning", &format!("!{reuse}")]);
    expect("T03", 0.0, &waiting(0, 900, Some(1_000)), &[]);
    expect("T03", 0.0, &waiting(0, 900, Some(1_001)), &["tcp_tw_reuse_delay is 1.001 s"]);
    let stamped = |time_wait, timestamps: &str| {
        let tuple = Tuple { time_wait_plain: Some(time_wait), ..tuple(0, time_wait) };
        let mut snapshot = connected(&[], vec![tuple]);
        for (name, value) in [("net.ipv4.tcp_tw_reuse", "1"), ("net.ipv4.tcp_timestamps", timestamps)] {
            snapshot.sysctls.insert(name.to_owned(), value.to_owned());
        }
        snapshot
    };
    for (timestamps, wanted) in [("0", "tcp_timestamps is 0"), ("1", "uses no TCP timestamps")] {
        expect("T04", 25.0, &stamped(249, timestamps), &[]);
        expect("T04", 25.0, &stamped(250, timestamps), &["Notice", wanted]);
        expect("T04", 25.0, &stamped(900, timestamps), &["Warning", wanted]);
        expect("T04", 0.0, &stamped(0, timestamps), &[]);
    }
}
