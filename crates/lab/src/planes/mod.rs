//! `lab planes`: what do more data planes give, and what does it cost to move a packet?
//!
//! Published: "Performance Optimisation using SO_REUSEPORT" (High Performance Network Programming, 2022) and seed 003, whose
//! figure it repeats on this kernel: throughput against the number of planes, for two MTUs.

mod advice;
mod choice;
mod generator;
mod packet;
mod sink;
mod sums;
mod topology;
mod trial;

use std::time::Duration;

use fourtuple_forward::{ForwardError, PlaneKind};
use fourtuple_record::{PlanesResults, PlanesSettings, PlanesSkipped, Remark};

use crate::{LabError, Watch};
use sums::Sums;

pub use advice::advice;

/// What is between generator, planes and sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Pairs of devices between three network namespaces.
    Veth,
    /// The loopback device of one.
    Loopback,
}

impl Over {
    /// Both.
    pub const ALL: [Over; 2] = [Over::Veth, Over::Loopback];

    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            Over::Veth => "veth",
            Over::Loopback => "loopback",
        }
    }
}

/// Which plane gets a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpreadBy {
    /// The kernel's hash of the 4-tuple.
    Hash,
    /// Chance.
    Random,
    /// The flow within the 4-tuple.
    Flow,
    /// The processor that handles the packet.
    Cpu,
}

impl SpreadBy {
    /// All of them.
    pub const ALL: [SpreadBy; 4] = [SpreadBy::Hash, SpreadBy::Random, SpreadBy::Flow, SpreadBy::Cpu];

    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            SpreadBy::Hash => "hash",
            SpreadBy::Random => "random",
            SpreadBy::Flow => "flow",
            SpreadBy::Cpu => "cpu",
        }
    }
}

/// The settings of the experiment. Without any list it runs those cells that answer its questions; with one, every combination
/// of the lists, where those that are empty are: all ways to move packets, 1, 2 and 4 planes, 64 bytes, spread by flow, one
/// 4-tuple, no work.
#[derive(Clone, Debug)]
pub struct Planes {
    /// How planes move packets.
    pub kinds: Vec<PlaneKind>,
    /// Numbers of planes, 1 to 64.
    pub planes: Vec<u32>,
    /// Payloads of packets, 16 to 9000.
    pub bytes: Vec<u32>,
    /// Which plane gets a packet.
    pub spreads: Vec<SpreadBy>,
    /// Numbers of 4-tuples, 1 to 256.
    pub flows: Vec<u32>,
    /// What a packet costs beyond being moved, up to 1 ms.
    pub work: Vec<Duration>,
    /// Packets of one run, 1,000 to 100 million.
    pub packets: u64,
    /// Runs of every cell.
    pub repeats: u32,
    /// What is in between.
    pub over: Over,
    /// Seed of the intervals.
    pub seed: u64,
}

/// A combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    kind: PlaneKind,
    planes: u32,
    bytes: u32,
    spread: SpreadBy,
    flows: u32,
    work: Duration,
}

/// IPv4 and UDP headers.
const HEADERS: u32 = 28;

impl Spec {
    /// The MTU of seed 003 that the packet fits into, else one that it just fits into.
    fn mtu(&self) -> u32 {
        let needed = self.bytes + HEADERS;
        [1500, 3000].into_iter().find(|mtu| needed <= *mtu).unwrap_or(needed)
    }

    fn title(&self) -> String {
        let Spec { kind, planes, bytes, spread, flows, work } = self;
        let tuples = if *flows == 1 { "one 4-tuple".to_owned() } else { format!("{flows} 4-tuples") };
        format!("{kind} x{planes}, {bytes} B, {}, {tuples}, work {work:?}", spread.name())
    }
}

impl Planes {
    /// Checks what can be checked without a kernel.
    pub fn check(&self) -> Result<(), LabError> {
        let within = |setting, values: &[u32], low, high| match values
            .iter()
            .find(|value| !(low..=high).contains(*value))
        {
            Some(value) => Err(LabError::setting(setting, value, format!("accepted are {low} to {high}"))),
            None => Ok(()),
        };
        within("planes", &self.planes, 1, 64)?;
        within("bytes", &self.bytes, packet::SHORTEST, 9000)?;
        within("flows", &self.flows, 1, 256)?;
        within("repeats", &[self.repeats], 1, 100)?;
        if let Some(long) = self.work.iter().find(|work| **work > Duration::from_millis(1)) {
            return Err(LabError::setting("work", format!("{long:?}"), "accepted is up to 1ms"));
        }
        if !(1_000..=100_000_000).contains(&self.packets) {
            return Err(LabError::setting("packets", self.packets, "accepted are 1000 to 100000000"));
        }
        Ok(())
    }

    /// The settings as a record keeps them.
    pub fn settings(&self) -> PlanesSettings {
        let cells = self.cells(&PlaneKind::ALL);
        PlanesSettings {
            every_combination: self.asks_for_some(),
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

    /// Runs every cell, each run in namespaces of its own; every second repeat in the reverse order.
    ///
    /// # Errors
    ///
    /// A way to move packets that was named and that this host has not got, a setting, or a failure before there was anything to
    /// keep.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(PlanesResults, Vec<Remark>), LabError> {
        self.check()?;
        let (kinds, skipped) = self.kinds_here()?;
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
                    // What was measured before is worth keeping.
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

    /// Tries every way to move packets: what was named must be there, of the others those that are not are skipped.
    fn kinds_here(&self) -> Result<(Vec<PlaneKind>, Vec<PlanesSkipped>), LabError> {
        let named = !self.kinds.is_empty();
        let wanted =
            if named { choice::in_order(self.kinds.iter().copied()) } else { PlaneKind::ALL.to_vec() };
        let (mut here, mut skipped) = (Vec::new(), Vec::new());
        for kind in wanted {
            match choice::try_out(kind) {
                Ok(()) => here.push(kind),
                Err(LabError::Forward(error @ (ForwardError::Spread(_) | ForwardError::Loop { .. }))) => {
                    return Err(error.into());
                }
                Err(LabError::Forward(error)) if !named => {
                    skipped.push(PlanesSkipped { plane: kind.to_string(), why: error.to_string() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((here, skipped))
    }
}
