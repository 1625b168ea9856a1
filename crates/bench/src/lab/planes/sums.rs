//! The results of a cell, summed over its runs.

use std::collections::BTreeMap;

use fastrand::Rng;
use fourtuple_record::measure::median_interval;
use fourtuple_record::measure::words::counted;
use fourtuple_record::{PlanesCell, PlanesRatio, Remark};

use crate::lab::planes::generator::inner_flows;
use crate::lab::planes::{Measured, RunMeasurements, Spec, SpreadBy};

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
                    "{title}: the generator was the limit, so that its packets per second do not measure the planes; \
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
mod tests {
    use std::time::Duration;

    use fourtuple_forward::{Drop, PlaneCounts, PlaneKind};

    use super::*;
    use crate::lab::planes::generator::SendCounts;
    use crate::lab::planes::generator::SinkCounts;

    fn spec(kind: PlaneKind, planes: u32, spread: SpreadBy) -> Spec {
        Spec { kind, planes, bytes: 64, spread, flows: 1, work: Duration::ZERO }
    }

    fn plane(received: u64, cpu_ns: u64, overflow: u64) -> PlaneCounts {
        let dropped = if overflow > 0 { vec![(Drop::Overflow, overflow)] } else { Vec::new() };
        PlaneCounts { received, cpu_ns, dropped, ..PlaneCounts::default() }
    }

    /// Returns measurements of a thousand packets in a millisecond; the generator waited for half of this time.
    fn measured(arrived: u64, sink_dropped: u64, planes: Vec<PlaneCounts>) -> Measured {
        Measured {
            sent: SendCounts {
                packets: 1_000,
                begun_ns: 5_000,
                waited_ns: 500_000,
                sending_ns: 1_000_000,
                cpu: Duration::from_micros(400),
                cut: false,
            },
            arrived,
            last_ns: 1_005_000,
            planes,
            sink: SinkCounts { reordered: 3, dropped: sink_dropped, cpu: Duration::from_micros(90) },
        }
    }

    fn add(sums: &mut Sums, repeat: u32, abreast: Measured, in_turns: Option<Measured>) {
        sums.add(repeat, &RunMeasurements { abreast, in_turns });
    }

    fn cells(sums: &[Sums]) -> Vec<PlanesCell> {
        results(sums, &mut Rng::with_seed(1))
    }

    #[test]
    fn lost_packets_are_attributed_to_a_place() {
        let mut sums = Sums::new(spec(PlaneKind::Batched, 2, SpreadBy::Random));
        // 100 packets are lost: 60 at the planes, 30 at the sink, 10 at no counter.
        add(&mut sums, 0, measured(900, 30, vec![plane(500, 1, 40), plane(440, 1, 20)]), None);
        let [cell] = &cells(&[sums])[..] else { panic!("one cell") };
        let places: Vec<_> = cell.dropped.iter().map(|(place, number)| (place.as_str(), *number)).collect();
        assert_eq!(places, [("elsewhere", 10), ("overflow", 60), ("sink", 30)]);
        assert_eq!((cell.packets, cell.lost, cell.reordered), (1_000, 100, 3));
        assert_eq!(cell.share, [500.0 / 940.0, 440.0 / 940.0]);
    }

    #[test]
    fn only_losses_outside_the_planes_raise_doubt() {
        let lossy = |sink| {
            let mut sums = Sums::new(spec(PlaneKind::Batched, 1, SpreadBy::Flow));
            add(&mut sums, 0, measured(960, sink, vec![plane(960, 1, 40 - sink)]), None);
            doubts(&[sums])
        };
        let ids = |remarks: Vec<Remark>| remarks.into_iter().map(|remark| remark.id).collect::<Vec<_>>();
        assert_eq!(ids(lossy(0)), ["reordered"]);
        assert_eq!(ids(lossy(7)), ["sink-loss", "reordered"]);
        assert!(doubts(&[Sums::new(spec(PlaneKind::Batched, 1, SpreadBy::Flow))]).is_empty(), "not run");
    }

    #[test]
    fn rates_come_from_the_matching_pass() {
        let mut sums = Sums::new(spec(PlaneKind::Offload, 1, SpreadBy::Flow));
        let in_turns = measured(1_000, 0, vec![plane(1_000, 300_000, 0)]);
        add(&mut sums, 0, measured(1_000, 0, vec![plane(1_000, 900_000, 0)]), Some(in_turns));
        let [cell] = &cells(&[sums])[..] else { panic!("one cell") };
        assert_eq!(cell.cpu_ns_per_packet, 300, "of the pass in turns");
        assert_eq!(cell.pps, 1e6, "of the pass abreast");
        assert!((cell.capacity_pps - 1e9 / 900.0).abs() < 1.0, "{}", cell.capacity_pps);
        assert_eq!((cell.generator_cpu_ns_per_packet, cell.sink_cpu_ns_per_packet), (400, 90));
        assert_eq!((cell.generator_waited, cell.limited_by.as_str()), (0.5, "planes"));
        assert_eq!((cell.cpu_ns_low, cell.pps_high), (None, None), "one run has no interval");
    }

    #[test]
    fn no_packets_received_gives_no_division_by_zero() {
        let mut sums = Sums::new(spec(PlaneKind::Batched, 2, SpreadBy::Random));
        let nothing = Measured { last_ns: 0, ..measured(0, 0, vec![plane(0, 0, 0), plane(0, 0, 0)]) };
        add(&mut sums, 0, nothing, None);
        let [cell] = &cells(&[sums])[..] else { panic!("one cell") };
        assert_eq!((cell.cpu_ns_per_packet, cell.pps, cell.capacity_pps), (0, 0.0, 0.0));
        assert_eq!((cell.share.as_slice(), cell.lost), ([0.0; 2].as_slice(), 1_000));
    }

    #[test]
    fn runs_are_compared_with_those_of_the_same_repeat() {
        let run = |kind, planes, cpu: [u64; 3]| {
            let mut sums = Sums::new(spec(kind, planes, SpreadBy::Flow));
            for (repeat, cpu_ns) in cpu.into_iter().enumerate() {
                let each = 1_000 / u64::from(planes);
                let counts = vec![plane(each, cpu_ns / u64::from(planes), 0); planes as usize];
                add(&mut sums, repeat as u32, measured(1_000, 0, counts), None);
            }
            sums
        };
        // The machine was slow in one repeat, for both cells alike.
        let all = [
            run(PlaneKind::OneByOne, 1, [2_000_000, 8_000_000, 2_000_000]),
            run(PlaneKind::Batched, 1, [1_000_000, 4_000_000, 1_000_000]),
            run(PlaneKind::Batched, 2, [1_000_000, 4_000_000, 1_000_000]),
        ];
        let cells = cells(&all);
        assert!(cells[0].cpu_to_one_by_one.is_none(), "nothing to compare");
        assert!(cells[0].pps_to_one_plane.is_none(), "nothing to compare");
        let ratio = cells[1].cpu_to_one_by_one.expect("there is a cell of one by one");
        assert_eq!((ratio.ratio, ratio.low, ratio.high), (0.5, 0.5, 0.5));
        assert_eq!(cells[2].capacity_to_one_plane.expect("there is one plane").ratio, 2.0);
        assert!(cells[2].cpu_to_one_by_one.is_none(), "one by one has no cell of two planes");
        assert!(cells[1].cpu_ns_low.is_some());
    }

    /// Each namespace has its own hash seed, so the shares of several runs cannot be summed.
    #[test]
    fn shares_of_the_hash_come_from_the_first_run() {
        for (spread, expected) in [(SpreadBy::Hash, [1.0, 0.0]), (SpreadBy::Random, [0.5, 0.5])] {
            let mut sums = Sums::new(spec(PlaneKind::Batched, 2, spread));
            add(&mut sums, 0, measured(1_000, 0, vec![plane(1_000, 1, 0), plane(0, 0, 0)]), None);
            add(&mut sums, 1, measured(1_000, 0, vec![plane(0, 0, 0), plane(1_000, 1, 0)]), None);
            assert_eq!(cells(&[sums])[0].share, expected, "{spread:?}");
        }
    }
}
