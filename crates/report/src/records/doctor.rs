use fourtuple_record::snapshot::{Listener, Owner, Part, Snapshot, Tuple};
use fourtuple_record::{Advice, DoctorRecord, DoctorSettings, Finding, Severity, Unchecked};

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
        None => document.note(Tone::Good, nothing(results.checked.len(), unchecked.len())),
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
    let item = |rule: &Unchecked| (format!("{} {}", rule.id, rule.title), rule.reason.clone());
    document.list("Not checked", Tone::Dim, unchecked.iter().map(item));
    document
}

fn nothing(checked: usize, unchecked: usize) -> String {
    let mut text = format!("No finding. {} checked", plural(checked as u64, "rule"));
    if unchecked > 0 {
        text += &format!(", {} not", count(unchecked as u64));
    }
    text
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
        advice.iter().for_each(|advice| document.push(remedy(advice)));
    }
}

fn remedy(advice: &Advice) -> Block {
    let Advice { action, is_command, effect, recomputed } = advice;
    let effect = match (recomputed, is_command) {
        (true, _) => format!("{effect} (checked: the finding is then gone or less severe)"),
        _ => effect.clone(),
    };
    if *is_command {
        Block::Command { command: action.clone(), effect }
    } else {
        Block::List(Tone::Plain, vec![(String::new(), format!("{action}: {effect}"))])
    }
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
