use fourtuple_record::{RunRecord, RunResults, RunSettings};

use crate::document::{Block, Document, Tone};
use crate::number::{NOTHING, count, duration, maybe_duration, quantity};
use crate::words::{CommandLine, plural, word};

pub(super) fn document(record: &RunRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("What run did", command_line(settings), &[]);
    document.page_heading("All connects");
    document.facts(facts(results));
    document.push(Block::Figures(figures(results)));
    if results.avoided.is_some_and(|avoided| avoided > 0) {
        document.explain(
            "EADDRNOTAVAIL avoided: connects of sockets bound to port 0 in quarters of a second in which bind() to port 0 failed, \
             because every port was in use.",
        );
    }
    let bound: u64 =
        ["bound-address", "bound-port"].iter().filter_map(|reason| results.left.get(*reason)).sum();
    if bound > 0 && results.way == "cgroup" {
        document.explain(format!(
            "{} of sockets that the program had bound, which the way cgroup leaves alone: `fourtuple run --via bound` covers them.",
            plural(bound, "connect")
        ));
    }
    let reasons = results
        .left
        .iter()
        .map(|(reason, number)| (reason.clone(), format!("{} ({})", count(*number), meaning(reason))));
    document.list("Left alone", Tone::Plain, reasons);
    document
}

fn facts(results: &RunResults) -> Vec<String> {
    let mut facts = vec![format!("via {}", results.way)];
    facts.extend(results.passed_over.iter().map(|(way, reason)| format!("not {way}: {reason}")));
    facts.push(format!("ran for {}", duration(results.elapsed_ns)));
    facts.push(match (results.exit_code, results.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "exit code unknown".to_owned(),
    });
    facts
}

fn command_line(settings: &RunSettings) -> String {
    let options = CommandLine::new("run").maybe("--via", settings.via.as_ref().map(|via| word(via))).finish();
    let words: Vec<String> = settings.command.iter().map(|text| word(text)).collect();
    format!("{options} -- {}", words.join(" "))
}

/// A figure that the way does not see is shown as unknown.
fn figures(results: &RunResults) -> Vec<(&'static str, String)> {
    let maybe = |number: Option<u64>| number.map_or(NOTHING.to_owned(), count);
    let parity = match (results.even, results.odd) {
        (Some(even), Some(odd)) => format!("{} / {}", count(even), count(odd)),
        _ => NOTHING.to_owned(),
    };
    let changed = if results.ports.is_some() { "ports drawn" } else { "with a search of the whole range" };
    let mut figures = vec![
        ("connects", count(results.connects)),
        (changed, count(results.changed)),
        ("time in connect()", maybe_duration(results.connect_ns)),
        (
            "mean time in connect()",
            maybe_duration(results.connect_ns.and_then(|time| time.checked_div(results.changed))),
        ),
        ("even / odd source ports", parity),
        ("EADDRNOTAVAIL", maybe(results.unavailable)),
        ("EADDRNOTAVAIL avoided", maybe(results.avoided)),
    ];
    let events = [
        ("bound first, port left to connect()", results.bound),
        ("bound first, port asked for before", results.named),
    ];
    figures.extend(
        events
            .into_iter()
            .filter_map(|(name, number)| Some((name, count(number.filter(|number| *number > 0)?)))),
    );
    if let (Some(calls), Some(held)) = (results.calls, results.held_ns) {
        figures.push(("calls that the supervisor answered", count(calls)));
        figures.push(("mean time of an answer", maybe_duration(held.checked_div(calls))));
    }
    if let Some(ports) = &results.ports {
        figures
            .push(("ports looked up per draw", ports.probes_per_draw.map_or(NOTHING.to_owned(), quantity)));
        figures.push(("time of a draw", maybe_duration(ports.hook_ns_per_draw)));
    }
    figures
}

/// Describes a reason for which a connect was left alone.
fn meaning(reason: &str) -> &'static str {
    match reason {
        "no-permission" => "the supervisor may not duplicate the socket",
        other => super::fix_ports::meaning(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_repeats_the_program() {
        let settings = RunSettings {
            command: vec!["curl".into(), "-s".into(), "http://a b/".into()],
            via: Some("supervise".into()),
        };
        assert_eq!(command_line(&settings), "fourtuple run --via supervise -- curl -s 'http://a b/'");
        let bare = RunSettings { command: vec!["true".into()], via: None };
        assert_eq!(command_line(&bare), "fourtuple run -- true");
    }
}
