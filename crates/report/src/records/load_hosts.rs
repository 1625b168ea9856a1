//! The hosts of a load on several hosts: stragglers, skew, and the seconds of each host on a common scale.

use fourtuple_record::{LoadHost, LoadResults, Second};

use crate::document::{Document, Tone};
use crate::number::{NOTHING, duration, rate};
use crate::table;
use crate::table::{Cell, Table};
use crate::words::plural;

/// Seconds that a picture shows at most; longer runs are shown by the worst second of each step.
const STEPS: usize = 24;

/// A host is a straggler from this multiple of the median of all 99th percentiles.
const SLOW: f64 = 2.0;

/// A host is a straggler below this share of its offered load.
const DELIVERED: f64 = 0.95;

/// Adds the hosts, the worst first.
pub(super) fn show(document: &mut Document, results: &LoadResults) {
    if results.hosts.is_empty() {
        return;
    }
    let median = median_p99(&results.hosts);
    let mut hosts: Vec<&LoadHost> = results.hosts.iter().collect();
    hosts.sort_by_key(|host| (host.lost_at_ns.is_none(), std::cmp::Reverse(p99(host)), &host.name));
    document.heading("Hosts");
    document.facts(facts(results));
    let most = highest(&hosts, |second| second.operations as f64);
    let extent = table::extent(seconds(&hosts).map(|second| second.p99_ns as f64));
    let rates = |host: &&LoadHost| {
        let values = steps(host, |second| second.operations as f64, least);
        Cell::spark(table::linear(values.iter().copied(), most), &values, most)
    };
    let tails = |host: &&LoadHost| {
        let Some((low, high)) = extent else { return NOTHING.into() };
        let values = steps(host, |second| second.p99_ns as f64, greatest);
        let positions: Vec<f64> = values
            .iter()
            .map(|value| if *value > 0.0 { (value / low).log2() / (high / low).log2().max(1.0) } else { 0.0 })
            .collect();
        Cell::spark(table::log(values.into_iter(), (low, high)), &positions, 1.0)
    };
    document.table(
        Table::of(&hosts)
            .name("host", |host| host.name.clone())
            .text("state", 0, |host| state(host, median))
            .number("rate", 0, |host| rate(host.rate_per_s))
            .number("offered", 4, |host| host.offered_per_s.map_or(NOTHING.to_owned(), rate))
            .text("operations per second", 2, rates)
            .number("p50", 3, |host| host.total_ns.map_or(NOTHING.to_owned(), |total| duration(total.p50)))
            .number("p99", 1, |host| host.total_ns.map_or(NOTHING.to_owned(), |total| duration(total.p99)))
            .text("p99 (log)", 3, tails)
            .number("failed", 1, |host| Cell::bad_count(failed(host)))
            .number("start|Start, late", 5, |host| host.start_error_ns.map_or(NOTHING.to_owned(), duration))
            .number("clock|Clock, error", 6, |host| duration(host.clock_bound_ns))
            .text("kernel", 7, |host| host.kernel.clone())
            .limit(24, 200, "host"),
    );
    document.explain(
        "The pictures have one scale for all hosts; a column is a second, in long runs the worst of several. A straggler has \
         a 99th percentile of twice the median of all hosts, or less than 95% of its offered load.",
    );
}

/// Describes the fleet: hosts, stragglers, lost workers, and the skew of the starts.
fn facts(results: &LoadResults) -> Vec<String> {
    let hosts = &results.hosts;
    let median = median_p99(hosts);
    let number = |of: &dyn Fn(&&LoadHost) -> bool| hosts.iter().filter(of).count() as u64;
    let stragglers = number(&|host| is_straggler(host, median));
    let lost = number(&|host| host.lost_at_ns.is_some());
    let skew = |host: &LoadHost| Some(host.start_error_ns? + host.clock_bound_ns);
    let mut facts = vec![plural(hosts.len() as u64, "host")];
    if lost > 0 {
        facts.push(format!("{lost} lost"));
    }
    facts.push(match stragglers {
        0 => "no stragglers".to_owned(),
        some => plural(some, "straggler"),
    });
    if let Some(skew) = hosts.iter().filter_map(skew).max() {
        facts.push(format!("started within {} of the common start", duration(skew)));
    }
    facts
}

fn state(host: &LoadHost, median: u64) -> Cell {
    match host.lost_at_ns {
        Some(at) => Cell::toned(format!("lost after {}", duration(at)), Tone::Bad),
        None if is_straggler(host, median) => Cell::toned("straggler", Tone::Bad),
        // A worker without a record of its own failed or was not done at the end.
        None if host.client_cpu_ns_per_operation.is_none() => Cell::toned("did not finish", Tone::Bad),
        None => "fine".into(),
    }
}

fn is_straggler(host: &LoadHost, median: u64) -> bool {
    let is_slow = p99(host) as f64 >= SLOW * median as f64 && median > 0;
    let delivers = host.offered_per_s.is_none_or(|offered| host.rate_per_s >= DELIVERED * offered);
    host.lost_at_ns.is_none() && (is_slow || !delivers)
}

fn p99(host: &LoadHost) -> u64 {
    host.total_ns.map_or(0, |total| total.p99)
}

/// Returns the median of the 99th percentiles of hosts that were not lost, the lower one of two; 0 without any.
fn median_p99(hosts: &[LoadHost]) -> u64 {
    let whole = hosts.iter().filter(|host| host.lost_at_ns.is_none());
    let mut all: Vec<u64> = whole.filter_map(|host| Some(host.total_ns?.p99)).collect();
    all.sort_unstable();
    all.get(all.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

fn failed(host: &LoadHost) -> u64 {
    host.errors.values().fold(0, |sum, count| sum.saturating_add(*count))
}

fn seconds<'a>(hosts: &'a [&LoadHost]) -> impl Iterator<Item = &'a Second> {
    hosts.iter().flat_map(|host| &host.seconds)
}

fn highest(hosts: &[&LoadHost], of: fn(&Second) -> f64) -> f64 {
    seconds(hosts).map(of).fold(0.0, f64::max)
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn greatest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Returns the whole seconds of a host in at most [`STEPS`] groups of about equal size.
fn steps(host: &LoadHost, of: fn(&Second) -> f64, join: fn(&[f64]) -> f64) -> Vec<f64> {
    // The last second ends with the run and has fewer operations.
    let whole = host.seconds.len().saturating_sub(1).max(host.seconds.len().min(1));
    let values: Vec<f64> = host.seconds[..whole].iter().map(of).collect();
    let count = values.len().min(STEPS);
    let edge = |step: usize| step * values.len() / count;
    (0..count).map(|step| join(&values[edge(step)..edge(step + 1)])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fourtuple_record::Quantiles;

    use super::*;

    fn host(p99: u64, offered: f64, rate: f64) -> LoadHost {
        LoadHost {
            name: "h".into(),
            labels: BTreeMap::new(),
            kernel: String::new(),
            cpus: 1,
            address: String::new(),
            clock_offset_ns: 0,
            clock_bound_ns: 0,
            start_error_ns: None,
            lost_at_ns: None,
            intervals: 0,
            missing: 0,
            operations: 0,
            connections: 0,
            errors: BTreeMap::new(),
            rate_per_s: rate,
            offered_per_s: Some(offered),
            client_cpu_ns_per_operation: None,
            total_ns: Some(Quantiles { p99, ..Quantiles::default() }),
            seconds: Vec::new(),
        }
    }

    #[test]
    fn a_slow_or_late_host_is_a_straggler() {
        let hosts = [host(100, 10.0, 10.0), host(110, 10.0, 10.0), host(300, 10.0, 10.0)];
        let median = median_p99(&hosts);
        assert_eq!(median, 110);
        assert_eq!(hosts.map(|host| is_straggler(&host, median)), [false, false, true]);
        assert!(is_straggler(&host(100, 10.0, 9.0), median));
        assert!(!is_straggler(&LoadHost { lost_at_ns: Some(1_000_000_000), ..host(300, 10.0, 1.0) }, median));
        assert_eq!(median_p99(&[]), 0);
        let lost = LoadHost { lost_at_ns: Some(1_000_000_000), ..host(9, 1.0, 1.0) };
        assert_eq!(median_p99(&[lost, host(100, 1.0, 1.0)]), 100);
    }
}
