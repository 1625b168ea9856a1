//! `lab locks`, `lab ports` and `lab time-wait`, called as libraries.

use std::num::NonZeroU16;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::Strategy;
use fourtuple::ports::PortRange;
use fourtuple_bench::lab::locks::{Change, Locks, MAX_QUERIES, MIN_QUERIES};
use fourtuple_bench::lab::ports::{self, PUBLISHED_WIDTHS, as_published};
use fourtuple_bench::lab::time_wait::{Remedy, TimeWait};
use fourtuple_bench::lab::{LabError, Progress, Silent, Watch, calibrate};
use fourtuple_record::PortsSettings;
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;

fn locks(changes: &[Change]) -> Locks {
    Locks { queries: 300, repeats: 1, trace: false, ..Locks::on(2, changes.to_vec(), 1) }
}

#[test]
fn settings_that_no_run_can_meet_are_refused() {
    let good = locks(&Change::ALL);
    good.check().unwrap();
    for (name, wrong) in [
        ("workers", Locks { workers: 1, ..good.clone() }),
        ("clients", Locks { clients: 257, ..good.clone() }),
        ("queries", Locks { queries: MIN_QUERIES - 1, ..good.clone() }),
        ("queries", Locks { queries: MAX_QUERIES + 1, ..good.clone() }),
        ("sources", Locks { sources: 1, ..good.clone() }),
        ("repeats", Locks { repeats: 0, ..good.clone() }),
        ("change", locks(&[])),
    ] {
        let error = wrong.check().unwrap_err();
        assert!(matches!(error, LabError::Setting { setting, .. } if setting == name), "{name}: {error}");
        assert!(error.is_usage());
    }
}

#[test]
fn every_query_is_answered_on_both_sides_of_each_change() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = locks(&[Change::Reuseport, Change::Sources]);
        let (results, remarks) = settings.run(LocalPortRange::Absent, &watch).unwrap();
        assert!(remarks.is_empty(), "{remarks:?}");
        let changes: Vec<&str> = results.pairs.iter().map(|pair| pair.change.as_str()).collect();
        assert_eq!(changes, ["reuseport", "sources"]);
        for pair in &results.pairs {
            for side in [&pair.before, &pair.after] {
                assert_eq!((side.queries, side.errors.len()), (300, 0), "{side:?}");
                assert!(side.queries_per_s > 0.0 && side.cpu_ns_per_query > 0.0, "{side:?}");
                assert_eq!((side.waits_per_query, side.classes.len()), (None, 0));
            }
            assert_eq!((pair.pairs, pair.ratio.low), (1, None));
            let rates = pair.after.queries_per_s / pair.before.queries_per_s;
            assert!((pair.ratio.value / rates - 1.0).abs() < 1e-9, "{pair:?}");
        }
        let [reuseport, sources] = &results.pairs[..] else { unreachable!() };
        assert_eq!(
            (reuseport.before.policy.as_str(), reuseport.after.policy.as_str()),
            ("exclusive", "reuseport")
        );
        assert_eq!((sources.before.sources, sources.after.sources), (1, 4));
        assert!(results.untraced.is_some());
        assert!(results.advice.len() >= results.pairs.len());
    });
}

#[test]
fn nine_of_ten_ports_are_enough_for_both_searches() {
    in_namespace(|| {
        let found = fourtuple::capabilities::probe().unwrap().local_port_range;
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = locks(&[Change::FullRange]);
        let (results, remarks) = settings.run(found, &watch).unwrap();
        if found == LocalPortRange::Absent || found == LocalPortRange::Parity {
            assert_eq!(remarks[0].id, "skipped");
            assert!(results.pairs.is_empty());
            return;
        }
        assert!(remarks.is_empty(), "{remarks:?}");
        let pair = &results.pairs[0];
        let strategies = [pair.before.strategy.as_str(), pair.after.strategy.as_str()];
        assert_eq!(strategies, ["kernel-default", "full-range"]);
        for side in [&pair.before, &pair.after] {
            assert_eq!((side.queries, side.sources, side.errors.len()), (300, 1, 0), "{side:?}");
        }
    });
}

/// Ends the experiment when the second part begins.
struct StopAtSecondPart(AtomicBool, AtomicBool);

impl Progress for StopAtSecondPart {
    fn begin(&self, _part: &str, _total: u64) {
        if self.1.swap(true, Ordering::Relaxed) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    fn at(&self, _done: u64) {}
}

#[test]
fn an_interrupt_before_the_first_pair_has_no_result() {
    in_namespace(|| {
        let impatient = StopAtSecondPart(AtomicBool::new(false), AtomicBool::new(false));
        let watch = Watch { stop: &impatient.0, progress: &impatient };
        let error = locks(&Change::ALL).run(LocalPortRange::Linear, &watch).unwrap_err();
        assert!(matches!(error, LabError::Interrupted), "{error}");
    });
}

#[test]
fn lock_waits_are_counted_or_the_reason_is_given() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = Locks { trace: true, ..locks(&[Change::Sources]) };
        let (results, remarks) = settings.run(LocalPortRange::Linear, &watch).unwrap();
        assert!(remarks.is_empty(), "{remarks:?}");
        let pair = &results.pairs[0];
        for side in [&pair.before, &pair.after] {
            // Traced trials do not count as timed trials.
            assert_eq!((side.queries, side.errors.len()), (300, 0), "{side:?}");
            let counted = side.waits_per_query.is_some() && side.wait_ns_per_query.is_some();
            assert_ne!(counted, results.untraced.is_some(), "{side:?} {:?}", results.untraced);
            let sum: f64 = side.classes.iter().map(|class| class.waits_per_query).sum();
            assert!((sum - side.waits_per_query.unwrap_or(0.0)).abs() < 1e-9, "{side:?}");
        }
        // A traced run lists at least one blind spot.
        assert_ne!(results.blind_spots.is_empty(), results.untraced.is_none());
    });
}

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

fn time_wait(range: &str, remedies: &[Remedy]) -> TimeWait {
    TimeWait {
        range: range.parse().unwrap(),
        remedies: remedies.to_vec(),
        patience: Duration::from_millis(50),
    }
}

fn named<const N: usize>(names: [&str; N]) -> [Remedy; N] {
    names.map(|name| name.parse().unwrap())
}

#[test]
fn ranges_that_leave_nothing_wider_are_refused() {
    for range in ["20000-20062", "1000-2000", "1024-65535"] {
        let error = time_wait(range, &Remedy::ALL).check().unwrap_err();
        assert!(matches!(error, LabError::Setting { setting: "range", .. }), "{error}");
    }
    for range in ["20000-20063", "1024-33791"] {
        time_wait(range, &Remedy::ALL).check().unwrap();
    }
}

#[test]
fn remedies_survive_writing_and_parsing() {
    for remedy in Remedy::ALL {
        assert_eq!(remedy.name().parse(), Ok(remedy));
    }
    assert!("prayer".parse::<Remedy>().is_err());
}

#[test]
fn the_stall_comes_after_the_last_port() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = time_wait("20000-20063", &named(["none-under", "none-over"]));
        let (results, remarks) = settings.run(&watch).unwrap();
        assert!(remarks.is_empty());
        let [under, over] = &results.runs[..] else { panic!("{results:?}") };
        assert_eq!((under.completed, under.stalled_at, under.cut), (63, None, false));
        assert_eq!((over.completed, over.stalled_at, over.cut), (64, Some(65), true));
        assert_eq!(over.predicted_stall_at, Some(65));
        assert!(over.stall_ns >= 50_000_000, "{over:?}");
        assert_eq!(over.time_wait.last().unwrap().count, 64);
    });
}

#[test]
fn an_interrupted_run_keeps_its_transactions() {
    in_namespace(|| {
        let impatient = StopAtFirstProgress::default();
        let watch = Watch { stop: &impatient.stop, progress: &impatient };
        let settings = time_wait("20000-20999", &named(["none-under", "wider-range"]));
        let (results, remarks) = settings.run(&watch).unwrap();
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
        let (results, _) = time_wait("20000-20063", &named(["tcp-tw-reuse"])).run(&watch).unwrap();
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
        time_wait("20000-20063", &named(["none-under", "none-over"])).run(&watch).map(drop)
    });
    let error = refused.join().unwrap().unwrap_err();
    assert!(matches!(error, LabError::Namespace(_)), "{error}");
    assert!(!error.is_usage());
}
