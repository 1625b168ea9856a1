//! Repairs: `fix ports`, `fix accept`, `run` and `guard status`.

use fourtuple_record::{
    FixAcceptListener, FixAcceptRecord, FixAcceptResults, FixAcceptSettings, FixNamespace, FixPortsRecord,
    FixPortsResults, FixPortsSettings, GuardEvent, GuardRecord, GuardResults, GuardState, GuardTotals,
    RunRecord, RunResults, RunSettings,
};

use crate::document::{Block, Document, Tone};
use crate::table::{Cell, Table};
use crate::words::{
    CommandLine, NOTHING, count, duration, maybe, maybe_duration, plural, present, quantity, rate, share,
    typed, word,
};

/// The maximum number of tuples on a terminal.
const ROWS: usize = 12;

pub(super) fn fix_ports(record: &FixPortsRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let title = if settings.dry_run { "What fix ports would change" } else { "What fix ports changed" };
    let mut document = Document::new(title, command_line(settings), &[]);
    document.page_heading("All connects");
    document.facts(fix_ports_facts(settings, results));
    document.facts(results.namespaces.iter().map(fix_ports_namespace).collect());
    document.push(Block::Figures(fix_ports_figures(settings, results)));
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
        document.table(fix_ports_tuples(results));
    }
    if results.tuples_left_out > 0 {
        document.note(Tone::Dim, format!("{} not listed", plural(results.tuples_left_out, "tuple")));
    }
    document
}

fn fix_ports_facts(settings: &FixPortsSettings, results: &FixPortsResults) -> Vec<String> {
    let mut facts = vec![format!("cgroup {}", settings.cgroup)];
    facts.extend(settings.to.as_ref().map(|to| format!("connects to {to}")));
    facts.extend(settings.source.as_ref().map(|source| format!("more sources from {source}")));
    facts.push(format!("past {} of a range", share(settings.past)));
    facts.push(format!("attached for {}", duration(results.elapsed_ns)));
    facts
}

/// `ports 20000-39999, 19,990 usable`.
fn fix_ports_namespace(namespace: &FixNamespace) -> String {
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
fn fix_ports_figures(settings: &FixPortsSettings, results: &FixPortsResults) -> Vec<(&'static str, String)> {
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
fn meaning(reason: &str) -> &'static str {
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

fn fix_ports_tuples(results: &FixPortsResults) -> Table {
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

/// The maximum number of listeners on a terminal.
const FIX_ACCEPT_ROWS: usize = 24;

pub(super) fn fix_accept(record: &FixAcceptRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let title = match (settings.dry_run, is_rotation(settings)) {
        (true, true) => "Who accepted",
        (true, false) => "What the kernel's hash chose",
        (false, true) => "Whom fix accept moved",
        (false, false) => "What fix accept chose",
    };
    let mut document = Document::new(title, fix_accept_command_line(settings), &[]);
    document.page_heading(if is_rotation(settings) { "All workers" } else { "All groups" });
    document.facts(fix_accept_facts(settings, results));
    document.push(Block::Figures(fix_accept_figures(settings, results)));
    if results.listeners.is_empty() {
        document.note(Tone::Plain, "no listeners");
    } else {
        document.heading(if is_rotation(settings) { "By worker" } else { "By listener" });
        document.table(fix_accept_listeners(settings, results));
    }
    if results.listeners_left_out > 0 {
        let row = if is_rotation(settings) { "worker" } else { "listener" };
        document.note(Tone::Dim, format!("{} not listed", plural(results.listeners_left_out, row)));
    }
    document
}

/// Returns whether workers that share a listener took turns, without a selector.
fn is_rotation(settings: &FixAcceptSettings) -> bool {
    settings.select == "rotate"
}

fn fix_accept_facts(settings: &FixAcceptSettings, results: &FixAcceptResults) -> Vec<String> {
    let mut facts = Vec::new();
    facts.extend(settings.listen.as_ref().map(|address| format!("sockets at {address}")));
    facts.extend(settings.pid.map(|process| format!("sockets of process {process} and its descendants")));
    facts.push(if settings.dry_run {
        "nothing changed".to_owned()
    } else if is_rotation(settings) {
        "workers take turns".to_owned()
    } else {
        format!("selector {}", settings.select)
    });
    facts.extend(settings.control.as_ref().map(|control| format!("control packets {control}")));
    facts.push(plural(results.groups, if is_rotation(settings) { "listener" } else { "group" }));
    facts.push(format!("attached for {}", duration(results.elapsed_ns)));
    facts
}

fn fix_accept_command_line(settings: &FixAcceptSettings) -> String {
    CommandLine::new("fix accept")
        .maybe("--listen", settings.listen.as_ref().map(|address| word(address)))
        .maybe("--pid", settings.pid)
        .set("--select", word(&settings.select))
        .maybe("--control", settings.control.as_ref().map(|control| word(control)))
        .maybe("--for", settings.for_ns.map(typed))
        .flag("--dry-run", settings.dry_run)
        .finish()
}

/// Events that did not occur are omitted.
fn fix_accept_figures(
    settings: &FixAcceptSettings,
    results: &FixAcceptResults,
) -> Vec<(&'static str, String)> {
    let mut figures = Vec::new();
    let (joined, closed) = if is_rotation(settings) {
        figures.push(("workers moved to the end of the queue", count(results.moves)));
        figures.push(("connections accepted", count(results.connections)));
        ("workers that joined", "workers that ended")
    } else {
        if !settings.dry_run {
            figures.push(("connections or datagrams chosen for", count(results.choices)));
            figures.push(("choices per second", rate(results.choices_per_s)));
        }
        figures.push(("TCP connections", count(results.connections)));
        ("listeners that joined", "listeners that were closed")
    };
    let events = [
        ("packets left to the hash without a heartbeat", results.lapsed),
        ("packets left to the hash by closed listeners", results.strays),
        (joined, results.joined),
        (closed, results.closed),
        ("events that the counters missed", results.missed),
    ];
    figures.extend(
        events.into_iter().filter(|(_, number)| *number > 0).map(|(name, number)| (name, count(number))),
    );
    figures
}

fn fix_accept_listeners(settings: &FixAcceptSettings, results: &FixAcceptResults) -> Table {
    let most = results.listeners.iter().map(|listener| fix_accept_bar(results, listener)).max().unwrap_or(0);
    let table = Table::of(&results.listeners)
        .text("address", 1, |listener| format!("{} {}", listener.transport, listener.address))
        .text("process", 0, |listener| format!("{}[{}]", listener.command, listener.process))
        .number("cookie", 4, |listener| listener.cookie.to_string());
    let table = if is_rotation(settings) {
        table.number("moves", 0, |listener| count(listener.moves))
    } else {
        table.number("chosen|Chosen for", 0, |listener| count(listener.choices))
    };
    let table = table
        .number("connections", 2, |listener| count(listener.connections))
        .number("share", 0, |listener| maybe(listener.share, share))
        .text("distribution", 3, |listener| Cell::bar(fix_accept_bar(results, listener), most));
    let table = if is_rotation(settings) {
        table
    } else {
        table.number("open", 1, |listener| maybe(listener.open, count))
    };
    table
        .number("queue", 1, |listener| {
            listener.queue.map_or_else(|| format!("{NOTHING} closed"), |queue| count(queue.into()))
        })
        .limit(FIX_ACCEPT_ROWS, usize::MAX, if is_rotation(settings) { "worker" } else { "listener" })
        .into()
}

/// Returns the number that the bar of a listener shows. In a dry run nothing was chosen.
fn fix_accept_bar(results: &FixAcceptResults, listener: &FixAcceptListener) -> u64 {
    if results.choices > 0 { listener.choices } else { listener.connections }
}

pub(super) fn run(record: &RunRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("What run did", run_command_line(settings), &[]);
    document.page_heading("All connects");
    document.facts(run_facts(results));
    document.push(Block::Figures(run_figures(results)));
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
        .map(|(reason, number)| (reason.clone(), format!("{} ({})", count(*number), run_meaning(reason))));
    document.list("Left alone", Tone::Plain, reasons);
    document
}

fn run_facts(results: &RunResults) -> Vec<String> {
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

fn run_command_line(settings: &RunSettings) -> String {
    let options = CommandLine::new("run").maybe("--via", settings.via.as_ref().map(|via| word(via))).finish();
    let words: Vec<String> = settings.command.iter().map(|text| word(text)).collect();
    format!("{options} -- {}", words.join(" "))
}

/// A figure that the way does not see is shown as unknown.
fn run_figures(results: &RunResults) -> Vec<(&'static str, String)> {
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
fn run_meaning(reason: &str) -> &'static str {
    match reason {
        "no-permission" => "the supervisor may not duplicate the socket",
        other => meaning(other),
    }
}

/// The maximum number of fixes on a terminal.
const GUARD_ROWS: usize = 20;
/// The maximum number of events on a terminal.
const EVENTS: usize = 8;

pub(super) fn guard_status(record: &GuardRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let line = CommandLine::new("guard status").set("--socket", word(&settings.socket)).finish();
    let mut document = Document::new("What the guard does", line, &[]);
    document.facts(guard_facts(results));
    if results.fixes.is_empty() {
        document.note(Tone::Plain, "no fix is attached");
    } else {
        document.page_heading("Fixes");
        document.table(guard_fixes(results));
    }
    document.note(Tone::Plain, guard_totals(&results.totals));
    let last = results.events.len().saturating_sub(EVENTS);
    document.terminal(|document| {
        document.list("Last events", Tone::Plain, results.events[last..].iter().map(guard_event))
    });
    document
        .page(|document| document.list("Last events", Tone::Plain, results.events.iter().map(guard_event)));
    document
}

/// `active`, `policy /etc/fourtuple/guard.toml`, `every 5.00s`, `3 network namespaces`, `for 2h50m`.
fn guard_facts(results: &GuardResults) -> Vec<String> {
    let state = match (results.state, results.paused_for_ns) {
        (GuardState::Paused, Some(time)) => format!("paused for another {}", duration(time)),
        (GuardState::Paused, None) => "paused until `fourtuple guard resume`".to_owned(),
        (state, _) => state.to_string(),
    };
    let policy = match &results.policy {
        Some(path) => format!("policy {path}"),
        None => "no policy, changes nothing".to_owned(),
    };
    present([
        Some(state),
        Some(policy),
        Some(format!("reads every {}", duration(results.every_ns))),
        (results.namespaces > 1).then(|| plural(results.namespaces, "network namespace")),
        Some(format!("has run for {}", duration(results.uptime_ns))),
    ])
}

fn guard_fixes(results: &GuardResults) -> Table {
    Table::of(&results.fixes)
        .text("fix", 0, |fix| fix.action.name().trim_start_matches("fix-"))
        .text("target", 0, |fix| Cell::from(fix.target.clone()).note(fix.reason.clone()))
        .text("to|Destination", 4, |fix| fix.to.clone().unwrap_or_default())
        .number("pid|Process", 6, |fix| fix.pid.map_or_else(String::new, |pid| pid.to_string()))
        .text("source", 5, |fix| fix.source.clone().unwrap_or_default())
        .number("for|Attached for", 1, |fix| duration(fix.since_ns))
        .text("effect", 1, |fix| fix.effect.name())
        .number("connects", 2, |fix| count(fix.connects))
        .number("drawn", 3, |fix| count(fix.drawn))
        .number("fallbacks", 4, |fix| Cell::bad_count(fix.fallbacks))
        .number("saved", 4, |fix| maybe_duration(fix.saved_ns))
        .limit(GUARD_ROWS, usize::MAX, "fix")
        .into()
}

fn guard_totals(totals: &GuardTotals) -> String {
    let saved = match totals.saved_ns {
        0 => String::new(),
        saved => format!(", an estimated {} saved", duration(saved)),
    };
    format!(
        "Since the start: {} attached, {} released, {} refused, {} reported; {} during fixes, {} drawn and {} left to the kernel{saved}.",
        plural(totals.attached, "fix"),
        count(totals.released),
        count(totals.refused),
        plural(totals.notified, "finding"),
        plural(totals.connects, "connect"),
        count(totals.drawn),
        count(totals.fallbacks),
    )
}

/// Returns an event with its time of day as name.
fn guard_event(event: &GuardEvent) -> (String, String) {
    // 2026-03-01T12:00:00Z
    let time = event.at.get(11..19).unwrap_or(&event.at);
    (time.to_owned(), event.to_string())
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

    #[test]
    fn the_command_line_repeats_the_settings_of_fix_accept() {
        let settings = FixAcceptSettings {
            listen: Some("[::1]:53".into()),
            pid: None,
            select: "flow:0:4".into(),
            control: Some("ttl=255".into()),
            for_ns: Some(2_000_000_000),
            dry_run: true,
        };
        assert_eq!(
            fix_accept_command_line(&settings),
            "fourtuple fix accept --listen '[::1]:53' --select flow:0:4 --control ttl=255 --for 2s --dry-run"
        );
    }

    #[test]
    fn the_command_line_repeats_the_program() {
        let settings = RunSettings {
            command: vec!["curl".into(), "-s".into(), "http://a b/".into()],
            via: Some("supervise".into()),
        };
        assert_eq!(run_command_line(&settings), "fourtuple run --via supervise -- curl -s 'http://a b/'");
        let bare = RunSettings { command: vec!["true".into()], via: None };
        assert_eq!(run_command_line(&bare), "fourtuple run -- true");
    }

    #[test]
    fn totals_agree_with_their_numbers() {
        let one = GuardTotals { attached: 1, notified: 1, connects: 1, drawn: 1, ..GuardTotals::default() };
        assert_eq!(
            guard_totals(&one),
            "Since the start: 1 fix attached, 0 released, 0 refused, 1 finding reported; 1 connect during fixes, 1 drawn and 0 left to \
             the kernel."
        );
        assert!(
            guard_totals(&GuardTotals { saved_ns: 1_500_000_000, ..one })
                .ends_with("an estimated 1.50s saved.")
        );
    }
}
