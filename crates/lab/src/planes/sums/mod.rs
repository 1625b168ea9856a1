//! The results of a cell, summed over its runs.

use std::collections::BTreeMap;

use fastrand::Rng;
use fourtuple_measure::median_interval;
use fourtuple_measure::words::counted;
use fourtuple_record::{PlanesCell, PlanesRatio, Remark};

use crate::planes::generator::inner_flows;
use crate::planes::settings::{Spec, SpreadBy};
use crate::planes::trial::{Measured, RunMeasurements};

/// The generator limits a run if it waits for less than this share of the time.
const HARDLY: f64 = 0.05;
/// Minimum number of runs for a confidence interval.
const FOR_INTERVALS: usize = 3;

/// The numbers of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Number of the repeat; runs of the same repeat are compared with each other.
    repeat: u32,
    cpu_ns: f64,
    pps: f64,
    capacity: f64,
    waited: f64,
    generator_ns: f64,
    sink_ns: f64,
}

/// A cell and its runs so far.
#[derive(Debug)]
pub(super) struct Sums {
    pub(super) spec: Spec,
    runs: Vec<Run>,
    sent: u64,
    arrived: u64,
    reordered: u64,
    received: Vec<u64>,
    dropped: BTreeMap<String, u64>,
}

impl Sums {
    pub(super) fn new(spec: Spec) -> Sums {
        Sums {
            spec,
            runs: Vec::new(),
            sent: 0,
            arrived: 0,
            reordered: 0,
            received: vec![0; spec.planes as usize],
            dropped: BTreeMap::new(),
        }
    }

    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    pub(super) fn add(&mut self, repeat: u32, passes: &RunMeasurements) {
        let Measured { sent, arrived, last_ns, planes, sink } = &passes.abreast;
        // Each namespace has its own hash seed, so a flow may go to a different plane in the next run.
        let differs_per_run = matches!(self.spec.spread, SpreadBy::Hash | SpreadBy::Cpu);
        self.sent += sent.packets;
        self.arrived += arrived;
        self.reordered += sink.reordered;
        let lost = sent.packets.saturating_sub(*arrived);
        let mut named = sink.dropped;
        if sink.dropped > 0 {
            *self.dropped.entry("sink".to_owned()).or_default() += sink.dropped;
        }
        for (sum, plane) in self.received.iter_mut().zip(planes) {
            if self.runs.is_empty() || !differs_per_run {
                *sum += plane.received;
            }
            for (reason, number) in &plane.dropped {
                *self.dropped.entry(reason.name().to_owned()).or_default() += number;
                named += number;
            }
        }
        if lost > named {
            *self.dropped.entry("elsewhere".to_owned()).or_default() += lost - named;
        }
        let (received, cpu) = passes.in_turns.as_ref().unwrap_or(&passes.abreast).moved();
        let elapsed = last_ns.saturating_sub(sent.begun_ns);
        let per = |sum: f64, number: u64| if number == 0 { 0.0 } else { sum / number as f64 };
        let busy = planes.iter().filter(|plane| plane.received > 0 && plane.cpu_ns > 0);
        self.runs.push(Run {
            repeat,
            cpu_ns: per(cpu as f64, received),
            pps: per(*arrived as f64 * 1e9, elapsed),
            capacity: busy.map(|plane| plane.received as f64 * 1e9 / plane.cpu_ns as f64).sum(),
            waited: per(sent.waited_ns as f64, sent.sending_ns).min(1.0),
            generator_ns: per(sent.cpu.as_nanos() as f64, sent.packets),
            sink_ns: per(sink.cpu.as_nanos() as f64, *arrived),
        });
    }

    fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.arrived)
    }

    fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        let mut samples: Vec<f64> = self.runs.iter().map(of).collect();
        samples.sort_unstable_by(f64::total_cmp);
        let middle = samples.len() / 2;
        match samples.len() {
            0 => 0.0,
            odd if odd % 2 == 1 => samples[middle],
            _ => (samples[middle - 1] + samples[middle]) / 2.0,
        }
    }

    /// Returns the confidence interval of the median, if there are enough runs.
    fn ends(&self, random: &mut Rng, of: impl Fn(&Run) -> f64) -> Option<(f64, f64)> {
        let samples: Vec<f64> = self.runs.iter().map(of).collect();
        let enough = samples.len() >= FOR_INTERVALS;
        enough.then(|| median_interval(&samples, random)).flatten().map(|found| (found.low, found.high))
    }

    /// Returns the median ratio to `base`, computed for each pair of runs of the same repeat.
    fn over(&self, base: &Sums, random: &mut Rng, of: impl Fn(&Run) -> f64) -> Option<PlanesRatio> {
        let pair = |run: &Run| {
            let other = base.runs.iter().find(|other| other.repeat == run.repeat).map(&of)?;
            (other > 0.0).then(|| of(run) / other)
        };
        let ratios: Vec<f64> = self.runs.iter().filter_map(pair).collect();
        let found = median_interval(&ratios, random)?;
        Some(PlanesRatio { ratio: found.value, low: found.low, high: found.high })
    }

    /// Returns whether the planes had to wait for packets.
    fn is_limited_by_generator(&self) -> bool {
        self.median(|run| run.waited) < HARDLY
    }
}

/// Returns the cells that were run, as a record keeps them.
pub(super) fn results(cells: &[Sums], random: &mut Rng) -> Vec<PlanesCell> {
    let run: Vec<&Sums> = cells.iter().filter(|cell| cell.runs() > 0).collect();
    let base = |spec: Spec, own: &Sums| {
        run.iter().copied().find(|other| other.spec == spec && other.spec != own.spec)
    };
    let cell = |sums: &&Sums| {
        let spec = sums.spec;
        let one_by_one = base(Spec { kind: fourtuple_forward::PlaneKind::OneByOne, ..spec }, sums);
        let one_plane = base(Spec { planes: 1, ..spec }, sums);
        let received: u64 = sums.received.iter().sum();
        let share = |number: &u64| if received == 0 { 0.0 } else { *number as f64 / received as f64 };
        let cpu = sums.ends(random, |run| run.cpu_ns);
        let pps = sums.ends(random, |run| run.pps);
        PlanesCell {
            plane: spec.kind.to_string(),
            planes: spec.planes,
            spread: spec.spread.name().to_owned(),
            flows: spec.flows,
            inner_flows: inner_flows(spec.flows),
            packet_bytes: spec.bytes,
            mtu: spec.mtu(),
            work_ns: spec.work.as_nanos() as u64,
            repeats: sums.runs() as u32,
            packets: sums.sent,
            lost: sums.lost(),
            dropped: sums.dropped.clone(),
            reordered: sums.reordered,
            share: sums.received.iter().map(share).collect(),
            cpu_ns_per_packet: sums.median(|run| run.cpu_ns).round() as u64,
            cpu_ns_low: cpu.map(|(low, _)| low.round() as u64),
            cpu_ns_high: cpu.map(|(_, high)| high.round() as u64),
            pps: sums.median(|run| run.pps),
            pps_low: pps.map(|(low, _)| low),
            pps_high: pps.map(|(_, high)| high),
            capacity_pps: sums.median(|run| run.capacity),
            generator_waited: sums.median(|run| run.waited),
            limited_by: if sums.is_limited_by_generator() { "generator" } else { "planes" }.to_owned(),
            generator_cpu_ns_per_packet: sums.median(|run| run.generator_ns).round() as u64,
            sink_cpu_ns_per_packet: sums.median(|run| run.sink_ns).round() as u64,
            cpu_to_one_by_one: one_by_one.and_then(|base| sums.over(base, random, |run| run.cpu_ns)),
            capacity_to_one_plane: one_plane.and_then(|base| sums.over(base, random, |run| run.capacity)),
            pps_to_one_plane: one_plane.and_then(|base| sums.over(base, random, |run| run.pps)),
        }
    };
    run.iter().map(cell).collect()
}

/// Returns the reasons to doubt a cell.
pub(super) fn doubts(cells: &[Sums]) -> Vec<Remark> {
    let mut remarks = Vec::new();
    for cell in cells.iter().filter(|cell| cell.runs() > 0) {
        let title = cell.spec.title();
        let not_ours = ["sink", "elsewhere"].map(|place| cell.dropped.get(place).copied().unwrap_or(0));
        if not_ours != [0, 0] {
            remarks.push(Remark::new(
                "sink-loss",
                format!(
                    "{title}: of {} packets lost the planes lost {}; {} met a full queue of the sink, {} were lost in between",
                    cell.lost(),
                    cell.lost().saturating_sub(not_ours[0] + not_ours[1]),
                    not_ours[0],
                    not_ours[1],
                ),
            ));
        }
        // Without work the generator cannot keep up. The table shows this, and CPU per packet remains valid.
        if cell.is_limited_by_generator() && !cell.spec.work.is_zero() {
            remarks.push(Remark::new(
                "generator-limited",
                format!(
                    "{title}: the generator was the limit, so that its packets per second are no measure of the planes; \
                     CPU per packet and counted capacity are"
                ),
            ));
        }
        if cell.spec.spread == SpreadBy::Flow && cell.reordered > 0 {
            remarks.push(Remark::new(
                "reordered",
                format!(
                    "{title}: {} overtook others of the same flow, which one plane keeps in order: the network reordered them \
                     before it or behind it",
                    counted(cell.reordered, "packet")
                ),
            ));
        }
    }
    remarks
}

#[cfg(test)]
mod tests;
