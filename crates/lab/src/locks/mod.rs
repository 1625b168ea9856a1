//! `lab locks`: measures what short-lived connections gain from less contention on the kernel's locks.
//!
//! Published: "TCP stack lock contention with short-lived connections" (freebsd-net, 2013): 52,000 queries per
//! second with the global lock of TCP held in accept(), 55,000 without. Linux has no such lock. Its locks are shared by
//! the sockets that share a listener, a source address or a nearly full port table.

mod advice;
mod change;
mod settings;
mod sums;
mod trial;
mod verdict;
mod waits;

use std::num::NonZeroUsize;
use std::thread;

use fastrand::Rng;
use fourtuple::capabilities::LocalPortRange;
use fourtuple_measure::words::counted;
use fourtuple_record::{LabLocksResults, LabLocksSettings, LocksPair, Remark};

use crate::locks::sums::Sums;
use crate::locks::trial::Trial;
use crate::locks::verdict::PairVerdicts;
use crate::locks::waits::CountedWaits;
use crate::{LabError, Watch};

pub use change::Change;
pub use settings::{Locks, MAX_QUERIES, MIN_QUERIES};

/// Maximum relative difference that counts as no difference.
const NARROW: f64 = 0.05;

/// Number of trials of each side in which lock waits are traced.
const TRACED: u32 = 2;

impl Locks {
    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> LabLocksSettings {
        LabLocksSettings {
            changes: self.changes.iter().map(|change| change.name().to_owned()).collect(),
            workers: self.workers,
            clients: self.clients,
            queries: self.queries.into(),
            sources: self.sources,
            repeats: self.repeats,
            traced: if self.trace { TRACED } else { 0 },
            closer: "client".to_owned(),
            narrow: NARROW,
            seed: self.seed,
        }
    }

    /// Runs the changes in order. The trials of a change are interleaved (A B B A, B A A B), each in a namespace of its own.
    /// Traced trials come after the timed trials, since tracing costs time.
    ///
    /// # Errors
    ///
    /// Returns an error if a setting is out of range, or if a trial fails before the first pair of results.
    pub fn run(
        &self,
        found: LocalPortRange,
        watch: &Watch<'_>,
    ) -> Result<(LabLocksResults, Vec<Remark>), LabError> {
        self.check()?;
        let mut state = RunState {
            settings: self,
            watch,
            untraced: (!self.trace).then(|| "lock waits were not to be counted".to_owned()),
            blind_spots: Vec::new(),
            most_waits: None,
            lost: Vec::new(),
            remarks: Vec::new(),
        };
        let mut pairs = Vec::new();
        for &change in &self.changes {
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
}

/// The state that all changes of a run share.
struct RunState<'a> {
    settings: &'a Locks,
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
        let Locks { repeats, seed, .. } = *self.settings;
        let mut sides = change.sides(self.settings).map(Sums::new);
        let mut verdicts = PairVerdicts::new(NARROW);
        // The first trial of a change warms the kernel up; its times are not used.
        self.watch.progress.begin(&format!("{} (warming up)", change.name()), self.settings.queries.into());
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
        for pair in 0..TRACED {
            for side in order(pair) {
                if self.untraced.is_some() || self.watch.stopped() {
                    break;
                }
                self.begin(change, side, &format!("traced {}/{TRACED}", pair + 1));
                self.traced(&mut sides[side])?;
            }
        }
        self.concluded(change, sides, verdicts, seed)
    }

    fn begin(&self, change: Change, side: usize, which: &str) {
        let name = ["before", "after"][side];
        let part = format!("{}: {name} ({which})", change.name());
        self.watch.progress.begin(&part, self.settings.queries.into());
    }

    fn timed(&self, side: &Sums) -> Result<Trial, LabError> {
        let (_, trial) = trial::run(self.settings, side.setup, self.watch, |queries| drop(queries()))?;
        Ok(trial)
    }

    fn traced(&mut self, side: &mut Sums) -> Result<(), LabError> {
        let (counted, trial) = trial::run(self.settings, side.setup, self.watch, |queries| {
            waits::count(&mut || drop(queries()))
        })?;
        match counted {
            Ok(CountedWaits { waits, blind_spots, lost }) if !trial.cut => {
                side.add_traced(&trial, &waits);
                // A trial without waits does not show which waits the tracer can see.
                if self.most_waits.is_none_or(|most| waits.waits > most) {
                    self.most_waits = Some(waits.waits);
                    self.blind_spots = blind_spots;
                }
                // A wait without a stack is still a wait and is counted; it is no loss.
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
