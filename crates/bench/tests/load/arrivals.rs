//! Arrival processes, warm-up and ramps, lists of requests, and latencies: thresholds, seconds, logs.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bench::load::{
    Arrival, Coordination, HttpRequest, Interval, Load, Order, Prepared, Ramp, RequestList, Workload,
};
use fourtuple_bench::serve::{Protocol, Service, Shape, Stall};
use fourtuple_record::measure::Histogram;
use fourtuple_testing::{in_namespace, set_sysctl};

use crate::{
    ENGINES, RunOutcome, SMALL, SMALL_SERVED, answer, get, load, preflight, run, serve, stop, sum, until,
    until_expected, with_each_engine,
};

const TARGET: &str = "tcp://127.0.0.1:4000";
const MILLISECOND: Duration = Duration::from_millis(1);

/// Runs `load` until it is as expected, against a server that does not respond from 1.2 s to 1.6 s after its own start, which precedes the run
/// by a second at most.
fn through_a_stall(load: &Load, is_expected: impl Fn(&RunOutcome) -> bool) -> Option<RunOutcome> {
    let mut server = serve(Protocol::Http { body: 10 });
    server.stall = Some(Stall { at: 1200 * MILLISECOND, length: 400 * MILLISECOND });
    let once = || {
        let started = Instant::now();
        let running = server.start().unwrap();
        let ran = run("arrivals::stall", load)?;
        let until_end = started.elapsed();
        stop(running);
        Some((until_end.saturating_sub(Duration::from_nanos(ran.results.elapsed_ns)), ran))
    };
    let (_, ran) = until_expected(once, |(late, ran)| *late < Duration::from_secs(1) && is_expected(ran))?;
    Some(ran)
}

#[test]
fn an_open_loop_shows_a_stall_that_a_closed_one_hides() {
    with_each_engine(|engine| {
        let mut open = load(engine, HTTP, get(HTTP));
        (open.arrival, open.connections, open.length) =
            (Arrival::Poisson(2000.0), 64, Some(2800 * MILLISECOND));
        open.threshold = Some(100 * MILLISECOND);
        // On a busy host not all of the 5,600 operations begin before the end.
        let Some(ran) = through_a_stall(&open, |ran| ran.results.operations >= 1_000) else { return };
        let total = ran.results.latency_ns.total;
        assert!(total.p999 >= 100_000_000 && total.max >= 150_000_000, "{total:?}");
        // Operations that were intended in the first half of the stall are slow: about 400 of them.
        let slow = ran.results.slow_count;
        assert!(slow >= 100, "{slow}");
        assert!(
            ran.results.late_ns.max >= 50_000_000,
            "most could not even begin: {:?}",
            ran.results.late_ns
        );
        let mut closed = open.clone();
        closed.arrival = Arrival::Closed;
        (closed.connections, closed.pause) = (4, MILLISECOND);
        // A busy host may stop the client in its pauses, so that no operation meets the stall.
        let meets_stall = |ran: &RunOutcome| ran.results.latency_ns.total.max >= 150_000_000;
        let ran = through_a_stall(&closed, meets_stall).unwrap();
        assert!(meets_stall(&ran), "{ran:#?}");
        // The stall delays one operation of each connection; other load on the host may delay a few more.
        assert!(ran.results.slow_count * 4 < slow, "{} slow ones, and {slow}", ran.results.slow_count);
        assert_eq!(ran.results.late_ns.samples, 0);
    });
}

/// Checks that the server has processed the operations that succeeded, and of the others at most those without an answer at the end.
fn require_served(ran: &RunOutcome, requests: u64) {
    let done = ran.results.operations;
    assert!((done..=done + ran.error("unanswered")).contains(&requests), "{requests}: {ran:#?}");
}

/// Runs the load on a server until the number of operations is the expected one, and each has its answer: at the end of a run operations wait
/// for two seconds only.
fn on_time(test: &str, load: &Load, expected: &RangeInclusive<u64>) -> Option<RunOutcome> {
    let once = || {
        let running = serve(Protocol::Http { body: 10 }).start().unwrap();
        let ran = run(test, load)?;
        require_served(&ran, stop(running).requests);
        assert!(ran.results.operations <= *expected.end(), "{ran:#?}");
        Some(ran)
    };
    let is_expected =
        |ran: &RunOutcome| ran.errors().is_empty() && expected.contains(&ran.results.operations);
    let ran = until_expected(once, is_expected)?;
    assert!(is_expected(&ran), "not {expected:?} operations: {ran:#?}");
    Some(ran)
}

#[test]
fn achieved_load_equals_offered_load() {
    with_each_engine(|engine| {
        for (threads, limit) in [1, 3].into_iter().flat_map(|threads| [(threads, false), (threads, true)]) {
            let mut load = load(engine, HTTP, get(HTTP));
            (load.arrival, load.connections, load.threads) = (Arrival::Even(1000.0), 64, threads);
            match limit {
                true => load.operations = Some(500),
                false => load.length = Some(500 * MILLISECOND),
            }
            // No operation begins before it is due. On a loaded host the end of a run may pass while the last ones wait for a CPU.
            let expected = if limit { 500..=500 } else { 1..=501 };
            let Some(ran) = on_time("arrivals::even", &load, &expected) else { continue };
            assert!(!limit || ran.results.elapsed_ns >= 499_000_000, "{ran:#?}");
            assert_eq!(
                (ran.results.late_ns.samples, ran.remarks_but_of_haste()),
                (ran.results.operations, vec![]),
                "{ran:#?}"
            );
            assert_eq!(ran.results.offered_per_s, 1000.0);
        }
    });
}

#[test]
fn random_arrivals_scatter_and_are_not_a_lack_of_rate() {
    in_namespace(|| {
        for (seed, engine) in (0..).zip(ENGINES.repeat(3)) {
            let mut load = load(engine, HTTP, get(HTTP));
            // A connection for each operation: on a loaded host all may be due at the end.
            (load.arrival, load.connections, load.seed) = (Arrival::Poisson(1000.0), 400, seed);
            load.length = Some(300 * MILLISECOND);
            // Expected 300 operations with a standard deviation of 17.
            let Some(ran) = on_time("arrivals::poisson", &load, &(215..=385)) else { continue };
            assert_eq!(ran.remarks_but_of_haste(), Vec::<&str>::new(), "{ran:#?}");
        }
    });
}

#[test]
fn a_missed_rate_is_reported_with_the_reason() {
    with_each_engine(|engine| {
        for bounded in [false, true] {
            // One worker needs 5 ms per request: at most 200 requests per second.
            let mut server = serve(Protocol::Http { body: 10 });
            (server.workers, server.service) = (1, Service::of(Shape::Fixed(5 * MILLISECOND)));
            let mut load = load(engine, HTTP, get(HTTP));
            (load.arrival, load.connections) = (Arrival::Even(1000.0), 4);
            match bounded {
                true => load.operations = Some(100),
                false => load.length = Some(500 * MILLISECOND),
            }
            let once = || {
                let running = server.start().unwrap();
                let ran = run("arrivals::not_reached", &load)?;
                require_served(&ran, stop(running).requests);
                Some(ran)
            };
            let said = |ran: &RunOutcome| -> Vec<String> {
                let of_rate = ran.remarks.iter().filter(|remark| remark.id == "offered-rate-not-reached");
                of_rate.map(|remark| remark.message.clone()).collect()
            };
            let is_busy = |said: &[String]| said.len() == 1 && said[0].contains("4 connections were busy");
            // A busy host may stop the client for nearly the whole run, before all connections are busy.
            let Some(ran) = until_expected(once, |ran| is_busy(&said(ran))) else { continue };
            let said = said(&ran);
            assert!(is_busy(&said), "{ran:#?}");
            assert!(!bounded || ran.results.operations == 100, "{ran:#?}");
            assert!(said[0].contains(" of the 1,000 operations a second"), "{ran:#?}");
        }
    });
}

#[test]
fn an_open_loop_ends_after_its_operations_over_several_threads() {
    with_each_engine(|engine| {
        let running = serve(SMALL_SERVED).start().unwrap();
        let mut load = load(engine, TARGET, SMALL);
        (load.arrival, load.connections, load.threads) = (Arrival::Poisson(5000.0), 16, 3);
        load.operations = Some(1000);
        let Some(ran) = run("arrivals::bounded", &load) else { return };
        let served = stop(running);
        assert_eq!((ran.results.operations, served.requests, served.accepted), (1000, 1000, 1000));
    });
}

#[test]
fn operations_over_the_threshold_are_listed() {
    with_each_engine(|engine| {
        let mut server = serve(SMALL_SERVED);
        (server.workers, server.service) = (1, Service::of(Shape::Fixed(200 * MILLISECOND)));
        let running = server.start().unwrap();
        let mut load = load(engine, TARGET, SMALL);
        (load.connections, load.operations, load.threshold) = (1, Some(5), Some(150 * MILLISECOND));
        let Some(ran) = run("arrivals::threshold", &load) else { return };
        assert_eq!((ran.results.slow_count, ran.results.slow.len()), (5, 5), "{ran:#?}");
        let slow = &ran.results.slow;
        assert!(slow.iter().all(|slow| slow.total_ns >= 150_000_000), "{slow:#?}");
        // A busy host may stop the client for longer, between connect() and the request.
        assert!(slow.iter().any(|slow| slow.longest == "response"), "{slow:#?}");
        assert!(ran.results.slow.windows(2).all(|pair| pair[0].at_ns < pair[1].at_ns));
        assert!(ran.results.slow.iter().all(|slow| slow.request == 1));
        load.threshold = Some(Duration::from_secs(60));
        let ran = run("arrivals::threshold", &load).unwrap();
        assert_eq!((ran.results.slow_count, ran.results.slow.len()), (0, 0));
        stop(running);
    });
}

#[test]
fn a_pause_is_kept() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 }).start().unwrap();
        for engine in ENGINES {
            let mut load = load(engine, HTTP, get(HTTP));
            (load.connections, load.pause, load.operations) = (2, 50 * MILLISECOND, Some(12));
            let Some(ran) = run("arrivals::pause", &load) else { continue };
            // One of the connections has five pauses or more. A lower bound holds on any machine.
            assert!(ran.results.elapsed_ns >= 250_000_000, "{ran:#?}");
            assert_eq!((ran.results.operations, ran.errors()), (12, vec![]), "{ran:#?}");
        }
        stop(running);
    });
}

/// Checks a run of several seconds: the sums by second and the log agree on each engine.
#[test]
fn seconds_and_log_are_the_run() {
    with_each_engine(|engine| {
        let mut load = load(engine, HTTP, get(HTTP));
        (load.arrival, load.connections, load.threads, load.log) = (Arrival::Even(400.0), 16, 2, true);
        load.length = Some(1300 * MILLISECOND);
        let Some(ran) = on_time("arrivals::seconds", &load, &(1..=521)) else { return };
        let seconds = &ran.results.seconds;
        // The last answers may arrive late.
        assert!(seconds.len() >= 2, "{seconds:#?}");
        let by_second: u64 = seconds.iter().map(|second| second.operations).sum();
        assert_eq!(by_second, ran.results.operations, "{seconds:#?}");
        // On a busy host the first one may have none.
        let first = seconds.iter().find(|second| second.operations > 0).unwrap();
        assert!(first.p50_ns > 0 && first.p50_ns <= first.max_ns);
        let (count, max) = read(ran.log.as_deref().unwrap());
        assert_eq!(count, ran.results.operations);
        let of_results = ran.results.latency_ns.total.max as f64;
        assert!((0.99..=1.01).contains(&(max as f64 / of_results)), "{max} and {of_results}");
        let points = &ran.results.distribution;
        assert!(points.windows(2).all(|pair| pair[0].share < pair[1].share && pair[0].ns <= pair[1].ns));
        assert_eq!(points.last().unwrap().share, 1.0);
    });
}

/// Returns the number of values in a log, and the largest value.
fn read(log: &str) -> (u64, u64) {
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
    let (mut count, mut max) = (0, 0);
    for entry in IntervalLogIterator::new(log.as_bytes()) {
        if let LogEntry::Interval(interval) = entry.unwrap() {
            let bytes = base64(interval.encoded_histogram());
            let histogram: hdrhistogram::Histogram<u64> =
                Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
            count += histogram.len();
            max = max.max(histogram.max());
        }
    }
    (count, max)
}

/// Decodes base64 (RFC 4648).
fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four.iter().fold(0_u32, |bits, byte| bits << 6 | u32::from(digit(*byte)));
        let bits = bits << (6 * (4 - four.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}

/// Runs `load` with a start in `ahead`. Returns the intervals, the results and the start error.
fn coordinated(load: &Load, ahead: Duration) -> (Vec<Interval>, fourtuple_record::LoadResults, Duration) {
    let endpoints = load.resolve().unwrap();
    let (need, preflight) = (load.need(), preflight(load, &endpoints[0]));
    let (sender, receiver) = mpsc::channel();
    let start = Instant::now() + ahead;
    let coordination =
        Coordination { start, intervals: Box::new(move |interval| sender.send(interval).unwrap()) };
    let never = AtomicBool::new(false);
    let outcome =
        load.run_coordinated(&endpoints, &preflight, &never, Some(coordination), |_| ()).expect("a run");
    assert!(Instant::now() > start, "the run ended before its start");
    let start_error = outcome.start_error;
    let (results, _) = outcome.results(load, &need, &preflight, None);
    (receiver.iter().collect(), results, start_error)
}

#[test]
fn intervals_add_up_to_the_run() {
    with_each_engine(|engine| {
        let server = serve(SMALL_SERVED).start().unwrap();
        let load = Load {
            arrival: Arrival::Poisson(500.0),
            length: Some(Duration::from_millis(1_300)),
            threads: 2,
            ..load(engine, "tcp://127.0.0.1:4000", SMALL)
        };
        let (intervals, results, _) = coordinated(&load, Duration::from_millis(50));
        let seconds: Vec<u64> = intervals.iter().map(|interval| interval.second).collect();
        assert!(seconds.len() >= 2 && seconds.iter().enumerate().all(|(at, second)| at as u64 == *second));
        assert_eq!(intervals.iter().map(|interval| interval.operations).sum::<u64>(), results.operations);
        assert_eq!(intervals.iter().map(|interval| interval.connections).sum::<u64>(), results.connections);
        let merged = |part: fn(&Interval) -> &Histogram| {
            let mut sum = Histogram::new();
            intervals.iter().for_each(|interval| sum.merge(part(interval)));
            let found = sum.summary();
            (found.count, found.mean, found.p50, found.p99, found.max)
        };
        let of =
            |times: fourtuple_record::Quantiles| (times.samples, times.mean, times.p50, times.p99, times.max);
        let latency = results.latency_ns;
        assert_eq!(merged(|interval| &interval.total), of(latency.total));
        assert_eq!(merged(|interval| &interval.search), of(latency.search));
        assert_eq!(merged(|interval| &interval.handshake), of(latency.handshake));
        assert_eq!(merged(|interval| &interval.first_byte), of(latency.first_byte));
        assert_eq!(merged(|interval| &interval.late), of(results.late_ns));
        stop(server);
    });
}

#[test]
fn intervals_name_failures() {
    in_namespace(|| {
        let load = Load {
            operations: Some(20),
            ..load(fourtuple_bench::load::EngineChoice::Epoll, "tcp://127.0.0.1:9", SMALL)
        };
        let (intervals, results, _) = coordinated(&load, Duration::ZERO);
        let refused: u64 = intervals.iter().filter_map(|interval| interval.errors.get("ECONNREFUSED")).sum();
        assert_eq!(Some(&refused), results.errors.get("ECONNREFUSED"));
        assert!(refused > 0);
    });
}

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
                let Some(ran) = run("arrivals::warm_up", &load) else { continue };
                let warm_up = ran.results.warm_up.unwrap();
                // Nothing is sent on the held connections: the server may accept them late.
                let connections = ran.results.connections + warm_up.connections;
                until(|| sum(running.counts()).accepted == connections);
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
    with_each_engine(|engine| {
        let requests = Arc::new(Mutex::new(0_u64));
        let counted = Arc::clone(&requests);
        let address = answer(move |mut stream| {
            let mut buffer = [0; 2000];
            loop {
                if stream.read(&mut buffer)? == 0 {
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
                fourtuple_testing::skip("arrivals::ramp", "uring", &why);
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let results = measured.results;
        let offered: Vec<f64> = results.steps.iter().map(|step| step.offered_per_s).collect();
        assert!(offered == [2.0, 20.0, 200.0] || offered == [2.0, 20.0] || offered == [2.0], "{offered:?}");
        let reached: Vec<bool> = results.steps.iter().map(|step| step.not_reached.is_none()).collect();
        assert!(reached[..reached.len() - 1].iter().all(|reached| *reached), "{:#?}", results.steps);
        assert!(!reached[reached.len() - 1], "{:#?}", results.steps);
        let done: u64 = results.steps.iter().map(|step| step.operations).sum();
        let failed: u64 = results.steps.iter().map(|step| step.errors).sum();
        // A server that waits for a CPU may not have read the request of an operation that ended without an answer.
        assert!((done..=done + failed).contains(&*requests.lock().unwrap()), "{:#?}", results.steps);
        let shown = &results.steps[reached.len().saturating_sub(2)];
        assert_eq!((results.operations, results.offered_per_s), (shown.operations, shown.offered_per_s));
    });
}

/// Requests, and bytes of their bodies, by the first line of the request.
type Counts = Arc<Mutex<BTreeMap<String, (u64, u64)>>>;

/// Starts a server that counts requests.
fn counting() -> (String, Counts) {
    let counts = Counts::default();
    let sums = Arc::clone(&counts);
    let address = answer(move |mut stream| {
        let mut buffer = vec![0; 64 * 1024];
        let mut bytes: Vec<u8> = Vec::new();
        loop {
            let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
                match stream.read(&mut buffer)? {
                    0 => return Ok(()),
                    count => bytes.extend_from_slice(&buffer[..count]),
                }
                continue;
            };
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            let mut have = bytes.len() - end - 4;
            while have < length {
                match stream.read(&mut buffer)? {
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
                let Some(ran) = run("arrivals::list", &load) else { continue };
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
    with_each_engine(|engine| {
        let (target, counts) = counting();
        let mut load = load(engine, &target, get(&target));
        let Workload::Http(request) = &mut load.workload else { panic!("get makes HTTP") };
        (request.method, request.body) = ("POST".to_owned(), vec![b'x'; 17 << 20]);
        (load.connections, load.operations) = (2, Some(4));
        let Some(ran) = run("arrivals::body", &load) else { return };
        assert_eq!((ran.results.operations, ran.errors()), (4, vec![]), "{ran:#?}");
        assert_eq!(counts.lock().unwrap()["POST /"], (4, 4 * (17 << 20)));
        assert!(ran.results.sent_bytes.unwrap() > 4 * (17 << 20));
    });
}
