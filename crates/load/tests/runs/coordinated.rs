//! Runs with a start and a receiver of intervals that a coordinator sets.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fourtuple_load::{Arrival, Coordination, Interval, Load};
use fourtuple_measure::Histogram;
use fourtuple_testing::in_namespace;

use crate::run::{ENGINES, SMALL, SMALL_SERVED, load, preflight, serve, stop};

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
            ..load(fourtuple_load::EngineChoice::Epoll, "tcp://127.0.0.1:9", SMALL)
        };
        let (intervals, results, _) = coordinated(&load, Duration::ZERO);
        let refused: u64 = intervals.iter().filter_map(|interval| interval.errors.get("ECONNREFUSED")).sum();
        assert_eq!(Some(&refused), results.errors.get("ECONNREFUSED"));
        assert!(refused > 0);
    });
}
