//! The results of a run from its counters.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fourtuple_record::{FixPortsResults, RunResults};
use fourtuple_syscalls::fork::End;
use fourtuple_syscalls::shared::Counters;

use crate::run::layout::*;
use crate::run::way::{Choice, Way};

/// Observations of the main process.
pub(super) struct Observed {
    pub(super) elapsed: Duration,
    pub(super) end: End,
    pub(super) avoided: u64,
    pub(super) fix: Option<FixPortsResults>,
}

pub(super) fn results(choice: &Choice, counters: &Counters, observed: Observed) -> RunResults {
    let read = |counter: usize| counters.all()[counter].load(Ordering::Relaxed);
    let is = |way: Way| choice.way == way;
    let has = |way: Way, number: u64| is(way).then_some(number);
    let reasons =
        [("own-range", OWN_RANGE), ("udp", UDP), ("protocol", PROTOCOL), ("no-permission", UNREACHABLE)];
    let left = reasons.map(|(name, counter)| (name.to_owned(), read(counter)));
    let (exit_code, signal) = match observed.end {
        End::Exited(code) => (Some(code as u8), None),
        End::Killed(signal) => (None, Some(signal as u8)),
    };
    let mut results = RunResults {
        way: choice.way.name().to_owned(),
        passed_over: choice.passed_over.clone(),
        elapsed_ns: observed.elapsed.as_nanos() as u64,
        exit_code,
        signal,
        connects: read(CONNECTS),
        changed: read(SEARCHED),
        left: left.into_iter().filter(|(_, number)| *number > 0).collect(),
        bound: (!is(Way::Cgroup)).then(|| read(BOUND)),
        named: (!is(Way::Cgroup)).then(|| read(NAMED)),
        connect_ns: has(Way::Preload, read(TIME)),
        even: has(Way::Preload, read(EVEN)),
        odd: has(Way::Preload, read(ODD)),
        unavailable: has(Way::Preload, read(UNAVAILABLE)),
        avoided: (!is(Way::Cgroup)).then_some(observed.avoided),
        calls: has(Way::Supervise, read(CALLS)),
        held_ns: has(Way::Supervise, read(HELD)),
        ports: None,
    };
    if let Some(ports) = observed.fix {
        results.connects = ports.connects;
        results.changed = ports.drawn;
        results.left = ports.left.clone();
        results.ports = Some(ports);
    }
    results
}
