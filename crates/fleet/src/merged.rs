//! The record of a run on several hosts.

use std::collections::BTreeMap;

use fourtuple_measure::Histogram;
use fourtuple_record::{
    Held, Latency, LoadAddress, LoadHost, LoadPorts, LoadRecord, LoadResults, LoadSettings, LoadStatus,
    Quantile, Quantiles, Record, SCHEMA, Second,
};

use crate::interval::{self, SECOND_NS};
use crate::merge::{Merge, Slot};
use crate::protocol::{Plan, PlannedWorker};
use crate::verdict::verdict;

/// Maximum number of slow operations in the list.
const MAX_SLOW: usize = 1000;

/// Returns the merged record and the log of histograms.
pub(crate) fn record(plan: &Plan, mut merge: Merge, interrupted: bool) -> (LoadRecord, Option<String>) {
    let validity = verdict(plan, merge.slots(), interrupted);
    let (seconds, log) = merge.finish();
    let address = plan.workers.first().map_or(String::new(), |worker| worker.settings.address.clone());
    let record = Record {
        schema: SCHEMA.to_owned(),
        command: "load".to_owned(),
        started: plan.started.clone(),
        host: plan.host.clone(),
        settings: LoadSettings { address, ..plan.settings.clone() },
        validity,
        results: results(plan, &mut merge, seconds),
    };
    (record, log)
}

/// Returns the results of the workers that ended, with the name of each.
fn ended<'a>(plan: &'a Plan, merge: &'a Merge) -> Vec<(&'a str, &'a LoadResults)> {
    let workers = plan.workers.iter().zip(merge.slots());
    workers
        .filter(|(_, slot)| slot.lost_at.is_none())
        .filter_map(|(worker, slot)| {
            let record = slot.end.as_ref()?.record.as_ref()?;
            Some((worker.agent.name.as_str(), &record.results))
        })
        .collect()
}

fn results(plan: &Plan, merge: &mut Merge, seconds: Vec<Second>) -> LoadResults {
    let hosts = plan.workers.iter().enumerate().map(|(slot, worker)| host(worker, slot, merge)).collect();
    let merge = &*merge;
    let ended = ended(plan, merge);
    let sum = |of: fn(&LoadResults) -> u64| interval::sum(ended.iter().map(|(_, results)| of(results)));
    let sum_of_slots = |of: fn(&Slot) -> u64| interval::sum(merge.slots().iter().map(of));
    let operations = sum_of_slots(|slot| slot.operations);
    let connections = sum_of_slots(|slot| slot.connections);
    let elapsed_ns = merge.slots().iter().map(elapsed).max().unwrap_or(0);
    let ramp = ended.iter().filter_map(|(_, results)| Some(results.hold?.ramp_ns)).max().unwrap_or(0);
    let rate_per_s = rate(operations, elapsed_ns.saturating_sub(ramp));
    // Of the workers that ended: the CPU time of a lost worker is unknown.
    let (known, known_connections) = (sum(|results| results.operations), sum(|results| results.connections));
    let cpu: u64 = sum(|results| results.client_cpu_ns_per_operation.saturating_mul(results.operations));
    let calls: f64 =
        ended.iter().map(|(_, results)| results.syscalls_per_connection * results.connections as f64).sum();
    let (engine, engine_reason) = engine(&ended);
    let parts = merge.parts();
    let mut slow: Vec<_> = ended.iter().flat_map(|(_, results)| results.slow.clone()).collect();
    slow.sort_by_key(|slow| slow.at_ns);
    slow.truncate(MAX_SLOW);
    LoadResults {
        operations,
        connections,
        retried: sum(|results| results.retried),
        errors: merge.errors().clone(),
        error_details: details(&ended),
        statuses: statuses(&ended),
        elapsed_ns,
        rate_per_s,
        offered_per_s: plan.settings.rate_per_s.unwrap_or(rate_per_s),
        client_cpu_ns_per_operation: cpu / known.max(1),
        syscalls_per_connection: calls / known_connections.max(1) as f64,
        engine,
        engine_reason,
        close: plan.settings.close.clone(),
        strategy: ended.first().and_then(|(_, results)| results.strategy.clone()),
        latency_ns: Latency {
            search: quantiles(&parts.search),
            handshake: quantiles(&parts.handshake),
            first_byte: quantiles(&parts.first_byte),
            total: quantiles(&parts.total),
        },
        late_ns: quantiles(&parts.late),
        slow,
        slow_count: sum(|results| results.slow_count),
        distribution: parts
            .total
            .distribution()
            .into_iter()
            .map(|(share, ns)| Quantile { share, ns })
            .collect(),
        ports: ports(&ended),
        hold: hold(&ended),
        advice: advice(&ended),
        hosts,
        addresses: addresses(&ended),
        seconds,
    }
}

/// Returns what the first worker said about each failure.
fn details(ended: &[(&str, &LoadResults)]) -> BTreeMap<String, String> {
    let mut first = BTreeMap::new();
    for (name, detail) in ended.iter().flat_map(|(_, results)| &results.error_details) {
        first.entry(name.clone()).or_insert_with(|| detail.clone());
    }
    first
}

/// Returns the sums of the workers that ended, by status code.
fn statuses(ended: &[(&str, &LoadResults)]) -> Vec<LoadStatus> {
    let mut sums: BTreeMap<u16, LoadStatus> = BTreeMap::new();
    for one in ended.iter().flat_map(|(_, results)| &results.statuses) {
        let empty = || LoadStatus { count: 0, ..one.clone() };
        let sum = sums.entry(one.code).or_insert_with(empty);
        sum.count = sum.count.saturating_add(one.count);
    }
    sums.into_values().collect()
}

/// Returns the sums of the workers that ended, by address.
fn addresses(ended: &[(&str, &LoadResults)]) -> Vec<LoadAddress> {
    let mut sums: Vec<LoadAddress> = Vec::new();
    for one in ended.iter().flat_map(|(_, results)| &results.addresses) {
        match sums.iter_mut().find(|sum| sum.address == one.address) {
            Some(sum) => sum.connections = sum.connections.saturating_add(one.connections),
            None => sums.push(one.clone()),
        }
    }
    sums
}

/// Returns the time that a worker measured: until its end, or its complete seconds if it was lost.
fn elapsed(slot: &Slot) -> u64 {
    let complete = slot.next_second() * SECOND_NS;
    match (slot.lost_at, &slot.end) {
        (Some(lost), _) => lost * SECOND_NS,
        (None, Some(end)) => end.record.as_ref().map_or(complete, |record| record.results.elapsed_ns),
        (None, None) => complete,
    }
}

fn rate(operations: u64, elapsed_ns: u64) -> f64 {
    operations as f64 * 1e9 / elapsed_ns.max(1) as f64
}

/// Returns the engine of most workers. If the engines differ, the reason names the workers with another engine.
fn engine(ended: &[(&str, &LoadResults)]) -> (String, Option<String>) {
    let count = |engine: &str| ended.iter().filter(|(_, results)| results.engine == engine).count();
    let engine = if count("uring") >= count("epoll") { "uring" } else { "epoll" };
    let others: Vec<&str> =
        ended.iter().filter(|(_, results)| results.engine != engine).map(|(name, _)| *name).collect();
    let reason = ended.iter().find_map(|(_, results)| results.engine_reason.clone());
    let reason = match others.is_empty() {
        true => reason,
        false => {
            Some(format!("it is not the engine of {}; {}", others.join(", "), reason.unwrap_or_default()))
        }
    };
    (engine.to_owned(), reason)
}

/// Returns the sum of the port budgets: every host has source ports of its own. The earliest stall counts.
fn ports(ended: &[(&str, &LoadResults)]) -> Option<LoadPorts> {
    let all: Vec<&LoadPorts> = ended.iter().filter_map(|(_, results)| results.ports.as_ref()).collect();
    let sum = |of: fn(&LoadPorts) -> u64| interval::sum(all.iter().map(|ports| of(ports)));
    let least = |of: fn(&LoadPorts) -> Option<u64>| all.iter().filter_map(|ports| of(ports)).min();
    (!all.is_empty()).then(|| LoadPorts {
        budget: sum(|ports| ports.budget),
        taken_before: sum(|ports| ports.taken_before),
        needed: all.iter().map(|ports| ports.needed).collect::<Option<Vec<u64>>>().map(interval::sum),
        used: sum(|ports| ports.used),
        kept_ns: all.iter().map(|ports| ports.kept_ns).max().unwrap_or(0),
        predicted_stall_ns: least(|ports| ports.predicted_stall_ns),
        stalled_ns: least(|ports| ports.stalled_ns),
        stall_length_ns: all.iter().map(|ports| ports.stall_length_ns).max().unwrap_or(0),
    })
}

fn hold(ended: &[(&str, &LoadResults)]) -> Option<Held> {
    let all: Vec<Held> = ended.iter().filter_map(|(_, results)| results.hold).collect();
    (!all.is_empty()).then(|| Held {
        opened: interval::sum(all.iter().map(|held| held.opened)),
        lost: interval::sum(all.iter().map(|held| held.lost)),
        ramp_ns: all.iter().map(|held| held.ramp_ns).max().unwrap_or(0),
    })
}

/// Returns the advice of all workers, each sentence once, with the hosts that give it.
fn advice(ended: &[(&str, &LoadResults)]) -> Vec<String> {
    let mut by_sentence: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, results) in ended {
        for sentence in &results.advice {
            by_sentence.entry(sentence).or_default().push(name);
        }
    }
    let all = ended.len();
    by_sentence
        .into_iter()
        .map(|(sentence, hosts)| match hosts.len() == all {
            true => sentence.to_owned(),
            false => format!("{}: {sentence}", hosts.join(", ")),
        })
        .collect()
}

fn host(worker: &PlannedWorker, number: usize, merge: &mut Merge) -> LoadHost {
    let intervals = merge.slots()[number].intervals();
    // A run of 1,000 hosts has them by the million, so they are not copied.
    let seconds = merge.take_seconds(number);
    let slot = &merge.slots()[number];
    // A lost worker may end later: whether its end arrives must not change the record.
    let end = slot.end.as_ref().filter(|_| slot.lost_at.is_none());
    let results = end.and_then(|end| end.record.as_ref()).map(|record| &record.results);
    LoadHost {
        name: worker.agent.name.clone(),
        labels: worker.agent.labels.clone(),
        kernel: worker.agent.kernel.clone(),
        cpus: worker.agent.cpus,
        address: worker.settings.address.clone(),
        clock_offset_ns: worker.clock.offset_ns,
        clock_bound_ns: worker.clock.bound_ns,
        start_error_ns: end.map(|end| end.start_error_ns),
        lost_at_ns: slot.lost_at.map(|second| second * SECOND_NS),
        intervals,
        missing: end.map_or(0, |end| slot.missing().saturating_add(end.dropped)),
        operations: slot.operations,
        connections: slot.connections,
        errors: slot.errors.clone(),
        rate_per_s: rate(slot.operations, elapsed(slot)),
        offered_per_s: worker.settings.rate_per_s,
        client_cpu_ns_per_operation: results.map(|results| results.client_cpu_ns_per_operation),
        total_ns: results
            .map(|results| results.latency_ns.total)
            .or_else(|| (slot.total.count() > 0).then(|| summary(slot.total.summary()))),
        seconds,
    }
}

fn quantiles(histogram: &Histogram) -> Quantiles {
    summary(histogram.summary())
}

fn summary(short: fourtuple_measure::Quantiles) -> Quantiles {
    Quantiles {
        samples: short.count,
        mean: short.mean,
        p50: short.p50,
        p99: short.p99,
        p999: short.p999,
        max: short.max,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interval::tests::message;
    use crate::verdict::tests::plan;

    #[test]
    fn a_lost_worker_counts_until_it_was_lost() {
        let mut merge = Merge::new("r", 2, None);
        for second in 0..4 {
            merge.add(message(0, second, &[1_000_000; 10]));
        }
        merge.add(message(1, 0, &[2_000_000; 5]));
        merge.lose_at(0, 4);
        merge.lose_at(1, 1);
        let (record, _) = record(&plan(2), merge, false);
        let results = &record.results;
        assert_eq!((results.operations, results.elapsed_ns), (45, 4_000_000_000));
        assert_eq!(results.latency_ns.total.samples, 45);
        let hosts: Vec<_> = results.hosts.iter().map(|host| (host.operations, host.lost_at_ns)).collect();
        assert_eq!(hosts, [(40, Some(4_000_000_000)), (5, Some(1_000_000_000))]);
        assert_eq!(results.hosts[1].rate_per_s, 5.0);
        let total = results.hosts[1].total_ns.unwrap();
        assert_eq!((total.samples, total.mean, total.max), (5, 2_000_000, 2_000_000));
        assert!(
            total.p50.abs_diff(2_000_000) < 16_000 && total.p99.abs_diff(2_000_000) < 16_000,
            "{total:?}"
        );
        assert_eq!(record.validity.len(), 2);
    }
}
