use fourtuple_record::{Distribution, LockPath, TraceLocksRecord, TraceLocksResults, TraceLocksSettings};

use crate::document::{Block, Document, Tone};
use crate::number::{NOTHING, count, duration, maybe_duration, quantity, share};
use crate::records::trace::{Filters, tier};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, unnamed};

/// The maximum number of paths and of ports on a terminal.
const ROWS: usize = 12;

pub(super) fn document(record: &TraceLocksRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("Which TCP locks were contended", command_line(settings), &[]);
    document.page_heading("All waits");
    document.facts(facts(settings));
    document.facts(vec![tier(&results.tier), format!("traced for {}", duration(results.elapsed_ns))]);
    document.push(Block::Figures(figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    document.heading("By class");
    if results.classes.is_empty() {
        document.note(Tone::Good, "no lock waits");
    } else {
        document.table(classes(results));
    }
    let remedies = results.classes.iter().map(|class| (class.class.clone(), class.remedy.clone()));
    document.list("Remedies", Tone::Plain, remedies);
    document.table_below("By call path, innermost function first", paths(results));
    document.table_below("Buckets of local ports", ports(results));
    document.list("What this host cannot show", Tone::Dim, unnamed(&results.blind_spots));
    document
}

fn filters(settings: &TraceLocksSettings) -> Filters<'_> {
    Filters::new(settings.process, &settings.name, &settings.netns, &settings.cgroup, settings.for_ns)
}

fn facts(settings: &TraceLocksSettings) -> Vec<String> {
    filters(settings).facts([], "every TCP connection of this host")
}

fn command_line(settings: &TraceLocksSettings) -> String {
    filters(settings).add(CommandLine::new("trace locks"), |line| line).finish()
}

fn figures(results: &TraceLocksResults) -> Vec<(&'static str, String)> {
    let per_connection = results.waits_per_connection.map_or(NOTHING.to_owned(), few);
    let time = results.wait_ns_per_connection.map(|ns| ns.round() as u64);
    vec![
        ("connections", count(results.connections)),
        ("waits for TCP locks", count(results.waits)),
        ("time in waits", duration(results.wait_ns)),
        ("waits per connection", per_connection),
        ("time in waits per connection", maybe_duration(time)),
        ("share of all CPU time spent spinning", percent(results.cpu_share)),
        (
            "waits for other spinlocks",
            format!("{} ({})", count(results.elsewhere_waits), duration(results.elsewhere_wait_ns)),
        ),
        ("lost", count(results.lost)),
    ]
}

/// Formats a number that is usually far below one.
fn few(value: f64) -> String {
    if value > 0.0 && value < 0.1 { format!("{value:.4}") } else { quantity(value) }
}

fn percent(part: f64) -> String {
    if part > 0.0 && part < 0.0001 { "below 0.01%".to_owned() } else { share(part) }
}

fn classes(results: &TraceLocksResults) -> Table {
    let all = results.wait_ns.max(1) as f64;
    let time = |times: Option<Distribution>, of: fn(Distribution) -> u64| maybe_duration(times.map(of));
    Table::of(&results.classes)
        .text("class", 0, |class| class.class.clone())
        .number("waits", 0, |class| count(class.waits))
        .number("time", 0, |class| duration(class.wait_ns))
        .number("part", 1, |class| share(class.wait_ns as f64 / all))
        .number("asleep", 2, |class| count(class.sleeps))
        .page("Time asleep", |class| duration(class.sleep_ns))
        .number("locks", 5, |class| count(class.locks))
        .number("p50", 4, |class| time(class.times_ns, |times| times.p50))
        .number("p99", 3, |class| time(class.times_ns, |times| times.p99))
        .number("max", 6, |class| time(class.times_ns, |times| times.max))
        .into()
}

fn paths(results: &TraceLocksResults) -> Table {
    Table::of(&results.paths)
        .text("class", 0, |path| path.class.clone())
        .text("|How", 2, |path| path.kind.clone())
        .number("waits", 0, |path| count(path.waits))
        .number("time", 0, |path| duration(path.wait_ns))
        .number("max", 1, |path| duration(path.max_ns))
        .text("path", 0, call_path)
        .limit(ROWS, usize::MAX, "path")
        .into()
}

/// The maximum number of functions of a path on a terminal.
const FUNCTIONS: usize = 4;

/// Returns the functions of the path, innermost first.
fn call_path(path: &LockPath) -> Cell {
    if path.frames.is_empty() {
        return "unknown".into();
    }
    let first = &path.frames[..path.frames.len().min(FUNCTIONS)];
    Cell::from(first.join(" < ")).on_page(path.frames.join(" < "))
}

fn ports(results: &TraceLocksResults) -> Table {
    Table::of(&results.ports)
        .number("port", 0, |port| port.port.to_string())
        .number("waits", 0, |port| count(port.waits))
        .number("time", 0, |port| duration(port.wait_ns))
        .number("max", 1, |port| duration(port.max_ns))
        .limit(ROWS, usize::MAX, "port")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_filter_means_every_connection_of_the_host() {
        let settings =
            TraceLocksSettings { process: None, name: None, netns: None, cgroup: None, for_ns: None };
        assert_eq!(facts(&settings), ["every TCP connection of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace locks");
    }

    #[test]
    fn small_numbers_keep_their_digits() {
        assert_eq!([few(0.0), few(0.00444), few(1.5)], ["0.00", "0.0044", "1.50"]);
        assert_eq!([percent(0.0), percent(0.00001), percent(0.25)], ["0%", "below 0.01%", "25%"]);
    }
}
