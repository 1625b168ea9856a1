use std::borrow::Cow;
use std::collections::BTreeMap;

use fourtuple_measure::Histogram;
use fourtuple_record::Slow;

/// Slow operations that are listed; the others are counted.
pub(crate) const MOST_SLOW: usize = 1000;

/// What one thread saw, or all of them together.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) connections: u64,
    pub(crate) errors: BTreeMap<Cow<'static, str>, u64>,
    pub(crate) search: Histogram,
    pub(crate) handshake: Histogram,
    pub(crate) first_byte: Histogram,
    pub(crate) total: Histogram,
    pub(crate) late: Histogram,
    pub(crate) slow: Vec<Slow>,
    pub(crate) slow_count: u64,
    /// End of the last operation, done or failed, or of the time that the run was to take; since its start.
    pub(crate) last_end: u64,
    /// Operations that were intended to begin.
    pub(crate) offered: u64,
    /// How late the last of them did, in an open loop.
    pub(crate) behind: u64,
    pub(crate) stall: Stall,
    pub(crate) held: u64,
    pub(crate) held_lost: u64,
    /// When the last of the held connections was there.
    pub(crate) ramp: u64,
    /// Time in which an operation was due and every connection was busy.
    pub(crate) all_busy: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) syscalls: u64,
}

/// When no port was to be had.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stall {
    /// The first time, since the start of the run.
    pub(crate) first: Option<u64>,
    /// The last time.
    pub(crate) last: u64,
    /// In all, until a connection was there again.
    pub(crate) length: u64,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Tally {
            operations: 0,
            connections: 0,
            errors: BTreeMap::new(),
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
            ramp: 0,
            all_busy: 0,
            cpu_ns: 0,
            syscalls: 0,
        }
    }

    pub(crate) fn error(&mut self, name: Cow<'static, str>) {
        *self.errors.entry(name).or_default() += 1;
    }

    /// Adds what another thread saw at the same time.
    pub(crate) fn merge(&mut self, other: Tally) {
        self.operations += other.operations;
        self.connections += other.connections;
        for (name, count) in other.errors {
            *self.errors.entry(name).or_default() += count;
        }
        self.search.merge(&other.search);
        self.handshake.merge(&other.handshake);
        self.first_byte.merge(&other.first_byte);
        self.total.merge(&other.total);
        self.late.merge(&other.late);
        self.slow.extend(other.slow);
        self.slow.sort_by_key(|slow| slow.at_ns);
        self.slow.truncate(MOST_SLOW);
        self.slow_count += other.slow_count;
        self.last_end = self.last_end.max(other.last_end);
        self.offered += other.offered;
        self.behind = self.behind.max(other.behind);
        self.stall.first = [self.stall.first, other.stall.first].into_iter().flatten().min();
        self.stall.last = self.stall.last.max(other.stall.last);
        // They stall together: all search the same ports.
        self.stall.length = self.stall.length.max(other.stall.length);
        self.held += other.held;
        self.held_lost += other.held_lost;
        self.ramp = self.ramp.max(other.ramp);
        self.all_busy = self.all_busy.max(other.all_busy);
        self.cpu_ns += other.cpu_ns;
        self.syscalls += other.syscalls;
    }
}
