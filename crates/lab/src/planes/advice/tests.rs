use std::collections::BTreeMap;

use fourtuple_record::{PlanesRatio, PlanesSkipped};

use super::*;

fn ratio(ratio: f64) -> Option<PlanesRatio> {
    Some(PlanesRatio { ratio, low: ratio, high: ratio })
}

/// Returns a cell with values only in the fields that advice reads.
fn cell(plane: &str, planes: u32, work_ns: u64) -> PlanesCell {
    PlanesCell {
        plane: plane.to_owned(),
        planes,
        spread: "flow".to_owned(),
        flows: 1,
        inner_flows: 120,
        packet_bytes: 64,
        mtu: 1500,
        work_ns,
        repeats: 3,
        packets: 1_000,
        lost: 0,
        dropped: BTreeMap::new(),
        reordered: 0,
        share: vec![1.0 / f64::from(planes); planes as usize],
        cpu_ns_per_packet: 1_000,
        cpu_ns_low: None,
        cpu_ns_high: None,
        pps: 1e6,
        pps_low: None,
        pps_high: None,
        capacity_pps: 1e6,
        generator_waited: 0.5,
        limited_by: "planes".to_owned(),
        generator_cpu_ns_per_packet: 0,
        sink_cpu_ns_per_packet: 0,
        cpu_to_one_by_one: None,
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
    }
}

/// Returns cells with one plane and with two planes at this work, where two planes forward `gain` times as many packets.
fn both(plane: &str, work_ns: u64, gain: f64) -> [PlanesCell; 2] {
    let two = PlanesCell {
        pps_to_one_plane: ratio(gain),
        capacity_to_one_plane: ratio(gain),
        ..cell(plane, 2, work_ns)
    };
    [cell(plane, 1, work_ns), two]
}

fn results(cells: Vec<PlanesCell>) -> PlanesResults {
    let planes_help_above_ns = planes_help_above(&cells);
    PlanesResults { cells, skipped: Vec::new(), planes_help_above_ns, advice: Vec::new() }
}

#[test]
fn planes_help_from_between_two_works_on() {
    // A gain of 1.1 lies halfway between 0.9 and 1.3.
    let cells = [both("batched", 6_000, 1.3), both("batched", 0, 0.9), both("batched", 20_000, 1.9)].concat();
    let results = results(cells);
    assert_eq!(results.planes_help_above_ns, Some(3_000));
    let [line] = &advice(&results)[..] else { panic!("{:?}", advice(&results)) };
    assert!(line.starts_with("Planes help above 3.00us a packet here: two batched planes"), "{line}");
    assert!(
        line.contains("0.90 times with no work") && line.contains("1.30 times with 6.00us of work"),
        "{line}"
    );
}

#[test]
fn planes_help_with_any_work_or_with_none_of_those_measured() {
    let any = results([both("batched", 0, 1.2), both("batched", 6_000, 1.8)].concat());
    assert_eq!(any.planes_help_above_ns, Some(0));
    assert!(advice(&any)[0].starts_with("Planes help here with any work"), "{:?}", advice(&any));
    let never = results([both("batched", 0, 0.9), both("batched", 1_500, 1.05)].concat());
    assert_eq!(never.planes_help_above_ns, None);
    assert!(
        advice(&never)[0].starts_with("Planes did not help here with up to 1.50us"),
        "{:?}",
        advice(&never)
    );
}

#[test]
fn fading_and_insignificant_gains_do_not_count() {
    let fades = results(
        [both("batched", 0, 1.6), both("batched", 6_000, 0.9), both("batched", 20_000, 1.0)].concat(),
    );
    assert_eq!(fades.planes_help_above_ns, None);
    let comes_back =
        [both("batched", 0, 1.6), both("batched", 6_000, 0.9), both("batched", 20_000, 1.3)].concat();
    assert_eq!(results(comes_back).planes_help_above_ns, Some(13_000));
    let mut by_chance = [both("batched", 0, 1.6), both("batched", 6_000, 1.8)].concat();
    for cell in &mut by_chance {
        if let (0, Some(ratio)) = (cell.work_ns, &mut cell.pps_to_one_plane) {
            ratio.low = 0.99;
        }
    }
    assert_eq!(results(by_chance).planes_help_above_ns, Some(6_000));
}

#[test]
fn one_work_alone_gives_no_advice() {
    for gain in [0.9, 1.9] {
        let one = results(both("batched", 6_000, gain).to_vec());
        assert_eq!(one.planes_help_above_ns, None);
        assert!(advice(&one).is_empty(), "{:?}", advice(&one));
    }
    // Two works that belong to different cells give no threshold.
    let apart = results(vec![cell("batched", 1, 0), cell("batched", 2, 6_000)]);
    assert_eq!(apart.planes_help_above_ns, None);
    assert!(advice(&apart).is_empty());
    assert!(advice(&results(Vec::new())).is_empty());
}

#[test]
fn advice_prefers_batched_cells_with_the_most_works() {
    let one_by_one = [both("one-by-one", 0, 1.5), both("one-by-one", 6_000, 1.9)].concat();
    let batched = [both("batched", 0, 0.9), both("batched", 6_000, 1.3)].concat();
    let results = results([one_by_one, batched].concat());
    assert_eq!(results.planes_help_above_ns, Some(3_000));
}

#[test]
fn offload_advice_needs_a_one_by_one_cell_to_compare() {
    let slow = PlanesCell { cpu_ns_per_packet: 3_000, ..cell("one-by-one", 1, 0) };
    let fast = PlanesCell { cpu_ns_per_packet: 300, cpu_to_one_by_one: ratio(0.1), ..cell("offload", 1, 0) };
    let lines = advice(&results(vec![slow, fast.clone()]));
    assert!(lines[0].contains("300ns instead of 3.00us a packet of 64 B, 10%"), "{lines:?}");
    assert!(advice(&results(vec![PlanesCell { cpu_to_one_by_one: None, ..fast }])).is_empty());
}

#[test]
fn busy_planes_with_one_tuple_are_named() {
    let by = |spread: &str, share: &[f64], reordered| PlanesCell {
        spread: spread.to_owned(),
        share: share.to_vec(),
        reordered,
        ..cell("batched", 4, 0)
    };
    let cells = vec![
        by("hash", &[0.0, 0.0, 1.0, 0.0], 0),
        by("random", &[0.25; 4], 140),
        by("flow", &[0.25; 4], 0),
        // A cell with many 4-tuples does not count.
        PlanesCell { flows: 64, ..by("cpu", &[0.5, 0.5, 0.0, 0.0], 7) },
    ];
    assert_eq!(
        advice(&results(cells)),
        [
            "With one 4-tuple hash keeps 1 of 4 planes busy, all in order; random keeps 4 of 4 planes busy, 14.0% reordered; flow \
          keeps 4 of 4 planes busy, all in order."
        ]
    );
}

#[test]
fn generator_limits_and_skipped_planes_are_named() {
    let paced = PlanesCell { limited_by: "generator".to_owned(), ..cell("batched", 1, 0) };
    let mut results = results(vec![paced, cell("batched", 1, 6_000)]);
    results.skipped.push(PlanesSkipped { plane: "uring".to_owned(), why: "no io_uring".to_owned() });
    let lines = advice(&results);
    assert!(lines[0].starts_with("In 1 of 2 cells the generator set the pace"), "{lines:?}");
    assert_eq!(lines[1], "uring was not run: no io_uring.");
}
