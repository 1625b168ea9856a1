use fourtuple_record::{LabLocksRecord, LabLocksResults, LabLocksSettings, LocksPair, LocksRatio, LocksSide};

use crate::document::{Bar, BarChart, Block, Document, Tone};
use crate::number::{count, duration, maybe, rate, share, total};
use crate::table::Table;
use crate::words::{self, CommandLine, errors, list, plural, unnamed};

pub(super) fn document(record: &LabLocksRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new(
        "What short-lived connections gain from less lock contention",
        command_line(settings),
        &results.advice,
    );
    document.facts(facts(settings));
    if results.pairs.is_empty() {
        document.push(Block::Nothing);
    }
    for pair in &results.pairs {
        one(&mut document, pair);
    }
    document.list("Limits of the lock waits", Tone::Dim, unnamed(&caveats(results)));
    document
}

fn facts(settings: &LabLocksSettings) -> Vec<String> {
    let LabLocksSettings { workers, clients, queries, sources, repeats, traced, closer, narrow, .. } =
        settings;
    let mut facts = vec![
        plural((*workers).into(), "worker"),
        plural((*clients).into(), "client"),
        format!("{} queries a trial", count(*queries)),
        format!("{} where there are several", plural((*sources).into(), "source")),
        format!("{} of trials (A B B A)", plural((*repeats).into(), "pair")),
        format!("the {closer} closes first"),
        format!("differences of {} are none", share(*narrow)),
    ];
    if *traced > 0 {
        facts.push(format!("lock waits in {} more of each side", plural((*traced).into(), "trial")));
    }
    facts
}

fn command_line(settings: &LabLocksSettings) -> String {
    let LabLocksSettings { workers, clients, queries, sources, repeats, seed, .. } = settings;
    CommandLine::new("lab locks")
        .set("--change", list(&settings.changes))
        .add(format_args!("--workers {workers} --clients {clients} --queries {queries}"))
        .add(format_args!("--sources {sources} --repeats {repeats}"))
        .flag("--no-trace", settings.traced == 0)
        .set("--seed", seed)
        .finish()
}

fn title(change: &str) -> &str {
    match change {
        "reuseport" => "One listener for all workers, or one for each",
        "sources" => "One source address, or several",
        "full-range" => {
            "The kernel's search by parity, or one of the full range, while nine of ten ports fill up"
        }
        other => other,
    }
}

/// Returns the setting in which a side differs.
fn side_name(change: &str, side: &LocksSide) -> String {
    match change {
        "reuseport" => side.policy.clone(),
        "sources" => plural(side.sources.into(), "source"),
        "full-range" => side.strategy.clone(),
        _ => format!("{}, {}, {}", side.policy, plural(side.sources.into(), "source"), side.strategy),
    }
}

fn one(document: &mut Document, pair: &LocksPair) {
    let sides = [&pair.before, &pair.after].map(|side| (side_name(&pair.change, side), side));
    document.heading(title(&pair.change));
    document.verdict(&pair.verdict, format!("{}, {}", ratio(&pair.ratio), plural(pair.pairs, "pair")));
    document.verdict(&pair.cpu_verdict, ratio(&pair.cpu_ratio));
    let charts = vec![
        bars(
            "queries per second",
            &sides,
            |side| rate(side.queries_per_s),
            |side| [side.queries_per_s, side.queries_per_s_low, side.queries_per_s_high],
        ),
        bars(
            "CPU time per query",
            &sides,
            |side| time(side.cpu_ns_per_query),
            |side| [side.cpu_ns_per_query, side.cpu_ns_per_query_low, side.cpu_ns_per_query_high],
        ),
    ];
    let caption =
        format!("Medians of {}; whiskers: 95% intervals.", plural(pair.pairs, "pair") + " of trials");
    document.push(Block::Bars { charts, caption });
    let to = |low: String, high: String| format!("{low} to {high}");
    let table = Table::of(&sides)
        .name("|Side", |(name, _)| name.clone())
        .number("queries", 0, |(_, side)| rate(side.queries_per_s))
        .number("95% interval", 3, |(_, side)| {
            to(rate(side.queries_per_s_low), rate(side.queries_per_s_high))
        })
        .number("CPU per query", 1, |(_, side)| time(side.cpu_ns_per_query))
        .number("95% interval", 4, |(_, side)| {
            to(time(side.cpu_ns_per_query_low), time(side.cpu_ns_per_query_high))
        })
        .number("lock waits per 1,000", 2, |(_, side)| maybe(side.waits_per_query, per_thousand))
        .number("wait per query", 5, |(_, side)| maybe(side.wait_ns_per_query, time))
        .page("Failed", |(_, side)| count(total(side.errors.values())));
    document.table(table);
    for (name, side) in sides {
        if !side.classes.is_empty() {
            document.note(Tone::Plain, format!("lock waits per 1,000, {name}: {}", classes(side)));
        }
        if total(side.errors.values()) > 0 {
            document.note(Tone::Bad, format!("{name} failed: {}", errors(&side.errors)));
        }
    }
}

fn bars(
    title: &'static str,
    sides: &[(String, &LocksSide); 2],
    figure: fn(&LocksSide) -> String,
    values: fn(&LocksSide) -> [f64; 3],
) -> BarChart {
    let bars = sides.iter().enumerate().map(|(series, (name, side))| {
        let ([value, low, high], figure) = (values(side), figure(side));
        let hint = format!("{name}: {figure}");
        Bar { name: name.clone(), value, interval: Some((low, high)), figure, hint, series }
    });
    BarChart { title, bars: bars.collect() }
}

fn time(ns: f64) -> String {
    duration(ns.round() as u64)
}

/// Formats `bhash 12 (31ns a query), listener 3.10 (4ns a query)`; waits per 1,000 queries.
fn classes(side: &LocksSide) -> String {
    let one = |class: &fourtuple_record::LocksClass| {
        let (waits, wait) = (per_thousand(class.waits_per_query), time(class.wait_ns_per_query));
        format!("{} {waits} ({wait} a query)", class.class)
    };
    side.classes.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn per_thousand(per_query: f64) -> String {
    match per_query * 1000.0 {
        0.0 => "0".to_owned(),
        few if few < 10.0 => format!("{few:.2}"),
        many if many < 1e6 => format!("{many:.0}"),
        many => format!("{many:.2e}"),
    }
}

/// Formats `ratio 1.058, 95% interval 1.041 to 1.074`.
fn ratio(ratio: &LocksRatio) -> String {
    let value = words::ratio(ratio.value);
    match ratio.low.zip(ratio.high) {
        Some((low, high)) => {
            format!("ratio {value}, 95% interval {} to {}", words::ratio(low), words::ratio(high))
        }
        None => format!("ratio {value}, no interval: too few pairs"),
    }
}

/// Returns the limits of the lock waits.
fn caveats(results: &LabLocksResults) -> Vec<String> {
    let untraced = results.untraced.iter().map(|why| format!("Lock waits were not counted: {why}"));
    untraced.chain(results.blind_spots.iter().map(|spot| format!("Not visible: {spot}"))).collect()
}
