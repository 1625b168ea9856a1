//! A command that each host of a fleet performed by itself: one table over all hosts.

use fourtuple_record::snapshot::FailedCall;
use fourtuple_record::{
    DoctorRecord, FleetHost, FleetRecord, FleetSettings, PortsRecord, Saved, ServeRecord, Severity,
    TraceConnectRecord,
};

use crate::document::{Document, Tone};
use crate::table::{Cell, Column, Limit, Table};
use crate::words::{
    CommandLine, NOTHING, count, duration, maybe_duration, plural, rate, total, unnamed, word,
};

pub(super) fn document(record: &FleetRecord) -> Document {
    let results = &record.results;
    let mut document = Document::new("Every host, the worst first", command_line(&record.settings), &[]);
    document.facts(vec![plural(results.hosts.len() as u64, "host")]);
    document.table(table(&record.command, &results.hosts));
    let differences = unnamed(&results.differences);
    document.list("Differences", Tone::Plain, differences);
    document.page(|page| page.table_below("Findings", findings(&results.hosts)));
    document
}

fn command_line(settings: &FleetSettings) -> String {
    let words: Vec<String> = settings.command.iter().map(|text| word(text)).collect();
    let labels = |line: CommandLine| {
        settings.labels.iter().fold(line, |line, label| line.set("--label", word(label))).finish()
    };
    match settings.command.first().map(String::as_str) {
        Some("serve") => format!("{} -- {}", labels(CommandLine::new("fleet serve")), words.join(" ")),
        _ => labels(CommandLine::new("fleet").words(words.join(" "))),
    }
}

fn table(command: &str, hosts: &[FleetHost]) -> Table {
    let columns: &[Column] = match command {
        "fleet doctor" => {
            &[Column::text("worst", 0), Column::number("findings", 1), Column::text("which", 2)]
        }
        "fleet lab ports" => &[Column::text("slowest strategy", 1), Column::number("p99", 0)],
        "fleet trace connect" => &[
            Column::number("searches", 1),
            Column::number("search p99", 0),
            Column::number("handshake p99", 2),
            Column::number("failed", 1),
        ],
        "fleet plan" => &[
            Column::text("range", 3),
            Column::number("connect, empty", 2),
            Column::number("connect, full", 0),
            Column::text("ports run out", 1),
            Column::number("sources needed", 1),
        ],
        "fleet serve" => &[
            Column::text("listened on", 2),
            Column::number("accepted", 1),
            Column::number("requests", 0),
            Column::number("rate", 0),
            Column::number("failed", 0),
        ],
        _ => &[],
    };
    let row = |host: &FleetHost| {
        let mut row = vec![Cell::toned(&host.name, Tone::Strong), Cell::from(&host.kernel)];
        row.extend(host.record.as_ref().map_or(Vec::new(), cells));
        // The remarks name the reason of a host without a record.
        row.resize_with(columns.len() + 2, || NOTHING.into());
        row
    };
    let mut all = vec![Column::text("host", 0), Column::text("kernel", 3)];
    all.extend_from_slice(columns);
    let table = Table::new(all, hosts.iter().map(row).collect());
    Table { limit: Some(Limit { terminal: 100, page: 1_000, noun: "host" }), ..table }
}

/// Returns the cells of the record of a host.
fn cells(record: &Saved) -> Vec<Cell> {
    match record {
        Saved::Doctor(record) => doctor(record),
        Saved::Ports(record) => ports(record),
        Saved::TraceConnect(record) => {
            let results = &record.results;
            vec![
                Cell::count(results.searches),
                maybe_duration(results.search_ns.all.map(|all| all.p99)).into(),
                maybe_duration(results.handshake_ns.map(|all| all.p99)).into(),
                failed_connects(record),
            ]
        }
        Saved::Plan(record) => {
            let (settings, results) = (&record.settings, &record.results);
            // Without a rate it is not known whether the ports run out.
            let never = if settings.arrival_per_s.is_some() { "never" } else { NOTHING };
            let out = results.exhausted_after_ns;
            vec![
                format!("{}-{}", settings.low, settings.high).into(),
                maybe_duration(results.by_fill.first().map(|step| step.mean_ns)).into(),
                maybe_duration(results.by_fill.last().map(|step| step.mean_ns)).into(),
                out.map_or(never.to_owned(), |after| format!("after {}", duration(after))).into(),
                Cell::count(results.sources_needed),
            ]
        }
        Saved::Serve(record) => serve(record),
        _ => Vec::new(),
    }
}

/// Returns the number of failed connects; a dash if those of other sockets are not known and no other failed.
fn failed_connects(record: &TraceConnectRecord) -> Cell {
    let traced = total(record.results.failed.values());
    let Ok(failures) = record.results.calls.seen() else {
        return if traced > 0 { Cell::bad_count(traced) } else { NOTHING.into() };
    };
    // Those of the traced protocol are in the results already.
    let is_other = |call: &&FailedCall| call.call == "connect" && call.protocol != record.settings.protocol;
    let others = failures.calls.iter().filter(is_other).map(|call| &call.failed);
    Cell::bad_count(traced.saturating_add(total(others)))
}

fn doctor(record: &DoctorRecord) -> Vec<Cell> {
    let (findings, unchecked) = (&record.results.findings, record.results.unchecked.len());
    // The most severe one comes first.
    let worst = match findings.first().map(|finding| finding.severity) {
        Some(Severity::Critical) => Cell::toned("critical", Tone::Bad),
        Some(Severity::Warning) => Cell::toned("warning", Tone::Strong),
        Some(Severity::Notice) => "notice".into(),
        None if unchecked > 0 => Cell::toned(format!("{unchecked} not checked"), Tone::Strong),
        None => Cell::toned("fine", Tone::Good),
    };
    let ids: Vec<&str> = findings.iter().map(|finding| finding.id.as_str()).collect();
    vec![worst, Cell::count(findings.len() as u64), ids.join(" ").into()]
}

fn ports(record: &PortsRecord) -> Vec<Cell> {
    let runs = record.results.strategies.iter();
    let slowest = runs.filter_map(|run| Some((run.connect_ns.all?.p99, &run.strategy))).max();
    slowest.map_or(Vec::new(), |(p99, strategy)| vec![strategy.into(), duration(p99).into()])
}

fn serve(record: &ServeRecord) -> Vec<Cell> {
    let results = &record.results;
    vec![
        (&results.listen).into(),
        count(total(results.workers.iter().map(|worker| &worker.accepted))).into(),
        count(total(results.workers.iter().map(|worker| &worker.requests))).into(),
        rate(results.requests_per_s).into(),
        Cell::bad_count(total(results.workers.iter().flat_map(|worker| worker.errors.values()))),
    ]
}

fn findings(hosts: &[FleetHost]) -> Table {
    let mut rows = Vec::new();
    for host in hosts {
        let Some(Saved::Doctor(record)) = &host.record else { continue };
        rows.extend(record.results.findings.iter().map(|finding| (host, finding)));
    }
    let table = Table::of(&rows)
        .name("host", |(host, _)| host.name.clone())
        .text("rule", 0, |(_, finding)| finding.id.clone())
        .text("finding", 0, |(_, finding)| finding.verdict.clone());
    table.limit(100, 1_000, "finding").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_repeats_the_command() {
        let line = |labels: &[&str], words: &str| {
            let labels = labels.iter().map(|label| (*label).to_owned()).collect();
            command_line(&FleetSettings { labels, command: words.split(' ').map(str::to_owned).collect() })
        };
        assert_eq!(
            line(&["zone=eu", "a=b c"], "doctor"),
            "fourtuple fleet doctor --label zone=eu --label 'a=b c'"
        );
        assert_eq!(
            line(&["a=b"], "serve crr --listen 127.0.0.1:1 --for 2s"),
            "fourtuple fleet serve --label a=b -- serve crr --listen 127.0.0.1:1 --for 2s"
        );
    }
}
