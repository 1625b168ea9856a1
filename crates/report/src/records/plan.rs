use fourtuple_record::{PlanRecord, PlanResults, PlanSettings};

use crate::document::{Block, Document, Tone};
use crate::number::{count, duration, maybe_count, quantity, share};
use crate::spark;
use crate::table::Table;
use crate::words::{CommandLine, plural, range, typed};

pub(super) fn document(record: &PlanRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new(
        "How many connections fit, and what they cost",
        command_line(settings),
        &results.advice,
    );
    document.computed = true;
    document.page_heading("Key figures");
    document.facts(facts(settings));
    document.push(Block::Figures(figures(results)));
    if results.by_fill.is_empty() {
        return document;
    }
    document.heading("Cost of connect() along the fill");
    let means = || results.by_fill.iter().map(|point| point.mean_ns as f64);
    if let Some(extent) = spark::extent(means()) {
        let picture = format!("{} (log scale)", spark::log(means(), extent));
        document.terminal(|document| document.note(Tone::Plain, picture));
    }
    let cliff =
        if results.cliff_connections.is_some() { " Dashed: where the search turns slow." } else { "" };
    document.chart(
        "plan",
        format!(
            "Predicted mean time in connect() of a dial while the ports of one source and destination fill up.{cliff}"
        ),
    );
    let table = Table::of(&results.by_fill)
        .number("fill", 0, |point| share(point.fill))
        .number("probes|Ports looked at per dial", 1, |point| quantity(point.probes))
        .number("mean", 0, |point| duration(point.mean_ns));
    document.table(table.folded("The same as a table", false));
    document
}

fn facts(settings: &PlanSettings) -> Vec<String> {
    let closer = if settings.closer == "us" { "the client closes first" } else { "the server closes first" };
    let arrival = settings.arrival_per_s.map(|rate| format!("{} new connections a second", quantity(rate)));
    vec![
        range(settings.low, settings.high),
        format!("{} reserved", count(settings.reserved.into())),
        plural(settings.sources, "source"),
        plural(settings.destinations, "destination"),
        arrival.unwrap_or_else(|| "no rate given".to_owned()),
        format!("held for {}", duration(settings.hold_ns)),
        closer.to_owned(),
        format!("{} search", settings.kernel),
        settings.strategy.clone(),
        format!("{} costs", settings.costs),
    ]
}

fn command_line(settings: &PlanSettings) -> String {
    let PlanSettings { low, high, reserved, sources, destinations, closer, kernel, strategy, costs, .. } =
        settings;
    CommandLine::new("plan")
        .add(format_args!("--range {low}-{high} --reserved {reserved} --sources {sources}"))
        .set("--destinations", destinations)
        .maybe("--rate", settings.arrival_per_s.map(|rate| format!("{rate}/s")))
        .set("--hold", typed(settings.hold_ns))
        .add(format_args!("--closer {closer} --kernel {kernel} --strategy {strategy}"))
        .flag("--windows", settings.windows)
        .set("--costs", costs)
        .finish()
}

fn figures(results: &PlanResults) -> Vec<(&'static str, String)> {
    let after =
        |ns: Option<u64>| ns.map_or_else(|| "never".to_owned(), |ns| format!("after {}", duration(ns)));
    vec![
        ("connections that fit at once", count(results.capacity)),
        ("connect() turns slow at", results.cliff_connections.map_or_else(|| "no cliff".to_owned(), count)),
        ("in use at this churn, in balance", maybe_count(results.steady_tuples)),
        ("the cliff is reached", after(results.cliff_after_ns)),
        ("the ports run out", after(results.exhausted_after_ns)),
        ("source addresses needed", count(results.sources_needed)),
        ("dials that fail though ports are free", count(results.failed_dials)),
        ("connections simulated", count(results.simulated)),
    ]
}
