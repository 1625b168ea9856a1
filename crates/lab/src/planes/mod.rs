//! `lab planes`: measures the gain from more data planes, and the cost of moving a packet.
//!
//! Published: "Performance Optimisation using SO_REUSEPORT" (High Performance Network Programming, 2022); the lab repeats its
//! figure on this kernel: throughput against the number of planes, for two MTUs.

mod advice;
mod choice;
mod generator;
mod packet;
mod settings;
mod sink;
mod sums;
mod topology;
mod trial;

use fourtuple_forward::{ForwardError, PlaneKind};
use fourtuple_record::{PlanesResults, PlanesSettings, PlanesSkipped, Remark};

use crate::planes::sums::Sums;
use crate::{LabError, Watch};

pub use advice::advice;
pub use settings::{NetworkKind, Planes, SpreadBy};

impl Planes {
    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> PlanesSettings {
        let cells = self.cells(&PlaneKind::ALL);
        PlanesSettings {
            every_combination: self.has_lists(),
            plane: choice::in_order(cells.iter().map(|spec| spec.kind.to_string())),
            planes: choice::in_order(cells.iter().map(|spec| spec.planes)),
            bytes: choice::in_order(cells.iter().map(|spec| spec.bytes)),
            spread: choice::in_order(cells.iter().map(|spec| spec.spread.name().to_owned())),
            flows: choice::in_order(cells.iter().map(|spec| spec.flows)),
            work_ns: choice::in_order(cells.iter().map(|spec| spec.work.as_nanos() as u64)),
            packets: self.packets,
            repeats: self.repeats,
            over: self.over.name().to_owned(),
            seed: self.seed,
        }
    }

    /// Runs every cell, each run in namespaces of its own; odd repeats run in the reverse order.
    ///
    /// # Errors
    ///
    /// Returns an error if this host lacks a named kind of plane, if a setting is out of range, or if a run fails before
    /// the first result.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(PlanesResults, Vec<Remark>), LabError> {
        self.check()?;
        let (kinds, skipped) = self.available_kinds()?;
        let mut cells: Vec<Sums> = self.cells(&kinds).into_iter().map(Sums::new).collect();
        let mut remarks = self.run_cells(&mut cells, watch)?;
        remarks.extend(sums::doubts(&cells));
        let mut random = fastrand::Rng::with_seed(self.seed);
        let found = sums::results(&cells, &mut random);
        let planes_help_above_ns = advice::planes_help_above(&found);
        let mut results = PlanesResults { cells: found, skipped, planes_help_above_ns, advice: Vec::new() };
        results.advice = advice(&results);
        Ok((results, remarks))
    }

    fn run_cells(&self, cells: &mut [Sums], watch: &Watch<'_>) -> Result<Vec<Remark>, LabError> {
        let mut remarks = Vec::new();
        'repeats: for repeat in 0..self.repeats {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            if repeat % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let spec = cells[index].spec;
                watch.progress.begin(&spec.title(), self.packets);
                let result = if watch.stopped() {
                    Err(LabError::Interrupted)
                } else {
                    spec.run(self.packets, self.over, watch)
                };
                let kept = cells.iter().any(|cell| cell.runs() > 0);
                match result {
                    Ok(passes) if !passes.is_cut() => cells[index].add(repeat, &passes),
                    Ok(_) | Err(LabError::Interrupted) if kept => {
                        let title = spec.title();
                        remarks.push(Remark::new(
                            "interrupted",
                            format!("interrupted at {title}: this run and what should follow are missing"),
                        ));
                        break 'repeats;
                    }
                    Ok(_) => return Err(LabError::Interrupted),
                    // The results of earlier runs are kept.
                    Err(error) if kept => {
                        remarks.push(Remark::new("failed", format!("{} failed: {error}", spec.title())));
                        break 'repeats;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(remarks)
    }

    /// Probes the kinds of plane. A kind that the settings name must work; with no kind named, kinds that this kernel lacks or
    /// does not permit are skipped.
    fn available_kinds(&self) -> Result<(Vec<PlaneKind>, Vec<PlanesSkipped>), LabError> {
        let named = !self.kinds.is_empty();
        let wanted =
            if named { choice::in_order(self.kinds.iter().copied()) } else { PlaneKind::ALL.to_vec() };
        let (mut here, mut skipped) = (Vec::new(), Vec::new());
        for kind in wanted {
            match choice::probe(kind) {
                Ok(()) => here.push(kind),
                Err(LabError::Forward(
                    error @ (ForwardError::Absent { .. } | ForwardError::NotPermitted { .. }),
                )) if !named => {
                    skipped.push(PlanesSkipped { plane: kind.to_string(), why: error.to_string() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((here, skipped))
    }
}
