use fourtuple_record::snapshot::{Listener, Owner, Part, Snapshot, Tuple};
use fourtuple_record::{
    Advice, DoctorRecord, DoctorResults, DoctorSettings, Finding, Proof, Severity, Unchecked,
};

use crate::document::{Block, Document, Medium, Tone};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, NOTHING, count, grouped, plural, typed, word};

pub(super) fn document(record: &DoctorRecord) -> Document {
    let results = &record.results;
    let command_line = command_line(&record.settings);
    let mut document = Document::untitled("What is wrong with the connections", command_line, &[]);
    document.leads = true;
    let unchecked = &results.unchecked;
    match results.findings.split_first() {
        None => {
            let tone = if unchecked.is_empty() { Tone::Good } else { Tone::Strong };
            document.push(Block::Finding(tone, nothing(results)));
        }
        Some((first, others)) => {
            document.on(Medium::Brief, |screen| summarize(screen, first, results));
            document.on(Medium::Full, |document| {
                show(document, first);
                if !others.is_empty() {
                    document.heading("Other findings");
                }
                for (number, finding) in others.iter().enumerate() {
                    if number > 0 {
                        document.push(Block::Gap);
                    }
                    show(document, finding);
                }
            });
        }
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
    document.on(Medium::Full, |document| document.list("Not checked", Tone::Dim, reasons(unchecked)));
    document.on(Medium::Brief, |screen| {
        let first = results.findings.first();
        if first.is_some() || !unchecked.is_empty() {
            screen.push(Block::Gap);
        }
        not_checked(unchecked).into_iter().for_each(|reason| screen.note(Tone::Dim, reason));
        if let Some(first) = first {
            let rule = format!("the rule: `fourtuple explain {}`", first.id);
            screen.facts(vec!["all facts and remedies: --all".to_owned(), rule]);
        }
    });
    document
}

/// Maximum number of reasons on the first screen.
const MAX_REASONS: usize = 2;

/// Returns the rules that were not checked with the main reasons, a line each; `--all` has the titles and every clause.
fn not_checked(unchecked: &[Unchecked]) -> Vec<String> {
    let sharers = |clause: &&str| {
        unchecked.iter().filter(|other| other.reason.split("; ").any(|own| own == *clause)).count()
    };
    // The clause that most rules share; of several the first.
    let main = |rule: &Unchecked| rule.reason.rsplit("; ").max_by_key(sharers).unwrap_or_default().to_owned();
    let groups = grouped(unchecked, main);
    let line = |rules: &Vec<&Unchecked>| {
        let ids = joined(rules.iter().map(|rule| rule.id.clone()));
        format!("not checked: {ids}: {}", main(rules[0]))
    };
    let mut lines: Vec<String> = groups.iter().take(MAX_REASONS).map(line).collect();
    if groups.len() > MAX_REASONS {
        let more = groups[MAX_REASONS..].iter().flatten().map(|rule| rule.id.clone());
        lines.push(format!("not checked either: {} (--all)", joined(more)));
    }
    lines
}

/// Adds the first screen: the fault with its first facts and remedies, and a line for each other fault. `--all` shows the rest.
fn summarize(screen: &mut Document, first: &Finding, results: &DoctorResults) {
    screen.push(headline(first));
    first.evidence.iter().take(MAX_FACTS).for_each(|fact| screen.note(Tone::Dim, fact));
    // Commands that only look come before the one that changes something.
    let looks = |advice: &&Advice| advice.is_command && advice.undo.is_none() && advice.proof == Proof::None;
    let looks = first.now.iter().take_while(looks).count();
    let now = (looks + 1).min(MAX_REMEDIES).min(first.now.len());
    let completes = |advice: &&Advice| advice.condition.as_deref() == Some(THEN);
    let now = now + first.now[now..].iter().take_while(completes).count();
    // A command that looks cures nothing.
    let proper = MAX_REMEDIES.saturating_sub(now - looks.min(now)).max(1).min(first.proper.len());
    remedies(screen, "do now", &first.now[..now], brief);
    remedies(screen, "do properly", &first.proper[..proper], brief);
    let findings = results.findings.iter().enumerate();
    let effects = |place: usize| {
        let is_same = |other: &&Finding| other.same_cause_as == Some(place as u32);
        let same: Vec<&Finding> = results.findings.iter().filter(is_same).collect();
        let of_rule = |rule: &Vec<&&Finding>| match rule.len() {
            1 => rule[0].id.clone(),
            more => format!("{} ({} times)", rule[0].id, count(more as u64)),
        };
        let ids = joined(grouped(&same, |finding| finding.id.clone()).iter().map(of_rule));
        (!ids.is_empty()).then(|| format!("also seen, with the same cause: {ids}"))
    };
    effects(0).into_iter().for_each(|effects| screen.note(Tone::Plain, effects));
    let mut others = findings.skip(1).filter(|(_, finding)| finding.same_cause_as.is_none()).peekable();
    if others.peek().is_some() {
        screen.heading("Other findings");
    }
    for (place, finding) in others {
        screen.push(headline(finding));
        effects(place).into_iter().for_each(|effects| screen.note(Tone::Plain, effects));
    }
}

/// The condition of a remedy that completes the one in front of it; both are on the first screen.
const THEN: &str = "after the command above";
/// Maximum number of facts on the first screen.
const MAX_FACTS: usize = 2;
/// Maximum number of remedies on the first screen.
const MAX_REMEDIES: usize = 2;
/// Maximum length of a condition on the first screen; of a longer one the details after a colon are left out.
const MAX_CONDITION: usize = 120;

/// Returns a remedy with a line for the command that undoes it and one for its lasting form, and with the main clause of its condition.
fn brief(advice: &Advice) -> Vec<Block> {
    let main = |condition: &String| match condition.split_once(": ") {
        Some((main, _)) if condition.chars().count() > MAX_CONDITION => main.to_owned(),
        _ => condition.clone(),
    };
    let alone = Advice {
        undo: None,
        lasting: None,
        condition: advice.condition.as_ref().map(main),
        ..advice.clone()
    };
    let also = |name: &str, command: &Option<String>| {
        let command = command.as_ref()?;
        Some(Block::Command { command: format!("{name}: {command}"), effect: String::new() })
    };
    // A sentence says when its sysctl helps: a command alone would be pasted without that.
    let lines = [also("keep", &advice.lasting), also("undo", &advice.undo)]
        .map(|line| line.filter(|_| advice.is_command));
    remedy(&alone).into_iter().chain(lines.into_iter().flatten()).collect()
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
    if let Some((tuple, usable)) = busiest(&results.snapshot) {
        let percent = |ports: f64| match ports * 100.0 / f64::from(usable) {
            share if share < 1.0 => "less than 1%".to_owned(),
            share => format!("{share:.0}%"),
        };
        let used = percent(tuple.in_use.into());
        text += &format!("; the busiest destination uses {used} of {} ports", count(usable.into()));
        let again = taken_again(&results.snapshot, tuple);
        // Of few ports nobody asks.
        if again * 2 > tuple.in_use.into() && again * 100 >= usable.into() {
            let again = percent(f64::from(again as u32));
            text += &format!(", {again} in TIME_WAIT, which connect() takes again (net.ipv4.tcp_tw_reuse)");
        }
    }
    if !results.unchecked.is_empty() {
        text += &format!("; {} could not be checked", plural(results.unchecked.len() as u64, "rule"));
    }
    if results.snapshot.other_namespaces > 0 {
        let others = plural(results.snapshot.other_namespaces.into(), "other network namespace");
        text += &format!("; not examined: {others} (--container, --pid)");
    }
    text
}

/// Returns the number of sockets that the rules saw; `None` if the kernel showed no connections.
fn sockets(snapshot: &Snapshot) -> Option<u64> {
    let connections = snapshot.connections.seen().ok()?.states.values().sum::<u64>();
    let listeners = snapshot.listeners.seen().map_or(0, |listeners| listeners.len() as u64);
    Some(connections + listeners + snapshot.udp.seen().map_or(0, |udp| udp.total))
}

/// Returns the tuple that uses the most ports, and the ports that it has.
fn busiest(snapshot: &Snapshot) -> Option<(&Tuple, u32)> {
    let tuple = snapshot.connections.seen().ok()?.tuples.iter().max_by_key(|tuple| tuple.in_use)?;
    Some((tuple, usable(snapshot)?)).filter(|(_, usable)| *usable > 0)
}

/// Returns the ports of a tuple in TIME_WAIT that connect() may take again before TIME_WAIT ends (`tcp_twsk_unique`).
fn taken_again(snapshot: &Snapshot, tuple: &Tuple) -> u64 {
    let is_loopback = tuple.source.is_loopback() || tuple.destination.ip().is_loopback();
    let is_allowed = match snapshot.number("net.ipv4.tcp_tw_reuse") {
        Ok(1) => true,
        Ok(2) => is_loopback,
        _ => false,
    };
    let has_timestamps = snapshot.number("net.ipv4.tcp_timestamps").is_ok_and(|value| value != 0);
    let plain = tuple.time_wait_plain.unwrap_or(0);
    let waiting = tuple.states.get("time-wait").copied().unwrap_or(0);
    if is_allowed && has_timestamps { waiting.saturating_sub(plain.into()) } else { 0 }
}

/// Returns the ports that a tuple has.
fn usable(snapshot: &Snapshot) -> Option<u32> {
    let held = snapshot.connections.seen().ok()?.held_tcp;
    Some(snapshot.ports.seen().ok()?.usable().saturating_sub(held))
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
    document.push(headline(finding));
    finding.evidence.iter().for_each(|fact| document.note(Tone::Dim, fact));
    remedies(document, "do now", &finding.now, remedy);
    remedies(document, "do properly", &finding.proper, remedy);
}

fn headline(finding: &Finding) -> Block {
    let tone = match finding.severity {
        Severity::Critical => Tone::Bad,
        Severity::Warning => Tone::Strong,
        Severity::Notice => Tone::Plain,
    };
    Block::Finding(tone, format!("{} {} {}", name(finding.severity), finding.id, finding.verdict))
}

fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Critical => "critical",
        Severity::Warning => "warning",
        Severity::Notice => "notice",
    }
}

fn remedies(document: &mut Document, heading: &str, advice: &[Advice], show: fn(&Advice) -> Vec<Block>) {
    if !advice.is_empty() {
        document.note(Tone::Strong, heading);
    }
    advice.iter().flat_map(show).for_each(|block| document.push(block));
}

fn remedy(advice: &Advice) -> Vec<Block> {
    let Advice { action, is_command, effect, condition, proof, until, undo, lasting, remains, needs_root: _ } =
        advice;
    let mut effect = effect.clone();
    match condition {
        Some(condition) if condition == THEN => effect = format!("{condition}: {effect}"),
        Some(condition) => effect += &format!("; {condition}"),
        None => {}
    }
    let what = if *is_command { "" } else { "the sysctl " };
    let mut facts: Vec<String> = until.iter().map(|until| format!("{what}until {until}")).collect();
    match proof {
        Proof::None => {}
        Proof::Calculation => facts.push(match remains {
            None => "by calculation: the finding is then gone".to_owned(),
            Some(rest) => format!("by calculation: the finding is then less severe, a {}", name(*rest)),
        }),
        Proof::Test => facts.push("tested on this kernel".to_owned()),
    }
    if !facts.is_empty() {
        effect += &format!(" ({})", facts.join("; "));
    }
    let also = |command: &Option<String>, effect: &str| {
        command.clone().map(|command| Block::Command { command, effect: effect.to_owned() })
    };
    let first = match is_command {
        true => Block::Command { command: action.clone(), effect },
        false => Block::List(Tone::Plain, vec![(String::new(), format!("{action}: {effect}"))]),
    };
    let (undoes, lasts) = match is_command {
        true => ("undoes it", "the same also after a boot"),
        false => ("undoes the sysctl", "the sysctl also after a boot"),
    };
    [Some(first), also(undo, undoes), also(lasting, lasts)].into_iter().flatten().collect()
}

/// Adds the tables of tuples and listeners that the rules saw.
fn view(page: &mut Document, snapshot: &Snapshot) {
    if let Part::Seen(connections) = &snapshot.connections {
        page.table_below("Ports in use", tuples(&connections.tuples, usable(snapshot)));
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

    fn rule(id: &str, reason: &str) -> Unchecked {
        Unchecked { id: id.to_owned(), title: format!("title of {id}"), reason: reason.to_owned() }
    }

    #[test]
    fn the_first_screen_has_the_main_reasons() {
        let traces = [
            rule("A07", "cannot trace accept(): EPERM; no CAP_BPF; trace accept"),
            rule("F02", "it belongs to the host; this namespace hides it"),
            rule("P07", "cannot count: EPERM; no CAP_BPF"),
        ];
        let lines = ["not checked: A07, P07: no CAP_BPF", "not checked: F02: it belongs to the host"];
        assert_eq!(not_checked(&traces), lines);
        let more = [&traces[..], &[rule("U01", "ENOENT"), rule("U02", "EACCES")]].concat();
        assert_eq!(not_checked(&more)[2..], ["not checked either: U01, U02 (--all)"]);
        assert_eq!(not_checked(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_reason_of_several_rules_is_one_line() {
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
