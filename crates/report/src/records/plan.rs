use fourtuple_record::{PlanMoment, PlanOther, PlanRecord, PlanResults, PlanSettings};

use crate::document::{Block, Document, Tone};
use crate::table;
use crate::table::Table;
use crate::words::{
    CommandLine, NOTHING, count, duration, maybe_count, plural, quantity, range, share, typed,
};

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
    document.push(Block::Figures(figures(settings, results)));
    over_time(&mut document, results);
    strategies(&mut document, settings, results);
    if results.by_fill.is_empty() {
        return document;
    }
    document.heading("Cost of connect() along the fill");
    let means = || results.by_fill.iter().map(|point| point.mean_ns as f64);
    if let Some(extent) = table::extent(means()) {
        let picture = format!("{} (log scale)", table::log(means(), extent));
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

/// Adds the ports in use over time.
fn over_time(document: &mut Document, results: &PlanResults) {
    let Some(last) = results.over_time.last() else { return };
    document.heading("Ports in use over time");
    const STEPS: u64 = 36;
    let at = |step: u64| (u128::from(last.at_ns) * u128::from(step) / u128::from(STEPS)) as u64;
    let in_use = (1..=STEPS).map(|step| interpolate(&results.over_time, at(step)));
    let end = match results.exhausted_after_ns {
        Some(after) => format!("none is left after {}", duration(after)),
        None => format!("at most {} of {} in use", count(last.tuples), count(results.capacity)),
    };
    let picture =
        format!("{} 0 to {}; {end}", table::linear(in_use, results.capacity as f64), duration(last.at_ns));
    document.terminal(|document| document.note(Tone::Plain, picture));
    let turn = if results.cliff_connections.is_some() { " Dotted: where connect() turns slow." } else { "" };
    let marked =
        if results.exhausted_after_ns.is_some() { " Dashed: the moment at which none is left." } else { "" };
    let caption = format!(
        "Ports in use from an empty table, TIME_WAIT included, and all ports there are.{turn}{marked}"
    );
    document.chart("plan-over-time", caption);
}

/// Returns the ports in use at a moment between two points.
fn interpolate(points: &[PlanMoment], at_ns: u64) -> f64 {
    let after = points.partition_point(|point| point.at_ns < at_ns);
    let Some(next) = points.get(after) else { return points.last().map_or(0.0, |point| point.tuples as f64) };
    let Some(before) = after.checked_sub(1).map(|index| points[index]) else { return next.tuples as f64 };
    let share = (at_ns - before.at_ns) as f64 / (next.at_ns - before.at_ns) as f64;
    before.tuples as f64 + (next.tuples as f64 - before.tuples as f64) * share
}

/// Adds the plan beside the same plan with other strategies.
fn strategies(document: &mut Document, settings: &PlanSettings, results: &PlanResults) {
    if results.others.is_empty() {
        return;
    }
    let this = PlanOther {
        strategy: settings.strategy.clone(),
        cliff_connections: results.cliff_connections,
        cliff_after_ns: results.cliff_after_ns,
        sources_needed: results.sources_needed,
        last_mean_ns: results.by_fill.last().map(|point| point.mean_ns),
    };
    let rows: Vec<&PlanOther> = std::iter::once(&this).chain(&results.others).collect();
    let never =
        |number: Option<u64>, text: fn(u64) -> String| number.map_or_else(|| "never".to_owned(), text);
    // Only a rate gives a time.
    let after = |number: Option<u64>| match (number, settings.arrival_per_s) {
        (None, None) => NOTHING.to_owned(),
        _ => never(number, duration),
    };
    let table = Table::of(&rows)
        .text("strategy", 0, |row| match row.strategy.as_str() {
            "kernel-default" => "kernel-default (an ordinary program)".to_owned(),
            name => name.to_owned(),
        })
        .number("slow at|Connections from which on connect() is slow", 3, |row| {
            never(row.cliff_connections, count)
        })
        .number("after", 4, |row| after(row.cliff_after_ns))
        .number("sources|Source addresses needed", 2, |row| count(row.sources_needed))
        .number("connect() at the end|Mean while the last sixteenth of the ports fills", 1, |row| {
            row.last_mean_ns.map_or_else(|| "unknown".to_owned(), duration)
        });
    document.table_below("Strategies", table.into());
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
        format!("{} in TIME_WAIT", duration(settings.time_wait_ns)),
        format!("{} search", settings.kernel),
        settings.strategy.clone(),
        format!("{} costs", settings.costs),
    ]
}

fn command_line(settings: &PlanSettings) -> String {
    let PlanSettings { low, high, reserved, sources, destinations, closer, kernel, strategy, costs, .. } =
        settings;
    CommandLine::new("plan")
        .words(format_args!("--range {low}-{high} --reserved {reserved} --sources {sources}"))
        .set("--destinations", destinations)
        .maybe("--rate", settings.arrival_per_s.map(|rate| format!("{rate}/s")))
        .set("--hold", typed(settings.hold_ns))
        .maybe("--time-wait", (closer == "us").then(|| typed(settings.time_wait_ns)))
        .words(format_args!("--closer {closer} --kernel {kernel} --strategy {strategy}"))
        .flag("--windows", settings.windows)
        .set("--costs", costs)
        .finish()
}

fn figures(settings: &PlanSettings, results: &PlanResults) -> Vec<(&'static str, String)> {
    let never = if settings.arrival_per_s.is_some() { "never" } else { "no rate given" };
    let after = |ns: Option<u64>| ns.map_or_else(|| never.to_owned(), |ns| format!("after {}", duration(ns)));
    vec![
        ("connections that fit at once", count(results.capacity)),
        ("connect() turns slow at", results.cliff_connections.map_or_else(|| "never".to_owned(), count)),
        ("needed at this rate", maybe_count(results.steady_tuples)),
        ("connect() turns slow", after(results.cliff_after_ns)),
        ("the ports run out", after(results.exhausted_after_ns)),
        ("source addresses needed", count(results.sources_needed)),
        ("dials that fail though ports are free", count(results.failed_dials)),
        ("connections simulated", count(results.simulated)),
    ]
}
