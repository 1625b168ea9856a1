//! The warm-up of a run, the steps of a ramp, and lists of requests.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::run::{ENGINES, answer, get, load, run, serve, stop, until};
use fourtuple_bench::load::{Arrival, HttpRequest, Load, Order, Prepared, Ramp, RequestList, Workload};
use fourtuple_bench::serve::Protocol;
use fourtuple_testing::{in_namespace, set_sysctl};

const HTTP: &str = "http://127.0.0.1:4000/";

#[test]
fn a_warm_up_is_counted_apart() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "2000 60999");
        for engine in ENGINES {
            for (every, arrival, hold) in
                [(0, Arrival::Closed, 0), (1, Arrival::Poisson(500.0), 0), (1, Arrival::Closed, 5)]
            {
                let running = serve(Protocol::Http { body: 100 }).start().unwrap();
                let mut load = load(engine, HTTP, get(HTTP));
                (load.arrival, load.close_every, load.threads, load.hold) = (arrival, every, 2, hold);
                (load.warm_up, load.operations) = (Duration::from_millis(300), Some(200));
                let Some(ran) = run("phases::warm_up", &load) else { continue };
                let warm_up = ran.results.warm_up.unwrap();
                // Nothing is sent on the held connections: the server may accept them late.
                let connections = ran.results.connections + warm_up.connections;
                until(|| running.counts().iter().map(|worker| worker.accepted).sum::<u64>() == connections);
                let served = stop(running);
                assert_eq!((ran.results.operations, ran.errors()), (200, vec![]), "{ran:#?}");
                assert_eq!(ran.results.statuses[0].count, 200);
                assert!(warm_up.operations > 0 && warm_up.for_ns == 300_000_000, "{warm_up:?}");
                assert_eq!(served.requests, 200 + warm_up.operations, "{engine:?} {ran:#?}");
                assert_eq!(served.accepted, connections, "{ran:#?}");
                assert!(ran.results.elapsed_ns + 300_000_000 <= ran.took.as_nanos() as u64, "{ran:#?}");
            }
        }
    });
}

/// One connection and 20 ms for each response are 50 responses a second at most.
#[test]
fn a_ramp_ends_at_the_first_rate_that_is_not_reached() {
    in_namespace(|| {
        for engine in ENGINES {
            let requests = Arc::new(Mutex::new(0_u64));
            let counted = Arc::clone(&requests);
            let address = answer(move |mut stream| {
                let mut room = [0; 2000];
                loop {
                    if stream.read(&mut room)? == 0 {
                        return Ok(());
                    }
                    *counted.lock().unwrap() += 1;
                    thread::sleep(Duration::from_millis(20));
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
                }
            });
            let target = format!("http://{address}/");
            let ramp = Ramp { from: 2.0, to: 20_000.0, steps: 5 };
            let load = Load {
                connections: 1,
                arrival: Arrival::Even(ramp.to),
                length: Some(Duration::from_millis(1500)),
                ramp: Some(ramp),
                ..load(engine, &target, get(&target))
            };
            let prepared = Prepared::new(load).unwrap();
            let measured = match prepared.run(&AtomicBool::new(false), None, |_| ()) {
                Ok(measured) => measured,
                Err(fourtuple_bench::load::LoadError::Engine(why)) => {
                    fourtuple_testing::skip("phases::ramp", "uring", &why);
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let results = measured.results;
            let offered: Vec<f64> = results.steps.iter().map(|step| step.offered_per_s).collect();
            assert!(
                offered == [2.0, 20.0, 200.0] || offered == [2.0, 20.0] || offered == [2.0],
                "{offered:?}"
            );
            let reached: Vec<bool> = results.steps.iter().map(|step| step.not_reached.is_none()).collect();
            assert!(reached[..reached.len() - 1].iter().all(|reached| *reached), "{:#?}", results.steps);
            assert!(!reached[reached.len() - 1], "{:#?}", results.steps);
            let done: u64 = results.steps.iter().map(|step| step.operations + step.errors).sum();
            assert_eq!(*requests.lock().unwrap(), done, "{:#?}", results.steps);
            let shown = &results.steps[reached.len().saturating_sub(2)];
            assert_eq!((results.operations, results.offered_per_s), (shown.operations, shown.offered_per_s));
        }
    });
}

/// Requests, and bytes of their bodies, by the first line of the request.
type Counts = Arc<Mutex<BTreeMap<String, (u64, u64)>>>;

/// Starts a server that counts requests.
fn counting() -> (String, Counts) {
    let counts = Counts::default();
    let sums = Arc::clone(&counts);
    let address = answer(move |mut stream| {
        let mut room = vec![0; 64 * 1024];
        let mut bytes: Vec<u8> = Vec::new();
        loop {
            let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
                match stream.read(&mut room)? {
                    0 => return Ok(()),
                    count => bytes.extend_from_slice(&room[..count]),
                }
                continue;
            };
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            let mut have = bytes.len() - end - 4;
            while have < length {
                match stream.read(&mut room)? {
                    0 => return Ok(()),
                    count => have += count,
                }
            }
            assert_eq!(have, length, "no pipelining");
            bytes.clear();
            let first = head.lines().next().unwrap().strip_suffix(" HTTP/1.1").unwrap().to_owned();
            let mut sums = sums.lock().unwrap();
            let sum = sums.entry(first).or_default();
            (sum.0, sum.1) = (sum.0 + 1, sum.1 + length as u64);
            drop(sums);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
        }
    });
    (format!("http://{address}/"), counts)
}

fn list(target: &str, order: Order) -> Option<Arc<RequestList>> {
    let Workload::Http(first) = get(target) else { panic!("get makes HTTP") };
    let of = |method: &str, path: &str, body: usize| HttpRequest {
        method: method.to_owned(),
        path: path.to_owned(),
        body: vec![b'x'; body],
        ..first.clone()
    };
    let requests = vec![of("GET", "/a", 0), of("POST", "/b?c", 100), of("HEAD", "/d", 0)];
    Some(Arc::new(RequestList { file: "list".to_owned(), requests, order }))
}

#[test]
fn requests_of_a_list_are_sent_in_turn_or_by_seed() {
    in_namespace(|| {
        let mut by_seed: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for engine in ENGINES {
            for (order, seed, threads, every) in [
                (Order::Turn, 1, 1, 0),
                (Order::Turn, 1, 3, 1),
                (Order::Random, 1, 1, 0),
                (Order::Random, 1, 3, 4),
                (Order::Random, 2, 2, 0),
            ] {
                let (target, counts) = counting();
                let mut load = load(engine, &target, get(&target));
                load.requests = list(&target, order);
                (load.operations, load.seed, load.threads, load.close_every) =
                    (Some(300), seed, threads, every);
                let Some(ran) = run("phases::list", &load) else { continue };
                assert_eq!((ran.results.operations, ran.errors()), (300, vec![]), "{ran:#?}");
                let counts = counts.lock().unwrap();
                let served: Vec<u64> = ["GET /a", "POST /b?c", "HEAD /d"].map(|line| counts[line].0).into();
                assert_eq!(counts["POST /b?c"].1, 100 * served[1]);
                let said: Vec<u64> = ran.results.requests.iter().map(|request| request.responses).collect();
                assert_eq!(said, served);
                match order {
                    Order::Turn => assert_eq!(served, [100, 100, 100]),
                    Order::Random => assert_eq!(by_seed.entry(seed).or_insert(served.clone()), &served),
                }
            }
        }
        assert!(by_seed.is_empty() || by_seed[&1] != by_seed[&2], "{by_seed:?}");
    });
}

#[test]
fn a_body_may_be_longer_than_16_mib() {
    in_namespace(|| {
        for engine in ENGINES {
            let (target, counts) = counting();
            let mut load = load(engine, &target, get(&target));
            let Workload::Http(request) = &mut load.workload else { panic!("get makes HTTP") };
            (request.method, request.body) = ("POST".to_owned(), vec![b'x'; 17 << 20]);
            (load.connections, load.operations) = (2, Some(4));
            let Some(ran) = run("phases::body", &load) else { continue };
            assert_eq!((ran.results.operations, ran.errors()), (4, vec![]), "{ran:#?}");
            assert_eq!(counts.lock().unwrap()["POST /"], (4, 4 * (17 << 20)));
            assert!(ran.results.sent_bytes.unwrap() > 4 * (17 << 20));
        }
    });
}
