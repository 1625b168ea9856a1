//! Tests of arrival processes and latencies: open loops, thresholds, seconds, logs.

use std::fmt::Debug;
use std::iter;
use std::ops::{RangeBounds, RangeFrom, RangeInclusive};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fourtuple_bench::load::{Arrival, Coordination, Interval, Load};
use fourtuple_bench::serve::{Protocol, Service, Shape, Stall};
use fourtuple_record::Remark;
use fourtuple_record::measure::Histogram;
use fourtuple_testing::in_namespace;

use crate::run::{ENGINES, RunOutcome, SMALL, SMALL_SERVED, get, load, preflight, run, serve, stop};

const TARGET: &str = "tcp://127.0.0.1:4000";
const HTTP: &str = "http://127.0.0.1:4000/";

const MILLISECOND: Duration = Duration::from_millis(1);

/// Runs a load until the number of operations is an expected one, 20 times at most: on a loaded host the end may pass while a thread that
/// has operations to start waits for a CPU. `None` after a skip.
#[track_caller]
fn until_expected(
    expected: &(impl RangeBounds<u64> + Debug),
    once: impl FnMut() -> Option<RunOutcome>,
) -> Option<RunOutcome> {
    let is_expected = |ran: &RunOutcome| expected.contains(&ran.results.operations);
    let mut runs = iter::repeat_with(once).take(20);
    let found = runs.find(|ran| ran.as_ref().is_none_or(is_expected));
    found.unwrap_or_else(|| panic!("none of 20 runs has {expected:?} operations"))
}

/// Runs `load` against a server that does not respond from 1.2 s to 1.6 s after its own start, which precedes the run by a second at most.
#[track_caller]
fn through_a_stall(load: &Load, expected: &RangeFrom<u64>) -> Option<RunOutcome> {
    let mut server = serve(Protocol::Http { body: 10 });
    server.stall = Some(Stall { at: 1200 * MILLISECOND, length: 400 * MILLISECOND });
    let once = || {
        let started = Instant::now();
        let running = server.start().unwrap();
        let ran = run("arrivals::stall", load);
        let until_end = started.elapsed();
        stop(running);
        ran.map(|ran| (until_end.saturating_sub(Duration::from_nanos(ran.results.elapsed_ns)), ran))
    };
    let mut in_time = iter::repeat_with(once).filter_map(|ran| match ran {
        Some((late, _)) if late >= Duration::from_secs(1) => None,
        ran => Some(ran.map(|(_, ran)| ran)),
    });
    until_expected(expected, || in_time.next().expect("an endless iterator"))
}

#[test]
fn an_open_loop_shows_a_stall_that_a_closed_one_hides() {
    in_namespace(|| {
        for engine in ENGINES {
            let mut open = load(engine, HTTP, get(HTTP));
            (open.arrival, open.connections, open.length) =
                (Arrival::Poisson(2000.0), 64, Some(2800 * MILLISECOND));
            open.threshold = Some(100 * MILLISECOND);
            let Some(ran) = through_a_stall(&open, &(4_000..)) else { continue };
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
            let ran = through_a_stall(&closed, &(1_000..)).unwrap();
            let total = ran.results.latency_ns.total;
            assert!(total.max >= 150_000_000, "{total:?}");
            // The stall delays one operation of each connection; other load on the host may delay a few more.
            assert!(ran.results.slow_count * 4 < slow, "{} slow ones, and {slow}", ran.results.slow_count);
            assert_eq!(ran.results.late_ns.samples, 0);
        }
    });
}

/// Runs the load on a server until the number of operations is the expected one.
#[track_caller]
fn on_time(test: &str, load: &Load, expected: &RangeInclusive<u64>) -> Option<RunOutcome> {
    until_expected(expected, || {
        let running = serve(Protocol::Http { body: 10 }).start().unwrap();
        let ran = run(test, load)?;
        assert_eq!(stop(running).requests, ran.results.operations);
        Some(ran)
    })
}

#[test]
fn achieved_load_equals_offered_load() {
    in_namespace(|| {
        for engine in ENGINES {
            for (threads, limit) in [1, 3].into_iter().flat_map(|threads| [(threads, false), (threads, true)])
            {
                let mut load = load(engine, HTTP, get(HTTP));
                (load.arrival, load.connections, load.threads) = (Arrival::Even(1000.0), 64, threads);
                match limit {
                    true => load.operations = Some(500),
                    false => load.length = Some(500 * MILLISECOND),
                }
                let running = serve(Protocol::Http { body: 10 }).start().unwrap();
                let Some(ran) = run("arrivals::even", &load) else { continue };
                assert_eq!(stop(running).requests, ran.results.operations);
                // No operation begins before it is due. On a loaded host the end of a run may pass while the last ones wait for a CPU.
                let done = ran.results.operations;
                assert!(if limit { done == 500 } else { (1..=501).contains(&done) }, "{ran:#?}");
                assert!(!limit || ran.results.elapsed_ns >= 499_000_000, "{ran:#?}");
                assert_eq!(
                    (ran.results.late_ns.samples, ran.remarks_but_of_haste()),
                    (ran.results.operations, vec![]),
                    "{ran:#?}"
                );
                assert_eq!(ran.results.offered_per_s, 1000.0);
            }
        }
    });
}

#[test]
fn random_arrivals_scatter_and_are_no_lack_of_rate() {
    in_namespace(|| {
        for (seed, engine) in (0..).zip(ENGINES.repeat(3)) {
            let mut load = load(engine, HTTP, get(HTTP));
            (load.arrival, load.connections, load.seed) = (Arrival::Poisson(1000.0), 64, seed);
            load.length = Some(300 * MILLISECOND);
            // Expected 300 operations with a standard deviation of 17.
            let Some(ran) = on_time("arrivals::poisson", &load, &(215..=385)) else { continue };
            assert_eq!(ran.remarks_but_of_haste(), Vec::<&str>::new(), "{ran:#?}");
        }
    });
}

#[test]
fn a_missed_rate_is_reported_with_the_reason() {
    in_namespace(|| {
        for engine in ENGINES {
            for bounded in [false, true] {
                // One worker needs 5 ms per request: at most 200 requests per second.
                let mut server = serve(Protocol::Http { body: 10 });
                (server.workers, server.service) = (1, Service::of(Shape::Fixed(5 * MILLISECOND)));
                let running = server.start().unwrap();
                let mut load = load(engine, HTTP, get(HTTP));
                (load.arrival, load.connections) = (Arrival::Even(1000.0), 4);
                match bounded {
                    true => load.operations = Some(100),
                    false => load.length = Some(500 * MILLISECOND),
                }
                let Some(ran) = run("arrivals::not_reached", &load) else { continue };
                let said: Vec<&Remark> =
                    ran.remarks.iter().filter(|remark| remark.id == "offered-rate-not-reached").collect();
                assert!(said.len() == 1 && said[0].message.contains("4 connections were busy"), "{ran:#?}");
                assert!(!bounded || ran.results.operations == 100, "{ran:#?}");
                assert!(said[0].message.contains(" of the 1,000 operations a second"), "{ran:#?}");
                assert_eq!(stop(running).requests, ran.results.operations);
            }
        }
    });
}

#[test]
fn an_open_loop_ends_after_its_operations_over_several_threads() {
    in_namespace(|| {
        for engine in ENGINES {
            let running = serve(SMALL_SERVED).start().unwrap();
            let mut load = load(engine, TARGET, SMALL);
            (load.arrival, load.connections, load.threads) = (Arrival::Poisson(5000.0), 16, 3);
            load.operations = Some(1000);
            let Some(ran) = run("arrivals::bounded", &load) else { continue };
            let served = stop(running);
            assert_eq!((ran.results.operations, served.requests, served.accepted), (1000, 1000, 1000));
        }
    });
}

#[test]
fn operations_over_the_threshold_are_listed() {
    in_namespace(|| {
        for engine in ENGINES {
            let mut server = serve(SMALL_SERVED);
            (server.workers, server.service) = (1, Service::of(Shape::Fixed(200 * MILLISECOND)));
            let running = server.start().unwrap();
            let mut load = load(engine, TARGET, SMALL);
            (load.connections, load.operations, load.threshold) = (1, Some(5), Some(150 * MILLISECOND));
            let Some(ran) = run("arrivals::threshold", &load) else { continue };
            assert_eq!((ran.results.slow_count, ran.results.slow.len()), (5, 5), "{ran:#?}");
            assert!(
                ran.results
                    .slow
                    .iter()
                    .all(|slow| slow.total_ns >= 150_000_000 && slow.longest == "response")
            );
            assert!(ran.results.slow.windows(2).all(|pair| pair[0].at_ns < pair[1].at_ns));
            assert!(ran.results.slow.iter().all(|slow| slow.request == 1));
            load.threshold = Some(Duration::from_secs(60));
            let ran = run("arrivals::threshold", &load).unwrap();
            assert_eq!((ran.results.slow_count, ran.results.slow.len()), (0, 0));
            stop(running);
        }
    });
}

#[test]
fn a_pause_is_kept() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 }).start().unwrap();
        for engine in ENGINES {
            let mut load = load(engine, HTTP, get(HTTP));
            (load.connections, load.pause, load.length) = (2, 50 * MILLISECOND, Some(300 * MILLISECOND));
            let Some(ran) = run("arrivals::pause", &load) else { continue };
            assert!((2..=12).contains(&ran.results.operations), "{ran:#?}");
        }
        stop(running);
    });
}

/// Checks a run of several seconds: the sums by second and the log agree on each engine.
#[test]
fn seconds_and_log_are_the_run() {
    in_namespace(|| {
        for engine in ENGINES {
            let running = serve(Protocol::Http { body: 10 }).start().unwrap();
            let mut load = load(engine, HTTP, get(HTTP));
            (load.arrival, load.connections, load.threads, load.log) = (Arrival::Even(400.0), 16, 2, true);
            load.length = Some(1300 * MILLISECOND);
            let Some(ran) = run("arrivals::seconds", &load) else { continue };
            assert_eq!(stop(running).requests, ran.results.operations);
            let seconds = &ran.results.seconds;
            // The last answers may arrive late.
            assert!(seconds.len() >= 2, "{seconds:#?}");
            let by_second: u64 = seconds.iter().map(|second| second.operations).sum();
            assert_eq!(by_second, ran.results.operations, "{seconds:#?}");
            assert!(seconds[0].p50_ns > 0 && seconds[0].p50_ns <= seconds[0].max_ns);
            let (count, max) = read(ran.log.as_deref().unwrap());
            assert_eq!(count, ran.results.operations);
            let of_results = ran.results.latency_ns.total.max as f64;
            assert!((0.99..=1.01).contains(&(max as f64 / of_results)), "{max} and {of_results}");
            let points = &ran.results.distribution;
            assert!(points.windows(2).all(|pair| pair[0].share < pair[1].share && pair[0].ns <= pair[1].ns));
            assert_eq!(points.last().unwrap().share, 1.0);
        }
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
    in_namespace(|| {
        for engine in ENGINES {
            let server = serve(SMALL_SERVED).start().unwrap();
            let load = Load {
                arrival: Arrival::Poisson(500.0),
                length: Some(Duration::from_millis(1_300)),
                threads: 2,
                ..load(engine, "tcp://127.0.0.1:4000", SMALL)
            };
            let (intervals, results, _) = coordinated(&load, Duration::from_millis(50));
            let seconds: Vec<u64> = intervals.iter().map(|interval| interval.second).collect();
            assert!(
                seconds.len() >= 2 && seconds.iter().enumerate().all(|(at, second)| at as u64 == *second)
            );
            assert_eq!(intervals.iter().map(|interval| interval.operations).sum::<u64>(), results.operations);
            assert_eq!(
                intervals.iter().map(|interval| interval.connections).sum::<u64>(),
                results.connections
            );
            let merged = |part: fn(&Interval) -> &Histogram| {
                let mut sum = Histogram::new();
                intervals.iter().for_each(|interval| sum.merge(part(interval)));
                let found = sum.summary();
                (found.count, found.mean, found.p50, found.p99, found.max)
            };
            let of = |times: fourtuple_record::Quantiles| {
                (times.samples, times.mean, times.p50, times.p99, times.max)
            };
            let latency = results.latency_ns;
            assert_eq!(merged(|interval| &interval.total), of(latency.total));
            assert_eq!(merged(|interval| &interval.search), of(latency.search));
            assert_eq!(merged(|interval| &interval.handshake), of(latency.handshake));
            assert_eq!(merged(|interval| &interval.first_byte), of(latency.first_byte));
            assert_eq!(merged(|interval| &interval.late), of(results.late_ns));
            stop(server);
        }
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
