//! Samples of `lab planes`: hand-written figures of kernel 6.18 over veth.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::record;

fn cell(plane: &str, planes: u32, packet_bytes: u32, work_ns: u64, cpu_ns: u64) -> PlanesCell {
    let pps = 1e9 / cpu_ns as f64 * f64::from(planes.min(2)) * 0.8;
    let ratio = |ratio: f64| Some(PlanesRatio { ratio, low: ratio * 0.97, high: ratio * 1.03 });
    PlanesCell {
        plane: plane.into(),
        planes,
        spread: "flow".into(),
        flows: 1,
        inner_flows: 120,
        packet_bytes,
        mtu: if packet_bytes > 1472 { 3000 } else { 1500 },
        work_ns,
        repeats: 3,
        packets: 60_000,
        lost: 0,
        dropped: BTreeMap::new(),
        reordered: 0,
        share: vec![1.0 / f64::from(planes); planes as usize],
        cpu_ns_per_packet: cpu_ns,
        cpu_ns_low: Some(cpu_ns - 50),
        cpu_ns_high: Some(cpu_ns + 60),
        pps,
        pps_low: Some(pps * 0.95),
        pps_high: Some(pps * 1.05),
        capacity_pps: 1e9 / cpu_ns as f64 * f64::from(planes),
        generator_waited: 0.5,
        limited_by: "planes".into(),
        generator_cpu_ns_per_packet: 1_200,
        sink_cpu_ns_per_packet: 90,
        cpu_to_one_by_one: if plane == "one-by-one" { None } else { ratio(cpu_ns as f64 / 2927.0) },
        capacity_to_one_plane: if planes == 1 { None } else { ratio(f64::from(planes) * 0.97) },
        pps_to_one_plane: if planes == 1 { None } else { ratio(1.38) },
    }
}

fn settings() -> PlanesSettings {
    PlanesSettings {
        every_combination: false,
        plane: vec!["one-by-one".into(), "batched".into(), "offload".into()],
        planes: vec![1, 4, 2],
        bytes: vec![64, 1472, 2972],
        spread: vec!["flow".into(), "hash".into(), "random".into()],
        flows: vec![1],
        work_ns: vec![0, 6_000],
        packets: 20_000,
        repeats: 3,
        over: "veth".into(),
        seed: 1,
    }
}

/// Returns the full figure, the cost per packet, and one 4-tuple with the selectors `hash` and `random`.
pub(crate) fn planes() -> PlanesRecord {
    let mut cells = vec![
        cell("one-by-one", 1, 64, 0, 2927),
        cell("batched", 1, 64, 0, 1887),
        PlanesCell { limited_by: "generator".into(), ..cell("offload", 1, 64, 0, 572) },
    ];
    let hash = PlanesCell {
        spread: "hash".into(),
        share: vec![0.0, 1.0, 0.0, 0.0],
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
        ..cell("batched", 4, 64, 0, 1900)
    };
    let random = PlanesCell {
        spread: "random".into(),
        reordered: 8_412,
        lost: 12,
        dropped: BTreeMap::from([("overflow".into(), 12)]),
        ..hash.clone()
    };
    cells.extend([hash, random]);
    for bytes in [1472, 2972] {
        cells.extend([1, 2, 4].map(|planes| cell("one-by-one", planes, bytes, 6_000, 10_000)));
    }
    let results = PlanesResults {
        cells,
        skipped: vec![PlanesSkipped { plane: "uring".into(), why: "io_uring_setup(): EPERM".into() }],
        planes_help_above_ns: Some(2_100),
        advice: vec!["Planes help above 2.1 us a packet here".into()],
    };
    record("lab planes", settings(), results)
}

/// Returns one run of one cell without a counterpart: every field that may be null is null.
pub(crate) fn bare_planes() -> PlanesRecord {
    let mut record = planes();
    let cell = PlanesCell {
        cpu_ns_low: None,
        cpu_ns_high: None,
        pps_low: None,
        pps_high: None,
        cpu_to_one_by_one: None,
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
        lost: 1,
        dropped: BTreeMap::from([("overflow".into(), 1)]),
        ..record.results.cells[0].clone()
    };
    (record.results.cells, record.results.planes_help_above_ns) = (vec![cell], None);
    record
}

/// Returns a run interrupted before its first cell.
pub(crate) fn no_planes() -> PlanesRecord {
    let settings = PlanesSettings { every_combination: true, over: "loopback".into(), ..settings() };
    let mut odd = cell("<script>alert(1)</script>", 1, 64, 0, 100);
    odd.share = Vec::new();
    (odd.packets, odd.pps, odd.cpu_ns_low) = (0, 0.0, None);
    let results = PlanesResults {
        cells: vec![odd],
        skipped: Vec::new(),
        planes_help_above_ns: None,
        advice: Vec::new(),
    };
    record("lab planes", settings, results)
}
