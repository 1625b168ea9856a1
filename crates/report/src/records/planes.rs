use fourtuple_record::{PlanesCell, PlanesRatio, PlanesRecord, PlanesSettings};

use crate::document::{Bar, BarChart, Block, Document, Tone};
use crate::table::{Cell, Column, Table};
use crate::words::{
    CommandLine, NOTHING, count, duration, factor, grouped, interval, list, plural, rate, reasons, repeats,
    share, typed,
};

pub(super) fn document(record: &PlanesRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new(
        "How throughput scales with data planes, and the cost per packet",
        command_line(settings),
        &results.advice,
    );
    document.facts(facts(settings));
    let groups = grouped(&results.cells, |cell| (cell.packet_bytes, cell.mtu, cell.work_ns));
    if groups.is_empty() {
        document.push(Block::Nothing);
    }
    if has_curve(&results.cells) {
        document.page_heading("Throughput against the number of planes");
        document.chart(
            "planes-throughput",
            "Payload that arrived, with one 4-tuple: a line for each length of packets. Counted (dashed): not measured, but \
             computed from the CPU time of the planes, as if each had a processor for itself; generator and sink need some \
             of the processors. A name in the legend shows or hides its line.",
        );
    }
    let costs = costs(&results.cells);
    if !costs.is_empty() {
        document.page(|document| {
            document.heading("Cost per packet");
            document.push(bars(&costs));
        });
    }
    for group in &groups {
        document.heading(title(group[0]));
        document.table(table(group));
    }
    if !groups.is_empty() {
        document.note(
            Tone::Dim,
            "CPU: CPU time of the planes per packet; vs 1x1: relative to the plane one-by-one. Counted: packets per second of that \
             time, summed over the planes, as if each had a processor for itself and always had work; x1: over one plane. \
             Reordered: packets that arrived after a later packet of their inner flow.",
        );
    }
    let lossy = results.cells.iter().filter(|cell| cell.lost > 0 || !cell.dropped.is_empty());
    let cell_name =
        |cell: &PlanesCell| format!("{} x{}, {}, {}", cell.plane, cell.planes, cell.spread, tuples(cell));
    document.items(Tone::Bad, lossy.map(|cell| (cell_name(cell), format!("lost {}", lost(cell)))));
    let skipped = results.skipped.iter().map(|skipped| (skipped.plane.clone(), skipped.why.clone()));
    document.list("Not run", Tone::Plain, skipped);
    document
}

fn facts(settings: &PlanesSettings) -> Vec<String> {
    let every = settings.every_combination;
    vec![
        if every { "every combination of the lists" } else { "a choice of cells" }.to_owned(),
        format!("{} a run", plural(settings.packets, "packet")),
        repeats(settings.repeats),
        format!("over {}", settings.over),
        "planes pinned".to_owned(),
        format!("seed {}", settings.seed),
    ]
}

fn command_line(settings: &PlanesSettings) -> String {
    let mut line = CommandLine::new("lab planes");
    if settings.every_combination {
        let work: Vec<String> = settings.work_ns.iter().copied().map(typed).collect();
        line = line
            .set("--plane", list(&settings.plane))
            .set("--planes", list(&settings.planes))
            .set("--bytes", list(&settings.bytes))
            .set("--spread", list(&settings.spread))
            .set("--flows", list(&settings.flows))
            .set("--work", list(&work));
    }
    let PlanesSettings { packets, repeats, over, seed, .. } = settings;
    line.words(format_args!("--packets {packets} --repeats {repeats} --over {over} --seed {seed}")).finish()
}

fn title(cell: &PlanesCell) -> String {
    let work = match cell.work_ns {
        0 => "no work".to_owned(),
        ns => format!("{} of work a packet", duration(ns)),
    };
    format!("{} B, MTU {}, {work}", count(cell.packet_bytes.into()), count(cell.mtu.into()))
}

/// Returns whether cells differ in the number of planes with otherwise equal settings.
fn has_curve(cells: &[PlanesCell]) -> bool {
    cells.iter().any(|cell| cell.pps_to_one_plane.is_some() && cell.flows == 1 && cell.spread != "hash")
}

/// Returns the cells with one plane and no work: the cost of moving a packet.
fn costs(cells: &[PlanesCell]) -> Vec<&PlanesCell> {
    let moves = |cell: &&PlanesCell| {
        cell.planes == 1 && cell.work_ns == 0 && cell.flows == 1 && cell.cpu_ns_per_packet > 0
    };
    let mut costs: Vec<&PlanesCell> = cells.iter().filter(moves).collect();
    costs.sort_by_key(|cell| cell.packet_bytes);
    costs
        .dedup_by(|second, first| (&first.plane, first.packet_bytes) == (&second.plane, second.packet_bytes));
    costs
}

fn bars(costs: &[&PlanesCell]) -> Block {
    let bar = |cell: &&PlanesCell| Bar {
        name: format!("{}, {} B", cell.plane, count(cell.packet_bytes.into())),
        value: cell.cpu_ns_per_packet as f64,
        interval: cell.cpu_ns_low.zip(cell.cpu_ns_high).map(|(low, high)| (low as f64, high as f64)),
        figure: duration(cell.cpu_ns_per_packet),
        hint: format!(
            "{} {}",
            duration(cell.cpu_ns_per_packet),
            interval(cell.cpu_ns_low, cell.cpu_ns_high, " to ")
        ),
        series: series(&cell.plane),
    };
    let chart = BarChart { title: "CPU time per packet", bars: costs.iter().map(bar).collect() };
    let caption =
        "Processor time of one plane per packet, without work beyond moving it; whiskers: 95% intervals.";
    Block::Bars { charts: vec![chart], caption: caption.to_owned() }
}

/// Returns the colour of an I/O method.
fn series(plane: &str) -> usize {
    ["one-by-one", "batched", "offload", "uring"].iter().position(|name| *name == plane).unwrap_or(4)
}

fn table(cells: &[&PlanesCell]) -> Table {
    let ratio = |ratio: Option<PlanesRatio>| {
        let interval = ratio.map(|ratio| format!("{:.2} to {:.2}", ratio.low, ratio.high));
        Cell::from(factor(ratio.map(|ratio| ratio.ratio))).note(interval.unwrap_or_default())
    };
    Table::of(cells)
        .name("plane", |cell| cell.plane.clone())
        .number("planes", 0, |cell| cell.planes.to_string())
        .text("spread", 1, |cell| cell.spread.clone())
        .number("4-tuples", 4, |cell| Cell::count(cell.flows.into()).on_page(tuples(cell)))
        .number("CPU", 0, |cell| {
            Cell::toned(duration(cell.cpu_ns_per_packet), Tone::Strong).note(interval(
                cell.cpu_ns_low,
                cell.cpu_ns_high,
                " to ",
            ))
        })
        .terminal(Column::number("(95%)", 7), |cell| {
            Cell::toned(interval(cell.cpu_ns_low, cell.cpu_ns_high, ".."), Tone::Dim)
        })
        .number("vs 1x1|Over one by one", 2, |cell| ratio(cell.cpu_to_one_by_one))
        .number("packets", 0, |cell| match cell.limited_by.as_str() {
            "generator" => Cell::from(format!("{}*", rate(cell.pps))).note("* the generator's pace"),
            _ => rate(cell.pps).into(),
        })
        .number("Gbit/s", 6, |cell| format!("{:.2}", cell.pps * f64::from(cell.packet_bytes) * 8.0 / 1e9))
        .number("x1|Over one plane", 3, |cell| ratio(cell.pps_to_one_plane))
        .number("counted", 1, |cell| rate(cell.capacity_pps))
        .number("x1 |Over one plane", 3, |cell| ratio(cell.capacity_to_one_plane))
        .text("share|Share each", 5, |cell| shares(cell))
        .number("reordered", 4, |cell| {
            Cell::toned(part(cell.reordered, cell.packets), Tone::bad_if(cell.reordered > 0))
        })
        .into()
}

/// Formats `one 4-tuple`, `64 4-tuples`.
fn tuples(cell: &PlanesCell) -> String {
    if cell.flows == 1 { "one 4-tuple".to_owned() } else { format!("{} 4-tuples", count(cell.flows.into())) }
}

/// Describes the distribution over the planes: `4 of 4 busy, 24.9% to 25.1%`.
fn shares(cell: &PlanesCell) -> String {
    let busy = cell.share.iter().filter(|share| **share > 0.0).count();
    let least = cell.share.iter().copied().fold(f64::INFINITY, f64::min);
    let most = cell.share.iter().copied().fold(0.0, f64::max);
    match cell.share.len() {
        0 => NOTHING.to_owned(),
        1 => "all".to_owned(),
        planes => format!("{busy} of {planes} busy, {} to {}", share(least), share(most)),
    }
}

/// Formats a number of packets with its share: `8,412 (14%)`.
fn part(number: u64, of: u64) -> String {
    if number == 0 || of == 0 {
        return count(number);
    }
    format!("{} ({})", count(number), share((number as f64 / of as f64 * 1e4).round() / 1e4))
}

/// Formats the number of lost packets, with reasons.
fn lost(cell: &PlanesCell) -> String {
    match reasons(&cell.dropped).as_str() {
        "" => part(cell.lost, cell.packets),
        reasons => format!("{}: {reasons}", part(cell.lost, cell.packets)),
    }
}
