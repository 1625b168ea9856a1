use fourtuple_record::{PlanesCell, PlanesResults, format_duration};

/// Two planes help if they forward at least this many times the packets of one plane.
const HELPS: f64 = 1.1;

/// Returns advice from the results of all cells.
pub fn advice(results: &PlanesResults) -> Vec<String> {
    let cells = &results.cells;
    let mut lines = Vec::new();
    lines.extend(planes(results));
    lines.extend(offload(cells));
    lines.extend(uring(cells));
    lines.extend(one_tuple(cells));
    let paced = cells.iter().filter(|cell| cell.limited_by == "generator").count();
    if paced > 0 {
        lines.push(format!(
            "In {paced} of {} cells the generator set the pace: their packets per second are its own. CPU per packet and the \
             capacity counted from it are the planes'.",
            cells.len()
        ));
    }
    for skipped in &results.skipped {
        lines.push(format!("{} was not run: {}.", skipped.plane, skipped.why));
    }
    lines
}

/// Returns pairs of cells with one plane and with two, all other settings equal, sorted by the work per packet. Prefers the
/// plane `batched`: `one-by-one` hides much of the cost of a second plane, and `offload` most of its possible gain.
fn pairs(cells: &[PlanesCell]) -> Vec<(&PlanesCell, &PlanesCell)> {
    let like = |cell: &PlanesCell, other: &PlanesCell| {
        (&cell.plane, cell.flows, cell.packet_bytes, &cell.spread)
            == (&other.plane, other.flows, other.packet_bytes, &other.spread)
    };
    let pairs_like = |sample: &PlanesCell| {
        let mut pairs: Vec<_> = cells
            .iter()
            .filter(|two| two.planes == 2 && like(two, sample))
            .filter_map(|two| {
                let is_one =
                    |one: &&PlanesCell| one.planes == 1 && like(one, two) && one.work_ns == two.work_ns;
                Some((cells.iter().find(is_one)?, two))
            })
            .collect();
        pairs.sort_by_key(|(_, two)| two.work_ns);
        pairs
    };
    let spread = |cell: &&PlanesCell| cell.planes == 2 && cell.spread != "hash";
    let found = cells.iter().filter(spread).map(pairs_like);
    // The pairs that cover the most works per packet; if several do, the pairs of the batched plane, or the first.
    found
        .reduce(|best, other| {
            let rank = |pairs: &Vec<(&PlanesCell, &PlanesCell)>| {
                (pairs.len(), pairs.first().is_some_and(|(_, two)| two.plane == "batched"))
            };
            if rank(&other) > rank(&best) { other } else { best }
        })
        .unwrap_or_default()
}

fn gain(two: &PlanesCell) -> f64 {
    two.pps_to_one_plane.map_or(0.0, |ratio| ratio.ratio)
}

/// Returns whether the pairs cover at least two different works.
fn are_compared(pairs: &[(&PlanesCell, &PlanesCell)]) -> bool {
    pairs.windows(2).any(|works| works[0].1.work_ns != works[1].1.work_ns)
}

/// Returns whether the gain is large enough, and unlikely to be chance.
fn helps(two: &PlanesCell) -> bool {
    two.pps_to_one_plane.is_some_and(|ratio| ratio.ratio >= HELPS && ratio.low > 1.0)
}

/// Returns the work per packet from which two planes help, at this work and at every longer work, interpolated between the
/// measured works; `None` if two planes do not help, or if only one work was measured.
pub(super) fn planes_help_above(cells: &[PlanesCell]) -> Option<u64> {
    let pairs = pairs(cells);
    if !are_compared(&pairs) {
        return None;
    }
    let first = pairs.iter().rposition(|(_, two)| !helps(two)).map_or(0, |last| last + 1);
    let (_, two) = pairs.get(first)?;
    let before = first.checked_sub(1).map(|before| pairs[before].1).filter(|before| gain(before) < HELPS);
    Some(match before {
        Some(before) => {
            let part = (HELPS - gain(before)) / (gain(two) - gain(before));
            before.work_ns + ((two.work_ns - before.work_ns) as f64 * part).round() as u64
        }
        None => two.work_ns,
    })
}

fn planes(results: &PlanesResults) -> Option<String> {
    let pairs = pairs(&results.cells);
    if !are_compared(&pairs) {
        return None;
    }
    let (_, longest) = pairs.last()?;
    let measured: Vec<String> = pairs
        .iter()
        .map(|(_, two)| {
            let counted = two.capacity_to_one_plane.map_or(0.0, |ratio| ratio.ratio);
            format!("{:.2} times with {} (counted by CPU time: {counted:.2})", gain(two), work(two.work_ns))
        })
        .collect();
    let verdict = match results.planes_help_above_ns {
        Some(0) => "Planes help here with any work for a packet".to_owned(),
        Some(above) => format!("Planes help above {} a packet here", format_duration(above)),
        None => format!("Planes did not help here with up to {} a packet", format_duration(longest.work_ns)),
    };
    Some(format!(
        "{verdict}: two {} planes forwarded as many {} B packets as one {}. Generator and sink share the processors with them; \
         what is counted is without these.",
        longest.plane,
        longest.packet_bytes,
        measured.join(", "),
    ))
}

fn offload(cells: &[PlanesCell]) -> Option<String> {
    let of = |kind: &'static str| {
        cells.iter().filter(move |cell| cell.plane == kind && cell.work_ns == 0 && cell.planes == 1)
    };
    let offload: Vec<&PlanesCell> = of("offload").collect();
    let words: Vec<String> = offload
        .iter()
        .filter_map(|cell| {
            let ratio = cell.cpu_to_one_by_one?.ratio;
            let slow = of("one-by-one").find(|slow| slow.packet_bytes == cell.packet_bytes)?;
            Some(format!(
                "{} instead of {} a packet of {} B, {:.0}%",
                format_duration(cell.cpu_ns_per_packet),
                format_duration(slow.cpu_ns_per_packet),
                cell.packet_bytes,
                ratio * 100.0
            ))
        })
        .collect();
    (!words.is_empty()).then(|| {
        format!(
            "Offload first (--plane offload): moving packets takes it {} of the processor time of one by one.",
            words.join("; ")
        )
    })
}

/// Compares `uring` with `offload`, which differs only in how packets are received.
fn uring(cells: &[PlanesCell]) -> Option<String> {
    let of = |kind: &'static str| {
        cells.iter().filter(move |cell| cell.plane == kind && cell.work_ns == 0 && cell.planes == 1)
    };
    let words: Vec<String> = of("uring")
        .filter_map(|cell| {
            let like = of("offload").find(|like| like.packet_bytes == cell.packet_bytes)?;
            let (here, there) =
                (format_duration(cell.cpu_ns_per_packet), format_duration(like.cpu_ns_per_packet));
            Some(format!("{here} instead of {there} a packet of {} B", cell.packet_bytes))
        })
        .collect();
    (!words.is_empty()).then(|| {
        format!("io_uring receives (--plane uring) where offload calls recvmmsg: {}.", words.join("; "))
    })
}

/// Names the planes that are busy when all packets have one 4-tuple.
fn one_tuple(cells: &[PlanesCell]) -> Option<String> {
    let most =
        cells.iter().filter(|cell| cell.flows == 1 && cell.planes > 1).map(|cell| cell.planes).max()?;
    let of = |spread: &'static str| {
        cells.iter().find(move |cell| cell.flows == 1 && cell.planes == most && cell.spread == spread)
    };
    let words = |cell: &PlanesCell| {
        let busy = cell.share.iter().filter(|share| **share > 0.0).count();
        let of_all = if cell.packets == 0 { 0.0 } else { cell.reordered as f64 / cell.packets as f64 };
        let order = if cell.reordered == 0 {
            "all in order".to_owned()
        } else {
            format!("{:.1}% reordered", of_all * 100.0)
        };
        format!("{} keeps {busy} of {} planes busy, {order}", cell.spread, cell.planes)
    };
    let known: Vec<String> =
        ["hash", "random", "flow", "cpu"].into_iter().filter_map(of).map(words).collect();
    (known.len() > 1).then(|| format!("With one 4-tuple {}.", known.join("; ")))
}

fn work(ns: u64) -> String {
    if ns == 0 { "no work".to_owned() } else { format!("{} of work", format_duration(ns)) }
}

#[cfg(test)]
mod tests {
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

    /// Rows of a name, the cells, the work above which planes help, and parts of the advice.
    #[test]
    fn planes_help_above_a_work() {
        let batched = |gains: &[(u64, f64)]| {
            gains.iter().flat_map(|(work_ns, gain)| both("batched", *work_ns, *gain)).collect::<Vec<_>>()
        };
        let one_by_one = [both("one-by-one", 0, 1.5), both("one-by-one", 6_000, 1.9)].concat();
        let mut by_chance = batched(&[(0, 1.6), (6_000, 1.8)]);
        by_chance[1].pps_to_one_plane.as_mut().unwrap().low = 0.99;
        let between: &[&str] = &[
            "Planes help above 3.00us a packet here: two batched planes",
            "0.90 times with no work",
            "1.30 times with 6.00us of work",
        ];
        let any: &[&str] = &["Planes help here with any work"];
        let never: &[&str] = &["Planes did not help here with up to 1.50us"];
        for (name, cells, above, parts) in [
            // A gain of 1.1 lies halfway between 0.9 and 1.3.
            ("between two", batched(&[(6_000, 1.3), (0, 0.9), (20_000, 1.9)]), Some(3_000), between),
            ("with any work", batched(&[(0, 1.2), (6_000, 1.8)]), Some(0), any),
            ("with none", batched(&[(0, 0.9), (1_500, 1.05)]), None, never),
            ("the gain fades", batched(&[(0, 1.6), (6_000, 0.9), (20_000, 1.0)]), None, &["Planes"]),
            (
                "the gain is back",
                batched(&[(0, 1.6), (6_000, 0.9), (20_000, 1.3)]),
                Some(13_000),
                &["Planes"],
            ),
            ("the first gain may be chance", by_chance, Some(6_000), &["Planes"]),
            ("one work, a loss", batched(&[(6_000, 0.9)]), None, &[]),
            ("one work, a gain", batched(&[(6_000, 1.9)]), None, &[]),
            ("works of different cells", vec![cell("batched", 1, 0), cell("batched", 2, 6_000)], None, &[]),
            ("nothing", Vec::new(), None, &[]),
            (
                "batched before one by one",
                [one_by_one, batched(&[(0, 0.9), (6_000, 1.3)])].concat(),
                Some(3_000),
                between,
            ),
        ] {
            let results = results(cells);
            assert_eq!(results.planes_help_above_ns, above, "{name}");
            let lines = advice(&results);
            assert_eq!(lines.len(), usize::from(!parts.is_empty()), "{name}: {lines:?}");
            for part in parts {
                assert!(lines[0].contains(part), "{name}: {lines:?}");
            }
            assert!(lines.iter().all(|line| line.starts_with(parts[0])), "{name}: {lines:?}");
        }
    }

    #[test]
    fn offload_advice_needs_a_one_by_one_cell_to_compare() {
        let slow = PlanesCell { cpu_ns_per_packet: 3_000, ..cell("one-by-one", 1, 0) };
        let fast =
            PlanesCell { cpu_ns_per_packet: 300, cpu_to_one_by_one: ratio(0.1), ..cell("offload", 1, 0) };
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
        let expected = "With one 4-tuple hash keeps 1 of 4 planes busy, all in order; random keeps 4 of 4 planes busy, 14.0% \
                        reordered; flow keeps 4 of 4 planes busy, all in order.";
        assert_eq!(advice(&results(cells)), [expected]);
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
}
