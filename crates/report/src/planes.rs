//! What `lab planes` found, in the words that the terminal and the page share.

use fourtuple_record::{PlanesCell, PlanesRatio, PlanesSettings};

use crate::envelope::{plural, typed};
use crate::number::{NOTHING, count, duration, share};

pub(crate) const QUESTION: &str = "What more data planes give, and what it costs to move a packet";

/// What was asked, in words.
pub(crate) fn details(settings: &PlanesSettings) -> Vec<String> {
    let PlanesSettings { every_combination, packets, repeats, over, seed, .. } = settings;
    vec![
        if *every_combination { "every combination of what was asked for" } else { "a choice of cells" }
            .to_owned(),
        format!("{} a run", plural(*packets, "packet")),
        if *repeats == 1 { "one run each".to_owned() } else { format!("medians of {repeats} runs each") },
        format!("over {over}"),
        "planes pinned".to_owned(),
        format!("seed {seed}"),
    ]
}

/// What asks for the same again.
pub(crate) fn command_line(settings: &PlanesSettings) -> String {
    let PlanesSettings {
        every_combination,
        plane,
        planes,
        bytes,
        spread,
        flows,
        work_ns,
        packets,
        repeats,
        over,
        seed,
    } = settings;
    let numbers = |list: &[u32]| list.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let work: Vec<String> = work_ns.iter().map(|ns| typed(*ns)).collect();
    let lists = if *every_combination {
        format!(
            " --plane {} --planes {} --bytes {} --spread {} --flows {} --work {}",
            plane.join(","),
            numbers(planes),
            numbers(bytes),
            spread.join(","),
            numbers(flows),
            work.join(","),
        )
    } else {
        String::new()
    };
    format!("fourtuple lab planes{lists} --packets {packets} --repeats {repeats} --over {over} --seed {seed}")
}

/// Cells that are compared with each other: of one length and one work for a packet.
pub(crate) struct Group<'a> {
    pub(crate) title: String,
    pub(crate) cells: Vec<&'a PlanesCell>,
}

/// The cells in groups, these and the cells in the order of the record.
pub(crate) fn groups(cells: &[PlanesCell]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for cell in cells {
        let like = |other: &&PlanesCell| {
            (other.packet_bytes, other.mtu, other.work_ns) == (cell.packet_bytes, cell.mtu, cell.work_ns)
        };
        match groups.iter_mut().find(|group| group.cells.first().is_some_and(like)) {
            Some(group) => group.cells.push(cell),
            None => groups.push(Group { title: title(cell), cells: vec![cell] }),
        }
    }
    groups
}

fn title(cell: &PlanesCell) -> String {
    let work = match cell.work_ns {
        0 => "no work".to_owned(),
        ns => format!("{} of work a packet", duration(ns)),
    };
    format!("{} B, MTU {}, {work}", count(cell.packet_bytes.into()), count(cell.mtu.into()))
}

/// `one 4-tuple`, `64 4-tuples`.
pub(crate) fn tuples(cell: &PlanesCell) -> String {
    if cell.flows == 1 { "one 4-tuple".to_owned() } else { format!("{} 4-tuples", count(cell.flows.into())) }
}

/// `1,887 ns`.
pub(crate) fn cpu(cell: &PlanesCell) -> String {
    format!("{} ns", count(cell.cpu_ns_per_packet))
}

/// `1,800 to 1,950`; empty without an interval.
pub(crate) fn cpu_interval(cell: &PlanesCell) -> String {
    let ends = cell.cpu_ns_low.zip(cell.cpu_ns_high);
    ends.map_or(String::new(), |(low, high)| format!("{} to {}", count(low), count(high)))
}

/// `0.20x`.
pub(crate) fn ratio(ratio: Option<PlanesRatio>) -> String {
    crate::number::factor(ratio.map(|ratio| ratio.ratio))
}

/// `0.18 to 0.22`; empty without one.
pub(crate) fn ratio_interval(ratio: Option<PlanesRatio>) -> String {
    ratio.map_or(String::new(), |ratio| format!("{:.2} to {:.2}", ratio.low, ratio.high))
}

/// Gbit/s of payload at a rate of packets.
pub(crate) fn gbit(cell: &PlanesCell, pps: f64) -> String {
    format!("{:.2}", pps * f64::from(cell.packet_bytes) * 8.0 / 1e9)
}

/// How many planes had something, and the least and the greatest part: `4 of 4, 24.9% to 25.1%`.
pub(crate) fn shares(cell: &PlanesCell) -> String {
    let busy = cell.share.iter().filter(|share| **share > 0.0).count();
    let ends = cell
        .share
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(low, high), part| (low.min(*part), high.max(*part)));
    match cell.share.len() {
        0 => NOTHING.to_owned(),
        1 => "all".to_owned(),
        planes => format!("{busy} of {planes} busy, {} to {}", share(ends.0), share(ends.1)),
    }
}

/// How many of the packets, and their part: `8,412 (14%)`.
pub(crate) fn part(number: u64, of: u64) -> String {
    if number == 0 || of == 0 {
        return count(number);
    }
    format!("{} ({})", count(number), share((number as f64 / of as f64 * 1e4).round() / 1e4))
}

/// What was lost, and where.
pub(crate) fn lost(cell: &PlanesCell) -> String {
    let reasons = crate::forward::reasons(&cell.dropped);
    match reasons.as_str() {
        "" => part(cell.lost, cell.packets),
        _ => format!("{}: {reasons}", part(cell.lost, cell.packets)),
    }
}
