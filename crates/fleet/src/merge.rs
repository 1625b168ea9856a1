//! The merge of the intervals of all workers. Histograms are added, never averaged, and no interval counts twice.

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_measure::{Histogram, HistogramLog};
use fourtuple_record::Second;

use crate::interval::{Content, Counts, Message, Parts, WorkerEnd};

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
#[derive(Debug, Default)]
pub struct Slot {
    /// Seconds that count, with the percentiles of this worker alone.
    pub seconds: BTreeMap<u64, Second>,
    /// Operations that succeeded.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures by name.
    pub errors: BTreeMap<String, u64>,
    /// The end of the run of the worker, if it arrived.
    pub end: Option<Box<WorkerEnd>>,
    /// The first second that is missing, if the worker was lost.
    pub lost_at: Option<u64>,
    /// Number of messages that arrived more than once.
    pub duplicates: u64,
    /// The second of each interval that arrived, by sequence number.
    pub(crate) arrived: BTreeMap<u64, u64>,
    /// The first sequence number that has not arrived.
    pub(crate) next_sequence: u64,
    /// The first second that may not have arrived.
    pub(crate) next: u64,
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
        self.end.as_ref().map_or(0, |end| end.intervals.saturating_sub(self.arrived.len() as u64))
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

/// A second of the run that not all workers have completed.
#[derive(Debug, Default)]
struct OpenSecond {
    counts: Counts,
    total: Histogram,
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

    /// Adds a message.
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
                slot.operations += counts.operations;
                slot.connections += counts.connections;
                for (name, count) in &counts.errors {
                    *slot.errors.entry(name.clone()).or_default() += count;
                    *self.errors.entry(name.clone()).or_default() += count;
                }
                slot.seconds.insert(counts.second, counts.second(&parts.total));
                self.parts.merge(&parts);
                self.add_to_second(&counts, &parts.total);
                self.close();
                Added::New
            }
        }
    }

    fn add_to_second(&mut self, counts: &Counts, total: &Histogram) {
        let open = self.open.entry(counts.second).or_default();
        open.counts.second = counts.second;
        open.counts.operations += counts.operations;
        open.counts.connections += counts.connections;
        for (name, count) in &counts.errors {
            *open.counts.errors.entry(name.clone()).or_default() += count;
        }
        if let Some(left) = counts.ports_left {
            *open.counts.ports_left.get_or_insert(0) += left;
        }
        if total.count() > 0 {
            open.total.merge(total);
        }
    }

    /// Notes that a worker is lost. Its seconds before `second` count; later ones do not. Without effect if its end has arrived.
    pub fn lose_at(&mut self, slot: u32, second: u64) {
        if let Some(slot) = self.slots.get_mut(slot as usize).filter(|slot| slot.end.is_none()) {
            slot.lost_at.get_or_insert(second);
        }
        self.close();
    }

    /// Closes the seconds that every worker has completed. The first seconds of the map are closed, so that they stay in order.
    fn close(&mut self) {
        let until = self.slots.iter().filter(|slot| !slot.is_complete() && slot.lost_at.is_none());
        let until = until.map(|slot| slot.next).min().unwrap_or(u64::MAX);
        while let Some(entry) = self.open.first_entry().filter(|entry| *entry.key() < until) {
            let open = entry.remove();
            self.push(&open);
        }
    }

    fn push(&mut self, open: &OpenSecond) {
        if let Some(log) = &mut self.log {
            log.push(Duration::from_secs(open.counts.second), Duration::from_secs(1), &open.total);
        }
        self.seconds.push(open.counts.second(&open.total));
    }

    /// Returns the workers by slot.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
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
        for (_, open) in std::mem::take(&mut self.open) {
            self.push(&open);
        }
        (std::mem::take(&mut self.seconds), self.log.take().map(HistogramLog::finish))
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use proptest::prelude::*;

    use super::*;
    use crate::interval::tests::message;

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

    #[test]
    fn percentiles_are_merged_not_averaged() {
        let mut merge = merge(2);
        merge.add(message(0, 0, &[1_000; 99]));
        assert_eq!(merge.last(), None, "the second is open until both workers have completed it");
        merge.add(message(1, 0, &[1_000_000; 1]));
        assert_eq!(merge.last().map(|second| second.operations), Some(100));
        let (seconds, _) = merge.finish();
        // An average of the two medians would be half a millisecond.
        assert_eq!((seconds[0].p50_ns, seconds[0].p99_ns, seconds[0].max_ns), (1_000, 1_000, 1_000_000));
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
}
