//! `lab locks`: measures what short-lived connections gain from less contention on the kernel's locks.
//!
//! Published: "TCP stack lock contention with short-lived connections" (freebsd-net, 2013): 52,000 queries per
//! second with the global lock of TCP held in accept(), 55,000 without. Linux has no such lock. Its locks are shared by
//! the sockets that share a listener, a source address or a nearly full port table.

mod advice;
mod trial;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::thread;

use fastrand::Rng;
use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::Strategy;
use fourtuple::listen::AcceptPolicy;
use fourtuple::ports::PortRange;
use fourtuple_record::measure::words::counted;
use fourtuple_record::measure::{Interval, median_interval};
use fourtuple_record::{LabLocksResults, LabLocksSettings, LocksClass, LocksPair, LocksSide, Remark};

use crate::lab::locks::advice::PairVerdicts;
use crate::lab::locks::trial::{CountedWaits, Trial, Waits};
use crate::lab::{LabError, Watch};

/// Runs the changes in order. The trials of a change are interleaved (A B B A, B A A B), each in a namespace of its own.
/// Traced trials come after the timed trials, since tracing costs time.
///
/// # Errors
///
/// Returns an error if a setting is out of range, or if a trial fails before the first pair of results.
pub fn run(
    settings: &LabLocksSettings,
    found: LocalPortRange,
    watch: &Watch<'_>,
) -> Result<(LabLocksResults, Vec<Remark>), LabError> {
    let changes = changes(settings)?;
    let mut state = RunState {
        settings,
        watch,
        untraced: (settings.traced == 0).then(|| "lock waits were not to be counted".to_owned()),
        blind_spots: Vec::new(),
        most_waits: None,
        lost: Vec::new(),
        remarks: Vec::new(),
    };
    let mut pairs = Vec::new();
    for change in changes {
        if let Some(why) = change.impossible(found) {
            state.remarks.push(Remark::new("skipped", why));
            continue;
        }
        match state.pair(change) {
            Ok(pair) => pairs.extend(pair),
            // The results of earlier changes are kept.
            Err(error) if !pairs.is_empty() => {
                state.remarks.push(Remark::new("failed", format!("{} failed: {error}", change.name())));
            }
            Err(error) => return Err(error),
        }
        if watch.stopped() {
            let message = format!("interrupted at {}: trials are missing", change.name());
            state.remarks.push(Remark::new("interrupted", message));
            break;
        }
    }
    if pairs.is_empty() && watch.stopped() {
        return Err(LabError::Interrupted);
    }
    let RunState { untraced, mut blind_spots, lost, remarks, .. } = state;
    blind_spots.extend(lost);
    let mut results = LabLocksResults { pairs, untraced, blind_spots, advice: Vec::new() };
    results.advice = advice::advice(&results, cpus());
    Ok((results, remarks))
}

/// The state that all changes of a run share.
struct RunState<'a> {
    settings: &'a LabLocksSettings,
    watch: &'a Watch<'a>,
    /// The reason why lock waits are no longer counted.
    untraced: Option<String>,
    /// Blind spots of the trial with the most waits.
    blind_spots: Vec<String>,
    most_waits: Option<u64>,
    /// Events that the tracer lost in any trial.
    lost: Vec<String>,
    remarks: Vec<Remark>,
}

impl RunState<'_> {
    /// Runs all trials of a change; returns `None` if no pair of trials was completed.
    fn pair(&mut self, change: Change) -> Result<Option<LocksPair>, LabError> {
        let LabLocksSettings { repeats, traced, narrow, seed, .. } = *self.settings;
        let mut sides = change.sides(self.settings).map(Sums::new);
        let mut verdicts = PairVerdicts::new(narrow);
        // The first trial of a change warms the kernel up; its times are not used.
        self.watch.progress.begin(&format!("{} (warming up)", change.name()), self.settings.queries);
        self.timed(&sides[0])?;
        for pair in 0..repeats {
            let mut figures = [None; 2];
            for side in order(pair) {
                self.begin(change, side, &format!("{}/{repeats}", pair + 1));
                let trial = self.timed(&sides[side])?;
                if trial.cut {
                    return self.concluded(change, sides, verdicts, seed);
                }
                figures[side] = sides[side].add(&trial);
            }
            if let [Some(before), Some(after)] = figures {
                verdicts.push(before, after);
            }
        }
        for pair in 0..traced {
            for side in order(pair) {
                if self.untraced.is_some() || self.watch.stopped() {
                    break;
                }
                self.begin(change, side, &format!("traced {}/{traced}", pair + 1));
                self.traced(&mut sides[side])?;
            }
        }
        self.concluded(change, sides, verdicts, seed)
    }

    fn begin(&self, change: Change, side: usize, which: &str) {
        let name = ["before", "after"][side];
        let part = format!("{}: {name} ({which})", change.name());
        self.watch.progress.begin(&part, self.settings.queries);
    }

    fn timed(&self, side: &Sums) -> Result<Trial, LabError> {
        let (_, trial) = trial::run(self.settings, side.setup, self.watch, |queries| drop(queries()))?;
        Ok(trial)
    }

    fn traced(&mut self, side: &mut Sums) -> Result<(), LabError> {
        let (counted, trial) = trial::run(self.settings, side.setup, self.watch, |queries| {
            trial::count(&mut || drop(queries()))
        })?;
        match counted {
            Ok(CountedWaits { waits, blind_spots, lost }) if !trial.cut => {
                side.add_traced(&trial, &waits);
                // A trial without waits does not show which waits the tracer can see.
                if self.most_waits.is_none_or(|most| waits.waits > most) {
                    self.most_waits = Some(waits.waits);
                    self.blind_spots = blind_spots;
                }
                // A wait without a stack is still a wait and is counted; it is not a loss.
                self.lost.extend(lost);
            }
            Ok(_) => {}
            Err(why) => self.untraced = Some(why),
        }
        Ok(())
    }

    /// Queries that fail at once would give a meaningless rate.
    fn remark_failures(&mut self, change: Change, sides: &[Sums; 2]) {
        for (side, name) in sides.iter().zip(["before", "after"]).filter(|(side, _)| side.failed() > 0) {
            let message = format!("{} {name}: {} failed", change.name(), counted(side.failed(), "query"));
            self.remarks.push(Remark::new("failures", message));
        }
    }

    fn concluded(
        &mut self,
        change: Change,
        sides: [Sums; 2],
        verdicts: PairVerdicts,
        seed: u64,
    ) -> Result<Option<LocksPair>, LabError> {
        let (Some(rate), Some(cpu)) = (verdicts.rate(), verdicts.cpu()) else { return Ok(None) };
        self.remark_failures(change, &sides);
        let mut random = Rng::with_seed(seed);
        let [before, after] = [&sides[0], &sides[1]].map(|side| side.side(&mut random));
        let advice = advice::of_pair(change, &rate, &cpu, [&before, &after]);
        Ok(Some(LocksPair {
            change: change.name().to_owned(),
            before,
            after,
            pairs: verdicts.pairs() as u64,
            ratio: rate.ratio,
            verdict: rate.words,
            cpu_ratio: cpu.ratio,
            cpu_verdict: cpu.words,
            advice,
        }))
    }
}

/// Returns the number of processors that this process may use.
fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Returns the order of the two sides in a pair: A B, B A, B A, A B, and so on.
fn order(pair: u32) -> [usize; 2] {
    if matches!(pair % 4, 0 | 3) { [0, 1] } else { [1, 0] }
}

/// Minimum number of queries of a trial. Fewer give no useful rate.
pub const MIN_QUERIES: u64 = 100;

/// Maximum number of queries of a trial. With more, one source address would run out of even ports in the setups that need them.
pub const MAX_QUERIES: u64 = 30_000;

/// Number of trials of each side in which lock waits are traced.
const TRACED: u32 = 2;

/// Returns the usual settings for a host with `cpus` processors: a worker for every second processor and a client for each, so that all
/// processors are busy.
pub fn usual(cpus: u32) -> LabLocksSettings {
    let clients = cpus.clamp(4, 256);
    LabLocksSettings {
        changes: Change::ALL.map(|change| change.name().to_owned()).to_vec(),
        workers: (cpus / 2).clamp(2, 256),
        clients,
        queries: 10_000,
        sources: clients,
        repeats: 8,
        traced: TRACED,
        closer: "client".to_owned(),
        narrow: 0.05,
        seed: 1,
    }
}

/// Checks the ranges of the settings, without a system call.
///
/// # Errors
///
/// [`LabError::Setting`]
pub fn check(settings: &LabLocksSettings) -> Result<(), LabError> {
    changes(settings).map(drop)
}

/// Checks the settings, and returns the changes that they name.
fn changes(settings: &LabLocksSettings) -> Result<Vec<Change>, LabError> {
    for (setting, value, accepted) in [
        ("workers", settings.workers.into(), 2..=256),
        ("clients", settings.clients.into(), 2..=256),
        ("queries", settings.queries, MIN_QUERIES..=MAX_QUERIES),
        ("sources", settings.sources.into(), 2..=1024),
        ("repeats", settings.repeats.into(), 1..=100),
    ] {
        LabError::unless_within(setting, value, accepted)?;
    }
    LabError::named("change", &settings.changes, Change::named)
}

/// One change of a server or of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Replaces the shared listener by a listener for each worker (SO_REUSEPORT), which separates the listener's lock
    /// and its accept queue.
    Reuseport,
    /// Replaces one source address by several: connects from one source begin the port search at the same place, and contend
    /// for the same bucket lock (`__inet_hash_connect`).
    Sources,
    /// Replaces the search by parity by a search of the full range, with most ports taken: a search that finds the
    /// even ports taken has locked the bucket of each.
    FullRange,
}

/// The setup of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setup {
    policy: AcceptPolicy,
    sources: u32,
    strategy: Strategy,
    range: PortRange,
}

impl Change {
    pub const ALL: [Change; 3] = [Change::Reuseport, Change::Sources, Change::FullRange];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Change::Reuseport => "reuseport",
            Change::Sources => "sources",
            Change::FullRange => "full-range",
        }
    }

    pub fn named(name: &str) -> Option<Change> {
        Change::ALL.into_iter().find(|change| change.name() == name)
    }

    /// Returns the reason why the change cannot be tried on this kernel, if any.
    fn impossible(self, found: LocalPortRange) -> Option<String> {
        let why = match (self, found) {
            (Change::FullRange, LocalPortRange::Absent) => "this kernel has no IP_LOCAL_PORT_RANGE",
            (Change::FullRange, LocalPortRange::Parity) => {
                "this kernel searches by parity also with IP_LOCAL_PORT_RANGE"
            }
            _ => return None,
        };
        Some(format!("{} cannot be tried: {why}", self.name()))
    }

    /// Returns the two setups, without and with the change; they are equal in everything else.
    fn sides(self, settings: &LabLocksSettings) -> [Setup; 2] {
        // Half of the even ports are never taken, from any number of sources, so the search finds an even port at once.
        let ample = Setup {
            policy: AcceptPolicy::Reuseport,
            sources: settings.sources,
            strategy: Strategy::KernelDefault,
            range: wide(),
        };
        match self {
            Change::Reuseport => [Setup { policy: AcceptPolicy::Exclusive, ..ample }, ample],
            Change::Sources => [Setup { sources: 1, ..ample }, ample],
            Change::FullRange => {
                let tight = Setup { sources: 1, range: tight(settings.queries), ..ample };
                [tight, Setup { strategy: Strategy::FullRange, ..tight }]
            }
        }
    }
}

/// Returns all ports that need no privilege to bind.
fn wide() -> PortRange {
    PortRange::new(1024, u16::MAX).expect("not backwards")
}

/// Returns a range of which the queries take nine tenths: during the second half of the queries no even port is free.
fn tight(queries: u64) -> PortRange {
    let ports = (queries.saturating_mul(10) / 9 + 2).min(wide().len().into());
    PortRange::new(u16::MAX - (ports - 1) as u16, u16::MAX).expect("not backwards")
}

/// One side of a change.
#[derive(Debug)]
struct Sums {
    setup: Setup,
    queries: u64,
    rates: Vec<f64>,
    cpu: Vec<f64>,
    errors: BTreeMap<String, u64>,
    waits: Option<Waits>,
}

impl Sums {
    fn new(setup: Setup) -> Sums {
        let errors = BTreeMap::new();
        Sums { setup, queries: 0, rates: Vec::new(), cpu: Vec::new(), errors, waits: None }
    }

    /// Adds a timed trial and returns its rate and its CPU time per query; returns `None` if no query was answered.
    fn add(&mut self, trial: &Trial) -> Option<(f64, f64)> {
        self.add_errors(trial);
        let figures = trial.queries_per_s().zip(trial.cpu_ns_per_query())?;
        self.queries += trial.queries;
        self.rates.push(figures.0);
        self.cpu.push(figures.1);
        Some(figures)
    }

    /// Adds a traced trial. Its times are not used, since they include the cost of the trace.
    fn add_traced(&mut self, trial: &Trial, waits: &Waits) {
        self.add_errors(trial);
        self.waits.get_or_insert_default().add(waits, trial.queries);
    }

    fn add_errors(&mut self, trial: &Trial) {
        for (errno, number) in &trial.errors {
            *self.errors.entry(errno.clone()).or_default() += number;
        }
    }

    fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    fn side(&self, random: &mut Rng) -> LocksSide {
        let mut interval = |samples: &[f64]| {
            median_interval(samples, random).unwrap_or(Interval { value: 0.0, low: 0.0, high: 0.0 })
        };
        let (rate, cpu) = (interval(&self.rates), interval(&self.cpu));
        let Setup { policy, sources, strategy, range } = self.setup;
        let waits = self.waits.as_ref().filter(|waits| waits.queries > 0);
        LocksSide {
            policy: policy.to_string(),
            sources,
            strategy: strategy.to_string(),
            low: range.low(),
            high: range.high(),
            queries: self.queries,
            queries_per_s: rate.value,
            queries_per_s_low: rate.low,
            queries_per_s_high: rate.high,
            cpu_ns_per_query: cpu.value,
            cpu_ns_per_query_low: cpu.low,
            cpu_ns_per_query_high: cpu.high,
            waits_per_query: waits.map(|waits| waits.per_query(waits.waits)),
            wait_ns_per_query: waits.map(|waits| waits.per_query(waits.wait_ns)),
            classes: waits.map(classes).unwrap_or_default(),
            errors: self.errors.clone(),
        }
    }
}

fn classes(waits: &Waits) -> Vec<LocksClass> {
    let mut classes: Vec<LocksClass> = waits
        .classes
        .iter()
        .filter(|(_, (count, _))| *count > 0)
        .map(|(class, (count, ns))| LocksClass {
            class: class.clone(),
            waits_per_query: waits.per_query(*count),
            wait_ns_per_query: waits.per_query(*ns),
        })
        .collect();
    classes.sort_by(|a, b| b.wait_ns_per_query.total_cmp(&a.wait_ns_per_query));
    classes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::locks::{MAX_QUERIES, MIN_QUERIES};

    fn settings(queries: u64) -> LabLocksSettings {
        LabLocksSettings { queries, ..usual(2) }
    }

    #[test]
    fn a_pair_differs_in_its_change_alone() {
        for change in Change::ALL {
            let [before, after] = change.sides(&settings(1000));
            let same = [
                before.policy == after.policy,
                before.sources == after.sources,
                before.strategy == after.strategy,
                before.range == after.range,
            ];
            assert_eq!(same.iter().filter(|same| !**same).count(), 1, "{change:?}");
            assert_eq!(Change::named(change.name()), Some(change));
        }
        assert_eq!(Change::named("prayer"), None);
    }

    #[test]
    fn setups_exhaust_half_of_the_ports_as_planned() {
        for queries in [MIN_QUERIES, 10_000, MAX_QUERIES] {
            for setup in Change::ALL.iter().flat_map(|change| change.sides(&settings(queries))) {
                let ports = u64::from(setup.range.len());
                assert!(ports > queries, "{setup:?}");
                let even_are_enough = ports / 2 > queries;
                assert_eq!(even_are_enough, setup.range == wide(), "{setup:?} {queries}");
            }
        }
    }

    #[test]
    fn impossible_changes_have_a_reason() {
        assert_eq!(Change::FullRange.impossible(LocalPortRange::Linear), None);
        assert_eq!(Change::Sources.impossible(LocalPortRange::Absent), None);
        let why = Change::FullRange.impossible(LocalPortRange::Absent).unwrap();
        assert_eq!(why, "full-range cannot be tried: this kernel has no IP_LOCAL_PORT_RANGE");
    }
}
