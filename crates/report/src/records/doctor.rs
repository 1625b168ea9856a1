use fourtuple_record::snapshot::{Listener, Owner, Part, Snapshot, Tuple};
use fourtuple_record::{
    Advice, DoctorRecord, DoctorResults, DoctorSettings, Finding, Proof, Severity, Unchecked,
};

use crate::document::{Block, Document, Tone};
use crate::number::{NOTHING, count};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, typed, word};

pub(super) fn document(record: &DoctorRecord) -> Document {
    let results = &record.results;
    let command_line = command_line(&record.settings);
    let mut document = Document::untitled("What is wrong with the connections", command_line, &[]);
    document.leads = true;
    let unchecked = &results.unchecked;
    match results.findings.split_first() {
        None => {
            let tone = if unchecked.is_empty() { Tone::Good } else { Tone::Strong };
            document.note(tone, nothing(results));
        }
        Some((first, others)) => {
            show(&mut document, first);
            if !others.is_empty() {
                document.heading("Other findings");
            }
            for (number, finding) in others.iter().enumerate() {
                if number > 0 {
                    document.terminal(|terminal| terminal.note(Tone::Plain, ""));
                }
                show(&mut document, finding);
            }
        }
    }
    if let Some(first) = results.findings.first() {
        document.terminal(|terminal| {
            terminal.note(Tone::Plain, "");
            terminal.note(Tone::Dim, format!("`fourtuple explain {}` explains a finding.", first.id));
        });
    }
    if results.history.is_some() {
        document.page_heading("Over time");
        document.chart(
            "doctor-ports",
            "Ports in use by the tuples that use the most. Dotted: the ports of the range.",
        );
        document.chart("doctor-queues", "TIME_WAIT sockets, and connections that wait for accept().");
    }
    document.page(|page| view(page, &results.snapshot));
    document.list("Not checked", Tone::Dim, reasons(unchecked));
    document
}

/// Returns the rules with their reasons, each text once: rules with the same reason are one item, and a clause of several reasons has an
/// item of its own, with the ids of the rules.
fn reasons(unchecked: &[Unchecked]) -> Vec<(String, String)> {
    let mut groups: Vec<(&str, Vec<&Unchecked>)> = Vec::new();
    for rule in unchecked {
        match groups.iter_mut().find(|(reason, _)| *reason == rule.reason) {
            Some((_, rules)) => rules.push(rule),
            None => groups.push((&rule.reason, vec![rule])),
        }
    }
    let sharers = |clause: &str| {
        let shared = groups.iter().filter(|(reason, _)| reason.split("; ").any(|other| other == clause));
        let shared: Vec<&Vec<&Unchecked>> = shared.map(|(_, rules)| rules).collect();
        (shared.len() > 1).then(|| joined(shared.into_iter().flatten().map(|rule| rule.id.clone())))
    };
    let mut items: Vec<(String, String)> = Vec::new();
    for (reason, rules) in &groups {
        let mut rest = Vec::new();
        for clause in reason.split("; ") {
            let Some(ids) = sharers(clause) else {
                rest.push(clause);
                continue;
            };
            match items.iter_mut().find(|(name, _)| *name == ids) {
                Some((_, text)) if text.split("; ").any(|other| other == clause) => {}
                Some((_, text)) => *text += &format!("; {clause}"),
                None => items.push((ids, clause.to_owned())),
            }
        }
        let text = if rest.is_empty() { (*reason).to_owned() } else { rest.join("; ") };
        items.push((joined(rules.iter().map(|rule| format!("{} {}", rule.id, rule.title))), text));
    }
    items
}

fn joined(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the verdict without a finding. Rules that could not be checked are in the same line: unknown is not healthy.
fn nothing(results: &DoctorResults) -> String {
    let mut text = format!("No fault found: {}", plural(results.checked.len() as u64, "rule"));
    if let Some(sockets) = sockets(&results.snapshot) {
        text += &format!(" over {}", plural(sockets, "socket"));
    }
    if !results.unchecked.is_empty() {
        text += &format!("; {} could not be checked", plural(results.unchecked.len() as u64, "rule"));
    }
    text
}

/// Returns the number of sockets that the rules saw; `None` if the kernel showed no connections.
fn sockets(snapshot: &Snapshot) -> Option<u64> {
    let connections = snapshot.connections.seen().ok()?.states.values().sum::<u64>();
    let listeners = snapshot.listeners.seen().map_or(0, |listeners| listeners.len() as u64);
    Some(connections + listeners + snapshot.udp.seen().map_or(0, |udp| udp.total))
}

fn command_line(settings: &DoctorSettings) -> String {
    CommandLine::new("doctor")
        .maybe("--pid", settings.pid)
        .maybe("--netns", settings.netns.as_ref().map(|path| word(path)))
        .maybe("--container", settings.container.as_ref().map(|id| word(id)))
        .maybe("--to", settings.to.as_ref())
        .set("--for", typed(settings.for_ns))
        .finish()
}

fn show(document: &mut Document, finding: &Finding) {
    let tone = match finding.severity {
        Severity::Critical => Tone::Bad,
        Severity::Warning => Tone::Strong,
        Severity::Notice => Tone::Plain,
    };
    document.note(tone, format!("{}  {}", finding.id, finding.verdict));
    finding.evidence.iter().for_each(|fact| document.note(Tone::Dim, fact));
    for (heading, advice) in [("do now", &finding.now), ("do properly", &finding.proper)] {
        if !advice.is_empty() {
            document.note(Tone::Dim, heading);
        }
        advice.iter().flat_map(remedy).for_each(|block| document.push(block));
    }
}

fn remedy(advice: &Advice) -> Vec<Block> {
    let Advice { action, is_command, effect, condition, proof, until, undo, lasting, needs_root: _ } = advice;
    let mut effect = effect.clone();
    if let Some(condition) = condition {
        effect += &format!("; {condition}");
    }
    let mut facts: Vec<String> = until.iter().map(|until| format!("until {until}")).collect();
    match proof {
        Proof::None => {}
        Proof::Calculation => {
            facts.push("by calculation: the finding is then gone or less severe".to_owned())
        }
        Proof::Test => facts.push("tested on this kernel".to_owned()),
    }
    if !facts.is_empty() {
        effect += &format!(" ({})", facts.join("; "));
    }
    if !is_command {
        return vec![Block::List(Tone::Plain, vec![(String::new(), format!("{action}: {effect}"))])];
    }
    let also = |command: &Option<String>, effect: &str| {
        command.clone().map(|command| Block::Command { command, effect: effect.to_owned() })
    };
    let first = Block::Command { command: action.clone(), effect };
    [Some(first), also(undo, "undoes it"), also(lasting, "the same also after a boot")]
        .into_iter()
        .flatten()
        .collect()
}

/// Adds the tables of tuples and listeners that the rules saw.
fn view(page: &mut Document, snapshot: &Snapshot) {
    if let Part::Seen(connections) = &snapshot.connections {
        let usable =
            snapshot.ports.seen().ok().map(|ports| ports.usable().saturating_sub(connections.held_tcp));
        page.table_below("Ports in use", tuples(&connections.tuples, usable));
    }
    if let Part::Seen(listeners) = &snapshot.listeners {
        page.table_below("Accept queues", queues(listeners));
    }
}

fn tuples(tuples: &[Tuple], usable: Option<u32>) -> Table {
    Table::of(tuples)
        .text("source", 0, |tuple| tuple.source.to_string())
        .text("destination", 0, |tuple| tuple.destination.to_string())
        .number("ports in use", 0, |tuple| count(tuple.in_use.into()))
        .number("of", 1, move |_| usable.map_or(NOTHING.to_owned(), |usable| count(usable.into())))
        .number("TIME_WAIT", 1, |tuple| count(tuple.states.get("time-wait").copied().unwrap_or(0)))
        .number("closes first, per second", 1, |tuple| format!("{:.1}", tuple.closes_per_s))
        .text("process", 1, |tuple| tuple.owners.first().map_or(NOTHING.to_owned(), Owner::to_string))
        .limit(20, 20, "tuple")
        .into()
}

fn queues(listeners: &[Listener]) -> Table {
    Table::of(listeners)
        .text("listener", 0, |listener| listener.address.to_string())
        .number("queued", 0, |listener| {
            Cell::toned(count(listener.waiting.into()), Tone::bad_if(listener.waiting > listener.backlog / 2))
        })
        .number("backlog", 0, |listener| count(listener.backlog.into()))
        .text("process", 1, |listener| listener.owners.first().map_or(NOTHING.to_owned(), Owner::to_string))
        .limit(20, 20, "listener")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_several_rules_is_one_line() {
        let rule = |id: &str, reason: &str| Unchecked {
            id: id.to_owned(),
            title: format!("title of {id}"),
            reason: reason.to_owned(),
        };
        let pairs = |rules: &[Unchecked]| {
            reasons(rules).into_iter().map(|(name, text)| format!("{name}: {text}")).collect::<Vec<_>>()
        };
        let traces = [
            rule("A07", "accept: EPERM; no CAP_BPF; no CAP_PERFMON; trace accept"),
            rule("F02", "a namespace; hides it"),
            rule("P07", "connect: EPERM; no CAP_BPF; no CAP_PERFMON; trace connect"),
            rule("U01", "ENOENT"),
            rule("U02", "ENOENT"),
        ];
        let expected = [
            "A07, P07: no CAP_BPF; no CAP_PERFMON",
            "A07 title of A07: accept: EPERM; trace accept",
            "F02 title of F02: a namespace; hides it",
            "P07 title of P07: connect: EPERM; trace connect",
            "U01 title of U01, U02 title of U02: ENOENT",
        ];
        assert_eq!(pairs(&traces), expected);
        // A rule without another clause keeps its reason.
        let whole = ["A, B: x", "A title of A: x", "B title of B: y"];
        assert_eq!(pairs(&[rule("A", "x"), rule("B", "x; y")]), whole);
    }
}
