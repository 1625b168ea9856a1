//! Each workload on both engines: client and server count the same, and TIME_WAIT sockets are on the expected side.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{
    ENGINES, LOST, RunOutcome, SMALL, SMALL_SERVED, all_time_wait, get, load, long_enough, run, serve,
    serve_at, stop, sum, time_wait, until, until_expected, with_each_engine,
};
use fourtuple::dial::Strategy;
use fourtuple_bench::load::{Close, EngineChoice, Load, LoadError, Prepared, Workload};
use fourtuple_bench::serve::{Close as ServerCloses, Protocol};
use fourtuple_record::LoadResults;
use fourtuple_syscalls::Endpoint;
use fourtuple_testing::{in_namespace, keep_time_wait, set_sysctl};

const TARGET: &str = "tcp://127.0.0.1:4000";
const HTTP: &str = "http://127.0.0.1:4000/";

fn require_clean(ran: &RunOutcome) {
    assert!(ran.results.errors.is_empty() && ran.remarks_but_of_haste().is_empty(), "{ran:#?}");
}

#[test]
fn connect_opens_and_closes() {
    with_each_engine(|engine| {
        let running = serve(Protocol::Sink).start().unwrap();
        let mut load = load(engine, TARGET, Workload::Connect);
        load.operations = Some(500);
        let Some(ran) = run("workloads::connect", &load) else { return };
        require_clean(&ran);
        assert_eq!((ran.results.operations, ran.results.connections), (500, 500));
        assert_eq!(
            (ran.results.engine.as_str(), ran.results.latency_ns.first_byte.samples),
            (engine.name(), 0)
        );
        // The server accepts all connections in the accept queue before it ends.
        until(|| sum(running.counts()).accepted == 500);
        stop(running);
    });
}

#[test]
fn crr_is_counted_to_the_operation_over_several_threads() {
    with_each_engine(|engine| {
        for (threads, connections) in [(1, 32), (3, 8), (3, 2)] {
            let before = all_time_wait();
            let running = serve(SMALL_SERVED).start().unwrap();
            let mut load = load(engine, TARGET, SMALL);
            (load.threads, load.connections, load.operations) = (threads, connections, Some(1000));
            let Some(ran) = run("workloads::crr", &load) else { continue };
            require_clean(&ran);
            let served = stop(running);
            assert_eq!((served.accepted, served.requests), (1000, 1000), "{engine:?} {threads}");
            assert_eq!((ran.results.operations, ran.results.connections), (1000, 1000));
            // Some TIME_WAIT sockets may remain from the previous run, and some of these are reused.
            assert!(all_time_wait() > before.min(900), "TIME_WAIT is ours");
            let times = ran.results.latency_ns;
            assert!(times.first_byte.max <= times.total.max && times.first_byte.samples == 1000, "{times:?}");
            match engine {
                EngineChoice::Epoll => assert_eq!(times.search.samples, 1000),
                _ => assert!((16..=32).contains(&times.search.samples), "one of 64: {times:?}"),
            }
            if engine == EngineChoice::Uring && connections == 32 {
                // One call submits all steps of a connection; on an idle host of several connections. A wait for a busy server is a call
                // each 5 ms.
                let calls = ran.results.syscalls_per_connection;
                let waits = ran.results.elapsed_ns as f64 / 5e6 / 1000.0;
                assert!(calls > 0.0 && calls < 4.0 + waits, "{calls} system calls per connection");
            }
        }
    });
}

#[test]
fn large_requests_and_responses_go_through_whole() {
    with_each_engine(|engine| {
        let (request, response) = (3_000_000, 5_000_000);
        let running = serve(Protocol::Crr { request: request as u64, response }).start().unwrap();
        let mut load = load(engine, TARGET, Workload::Crr { request, response });
        load.operations = Some(20);
        let Some(ran) = run("workloads::large", &load) else { return };
        require_clean(&ran);
        assert_eq!((ran.results.operations, stop(running).requests), (20, 20));
    });
}

#[test]
fn http_keeps_connections_as_long_as_asked() {
    with_each_engine(|engine| {
        for (every, connections) in [(0, 4..=4), (1, 1000..=1000), (2, 500..=504)] {
            let running = serve(Protocol::Http { body: 100 }).start().unwrap();
            let mut load = load(engine, HTTP, get(HTTP));
            (load.connections, load.close_every, load.operations) = (4, every, Some(1000));
            let Some(ran) = run("workloads::http", &load) else { continue };
            require_clean(&ran);
            let served = stop(running);
            assert_eq!((served.requests, ran.results.operations), (1000, 1000));
            assert_eq!(served.accepted, ran.results.connections);
            assert!(connections.contains(&served.accepted), "{every}: {}", served.accepted);
        }
    });
}

#[test]
fn connections_that_the_server_closes_are_reopened() {
    with_each_engine(|engine| {
        let mut server = serve(Protocol::Http { body: 2 });
        server.close = ServerCloses::Server { every: 10 };
        let running = server.start().unwrap();
        let mut load = load(engine, HTTP, get(HTTP));
        (load.connections, load.operations) = (4, Some(1000));
        let Some(ran) = run("workloads::server_closes", &load) else { return };
        require_clean(&ran);
        let served = stop(running);
        assert_eq!((served.requests, served.accepted), (1000, ran.results.connections));
        assert!((100..=104).contains(&served.accepted), "{}", served.accepted);
    });
}

#[test]
fn udp_flows_keep_their_sockets() {
    in_namespace(|| {
        for (engine, address) in
            ENGINES.into_iter().flat_map(|engine| [(engine, "127.0.0.1:4000"), (engine, "[::1]:4000")])
        {
            let listen: SocketAddr = address.parse().unwrap();
            let mut load = load(engine, &format!("udp://{address}"), Workload::Udp { request: 64 });
            (load.operations, load.timeout) = (Some(1000), LOST);
            let once = || {
                let running = serve_at(Protocol::Udp { request: 1 }, listen.into()).start().unwrap();
                let ran = run("workloads::udp", &load)?;
                Some((ran, stop(running).requests))
            };
            let Some((ran, requests)) = until_expected(once, |(ran, _)| ran.errors().is_empty()) else {
                continue;
            };
            require_clean(&ran);
            assert_eq!((ran.results.operations, ran.results.connections), (1000, 8));
            assert_eq!(requests, 1000);
        }
    });
}

#[test]
fn connections_are_held_while_others_open_and_close() {
    with_each_engine(|engine| {
        // With one held connection and two threads, the second thread must not wait for a share.
        for (hold, threads) in [(300, 2), (1, 2)] {
            let running = serve(SMALL_SERVED).start().unwrap();
            let mut load = load(engine, TARGET, SMALL);
            (load.hold, load.threads, load.operations) = (hold, threads, Some(200));
            let Some(ran) = run("workloads::hold", &load) else { continue };
            require_clean(&ran);
            let held = ran.results.hold.unwrap();
            assert_eq!((held.opened, held.lost), (u64::from(hold), 0));
            assert!(held.ramp_ns > 0 && held.ramp_ns <= ran.results.elapsed_ns, "{ran:#?}");
            assert_eq!(ran.results.connections, u64::from(hold) + 200);
            assert_eq!(stop(running).requests, 200, "held connections send nothing");
        }
    });
}

#[test]
fn held_connections_that_the_server_closes_are_lost() {
    with_each_engine(|engine| {
        let once = |length| {
            let running = serve(Protocol::Sink).start().unwrap();
            let mut load = load(engine, TARGET, Workload::Connect);
            (load.hold, load.connections, load.length) = (50, 0, Some(length));
            let ended = std::thread::spawn(move || {
                until(|| sum(running.counts()).accepted == 50);
                stop(running)
            });
            let ran = run("workloads::held_lost", &load)?;
            ended.join().unwrap();
            Some(ran)
        };
        let held = |ran: &RunOutcome| {
            let held = ran.results.hold.as_ref().unwrap();
            (held.opened, held.lost)
        };
        let length = std::time::Duration::from_millis(600);
        let Some(ran) = long_enough(length, once, |ran| held(ran) == (50, 50)) else { return };
        assert_eq!(held(&ran), (50, 50), "{ran:#?}");
    });
}

/// A server may speak first, as one of SMTP does.
#[test]
fn held_connections_that_get_bytes_are_not_lost() {
    with_each_engine(|engine| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = format!("tcp://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let mut greeted = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                stream.write_all(b"220 ready").unwrap();
                greeted.push(stream);
            }
        });
        let mut load = load(engine, &target, Workload::Connect);
        let length = std::time::Duration::from_millis(300);
        (load.hold, load.connections, load.length) = (20, 0, Some(length));
        let Some(ran) = run("workloads::held_bytes", &load) else { return };
        let held = ran.results.hold.unwrap();
        assert_eq!((held.opened, held.lost), (20, 0), "{engine:?}");
    });
}

#[test]
fn unix_sockets() {
    with_each_engine(|engine| {
        let path =
            std::env::temp_dir().join(format!("fourtuple-load-{}-{}", std::process::id(), engine.name()));
        let target = format!("unix:{}", path.display());
        for (workload, protocol) in [
            (SMALL, SMALL_SERVED),
            (get(&target), Protocol::Http { body: 9 }),
            (Workload::Connect, Protocol::Sink),
        ] {
            for every in [1, 3] {
                if every > 1 && protocol == Protocol::Sink {
                    continue;
                }
                let running = serve_at(protocol, Endpoint::Unix(path.clone())).start().unwrap();
                let mut load = load(engine, &target, workload.clone());
                (load.operations, load.close_every) = (Some(600), every);
                let Some(ran) = run("workloads::unix", &load) else { continue };
                require_clean(&ran);
                assert_eq!(ran.results.operations, 600);
                assert!(ran.results.ports.is_none() && ran.results.strategy.is_none());
                if protocol != Protocol::Sink {
                    let served = stop(running);
                    assert_eq!((served.requests, served.accepted), (600, ran.results.connections));
                }
            }
        }
    });
}

#[test]
fn ipv6() {
    with_each_engine(|engine| {
        let listen: SocketAddr = "[::1]:4000".parse().unwrap();
        let running = serve_at(SMALL_SERVED, listen.into()).start().unwrap();
        let mut load = load(engine, "tcp://[::1]:4000", SMALL);
        load.operations = Some(300);
        let Some(ran) = run("workloads::ipv6", &load) else { return };
        require_clean(&ran);
        let served = stop(running);
        assert_eq!((served.requests, served.accepted, ran.results.connections), (300, 300, 300));
    });
}

/// Prepares a run of 20 operations to `name:4000`, a name with the given addresses, and executes it.
fn named(test: &str, load: Load, addresses: &str) -> Option<(Prepared, LoadResults)> {
    let load =
        Load { resolve: Some(format!("{}:{addresses}", load.target.authority()).parse().unwrap()), ..load };
    let prepared = Prepared::new(load).unwrap();
    match prepared.run(&AtomicBool::new(false), None, |_| ()) {
        Ok(measured) => Some((prepared, measured.results)),
        Err(LoadError::Engine(why)) => {
            fourtuple_testing::skip(test, "uring", &why);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Does the same as [`named`], again until the probe found what `is_expected` tells: it waits for an answer for one second only.
fn probed(
    load: &Load,
    addresses: &str,
    is_expected: impl Fn(&Prepared, &LoadResults) -> bool,
) -> Option<(Prepared, LoadResults)> {
    let once = || named("workloads::probe", load.clone(), addresses);
    until_expected(once, |(prepared, results)| is_expected(prepared, results))
}

#[test]
fn the_address_that_answers_is_loaded() {
    in_namespace(|| {
        let udp = Workload::Udp { request: 8 };
        for (scheme, protocol, workload) in
            [("tcp", SMALL_SERVED, SMALL), ("udp", Protocol::Udp { request: 1 }, udp)]
        {
            let running = serve(protocol).start().unwrap();
            for engine in ENGINES {
                let mut load = load(engine, &format!("{scheme}://name:4000"), workload.clone());
                (load.operations, load.timeout) = (Some(20), LOST);
                let first_refuses = "::1,127.0.0.2,127.0.0.1";
                let told = "name: 127.0.0.1:4000 is loaded, not [::1]:4000 (ECONNREFUSED), 127.0.0.2:4000 (ECONNREFUSED)";
                let is_told = |_: &Prepared, results: &LoadResults| {
                    results.errors.is_empty() && results.advice.iter().any(|advice| advice.contains(told))
                };
                let Some((prepared, results)) = probed(&load, first_refuses, is_told) else { continue };
                assert_eq!((results.operations, results.errors.len()), (20, 0), "{results:#?}");
                assert_eq!(prepared.settings(None, false).address, "127.0.0.1:4000");
                assert!(results.advice.iter().any(|advice| advice.contains(told)), "{:?}", results.advice);
                let is_plain = |prepared: &Prepared, results: &LoadResults| {
                    results.operations == 20 && prepared.findings().is_empty()
                };
                // Sources of IPv4 reach no address of IPv6.
                load.sources = "127.0.0.3".parse().unwrap();
                let (prepared, results) = probed(&load, "::1,127.0.0.1", is_plain).unwrap();
                assert_eq!((results.operations, prepared.findings()), (20, [].as_slice()));
                // The first one answers.
                let (prepared, _) = probed(&load, "127.0.0.1,127.0.0.2", is_plain).unwrap();
                assert_eq!(prepared.findings(), []);
            }
            stop(running);
        }
        let unserved = load(EngineChoice::Epoll, "tcp://name:4001", SMALL);
        let told = "no address of name answers: [::1]:4001 (ECONNREFUSED), 127.0.0.1:4001 (ECONNREFUSED)";
        let is_told = |prepared: &Prepared, _: &LoadResults| {
            prepared.findings().iter().any(|found| found.message.contains(told))
        };
        let (prepared, results) =
            probed(&Load { operations: Some(1), ..unserved }, "::1,127.0.0.1", is_told).unwrap();
        assert!(is_told(&prepared, &results), "{:?}", prepared.findings());
    });
}

#[test]
fn all_addresses_are_loaded_in_turn() {
    with_each_engine(|engine| {
        let v6: SocketAddr = "[::1]:4000".parse().unwrap();
        let (one, two) =
            (serve(SMALL_SERVED).start().unwrap(), serve_at(SMALL_SERVED, v6.into()).start().unwrap());
        let mut load = load(engine, "tcp://name:4000", SMALL);
        (load.operations, load.all_addresses, load.threads) = (Some(300), true, 2);
        let Some((prepared, results)) = named("workloads::all", load.clone(), "127.0.0.1,::1") else {
            return;
        };
        let (served, other) = (stop(one).accepted, stop(two).accepted);
        assert!((149..=151).contains(&served) && served + other == 300, "{served} {other}");
        let expected = [("127.0.0.1:4000".to_owned(), served), ("[::1]:4000".to_owned(), other)];
        assert_eq!(
            results.addresses.into_iter().map(|one| (one.address, one.connections)).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(prepared.settings(None, false).address, "127.0.0.1:4000, [::1]:4000");
        let both = results.ports.unwrap().budget;
        // One of the addresses refuses.
        let one = serve(SMALL_SERVED).start().unwrap();
        let (_, results) = named("workloads::all", load.clone(), "127.0.0.1,127.0.0.2").unwrap();
        let served = stop(one).accepted;
        assert_eq!((results.operations, results.errors["ECONNREFUSED"]), (served, 300 - served));
        assert_eq!(results.addresses[1].connections, 0);
        (load.all_addresses, load.operations) = (false, Some(1));
        let (_, results) = named("workloads::all", load, "127.0.0.1").unwrap();
        assert_eq!(results.ports.unwrap().budget * 2, both, "both destinations have a budget of their own");
    });
}

#[test]
fn connections_come_from_all_sources() {
    in_namespace(|| {
        keep_time_wait();
        for (port, engine) in (4000..).zip(ENGINES) {
            let listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], port));
            let running = serve_at(SMALL_SERVED, listen.into()).start().unwrap();
            let mut load = load(engine, &format!("tcp://{listen}"), SMALL);
            load.sources = "127.0.0.1,127.0.0.7,127.0.0.9".parse().unwrap();
            load.operations = Some(600);
            let Some(ran) = run("workloads::sources", &load) else { continue };
            require_clean(&ran);
            assert_eq!(stop(running).requests, 600);
            let left = time_wait(listen);
            assert_eq!(
                left.keys().map(ToString::to_string).collect::<Vec<_>>(),
                ["127.0.0.1", "127.0.0.7", "127.0.0.9"]
            );
            assert!(left.values().all(|count| (150..=250).contains(count)), "{left:?}");
        }
    });
}

#[test]
fn udp_flows_come_from_all_sources() {
    with_each_engine(|engine| {
        let mut load = load(engine, "udp://127.0.0.1:4000", Workload::Udp { request: 8 });
        load.sources = "127.0.0.1,127.0.0.7".parse().unwrap();
        (load.operations, load.timeout) = (Some(200), LOST);
        let once = || {
            let socket = std::net::UdpSocket::bind("127.0.0.1:4000").unwrap();
            let over = std::sync::Arc::new(AtomicBool::new(false));
            let is_over = std::sync::Arc::clone(&over);
            let seen = std::thread::spawn(move || {
                let mut seen = std::collections::BTreeSet::new();
                let mut buffer = [0; 64];
                socket.set_read_timeout(Some(std::time::Duration::from_millis(20))).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    let Ok((count, from)) = socket.recv_from(&mut buffer) else { continue };
                    seen.insert(from);
                    socket.send_to(&buffer[..count], from).unwrap();
                }
                seen
            });
            let ran = run("workloads::udp_sources", &load);
            over.store(true, Ordering::Relaxed);
            let seen = seen.join().unwrap();
            Some((ran?, seen))
        };
        let Some((ran, seen)) = until_expected(once, |(ran, _)| ran.errors().is_empty()) else { return };
        require_clean(&ran);
        let of = |ip: &str| seen.iter().filter(|from| from.ip().to_string() == ip).count();
        assert_eq!((of("127.0.0.1"), of("127.0.0.7")), (4, 4), "{seen:?}");
    });
}

#[test]
fn every_port_strategy() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20999");
        for engine in ENGINES {
            for strategy in ["kernel-default", "select-test-repeat", "random-window:64", "full-range", "auto"]
            {
                let strategy: Strategy = strategy.parse().unwrap();
                let running = serve(SMALL_SERVED).start().unwrap();
                let mut load = load(engine, TARGET, SMALL);
                // The server has the TIME_WAIT sockets, so every strategy can use the whole range.
                (load.strategy, load.operations, load.close) = (strategy, Some(300), Close::Reset);
                let Some(ran) = run("workloads::strategies", &load) else { continue };
                require_clean(&ran);
                assert_eq!(stop(running).requests, 300, "{strategy}");
                let done = ran.results.strategy.clone().unwrap();
                assert!(
                    strategy == Strategy::Auto || done.contains(&strategy.to_string()),
                    "{strategy}: {done}"
                );
            }
        }
    });
}

#[test]
fn the_side_that_closes_has_the_time_wait() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        for engine in ENGINES {
            // Many more operations than ports; no port may stay in use.
            let mut load = load(engine, TARGET, SMALL);
            (load.operations, load.connections) = (Some(1000), 4);
            let running = serve(SMALL_SERVED).start().unwrap();
            load.close = Close::Reset;
            let Some(ran) = run("workloads::rst", &load) else { continue };
            require_clean(&ran);
            assert_eq!((ran.results.close.as_str(), stop(running).requests), ("rst", 1000));
            assert_eq!(all_time_wait(), 0);
        }
        keep_time_wait();
        for engine in ENGINES {
            let mut load = load(engine, TARGET, SMALL);
            (load.operations, load.connections, load.close) = (Some(40), 4, Close::Server);
            let mut server = serve(SMALL_SERVED);
            server.close = ServerCloses::Server { every: 1 };
            let running = server.start().unwrap();
            let before = all_time_wait();
            let Some(ran) = run("workloads::close_server", &load) else { continue };
            require_clean(&ran);
            assert_eq!((ran.results.close.as_str(), stop(running).requests), ("server", 40));
            // Both ends are in this namespace: the TIME_WAIT sockets are the server's, and none uses a 4-tuple of the
            // client.
            assert!(all_time_wait() > before.min(30));
            assert!(time_wait("127.0.0.1:4000".parse().unwrap()).is_empty(), "none is ours");
        }
    });
}

#[test]
fn ports_are_free_at_once_when_the_server_closes() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        for engine in ENGINES {
            for http in [false, true] {
                let protocol = if http { Protocol::Http { body: 1 } } else { SMALL_SERVED };
                let mut server = serve(protocol);
                server.close = ServerCloses::Server { every: 1 };
                let running = server.start().unwrap();
                let target = if http { HTTP } else { TARGET };
                let mut load = load(engine, target, if http { get(HTTP) } else { SMALL });
                (load.operations, load.connections, load.close) = (Some(500), 4, Close::Server);
                load.close_every = 1;
                let Some(ran) = run("workloads::free_at_once", &load) else { continue };
                require_clean(&ran);
                assert_eq!(stop(running).requests, 500, "more than there are ports");
            }
        }
    });
}

#[test]
fn auto_names_its_engine_without_the_preflight() {
    in_namespace(|| {
        let running = serve(SMALL_SERVED).start().unwrap();
        let mut load = load(EngineChoice::Auto, TARGET, SMALL);
        load.operations = Some(10);
        let ran = run("workloads::auto", &load).expect("auto never fails");
        match ran.results.engine.as_str() {
            "uring" => assert_eq!(ran.results.engine_reason, None),
            "epoll" => assert!(ran.results.engine_reason.is_some()),
            other => panic!("{other}"),
        }
        assert_eq!(stop(running).requests, 10);
    });
}
