use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fourtuple_record::measure::{Histogram, HistogramLog};
use fourtuple_record::{LoadStatus, LoadWarmUp, Second, Slow};

use crate::load::workload::{Session, Status};
#[cfg(all(test, fourtuple_loom))]
use loom::sync::Mutex;
#[cfg(not(all(test, fourtuple_loom)))]
use std::sync::Mutex;

/// Maximum number of slow operations in the list; all are counted.
pub(crate) const MAX_SLOW: usize = 1000;

/// The counts and latencies of one thread, or the sum of all threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) connections: u64,
    /// Connections established, by the number of their destination.
    pub(crate) by_destination: Vec<u64>,
    /// Responses by the number of their request in a list of requests; empty without a list.
    pub(crate) by_request: Vec<u64>,
    /// Requests sent again on a new connection.
    pub(crate) retried: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) errors: BTreeMap<Cow<'static, str>, u64>,
    /// Text of the first failure of each name.
    pub(crate) details: BTreeMap<Cow<'static, str>, String>,
    /// The responses of HTTP, by status code.
    pub(crate) statuses: BTreeMap<u16, LoadStatus>,
    pub(crate) search: Histogram,
    pub(crate) handshake: Histogram,
    pub(crate) tls: Histogram,
    pub(crate) first_byte: Histogram,
    pub(crate) total: Histogram,
    pub(crate) late: Histogram,
    /// The TLS connections, by what they negotiated.
    pub(crate) sessions: BTreeMap<Session, u64>,
    pub(crate) slow: Vec<Slow>,
    pub(crate) slow_count: u64,
    /// Time from the start of the run to the end of the last operation, or to the end of `--for` if that is later.
    pub(crate) last_end: u64,
    /// Operations that were due (the offered load).
    pub(crate) offered: u64,
    /// Delay of the last operation behind its intended start, in an open loop.
    pub(crate) behind: u64,
    pub(crate) stall: Stall,
    pub(crate) held: u64,
    pub(crate) held_lost: u64,
    /// Time from the start of the run until all held connections were open.
    pub(crate) ramp: Option<u64>,
    /// Total time in which an operation was due while all connections were busy.
    pub(crate) all_busy: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) syscalls: u64,
    /// What began in the warm-up, which counts nowhere else.
    pub(crate) warm_up: LoadWarmUp,
    /// The counts of HTTP/2.
    pub(crate) streams: Option<Streams>,
}

/// What happened on the connections of HTTP/2.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Streams {
    /// Maximum number of streams that were in progress on a connection.
    pub(crate) most: u64,
    /// The lowest limit of streams that the server set for a connection.
    pub(crate) server_limit: Option<u64>,
    /// Connections on which the server sent GOAWAY.
    pub(crate) goaways: u64,
    /// Streams that the server reset with REFUSED_STREAM.
    pub(crate) refused: u64,
    /// Requests whose body waited for a window.
    pub(crate) window_waits: u64,
    pub(crate) window_wait_ns: u64,
    /// What the connections sent and received in all.
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
}

impl Streams {
    fn merge(self, other: Streams) -> Streams {
        Streams {
            most: self.most.max(other.most),
            server_limit: [self.server_limit, other.server_limit].into_iter().flatten().min(),
            goaways: self.goaways + other.goaways,
            refused: self.refused + other.refused,
            window_waits: self.window_waits + other.window_waits,
            window_wait_ns: self.window_wait_ns + other.window_wait_ns,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }
}

/// The times without a free port.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stall {
    /// Start of the first stall, since the start of the run.
    pub(crate) first: Option<u64>,
    /// The last failure for want of a port, since the start of the run.
    pub(crate) last: u64,
    /// Total time without a free port, each stall until the next connection opened.
    pub(crate) length: u64,
}

impl Tally {
    pub(crate) fn new(destinations: usize, requests: usize) -> Self {
        Tally { by_destination: vec![0; destinations], by_request: vec![0; requests], ..Tally::default() }
    }

    pub(crate) fn error(&mut self, name: Cow<'static, str>) {
        *self.errors.entry(name).or_default() += 1;
    }

    /// Counts a response of HTTP.
    pub(crate) fn status(&mut self, Status { code, location }: Status) {
        let empty = || LoadStatus { code, count: 0, location };
        self.statuses.entry(code).or_insert_with(empty).count += 1;
    }

    /// Adds the tally of another thread of the same run.
    pub(crate) fn merge(&mut self, other: Tally) {
        self.operations += other.operations;
        self.connections += other.connections;
        self.by_destination.iter_mut().zip(other.by_destination).for_each(|(sum, more)| *sum += more);
        self.by_request.iter_mut().zip(other.by_request).for_each(|(sum, more)| *sum += more);
        self.retried += other.retried;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        for (name, count) in other.errors {
            *self.errors.entry(name).or_default() += count;
        }
        for (name, detail) in other.details {
            self.details.entry(name).or_insert(detail);
        }
        for (code, status) in other.statuses {
            self.statuses.entry(code).and_modify(|sum| sum.count += status.count).or_insert(status);
        }
        self.search.merge(&other.search);
        self.handshake.merge(&other.handshake);
        self.tls.merge(&other.tls);
        for (session, count) in other.sessions {
            *self.sessions.entry(session).or_default() += count;
        }
        self.first_byte.merge(&other.first_byte);
        self.total.merge(&other.total);
        self.late.merge(&other.late);
        self.slow.extend(other.slow);
        self.slow.sort_by_key(|slow| slow.at_ns);
        self.slow.truncate(MAX_SLOW);
        self.slow_count += other.slow_count;
        self.last_end = self.last_end.max(other.last_end);
        self.offered += other.offered;
        self.behind = self.behind.max(other.behind);
        self.stall.first = [self.stall.first, other.stall.first].into_iter().flatten().min();
        self.stall.last = self.stall.last.max(other.stall.last);
        // The threads stall together, because they share the ports: their times overlap.
        self.stall.length = self.stall.length.max(other.stall.length);
        self.held += other.held;
        self.held_lost += other.held_lost;
        // All threads wait for the last one, and the first to notice opens the next connections.
        self.ramp = [self.ramp, other.ramp].into_iter().flatten().min();
        self.all_busy = self.all_busy.max(other.all_busy);
        self.cpu_ns += other.cpu_ns;
        self.syscalls += other.syscalls;
        self.warm_up.operations += other.warm_up.operations;
        self.warm_up.connections += other.warm_up.connections;
        self.warm_up.errors += other.warm_up.errors;
        self.streams = [self.streams, other.streams].into_iter().flatten().reduce(Streams::merge);
    }
}

/// The counts of one second, of one thread or of all threads.
#[derive(Debug, Default)]
pub(crate) struct ThreadSecond {
    pub(crate) operations: u64,
    pub(crate) connections: u64,
    pub(crate) errors: u64,
    /// Receives of bytes, and failures by an answer, such as ECONNREFUSED: neither a timeout nor a lack of ports.
    pub(crate) answers: u64,
    /// Operations in progress at the end of the second.
    pub(crate) in_flight: u64,
    pub(crate) total: Histogram,
    /// The rest of an [`Interval`], if the run delivers intervals.
    pub(crate) detail: Option<Box<Detail>>,
}

/// Failures by name, and the parts of an operation.
#[derive(Debug, Default)]
pub(crate) struct Detail {
    pub(crate) errors: BTreeMap<Cow<'static, str>, u64>,
    pub(crate) search: Histogram,
    pub(crate) handshake: Histogram,
    pub(crate) first_byte: Histogram,
    pub(crate) late: Histogram,
}

impl Detail {
    fn merge(&mut self, other: &Detail) {
        for (name, count) in &other.errors {
            *self.errors.entry(name.clone()).or_default() += count;
        }
        self.search.merge(&other.search);
        self.handshake.merge(&other.handshake);
        self.first_byte.merge(&other.first_byte);
        self.late.merge(&other.late);
    }

    fn clear(&mut self) {
        self.errors.clear();
        self.search.clear();
        self.handshake.clear();
        self.first_byte.clear();
        self.late.clear();
    }
}

impl ThreadSecond {
    pub(crate) fn new(detailed: bool) -> Self {
        ThreadSecond { detail: detailed.then(Box::default), ..ThreadSecond::default() }
    }

    fn into_interval(self, second: u64) -> Interval {
        let detail = *self.detail.unwrap_or_default();
        Interval {
            second,
            operations: self.operations,
            connections: self.connections,
            errors: detail.errors.into_iter().map(|(name, count)| (name.into_owned(), count)).collect(),
            in_flight: self.in_flight,
            search: detail.search,
            handshake: detail.handshake,
            first_byte: detail.first_byte,
            total: self.total,
            late: detail.late,
        }
    }

    fn merge(&mut self, other: &ThreadSecond) {
        self.operations += other.operations;
        self.connections += other.connections;
        self.errors += other.errors;
        self.answers += other.answers;
        self.in_flight += other.in_flight;
        self.total.merge(&other.total);
        if let (Some(detail), Some(other)) = (&mut self.detail, &other.detail) {
            detail.merge(other);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.operations = 0;
        self.connections = 0;
        self.errors = 0;
        self.answers = 0;
        self.total.clear();
        if let Some(detail) = &mut self.detail {
            detail.clear();
        }
    }
}

/// The sums of all threads by second. A second is kept as a histogram until all threads have completed it, then as a few
/// numbers, so that a long run needs little memory.
pub(crate) struct SecondSums {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    open: BTreeMap<u64, ThreadSecond>,
    /// The current second of each thread.
    at: Vec<u64>,
    done: Vec<Second>,
    /// The connections of all seconds in `done`.
    connections: u64,
    in_flight: Vec<u64>,
    answers: Vec<u64>,
    log: Option<HistogramLog>,
    intervals: Option<IntervalSink>,
}

impl SecondSums {
    /// Creates empty sums. `started` is the wall-clock time at which the run began, for the log of histograms. `intervals`
    /// gets each complete second, in order.
    pub(crate) fn new(threads: usize, log: bool, started: Duration, intervals: Option<IntervalSink>) -> Self {
        let log = log.then(|| HistogramLog::new(started));
        SecondSums { state: Mutex::new(State { at: vec![0; threads], log, intervals, ..State::default() }) }
    }

    /// Adds `part`, the counts of thread `number` in `second`; the thread has completed all seconds before `next`.
    pub(crate) fn add(&self, number: usize, second: u64, part: &ThreadSecond, next: u64) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let detailed = state.intervals.is_some();
        state.open.entry(second).or_insert_with(|| ThreadSecond::new(detailed)).merge(part);
        state.at[number] = next;
        let until = state.at.iter().copied().min().unwrap_or(0);
        while let Some(entry) = state.open.first_entry().filter(|entry| *entry.key() < until) {
            let (second, part) = entry.remove_entry();
            state.close(second, part);
        }
    }

    /// Returns the last second that every thread has completed, and the connections of the seconds before the last `kept` ones. Copies
    /// nothing else: a run may last for months, and its threads wait for this lock.
    pub(crate) fn look(&self, kept: usize) -> (Option<Second>, u64) {
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let recent: u64 = state.done.iter().rev().take(kept).map(|second| second.connections).sum();
        (state.done.last().copied(), state.connections - recent)
    }

    /// Returns the seconds that every thread has completed, from number `from` on.
    #[cfg(test)]
    fn seconds_from(&self, from: usize) -> Vec<Second> {
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.done.get(from..).unwrap_or_default().to_vec()
    }

    /// Returns all seconds, the operations in progress at the end of each and its answers, and the log of their histograms if it is
    /// recorded.
    pub(crate) fn finish(self) -> (Vec<Second>, [Vec<u64>; 2], Option<String>) {
        let mut state = self.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (second, part) in std::mem::take(&mut state.open) {
            state.close(second, part);
        }
        (state.done, [state.in_flight, state.answers], state.log.map(HistogramLog::finish))
    }
}

impl State {
    fn close(&mut self, second: u64, part: ThreadSecond) {
        // A second without operations is listed too.
        let due = self.done.len() as u64;
        let waiting = self.in_flight.last().copied().unwrap_or(part.in_flight);
        for empty in due..second {
            self.push(empty, ThreadSecond { in_flight: waiting, ..ThreadSecond::new(false) });
        }
        self.push(second, part);
    }

    fn push(&mut self, second: u64, part: ThreadSecond) {
        if let Some(log) = &mut self.log {
            log.push(Duration::from_secs(second), Duration::from_secs(1), &part.total);
        }
        self.in_flight.push(part.in_flight);
        self.answers.push(part.answers);
        self.connections += part.connections;
        self.done.push(Second {
            at_ns: second * 1_000_000_000,
            operations: part.operations,
            connections: part.connections,
            errors: part.errors,
            p50_ns: part.total.quantile(0.5),
            p99_ns: part.total.quantile(0.99),
            max_ns: part.total.max(),
            ports_left: None,
        });
        if let Some(deliver) = &mut self.intervals {
            deliver(part.into_interval(second));
        }
    }
}

/// The counts and latencies of one complete second of a run, of all threads. The sum of all intervals is the run.
#[derive(Clone, Debug)]
pub struct Interval {
    /// Number of the second since the start of the run, from 0. The last one ends with the run.
    pub second: u64,
    /// Operations that ended in this second.
    pub operations: u64,
    pub connections: u64,
    /// Failures by name, as in the record.
    pub errors: BTreeMap<String, u64>,
    /// Operations in progress at the end of the second.
    pub in_flight: u64,
    /// Time in connect().
    pub search: Histogram,
    /// Time from connect() until the connection is established.
    pub handshake: Histogram,
    /// Time from the request to the first byte of the response.
    pub first_byte: Histogram,
    /// Time from the intended start to the end.
    pub total: Histogram,
    /// Time from the intended start to the actual start, in an open loop.
    pub late: Histogram,
}

/// Receives the intervals of a run, in order. A generating thread calls it, so it must not wait.
pub type IntervalSink = Box<dyn FnMut(Interval) + Send>;

/// The part of a run that a coordinator of several runs determines.
pub struct Coordination {
    /// The start of the run. The threads prepare their engines before and wait.
    pub start: Instant,
    /// Receives each complete second.
    pub intervals: IntervalSink,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(operations: u64) -> ThreadSecond {
        let mut part = ThreadSecond { operations, ..ThreadSecond::new(false) };
        (0..operations).for_each(|_| part.total.record(1000));
        part
    }

    #[test]
    fn a_second_is_complete_when_all_threads_are_past_it() {
        let board = SecondSums::new(2, false, Duration::ZERO, None);
        board.add(0, 0, &part(3), 1);
        assert!(board.seconds_from(0).is_empty());
        board.add(1, 0, &part(4), 3);
        assert_eq!(board.seconds_from(0).iter().map(|second| second.operations).collect::<Vec<_>>(), [7]);
        board.add(0, 3, &part(5), 4);
        let (seconds, ..) = board.finish();
        assert_eq!(seconds.iter().map(|second| second.operations).collect::<Vec<_>>(), [7, 0, 0, 5]);
        assert_eq!(seconds[3].at_ns, 3_000_000_000);
        assert_eq!(seconds[1].max_ns, 0);
    }

    #[test]
    fn a_look_has_the_last_second_and_the_connections_before() {
        let board = SecondSums::new(1, false, Duration::ZERO, None);
        assert_eq!(board.look(2), (None, 0));
        for (second, connections) in [100, 200, 400].into_iter().enumerate() {
            let second = second as u64;
            board.add(0, second, &ThreadSecond { connections, ..part(second) }, second + 1);
        }
        for (kept, before) in [(0, 700), (1, 300), (2, 100), (3, 0), (usize::MAX, 0)] {
            let (last, found) = board.look(kept);
            assert_eq!((last.map(|last| last.operations), found), (Some(2), before), "{kept}");
        }
    }

    #[test]
    fn intervals_have_every_second_once_in_order() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let sink: IntervalSink = Box::new(move |interval| sender.send(interval).unwrap());
        let board = SecondSums::new(2, false, Duration::ZERO, Some(sink));
        let detailed = |operations| {
            let mut part = part(operations);
            let mut detail = Box::new(Detail::default());
            detail.late.record(operations);
            detail.errors.insert(Cow::Borrowed("timeout"), operations);
            part.detail = Some(detail);
            part
        };
        board.add(0, 0, &detailed(3), 1);
        assert!(receiver.try_recv().is_err(), "thread 1 has not completed second 0");
        board.add(1, 0, &detailed(4), 2);
        board.add(0, 2, &detailed(5), 3);
        board.finish();
        let intervals: Vec<Interval> = receiver.iter().collect();
        let counts = |interval: &Interval| (interval.second, interval.operations, interval.late.count());
        assert_eq!(intervals.iter().map(counts).collect::<Vec<_>>(), [(0, 7, 2), (1, 0, 0), (2, 5, 1)]);
        assert_eq!(intervals[0].errors["timeout"], 7);
    }
}

#[cfg(all(test, fourtuple_loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two threads add their seconds while a third thread reads: a second that was read does not change, and at the end
    /// every operation is counted once, in its second. The test fails if a second counts as complete as soon as the
    /// first thread has completed it.
    #[test]
    fn loom_a_published_second_does_not_change() {
        loom::model(|| {
            let board = Arc::new(SecondSums::new(2, false, Duration::ZERO, None));
            let threads = [0, 1].map(|number| {
                let board = Arc::clone(&board);
                thread::spawn(move || {
                    for second in 0..2 {
                        let part = ThreadSecond { operations: 1 + number as u64, ..ThreadSecond::new(false) };
                        board.add(number, second, &part, second + 1);
                    }
                })
            });
            let operations =
                |seconds: &[Second]| -> Vec<u64> { seconds.iter().map(|second| second.operations).collect() };
            let early = operations(&board.seconds_from(0));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let all = operations(&board.seconds_from(0));
            assert_eq!(all, [3, 3]);
            assert_eq!(early, all[..early.len()]);
        });
    }
}
