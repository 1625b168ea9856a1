//! The rules about ports, on real sockets.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use fourtuple_observe::doctor::{Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{
    Failures, IdleTimes, Part, Process, RunningFix, Snapshot, Traced, TracedConnects, Tuple,
};
use fourtuple_record::{Proof, Severity};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, option};
use fourtuple_testing::process::Python;
use fourtuple_testing::{in_namespace, listener, process, set_sysctl, skip};

use crate::scene::{
    FAR, NEAR, RANGE, add_addresses, advice, apply, are_used, bound, close, connect, connect_and_close,
    cured, failed_call, findings, findings_in, found_after_closes, ip, known, now, now_used, owner, read,
    reads_by_bpf, says, server, shows, small_range, the_finding, this_process, traced_connects, until,
    until_time_wait, use_all, with_python,
};

const SOL_IP: i32 = 0;
const IP_TRANSPARENT: i32 = 19;
const RESERVED: &str = "net.ipv4.ip_local_reserved_ports";

#[test]
fn p01_a_full_range_is_named() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let mut all = connect(address, 10);
        assert!(findings("P01").is_empty());
        all.extend(connect(address, 10));
        let finding = the_finding(&now_used(&all), "P01");
        assert_eq!(finding.severity, Severity::Critical);
        let tuple = "10.0.0.1 → 10.0.0.1:4000 uses 20 of 20 ports";
        says(&finding, &[tuple, &this_process(), "20 of the connections"]);
        assert_eq!(finding.evidence[0], "the range is narrow: 20 ports, by default 28,232");
        let fix = advice(&finding, "fourtuple fix ports");
        let pid = std::process::id();
        let command = format!("fourtuple fix ports --pid {pid} --source 10.0.0.0/24 --to 10.0.0.1:4000");
        assert_eq!((&fix.action, &fix.proof), (&command, &Proof::Calculation));
        cured(&finding, RANGE);
    });
}

/// A command about one of the children would help with its connections only.
#[test]
fn p01_of_many_processes_the_parent_is_named() {
    with_python(|| {
        small_range("20000 20019");
        let (_listener, _) = listener(NEAR, 100);
        let mut parent = Python::start();
        // With PR_SET_PDEATHSIG the children end with their parent. Connections without data seem to be a leak after 5 s.
        parent.run(
            "import ctypes, os, signal\n\
             for _ in range(10):\n  \
               if os.fork() == 0:\n    \
                 ctypes.CDLL(None).prctl(1, 9)\n    \
                 kept = [socket.create_connection(('10.0.0.1', 4000)) for _ in range(2)]\n    \
                 while True:\n      \
                   for connection in kept: connection.send(b'x')\n      \
                   time.sleep(0.5)",
        );
        let mut snapshot = until("all connections", || {
            let snapshot = now();
            let owners = &snapshot.connections.seen().ok()?.tuples.first()?.owners;
            let sockets = owners.iter().map(|owner| owner.sockets).sum::<u32>();
            (sockets == 20 && are_used(&snapshot)).then_some(snapshot)
        });
        let finding = the_finding(&snapshot, "P01");
        let name = format!("[{}] (with its children)", parent.pid());
        says(&finding, &[&format!("{name}: at most 2 connections each$")]);
        let fix = advice(&finding, "fourtuple fix ports");
        assert!(fix.action.contains(&format!("--pid {} ", parent.pid())), "{fix:?}");
        let idle = IdleTimes { median_ns: 42_000_000_000, longest_ns: 100_000_000_000 };
        known(&mut snapshot.connections).tuples[0].idle = Some(idle);
        let leak = the_finding(&snapshot, "P01");
        says(&leak, &[&format!("{name} seems to leak connections")]);
        assert!(leak.now[0].action.ends_with("dst 10.0.0.1:4000"), "{leak:#?}");
        assert!(
            leak.now[1].action.starts_with("restart ") && leak.now[1].action.ends_with(&name),
            "{leak:#?}"
        );
        // Without their parent they are several.
        known(&mut snapshot.processes).clear();
        says(&the_finding(&snapshot, "P01"), &[" (several processes) seems to leak connections"]);
    });
}

#[test]
fn p01_a_leak_of_idle_connections_is_called_a_leak() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let all = connect(address, 20);
        let mut snapshot = now_used(&all);
        let idle = snapshot.connections.seen().unwrap().tuples[0].idle;
        let idle = idle.expect("the tuple has a quarter of the ports");
        assert!(idle.longest_ns < 60_000_000_000 && idle.median_ns <= idle.longest_ns, "{idle:?}");
        assert!(!the_finding(&snapshot, "P01").verdict.contains("leak"), "not idle for long");
        let idle = IdleTimes { median_ns: 42_000_000_000, longest_ns: 100_000_000_000 };
        known(&mut snapshot.connections).tuples[0].idle = Some(idle);
        let finding = the_finding(&snapshot, "P01");
        let claim = "seems to leak connections: half of them have carried no data for 42 s or longer$";
        says(&finding, &[claim]);
        assert!(finding.now[0].action.starts_with("ss -tnpoi state established dst 10.0.0.1:4000 | grep"));
        assert_eq!(finding.now[1].effect, "frees the ports for 100 s");
        assert!(finding.now.iter().all(|advice| !advice.action.contains("fix ports")), "{finding:#?}");
        // Without the listeners nothing wider can be set at once.
        let blind = Snapshot { listeners: Part::Hidden("EPERM".to_owned()), ..snapshot.clone() };
        let leaks = [&snapshot, &blind].map(|snapshot| ["P01", "P03"].map(|id| the_finding(snapshot, id)));
        for leak in leaks.into_iter().flatten() {
            let lasting = leak.proper.iter().any(|advice| advice.action.contains("sysctl"));
            assert!(!lasting, "a wider range does not end a leak: {leak:#?}");
        }
        // 20 in 100 s: 0.2/s.
        own_limit(&mut snapshot, Some(100));
        let end = "this lasts 50 s at 0.2/s: then the process has no descriptor left of 100 (RLIMIT_NOFILE, EMFILE)";
        for id in ["P01", "P03"] {
            let wider = advice(&the_finding(&snapshot, id), RANGE).effect.clone();
            assert!(wider.ends_with(end), "{wider}");
        }
        own_limit(&mut snapshot, None);
        let wider = advice(&the_finding(&snapshot, "P01"), RANGE).effect.clone();
        assert!(wider.contains("this lasts 90 h at 0.2/s"), "{wider}");
        // A pool of constant size that leaves ports free is not a leak.
        known(&mut snapshot.connections).tuples[0].in_use = 19;
        assert!(!the_finding(&snapshot, "P01").verdict.contains("leak"));
        known(&mut snapshot.connections).tuples[0].growth_per_s = 2.0;
        snapshot.interval_ns = 1_000_000_000;
        says(&the_finding(&snapshot, "P01"), &["leak"]);
    });
}

/// Sets the limit of descriptors of this process.
fn own_limit(snapshot: &mut Snapshot, limit: Option<u64>) {
    let mut processes = known(&mut snapshot.processes).iter_mut();
    let own = processes.find(|process| process.pid == std::process::id());
    let own = own.expect("processes with sockets are listed");
    (own.descriptors, own.descriptor_limit) = (90, limit);
}

#[test]
fn p01_names_the_side_that_closes_first() {
    in_namespace(|| {
        let closed = " closed 20 connections in the last 10 s, ";
        let (server, finding) = found_after_closes("20000 20019", 20, "P01", closed);
        says(&finding, &["20 of 20 ports, 100% of them in TIME_WAIT", "; at most 0.3/s can last$"]);
        assert!(TcpStream::connect(server.local_addr().unwrap()).is_err(), "EADDRNOTAVAIL");
        // After 10 s without a close only a trace knows the process.
        let mut later = now();
        known(&mut later.connections).tuples[0].closes_per_s = 0.0;
        later.failures = Part::Seen(failures());
        let p01 = the_finding(&later, "P01");
        says(&p01, &["100% of them in TIME_WAIT; envoy[812] calls connect()$"]);
        says(&the_finding(&later, "T06"), &["closes its connections to 10.0.0.1:4000 first: 100% of"]);
        // One cause: the same tuple, or the same setting helps. The listener has another fault.
        let listener = &mut known(&mut later.listeners)[0];
        (listener.waiting_before, listener.waiting) = (listener.backlog + 1, listener.backlog + 1);
        let found = diagnose(&later, &Limits::default()).findings;
        let causes: BTreeMap<&str, Option<u32>> =
            found.iter().map(|finding| (&*finding.id, finding.same_cause_as)).collect();
        let expected = [("A01", None), ("P01", None), ("P03", Some(0)), ("T03", Some(0)), ("T06", Some(0))];
        assert_eq!((&*found[0].id, causes), ("P01", BTreeMap::from(expected)));
        apply(advice(&finding, "tcp_tw_reuse=1"));
        if reads_by_bpf("p01_names_the_side_that_closes_first") {
            // The ports are taken again once the delay of a second is over; the rate of the closes is the mean of 10 s.
            let finding = findings("P01");
            assert!(finding.is_empty(), "{finding:#?}");
        }
    });
}

#[test]
fn p01_ports_that_loopback_may_reuse_are_free() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20019");
        // With 2, the default, a connect() that comes a second late takes one of the ports again.
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let (server, _) = server("127.0.0.1", 4000);
        connect_and_close(&server, 20);
        until_time_wait(20);
        assert_eq!(findings("P01").len(), 1);
        set_sysctl("net.ipv4.tcp_tw_reuse", "2");
        assert!(findings("P01").is_empty());
    });
}

#[test]
fn sources_that_the_closes_outrun_are_not_proposed() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let _one = connect(address, 1);
        let mut full = now();
        let own = known(&mut full.connections).tuples.remove(0);
        let with = |tuples: Vec<Tuple>| {
            let mut snapshot = full.clone();
            known(&mut snapshot.connections).tuples = tuples;
            snapshot
        };
        let proposed = |snapshot: &Snapshot| {
            let findings = findings_in(snapshot, "P01");
            let own = findings.iter().find(|finding| finding.subject.starts_with(NEAR)).unwrap();
            (own.clone(), own.now.iter().any(|advice| advice.action.contains("fix ports")))
        };
        // Two sources have 40 ports: 0.67 closes/s for ever.
        let at = |closes_per_s: f64| Tuple {
            in_use: 20,
            low_parity: 10,
            closes_per_s,
            time_wait_plain: Some(0),
            states: [("time-wait".to_owned(), 20)].into(),
            ..own.clone()
        };
        assert!(proposed(&with(vec![at(0.5)])).1);
        assert!(!proposed(&with(vec![at(2.0)])).1, "two sources of 20 ports for 120");
        let prints_sources = |closes_per_s| {
            let mut tuple = at(closes_per_s);
            tuple.owners[0].name = "nginx".to_owned();
            let (finding, _) = proposed(&with(vec![tuple]));
            let printed = finding.proper.iter().find(|advice| advice.action.contains("fix --print nginx"));
            printed.expect("a configuration of nginx").action.contains("--source")
        };
        assert!(prints_sources(0.5) && !prints_sources(2.0));
        // The default range has 28,232 ports for 60 s: 470/s for ever.
        for (closes_per_s, end) in
            [(400.0, "by default 28,232$"), (600.0, "28,232, which this rate would use up too$")]
        {
            shows(&proposed(&with(vec![at(closes_per_s)])).0, &[end]);
        }
        let other = Tuple { source: ip(FAR), ..at(0.5) };
        assert!(!proposed(&with(vec![at(0.5), other.clone()])).1, "the other source has sockets of its own");
        // Our fix runs.
        let fix = Some(RunningFix { pid: 4711, source: Some("10.0.0.0/24".to_owned()), guard: false });
        let free =
            Tuple { in_use: 5, states: [("established".to_owned(), 5)].into(), closes_per_s: 0.0, ..other };
        let relieved = with(vec![Tuple { fix: fix.clone(), ..at(0.5) }, free]);
        let (finding, is_proposed) = proposed(&relieved);
        assert!(findings_in(&relieved, "P03").is_empty() && findings_in(&relieved, "T03").is_empty());
        assert!(!is_proposed, "{finding:#?}");
        assert_eq!(finding.severity, Severity::Notice, "new connections have another source: {finding:#?}");
        let fix = "^`fourtuple fix ports` (process 4711) opens its new connections from the addresses of 10.0.0.0/24";
        shows(&finding, &[fix]);
        // A guard draws ports, and its policy can have the sources.
        let fix = Some(RunningFix { pid: 4711, source: None, guard: true });
        let (finding, is_proposed) = proposed(&with(vec![Tuple { fix, ..at(0.5) }]));
        assert!(!is_proposed, "{finding:#?}");
        shows(&finding, &["^fixed by guard[4711], which opens its new connections from free ports"]);
        let policy = "below [fix-ports] in the policy of guard[4711], then `sudo kill -HUP 4711`";
        assert!(finding.now.iter().any(|advice| advice.action.ends_with(policy)), "{finding:#?}");
    });
}

#[test]
fn p02_a_parity_in_use_makes_searches_long() {
    in_namespace(|| {
        small_range("20000 21199");
        let (_listener, address) = listener(NEAR, 2000);
        let _half = connect(address, 560);
        assert!(findings("P02").is_empty());
        let _more = connect(address, 60);
        let snapshot = now();
        let finding = the_finding(&snapshot, "P02");
        says(&finding, &["uses 600 of 600 even ports", &this_process(), "up to 600 ports"]);
        let is_computed = finding.now.iter().all(|advice| advice.proof == Proof::Calculation);
        assert!(finding.now.len() >= 3 && is_computed, "{finding:#?}");
        advice(&finding, "51 /* IP_LOCAL_PORT_RANGE */");
        let mut linear = snapshot.clone();
        known(&mut linear.search).default = "linear".to_owned();
        assert!(findings_in(&linear, "P02").is_empty());
        no_draws_for_a_full_tuple(&snapshot);
        cured(&finding, RANGE);
    });
}

/// Fills the tuple of a snapshot whose searches are long: no rule may promise that they find a port.
fn no_draws_for_a_full_tuple(long: &Snapshot) {
    let connects = |snapshot: &Snapshot| {
        let tuple = &snapshot.connections.seen().unwrap().tuples[0];
        traced_connects(tuple.owners[0].clone(), tuple.destination)
    };
    let mut snapshot = long.clone();
    snapshot.interval_ns = 1_000_000_000;
    snapshot.traced = Part::Seen(Traced {
        search_p99_ns: Some(4_700_000),
        searches: 1_000,
        search_ns: 2_300_000_000,
        connects: vec![connects(&snapshot)],
        ..Traced::default()
    });
    let draws = |snapshot: &Snapshot, id: &str| {
        let found = findings_in(snapshot, id);
        let all = found.iter().flat_map(|finding| &finding.now);
        all.filter(|advice| advice.action.contains("fix ports") && advice.effect.contains("draw a free port"))
            .count()
    };
    assert_eq!(["P02", "P09", "L03"].map(|id| draws(&snapshot, id)), [1, 1, 1]);
    let found = diagnose(&snapshot, &Limits::default()).findings;
    let cause = found.iter().position(|finding| finding.id == "P02").map(|place| place as u32);
    for id in ["P09", "L03"] {
        let effect = found.iter().find(|finding| finding.id == id).unwrap();
        assert_eq!(effect.same_cause_as, cause, "{id}: {found:#?}");
    }
    for time_wait in [0, 1_200] {
        let mut full = snapshot.clone();
        let tuple = &mut known(&mut full.connections).tuples[0];
        tuple.in_use = 1_200;
        if time_wait > 0 {
            // All may be taken again.
            tuple.states = [("time-wait".to_owned(), time_wait)].into();
            full.sysctls.insert("net.ipv4.tcp_tw_reuse".to_owned(), "1".to_owned());
        }
        assert!(findings_in(&full, "P02").is_empty(), "{time_wait}");
        assert_eq!(["P09", "L03"].map(|id| draws(&full, id)), [0, 0], "{time_wait}");
        let fact = "uses 1,200 of 1,200 ports: there is no free port that `fix ports` could draw$";
        for id in ["P09", "L03"] {
            let finding = the_finding(&full, id);
            shows(&finding, &[fact]);
            let mut proper = finding.proper.iter();
            assert!(!proper.any(|advice| advice.action.contains("IP_LOCAL_PORT_RANGE")), "{time_wait} {id}");
        }
    }
}

#[test]
fn p03_a_small_range_matters_under_use() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let _few = connect(address, 5);
        assert!(findings("P03").is_empty());
        let _more = connect(address, 5);
        let finding = the_finding(&now(), "P03");
        says(&finding, &["20000-20019 has 20 usable ports", "uses 10"]);
        cured(&finding, RANGE);
    });
}

#[test]
fn p03_a_rate_can_need_more_ports_than_the_range_has() {
    in_namespace(|| {
        let (_server, finding) = found_after_closes("20000 20099", 40, "P03", "needs 240");
        says(&finding, &["at its rate of 4 closes/s"]);
    });
}

#[test]
fn p04_reserved_ports_are_counted_where_they_matter() {
    in_namespace(|| {
        small_range("20000 20019");
        set_sysctl(RESERVED, "8080,20004-20015");
        let (_listener, address) = listener(NEAR, 100);
        assert!(findings("P04").is_empty());
        let mut all = connect(address, 6);
        let finding = the_finding(&now(), "P04");
        let reserved = "12 of the 20 ports of the range are reserved (60%)";
        says(&finding, &[reserved, "uses 6 of the 8 that are left"]);
        let list = advice(&finding, &format!("{RESERVED}=8080"));
        assert_eq!(list.action, format!("sysctl -w {RESERVED}=8080"), "ports outside of the range stay");
        let undo = list.undo.as_deref().unwrap();
        assert!(undo.starts_with(&format!("sysctl -w {RESERVED}=8080,20004-20015 && rm ")), "{undo}");
        assert_ne!(finding.now[0].action, list.action, "first a command that keeps the reservation");
        all.extend(connect(address, 2));
        // A full tuple whose connections are idle has another cause, a leak.
        let found = diagnose(&now_used(&all), &Limits::default()).findings;
        let order: Vec<(Severity, String)> =
            found.iter().map(|finding| (finding.severity, finding.id.clone())).collect();
        assert_eq!(order[0], (Severity::Critical, "P04".to_owned()), "the cause of P01: {order:?}");
        assert_eq!(order[1], (Severity::Critical, "P01".to_owned()), "{order:?}");
        apply(list);
        assert!(findings("P04").is_empty());
    });
}

#[test]
fn p05_listeners_in_a_used_range_can_lose_their_port() {
    in_namespace(|| {
        small_range("20000 20099");
        let (_inside, _) = server(NEAR, 20_050);
        // No connection of the other address takes this port.
        let (_apart, _) = server("127.0.0.1", 20_060);
        let (_listener, address) = listener(NEAR, 100);
        let _few = connect(address, 5);
        assert!(findings("P05").is_empty());
        let _more = connect(address, 15);
        let finding = the_finding(&now(), "P05");
        let own = format!("{} (20050)", this_process());
        says(&finding, &[&own, "from 10.0.0.1 use 20 of 100 ports", "about 20%"]);
        assert!(!finding.verdict.contains("20060"), "{}", finding.verdict);
        cured(&finding, RESERVED);
    });
}

#[test]
fn p05_a_self_connection_blocks_a_server() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20009");
        let port = SocketAddr::from(([127, 0, 0, 1], 20_004));
        // Nothing listens: connect() fails until it chooses the port of the destination.
        let own = until("a self-connection", || TcpStream::connect(port).ok());
        assert_eq!(own.local_addr().unwrap(), own.peer_addr().unwrap());
        assert!(TcpListener::bind(port).is_err());
        let finding = the_finding(&now(), "P05");
        let verdict = format!("{} is connected to itself at 127.0.0.1:20004", this_process());
        says(&finding, &[&format!("{verdict}: bind() of a server")]);
        let reserve = advice(&finding, RESERVED);
        assert_eq!(reserve.action, format!("sysctl -w {RESERVED}=20004"));
        advice(&finding, "ss -K src '127.0.0.1:20004' dst '127.0.0.1:20004'");
        // The connection explains the calls of the server to its port, and no others.
        let calls = ["127.0.0.1:20004", "0.0.0.0:20004", "127.0.0.1:20005"]
            .map(|address| failed_call(owner(812, "server", 9), "bind", "EADDRINUSE", address));
        let failures = Part::Seen(Failures { calls: calls.into(), ..Failures::default() });
        let snapshot = Snapshot { failures, interval_ns: 2_000_000_000, ..now() };
        let mut left = findings_in(&snapshot, "X01");
        left.retain(|finding| finding.verdict.contains("bind()"));
        assert_eq!(left.len(), 1, "{left:#?}");
        says(&left[0], &["9 bind() of server[812] to 127.0.0.1:20005 failed with EADDRINUSE"]);
        set_sysctl(RESERVED, "20004");
        option::set_reset_on_close(own.as_fd()).unwrap();
        drop(own);
        let _server = until("bind()", || TcpListener::bind(port).ok());
        assert!(findings("P05").is_empty());
    });
}

#[test]
fn p05_node_ports_are_known_by_their_server() {
    in_namespace(|| {
        small_range("32700 32799");
        let (_listener, address) = listener(NEAR, 100);
        let _connections = connect(address, 20);
        assert!(findings("P05").is_empty());
        let mut snapshot = now();
        let proxy = Process { pid: 7, name: "kube-proxy".to_owned(), ..Process::default() };
        snapshot.processes = Part::Seen(vec![proxy]);
        let finding = the_finding(&snapshot, "P05");
        says(&finding, &["^kube-proxy[7] serves NodePorts 30000-32767"]);
        assert!(advice(&finding, RESERVED).action.ends_with("=30000-32767"));
    });
}

/// The list of held ports is bounded; the numbers are not.
#[test]
fn p03_held_ports_of_udp_are_no_ports_of_tcp() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20999");
        let _held: Vec<_> = (20_000..20_100).map(|port| server("127.0.0.9", port)).collect();
        let _udp: Vec<_> =
            (20_100..20_600).map(|port| std::net::UdpSocket::bind(("127.0.0.1", port)).unwrap()).collect();
        let (_listener, address) = listener("127.0.0.1", 400);
        let _clients = connect(address, 380);
        let snapshot = now();
        let found = ["P01", "P03", "P06"].map(|id| findings_in(&snapshot, id));
        assert!(found.iter().all(Vec::is_empty), "380 of 900 ports are in use: {found:#?}");
    });
}

#[test]
fn p06_bound_ports_name_their_process() {
    in_namespace(|| {
        set_sysctl(RANGE, "20000 20099");
        let few: Vec<_> = (0..5).map(|_| bound("127.0.0.1", 0)).collect();
        assert!(findings("P06").is_empty());
        let many: Vec<_> = (0..25).map(|_| bound("127.0.0.1", 0)).collect();
        let snapshot = now();
        if snapshot.connections.seen().unwrap().held.is_empty() {
            let why = "sock_diag lists bound sockets since Linux 6.8";
            return skip("p06_bound_ports_name_their_process", "bound", why);
        }
        let finding = the_finding(&snapshot, "P06");
        says(&finding, &["holds 30 of 100 ports", &this_process()]);
        // As root, `run` without a way leaves bound sockets alone.
        advice(&finding, "`fourtuple run --via bound -- PROGRAM`");
        cured(&finding, RANGE);
        drop((few, many));
    });
}

fn failures() -> Failures {
    let call = failed_call(owner(812, "envoy", 312), "connect", "EADDRNOTAVAIL", "10.0.0.1:4000");
    Failures { calls: vec![call], ..Failures::default() }
}

#[test]
fn p07_failed_connects_name_process_and_destination() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let all = connect(address, 20);
        // What P07 advises depends on whether the connections seem to be a leak.
        let mut snapshot = now_used(&all);
        let unchecked = diagnose(&snapshot, &Limits::default()).unchecked;
        let p07 = unchecked.iter().find(|unchecked| unchecked.id == "P07").unwrap();
        assert!(p07.reason.contains("fourtuple trace connect --for 10s"), "{unchecked:?}");
        snapshot.failures = Part::Seen(Failures::default());
        assert!(findings_in(&snapshot, "P07").is_empty());
        snapshot.failures = Part::Seen(failures());
        snapshot.interval_ns = 10_000_000_000;
        let finding = the_finding(&snapshot, "P07");
        assert_eq!(finding.severity, Severity::Critical);
        let expected = "envoy[812] cannot connect to 10.0.0.1:4000: 312 calls of connect() failed with EADDRNOTAVAIL in 10.0 s";
        assert_eq!(finding.verdict, expected);
        assert!(finding.evidence[0].contains("uses 20 of 20 ports (P01)"), "{finding:#?}");
        for action in ["fourtuple fix ports --pid 812 ", RANGE] {
            assert_eq!(advice(&finding, action).proof, Proof::Calculation, "{action}");
        }
        // The exhausted tuple is the cause and comes first.
        let order = diagnose(&snapshot, &Limits::default()).findings;
        assert_eq!((order[0].id.as_str(), order[1].id.as_str()), ("P01", "P07"));
        // Failures of the process that has the ports are a fact of the tuple.
        known(&mut snapshot.connections).tuples[0].owners[0] = failures().calls[0].owner.clone();
        assert!(findings_in(&snapshot, "P07").is_empty());
        assert_eq!(the_finding(&snapshot, "P01").evidence[0], expected);
        // Workers are one line.
        let worker = failed_call(owner(813, "envoy", 8), "connect", "EADDRNOTAVAIL", "10.0.0.1:4000");
        known(&mut snapshot.failures).calls.push(worker);
        let expected = "envoy (2 processes) cannot connect to 10.0.0.1:4000: 320 calls";
        assert!(the_finding(&snapshot, "P01").evidence[0].starts_with(expected));
    });
}

#[test]
fn p07_failures_without_a_full_tuple_are_a_warning() {
    let snapshot = Snapshot { failures: Part::Seen(failures()), ..Snapshot::default() };
    assert_eq!(the_finding(&snapshot, "P07").severity, Severity::Warning);
}

/// Connects sockets that are bound to port 0 before, to two servers in turn.
fn bound_first(number: usize, servers: [SocketAddr; 2]) -> Vec<OwnedFd> {
    let connected = |index: usize| {
        let socket = bound(FAR, 0);
        socket::connect(socket.as_fd(), servers[index % 2]).unwrap();
        socket
    };
    (0..number).map(connected).collect()
}

/// connect() passes over the ports of bind(), whatever the addresses (`__inet_hash_connect`: fastreuse of the bucket).
#[test]
fn p07_ports_that_bind_took_are_the_cause() {
    in_namespace(|| {
        small_range("20000 20039");
        let (_one, first) = listener(NEAR, 100);
        let (_two, second) = listener(FAR, 100);
        let all = bound_first(40, [first, second]);
        let refused = TcpStream::connect(first).unwrap_err();
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::AddrNotAvailable,
            "from {NEAR}, which has no connection"
        );
        let mut snapshot = now();
        let call = failed_call(owner(812, "envoy", 3), "connect", "EADDRNOTAVAIL", &first.to_string());
        snapshot.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
        let p07 = the_finding(&snapshot, "P07");
        shows(&p07, &["bind() to 10.0.0.2 have 40 of 40 ports, and connect() passes over them"]);
        let found = diagnose(&snapshot, &Limits::default()).findings;
        assert_eq!((&*found[0].id, p07.severity), ("P08", Severity::Critical));
        let effect = found.iter().find(|finding| finding.id == "P07").unwrap();
        assert_eq!(effect.same_cause_as, Some(0), "{found:#?}");
        drop(all);
    });
}

#[test]
fn p08_bind_to_port_0_is_told_by_the_parity() {
    in_namespace(|| {
        small_range("20000 20199");
        let (_one, first) = listener(NEAR, 100);
        let (_two, second) = listener(FAR, 100);
        let _by_connect = connect(first, 45);
        assert!(findings("P08").is_empty());
        let by_bind = bound_first(60, [first, second]);
        let finding = the_finding(&now(), "P08");
        let together = "2 destinations together have 60 of 200 ports";
        says(&finding, &[&this_process(), "bind() to 10.0.0.2", together]);
        assert!(finding.evidence[0].starts_with("60 of 60 ports are odd"), "{finding:#?}");
        advice(&finding, "24 /* IP_BIND_ADDRESS_NO_PORT */");
        let mut traced = now();
        let mut with = |destination, given_port| {
            let calls = traced_connects(owner(std::process::id(), "test", 60), destination);
            let connects = vec![TracedConnects { searches: 0, given_port, ..calls }];
            traced.traced = Part::Seen(Traced { connects, ..Traced::default() });
            traced.clone()
        };
        shows(&the_finding(&with(first, 60), "P08"), &["60 of 60 calls"]);
        let other = with("10.9.9.9:9".parse().unwrap(), 0);
        assert_eq!(findings_in(&other, "P08").len(), 1, "calls to another destination say nothing");
        assert!(findings_in(&with(first, 0), "P08").is_empty(), "connect() searched");
        // Sockets in TIME_WAIT belong to no process: the one whose bind() failed is named.
        let mut closed = now();
        let connections = known(&mut closed.connections);
        connections.tuples.iter_mut().for_each(|tuple| tuple.owners.clear());
        connections.sources.iter_mut().for_each(|source| source.owners.clear());
        for tuple in &mut connections.tuples {
            let sockets = tuple.states.values().sum();
            tuple.states = BTreeMap::from([("time-wait".to_owned(), sockets)]);
        }
        let unnamed = the_finding(&closed, "P08");
        let perhaps = format!("{}) seems to call bind() to 10.0.0.2", this_process());
        says(&unnamed, &["^a process (perhaps ", &perhaps]);
        let why = "^the process that uses 10.0.0.2 is not known: its sockets are in TIME_WAIT, which belong to no process, and calls were not traced (";
        shows(&unnamed, &[why, &format!("{}: it listens at 10.0.0.2:4000$", this_process())]);
        if !reads_by_bpf("p08_bind_to_port_0_is_told_by_the_parity") {
            return;
        }
        closed.listeners = Part::Seen(Vec::new());
        known(&mut closed.connections).services[0].workers = vec![owner(std::process::id(), "server", 60)];
        let only = "no other process of this network namespace has sockets of TCP";
        shows(&the_finding(&closed, "P08"), &[&format!("{}: {only}$", this_process())]);
        // With two processes nothing decides.
        known(&mut closed.connections).services[0].workers.push(owner(7, "nginx", 1));
        closed.traced = Part::Seen(Traced::default());
        closed.failures = Part::Seen(Failures::default());
        let unnamed = the_finding(&closed, "P08");
        says(&unnamed, &["^a process seems to call bind() to 10.0.0.2"]);
        let why = "which belong to no process, and the trace saw no connect() and no failed bind() for it$";
        shows(&unnamed, &[why]);
        assert!(unnamed.evidence.iter().all(|fact| !fact.contains("perhaps")), "{:?}", unnamed.evidence);
        // A connection to the same destination from another address speaks for its process.
        let connections = known(&mut closed.connections);
        let mut other = connections.tuples[0].clone();
        other.source = NEAR.parse().unwrap();
        other.owners = vec![owner(812, "squid", 2)];
        let fact = format!("^perhaps squid[812]: it has 2 connections from {NEAR} to {}$", other.destination);
        connections.tuples.push(other);
        let unnamed = the_finding(&closed, "P08");
        says(&unnamed, &["^a process (perhaps squid[812]) seems"]);
        shows(&unnamed, &[&fact]);
        let call = failed_call(owner(812, "squid", 31), "bind", "EADDRINUSE", &format!("{FAR}:0"));
        closed.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
        let named = the_finding(&closed, "P08");
        says(&named, &["^squid[812] seems to call bind() to 10.0.0.2"]);
        let how = "squid[812]: 31 calls of bind() to 10.0.0.2 failed with EADDRINUSE during the trace";
        shows(&named, &[&format!("TIME_WAIT; {how}$")]);
        cured(&finding, RANGE);
        drop(by_bind);
    });
}

#[test]
fn p08_connect_past_half_of_the_range_is_no_bind() {
    in_namespace(|| {
        small_range("20000 20099");
        let (_listener, address) = listener(NEAR, 200);
        let _all = connect(address, 99);
        assert!(findings("P08").is_empty());
    });
}

#[test]
fn p09_a_slow_search_is_named_from_a_trace() {
    let slow = Traced {
        search_p99_ns: Some(4_700_000),
        searches: 1_000,
        search_ns: 2_300_000_000,
        connects: vec![traced_connects(owner(812, "envoy", 1_000), "10.1.2.3:443".parse().unwrap())],
        ..Traced::default()
    };
    let snapshot =
        |traced| Snapshot { traced: Part::Seen(traced), interval_ns: 10_000_000_000, ..Snapshot::default() };
    let finding = the_finding(&snapshot(slow.clone()), "P09");
    let verdict = "connect() searches 4.7 ms for a port (99th percentile of 1,000 searches, mean 2.30 ms)";
    assert_eq!(finding.verdict, verdict);
    assert!(finding.evidence[0].contains("23% of one processor"), "{finding:#?}");
    assert_eq!(finding.evidence[1], "envoy[812] → 10.1.2.3:443: mean 2.30 ms of 1,000 searches");
    advice(&finding, "fourtuple fix ports --pid 812 --to 10.1.2.3:443");
    let preempted = Traced { search_ns: 20_000_000, ..slow.clone() };
    assert!(findings_in(&snapshot(preempted), "P09").is_empty(), "a mean of 20 us");
    assert!(findings_in(&snapshot(Traced { searches: 9, ..slow }), "P09").is_empty());
    assert!(findings_in(&snapshot(Traced::default()), "P09").is_empty());
}

#[test]
fn p10_growth_is_forecast() {
    in_namespace(|| {
        small_range("20000 20099");
        let (_listener, address) = listener(NEAR, 200);
        let mut reader = Reader::new(Path::new("/"));
        let mut all = connect(address, 50);
        assert!(findings_in(&read(&mut reader), "P10").is_empty());
        assert!(findings_in(&read(&mut reader), "P10").is_empty(), "no growth");
        // Growth of idle connections seems to be a leak: where a busy host took long, more connections follow.
        let reading = |number: usize| {
            all.extend(connect(address, number - all.len()));
            use_all(&all);
            (number, read(&mut reader))
        };
        let used = [60, 70, 80].into_iter().map(reading).find(|(_, snapshot)| are_used(snapshot));
        let (number, snapshot) = used.expect("a reading right after the data");
        let finding = the_finding(&snapshot, "P10");
        let uses = format!("uses {number} of 100 ports");
        says(&finding, &[&uses, "more than it closes", &this_process()]);
        assert!(advice(&finding, "fourtuple fix ports").proof == Proof::Calculation);
    });
}

#[test]
fn p10_a_plateau_above_the_ports_is_forecast() {
    in_namespace(|| {
        // 4 closes per second of the last 10 s lead to 240 ports after 60 s.
        let closed = " closed 40 connections in the last 10 s, ";
        let (_server, finding) = found_after_closes("20000 20099", 40, "P10", closed);
        says(&finding, &["uses 40 of 100", "in about 15 s", "; at most 1.7/s can last$"]);
        apply(advice(&finding, "tcp_tw_reuse=1"));
        if reads_by_bpf("p10_a_plateau_above_the_ports_is_forecast") {
            assert!(findings("P10").is_empty());
        }
    });
}

#[test]
fn p10_many_closes_at_once_are_no_rate() {
    in_namespace(|| {
        small_range("20000 20099");
        let (server, address) = server(NEAR, 4000);
        let pool: Vec<_> =
            (0..40).map(|_| (TcpStream::connect(address).unwrap(), server.accept().unwrap())).collect();
        let mut reader = Reader::new(Path::new("/"));
        read(&mut reader);
        for (client, (accepted, _)) in pool {
            close(client, accepted);
        }
        let snapshot = until("TIME_WAIT", || {
            let snapshot = read(&mut reader);
            (snapshot.memory.seen().unwrap().time_wait == 40).then_some(snapshot)
        });
        assert!(findings_in(&snapshot, "P10").is_empty());
        assert!(findings_in(&snapshot, "P03").is_empty());
    });
}

#[test]
fn p11_a_removed_source_address_is_named() {
    in_namespace(|| {
        add_addresses();
        // A longer prefix on the loopback device would be local as a whole.
        let gone = "10.1.0.9";
        device::add_address("lo", ip(gone), 32).unwrap();
        let (server, address) = server(NEAR, 4000);
        let client = bound(gone, 0);
        socket::connect(client.as_fd(), address).unwrap();
        let _accepted = server.accept().unwrap();
        // Loopback addresses are local without being listed.
        let (_other, loopback) = crate::scene::server("127.0.0.1", 4001);
        let _second = bound("127.9.9.9", 0);
        let _third = connect(loopback, 1);
        assert!(findings_in(&with_calls(now()), "P11").is_empty());
        device::remove_address("lo", ip(gone), 32).unwrap();
        let finding = the_finding(&now(), "P11");
        says(&finding, &[&format!("{} has 1 connection from 10.1.0.9", this_process())]);
        let kill = advice(&finding, "ss -K");
        assert!(kill.action == "ss -K src 10.1.0.9" && kill.proof == Proof::Calculation, "{kill:?}");
        let mut snapshot = now();
        let mut tuples = known(&mut snapshot.connections).tuples.iter_mut();
        tuples.find(|tuple| tuple.source == ip(gone)).unwrap().source = ip("2001:db8::9");
        snapshot.lost_sources = Part::Seen(vec![ip("2001:db8::9")]);
        let finding = the_finding(&snapshot, "P11");
        assert_eq!(advice(&finding, "ss -K").action, "ss -K src '[2001:db8::9]'");
        device::add_address("lo", ip(gone), 32).unwrap();
        assert!(findings_in(&with_calls(now()), "P11").is_empty());
    });
}

/// Returns a reading during which no call failed, as a trace says it.
fn with_calls(snapshot: Snapshot) -> Snapshot {
    Snapshot { failures: Part::Seen(Failures::default()), ..snapshot }
}

#[test]
fn p11_transparent_sources_are_no_finding() {
    in_namespace(|| {
        add_addresses();
        let (_server, address) = server(NEAR, 4000);
        let foreign = SocketAddr::new(ip("192.0.2.9"), 0);
        let socket = socket::open(Transport::Tcp, foreign, true).unwrap();
        option::set_int(socket.as_fd(), SOL_IP, IP_TRANSPARENT, 1).unwrap();
        socket::bind(socket.as_fd(), foreign).unwrap();
        socket::connect(socket.as_fd(), address).unwrap();
        let snapshot = with_calls(now());
        let tuples = &snapshot.connections.seen().unwrap().tuples;
        assert!(tuples.iter().any(|tuple| tuple.source == foreign.ip()), "{tuples:#?}");
        assert!(findings_in(&snapshot, "P11").is_empty());
        option::set_int(socket.as_fd(), SOL_IP, IP_TRANSPARENT, 0).unwrap();
        assert_eq!(findings_in(&with_calls(now()), "P11").len(), 1, "the option is what is looked at");
    });
}

/// A process that opens connections and waits for the end of its input.
fn other_process(port: u16, number: usize) -> Option<Child> {
    let program = format!(
        "import socket,sys\nc=[socket.create_connection(('{NEAR}',{port})) for _ in range({number})]\nprint(flush=True)\nsys.stdin.read()"
    );
    let mut command = Command::new("python3");
    command.args(["-c", &program]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = process::start(&mut command).ok()?;
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut()?), &mut line).ok()?;
    Some(child)
}

#[test]
fn p12_processes_that_share_a_budget_are_listed() {
    in_namespace(|| {
        small_range("20000 20019");
        let (_listener, address) = listener(NEAR, 100);
        let _own = connect(address, 8);
        let Some(mut child) = other_process(address.port(), 4) else {
            return skip("p12_processes_that_share_a_budget_are_listed", "python3", "it does not start");
        };
        let finding = the_finding(&now(), "P12");
        let shared = "2 processes share the 20 ports of 10.0.0.1 → 10.0.0.1:4000";
        let (own, other) = (format!("{} 8", this_process()), format!("[{}] 4; 60% are in use", child.id()));
        says(&finding, &[shared, &own, &other]);
        assert!(advice(&finding, "fourtuple fix ports").proof == Proof::Calculation);
        // The rule stays beside an exhausted tuple.
        let all = connect(address, 8);
        let full = now();
        the_finding(&full, "P01");
        the_finding(&full, "P12");
        drop(all);
        drop(child.stdin.take());
        child.wait().unwrap();
        until("the other process is gone", || findings("P12").is_empty().then_some(()));
    });
}

#[test]
fn an_idle_namespace_has_no_finding() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 100);
        let _connections = connect(address, 10);
        let found = crate::scene::diagnosis().findings;
        assert!(found.is_empty(), "{found:#?}");
    });
}
