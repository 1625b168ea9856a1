//! `lab time-wait`, called as a library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_bench::lab::time_wait::{Remedy, TimeWait};
use fourtuple_bench::lab::{LabError, Progress, Silent, Watch};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;

fn settings(range: &str, remedies: &[Remedy]) -> TimeWait {
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
        let error = settings(range, &Remedy::ALL).check().unwrap_err();
        assert!(matches!(error, LabError::Setting { setting: "range", .. }), "{error}");
    }
    for range in ["20000-20063", "1024-33791"] {
        settings(range, &Remedy::ALL).check().unwrap();
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
        let settings = settings("20000-20063", &named(["none-under", "none-over"]));
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

/// Ends the experiment at the first progress report.
struct StopAtFirstProgress(AtomicBool);

impl Progress for StopAtFirstProgress {
    fn begin(&self, _part: &str, _total: u64) {}
    fn at(&self, _done: u64) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_interrupted_run_keeps_its_transactions() {
    in_namespace(|| {
        let impatient = StopAtFirstProgress(AtomicBool::new(false));
        let watch = Watch { stop: &impatient.0, progress: &impatient };
        let settings = settings("20000-20999", &named(["none-under", "wider-range"]));
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
        let (results, _) = settings("20000-20063", &named(["tcp-tw-reuse"])).run(&watch).unwrap();
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
        settings("20000-20063", &named(["none-under", "none-over"])).run(&watch).map(drop)
    });
    let error = refused.join().unwrap().unwrap_err();
    assert!(matches!(error, LabError::Namespace(_)), "{error}");
    assert!(!error.is_usage());
}
