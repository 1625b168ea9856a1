//! The before and after of `lab locks` in the words that the terminal and the page share.

use fourtuple_record::{LabLocksResults, LabLocksSettings, LocksPair, LocksRatio, LocksSide};

use crate::envelope::plural;
use crate::number::{NOTHING, duration, rate, share};

/// The settings in words.
pub(crate) fn details(settings: &LabLocksSettings) -> Vec<String> {
    let LabLocksSettings {
        changes: _,
        workers,
        clients,
        queries,
        sources,
        repeats,
        traced,
        closer,
        narrow,
        seed: _,
    } = settings;
    let mut words = vec![
        plural((*workers).into(), "worker"),
        plural((*clients).into(), "client"),
        format!("{} queries a trial", crate::number::count(*queries)),
        format!("{} where there are several", plural((*sources).into(), "source")),
        format!("{} of trials (A B B A)", plural((*repeats).into(), "pair")),
        format!("the {closer} closes first"),
        format!("differences of {} are none", share(*narrow)),
    ];
    if *traced > 0 {
        words.push(format!("lock waits in {} more of each side", plural((*traced).into(), "trial")));
    }
    words
}

/// What asks for the same again.
pub(crate) fn command_line(settings: &LabLocksSettings) -> String {
    let LabLocksSettings { changes, workers, clients, queries, sources, repeats, traced, seed, .. } =
        settings;
    format!(
        "fourtuple lab locks --change {} --workers {workers} --clients {clients} --queries {queries} --sources {sources} \
         --repeats {repeats}{} --seed {seed}",
        changes.join(","),
        if *traced == 0 { " --no-trace" } else { "" },
    )
}

/// What a change is, for people.
pub(crate) fn title(change: &str) -> &str {
    match change {
        "reuseport" => "One listener for all workers, or one for each",
        "sources" => "One source address, or several",
        "full-range" => {
            "The kernel's search by parity, or one of the full range, while nine of ten ports fill up"
        }
        other => other,
    }
}

/// In what a side differs from the other.
pub(crate) fn side_name(change: &str, side: &LocksSide) -> String {
    match change {
        "reuseport" => side.policy.clone(),
        "sources" => plural(side.sources.into(), "source"),
        "full-range" => side.strategy.clone(),
        _ => format!("{}, {}, {}", side.policy, plural(side.sources.into(), "source"), side.strategy),
    }
}

/// Both sides with their names.
pub(crate) fn sides(pair: &LocksPair) -> [(String, &LocksSide); 2] {
    [&pair.before, &pair.after].map(|side| (side_name(&pair.change, side), side))
}

/// `22.1k/s`, `21.0k/s to 22.9k/s`.
pub(crate) fn rates(side: &LocksSide) -> (String, String) {
    (
        rate(side.queries_per_s),
        format!("{} to {}", rate(side.queries_per_s_low), rate(side.queries_per_s_high)),
    )
}

/// `78.1us`, `77.0us to 79.3us`.
pub(crate) fn cpu_times(side: &LocksSide) -> (String, String) {
    let time = |ns: f64| duration(ns.round() as u64);
    let interval = format!("{} to {}", time(side.cpu_ns_per_query_low), time(side.cpu_ns_per_query_high));
    (time(side.cpu_ns_per_query), interval)
}

/// Waits per 1,000 queries.
pub(crate) fn waits(side: &LocksSide) -> String {
    side.waits_per_query.map_or_else(|| NOTHING.to_owned(), per_thousand)
}

/// Time of the waits, per query.
pub(crate) fn wait_time(side: &LocksSide) -> String {
    side.wait_ns_per_query.map_or_else(|| NOTHING.to_owned(), |ns| duration(ns.round() as u64))
}

/// Where they were, for one side: `bhash 12 (31ns a query), listener 3.10 (4ns a query)`; waits per 1,000 queries.
pub(crate) fn classes(side: &LocksSide) -> Option<String> {
    let one = |class: &fourtuple_record::LocksClass| {
        let time = duration(class.wait_ns_per_query.round() as u64);
        format!("{} {} ({time} a query)", class.class, per_thousand(class.waits_per_query))
    };
    (!side.classes.is_empty()).then(|| side.classes.iter().map(one).collect::<Vec<_>>().join(", "))
}

fn per_thousand(per_query: f64) -> String {
    match per_query * 1000.0 {
        0.0 => "0".to_owned(),
        few if few < 10.0 => format!("{few:.2}"),
        many if many < 1e6 => format!("{many:.0}"),
        many => format!("{many:.2e}"),
    }
}

/// `ratio 1.058 (1.041 to 1.074)`.
pub(crate) fn ratio(ratio: &LocksRatio) -> String {
    let number = |ratio: f64| if ratio < 1e4 { format!("{ratio:.3}") } else { format!("{ratio:.3e}") };
    match (ratio.low, ratio.high) {
        (Some(low), Some(high)) => {
            format!("ratio {}, 95% interval {} to {}", number(ratio.value), number(low), number(high))
        }
        _ => format!("ratio {}, no interval: too few pairs", number(ratio.value)),
    }
}

/// What is to be known of the lock waits, before they are believed.
pub(crate) fn caveats(results: &LabLocksResults) -> Vec<String> {
    let mut lines: Vec<String> =
        results.untraced.iter().map(|why| format!("Lock waits were not counted: {why}")).collect();
    lines.extend(results.blind_spots.iter().map(|spot| format!("Not seen: {spot}")));
    lines
}
