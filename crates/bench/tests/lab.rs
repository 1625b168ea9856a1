//! `lab ports` and `lab time-wait`, called as libraries. `lab locks` traces the whole process, and has a program of its own.

use std::num::NonZeroU16;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::ports::PortRange;
use fourtuple_bench::lab::ports::{self, PUBLISHED_WIDTHS, as_published};
use fourtuple_bench::lab::time_wait::{self, Remedy};
use fourtuple_bench::lab::{LabError, Progress, Silent, Watch, calibrate};
use fourtuple_record::{PortsSettings, TimeWaitSettings};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;

fn range(text: &str) -> PortRange {
    text.parse().unwrap()
}

fn ports_settings() -> PortsSettings {
    let strategies = vec!["kernel-default".to_owned(), "auto".to_owned()];
    PortsSettings { low: 20_000, high: 20_999, strategies, seed: 1, ..PortsSettings::default() }
}

/// Ends the experiment at the first progress report, and records which part had begun.
#[derive(Default)]
struct StopAtFirstProgress {
    stop: AtomicBool,
    parts: Mutex<Vec<(String, u64)>>,
}

impl Progress for StopAtFirstProgress {
    fn begin(&self, part: &str, total: u64) {
        self.parts.lock().unwrap().push((part.to_owned(), total));
    }

    fn at(&self, done: u64) {
        assert!(done > 0);
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn settings_that_no_run_can_meet_are_named() {
    let refused = |name: &str, change: &dyn Fn(&mut PortsSettings)| {
        let mut wrong = ports_settings();
        change(&mut wrong);
        let error = ports::check(&wrong).expect_err(name);
        assert!(error.is_usage(), "{error}");
        let LabError::Setting { setting, .. } = error else { panic!("{error}") };
        assert_eq!(setting, name);
        // `run` checks the settings too, and refuses them.
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        assert!(matches!(ports::run(&wrong, &watch), Err(LabError::Setting { .. })));
    };
    for narrow in [(20_000, 20_006), (1_023, 2_000), (0, 65_535), (20_999, 20_000)] {
        refused("range", &|ports| (ports.low, ports.high) = narrow);
    }
    for fill in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
        refused("fill", &|ports| ports.fill = fill);
    }
    for sources in [0, 1025] {
        refused("sources", &|ports| ports.sources = sources);
    }
    refused("sources", &|ports| (ports.sources, ports.protocol) = (2, "udp".to_owned()));
    for repeats in [0, 101] {
        refused("repeats", &|ports| ports.repeats = repeats);
    }
    refused("strategy", &|ports| ports.strategies.clear());
    refused("strategy", &|ports| ports.strategies.push("fastest".to_owned()));
    refused("protocol", &|ports| ports.protocol = "sctp".to_owned());
    refused("family", &|ports| ports.family = 5);
    for (low, high) in [(1_024, 65_535), (20_000, 20_007)] {
        ports::check(&PortsSettings { low, high, ..ports_settings() }).unwrap();
    }
}

#[test]
fn an_interrupted_run_keeps_its_dials() {
    in_namespace(|| {
        let impatient = StopAtFirstProgress::default();
        let watch = Watch { stop: &impatient.stop, progress: &impatient };
        let (results, remarks) = ports::run(&ports_settings(), &watch).unwrap();
        assert_eq!(*impatient.parts.lock().unwrap(), [("kernel-default".to_owned(), 1000)]);
        assert_eq!(remarks.len(), 1);
        assert_eq!(remarks[0].id, "interrupted");
        assert!(remarks[0].message.contains("kernel-default"), "{}", remarks[0].message);
        let [run] = &results.strategies[..] else { panic!("one had begun: {results:?}") };
        assert!((1..1000).contains(&run.dials), "{}", run.dials);
        assert_eq!(run.connections, run.dials);
        assert_eq!(run.scatter.as_ref().unwrap().dots().count() as u64, run.dials);
    });
}

#[test]
fn a_run_stopped_before_it_began_has_no_result() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(true), progress: &Silent };
        let (results, remarks) = ports::run(&ports_settings(), &watch).unwrap();
        assert!(results.strategies.is_empty(), "{results:?}");
        assert_eq!(remarks.len(), 1);
    });
}

/// The published random windows have one try and no fallback to the full range.
#[test]
fn published_windows_have_one_try() {
    let widths: Vec<Strategy> =
        PUBLISHED_WIDTHS.iter().map(|width| as_published(NonZeroU16::new(*width).unwrap())).collect();
    let one = NonZeroU16::MIN;
    for strategy in widths {
        let Strategy::RandomWindow { tries, then_full_range, .. } = strategy else { panic!("{strategy}") };
        assert_eq!((tries, then_full_range), (one, false));
    }
}

#[test]
fn parts_of_the_fill_add_up() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let (results, remarks) =
            ports::run(&PortsSettings { fill: 0.25, repeats: 2, ..ports_settings() }, &watch).unwrap();
        assert!(remarks.is_empty());
        assert_eq!(results.tuples, 1000);
        assert_eq!(results.strategies.len(), 4);
        for run in &results.strategies {
            assert_eq!((run.dials, run.connections, run.failed()), (250, 250, 0));
            assert_eq!(run.by_fill.iter().map(|part| part.connections).sum::<u64>(), 250);
            assert_eq!(run.by_fill.last().unwrap().fill, 0.25);
            assert!(run.by_fill.iter().any(|part| part.floor_ns > 0) && run.floor_ns > 0);
        }
    });
}

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn calibration_finds_costs_can_stop_and_checks_the_range() {
    in_namespace(|| {
        let quiet = AtomicBool::new(false);
        let watch = Watch { stop: &quiet, progress: &Silent };
        for strategy in [Strategy::FullRange, Strategy::SELECT_TEST_REPEAT] {
            // A small range lacks ports for some parts of the calibration; these must not count as zero cost.
            for ports in ["20000-20007", "20000-20127", "20000-20511"] {
                let costs = calibrate(range(ports), strategy, true, LIMIT, &watch).unwrap();
                for part in [&costs.half, &costs.full] {
                    assert!(part.floor_ns.is_finite() && part.floor_ns > 0.0, "{ports}: {part:?}");
                }
            }
            let ended = Watch { stop: &AtomicBool::new(true), progress: &Silent };
            let error = calibrate(range("20000-20511"), strategy, true, LIMIT, &ended).unwrap_err();
            assert!(matches!(error, LabError::Interrupted), "{error}");
            // A machine for which any time is too short.
            let error = calibrate(range("20000-20511"), strategy, true, Duration::ZERO, &watch).unwrap_err();
            assert!(matches!(error, LabError::TooSlow(Duration::ZERO)), "{error}");
        }
        let error = calibrate(range("1000-2000"), Strategy::FullRange, true, LIMIT, &watch).unwrap_err();
        assert!(matches!(error, LabError::Setting { setting: "range", .. }), "{error}");
    });
}

fn time_wait(low: u16, high: u16, remedies: &[&str]) -> TimeWaitSettings {
    let remedies = remedies.iter().map(ToString::to_string).collect();
    TimeWaitSettings { low, high, remedies, patience_ns: 50_000_000 }
}

#[test]
fn ranges_that_leave_nothing_wider_are_refused() {
    for (low, high) in [(20_000, 20_062), (1000, 2000), (1024, 65_535), (30_000, 20_000)] {
        let error = time_wait::check(&time_wait(low, high, &["none-over"])).unwrap_err();
        assert!(matches!(error, LabError::Setting { setting: "range", .. }), "{error}");
    }
    for (low, high) in [(20_000, 20_063), (1024, 33_791)] {
        time_wait::check(&time_wait(low, high, &["none-over"])).unwrap();
    }
    for remedies in [&[][..], &["prayer"]] {
        let error = time_wait::check(&time_wait(20_000, 20_063, remedies)).unwrap_err();
        assert!(matches!(error, LabError::Setting { setting: "remedy", .. }), "{error}");
    }
}

#[test]
fn remedies_survive_writing_and_parsing() {
    for remedy in Remedy::ALL {
        assert_eq!(remedy.name().parse(), Ok(remedy));
    }
}

#[test]
fn the_stall_comes_after_the_last_port() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = time_wait(20_000, 20_063, &["none-under", "none-over"]);
        let (results, remarks) = time_wait::run(&settings, &watch).unwrap();
        assert!(remarks.is_empty());
        let [under, over] = &results.runs[..] else { panic!("{results:?}") };
        assert_eq!((under.completed, under.stalled_at, under.cut), (63, None, false));
        assert_eq!((over.completed, over.stalled_at, over.cut), (64, Some(65), true));
        assert_eq!(over.predicted_stall_at, Some(65));
        assert!(over.stall_ns >= 50_000_000, "{over:?}");
        // On a busy host the last sockets may still be closing, and the server may close before the FIN of the client has come: then both ends
        // have a socket in TIME_WAIT.
        let last = over.time_wait.last().unwrap();
        assert!((60..=128).contains(&last.count), "{last:?}");
    });
}

#[test]
fn an_interrupted_run_keeps_its_transactions() {
    in_namespace(|| {
        let impatient = StopAtFirstProgress::default();
        let watch = Watch { stop: &impatient.stop, progress: &impatient };
        let settings = time_wait(20_000, 20_999, &["none-under", "wider-range"]);
        let (results, remarks) = time_wait::run(&settings, &watch).unwrap();
        assert_eq!(remarks[0].id, "interrupted");
        let [run] = &results.runs[..] else { panic!("the second never began: {results:?}") };
        assert_eq!((run.remedy.as_str(), run.completed), ("none-under", 64));
        assert_eq!((run.stall_ns, run.cut), (0, false), "nothing had stalled");
    });
}

/// Advice tells a stall that the remedy shortened from a stall that the run did not wait out.
#[test]
fn advice_claims_no_more_than_was_seen() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = time_wait(20_000, 20_063, &["tcp-tw-reuse"]);
        let (results, _) = time_wait::run(&settings, &watch).unwrap();
        let run = &results.runs[0];
        let said = results.advice.iter().any(|line| line.contains("shortened the stall"));
        assert_eq!(said, run.stall_ns > 0 && !run.cut, "{results:?}");
    });
}

#[test]
fn without_namespaces_it_fails_at_once_instead_of_waiting() {
    let refused = thread::spawn(|| {
        // The filter applies to this thread and to threads that it starts, not to other tests.
        seccomp::refuse(Facility::Namespaces).unwrap();
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        time_wait::run(&time_wait(20_000, 20_063, &["none-under", "none-over"]), &watch).map(drop)
    });
    let error = refused.join().unwrap().unwrap_err();
    assert!(matches!(error, LabError::Namespace(_)), "{error}");
    assert!(!error.is_usage());
}
