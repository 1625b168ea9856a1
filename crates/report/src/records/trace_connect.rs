use fourtuple_record::{TraceConnectRecord, TraceConnectResults, TraceConnectSettings, TraceTuple};

use crate::document::{Block, Document, Tone};
use crate::number::{count, duration, maybe_duration, rate, share};
use crate::records::times::{self, steps};
use crate::records::trace::{Filters, failed_calls, occurred, process, tier};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, present, reasons, unnamed};

/// The instrument for UDP.
const UDP_TIER: &str = "cgroup+tp_btf";

pub(super) fn document(record: &TraceConnectRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document =
        Document::new("How long connect() searches for a source port", command_line(settings), &[]);
    document.page_heading("All searches");
    document.facts(filters(settings));
    document.facts(instrument(results));
    document.push(Block::Figures(figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    match reasons(&results.failed) {
        none if none.is_empty() => document.note(Tone::Good, "no failures"),
        some => document.note(Tone::Bad, format!("failed: {some}")),
    }
    failed_calls(&mut document, &results.calls);
    if let Some(words) = flame(results) {
        document.note(Tone::Plain, words);
    }
    times_of(&mut document, results);
    document.histogram(
        "Searches by time",
        ["even|Even ports", "odd|Odd ports"],
        &steps(results.histogram.iter().map(|step| (step.from_ns, [step.even, step.odd]))),
    );
    if !results.samples.is_empty() {
        document.page_heading("Single searches");
        let number = count(results.samples.len() as u64);
        document
            .chart("trace-scatter", format!("A sample of {number} searches, each with the time it took."));
    }
    if !results.heat.columns.is_empty() {
        document.heading("Searches over time");
        let caption = "All searches, by the time when they ended and the time they took. The stronger the colour, the \
                       more searches, on a logarithmic scale.";
        document.push(Block::HeatMap { heat: results.heat.clone(), caption });
    }
    document.table_below("By process and destination", tuples(&results.tuples));
    document
}

fn own_filters(settings: &TraceConnectSettings) -> Filters<'_> {
    Filters::new(settings.process, &settings.name, &settings.netns, &settings.cgroup, settings.for_ns)
}

fn filters(settings: &TraceConnectSettings) -> Vec<String> {
    let TraceConnectSettings { protocol, destination, port, tier, .. } = settings;
    let own = [
        destination.as_ref().map(|destination| format!("to {destination}")),
        port.map(|port| format!("to port {port}")),
    ];
    let all = format!("every {} connect() of this host", protocol.to_uppercase());
    let mut facts = own_filters(settings).facts(own.into_iter().flatten(), &all);
    if protocol != "tcp" && facts[0] != all {
        facts.insert(0, protocol.to_uppercase());
    }
    facts.extend((tier != "auto").then(|| format!("with tier {tier}")));
    facts
}

fn command_line(settings: &TraceConnectSettings) -> String {
    let TraceConnectSettings { protocol, destination, port, seed, tier, .. } = settings;
    let line =
        CommandLine::new("trace connect").maybe("--protocol", Some(protocol).filter(|name| *name != "tcp"));
    own_filters(settings)
        .add(line, |line| line.maybe("--dst", destination.as_ref()).maybe("--port", *port))
        .maybe("--tier", Some(tier).filter(|tier| *tier != "auto"))
        .set("--seed", seed)
        .finish()
}

fn instrument(results: &TraceConnectResults) -> Vec<String> {
    present([
        Some(tier(&results.tier)),
        results.tier_reason.as_ref().map(|reason| format!("not the first tier: {reason}")),
        Some(format!("traced for {}", duration(results.elapsed_ns))),
    ])
}

/// Returns the counts. Events that did not occur are omitted, except lost ones.
fn figures(results: &TraceConnectResults) -> Vec<(&'static str, String)> {
    let part = || share(results.switched as f64 / results.searches as f64);
    let switched = (results.switched > 0 && results.searches > 0)
        .then(|| format!("{} ({})", count(results.switched), part()));
    // UDP has no handshake.
    let established = (results.tier != UDP_TIER).then(|| count(results.established));
    present([
        Some(("searches that found a port", count(results.searches))),
        Some(("searches per second", rate(results.searches_per_s))),
        established.map(|number| ("connections established", number)),
        occurred("connects from a bound port (no search)", results.given_port),
        occurred("connections over IPv6 without a time", results.untimed),
        switched.map(|number| ("searches with a context switch", number)),
        Some(("lost", count(results.lost))),
    ])
}

/// Describes the samples of a flame graph; `None` without one.
fn flame(results: &TraceConnectResults) -> Option<String> {
    let flame = results.flame?;
    let lost = if flame.lost > 0 { format!(", {} lost", count(flame.lost)) } else { String::new() };
    let [connect, search] = [flame.in_connect, flame.in_search].map(share);
    let samples = plural(flame.samples, "sample");
    let part = format!("{connect} was in connect() and {search} in the search for a port ({samples}{lost})");
    Some(format!("Flame graph: of the time that these programs ran, {part}"))
}

fn times_of(document: &mut Document, results: &TraceConnectResults) {
    let search = &results.search_ns;
    let times = [
        ("search, all ports", search.all),
        ("search, even ports", search.even),
        ("search, odd ports", search.odd),
        ("search, found none", results.failed_search_ns),
        ("handshake", results.handshake_ns),
    ];
    let ends = if results.tier == UDP_TIER {
        "The search begins where the kernel runs the programs of the cgroup, and ends where the route is looked up."
    } else {
        "The search ends where the route is looked up again (IPv4) or the SYN is queued at the device (IPv6); the handshake \
         begins there."
    };
    let more = "Interrupts and context switches in between are included.";
    times::show(document, "|Time", &times, format!("{ends} {more}"));
}

fn tuples(tuples: &[TraceTuple]) -> Table {
    Table::of(tuples)
        .text("process", 0, |tuple| process(tuple.process, tuple.processes, &tuple.name))
        .text("destination", 0, |tuple| tuple.destination.clone())
        .number("searches", 0, |tuple| count(tuple.searches))
        .page("Even", |tuple| count(tuple.even))
        .page("Odd", |tuple| count(tuple.odd))
        .number("mean", 6, |tuple| duration(tuple.mean_ns))
        .number("p99", 4, |tuple| duration(tuple.p99_ns))
        .number("even p50", 2, |tuple| maybe_duration(tuple.even_p50_ns))
        .number("odd p50", 2, |tuple| maybe_duration(tuple.odd_p50_ns))
        .number("failed", 1, |tuple| Cell::bad_count(tuple.failed))
        .number("no port", 3, |tuple| Cell::bad_count(tuple.no_port))
        .page("Bound port", |tuple| count(tuple.given_port))
        .page("Established", |tuple| count(tuple.established))
        .number("retries", 7, |tuple| count(tuple.retries))
        .page("SYNs retransmitted", |tuple| count(tuple.syn_retries))
        .page("Closed first", |tuple| count(tuple.closed_first))
        .page("Closed by peer", |tuple| count(tuple.closed_by_peer))
        .number("ports in use", 5, fill)
        .limit(20, 200, "pair")
        .into()
}

/// Returns the fill as `14,900 of 15,000 (99.3%)`, or a dash.
fn fill(tuple: &TraceTuple) -> String {
    match (tuple.in_use, tuple.range, tuple.fill) {
        (Some(used), Some(range), Some(fill)) => {
            format!("{} of {} ({})", count(used.into()), count(range.into()), share(fill))
        }
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_filter_means_every_connect_of_the_host() {
        let settings = TraceConnectSettings {
            protocol: "tcp".into(),
            process: None,
            name: None,
            destination: None,
            port: None,
            netns: None,
            cgroup: None,
            for_ns: None,
            seed: 1,
            tier: "auto".into(),
        };
        assert_eq!(filters(&settings), ["every TCP connect() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --seed 1");
        let settings = TraceConnectSettings { tier: "fexit".into(), ..settings };
        assert_eq!(filters(&settings), ["every TCP connect() of this host", "with tier fexit"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --tier fexit --seed 1");
        let settings = TraceConnectSettings { protocol: "udp".into(), tier: "auto".into(), ..settings };
        assert_eq!(filters(&settings), ["every UDP connect() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --protocol udp --seed 1");
        let settings = TraceConnectSettings { process: Some(7), ..settings };
        assert_eq!(filters(&settings), ["UDP", "process 7"]);
    }
}
