use fourtuple_record::{CompareRecord, CompareResults, CompareSettings};

use crate::document::{Block, Document, Side as Dots, Tone};
use crate::table;
use crate::table::{Cell, Column, Table};
use crate::words::{
    CommandLine, NOTHING, count, duration, maybe, median, plural, present, quoted, rate, ratio, share, typed,
};

pub(super) fn document(record: &CompareRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("Is B faster than A?", command_line(settings), &[]);
    let sides = sides(settings, results);
    let interval = match results.low.zip(results.high) {
        Some((low, high)) => format!("{} to {}", ratio(low), ratio(high)),
        None => "none: too few trials".to_owned(),
    };
    document.facts(facts(settings));
    document.terminal(|document| {
        for side in &sides {
            document.note(Tone::Plain, format!("{}: {}", side.name, side.command));
            document.items(Tone::Plain, side.server.map(|server| ("server".to_owned(), server.to_owned())));
        }
    });
    let (ratio, trials) = (ratio(results.ratio), plural(results.trials, "trial"));
    document.verdict(&results.verdict, format!("ratio {ratio}, 95% interval {interval}, {trials}"));
    if let Some(line) = saturation(results) {
        document.note(Tone::Plain, line);
    }
    document.table(table(settings, &sides));
    if let Some((low, high)) = extent(&sides) {
        let [low, high] = [low, high].map(|value| sample(&settings.metric, value));
        let caption = format!(
            "One dot per trial, from {low} on the left to {high} on the right, in the order of the trials from top to \
             bottom; the bar is the median."
        );
        let sides = sides.into_iter().map(|side| Dots {
            name: side.name,
            samples: side.samples,
            median: side.figures.map(|(_, median, _)| median),
        });
        document.push(Block::Dots { sides: sides.collect(), caption });
    }
    document
}

fn facts(settings: &CompareSettings) -> Vec<String> {
    let metric = metric_name(&settings.metric, &settings.a);
    let narrow = format!("until within {} each way", share(settings.narrow));
    let Some(time) = settings.for_ns else {
        let seed = format!("seed {}", settings.seed);
        return vec![metric, "saved records, not interleaved".to_owned(), seed, narrow];
    };
    let shared = settings.fresh_namespace == Some(false);
    present([
        Some(metric),
        Some("A B B A, B A A B".to_owned()),
        Some(format!("for {} at most", duration(time))),
        settings.trials.map(|pairs| format!("{} at most", plural(pairs, "pair"))),
        Some(format!("{} of each side as warm-up", plural(settings.warmup.into(), "trial"))),
        settings.pinned.then(|| "client and server pinned to different CPUs".to_owned()),
        shared
            .then(|| "no namespace per trial: TIME_WAIT sockets of one trial remain in the next".to_owned()),
        Some(narrow),
    ])
}

/// Returns the name of the metric. Times are of operations in `load` and of connect() in `lab`; the file names of
/// saved records do not show which.
fn metric_name(metric: &str, command: &str) -> String {
    let (of, per) = match command.split_whitespace().next() {
        Some("load") => (" of an operation", "operation"),
        Some("lab") => (" of connect()", "dial"),
        _ => ("", "operation"),
    };
    match metric {
        "mean" => format!("mean{of}"),
        "p50" => format!("median{of}"),
        "p99" => format!("p99{of}"),
        "p999" => format!("p99.9{of}"),
        "cpu" => format!("CPU time per {per}"),
        other => other.to_owned(),
    }
}

fn command_line(settings: &CompareSettings) -> String {
    let CompareSettings { a, b, metric, server_a, server_b, .. } = settings;
    let line = CommandLine::new("compare").set("--metric", metric);
    let percent = format!("{}%", settings.narrow * 100.0);
    let Some(time) = settings.for_ns else {
        return line.set("--narrow", percent).set("--seed", settings.seed).set(a, b).finish();
    };
    let mut line = line
        .set("--for", typed(time))
        .set("--narrow", percent)
        .maybe("--trials", settings.trials)
        .set("--warmup", settings.warmup);
    if let (Some(server_a), Some(server_b)) = (server_a, server_b) {
        line = line
            .set("--server", quoted(server_a))
            .maybe("--server-b", Some(server_b).filter(|server| *server != server_a).map(|name| quoted(name)))
            .maybe("--server-wait", settings.server_wait_ns.map(typed))
            .flag("--pin", settings.pinned);
    }
    line.words("--").set(&quoted(a), quoted(b)).finish()
}

/// One side: its command and the results of its trials.
struct Side<'a> {
    name: &'static str,
    command: &'a str,
    /// Server that was started for each trial.
    server: Option<&'a str>,
    samples: Vec<f64>,
    /// Minimum, median, maximum; `None` without samples.
    figures: Option<(f64, f64, f64)>,
}

/// Returns A and B without samples that are not finite.
fn sides<'a>(settings: &'a CompareSettings, results: &CompareResults) -> [Side<'a>; 2] {
    let side = |name, command, server: &'a Option<String>, samples: &[f64]| {
        let samples: Vec<f64> = samples.iter().copied().filter(|sample| sample.is_finite()).collect();
        let all = || samples.iter().copied();
        let figures = median(all(), f64::total_cmp, f64::midpoint).map(|median| {
            (all().fold(f64::INFINITY, f64::min), median, all().fold(f64::NEG_INFINITY, f64::max))
        });
        Side { name, command, server: server.as_deref(), samples, figures }
    };
    [
        side("A", settings.a.as_str(), &settings.server_a, &results.samples_a),
        side("B", settings.b.as_str(), &settings.server_b, &results.samples_b),
    ]
}

/// Returns the minimum and the maximum of both sides.
fn extent(sides: &[Side<'_>; 2]) -> Option<(f64, f64)> {
    let figures = || sides.iter().filter_map(|side| side.figures);
    let low = figures().map(|(low, ..)| low).reduce(f64::min)?;
    let high = figures().map(|(.., high)| high).reduce(f64::max)?;
    Some((low, high))
}

/// Formats a sample in the unit of its metric.
fn sample(metric: &str, value: f64) -> String {
    match metric {
        "rate" => rate(value),
        _ if value >= 0.0 => duration(value.round() as u64),
        _ => NOTHING.to_owned(),
    }
}

fn table(settings: &CompareSettings, sides: &[Side<'_>; 2]) -> Table {
    let shown = |value: Option<f64>| maybe(value, |value| sample(&settings.metric, value));
    let extent = extent(sides);
    Table::of(sides)
        .name("|Side", |side| side.name)
        .page_text("Command", |side| {
            let server = side.server.map(|server| format!("server: {server}"));
            Cell::from(side.command).note(server.unwrap_or_default())
        })
        .number("trials", 1, |side| count(side.samples.len() as u64))
        .number("median", 0, |side| shown(side.figures.map(|(_, median, _)| median)))
        .number("lowest", 2, |side| shown(side.figures.map(|(low, ..)| low)))
        .number("highest", 2, |side| shown(side.figures.map(|(.., high)| high)))
        .terminal(Column::text("how the trials lie", 3), |side| {
            extent.map_or_else(String::new, |extent| bins(&side.samples, extent))
        })
        .into()
}

/// The columns of the sparkline.
const BINS: usize = 24;

/// Draws the number of samples in each part of the extent.
fn bins(samples: &[f64], extent: (f64, f64)) -> String {
    let mut bins = [0_u32; BINS];
    for value in samples {
        bins[((table::position(*value, extent) * BINS as f64) as usize).min(BINS - 1)] += 1;
    }
    let highest = bins.iter().copied().max().unwrap_or(0);
    table::linear(bins.iter().map(|&bin| f64::from(bin)), f64::from(highest))
}

/// Warns that the load generator was the bottleneck; `None` if it never was.
fn saturation(results: &CompareResults) -> Option<String> {
    let of = match results.client_saturated {
        0 => return None,
        some if some == results.trials => "all trials".to_owned(),
        some => format!("{} of {} trials", count(some), count(results.trials)),
    };
    Some(format!(
        "the client was busy all the time in {of}: the result is the client's limit with this server"
    ))
}
