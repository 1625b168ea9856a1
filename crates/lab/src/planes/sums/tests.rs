use std::time::Duration;

use fourtuple_forward::{Drop, PlaneCounts, PlaneKind};

use super::*;
use crate::planes::generator::SendCounts;
use crate::planes::sink::SinkCounts;

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
    assert!(
        cells[0].cpu_to_one_by_one.is_none() && cells[0].pps_to_one_plane.is_none(),
        "nothing to compare"
    );
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
