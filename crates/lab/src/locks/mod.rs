//! `lab locks`: what do short-lived connections gain where fewer of them meet at a lock?
//!
//! Published: seed 004 ("TCP stack lock contention with short-lived connections", freebsd-net, 2013): 52,000 queries per
//! second with the global lock of TCP held in accept(), 55,000 without. Linux has no such lock. What it has are locks that
//! are shared by those who share something: a listener, a source address, a table of ports that is nearly full.

mod advice;
mod change;
mod sums;
mod trial;
mod verdict;
mod waits;

use std::num::NonZeroUsize;
use std::thread;

use fastrand::Rng;
use fourtuple::capabilities::LocalPortRange;
use fourtuple_record::{LabLocksResults, LabLocksSettings, LocksPair, Remark};

use crate::{LabError, Watch};
use sums::Sums;
use trial::Trial;
use verdict::Verdicts;
use waits::Counted;

pub use change::Change;

/// Fewer queries say nothing about a rate.
pub const FEWEST_QUERIES: u32 = 100;

/// With more, one source would run out of even ports where it must not.
pub const MOST_QUERIES: u32 = 30_000;

/// Differences up to this are none.
const NARROW: f64 = 0.05;

/// Traced trials of each side.
const TRACED: u32 = 2;

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct Locks {
    /// What to try, in this order.
    pub changes: Vec<Change>,
    /// Threads that accept and answer, 2 to 256.
    pub workers: u32,
    /// Threads that connect, 2 to 256.
    pub clients: u32,
    /// Queries of one trial, [`FEWEST_QUERIES`] to [`MOST_QUERIES`].
    pub queries: u32,
    /// Source addresses where there are several, 2 to 1024.
    pub sources: u32,
    /// Pairs of timed trials of each change; from 8 on there is an interval.
    pub repeats: u32,
    /// Whether to count lock waits, in trials of their own.
    pub trace: bool,
    /// Seed of the intervals' resampling.
    pub seed: u64,
}

impl Locks {
    /// What suits a host of so many processors: half of them for workers, and a client on each, so that all are busy.
    pub fn on(cpus: u32, changes: Vec<Change>, seed: u64) -> Locks {
        let clients = cpus.clamp(4, 256);
        Locks {
            changes,
            workers: (cpus / 2).clamp(2, 256),
            clients,
            queries: 10_000,
            sources: clients,
            repeats: 8,
            trace: true,
            seed,
        }
    }

    /// Checks what can be checked without a kernel.
    pub fn check(&self) -> Result<(), LabError> {
        let within = |setting, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(LabError::setting(setting, value, format!("accepted are {low} to {high}")))
        };
        within("workers", self.workers, 2, 256)?;
        within("clients", self.clients, 2, 256)?;
        within("queries", self.queries, FEWEST_QUERIES, MOST_QUERIES)?;
        within("sources", self.sources, 2, 1024)?;
        within("repeats", self.repeats, 1, 100)?;
        if self.changes.is_empty() {
            return Err(LabError::setting("change", "(none)", "at least one is needed"));
        }
        Ok(())
    }

    /// The settings as a record keeps them.
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

    /// Tries one change after the other. The trials of a change are interleaved (A B B A, B A A B), each in a namespace of
    /// its own; those in which waits are counted come after the timed ones, since counting costs time.
    ///
    /// # Errors
    ///
    /// A setting, or a failure before there was anything to keep.
    pub fn run(
        &self,
        found: LocalPortRange,
        watch: &Watch<'_>,
    ) -> Result<(LabLocksResults, Vec<Remark>), LabError> {
        self.check()?;
        let mut course = Course {
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
                course.remarks.push(Remark::new("skipped", why));
                continue;
            }
            match course.pair(change) {
                Ok(pair) => pairs.extend(pair),
                // What was measured before is worth keeping.
                Err(error) if !pairs.is_empty() => {
                    course.remarks.push(Remark::new("failed", format!("{} failed: {error}", change.name())));
                }
                Err(error) => return Err(error),
            }
            if watch.stopped() {
                let message = format!("interrupted at {}: trials are missing", change.name());
                course.remarks.push(Remark::new("interrupted", message));
                break;
            }
        }
        if pairs.is_empty() && watch.stopped() {
            return Err(LabError::Interrupted);
        }
        let Course { untraced, mut blind_spots, lost, remarks, .. } = course;
        blind_spots.extend(lost);
        let mut results = LabLocksResults { pairs, untraced, blind_spots, advice: Vec::new() };
        results.advice = advice::advice(&results, cpus());
        Ok((results, remarks))
    }
}

/// What goes on from change to change.
struct Course<'a> {
    settings: &'a Locks,
    watch: &'a Watch<'a>,
    /// Why waits are not counted any more.
    untraced: Option<String>,
    /// Of the trial with the most waits.
    blind_spots: Vec<String>,
    most_waits: Option<u64>,
    /// What was lost in any of them.
    lost: Vec<String>,
    remarks: Vec<Remark>,
}

impl Course<'_> {
    /// All trials of a change; `None`: not one pair of them was made.
    fn pair(&mut self, change: Change) -> Result<Option<LocksPair>, LabError> {
        let Locks { repeats, seed, .. } = *self.settings;
        let mut sides = change.sides(self.settings).map(Sums::new);
        let mut verdicts = Verdicts::new(NARROW);
        // The first trial of all meets a kernel that has made no such socket for a while.
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
            Ok(Counted { waits, blind_spots, lost }) if !trial.cut => {
                side.add_traced(&trial, &waits);
                // A trial without a wait cannot tell how waits are seen here.
                if self.most_waits.is_none_or(|most| waits.waits > most) {
                    self.most_waits = Some(waits.waits);
                    self.blind_spots = blind_spots;
                }
                // A wait without its path is a wait all the same, and counted: no reason to believe less of the rest.
                self.lost.extend(lost);
            }
            Ok(_) => {}
            Err(why) => self.untraced = Some(why),
        }
        Ok(())
    }

    /// Queries that fail at once are no queries, and make a rate that is none.
    fn say_failures(&mut self, change: Change, sides: &[Sums; 2]) {
        for (side, name) in sides.iter().zip(["before", "after"]).filter(|(side, _)| side.failed() > 0) {
            let message = format!("{} {name}: {} queries failed", change.name(), side.failed());
            self.remarks.push(Remark::new("failures", message));
        }
    }

    fn concluded(
        &mut self,
        change: Change,
        sides: [Sums; 2],
        verdicts: Verdicts,
        seed: u64,
    ) -> Result<Option<LocksPair>, LabError> {
        let (Some(rate), Some(cpu)) = (verdicts.rate(), verdicts.cpu()) else { return Ok(None) };
        self.say_failures(change, &sides);
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

/// Processors that this process may use.
fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// A B B A, B A A B, and so on.
fn order(pair: u32) -> [usize; 2] {
    if matches!(pair % 4, 0 | 3) { [0, 1] } else { [1, 0] }
}
