//! The merge of the intervals of all workers. Histograms are added, never averaged, and no interval counts twice.

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::measure::{Histogram, HistogramLog, LogLinear};
use fourtuple_record::{
    Latency, LoadHost, LoadRecord, LoadResults, LoadSettings, Quantile, Quantiles, Record, SCHEMA, Second,
};

use crate::interval::{self, Content, Message, Parts, SECOND_NS, WorkerEnd, add_errors};
use crate::overview::verdict;
use crate::protocol::{Plan, PlannedWorker};
use crate::summary::{BITS, Summary};

/// The outcome of adding a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// It counts.
    New,
    /// It counted before.
    Duplicate,
    /// It is of another run, of a slot that does not exist, or of a worker that was lost before.
    Ignored,
}

/// The part of one worker.
#[derive(Debug)]
pub struct Slot {
    /// Seconds that count, with the percentiles of this worker alone.
    pub seconds: BTreeMap<u64, Second>,
    pub operations: u64,
    pub connections: u64,
    /// Failures by name.
    pub errors: BTreeMap<String, u64>,
    /// The end of the run of the worker, if it arrived.
    pub end: Option<Box<WorkerEnd>>,
    /// The first second that is missing, if the worker was lost.
    pub lost_at: Option<u64>,
    /// Number of messages that arrived more than once.
    pub duplicates: u64,
    /// The total times in coarse buckets, for a worker without a record of its own.
    pub(crate) total: LogLinear,
    /// The whole run came as a summary.
    pub(crate) summarized: bool,
    /// The second of each interval that arrived, by sequence number.
    pub(crate) arrived: BTreeMap<u64, u64>,
    /// The first sequence number that has not arrived.
    pub(crate) next_sequence: u64,
    /// The first second that may not have arrived.
    pub(crate) next: u64,
}

impl Default for Slot {
    fn default() -> Self {
        Slot {
            seconds: BTreeMap::new(),
            operations: 0,
            connections: 0,
            errors: BTreeMap::new(),
            end: None,
            lost_at: None,
            duplicates: 0,
            total: coarse(),
            summarized: false,
            arrived: BTreeMap::new(),
            next_sequence: 0,
            next: 0,
        }
    }
}

impl Slot {
    /// Returns the number of intervals that count.
    pub fn intervals(&self) -> u64 {
        self.seconds.len() as u64
    }

    /// Returns the first second that has not arrived.
    pub fn next_second(&self) -> u64 {
        self.next
    }

    /// Returns the number of intervals that the worker recorded and that did not arrive. 0 if it is not known.
    pub fn missing(&self) -> u64 {
        let end = self.end.as_ref().filter(|_| !self.summarized);
        end.map_or(0, |end| end.intervals.saturating_sub(self.arrived.len() as u64))
    }

    /// Returns whether everything that this worker will send has arrived.
    pub fn is_complete(&self) -> bool {
        self.end.is_some() && self.missing() == 0
    }

    /// Returns the first sequence number that has not arrived.
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }
}

/// Returns an empty histogram with coarse buckets.
fn coarse() -> LogLinear {
    LogLinear::new(BITS, Vec::new(), 0, 0)
}

/// A second of the run that not all workers have completed.
#[derive(Debug)]
struct OpenSecond {
    operations: u64,
    connections: u64,
    errors: u64,
    ports_left: Option<u64>,
    total: LogLinear,
    /// The total times as the log of histograms has them.
    log: Option<Box<Histogram>>,
}

impl OpenSecond {
    fn new() -> OpenSecond {
        OpenSecond { operations: 0, connections: 0, errors: 0, ports_left: None, total: coarse(), log: None }
    }

    fn count(&mut self, second: &Second) {
        self.operations = self.operations.saturating_add(second.operations);
        self.connections = self.connections.saturating_add(second.connections);
        self.errors = self.errors.saturating_add(second.errors);
        if let Some(left) = second.ports_left {
            self.ports_left = Some(self.ports_left.unwrap_or(0).saturating_add(left));
        }
    }
}

/// The sum of all workers.
pub struct Merge {
    run: String,
    slots: Vec<Slot>,
    parts: Parts,
    errors: BTreeMap<String, u64>,
    open: BTreeMap<u64, OpenSecond>,
    seconds: Vec<Second>,
    log: Option<HistogramLog>,
}

impl Merge {
    /// Creates an empty sum of `slots` workers. `log`: the wall-clock time of the start, to record a log of histograms.
    pub fn new(run: &str, slots: u32, log: Option<Duration>) -> Merge {
        Merge {
            run: run.to_owned(),
            slots: (0..slots).map(|_| Slot::default()).collect(),
            parts: Parts::default(),
            errors: BTreeMap::new(),
            open: BTreeMap::new(),
            seconds: Vec::new(),
            log: log.map(HistogramLog::new),
        }
    }

    pub fn add(&mut self, message: Message) -> Added {
        if message.run != self.run {
            return Added::Ignored;
        }
        let Some(slot) = self.slots.get_mut(message.slot as usize) else { return Added::Ignored };
        match message.content {
            Content::End(_) if slot.end.is_some() => {
                slot.duplicates += 1;
                Added::Duplicate
            }
            Content::End(end) => {
                slot.end = Some(end);
                self.close();
                Added::New
            }
            Content::Interval(counts, parts) => {
                if slot.arrived.contains_key(&message.sequence) || slot.seconds.contains_key(&counts.second) {
                    slot.duplicates += 1;
                    return Added::Duplicate;
                }
                if slot.lost_at.is_some_and(|lost| counts.second >= lost) {
                    return Added::Ignored;
                }
                slot.arrived.insert(message.sequence, counts.second);
                // A worker numbers its seconds in order; a second that it lost has no number.
                while let Some(second) = slot.arrived.get(&slot.next_sequence) {
                    slot.next = second + 1;
                    slot.next_sequence += 1;
                }
                slot.operations = slot.operations.saturating_add(counts.operations);
                slot.connections = slot.connections.saturating_add(counts.connections);
                add_errors(&mut slot.errors, &counts.errors);
                add_errors(&mut self.errors, &counts.errors);
                let second = counts.second(&parts.total);
                let total = parts.total.to_log_linear(BITS);
                slot.seconds.insert(counts.second, second);
                slot.total.merge(&total);
                self.parts.merge(&parts);
                let open = self.open.entry(counts.second).or_insert_with(OpenSecond::new);
                open.count(&second);
                open.total.merge(&total);
                if self.log.is_some() {
                    open.log.get_or_insert_default().merge(&parts.total);
                }
                self.close();
                Added::New
            }
        }
    }

    /// Adds the summary of a worker instead of its intervals. It is ignored after an interval of this worker, after its loss, and
    /// if a log of histograms is recorded, which needs the intervals.
    pub fn add_summary(&mut self, summary: Summary) -> Added {
        let Some(slot) = self.slots.get_mut(summary.slot as usize) else { return Added::Ignored };
        if summary.run != self.run || slot.lost_at.is_some() || self.log.is_some() {
            return Added::Ignored;
        }
        if slot.end.is_some() || !slot.seconds.is_empty() {
            slot.duplicates += 1;
            return Added::Duplicate;
        }
        let mut buckets = summary.buckets.as_slice();
        for second in &summary.seconds {
            let (own, rest) = buckets.split_at(second.buckets);
            buckets = rest;
            let open = self.open.entry(second.number).or_insert_with(OpenSecond::new);
            open.count(&second.second);
            let own = own.iter().map(|(bucket, count)| (usize::from(*bucket), u64::from(*count)));
            open.total.add_counted(own, second.sum_ns, second.second.max_ns);
            slot.operations = slot.operations.saturating_add(second.second.operations);
            slot.connections = slot.connections.saturating_add(second.second.connections);
        }
        add_errors(&mut self.errors, &summary.errors);
        slot.errors = summary.errors;
        slot.seconds = summary.seconds.iter().map(|second| (second.number, second.second)).collect();
        slot.next = summary.seconds.last().map_or(0, |last| last.number + 1);
        slot.next_sequence = summary.end.intervals;
        if summary.end.record.is_none() {
            slot.total = summary.parts.total.to_log_linear(BITS);
        }
        slot.summarized = true;
        slot.end = Some(summary.end);
        self.parts.merge(&summary.parts);
        self.close();
        Added::New
    }

    /// Notes that a worker is lost. Its seconds before `second`, and all seconds that have arrived, count; later seconds do not.
    /// Without effect if its end has arrived.
    ///
    /// The order of the end, the intervals and the loss in the stream decides, and every coordinator reads them in this order.
    pub fn lose_at(&mut self, slot: u32, second: u64) {
        if let Some(slot) = self.slots.get_mut(slot as usize).filter(|slot| slot.end.is_none()) {
            slot.lost_at.get_or_insert(second.max(slot.next));
        }
        self.close();
    }

    /// Closes the seconds that every worker has completed. The first seconds of the map are closed, so that they stay in order.
    fn close(&mut self) {
        let until = self.slots.iter().filter(|slot| !slot.is_complete() && slot.lost_at.is_none());
        let until = until.map(|slot| slot.next).min().unwrap_or(u64::MAX);
        while let Some(entry) = self.open.first_entry().filter(|entry| *entry.key() < until) {
            let (number, open) = entry.remove_entry();
            self.push(number, open);
        }
    }

    fn push(&mut self, number: u64, open: OpenSecond) {
        if let Some(log) = &mut self.log {
            log.push(Duration::from_secs(number), Duration::from_secs(1), &open.log.unwrap_or_default());
        }
        self.seconds.push(Second {
            at_ns: number * SECOND_NS,
            operations: open.operations,
            connections: open.connections,
            errors: open.errors,
            p50_ns: open.total.quantile(0.5),
            p99_ns: open.total.quantile(0.99),
            max_ns: open.total.max_ns(),
            ports_left: open.ports_left,
        });
    }

    /// Returns the workers by slot.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the seconds of a worker and removes them.
    fn take_seconds(&mut self, slot: usize) -> Vec<Second> {
        let seconds = self.slots.get_mut(slot).map(|slot| std::mem::take(&mut slot.seconds));
        seconds.unwrap_or_default().into_values().collect()
    }

    /// Returns the latencies of all workers.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Returns the failures of all workers by name.
    pub fn errors(&self) -> &BTreeMap<String, u64> {
        &self.errors
    }

    /// Returns the last second that all workers have completed.
    pub fn last(&self) -> Option<&Second> {
        self.seconds.last()
    }

    /// Returns whether everything has arrived: of each worker all intervals and the end, unless it is lost.
    pub fn is_complete(&self) -> bool {
        self.slots.iter().all(|slot| slot.is_complete() || slot.lost_at.is_some())
    }

    /// Returns all seconds and the log of histograms, and closes the merge.
    pub fn finish(&mut self) -> (Vec<Second>, Option<String>) {
        for (number, open) in std::mem::take(&mut self.open) {
            self.push(number, open);
        }
        (std::mem::take(&mut self.seconds), self.log.take().map(HistogramLog::finish))
    }
}

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
    let parts: Vec<&LoadResults> = ended.iter().map(|(_, results)| *results).collect();
    // Of the workers that ended: the CPU time of a lost worker is unknown.
    let mut merged = LoadResults::merged(&parts);
    merged.slow.truncate(MAX_SLOW);
    let sum = |of: fn(&Slot) -> u64| interval::sum(merge.slots().iter().map(of));
    let operations = sum(|slot| slot.operations);
    let elapsed_ns = merge.slots().iter().map(elapsed).max().unwrap_or(0);
    let ramp = merged.hold.map_or(0, |held| held.ramp_ns);
    let rate_per_s = rate(operations, elapsed_ns.saturating_sub(ramp));
    let (engine, engine_reason) = engine(&ended);
    let times = merge.parts();
    LoadResults {
        operations,
        connections: sum(|slot| slot.connections),
        errors: merge.errors().clone(),
        elapsed_ns,
        rate_per_s,
        offered_per_s: plan.settings.rate_per_s.unwrap_or(rate_per_s),
        engine,
        engine_reason,
        close: plan.settings.close.clone(),
        latency_ns: Latency {
            search: (&times.search).into(),
            handshake: (&times.handshake).into(),
            first_byte: (&times.first_byte).into(),
            total: (&times.total).into(),
            tls: Quantiles::default(),
        },
        late_ns: (&times.late).into(),
        distribution: times
            .total
            .distribution()
            .into_iter()
            .map(|(share, ns)| Quantile { share, ns })
            .collect(),
        advice: advice(&ended),
        hosts,
        seconds,
        ..merged
    }
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
            .or_else(|| (slot.total.count() > 0).then(|| slot.total.summary().into())),
        seconds,
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use proptest::prelude::*;

    use super::*;
    use crate::interval::MAX_SECOND;
    use crate::interval::tests::message;
    use crate::overview::tests::plan;
    use crate::summary::tests::encoded;

    fn end(slot: u32, intervals: u64) -> Message {
        let end = WorkerEnd { record: None, failed: None, start_error_ns: 0, intervals, dropped: 0 };
        Message { run: "r".into(), slot, sequence: intervals, content: Content::End(Box::new(end)) }
    }

    fn merge(slots: u32) -> Merge {
        Merge::new("r", slots, None)
    }

    proptest! {
        /// In any order and with any repetition, the merge has each sample once.
        #[test]
        fn no_interval_counts_twice(seed in any::<u64>(), slots in 1_u32..6, seconds in 1_u64..8) {
            let mut random = Rng::with_seed(seed);
            let mut raw = Vec::new();
            let mut messages = Vec::new();
            for slot in 0..slots {
                for second in 0..seconds {
                    let totals: Vec<u64> =
                        (0..random.usize(..40)).map(|_| random.u64(1_000..1_000_000_000)).collect();
                    raw.extend(&totals);
                    let message = message(slot, second, &totals);
                    messages.extend((0..random.usize(1..4)).map(|_| message.clone()));
                }
                messages.push(end(slot, seconds));
            }
            random.shuffle(&mut messages);
            let mut merge = merge(slots);
            let new = messages.into_iter().filter(|message| merge.add(message.clone()) == Added::New).count();
            prop_assert_eq!(new as u64, u64::from(slots) * (seconds + 1));
            prop_assert!(merge.is_complete());
            let mut whole = Histogram::new();
            raw.iter().for_each(|total| whole.record(*total));
            prop_assert_eq!(merge.parts().total.summary(), whole.summary());
            let (merged, _) = merge.finish();
            prop_assert_eq!(merged.iter().map(|second| second.operations).sum::<u64>(), raw.len() as u64);
            let at: Vec<u64> = merged.iter().map(|second| second.at_ns / 1_000_000_000).collect();
            prop_assert_eq!(at, (0..seconds).collect::<Vec<_>>());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Summaries and intervals have the same sum, whichever of them a worker sends.
        #[test]
        fn summaries_equal_intervals(seed in any::<u64>(), slots in 1_u32..5, seconds in 1_u64..6) {
            let mut random = Rng::with_seed(seed);
            let (mut by_interval, mut mixed) = (merge(slots), merge(slots));
            for slot in 0..slots {
                let mut numbers: Vec<u64> = (0..seconds).collect();
                numbers.retain(|second| *second == 0 || random.u8(..) > 40);
                let messages: Vec<Message> = numbers
                    .into_iter()
                    .enumerate()
                    .map(|(sequence, second)| {
                        let totals: Vec<u64> = (0..random.usize(..40)).map(|_| random.u64(..1 << 42)).collect();
                        let mut message = Message { sequence: sequence as u64, ..message(slot, second, &totals) };
                        let Content::Interval(counts, parts) = &mut message.content else { panic!() };
                        counts.errors.insert("timeout".into(), random.u64(..3));
                        counts.ports_left = random.bool().then(|| random.u64(..30_000));
                        parts.late.record(random.u64(..1_000_000));
                        message
                    })
                    .collect();
                let end = end(slot, messages.len() as u64);
                let summary = Summary::decode(&encoded(&messages, slot)).unwrap().unwrap();
                if random.bool() {
                    prop_assert_eq!(mixed.add_summary(summary), Added::New);
                    prop_assert_eq!(mixed.add(messages[0].clone()), Added::Duplicate);
                } else {
                    messages.iter().for_each(|message| require_new(mixed.add(message.clone())));
                    prop_assert_eq!(mixed.add_summary(summary), Added::Duplicate);
                    mixed.add(end.clone());
                }
                messages.into_iter().for_each(|message| require_new(by_interval.add(message)));
                by_interval.add(end);
            }
            prop_assert!(mixed.is_complete() && by_interval.is_complete());
            prop_assert_eq!(mixed.finish(), by_interval.finish());
            prop_assert_eq!(mixed.errors(), by_interval.errors());
            for (one, two) in [
                (&mixed.parts().total, &by_interval.parts().total),
                (&mixed.parts().late, &by_interval.parts().late),
            ] {
                prop_assert_eq!(one.distribution(), two.distribution());
                prop_assert_eq!(one.summary(), two.summary());
            }
            for (one, two) in mixed.slots().iter().zip(by_interval.slots()) {
                prop_assert_eq!(&one.seconds, &two.seconds);
                prop_assert_eq!(&one.errors, &two.errors);
                prop_assert_eq!(
                    (one.operations, one.connections, one.intervals(), one.missing(), one.next_second()),
                    (two.operations, two.connections, two.intervals(), two.missing(), two.next_second())
                );
                prop_assert_eq!(&one.total, &two.total);
            }
        }
    }

    fn require_new(added: Added) {
        assert_eq!(added, Added::New);
    }

    #[test]
    fn a_summary_needs_an_untouched_slot() {
        let messages = [message(0, 0, &[1_000; 3])];
        let summary = || Summary::decode(&encoded(&messages, 0)).unwrap().unwrap();
        let mut lost = merge(1);
        lost.lose_at(0, 0);
        assert_eq!(lost.add_summary(summary()), Added::Ignored);
        let mut logged = Merge::new("r", 1, Some(Duration::ZERO));
        assert_eq!(logged.add_summary(summary()), Added::Ignored);
        assert_eq!(Merge::new("other", 1, None).add_summary(summary()), Added::Ignored);
        assert_eq!(merge(0).add_summary(summary()), Added::Ignored);
    }

    #[test]
    fn percentiles_are_merged_not_averaged() {
        let mut merge = merge(2);
        merge.add(message(0, 0, &[1_000; 99]));
        assert_eq!(merge.last(), None, "the second is open until both workers have completed it");
        merge.add(message(1, 0, &[1_000_000; 1]));
        assert_eq!(merge.last().map(|second| second.operations), Some(100));
        let (seconds, _) = merge.finish();
        // An average of the two medians would be half a millisecond.
        let near = |found: u64| found.abs_diff(1_000) <= 8;
        assert!(near(seconds[0].p50_ns) && near(seconds[0].p99_ns), "{:?}", seconds[0]);
        assert_eq!(seconds[0].max_ns, 1_000_000);
    }

    #[test]
    fn complete_seconds_of_a_lost_worker_count() {
        let mut merge = merge(2);
        for second in 0..5 {
            merge.add(message(0, second, &[1_000]));
        }
        merge.add(message(1, 0, &[2_000]));
        merge.add(message(1, 1, &[2_000]));
        merge.lose_at(1, 2);
        assert_eq!(merge.slots()[1].lost_at, Some(2));
        // The worker was stopped, and continues.
        assert_eq!(merge.add(message(1, 2, &[9_000_000_000])), Added::Ignored);
        assert_eq!(merge.add(message(1, 6, &[2_000])), Added::Ignored);
        merge.add(end(0, 5));
        assert!(merge.is_complete());
        let (seconds, _) = merge.finish();
        assert_eq!(seconds.iter().map(|second| second.operations).collect::<Vec<_>>(), [2, 2, 1, 1, 1]);
        assert_eq!(merge.parts().total.count(), 7);
        assert!(merge.parts().total.max() < 3_000);
    }

    #[test]
    fn the_first_of_end_and_loss_counts() {
        let (mut ended, mut lost) = (merge(1), merge(1));
        for merge in [&mut ended, &mut lost] {
            (0..3).for_each(|second| require_new(merge.add(message(0, second, &[1_000]))));
        }
        ended.add(end(0, 3));
        ended.lose_at(0, 2);
        assert_eq!((ended.slots()[0].lost_at, ended.is_complete()), (None, true));
        // The third second arrived after the decision and before the loss, so it counts.
        lost.lose_at(0, 2);
        lost.lose_at(0, 1);
        lost.add(end(0, 4));
        assert_eq!(lost.add(message(0, 3, &[1_000])), Added::Ignored);
        assert_eq!((lost.slots()[0].lost_at, lost.slots()[0].intervals()), (Some(3), 3));
    }

    #[test]
    fn an_end_before_its_last_intervals_is_not_complete() {
        let mut merge = merge(1);
        merge.add(end(0, 2));
        assert!(!merge.is_complete());
        merge.add(message(0, 1, &[1]));
        assert_eq!((merge.slots()[0].missing(), merge.slots()[0].next_sequence()), (1, 0));
        merge.add(message(0, 0, &[1]));
        assert!(merge.is_complete());
        merge.lose_at(0, 2);
        assert_eq!(merge.slots()[0].lost_at, None, "a worker that ended is not lost");
    }

    /// Everything that `decode` accepts, as often as it accepts it, has a sum and a record.
    #[test]
    fn extreme_numbers_have_a_sum() {
        let most = |slot: u32, second: u64| {
            let mut message = message(slot, second, &[u64::MAX]);
            let Content::Interval(counts, parts) = &mut message.content else { panic!() };
            (counts.operations, counts.connections, counts.ports_left) = (1 << 40, 1 << 40, Some(1 << 40));
            counts.errors.insert("timeout".into(), 1 << 40);
            parts.late.record(u64::MAX);
            Message::decode(&message.encode().unwrap()).unwrap()
        };
        let mut merge = Merge::new("r", 2, Some(Duration::MAX));
        for second in [0, 1, MAX_SECOND] {
            (0..2).for_each(|slot| assert_eq!(merge.add(most(slot, second)), Added::New));
        }
        // As many as there could be: they fit the sums only because these saturate.
        for slot in &mut merge.slots {
            slot.operations = u64::MAX;
            slot.errors.insert("timeout".into(), u64::MAX);
        }
        merge.errors.insert("timeout".into(), u64::MAX);
        merge.add(Message { sequence: 9, ..most(0, 2) });
        merge.lose_at(0, MAX_SECOND);
        merge.lose_at(1, MAX_SECOND);
        let (record, _) = record(&plan(2), merge, false);
        assert_eq!((record.results.operations, record.results.errors["timeout"]), (u64::MAX, u64::MAX));
    }

    #[test]
    fn messages_of_other_runs_and_slots_are_ignored() {
        let mut merge = merge(1);
        assert_eq!(merge.add(Message { run: "other".into(), ..message(0, 0, &[1]) }), Added::Ignored);
        assert_eq!(merge.add(message(1, 0, &[1])), Added::Ignored);
        assert_eq!(merge.parts().total.count(), 0);
    }

    #[test]
    fn the_log_has_every_second_in_order() {
        let mut merge = Merge::new("r", 2, Some(Duration::ZERO));
        for second in [1, 0, 2] {
            merge.add(message(0, second, &[1_000]));
            merge.add(message(1, second, &[1_000]));
        }
        let (_, log) = merge.finish();
        let log = log.unwrap();
        let lines: Vec<&str> = log.lines().skip(5).map(|line| &line[..5]).collect();
        assert_eq!(lines, ["0.000", "1.000", "2.000"], "{log}");
    }

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
