//! `lab locks`, called as a library.

use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple::capabilities::LocalPortRange;
use fourtuple_bench::lab::locks::{self, MAX_QUERIES, MIN_QUERIES};
use fourtuple_bench::lab::{LabError, Progress, Silent, Watch};
use fourtuple_record::LabLocksSettings;
use fourtuple_testing::in_namespace;

fn settings(changes: &[&str]) -> LabLocksSettings {
    let changes = changes.iter().map(ToString::to_string).collect();
    LabLocksSettings { changes, queries: 300, repeats: 1, traced: 0, ..locks::usual(2) }
}

#[test]
fn settings_that_no_run_can_meet_are_refused() {
    let good = settings(&["sources"]);
    locks::check(&good).unwrap();
    for (name, wrong) in [
        ("workers", LabLocksSettings { workers: 1, ..good.clone() }),
        ("clients", LabLocksSettings { clients: 257, ..good.clone() }),
        ("queries", LabLocksSettings { queries: MIN_QUERIES - 1, ..good.clone() }),
        ("queries", LabLocksSettings { queries: MAX_QUERIES + 1, ..good.clone() }),
        ("sources", LabLocksSettings { sources: 1, ..good.clone() }),
        ("repeats", LabLocksSettings { repeats: 0, ..good.clone() }),
        ("change", settings(&[])),
        ("change", settings(&["prayer"])),
    ] {
        let error = locks::check(&wrong).unwrap_err();
        assert!(matches!(error, LabError::Setting { setting, .. } if setting == name), "{name}: {error}");
        assert!(error.is_usage());
    }
}

#[test]
fn every_query_is_answered_on_both_sides_of_each_change() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = settings(&["reuseport", "sources"]);
        let (results, remarks) = locks::run(&settings, LocalPortRange::Absent, &watch).unwrap();
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
        let settings = settings(&["full-range"]);
        let (results, remarks) = locks::run(&settings, found, &watch).unwrap();
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
struct StopAtFirstProgress(AtomicBool, AtomicBool);

impl Progress for StopAtFirstProgress {
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
        let impatient = StopAtFirstProgress(AtomicBool::new(false), AtomicBool::new(false));
        let watch = Watch { stop: &impatient.0, progress: &impatient };
        let error = locks::run(&locks::usual(2), LocalPortRange::Linear, &watch).unwrap_err();
        assert!(matches!(error, LabError::Interrupted), "{error}");
    });
}

#[test]
fn lock_waits_are_counted_or_the_reason_is_given() {
    in_namespace(|| {
        let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
        let settings = LabLocksSettings { traced: 2, ..settings(&["sources"]) };
        let (results, remarks) = locks::run(&settings, LocalPortRange::Linear, &watch).unwrap();
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
