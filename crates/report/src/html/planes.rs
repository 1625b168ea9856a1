use fourtuple_record::{PlanesCell, PlanesResults};
use maud::{Markup, html};

use super::{table, words};
use crate::number::{count, rate};
use crate::planes::{cpu, cpu_interval, gbit, groups, lost, part, ratio, ratio_interval, shares, tuples};

pub(super) fn section(record: usize, settings: &[String], results: &PlanesResults) -> Markup {
    let groups = groups(&results.cells);
    html! {
        section {
            (words(settings, "settings"))
            @if groups.is_empty() { p.remark { "Nothing was measured." } }
            @if has_curve(&results.cells) {
                h2 { "Throughput against the number of planes" }
                (chart(record))
            }
            @if !costs(&results.cells).is_empty() {
                h2 { "What it costs to move a packet" }
                (bars(&costs(&results.cells)))
            }
            @for group in &groups {
                h2 { (group.title) }
                (cells(&group.cells))
            }
            @if !groups.is_empty() {
                p.dim {
                    "CPU: processor time of the planes' threads a packet. Counted: packets per second of that time, summed over the "
                    "planes: what they would do with a processor each and always something to do. Reordered: packets that came "
                    "behind a later one of their inner flow."
                }
            }
            @if !results.skipped.is_empty() {
                h2 { "Not run" }
                ul { @for skipped in &results.skipped { li { strong { (skipped.plane) } ": " (skipped.why) } } }
            }
        }
    }
}

/// Whether there is more than one number of planes where all else is the same.
fn has_curve(cells: &[PlanesCell]) -> bool {
    cells.iter().any(|cell| cell.pps_to_one_plane.is_some() && cell.flows == 1 && cell.spread != "hash")
}

/// planes.js draws it.
fn chart(record: usize) -> Markup {
    html! {
        figure data-chart="planes-throughput" data-record=(record) {
            div.plot {}
            figcaption {
                "Payload that arrived, with one 4-tuple: a line for each length of packets. Dashed: counted from the CPU time of the "
                "planes, as if each had a processor for itself; generator and sink need some of those that there are. A name in the "
                "legend shows or hides its line."
            }
        }
    }
}

/// One plane without work: what moving alone costs.
fn costs(cells: &[PlanesCell]) -> Vec<&PlanesCell> {
    let mut costs: Vec<&PlanesCell> = cells
        .iter()
        .filter(|cell| cell.planes == 1 && cell.work_ns == 0 && cell.flows == 1 && cell.cpu_ns_per_packet > 0)
        .collect();
    costs.sort_by_key(|cell| cell.packet_bytes);
    let one_each = |first: &mut &PlanesCell, second: &mut &PlanesCell| {
        (&first.plane, first.packet_bytes) == (&second.plane, second.packet_bytes)
    };
    costs.dedup_by(|second, first| one_each(first, second));
    costs
}

/// Width of the picture, height of a bar with what is around it, and where bars begin, in the units of the picture.
const WIDE: f64 = 640.0;
const TALL: f64 = 26.0;
const LEFT: f64 = 170.0;
/// Room for the number behind the longest bar.
const RIGHT: f64 = 80.0;

fn bars(costs: &[&PlanesCell]) -> Markup {
    let most = costs.iter().map(|cell| cell.cpu_ns_per_packet).max().unwrap_or(1).max(1) as f64;
    let height = TALL * costs.len() as f64;
    html! {
        figure {
            svg.costs viewBox=(format!("0 0 {WIDE} {height}")) role="img" aria-label="CPU time a packet, by the way it is moved" {
                @for (number, cell) in costs.iter().enumerate() {
                    @let top = TALL * number as f64;
                    @let long = cell.cpu_ns_per_packet as f64 / most * (WIDE - LEFT - RIGHT);
                    text x=(LEFT - 8.0) y=(top + TALL * 0.65) text-anchor="end" {
                        (cell.plane) ", " (count(cell.packet_bytes.into())) " B"
                    }
                    rect x=(LEFT) y=(top + 4.0) width=(format!("{long:.1}")) height=(TALL - 8.0) rx="2"
                        fill=(format!("var(--series-{})", series(&cell.plane))) {
                        title { (cpu(cell)) " " (cpu_interval(cell)) }
                    }
                    text x=(format!("{:.1}", LEFT + long + 6.0)) y=(top + TALL * 0.65) { (cpu(cell)) }
                }
            }
            figcaption { "Processor time of one plane a packet, without work beyond moving it." }
        }
    }
}

/// A colour for each way.
fn series(plane: &str) -> usize {
    ["one-by-one", "batched", "offload", "uring"].iter().position(|name| *name == plane).unwrap_or(4)
}

fn cells(cells: &[&PlanesCell]) -> Markup {
    let head = [
        "Plane",
        "Planes",
        "Spread",
        "4-tuples",
        "CPU",
        "Over one by one",
        "Packets",
        "Gbit/s",
        "Over one plane",
        "Counted",
        "Over one plane",
        "Share each",
        "Reordered",
        "Lost",
    ];
    table(
        &head,
        &html! {
            @for cell in cells {
                tr {
                    th scope="row" { (cell.plane) }
                    td { (cell.planes) }
                    td { (cell.spread) }
                    td { (tuples(cell)) }
                    td { (cpu(cell)) (beneath(&cpu_interval(cell))) }
                    td { (ratio(cell.cpu_to_one_by_one)) (beneath(&ratio_interval(cell.cpu_to_one_by_one))) }
                    td {
                        (rate(cell.pps))
                        @if cell.limited_by == "generator" { (beneath("the generator's pace")) }
                    }
                    td { (gbit(cell, cell.pps)) }
                    td { (ratio(cell.pps_to_one_plane)) (beneath(&ratio_interval(cell.pps_to_one_plane))) }
                    td { (rate(cell.capacity_pps)) }
                    td { (ratio(cell.capacity_to_one_plane)) (beneath(&ratio_interval(cell.capacity_to_one_plane))) }
                    td { (shares(cell)) }
                    td.bad[cell.reordered > 0] { (part(cell.reordered, cell.packets)) }
                    td.bad[cell.lost > 0] { (lost(cell)) }
                }
            }
        },
    )
}

fn beneath(text: &str) -> Markup {
    html! { @if !text.is_empty() { br; span.dim { (text) } } }
}
