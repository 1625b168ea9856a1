//! A trace of locks in the words that the terminal and the page share.

use fourtuple_record::{LockClass, LockPath, TraceLocksResults, TraceLocksSettings};

use crate::envelope::{plural, quoted, typed};
use crate::number::{NOTHING, count, duration, quantity, share};

/// Whose waits, in words.
pub(crate) fn details(settings: &TraceLocksSettings) -> Vec<String> {
    let TraceLocksSettings { process, name, cgroup, for_ns } = settings;
    let mut words = Vec::new();
    words.extend(process.map(|process| format!("process {process}")));
    words.extend(name.as_ref().map(|name| format!("threads called {name}")));
    words.extend(cgroup.as_ref().map(|cgroup| format!("cgroup {cgroup}")));
    if words.is_empty() {
        words.push("every TCP connection of this host".to_owned());
    }
    words.extend(for_ns.map(|time| format!("for {} at most", duration(time))));
    words
}

/// What asks for the same again.
pub(crate) fn command_line(settings: &TraceLocksSettings) -> String {
    let TraceLocksSettings { process, name, cgroup, for_ns } = settings;
    let option =
        |flag: &str, value: Option<String>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
    format!(
        "fourtuple trace locks{}{}{}{}",
        option("--pid", process.map(|process| process.to_string())),
        option("--comm", name.as_deref().map(quoted)),
        option("--cgroup", cgroup.as_deref().map(quoted)),
        option("--for", for_ns.map(typed)),
    )
}

/// How it was seen, and for how long.
pub(crate) fn facts(results: &TraceLocksResults) -> Vec<String> {
    let tier = match results.tier.as_str() {
        "tp_btf" => "tier tp_btf (stable tracepoints, by BTF)".to_owned(),
        other => format!("tier {other}"),
    };
    vec![tier, format!("traced for {}", duration(results.elapsed_ns))]
}

/// The sums, with their names.
pub(crate) fn figures(results: &TraceLocksResults) -> Vec<(&'static str, String)> {
    let each = |value: Option<f64>, words: fn(f64) -> String| value.map_or(NOTHING.to_owned(), words);
    vec![
        ("connections", count(results.connections)),
        ("waits for locks of TCP", count(results.waits)),
        ("time of waiting", duration(results.wait_ns)),
        ("waits per connection", each(results.waits_per_connection, few)),
        (
            "time of waiting per connection",
            each(results.wait_ns_per_connection, |ns| duration(ns.round() as u64)),
        ),
        ("share of all CPU time spent spinning", percent(results.cpu_share)),
        (
            "waits for other spinlocks",
            format!("{} ({})", count(results.elsewhere_waits), duration(results.elsewhere_wait_ns)),
        ),
        ("lost", count(results.lost)),
    ]
}

/// Most are far below one.
fn few(value: f64) -> String {
    match value {
        value if value > 0.0 && value < 0.1 => format!("{value:.4}"),
        value => quantity(value),
    }
}

fn percent(part: f64) -> String {
    match part {
        part if part > 0.0 && part < 0.0001 => "below 0.01%".to_owned(),
        part => share(part),
    }
}

/// A class's part of all time of waiting.
pub(crate) fn part(class: &LockClass, results: &TraceLocksResults) -> String {
    share(class.wait_ns as f64 / results.wait_ns.max(1) as f64)
}

/// How many of the functions of a path say where it is.
const FUNCTIONS: usize = 4;

/// The functions next to the lock, the one that waits first.
pub(crate) fn way(path: &LockPath) -> String {
    match path.frames.len() {
        0 => "unknown".to_owned(),
        _ => path.frames.iter().take(FUNCTIONS).map(String::as_str).collect::<Vec<_>>().join(" < "),
    }
}

/// What stands below a table that was cut.
pub(crate) fn more(shown: usize, all: usize, noun: &str) -> Option<String> {
    (all > shown).then(|| format!("and {} more, which the JSON has", plural((all - shown) as u64, noun)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_in_particular_is_everybody() {
        let settings = TraceLocksSettings { process: None, name: None, cgroup: None, for_ns: None };
        assert_eq!(details(&settings), ["every TCP connection of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace locks");
    }

    #[test]
    fn small_numbers_are_not_nothing() {
        assert_eq!([few(0.0), few(0.00444), few(1.5)], ["0.00", "0.0044", "1.50"]);
        assert_eq!([percent(0.0), percent(0.00001), percent(0.25)], ["0%", "below 0.01%", "25%"]);
    }
}
