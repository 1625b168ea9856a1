//! A failed operation is counted once under its name, and the run continues to its end.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_bench::load::{Arrival, EngineChoice, Load, LoadError, Workload};
use fourtuple_bench::serve::{Protocol, Running};
use fourtuple_record::{LoadStatus, ServeWorker};
use fourtuple_syscalls::seccomp::{self, Facility, FailingCall};
use fourtuple_syscalls::{Errno, device, option, route, socket};
use fourtuple_testing::wire::{FAR_V4, NEAR, Wire};
use fourtuple_testing::{StopOnDrop, connect, in_namespace, keep_time_wait, listener, print, set_sysctl};

use crate::{
    ENGINES, LOST, RunOutcome, SMALL, SMALL_SERVED, answer, attempt, attempt_after, get, load, long_enough,
    run, serve, serve_at, stop, sum, until, until_expected, with_each_engine,
};

const TARGET: &str = "tcp://127.0.0.1:4000";

const MILLISECOND: Duration = Duration::from_millis(1);
/// A timeout that operations reach, and handshakes do not.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Returns a run of 12 operations on 3 connections, against a server that misbehaves.
fn against(test: &str, engine: EngineChoice, target: &str, workload: Workload) -> Option<RunOutcome> {
    run(test, &short(engine, target, workload))
}

/// Returns such a run against a server whose responses do not end: its operations end by their timeout. A busy host may stop a thread for
/// longer: the run is repeated until it `is_expected`.
fn against_endless(
    test: &str,
    engine: EngineChoice,
    (target, workload): (&str, Workload),
    is_expected: impl Fn(&RunOutcome) -> bool,
) -> Option<RunOutcome> {
    let load = Load { timeout: TIMEOUT, ..short(engine, target, workload) };
    until_expected(|| run(test, &load), is_expected)
}

/// Executes a run whose attempts are all refused, again if it took a second: such a run ends then, before its operations are done.
fn run_refused(test: &str, load: &Load) -> Option<RunOutcome> {
    until_expected(|| run(test, load), |ran| !ran.remarks().contains(&"all-refused"))
}

fn short(engine: EngineChoice, target: &str, workload: Workload) -> Load {
    let mut load = load(engine, target, workload);
    (load.connections, load.operations) = (3, Some(12));
    load
}

/// Checks that all 12 operations have failed, each under one name.
fn require_all(ran: &RunOutcome, name: &str) {
    assert_eq!((ran.results.operations, ran.error(name), ran.errors().len()), (0, 12, 1), "{ran:#?}");
    assert!(ran.remarks().contains(&"errors"), "{ran:#?}");
}

/// Closes with RST.
fn reset(stream: TcpStream) {
    option::set_reset_on_close(stream.as_fd()).unwrap();
}

#[test]
fn refused() {
    with_each_engine(|engine| {
        for workload in [SMALL, Workload::Connect] {
            let load = short(engine, TARGET, workload);
            let Some(ran) = run_refused("failures::refused", &load) else { continue };
            require_all(&ran, "ECONNREFUSED");
            assert_eq!(ran.results.connections, 0);
        }
        // Many refused attempts: the run must pause between them, and count none as a connection.
        let mut load = load(engine, TARGET, SMALL);
        load.length = Some(300 * MILLISECOND);
        let ran = run("failures::refused", &load).unwrap();
        assert_eq!((ran.errors(), ran.results.connections), (vec!["ECONNREFUSED"], 0));
        assert!(ran.error("ECONNREFUSED") <= 8 * 310, "each waits a millisecond: {ran:#?}");
        assert!(ran.results.elapsed_ns >= 300_000_000, "{ran:#?}");
        // Each of the 8 connections tries again, five times or more.
        let tries = Load { length: None, operations: Some(8 * 6), ..load.clone() };
        let ran = run_refused("failures::refused", &tries).unwrap();
        assert_eq!((ran.error("ECONNREFUSED"), ran.results.operations), (8 * 6, 0), "{ran:#?}");
        assert!(ran.results.elapsed_ns >= 5_000_000, "each waits a millisecond: {ran:#?}");
        let mut open = load.clone();
        (open.arrival, open.operations, open.length) = (Arrival::Even(100.0), Some(30), None);
        let ran = run_refused("failures::refused", &open).unwrap();
        assert_eq!((ran.error("ECONNREFUSED"), ran.results.operations), (30, 0), "{ran:#?}");
        assert!(["offered-rate-not-reached", "errors"].iter().all(|id| ran.remarks().contains(id)));
    });
}

#[test]
fn udp_to_a_closed_port_is_refused() {
    with_each_engine(|engine| {
        let udp = Workload::Udp { request: 8 };
        let load = short(engine, "udp://127.0.0.1:4000", udp);
        let Some(ran) = run_refused("failures::udp", &load) else { return };
        require_all(&ran, "ECONNREFUSED");
    });
}

#[test]
fn a_full_queue_of_a_unix_socket() {
    in_namespace(|| {
        let path = std::env::temp_dir().join(format!("fourtuple-load-{}-full", std::process::id()));
        for (engine, error) in ENGINES.into_iter().zip(["timeout", "EAGAIN"]) {
            let listener = UnixListener::bind(&path).unwrap();
            // The queue holds one connection more than the backlog.
            socket::listen(listener.as_fd(), 1).unwrap();
            let mut load = load(engine, &format!("unix:{}", path.display()), Workload::Connect);
            load.operations = Some(10);
            if engine == EngineChoice::Uring {
                load.timeout = 200 * MILLISECOND;
            }
            let ran = run("failures::full_queue", &load);
            std::fs::remove_file(&path).unwrap();
            let Some(ran) = ran else { continue };
            // On a busy machine a connection with a place in the queue may reach the timeout too.
            assert!(ran.results.operations <= 2, "{ran:#?}");
            assert_eq!(
                (ran.error(error), ran.errors()),
                (10 - ran.results.operations, vec![error]),
                "{ran:#?}"
            );
        }
    });
}

/// Executes the run against a server that stops after more than this number of requests, or with the run. Returns the sum of the counts of the
/// server too.
fn stopped_after(
    test: &str,
    load: &Load,
    running: Running,
    requests: u64,
) -> Option<(RunOutcome, ServeWorker)> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let ended = scope.spawn(|| {
            until(|| is_over.load(Ordering::Relaxed) || sum(running.counts()).requests > requests);
            stop(running)
        });
        let over = StopOnDrop(&is_over);
        let ran = run(test, load)?;
        drop(over);
        Some((ran, ended.join().unwrap()))
    })
}

#[test]
fn a_server_killed_in_the_middle() {
    with_each_engine(|engine| {
        for target in [TARGET, "http://127.0.0.1:4000/"] {
            let (protocol, workload) = match target {
                TARGET => (SMALL_SERVED, SMALL),
                http => (Protocol::Http { body: 1000 }, get(http)),
            };
            let once = |length| {
                let running = serve(protocol).start().unwrap();
                let mut load = load(engine, target, workload.clone());
                (load.length, load.connections, load.timeout) = (Some(length), 32, 200 * MILLISECOND);
                stopped_after("failures::killed", &load, running, 200)
            };
            let is_enough =
                |(ran, _): &(RunOutcome, _)| ran.error("ECONNREFUSED") > 0 && ran.results.operations > 100;
            let Some((ran, served)) = long_enough(600 * MILLISECOND, once, is_enough) else { return };
            assert!(ran.results.operations > 100 && ran.results.operations <= served.requests, "{ran:#?}");
            assert!(ran.error("ECONNREFUSED") > 0, "{ran:#?}");
            // The kernel drops a SYN that arrives while the listener is being closed; the retransmitted SYN, a second
            // later, is too late. A client that is stalled at its end gives up such an operation before its timeout is due.
            let known = ["ECONNREFUSED", "ECONNRESET", "EPIPE", "closed-early", "timeout", "unanswered"];
            assert!(ran.errors().iter().all(|name| known.contains(name)), "{ran:#?}");
            assert!(ran.results.elapsed_ns >= 600_000_000, "it goes to its end, and the rate says so");
        }
    });
}

#[test]
fn reset_before_the_response() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            stream.read_exact(&mut [0])?;
            reset(stream);
            Ok(())
        });
        for engine in ENGINES {
            let target = format!("tcp://{address}");
            let Some(ran) = against("failures::reset", engine, &target, SMALL) else { continue };
            require_all(&ran, "ECONNRESET");
            assert_eq!(ran.results.connections, 12);
        }
    });
}

#[test]
fn reset_in_the_middle_of_a_large_request() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            stream.read_exact(&mut [0; 100_000])?;
            reset(stream);
            Ok(())
        });
        for engine in ENGINES {
            let large = Workload::Crr { request: 16 << 20, response: 1 };
            let load = short(engine, &format!("tcp://{address}"), large);
            let Some(ran) = run("failures::reset_large", &load) else { continue };
            assert_eq!(ran.results.operations, 0);
            assert_eq!(ran.error("ECONNRESET") + ran.error("EPIPE"), 12, "{ran:#?}");
        }
    });
}

#[test]
fn a_silent_server_causes_timeouts() {
    in_namespace(|| {
        let address = answer(|mut stream| stream.read_to_end(&mut Vec::new()).map(drop));
        for engine in ENGINES {
            let target = format!("tcp://{address}");
            let is_expected = |ran: &RunOutcome| ran.results.connections == 12;
            let target = (target.as_str(), SMALL);
            let Some(ran) = against_endless("failures::half_open", engine, target, is_expected) else {
                continue;
            };
            require_all(&ran, "timeout");
            assert_eq!(ran.results.connections, 12);
            assert!(ran.took >= 4 * TIMEOUT, "{ran:#?}");
        }
    });
}

#[test]
fn a_full_accept_queue_is_an_error() {
    in_namespace(|| {
        // The listener is never accepted from, and its queue has space for two connections.
        let (_socket, address) = listener("127.0.0.1", 1);
        let _queued = [connect(address), connect(address)];
        for engine in ENGINES {
            let mut load = short(engine, &format!("tcp://{address}"), SMALL);
            (load.connections, load.timeout) = (12, 300 * MILLISECOND);
            let Some(ran) = run("failures::full_queue", &load) else { continue };
            require_all(&ran, "timeout");
            assert_eq!(ran.results.connections, 0, "their SYNs were dropped: {ran:#?}");
        }
    });
}

#[test]
fn a_response_byte_by_byte() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            let _ = stream.read(&mut [0; 1000])?;
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx" {
                stream.write_all(&[*byte])?;
                thread::sleep(50 * MILLISECOND);
            }
            Ok(())
        });
        for engine in ENGINES {
            let target = format!("http://{address}/");
            let has_begun = |ran: &RunOutcome| ran.results.latency_ns.first_byte.samples == 12;
            let target = (target.as_str(), get(&target));
            let Some(ran) = against_endless("failures::loris", engine, target, has_begun) else { continue };
            require_all(&ran, "timeout");
            assert!(ran.results.latency_ns.first_byte.samples == 12, "the first byte was there: {ran:#?}");
        }
    });
}

#[test]
fn malformed_responses_are_counted() {
    in_namespace(|| {
        for (response, name) in [
            ("SMTP 220 hello\r\n\r\n", "malformed"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nxx", "malformed"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nxxx", "malformed"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nxx", "closed-early"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "closed-early"),
            ("HTTP/1.1 200", "closed-early"),
            ("", "closed-early"),
        ] {
            let address = answer(move |mut stream| {
                let _ = stream.read(&mut [0; 1000])?;
                stream.write_all(response.as_bytes())
            });
            let target = format!("http://{address}/");
            for engine in ENGINES {
                let Some(ran) = against("failures::malformed", engine, &target, get(&target)) else {
                    continue;
                };
                require_all(&ran, name);
                assert_eq!(ran.results.connections, 12, "{response:?}");
                let has_detail =
                    ran.results.error_details.get("malformed").is_some_and(|text| text.contains('"'));
                assert_eq!(has_detail, name == "malformed", "{response:?}: {ran:#?}");
            }
        }
    });
}

#[test]
fn a_response_with_a_failure_is_a_response() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            while stream.read(&mut [0; 1000])? > 0 {
                stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")?;
            }
            Ok(())
        });
        for engine in ENGINES {
            let target = format!("http://{address}/");
            let Some(ran) = against("failures::status", engine, &target, get(&target)) else { continue };
            assert_eq!(
                (ran.results.operations, ran.error("status-503"), ran.errors().len()),
                (12, 12, 1),
                "{ran:#?}"
            );
            assert_eq!(ran.results.connections, 3, "the connection is as good as before");
        }
    });
}

/// A server that refuses a body by its head, and closes: the kernel answers the rest with RST, behind the response.
#[test]
fn a_response_before_the_end_of_the_request_is_a_response() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            let _ = stream.read(&mut [0; 1000])?;
            stream.write_all(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        });
        for engine in ENGINES {
            let target = format!("http://{address}/");
            let mut workload = get(&target);
            let Workload::Http(request) = &mut workload else { panic!("HTTP") };
            (request.method, request.body) = ("POST".to_owned(), vec![0; 20 << 20]);
            let Some(ran) = against("failures::early", engine, &target, workload) else { continue };
            assert_eq!((ran.error("status-413"), ran.errors().len()), (12, 1), "{ran:#?}");
            assert_eq!(ran.results.connections, 12, "none is used again: the server has closed it");
        }
    });
}

#[test]
fn responses_are_counted_by_status() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            while stream.read(&mut [0; 1000])? > 0 {
                stream.write_all(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: /there\r\n\r\n")?;
            }
            Ok(())
        });
        for engine in ENGINES {
            let target = format!("http://{address}/");
            let mut load = short(engine, &target, get(&target));
            load.threads = 2;
            let Some(ran) = run("failures::statuses", &load) else { continue };
            let location = Some("/there".to_owned());
            assert_eq!(ran.results.statuses, [LoadStatus { code: 302, count: 12, location }]);
            assert_eq!(
                (ran.results.operations, ran.remarks_but_of_haste()),
                (12, vec!["no-success"]),
                "{ran:#?}"
            );
        }
    });
}

#[test]
fn a_run_in_which_everything_is_refused_ends() {
    in_namespace(|| {
        let udp = Workload::Udp { request: 8 };
        for (target, workload) in [(TARGET, SMALL), ("udp://127.0.0.1:4000", udp), ("unix:/nowhere/x", SMALL)]
        {
            for (engine, arrival) in ENGINES.into_iter().zip([Arrival::Closed, Arrival::Even(200.0)]) {
                let mut load = load(engine, target, workload.clone());
                // The run would never end by itself.
                (load.length, load.connections, load.arrival) =
                    (Some(Duration::from_secs(100_000)), 64, arrival);
                let Some(ran) = run("failures::all_refused", &load) else { continue };
                let remarks = ran.remarks();
                assert_eq!(remarks[0], "all-refused", "{ran:#?}");
                assert!(
                    !remarks.contains(&"server-stalled") && !remarks.contains(&"interrupted"),
                    "{ran:#?}"
                );
                assert!(ran.results.elapsed_ns >= 1_000_000_000, "{ran:#?}");
                let failures: u64 = ran.results.errors.values().sum();
                // 1 + 2 + 4 + ... + 64 ms, and then one attempt each 100 ms.
                let most = if ran.results.elapsed_ns < 5_000_000_000 { 64 * 60 } else { u64::MAX };
                assert!(failures <= most, "{ran:#?}");
            }
        }
        // A server that is gone only later does not end the run.
        let mut load = load(EngineChoice::Epoll, TARGET, SMALL);
        load.length = Some(1_300 * MILLISECOND);
        let running = serve(SMALL_SERVED).start().unwrap();
        let (ran, _) = stopped_after("failures::all_refused", &load, running, 20).unwrap();
        assert!(
            !ran.remarks().contains(&"all-refused") && ran.results.elapsed_ns >= 1_300_000_000,
            "{ran:#?}"
        );
    });
}

#[test]
fn a_body_until_the_end_of_the_connection_is_whole() {
    in_namespace(|| {
        let address = answer(|mut stream| {
            let _ = stream.read(&mut [0; 1000])?;
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nthe rest")
        });
        for engine in ENGINES {
            let target = format!("http://{address}/");
            let Some(ran) = against("failures::rest", engine, &target, get(&target)) else { continue };
            assert_eq!(
                (ran.results.operations, ran.errors().len(), ran.results.connections),
                (12, 0, 12),
                "{ran:#?}"
            );
        }
    });
}

#[test]
fn a_server_that_does_not_close_is_an_error() {
    in_namespace(|| {
        let running = serve(SMALL_SERVED).start().unwrap();
        for engine in ENGINES {
            let mut load = short(engine, TARGET, SMALL);
            (load.close, load.timeout) = (fourtuple_bench::load::Close::Server, TIMEOUT);
            // A busy host may stop the server for longer than the timeout, before its responses.
            let is_expected = |ran: &RunOutcome| ran.results.operations == 12;
            let Some(ran) = until_expected(|| run("failures::no_close", &load), is_expected) else {
                continue;
            };
            assert_eq!((ran.results.operations, ran.error("not-closed")), (12, 12), "{ran:#?}");
        }
        stop(running);
    });
}

#[test]
fn an_unreachable_path_is_an_error() {
    in_namespace(|| {
        let load = load(EngineChoice::Auto, "tcp://no-such-host.invalid:80", SMALL);
        match attempt(&load, &AtomicBool::new(false)) {
            Err(LoadError::Resolve { target, .. }) => assert_eq!(target, "tcp://no-such-host.invalid:80"),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn late_answers_at_the_end_of_a_run_are_counted() {
    in_namespace(|| {
        let address = answer(|mut stream| stream.read_to_end(&mut Vec::new()).map(drop));
        for engine in ENGINES {
            let mut load = short(engine, &format!("tcp://{address}"), SMALL);
            (load.operations, load.length, load.timeout) = (None, Some(100 * MILLISECOND), 500 * MILLISECOND);
            let is_expected = |ran: &RunOutcome| ran.results.connections == 3;
            let Some(ran) = until_expected(|| run("failures::unanswered", &load), is_expected) else {
                continue;
            };
            assert_eq!((ran.results.operations, ran.results.connections), (0, 3));
            assert_eq!(ran.error("unanswered") + ran.error("timeout"), 3, "{ran:#?}");
        }
    });
}

#[test]
fn exhausted_ports_stall_the_run() {
    in_namespace(|| {
        keep_time_wait();
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let mut ports = 4000..;
        for (engine, strategy) in
            ENGINES.into_iter().flat_map(|engine| [(engine, "auto"), (engine, "kernel-default")])
        {
            // Each run has a server of its own, towards which all ports are free.
            let once = |length| {
                let listen = SocketAddr::from(([127, 0, 0, 1], ports.next()?));
                let running = crate::serve_at(SMALL_SERVED, listen.into()).start().unwrap();
                let mut load = load(engine, &format!("tcp://{listen}"), SMALL);
                (load.length, load.strategy) = (Some(length), strategy.parse().unwrap());
                let ran = run("failures::ports", &load)?;
                Some((ran, stop(running)))
            };
            let is_enough = |(ran, _): &(RunOutcome, _)| {
                ran.error("EADDRNOTAVAIL") >= 8 && ran.errors() == ["EADDRNOTAVAIL"]
            };
            let Some((ran, served)) = long_enough(500 * MILLISECOND, once, is_enough) else { continue };
            // The self-test's sockets may use one or two of the 64 ports for a moment.
            assert!((60..=64).contains(&ran.results.operations), "{ran:#?}");
            assert_eq!((served.requests, served.accepted), (ran.results.operations, ran.results.connections));
            assert_eq!(ran.errors(), ["EADDRNOTAVAIL"], "{ran:#?}");
            // Eight connections find no port; after that, one connection tries every 50 ms: to wait for a port takes no CPU time.
            let tries = ran.results.elapsed_ns / 50_000_000;
            assert!((8..=16 + tries).contains(&ran.error("EADDRNOTAVAIL")), "{ran:#?}");
            let ports = ran.results.ports.as_ref().unwrap();
            assert!(ports.stalled_ns.unwrap() < ran.results.elapsed_ns, "{ports:?}");
            assert!(ports.stall_length_ns > 0, "{ports:?}");
            assert!(ran.remarks().contains(&"ports-ran-out"), "{ran:#?}");
            assert!(ran.results.elapsed_ns >= 500_000_000, "to its --for: {ran:#?}");
        }
    });
}

#[test]
fn freed_ports_end_the_stall() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        // The kernel reuses a port after a second.
        set_sysctl("net.ipv4.tcp_tw_reuse", "1");
        let mut ports = 4000..;
        for engine in ENGINES {
            let once = || {
                let listen = SocketAddr::from(([127, 0, 0, 1], ports.next()?));
                let running = crate::serve_at(SMALL_SERVED, listen.into()).start().unwrap();
                let mut load = load(engine, &format!("tcp://{listen}"), SMALL);
                (load.length, load.timeout) = (Some(1800 * MILLISECOND), 600 * MILLISECOND);
                let ran = run("failures::ports_back", &load)?;
                Some((stop(running).requests, ran))
            };
            // A wait for a port beyond the timeout does not time out: no request was sent. A longer run on a busy host would have more other
            // timeouts.
            let is_back = |(_, ran): &(u64, RunOutcome)| {
                ran.results.operations > 64 && ran.errors() == ["EADDRNOTAVAIL"]
            };
            let Some(all) = until_expected(once, is_back) else { continue };
            assert!(is_back(&all), "{all:#?}");
            let (requests, ran) = all;
            assert_eq!(requests, ran.results.operations);
            let waited = ran.results.ports.as_ref().unwrap().stall_length_ns;
            assert!(ran.results.latency_ns.handshake.max < waited, "a handshake is not a wait: {ran:#?}");
        }
    });
}

#[test]
fn open_connections_continue_without_free_ports() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let mut ports = 4000..;
        for engine in ENGINES {
            let once = |length| {
                let listen = SocketAddr::from(([127, 0, 0, 1], ports.next()?));
                let mut server = crate::serve_at(Protocol::Http { body: 1 }, listen.into());
                // All connections open at once, and their number exceeds the number of ports.
                server.stall =
                    Some(fourtuple_bench::serve::Stall { at: Duration::ZERO, length: 600 * MILLISECOND });
                let running = server.start().unwrap();
                let target = format!("http://{listen}/");
                let mut load = load(engine, &target, get(&target));
                (load.arrival, load.connections) = (fourtuple_bench::load::Arrival::Even(1000.0), 64);
                load.length = Some(length);
                let ran = run("failures::warm", &load)?;
                Some((stop(running).requests, ran))
            };
            // On a loaded host the end may come before the answers.
            let went_on = |(_, ran): &(u64, RunOutcome)| {
                ran.results.operations > 64 && ran.errors() == ["EADDRNOTAVAIL"]
            };
            let Some(all) = long_enough(1200 * MILLISECOND, once, went_on) else { continue };
            assert!(went_on(&all), "it went on after the stall: {all:#?}");
            assert_eq!(all.0, all.1.results.operations);
        }
    });
}

#[test]
fn udp_flows_without_a_port_wait_for_one() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        for (port, engine) in (4000..).zip(ENGINES) {
            let listen = SocketAddr::from(([127, 0, 0, 1], port));
            let running = crate::serve_at(Protocol::Udp { request: 1 }, listen.into()).start().unwrap();
            let mut load = load(engine, &format!("udp://{listen}"), Workload::Udp { request: 8 });
            (load.connections, load.length) = (16, Some(1000 * MILLISECOND));
            let Some(ran) = run("failures::udp_ports", &load) else { continue };
            // On a busy machine the last answers may arrive after the end.
            let unanswered = ran.error("unanswered");
            let errors: Vec<_> = ran.errors().into_iter().filter(|error| *error != "unanswered").collect();
            assert_eq!((errors, ran.results.connections), (vec!["EADDRNOTAVAIL"], 8), "{ran:#?}");
            assert!(ran.error("EADDRNOTAVAIL") <= 8 + 110, "{ran:#?}");
            let requests = stop(running).requests;
            assert!(
                (ran.results.operations..=ran.results.operations + unanswered).contains(&requests),
                "{requests}: {ran:#?}"
            );
        }
    });
}

#[test]
fn fewer_connections_are_held_if_ports_are_too_few() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        let mut ports = 4000..;
        for engine in ENGINES {
            // Each run has a server of its own, towards which all ports are free.
            let once = || {
                let listen = SocketAddr::from(([127, 0, 0, 1], ports.next()?));
                let running = crate::serve_at(Protocol::Sink, listen.into()).start().unwrap();
                let mut load = load(engine, &format!("tcp://{listen}"), Workload::Connect);
                (load.hold, load.connections) = (100, 0);
                (load.length, load.timeout) = (Some(100 * MILLISECOND), 300 * MILLISECOND);
                let ran = run("failures::hold_fewer", &load)?;
                stop(running);
                Some(ran)
            };
            let opened = |ran: &RunOutcome| ran.results.hold.as_ref().unwrap().opened;
            // On a busy host a handshake may take longer than the timeout.
            let Some(ran) = until_expected(once, |ran| opened(ran) >= 60) else { continue };
            assert!((60..=64).contains(&opened(&ran)), "{ran:#?}");
            assert!(ran.remarks().contains(&"ports-ran-out"), "{ran:#?}");
        }
    });
}

#[test]
fn held_connections_to_a_closed_port_end_the_ramp() {
    with_each_engine(|engine| {
        let mut load = short(engine, TARGET, SMALL);
        load.hold = 200;
        let Some(ran) = run_refused("failures::hold_refused", &load) else { return };
        assert_eq!(ran.error("ECONNREFUSED"), 212, "{ran:#?}");
        assert_eq!(ran.results.hold.unwrap().opened, 0);
    });
}

#[test]
fn a_stopped_run_keeps_its_results() {
    in_namespace(|| {
        let running = serve(SMALL_SERVED).start().unwrap();
        for engine in ENGINES {
            let load = load(engine, TARGET, SMALL);
            let flag = AtomicBool::new(false);
            let ran = thread::scope(|scope| {
                scope.spawn(|| {
                    let done = || sum(running.counts()).requests;
                    let before = done();
                    // Then one has its response: 8 are in progress at a time, and 8 may be left from the last run.
                    until(|| done() > before + 16);
                    flag.store(true, Ordering::Relaxed);
                });
                crate::run_until("failures::stop", &load, &flag)
            });
            let Some(ran) = ran else { continue };
            // The wait after a stop is short: on a busy machine the last answers may arrive after it.
            let is_known = ran.errors().iter().all(|error| *error == "unanswered");
            assert!(ran.results.operations > 0 && is_known, "{ran:#?}");
            assert_eq!(ran.remarks()[0], "interrupted");
        }
        stop(running);
    });
}

#[test]
fn threads_that_cannot_be_created_are_an_error() {
    in_namespace(|| {
        let running = serve(SMALL_SERVED).start().unwrap();
        let mut load = load(EngineChoice::Epoll, TARGET, SMALL);
        (load.operations, load.threads) = (Some(10), 4);
        let endpoints = load.resolve().unwrap();
        let preflight = crate::preflight(&load, &endpoints[0]);
        let refused = thread::spawn(move || {
            seccomp::refuse(Facility::Threads).unwrap();
            load.run(&endpoints, &preflight, &AtomicBool::new(false), |_| ()).map(drop)
        });
        match refused.join().unwrap() {
            Err(error @ LoadError::Thread(_)) => {
                assert!(error.to_string().contains("RLIMIT_NPROC"), "{error}")
            }
            other => panic!("{other:?}"),
        }
        stop(running);
    });
}

#[test]
fn a_foreign_source_is_not_port_exhaustion() {
    in_namespace(|| {
        let _listener = TcpListener::bind("127.0.0.1:4000").unwrap();
        for engine in ENGINES {
            let mut load = load(engine, TARGET, SMALL);
            load.sources = "192.0.2.1".parse().unwrap();
            (load.length, load.timeout) = (Some(200 * MILLISECOND), 200 * MILLISECOND);
            match attempt(&load, &AtomicBool::new(false)) {
                Err(LoadError::Engine(_)) => {}
                Err(error) => assert!(error.to_string().contains("192.0.2.1"), "{error}"),
                Ok(ran) => panic!("{ran:#?}"),
            }
        }
    });
}

/// The filter does not see the calls of io_uring: `a_chain_fails_with_every_errno` in the ring's own tests gives their results.
#[test]
fn every_errno_is_counted_and_the_run_goes_on() {
    // EADDRINUSE and EADDRNOTAVAIL of connect() stall the run until a port is free. After EAGAIN of send() and recv() the engine waits.
    const ERRNOS: [Errno; 24] = [
        Errno::EPERM,
        Errno::EACCES,
        Errno::EAFNOSUPPORT,
        Errno::EALREADY,
        Errno::EBADF,
        Errno::ECONNREFUSED,
        Errno::ECONNRESET,
        Errno::EDESTADDRREQ,
        Errno::EFAULT,
        Errno::EINVAL,
        Errno::EIO,
        Errno::EISCONN,
        Errno::EMSGSIZE,
        Errno::ENETDOWN,
        Errno::ENETUNREACH,
        Errno::EHOSTUNREACH,
        Errno::ENOBUFS,
        Errno::ENOMEM,
        Errno::ENOTCONN,
        Errno::ENOTSOCK,
        Errno::EOPNOTSUPP,
        Errno::EPIPE,
        Errno::EPROTO,
        Errno::ETIMEDOUT,
    ];
    in_namespace(|| {
        let running = serve(SMALL_SERVED).start().unwrap();
        let load = short(EngineChoice::Epoll, TARGET, SMALL);
        for call in [FailingCall::Connect, FailingCall::Send, FailingCall::Receive] {
            let mut row = format!("MATRIX {call:?} load epoll: Counted:");
            for errno in ERRNOS {
                let once = || {
                    let filter = || seccomp::fail(call, errno).unwrap();
                    let attempt = || attempt_after(filter, &load, &AtomicBool::new(false)).unwrap();
                    // The filter applies to the threads of the run too, and cannot be removed.
                    Some(thread::scope(|scope| scope.spawn(attempt).join().unwrap()))
                };
                // A run whose attempts are all refused ends after a second.
                let ran = until_expected(once, |ran| !ran.remarks().contains(&"all-refused")).unwrap();
                require_all(&ran, &errno.to_string());
                row += &format!(" {errno}");
            }
            print(&row);
        }
        stop(running);
    });
}

/// Also where each second has parts of a response only, the server has answered.
#[test]
fn a_response_in_parts_is_not_a_stall() {
    in_namespace(|| {
        let slow = |part: &'static [u8]| {
            answer(move |mut stream| {
                while stream.read(&mut [0; 1000])? > 0 {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n")?;
                    for _ in 0..50 {
                        thread::sleep(50 * MILLISECOND);
                        stream.write_all(part)?;
                    }
                    // The parts that were not sent.
                    stream.write_all(&[0; 50][part.len() * 50..])?;
                }
                Ok(())
            })
        };
        let (in_parts, at_the_end) = (slow(b"a"), slow(b""));
        for engine in ENGINES {
            let stalls = |address: SocketAddr| {
                let target = format!("http://{address}/");
                let mut load = load(engine, &target, get(&target));
                (load.connections, load.operations) = (1, Some(1));
                let ran = run("failures::parts", &load)?;
                assert_eq!(ran.results.operations, 1, "{ran:#?}");
                Some(ran.remarks().contains(&"server-stalled"))
            };
            if stalls(at_the_end) == Some(false) {
                panic!("nothing arrived for two seconds");
            }
            // A busy host may stop all programs for a second.
            assert!((0..10).any(|_| stalls(in_parts) != Some(true)));
        }
    });
}

const POOL: &str = "10.9.0.12,10.9.0.13,10.9.0.14,10.9.0.15";
const FAILING: &str = "10.9.0.14";
const OPERATIONS: u64 = 3000;

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Adds the four sources to the near end of the wire and starts a server at the far end.
fn four_sources(wire: &Wire, protocol: Protocol) -> Running {
    for source in POOL.split(',') {
        device::add_address(NEAR, address(source), 32).unwrap();
    }
    wire.far_away(|| serve_at(protocol, SocketAddr::new(FAR_V4, 4000).into()).start().unwrap())
}

fn from_the_pool(engine: EngineChoice) -> Load {
    let mut load = load(engine, "tcp://10.9.0.2:4000", SMALL);
    (load.operations, load.sources) = (Some(OPERATIONS), POOL.parse().unwrap());
    load
}

#[test]
fn a_prohibited_source_fails_no_operation() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_prohibited_source_fails_no_operation") else { return };
        let _server = four_sources(&wire, SMALL_SERVED);
        route::prohibit_from(address(FAILING)).unwrap();
        for engine in ENGINES {
            let Some(ran) = run("sources::prohibited", &from_the_pool(engine)) else { continue };
            assert_eq!((ran.results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
            // Without another source the operations fail, and no further source is tried.
            let mut load = from_the_pool(engine);
            (load.operations, load.sources) = (Some(20), FAILING.parse().unwrap());
            let ran = run("sources::prohibited", &load).unwrap();
            assert_eq!((ran.results.operations, ran.error("EACCES")), (0, 20), "{ran:#?}");
        }
    });
}

#[test]
fn a_prohibited_source_fails_no_flow() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_prohibited_source_fails_no_flow") else { return };
        let _server = four_sources(&wire, Protocol::Udp { request: 1 });
        route::prohibit_from(address(FAILING)).unwrap();
        for engine in ENGINES {
            let mut load = load(engine, "udp://10.9.0.2:4000", Workload::Udp { request: 1 });
            (load.operations, load.sources) = (Some(OPERATIONS), POOL.parse().unwrap());
            load.timeout = LOST;
            let once = || run("sources::prohibited_flow", &load);
            let is_answered = |ran: &RunOutcome| !ran.errors().contains(&"timeout");
            let Some(ran) = until_expected(once, is_answered) else { continue };
            assert_eq!((ran.results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
            (load.operations, load.sources) = (Some(20), FAILING.parse().unwrap());
            let ran = run("sources::prohibited_flow", &load).unwrap();
            assert_eq!((ran.results.operations, ran.error("EACCES")), (0, 20), "{ran:#?}");
        }
    });
}

#[test]
fn a_source_removed_in_a_run_fails_no_later_operation() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_source_removed_in_a_run_fails_no_later_operation") else { return };
        let udp = ("udp://10.9.0.2:4000", Workload::Udp { request: 1 }, Protocol::Udp { request: 1 });
        for (target, workload, protocol) in [("tcp://10.9.0.2:4000", SMALL, SMALL_SERVED), udp] {
            for engine in ENGINES {
                let mut load = load(engine, target, workload.clone());
                load.operations = Some(OPERATIONS);
                let failed = |ran: &RunOutcome| ran.results.errors.values().sum::<u64>();
                let once = || removed_in_a_run(&wire, protocol, load.clone());
                // A busy host may drop datagrams too.
                let is_expected = |ran: &RunOutcome| failed(ran) <= u64::from(load.connections);
                let Some(ran) = until_expected(once, is_expected) else { continue };
                assert_eq!(ran.results.operations + failed(&ran), OPERATIONS, "{ran:#?}");
                assert!(is_expected(&ran), "{ran:#?}");
            }
        }
    });
}

fn removed_in_a_run(wire: &Wire, protocol: Protocol, mut load: Load) -> Option<RunOutcome> {
    let server = four_sources(wire, protocol);
    load.sources = POOL.parse().unwrap();
    // Operations in progress when the address is removed end by their timeout.
    load.timeout = Duration::from_secs(5);
    let answered = || server.counts().iter().map(|worker| worker.requests).sum::<u64>() > OPERATIONS / 10;
    let ran = thread::scope(|scope| {
        scope.spawn(|| {
            until(answered);
            device::remove_address(NEAR, address(FAILING), 32).unwrap();
        });
        run("sources::removed", &load)
    });
    server.stop();
    for source in POOL.split(',').filter(|source| *source != FAILING) {
        device::remove_address(NEAR, address(source), 32).unwrap();
    }
    ran
}
