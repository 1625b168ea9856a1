use fourtuple_record::{LabLocksRecord, LabLocksResults, LabLocksSettings, LocksPair, LocksRatio, LocksSide};

use crate::document::{Bar, BarChart, Block, Document, Tone};
use crate::table::Table;
use crate::words::{
    self, CommandLine, count, duration, errors, list, maybe, plural, present, rate, share, total, unnamed,
};

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
    let traces = || format!("lock waits in {} more of each side", plural((*traced).into(), "trial"));
    present([
        Some(plural((*workers).into(), "worker")),
        Some(plural((*clients).into(), "client")),
        Some(format!("{} a trial", plural(*queries, "query"))),
        Some(format!("{} where there are several", plural((*sources).into(), "source"))),
        Some(format!("{} of trials (A B B A)", plural((*repeats).into(), "pair"))),
        Some(format!("the {closer} closes first")),
        Some(format!("differences of {} are none", share(*narrow))),
        (*traced > 0).then(traces),
    ])
}

fn command_line(settings: &LabLocksSettings) -> String {
    let LabLocksSettings { workers, clients, queries, sources, repeats, seed, .. } = settings;
    CommandLine::new("lab locks")
        .set("--change", list(&settings.changes))
        .words(format_args!("--workers {workers} --clients {clients} --queries {queries}"))
        .words(format_args!("--sources {sources} --repeats {repeats}"))
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
    let charts = [QUERIES, CPU].map(|measure| bars(&measure, &sides)).into();
    let caption =
        format!("Medians of {}; whiskers: 95% intervals.", plural(pair.pairs, "pair") + " of trials");
    document.push(Block::Bars { charts, caption });
    let table = Table::of(&sides)
        .name("|Side", |(name, _)| name.clone())
        .number("queries", 0, |(_, side)| QUERIES.value(side))
        .number("95% interval", 3, |(_, side)| QUERIES.interval(side))
        .number("CPU per query", 1, |(_, side)| CPU.value(side))
        .number("95% interval", 4, |(_, side)| CPU.interval(side))
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

/// A figure of each side, as a chart and as columns.
struct Measure {
    title: &'static str,
    words: fn(f64) -> String,
    /// The value, and the ends of its interval.
    of: fn(&LocksSide) -> [f64; 3],
}

const QUERIES: Measure = Measure {
    title: "queries per second",
    words: rate,
    of: |side| [side.queries_per_s, side.queries_per_s_low, side.queries_per_s_high],
};

const CPU: Measure = Measure {
    title: "CPU time per query",
    words: time,
    of: |side| [side.cpu_ns_per_query, side.cpu_ns_per_query_low, side.cpu_ns_per_query_high],
};

impl Measure {
    fn value(&self, side: &LocksSide) -> String {
        (self.words)((self.of)(side)[0])
    }

    fn interval(&self, side: &LocksSide) -> String {
        let [_, low, high] = (self.of)(side).map(self.words);
        format!("{low} to {high}")
    }
}

fn bars(measure: &Measure, sides: &[(String, &LocksSide); 2]) -> BarChart {
    let bars = sides.iter().enumerate().map(|(series, (name, side))| {
        let ([value, low, high], figure) = ((measure.of)(side), measure.value(side));
        let hint = format!("{name}: {figure}");
        Bar { name: name.clone(), value, interval: Some((low, high)), figure, hint, series }
    });
    BarChart { title: measure.title, bars: bars.collect() }
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
