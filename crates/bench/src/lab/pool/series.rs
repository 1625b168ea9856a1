//! Runs the cells of an experiment several times, and lists the reasons to doubt the results.

use fourtuple::listen::{AcceptPolicy, Family, ListenError, Recycle};
use fourtuple_record::{AcceptResults, Remark, SkippedCell, Timeline, errno};

use crate::lab::pool::Spend;
use crate::lab::pool::address::ListenAddress;
use crate::lab::pool::client::Measured;
use crate::lab::pool::sums::{self, Label, Sums};
use crate::lab::pool::workers::Pool;
use crate::lab::{LabError, Namespace, Watch};

/// A cell and its runs so far.
pub(crate) struct Cell<S> {
    /// The cell to run.
    pub(crate) spec: S,
    label: Label,
    sums: Sums,
    /// The request with the longest misplaced wait, and this wait in nanoseconds.
    timeline: Option<(u64, Timeline)>,
}

impl<S> Cell<S> {
    pub(crate) fn new(label: Label, spec: S) -> Cell<S> {
        Cell { spec, sums: Sums::new(label.clone()), label, timeline: None }
    }

    fn title(&self) -> String {
        let closing = match self.label.close_every {
            0 => "never".to_owned(),
            every => every.to_string(),
        };
        format!("{} {} {} {closing}", self.label.policy, self.label.family, self.label.load)
    }

    fn add(&mut self, measured: &Measured) {
        let served = self.sums.add(measured);
        // Only on kept connections does a request wait for one particular worker.
        if self.label.close_every == 0 {
            let workers = measured.seats.len().max(self.label.workers);
            let found = sums::longest(&self.label, workers, measured.begun_ns, &served);
            if found.as_ref().map(|(misplaced, _)| misplaced) > self.timeline.as_ref().map(|(most, _)| most) {
                self.timeline = found;
            }
        }
    }
}

/// Runs every cell `repeats` times; odd repeats in the reverse order (A B C C B A), so that a machine that warms up or gets
/// a noisy neighbour favours no cell. `run` receives the number of the repeat, from 0.
pub(crate) fn run<S>(
    cells: &mut [Cell<S>],
    repeats: u32,
    length_ms: u64,
    watch: &Watch<'_>,
    run: impl Fn(&S, u32) -> Result<Measured, LabError>,
) -> Result<Vec<Remark>, LabError> {
    let mut remarks = Vec::new();
    'repeats: for repeat in 0..repeats {
        let mut order: Vec<usize> = (0..cells.len()).collect();
        if repeat % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let any = cells.iter().any(|cell| cell.sums.operations() > 0);
            let cell = &mut cells[index];
            if watch.stopped() {
                remarks.push(interrupted(cell));
                break 'repeats;
            }
            watch.progress.begin(&cell.title(), length_ms);
            match run(&cell.spec, repeat) {
                Ok(measured) => {
                    if measured.all().next().is_some() || !measured.cut {
                        cell.add(&measured);
                    }
                    if measured.cut {
                        remarks.push(interrupted(cell));
                        break 'repeats;
                    }
                }
                // The results of earlier runs are kept.
                Err(error) if any => {
                    remarks.push(Remark::new("failed", format!("{} failed: {error}", cell.title())));
                    break 'repeats;
                }
                Err(error) => return Err(error),
            }
        }
    }
    if remarks.iter().any(|remark| remark.id == "interrupted")
        && cells.iter().all(|cell| cell.sums.repeats() == 0)
    {
        return Err(LabError::Interrupted);
    }
    remarks.extend(cells.iter().flat_map(doubts));
    Ok(remarks)
}

fn interrupted<S>(cell: &Cell<S>) -> Remark {
    Remark::new(
        "interrupted",
        format!("interrupted at {}: it is cut short, and what should follow is missing", cell.title()),
    )
}

/// Share of failed requests above which a remark is made.
const FEW: f64 = 0.001;

/// Returns the reasons to doubt a cell.
fn doubts<S>(cell: &Cell<S>) -> Vec<Remark> {
    let found = cell.sums.cell();
    if found.repeats == 0 {
        return Vec::new();
    }
    let title = cell.title();
    let mut remarks = Vec::new();
    let failed = found.errors.values().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let listed: Vec<String> = found.errors.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let listed = listed.join(", ");
    if found.errors.contains_key(errno::EADDRNOTAVAIL) {
        remarks.push(Remark::new("ports-exhausted", format!("{title}: clients ran out of ports ({listed})")));
    } else if found.operations == 0 {
        let why = if listed.is_empty() { "none was sent".to_owned() } else { listed };
        remarks.push(Remark::new("no-answers", format!("{title}: no request was answered ({why})")));
    } else if failed as f64 > FEW * found.operations as f64 {
        let all = found.operations + failed;
        remarks
            .push(Remark::new("failures", format!("{title}: {failed} of {all} requests failed ({listed})")));
    }
    if cell.sums.too_soon as f64 > FEW * found.operations.max(1) as f64 {
        remarks.push(Remark::new(
            "work-not-done",
            format!(
                "{title}: {} of {} answers came sooner than the requested work takes: the server does not do \
                 what ?work= says, so that its waits are too short",
                cell.sums.too_soon, found.operations
            ),
        ));
    }
    remarks
}

/// Returns the cells that were run, as a record keeps them, with the timeline of the cell with the longest tail (p99.9).
pub(crate) fn results<S>(cells: Vec<Cell<S>>, skipped: Vec<SkippedCell>) -> AcceptResults {
    let run = |cell: &&Cell<S>| cell.sums.repeats() > 0;
    let found = cells.iter().filter(run).map(|cell| cell.sums.cell()).collect();
    let worst = cells
        .into_iter()
        .filter(|cell| cell.timeline.is_some())
        .max_by_key(|cell| cell.sums.cell().wait_ns.p999);
    AcceptResults {
        cells: found,
        skipped,
        timeline: worst.and_then(|cell| cell.timeline).map(|(_, timeline)| timeline),
        break_even: None,
        advice: Vec::new(),
    }
}

/// Returns a combination that cannot be run, as a record keeps it.
pub(crate) fn skipped(pair: Pair, close_every: u64, why: impl Into<String>) -> SkippedCell {
    SkippedCell {
        policy: pair.policy.to_string(),
        family: pair.family.to_string(),
        close_every,
        why: why.into(),
    }
}

/// The cells to compare.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The policies, in this order.
    pub policies: Vec<AcceptPolicy>,
    /// Whether the user named the policies; a named policy that cannot run is an error.
    pub policies_named: bool,
    /// The families, in this order.
    pub families: Vec<Family>,
    /// Whether the user named the families.
    pub families_named: bool,
}

/// A policy over a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) policy: AcceptPolicy,
    pub(crate) family: Family,
}

/// The part of a [`Selection`] that this host can run.
#[derive(Debug)]
pub(crate) struct Runnable {
    pub(crate) pairs: Vec<Pair>,
    /// The pairs that cannot run, each with the reason.
    pub(crate) skipped: Vec<(Pair, String)>,
}

impl Selection {
    pub(crate) fn check(&self) -> Result<(), LabError> {
        if self.policies.is_empty() {
            return Err(LabError::setting("policy", "(none)", "at least one is needed"));
        }
        if self.families.is_empty() {
            return Err(LabError::setting("family", "(none)", "at least one is needed"));
        }
        Ok(())
    }

    /// Probes every pair, each in a namespace of its own, by opening a listener group.
    ///
    /// Skips a pair that no kernel supports, unless both policy and family were named. Skips a pair that this kernel lacks
    /// or does not permit, unless the policy was named. Otherwise such a pair is an error, and so is an empty selection.
    pub(crate) fn runnable(&self, workers: usize) -> Result<Runnable, LabError> {
        let mut left = Runnable { pairs: Vec::new(), skipped: Vec::new() };
        let mut first = None;
        for &family in &self.families {
            for &policy in &self.policies {
                let pair = Pair { policy, family };
                let tried = Namespace::run(|_| {
                    let room = ListenAddress::new(family)?;
                    Pool::start(&room.endpoint, policy, workers, Spend::Sleep, Recycle::Never)?.end()
                });
                match tried {
                    Ok(_) => left.pairs.push(pair),
                    Err(LabError::Listen(error)) if self.forgives(&error) => {
                        left.skipped.push((pair, error.to_string()));
                        first.get_or_insert(error);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        match first {
            Some(error) if left.pairs.is_empty() => Err(error.into()),
            _ => Ok(left),
        }
    }

    fn forgives(&self, error: &ListenError) -> bool {
        match error {
            ListenError::Impossible { .. } => !(self.policies_named && self.families_named),
            ListenError::NotPermitted { .. } | ListenError::Absent { .. } => !self.policies_named,
            _ => false,
        }
    }
}
