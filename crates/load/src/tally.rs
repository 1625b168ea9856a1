use std::borrow::Cow;
use std::collections::BTreeMap;

use fourtuple_measure::Histogram;
use fourtuple_record::{LoadStatus, Slow};

use crate::workload::Status;

/// Maximum number of slow operations in the list; all are counted.
pub(crate) const MAX_SLOW: usize = 1000;

/// The counts and latencies of one thread, or the sum of all threads.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) connections: u64,
    /// Connections established, by the number of their destination.
    pub(crate) by_destination: Vec<u64>,
    /// Requests sent again on a new connection.
    pub(crate) retried: u64,
    pub(crate) errors: BTreeMap<Cow<'static, str>, u64>,
    /// Text of the first failure of each name.
    pub(crate) details: BTreeMap<Cow<'static, str>, String>,
    /// The responses of HTTP, by status code.
    pub(crate) statuses: BTreeMap<u16, LoadStatus>,
    pub(crate) search: Histogram,
    pub(crate) handshake: Histogram,
    pub(crate) first_byte: Histogram,
    pub(crate) total: Histogram,
    pub(crate) late: Histogram,
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
    pub(crate) fn new(destinations: usize) -> Self {
        Tally {
            operations: 0,
            connections: 0,
            by_destination: vec![0; destinations],
            retried: 0,
            errors: BTreeMap::new(),
            details: BTreeMap::new(),
            statuses: BTreeMap::new(),
            search: Histogram::new(),
            handshake: Histogram::new(),
            first_byte: Histogram::new(),
            total: Histogram::new(),
            late: Histogram::new(),
            slow: Vec::new(),
            slow_count: 0,
            last_end: 0,
            offered: 0,
            behind: 0,
            stall: Stall::default(),
            held: 0,
            held_lost: 0,
            ramp: None,
            all_busy: 0,
            cpu_ns: 0,
            syscalls: 0,
        }
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
        self.retried += other.retried;
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
    }
}
