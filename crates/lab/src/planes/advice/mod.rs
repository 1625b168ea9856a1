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
mod tests;
