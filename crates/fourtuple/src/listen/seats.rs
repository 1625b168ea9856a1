//! What every worker of a group has done, in memory that also forked workers share.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fourtuple_syscalls::shared::Counters;

use crate::listen::break_even::Scales;

/// Numbers of a seat, padded to two cache lines so that workers do not write to each other's.
const STRIDE: usize = 16;

/// What is counted of a seat.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Taken,
    Accepts,
    Requests,
    Wakeups,
    EmptyAccepts,
    FailedAccepts,
    Leaked,
    Open,
    Busy,
    /// 1 while the worker waits for something to do.
    Idle,
    /// Workers that have had the seat, of a dispatcher.
    Joins,
}

/// What a worker has done so far. A seat is counted on when another worker takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeatStats {
    /// Connections accepted.
    pub accepts: u64,
    /// Requests answered ([`answered`](crate::listen::Connection::answered)).
    pub requests: u64,
    /// Times the worker was woken from waiting.
    pub wakeups: u64,
    /// accept() calls that found nobody (EAGAIN): another worker was faster.
    pub empty_accepts: u64,
    /// accept() calls that failed: no descriptor, no memory.
    pub failed_accepts: u64,
    /// Connections that were chosen for this worker at their SYN and never came, found and counted off again
    /// ([`ReuseportLeastBusy`](crate::listen::Policy::ReuseportLeastBusy)): a SYN flood, lost handshakes.
    pub leaked: u64,
    /// Connections that are open now and last belonged to this worker.
    pub open: u64,
    /// Time from being given a connection until asking for the next.
    pub busy: Duration,
}

#[derive(Debug)]
pub(crate) struct Seats {
    counters: Counters,
    count: usize,
}

impl Seats {
    pub(crate) fn new(count: usize) -> io::Result<Seats> {
        Ok(Seats { counters: Counters::new(count * STRIDE + Scales::SUMS)?, count })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Kept connections of the whole group weighed against fresh ones.
    pub(crate) fn scales(&self) -> Scales<'_> {
        Scales::new(&self.counters.all()[self.count * STRIDE..])
    }

    /// Whether another seat's worker waits for something to do.
    pub(crate) fn others_idle(&self, seat: usize) -> bool {
        (0..self.count).any(|other| other != seat && self.get(other, Count::Idle) != 0)
    }

    fn of(&self, seat: usize, count: Count) -> &AtomicU64 {
        &self.counters.all()[seat * STRIDE + count as usize]
    }

    /// Takes the lowest free seat.
    pub(crate) fn take(&self) -> Option<usize> {
        (0..self.count).find(|&seat| self.of(seat, Count::Taken).swap(1, Ordering::AcqRel) == 0)
    }

    pub(crate) fn free(&self, seat: usize) {
        self.set(seat, Count::Idle, 0);
        self.of(seat, Count::Taken).store(0, Ordering::Release);
    }

    /// Whether anybody but `seat` is there.
    pub(crate) fn has_others(&self, seat: usize) -> bool {
        (0..self.count).any(|other| other != seat && self.get(other, Count::Taken) == 1)
    }

    pub(crate) fn add(&self, seat: usize, count: Count, more: u64) {
        self.of(seat, count).fetch_add(more, Ordering::Relaxed);
    }

    /// One less; below 0 it wraps, and is right again in the sum.
    pub(crate) fn less(&self, seat: usize, count: Count) {
        self.of(seat, count).fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, seat: usize, count: Count, value: u64) {
        self.of(seat, count).store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, seat: usize, count: Count) -> u64 {
        self.of(seat, count).load(Ordering::Relaxed)
    }

    pub(crate) fn stats(&self) -> Vec<SeatStats> {
        (0..self.count).map(|seat| self.stats_of(seat)).collect()
    }

    pub(crate) fn stats_of(&self, seat: usize) -> SeatStats {
        SeatStats {
            accepts: self.get(seat, Count::Accepts),
            requests: self.get(seat, Count::Requests),
            wakeups: self.get(seat, Count::Wakeups),
            empty_accepts: self.get(seat, Count::EmptyAccepts),
            failed_accepts: self.get(seat, Count::FailedAccepts),
            leaked: self.get(seat, Count::Leaked),
            open: self.get(seat, Count::Open),
            busy: Duration::from_nanos(self.get(seat, Count::Busy)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_seat_is_taken() {
        let seats = Seats::new(3).unwrap();
        assert_eq!(
            [seats.take(), seats.take(), seats.take(), seats.take()],
            [Some(0), Some(1), Some(2), None]
        );
        assert!(seats.has_others(0));
        seats.free(1);
        seats.set(1, Count::Idle, 1);
        assert!(seats.others_idle(0) && !seats.others_idle(1));
        assert_eq!(seats.take(), Some(1));
        seats.add(1, Count::Accepts, 5);
        assert_eq!(seats.stats().iter().map(|seat| seat.accepts).collect::<Vec<_>>(), [0, 5, 0]);
    }
}
