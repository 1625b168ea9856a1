//! The rules about accept(), on real sockets.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixStream};
use std::process::{self, Command};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::{Limits, diagnose};
use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Counter, FailedCall, Failures, Listener, Part, Snapshot, TracedAccepts};
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::accept_queue::tcp_counter;
use fourtuple_testing::process::Python;
use fourtuple_testing::process::status;
use fourtuple_testing::wire::{self, Raw};
use fourtuple_testing::{has_mptcp, in_namespace, listener, set_sysctl};

use crate::scene::{
    apply_first, between, diagnosis, failed_call, findings, findings_in, known, of, only, owner, says, shows,
    snapshot, this_process, until, with_python,
};

fn connect(address: SocketAddr, number: usize) -> Vec<TcpStream> {
    (0..number).map(|_| fourtuple_testing::connect(address)).collect()
}

/// Sends SYNs without waiting for an answer. The sockets repeat those that got none after a second.
fn attempt(address: SocketAddr, number: usize) -> Vec<OwnedFd> {
    let open = |_| {
        let client = socket::open(Transport::Tcp, address, true).unwrap();
        socket::connect(client.as_fd(), address).unwrap();
        client
    };
    (0..number).map(open).collect()
}

/// Sends SYNs that a listener drops, and waits until the kernel has counted each. They are of no socket, which would repeat its SYN where this
/// thread stands still for a second.
fn dropped(address: SocketAddr, number: u16) {
    let SocketAddr::V4(to) = address else { panic!("{address}") };
    let raw = Raw::open(*to.ip(), to);
    for index in 0..number {
        let before = tcp_counter("ListenDrops");
        until("a drop", || {
            // Below the ports of the clients.
            raw.send(20_000 + index, wire::SYN);
            // What the queue of the loopback device has dropped is sent again.
            let end = Instant::now() + Duration::from_secs(5);
            while tcp_counter("ListenDrops") == before && Instant::now() < end {
                thread::yield_now();
            }
            (tcp_counter("ListenDrops") > before).then_some(())
        });
    }
}

/// Begins handshakes with a listener of [`deferring`], and waits until the kernel has ignored their last ACKs.
fn handshakes(address: SocketAddr, number: usize) -> Vec<OwnedFd> {
    let before = tcp_counter("TCPDeferAcceptDrop");
    let clients = attempt(address, number);
    until("the ACKs", || (tcp_counter("TCPDeferAcceptDrop") - before >= number as u64).then_some(()));
    clients
}

/// Opens a listener of a SO_REUSEPORT group.
fn member(address: SocketAddr, backlog: i32) -> OwnedFd {
    let socket = socket::open(Transport::Tcp, address, true).unwrap();
    assert_eq!(option::set_reuse_port(socket.as_fd()).unwrap(), option::Answer::Done);
    socket::bind(socket.as_fd(), address).unwrap();
    socket::listen(socket.as_fd(), backlog).unwrap();
    socket
}

/// Accepts until the queue is empty.
fn drain(listener: &OwnedFd) -> usize {
    std::iter::from_fn(|| socket::accept_nonblocking(listener.as_fd()).ok()).count()
}

#[test]
fn a01_a_full_and_a_filling_queue_are_named() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 8);
        let mut clients = connect(address, 4);
        assert!(findings("A01").is_empty());
        clients.extend(connect(address, 3));
        let found = only(&findings("A01"), Severity::Warning, "fills: 7 connections wait for ");
        says(&found, &[&this_process()]);
        clients.extend(connect(address, 2));
        let found = only(&findings("A01"), Severity::Critical, "is full: 9 connections wait for ");
        assert!(found.now.iter().any(|advice| advice.action.starts_with("fourtuple trace accept --port ")));
    });
}

#[test]
fn a01_a_full_unix_queue_is_named() {
    with_python(|| {
        set_sysctl("net.core.somaxconn", "8");
        let (server, mut client) = unix("a01", 8, 6);
        assert!(findings("A01").is_empty());
        client.run("connect(1)");
        only(&findings("A01"), Severity::Warning, "@a01 fills: 7 connections wait for ");
        client.run("connect(2)");
        let found = only(&findings("A01"), Severity::Critical, "is full: 9 connections wait for ");
        says(&found, &[&format!("[{}]", server.pid())]);
        assert!(found.proper.iter().any(|advice| advice.action.contains("`listen(511)`")));
        only(&findings("A04"), Severity::Notice, "the backlog of @a01 (python");
        // A queue that was not full at the first reading may be a burst.
        let mut burst = snapshot(|| ());
        known(&mut burst.unix_listeners).iter_mut().for_each(|listener| listener.waiting_before = 0);
        assert!(findings_in(&burst, "A01").is_empty());
    });
}

#[test]
fn a01_a_burst_between_readings_is_no_finding() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 8);
        let mut clients = Vec::new();
        assert!(between("A01", || clients = connect(address, 9)).is_empty());
        let found = between("A01", || dropped(address, 2));
        says(&only(&found, Severity::Critical, "2 SYNs and ACKs were dropped"), &["the backlog is 8"]);
    });
}

#[test]
fn a02_drops_belong_to_their_listener() {
    in_namespace(|| {
        let (_idle, _) = listener("127.0.0.2", 8);
        let address = "127.0.0.1:4200".parse().unwrap();
        let listener = member(address, 4);
        let mut clients = Vec::new();
        assert!(between("A02", || clients = connect(address, 5)).is_empty());
        let found = between("A02", || {
            dropped(address, 3);
            drain(&listener);
        });
        let found = only(&found, Severity::Warning, "dropped 3 SYNs and ACKs in ");
        assert!(found.subject.starts_with(&address.to_string()), "{}", found.subject);
        says(&found, &[&this_process()]);
        // Drops before the first reading are not a finding.
        assert!(findings("A02").is_empty());
    });
}

#[test]
fn a_full_queue_is_one_finding_with_its_effects() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 4);
        let _clients = connect(address, 5);
        thread::sleep(Duration::from_millis(30));
        let mut snapshot = snapshot(|| {
            dropped(address, 3);
            thread::sleep(Duration::from_millis(110));
        });
        let judged = |snapshot: &Snapshot| {
            let found = diagnose(snapshot, &Limits::default()).findings;
            assert_eq!(found.len(), 1, "{found:#?}");
            found[0].clone()
        };
        let found = judged(&snapshot);
        assert_eq!(found.id, "A01", "{found:#?}");
        shows(&found, &["dropped 3 SYNs and ACKs", "5 connections at "]);
        // A process without descriptors is the cause of its full queue.
        let processes = known(&mut snapshot.processes);
        processes.retain(|found| found.pid == process::id());
        processes[0].descriptors = processes[0].descriptors.max(64);
        processes[0].descriptor_limit = Some(processes[0].descriptors.into());
        // Until its exec, a forked child of another test holds the listener too.
        known(&mut snapshot.listeners)[0].owners.retain(|owner| owner.pid == process::id());
        let found = judged(&snapshot);
        assert_eq!((&*found.id, found.severity), ("F01", Severity::Critical), "{found:#?}");
        shows(&found, &["is full: 5 connections wait"]);
    });
}

#[test]
fn a01_names_the_workers_of_a_master() {
    with_python(|| {
        let mut python = Python::start();
        // Two workers have accepted two connections each; their master has none.
        let (address, _held) = shared(&mut python, 4100, &[2, 2]);
        python.run("listener.listen(8)");
        let _clients = connect(address, 9);
        let mut snapshot = snapshot(|| ());
        let found = only(&findings_in(&snapshot, "A01"), Severity::Critical, " and 1 more, ");
        let master = format!("[{}]", python.pid());
        assert!(!found.verdict.contains(&master), "{}", found.verdict);
        shows(&found, &[&format!("^python3{master} is the master of these processes: ")]);
        // A child that was not there at the first reading does not count as a worker.
        known(&mut snapshot.processes).iter_mut().for_each(|process| process.cpu_ns = None);
        says(&findings_in(&snapshot, "A01")[0], &[&master]);
    });
}

/// sk_drops of a listener counts the ignored last ACKs too.
#[test]
fn a02_ignored_acks_are_no_drops() {
    in_namespace(|| {
        let (_listener, address) = deferring(100);
        let mut clients = Vec::new();
        let mut snapshot = snapshot(|| {
            clients.extend(attempt(address, 5));
            until("the ACKs", || (tcp_counter("TCPDeferAcceptDrop") >= 5).then_some(()));
        });
        let of_listener = snapshot.listeners.seen().unwrap()[0].drops.unwrap();
        // A SYN-ACK that is sent again has another ACK.
        assert!(of_listener.during > 2, "{of_listener:?}");
        assert_eq!(snapshot.counter("TcpExt.ListenDrops").unwrap().during, 0);
        assert!(findings_in(&snapshot, "A02").is_empty());
        for name in ["TcpExt.ListenDrops", "TcpExt.ListenOverflows"] {
            known(&mut snapshot.counters).get_mut(name).unwrap().during = 2;
        }
        only(&findings_in(&snapshot, "A02"), Severity::Warning, " dropped 2 SYNs and ACKs in ");
    });
}

/// Opens a listener whose handshakes last: the kernel ignores the last ACK until data arrives (TCP_DEFER_ACCEPT).
fn deferring(backlog: i32) -> (OwnedFd, SocketAddr) {
    let (listener, address) = listener("127.0.0.1", backlog);
    assert_eq!(option::set_defer_accept(listener.as_fd(), 60).unwrap(), option::Answer::Done);
    (listener, address)
}

#[test]
fn a03_drops_without_overflow_are_told_apart() {
    in_namespace(|| {
        set_sysctl("net.ipv4.tcp_syncookies", "0");
        set_sysctl("net.ipv4.tcp_max_syn_backlog", "16");
        let (_listener, address) = deferring(128);
        let _clients = handshakes(address, 13);
        let mut flooded = snapshot(|| dropped(address, 5));
        // One finding for one cause: neither more workers nor a greater backlog helps.
        assert!(findings_in(&flooded, "A02").is_empty() && findings_in(&flooded, "A03").is_empty());
        let found = only(&findings_in(&flooded, "A05"), Severity::Critical, "5 SYNs were dropped in ");
        says(&found, &[&format!("13 handshakes are in progress at {address}")]);
        assert_eq!(found.now[0].action, "sysctl -w net.ipv4.tcp_syncookies=1");
        known(&mut flooded.listeners).iter_mut().for_each(|listener| listener.handshakes = 2);
        let found =
            only(&findings_in(&flooded, "A03"), Severity::Warning, "5 SYNs and ACKs were dropped in ");
        assert!(found.evidence[0].contains("ListenDrops 5, ListenOverflows 0"), "{:?}", found.evidence);
        // SYN-ACKs without a route count elsewhere, too.
        let no_route = Counter { total: 5, during: 5 };
        known(&mut flooded.counters).insert("Ip.OutNoRoutes".to_owned(), no_route);
        let found = diagnose(&flooded, &Limits::default()).findings;
        let routes: Vec<_> = found.iter().filter(|finding| finding.verdict.contains("OutNoRoutes")).collect();
        assert!(routes.is_empty(), "A03 explains it: {routes:?}");
        let found =
            only(&of(diagnose(&flooded, &Limits::default()), "A03"), Severity::Warning, "5 SYNs and ACKs");
        assert!(found.evidence[0].starts_with("as many packets had no route, 5: "), "{:?}", found.evidence);
        assert!(found.proper[0].action.starts_with("a route back to the clients"), "{:?}", found.proper);
        // An overflow of the accept queue has other rules.
        let (_full, address) = listener("127.0.0.2", 2);
        let _held = connect(address, 3);
        let snapshot = snapshot(|| dropped(address, 2));
        assert_eq!(snapshot.counter("TcpExt.ListenOverflows").unwrap().during, 2);
        assert!(findings_in(&snapshot, "A03").is_empty());
    });
}

#[test]
fn a04_a_cut_backlog_counts_if_it_fills() {
    in_namespace(|| {
        set_sysctl("net.core.somaxconn", "16");
        let (listener, address) = listener("127.0.0.1", 1000);
        let mut clients = connect(address, 7);
        assert!(findings("A04").is_empty());
        clients.extend(connect(address, 3));
        let found = only(&findings("A04"), Severity::Notice, "is net.core.somaxconn, 16");
        apply_first(&found);
        socket::listen(listener.as_fd(), 1000).unwrap();
        assert!(findings("A04").is_empty());
    });
}

#[test]
fn a04_is_silent_about_a_backlog_of_the_program() {
    in_namespace(|| {
        set_sysctl("net.core.somaxconn", "16");
        let (_listener, address) = listener("127.0.0.1", 8);
        let mut clients = Vec::new();
        let snapshot = snapshot(|| {
            clients.extend(attempt(address, 12));
            until("an overflow", || (tcp_counter("ListenOverflows") > 0).then_some(()));
        });
        assert!(snapshot.counter("TcpExt.ListenOverflows").unwrap().during > 0);
        assert!(findings_in(&snapshot, "A04").is_empty());
    });
}

#[test]
fn a05_drops_without_cookies_are_critical() {
    in_namespace(|| {
        set_sysctl("net.ipv4.tcp_syncookies", "0");
        let (_listener, address) = deferring(8);
        let mut clients = handshakes(address, 3);
        assert!(between("A05", || ()).is_empty());
        let found = between("A05", || {
            clients.extend(attempt(address, 10));
            until("the drops", || (tcp_counter("TCPReqQFullDrop") > 1).then_some(()));
        });
        let found = only(&found, Severity::Critical, "SYNs were dropped in ");
        shows(&found, &["backlog 8"]);
        apply_first(&found);
        let found = between("A05", || {
            // Clients that got no answer may have sent their SYNs again before the first reading.
            let before = tcp_counter("TCPReqQFullDoCookies");
            clients.extend(attempt(address, 4));
            until("the cookies", || (tcp_counter("TCPReqQFullDoCookies") > before + 1).then_some(()));
        });
        // Clients that got no answer send their SYNs again.
        only(&found, Severity::Warning, " SYNs got a cookie instead of a place");
    });
}

#[test]
fn a05_many_handshakes_are_named_before_drops() {
    in_namespace(|| {
        let (_listener, address) = deferring(20);
        let mut clients = handshakes(address, 12);
        assert!(findings("A05").is_empty());
        clients.extend(handshakes(address, 6));
        // The port with another address has no handshakes.
        let (_other, other) = listener("127.0.0.2", 5);
        assert_eq!(other.port(), address.port());
        only(&findings("A05"), Severity::Warning, &format!("18 handshakes are in progress at {address}"));
    });
}

#[test]
fn a06_resets_instead_of_delays_are_named() {
    in_namespace(|| {
        assert!(findings("A06").is_empty());
        set_sysctl("net.ipv4.tcp_abort_on_overflow", "1");
        only(&findings("A06"), Severity::Notice, "tcp_abort_on_overflow is 1");
        let (_listener, address) = listener("127.0.0.1", 2);
        let _clients = connect(address, 3);
        let found = between("A06", || dropped(address, 2));
        apply_first(&only(&found, Severity::Critical, "were full 2 times"));
        assert!(findings("A06").is_empty());
    });
}

#[test]
fn a07_old_connections_in_a_queue_are_a_bound() {
    in_namespace(|| {
        let unchecked = diagnosis().unchecked.into_iter().find(|unchecked| unchecked.id == "A07").unwrap();
        assert!(unchecked.reason.contains("fourtuple trace accept"), "{}", unchecked.reason);
        let (_listener, address) = listener("127.0.0.1", 100);
        let _clients = connect(address, 5);
        let other = "127.0.0.2:4200".parse().unwrap();
        let busy = member(other, 100);
        // More connections than wait here, so that the number of new ones says nothing.
        let reading = |more: usize| {
            let mut new = Vec::new();
            let snapshot = snapshot(|| {
                new.extend(connect(address, more));
                new.extend(connect(other, 20));
                thread::sleep(Duration::from_millis(110));
            });
            drain(&busy);
            snapshot
        };
        let standing = |snapshot: &Snapshot| {
            let all = snapshot.listeners.seen().unwrap();
            all.iter().find(|listener| listener.address == address).unwrap().standing
        };
        // The times of packets are coarse: only connections that are a while older than the first reading are sure to count.
        let mut snapshot = until("old", || Some(reading(0)).filter(|seen| standing(seen) == 5));
        assert!(standing(&reading(2)) <= 5, "a new connection is not old");
        let verdict = format!("5 connections at {address} have waited at least ");
        let found = only(&findings_in(&snapshot, "A07"), Severity::Warning, &verdict);
        shows(&found, &["^5 connections in the queue at the first reading, 5 at"]);
        // A trace that saw no accept() hides nothing, nor does one that saw short waits.
        for (accepts, wait_p99_ns) in [(0, None), (100, Some(1_000))] {
            snapshot.accepts = Part::Seen(TracedAccepts { accepts, wait_p99_ns, ..TracedAccepts::default() });
            only(&findings_in(&snapshot, "A07"), Severity::Warning, &verdict);
        }
        snapshot.accepts = Part::Seen(TracedAccepts {
            accepts: 100,
            wait_p99_ns: Some(200_000_000),
            ..TracedAccepts::default()
        });
        assert_eq!(findings_in(&snapshot, "A07").len(), 2);
    });
}

/// What the processes do that should accept: the cure depends on it.
#[test]
fn a07_says_what_the_workers_wait_in() {
    with_python(|| {
        let mut server = Python::start();
        server.run("s = socket.socket(); s.bind(('127.0.0.1', 4300)); s.listen(100)");
        let _clients = connect("127.0.0.1:4300".parse().unwrap(), 5);
        let mut seen = until("old connections of a server that waits for a line", || {
            let snapshot = snapshot(|| thread::sleep(Duration::from_millis(110)));
            let listener = snapshot.listeners.seen().unwrap().first()?;
            let mut processes = snapshot.processes.seen().unwrap().iter();
            let process = processes.find(|process| process.pid == server.pid())?;
            (listener.standing == 5 && process.waits_in.is_some()).then_some(snapshot)
        });
        let mut found = |name: &str, state, function: Option<&str>| {
            let owners = &mut known(&mut seen.listeners)[0].owners;
            owners.iter_mut().for_each(|owner| owner.name = name.to_owned());
            for process in known(&mut seen.processes) {
                (process.state, process.waits_in) = (state, function.map(str::to_owned));
                process.cpu_ns = Some(0);
            }
            findings_in(&seen, "A07").remove(0)
        };
        let proper = |finding: &fourtuple_record::Finding| finding.proper[0].action.clone();
        let stopped = found("redis-server", 'T', Some("do_signal_stop"));
        assert_eq!(stopped.now[0].action, format!("kill -CONT {}", server.pid()));
        assert!(!proper(&stopped).contains("slow commands"), "{stopped:?}");
        let debugged = found("redis-server", 't', Some("ptrace_stop"));
        shows(&debugged, &["is stopped by a debugger (state t)$"]);
        assert!(debugged.now[0].action.contains("TracerPid") && debugged.proper.is_empty(), "{debugged:?}");
        // As `docker pause` does it.
        let frozen = found("redis-server", 'S', Some("get_signal"));
        shows(&frozen, &["is frozen with its cgroup"]);
        assert!(
            frozen.now[0].action.starts_with("`docker unpause`") && frozen.proper.is_empty(),
            "{frozen:?}"
        );
        let blocked = found("redis-server", 'S', Some("hrtimer_nanosleep"));
        shows(&blocked, &[": blocked in hrtimer_nanosleep(), not overloaded$"]);
        assert!(proper(&blocked).contains("fewer slow commands"), "{blocked:?}");
        // A copy of the listener in a program that the server has started.
        let inherited = found("sleep", 'S', Some("hrtimer_nanosleep"));
        assert!(proper(&inherited).contains(&format!("`kill {}`", server.pid())), "{inherited:?}");
        let paused = found("proxy", 'S', Some("ep_poll"));
        shows(&paused, &["waiting for events (ep_poll), but not for this listener"]);
        assert!(proper(&paused).contains("`kill "), "{paused:?}");
        let unknown = found("proxy", 'S', None);
        shows(&unknown, &[": blocked (a database, a lock, a sleep), not overloaded$"]);
        assert!(!proper(&unknown).contains("kill"), "{unknown:?}");
    });
}

#[test]
fn a07_connections_given_up_in_the_queue_are_counted() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 100);
        drop(connect(address, 3));
        // The times of packets are coarse: only connections that are a while older than the first reading are sure to count.
        let snapshot = until("old", || {
            let snapshot = snapshot(|| thread::sleep(Duration::from_millis(110)));
            (snapshot.listeners.seen().unwrap()[0].given_up == 3).then_some(snapshot)
        });
        let found = findings_in(&snapshot, "A07");
        let found = only(&found, Severity::Warning, &format!("3 connections at {address} have waited"));
        shows(&found, &["^the peers of 3 of them have closed"]);
    });
}

#[test]
fn a07_a_traced_wait_is_compared_with_the_threshold() {
    in_namespace(|| {
        let mut snapshot = snapshot(|| ());
        let mut of_wait = |wait| {
            snapshot.accepts =
                Part::Seen(TracedAccepts { accepts: 12_000, wait_p99_ns: wait, ..TracedAccepts::default() });
            findings_in(&snapshot, "A07")
        };
        assert!(of_wait(None).is_empty());
        assert!(of_wait(Some(90_000_000)).is_empty());
        let long = of_wait(Some(250_000_000));
        only(&long, Severity::Warning, "1% of 12,000 connections waited 250 ms or longer");
    });
}

/// A connection in the queue is not a measurement of the trace.
#[test]
fn a07_a_trace_hides_no_standing_queue() {
    in_namespace(|| {
        let (_listener, address) = listener("127.0.0.1", 200);
        let _clients = connect(address, 80);
        // Connections that are not much older than the first reading may not count.
        let mut seen = until("old", || {
            let snapshot = snapshot(|| thread::sleep(Duration::from_millis(110)));
            (snapshot.listeners.seen().unwrap()[0].standing == 80).then_some(snapshot)
        });
        let mut traced = |accepts, wait_p99_ns| {
            seen.accepts = Part::Seen(TracedAccepts { accepts, wait_p99_ns, ..TracedAccepts::default() });
            findings_in(&seen, "A07")
        };
        let words = format!("80 connections at {address} have waited at least ");
        only(&traced(0, None), Severity::Warning, &words);
        // Another server accepts.
        only(&traced(1_000, Some(1_000)), Severity::Warning, &words);
        assert_eq!(traced(1_000, Some(250_000_000)).len(), 2);
    });
}

/// Opens a unix listener with connections of another process; `path` is abstract.
fn unix(path: &str, backlog: u32, clients: u32) -> (Python, Python) {
    let (mut server, mut client) = (Python::start(), Python::start());
    server.run(&format!(
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0{path}'); s.listen({backlog}); held = []"
    ));
    client.run(&format!(
        "held = []\ndef connect(number):\n  for _ in range(number):\n    c = socket.socket(socket.AF_UNIX); c.setblocking(False); \
         held.append(c); c.connect('\\0{path}')\nconnect({clients})"
    ));
    (server, client)
}

#[test]
fn a07_old_connections_in_a_unix_queue_are_named() {
    with_python(|| {
        let (mut server, mut client) = unix("a07", 100, 5);
        let mut reading = |event: &mut dyn FnMut(&mut Python, &mut Python)| {
            let mut snapshot = snapshot(|| {
                event(&mut server, &mut client);
                thread::sleep(Duration::from_millis(110));
            });
            snapshot.accepts = Part::Seen(TracedAccepts::default());
            let found = findings_in(&snapshot, "A07");
            (found, server.pid(), client.pid())
        };
        let (found, server, client) = reading(&mut |_, client| drop(client.run("connect(2)")));
        let found = only(&found, Severity::Warning, "5 connections at @a07 have waited at least ");
        says(&found, &[&format!("for accept() of python3[{server}]$")]);
        let worker = &found.evidence[0];
        assert!(worker.starts_with("1 worker used ") && worker.contains(" of "), "{worker}");
        assert_eq!(found.evidence[1], "5 connections in the queue at the first reading, 7 at the second");
        assert_eq!(found.evidence[2], format!("the connections are of python3[{client}]"));
        // Clients that have closed are older than one that is known.
        let (found, ..) = reading(&mut |_, client| drop(client.run("for c in held[:3]: c.close()")));
        let found = only(&found, Severity::Warning, "7 connections at @a07 have waited");
        shows(&found, &["^the clients of 3 of them have closed already$"]);
        // A server that accepts all is not named, although the queue is as long at the second reading.
        let (found, ..) = reading(&mut |server, client| {
            server.run("for _ in range(7): held.append(s.accept())");
            client.run("connect(7)");
        });
        assert!(found.is_empty(), "{found:?}");
    });
}

#[test]
fn a02_refused_connections_of_a_unix_listener_are_named() {
    with_python(|| {
        let (server, client) = unix("a02", 8, 4);
        let mut snapshot = snapshot(|| ());
        let mut failed = |call: &str, failed: u32| {
            let call = failed_call(owner(client.pid(), "python3", failed), call, "EAGAIN", "@a02");
            let call = FailedCall { protocol: "unix".to_owned(), ..call };
            snapshot.failures = Part::Seen(Failures { calls: vec![call], ..Failures::default() });
            snapshot.clone()
        };
        let refusing = failed("connect", 261);
        let found = only(&findings_in(&refusing, "A02"), Severity::Warning, "refused 261 connections in ");
        let server = format!("^@a02 of python3[{}] ", server.pid());
        says(&found, &[&server, "; 4 connections wait, the backlog is 8$"]);
        assert!(findings_in(&refusing, "X01").is_empty(), "A02 explains the calls");
        assert!(findings_in(&failed("send", 261), "A02").is_empty());
        // A queue that is full now and refuses is full, also if it was not at the first reading.
        let mut full = refusing;
        let listener = &mut known(&mut full.unix_listeners)[0];
        (listener.waiting, listener.waiting_before) = (9, 0);
        let words = "; 261 calls of connect() failed with EAGAIN in ";
        only(&findings_in(&full, "A01"), Severity::Critical, words);
        assert!(findings_in(&full, "A02").is_empty() && findings_in(&full, "X01").is_empty());
    });
}

/// Without a descriptor accept() leaves the queue as it is.
#[test]
fn f01_names_the_unix_queue_of_a_process_without_descriptors() {
    with_python(|| {
        let (mut server, _client) = unix("f01", 100, 20);
        server.run("for _ in range(10): held.append(s.accept())");
        assert!(findings("F01").is_empty());
        server.run("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\ntry:\n  while True: held.append(os.dup(0))\nexcept OSError: pass");
        let (found, of_queue) = until("a full table", || {
            let mut seen = snapshot(|| thread::sleep(Duration::from_millis(1_010)));
            (seen.failures, seen.accepts) =
                (Part::Seen(Failures::default()), Part::Seen(TracedAccepts::default()));
            let diagnosis = diagnose(&seen, &Limits::default());
            Some((of(diagnosis.clone(), "F01"), of(diagnosis, "X01"))).filter(|(found, _)| !found.is_empty())
        });
        // The process may have inherited a descriptor above its limit.
        let found = only(&found, Severity::Critical, &format!("python3[{}] has 6", server.pid()));
        shows(&found, &["^10 connections wait in the accept queue of @f01$"]);
        assert!(of_queue.is_empty(), "the queue is explained: {of_queue:?}");
    });
}

/// As `shared`, at a unix listener.
fn shared_unix(python: &mut Python, shares: &[usize]) -> Vec<UnixStream> {
    let address = UnixAddress::from_abstract_name("workers").unwrap();
    python.run("listener = socket.socket(socket.AF_UNIX); listener.bind('\\0workers'); listener.listen(500)");
    let mut clients = Vec::new();
    for share in shares {
        clients.extend((0..*share).map(|_| UnixStream::connect_addr(&address).unwrap()));
        accept_in_worker(python, *share);
    }
    clients
}

#[test]
fn b01_and_b02_know_the_workers_of_a_unix_listener() {
    with_python(|| {
        let try_out = |shares: &[usize]| {
            let mut python = Python::start();
            let _clients = shared_unix(&mut python, shares);
            (findings("B01"), findings("B02"))
        };
        let (skew, ladder) = try_out(&[48, 10, 2, 0]);
        let words =
            "share the listener at @workers; their connections in the order of their start: 48, 10, 2, 0";
        let found = only(&ladder, Severity::Notice, words);
        assert!(found.proper[0].action.starts_with("EPOLL_CTL_DEL") && found.now.is_empty(), "{found:?}");
        assert!(skew.is_empty());
        let (skew, ladder) = try_out(&[2, 50, 1, 7]);
        let words = "has 50 of 60 connections at @workers; the 4 workers have 2, 50, 1, 7 ";
        let found = only(&skew, Severity::Notice, words);
        assert!(found.now.is_empty() && ladder.is_empty(), "no command acts on a unix listener: {found:?}");
        let (skew, ladder) = try_out(&[15, 14, 16, 15]);
        assert!(skew.is_empty() && ladder.is_empty());
    });
}

/// Starts a server whose workers share a listener and accept a number of connections each.
fn shared(python: &mut Python, port: u16, shares: &[usize]) -> (SocketAddr, Vec<TcpStream>) {
    python.run(&format!(
        "listener = socket.socket(); listener.bind(('127.0.0.1', {port})); listener.listen(500)"
    ));
    accepting(python, port, shares)
}

/// Starts the workers.
fn accepting(python: &mut Python, port: u16, shares: &[usize]) -> (SocketAddr, Vec<TcpStream>) {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut clients = Vec::new();
    for share in shares {
        clients.extend(connect(address, *share));
        accept_in_worker(python, *share);
    }
    (address, clients)
}

/// Starts a worker that accepts a number of connections.
fn accept_in_worker(python: &mut Python, share: usize) {
    python.run(&format!(
        "ready, done = os.pipe()\nif os.fork() == 0:\n  held = [listener.accept() for _ in range({share})]\n  os.close(0); os.write(done, b'x'); signal.pause()\nos.read(ready, 1)"
    ));
}

/// The connections of each worker, in the order of their start, and the findings.
#[test]
fn b01_and_b02_know_the_workers_of_a_listener() {
    with_python(|| {
        let skew: &[&str] = &["has 50 of 60 connections at port 4100", "the 4 workers have 2, 50, 1, 7 "];
        let ladder: &[&str] = &["in the order of their start: 48, 10, 2, 0", "the 4 workers of python"];
        for (name, port, shares, b01, b02) in [
            ("one worker has most", 4100, [2, 50, 1, 7], skew, &[][..]),
            ("a ladder", 4101, [48, 10, 2, 0], &[], ladder),
            ("even shares", 4102, [16, 15, 13, 12], &[], &[]),
        ] {
            let mut python = Python::start();
            let (_, _clients) = shared(&mut python, port, &shares);
            for (id, expected) in [("B01", b01), ("B02", b02)] {
                let found = findings(id);
                assert_eq!(found.is_empty(), expected.is_empty(), "{name}, {id}: {found:#?}");
                if !expected.is_empty() {
                    says(&only(&found, Severity::Notice, ""), expected);
                }
            }
        }
    });
}

#[test]
fn b01_a_skewed_member_of_a_group_is_named() {
    with_python(|| {
        let mut pythons: Vec<Python> = (0..4).map(|_| Python::start()).collect();
        pythons.iter_mut().for_each(|python| drop(python.run(GROUP)));
        let accept = "try:\n  while True: held.append(s.accept()[0])\nexcept BlockingIOError: pass";
        let address = "127.0.0.1:4200".parse().unwrap();
        let _even = connect(address, 60);
        pythons.iter_mut().for_each(|python| drop(python.run(accept)));
        assert!(findings("B01").is_empty(), "the kernel's hash chooses");
        // SO_ATTACH_REUSEPORT_CBPF with `return 1`: a selector sends all connections to the second member.
        let select = "import ctypes\ncode = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 1))\n\
                      s.setsockopt(socket.SOL_SOCKET, 51, struct.pack('HxxxxxxQ', 1, ctypes.addressof(code)))";
        pythons[0].run(&format!("import struct\n{select}"));
        let mut skewed = Vec::new();
        for _ in 0..3 {
            skewed.extend(connect(address, 90));
            pythons.iter_mut().for_each(|python| drop(python.run(accept)));
        }
        let name = format!("[{}] has ", pythons[1].pid());
        let found = only(&findings("B01"), Severity::Notice, &name);
        says(&found, &["of 330 connections at port 4200"]);
        let fix = "fourtuple fix accept --listen 127.0.0.1:4200";
        assert!(found.now.iter().any(|advice| advice.action.starts_with(fix)));
        assert!(findings("B03").is_empty(), "no member is stuck");
    });
}

/// As Debian's nginx: `listen 80; listen [::]:80`.
#[test]
fn b02_listeners_of_two_families_are_no_group() {
    with_python(|| {
        let start = |port: u16, shares: &[usize]| {
            let mut python = Python::start();
            python.run(&format!(
                "listener = socket.socket(); listener.bind(('127.0.0.1', {port})); listener.listen(500)\n\
                 other = socket.socket(socket.AF_INET6); other.bind(('::1', {port})); other.listen(500)"
            ));
            let (_, clients) = accepting(&mut python, port, shares);
            (python, clients)
        };
        let _ladder = start(4100, &[48, 10, 2, 0]);
        let _skewed = start(4101, &[2, 48, 10, 0]);
        only(&findings("B02"), Severity::Notice, "in the order of their start: 48, 10, 2, 0");
        let found = only(&findings("B01"), Severity::Notice, "has 48 of 60 connections");
        let has_fix = found.now.iter().any(|advice| advice.action.contains("fix accept"));
        assert!(!has_fix, "`fix accept` needs a group: {:?}", found.now);
    });
}

#[test]
fn b02_workers_of_nginx_can_take_turns() {
    with_python(|| {
        let mut pythons = [Python::start(), Python::start()];
        for python in &mut pythons {
            // PR_SET_NAME
            python.run("import ctypes; ctypes.CDLL(None).prctl(15, b'nginx', 0, 0, 0)");
        }
        let (_, _tcp) = shared(&mut pythons[0], 4100, &[48, 10, 2, 0]);
        let _unix = shared_unix(&mut pythons[1], &[48, 10, 2, 0]);
        let found = findings("B02");
        assert_eq!(found.len(), 2, "{found:?}");
        for (finding, listen) in found.iter().zip(["127.0.0.1:4100", "'unix:@workers'"]) {
            let action = format!("fourtuple fix accept --listen {listen} --select rotate");
            assert_eq!(finding.now[0].action, action);
        }
    });
}

#[test]
fn b02_a_busy_worker_is_a_warning() {
    with_python(|| {
        let mut python = Python::start();
        let (_, _clients) = shared(&mut python, 4100, &[45, 15]);
        let mut snapshot = snapshot(|| ());
        let mut limits = Limits::default();
        limits.set("B02", 0.9).unwrap();
        let judged = |snapshot: &Snapshot| of(diagnose(snapshot, &limits), "B02");
        // The processor time of a process has steps of 10 ms, about the time between the readings.
        snapshot.interval_ns = 10_000_000_000;
        assert!(judged(&snapshot).is_empty(), "two workers with free processors");
        let processes = known(&mut snapshot.processes);
        processes.iter_mut().for_each(|process| process.cpu_ns = Some(9_000_000_000));
        let words = "their connections in the order of their start: 45, 15";
        let found = only(&judged(&snapshot), Severity::Warning, words);
        assert!(found.evidence[0].contains("used 90% of a processor"), "{:?}", found.evidence);
    });
}

#[test]
fn b02_a_leaked_listener_makes_no_worker() {
    with_python(|| {
        let mut python = Python::start();
        let (_, _clients) = shared(&mut python, 4100, &[60]);
        // Three children that execute another program hold the listener.
        python.run(
            "os.set_inheritable(listener.fileno(), True)\nfor _ in range(3):\n  \
             if os.fork() == 0: os.close(0); os.execvp('sleep', ['sleep', '600'])",
        );
        let own =
            |listener: &Listener| listener.owners.iter().filter(|owner| owner.name == "sleep").count() == 3;
        let snapshot = until("the state", || {
            Some(snapshot(|| ())).filter(|seen| seen.listeners.seen().unwrap().iter().any(own))
        });
        assert!(findings_in(&snapshot, "B01").is_empty() && findings_in(&snapshot, "B02").is_empty());
    });
}

/// Accepts until the queue is empty, and prints the number.
const ACCEPT_ALL: &str = "n = 0\ntry:\n  while s.accept(): n += 1\nexcept BlockingIOError: print(n)";

const GROUP: &str = "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); \
                     s.bind(('127.0.0.1', 4200)); s.listen(100); s.setblocking(False)";

#[test]
fn b03_a_member_that_does_not_accept_is_named() {
    with_python(|| {
        let address: SocketAddr = "127.0.0.1:4200".parse().unwrap();
        let own = member(address, 100);
        let mut python = Python::start();
        python.run(GROUP);
        let _clients = connect(address, 60);
        // A process between fork() and exec() has the descriptors of this process, but not for long.
        assert!(findings("B03").is_empty(), "both queues are long");
        let waiting = 60 - drain(&own);
        let words = format!("{waiting} connections wait for python");
        let found = only(&findings("B03"), Severity::Warning, &words);
        let pid = format!("[{}]", python.pid());
        says(&found, &["^1 of 2 listeners at 127.0.0.1:4200 is stuck", &pid]);
        assert!(findings("B04").is_empty(), "the process is the younger one");
        assert_eq!(python.run(ACCEPT_ALL), waiting.to_string());
        assert!(findings("B03").is_empty());
    });
}

/// Programs in Go listen so since 1.24.
#[test]
fn b03_no_selector_is_proposed_for_mptcp() {
    with_python(|| {
        if !has_mptcp("b03_no_selector_is_proposed_for_mptcp") {
            return;
        }
        let mut pythons = [Python::start(), Python::start()];
        let group =
            GROUP.replacen("socket.socket()", "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", 1);
        pythons.iter_mut().for_each(|python| drop(python.run(&group)));
        let _clients = connect("127.0.0.1:4200".parse().unwrap(), 60);
        pythons[0].run("while select.select([s], [], [], 0)[0]: held.append(s.accept()[0])");
        let found = only(&findings("B03"), Severity::Warning, "is stuck");
        let actions: Vec<&str> =
            found.now.iter().chain(&found.proper).map(|advice| advice.action.as_str()).collect();
        assert!(!actions.iter().any(|action| action.contains("fix accept")), "{actions:?}");
        let without =
            format!("python3[{}]: listen without MPTCP (in Go GODEBUG=multipathtcp=0", pythons[1].pid());
        let is_named = |action: &&str| action.contains(without.trim_start_matches("python3"));
        assert!(actions.iter().any(is_named), "{actions:?}");
    });
}

#[test]
fn b03_a_stopped_process_is_critical() {
    with_python(|| {
        let address: SocketAddr = "127.0.0.1:4200".parse().unwrap();
        let own = member(address, 100);
        let mut python = Python::start();
        python.run(GROUP);
        // The hash decides which member gets a connection.
        let mut clients = Vec::new();
        until("the state", || {
            clients.extend(connect(address, 1));
            drain(&own);
            (python.run("print(len(select.select([s], [], [], 0)[0]))") == "1").then_some(())
        });
        assert!(findings("B03").is_empty(), "few connections, and the process runs");
        let kill = status(Command::new("kill").args(["-STOP", &python.pid().to_string()]));
        assert!(kill.unwrap().success());
        let found = until("the state", || Some(findings("B03")).filter(|found| !found.is_empty()));
        let found = only(&found, Severity::Critical, "is stuck");
        assert_eq!(found.now[0].action, format!("kill -CONT {}", python.pid()));
    });
}

#[test]
fn b04_an_old_generation_with_a_queue_is_named() {
    with_python(|| {
        let address: SocketAddr = "127.0.0.1:4200".parse().unwrap();
        let (mut old, before) = (Python::start(), std::time::Instant::now());
        old.run(GROUP);
        // The rule tells generations apart by a second between their starts.
        thread::sleep(Duration::from_millis(1050).saturating_sub(before.elapsed()));
        let mut new = Python::start();
        new.run(GROUP);
        let _clients = connect(address, 40);
        let accepted: usize = new.run(ACCEPT_ALL).parse().unwrap();
        let words = format!("{} connections at {address} wait for", 40 - accepted);
        let found = only(&findings("B04"), Severity::Warning, &words);
        says(&found, &[&format!("[{}], which is older than", old.pid())]);
        assert!(findings("B03").is_empty(), "one finding for one fault");
        let then = &found.now[1];
        assert_eq!(then.action, format!("kill -TERM {}", old.pid()));
        assert_eq!(then.condition.as_deref(), Some("after the command above"));
        apply_first(&found);
        assert!(findings("B04").is_empty());
        old.run("s.close()");
        assert_eq!(new.run(ACCEPT_ALL), (40 - accepted).to_string(), "the queue moved to the new process");
    });
}
