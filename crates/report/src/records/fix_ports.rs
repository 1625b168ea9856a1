use fourtuple_record::{FixNamespace, FixPortsRecord, FixPortsResults, FixPortsSettings};

use crate::document::{Block, Document, Tone};
use crate::number::{NOTHING, count, duration, maybe_duration, quantity, rate, share};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, typed, word};

/// The maximum number of tuples on a terminal.
const ROWS: usize = 12;

pub(super) fn document(record: &FixPortsRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let title = if settings.dry_run { "What fix ports would change" } else { "What fix ports changed" };
    let mut document = Document::new(title, command_line(settings), &[]);
    document.page_heading("All connects");
    document.facts(facts(settings, results));
    document.facts(results.namespaces.iter().map(namespace).collect());
    document.push(Block::Figures(figures(settings, results)));
    if results.saved_ns.is_some() && !settings.dry_run {
        document.explain(
            "The time saved is an estimate: while half of a range or more is in use, the kernel's search passes over the other half \
             of the ports, at a cost per port that was measured in a small table before the start; the time of the draws is taken \
             off.",
        );
    }
    let reasons = results
        .left
        .iter()
        .map(|(reason, number)| (reason.clone(), format!("{} ({})", count(*number), meaning(reason))));
    document.list("Left alone", Tone::Plain, reasons);
    if results.tuples.is_empty() {
        document.note(Tone::Plain, "no connects whose source address was known");
    } else {
        document.heading("By source and destination");
        document.table(tuples(results));
    }
    if results.tuples_left_out > 0 {
        document.note(Tone::Dim, format!("{} not listed", plural(results.tuples_left_out, "tuple")));
    }
    document
}

fn facts(settings: &FixPortsSettings, results: &FixPortsResults) -> Vec<String> {
    let mut facts = vec![format!("cgroup {}", settings.cgroup)];
    facts.extend(settings.to.as_ref().map(|to| format!("connects to {to}")));
    facts.extend(settings.source.as_ref().map(|source| format!("more sources from {source}")));
    facts.push(format!("past {} of a range", share(settings.past)));
    facts.push(format!("attached for {}", duration(results.elapsed_ns)));
    facts
}

/// `ports 20000-39999, 19,990 usable`.
fn namespace(namespace: &FixNamespace) -> String {
    let FixNamespace { cookie, low, high, usable } = *namespace;
    format!("network namespace {cookie}: ports {low}-{high}, {} usable", count(usable.into()))
}

fn command_line(settings: &FixPortsSettings) -> String {
    CommandLine::new("fix ports")
        .set("--cgroup", word(&settings.cgroup))
        .maybe("--source", settings.source.as_ref().map(|source| word(source)))
        .maybe("--to", settings.to.as_ref().map(|to| word(to)))
        .set("--past", format!("{}%", settings.past * 100.0))
        .maybe("--for", settings.for_ns.map(typed))
        .flag("--dry-run", settings.dry_run)
        .finish()
}

/// Events that did not occur are omitted.
fn figures(settings: &FixPortsSettings, results: &FixPortsResults) -> Vec<(&'static str, String)> {
    let mut figures =
        vec![("connects", count(results.connects)), ("connects per second", rate(results.connects_per_s))];
    if settings.dry_run {
        figures.push(("connects that would get a drawn port", count(results.would_draw)));
        return figures;
    }
    figures.push(("ports drawn", count(results.drawn)));
    figures.push(("ports looked up per draw", results.probes_per_draw.map_or(NOTHING.to_owned(), quantity)));
    figures.push(("time of a draw", maybe_duration(results.hook_ns_per_draw)));
    figures.push(("time saved, estimated", maybe_duration(results.saved_ns)));
    let events = [
        ("connects with an additional source", results.spread),
        ("connects without a free port, left to the kernel", results.fallbacks),
        ("ports found in order", results.in_order),
        ("ports of a TIME_WAIT socket", results.time_wait_used),
        ("ports that bind() refused", results.refused),
    ];
    figures.extend(
        events.into_iter().filter(|(_, number)| *number > 0).map(|(name, number)| (name, count(number))),
    );
    figures
}

/// Describes a reason for which a connect was left alone.
pub(super) fn meaning(reason: &str) -> &'static str {
    match reason {
        "below" => "the tuple used less of its range",
        "udp" => "UDP",
        "protocol" => "neither TCP nor UDP",
        "bound-port" => "the program had bound a port",
        "bound-address" => "the program had bound an address",
        "device" => "SO_BINDTODEVICE",
        "mark" => "SO_MARK",
        "own-range" => "IP_LOCAL_PORT_RANGE",
        "destination" => "unspecified or link-local destination",
        "filter" => "another destination than --to",
        "source-unknown" => "the source address was not known yet",
        "no-route" => "no route",
        "namespace-unknown" => "the network namespace was not known",
        "table-full" => "a table was full",
        "none-free" => "no port was free",
        _ => "unknown reason",
    }
}

fn tuples(results: &FixPortsResults) -> Table {
    Table::of(&results.tuples)
        .text("source", 1, |tuple| tuple.source.clone())
        .text("destination", 0, |tuple| tuple.destination.clone())
        .number("connects", 0, |tuple| count(tuple.connects))
        .number("drawn", 0, |tuple| count(tuple.drawn))
        .number("fallbacks", 2, |tuple| Cell::bad_count(tuple.fallbacks))
        .number("in use|Share of the range in use", 1, |tuple| share(tuple.share))
        .limit(ROWS, usize::MAX, "tuple")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_repeats_the_settings() {
        let settings = FixPortsSettings {
            cgroup: "/sys/fs/cgroup/a b".into(),
            source: None,
            to: Some("0.0.0.0/0:*".into()),
            past: 0.5,
            for_ns: Some(2_000_000_000),
            dry_run: true,
        };
        assert_eq!(
            command_line(&settings),
            "fourtuple fix ports --cgroup '/sys/fs/cgroup/a b' --to '0.0.0.0/0:*' --past 50% --for 2s --dry-run"
        );
    }
}
