//! The seats of a group and their counters, in memory that forked workers share.

use std::io;
use std::time::Duration;

use crate::listen::connection::Comparison;
use crate::sync::{AtomicU64, Counters, Ordering};

/// The counters of one seat, padded to four cache lines so that workers do not share a cache line.
const STRIDE: usize = 32;

/// A counter of a seat.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Taken,
    Accepts,
    Requests,
    Wakeups,
    EmptyAccepts,
    ProcessDescriptors,
    HostDescriptors,
    SocketMemory,
    OtherAccepts,
    Unwatched,
    IdleClosed,
    Leaked,
    Open,
    Busy,
    /// 1 while the worker waits for a connection.
    Idle,
    /// Workers that have had the seat, with the policy `Dispatcher`.
    Joins,
    /// 1 after the worker has stopped accepting because the group hands over.
    Retired,
    /// The cookie of the listener that the worker owns; 0: none.
    Listener,
}

/// The counters of a seat. They continue when another worker takes the seat.
///
/// Example: [`Acceptor`](crate::listen::Acceptor).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SeatStats {
    /// Connections accepted.
    pub accepts: u64,
    /// Requests answered ([`response_sent`](crate::listen::Connection::response_sent)).
    pub requests: u64,
    /// Returns of the wait with at least one event.
    pub wakeups: u64,
    /// accept(2) calls that found an empty queue (EAGAIN): another worker was faster.
    pub empty_accepts: u64,
    /// accept(2) calls that failed: the sum of the next four counters.
    pub failed_accepts: u64,
    /// EMFILE: this process may have no more descriptors (RLIMIT_NOFILE).
    pub out_of_process_descriptors: u64,
    /// ENFILE: this host has no more descriptors (fs.file-max).
    pub out_of_host_descriptors: u64,
    /// ENOBUFS or ENOMEM: no memory for a socket.
    pub out_of_memory: u64,
    /// Any other error: of a connection that was gone (ECONNABORTED, EPROTO, EHOSTUNREACH and others; the worker goes on), or of a filter
    /// that forbids the call (EPERM; the worker pauses).
    pub other_failed_accepts: u64,
    /// Connections that were closed because epoll could not watch them: ENOSPC (fs.epoll.max_user_watches) or ENOMEM.
    pub unwatched: u64,
    /// Connections that were closed because they exceeded the limit of
    /// [`ListenerGroupBuilder::idle_timeout`](crate::listen::ListenerGroupBuilder::idle_timeout).
    pub idle_closed: u64,
    /// Connections that were counted for this worker at their SYN and never completed, as in a SYN flood. Only with
    /// [`ReuseportLeastBusy`](crate::listen::AcceptPolicy::ReuseportLeastBusy), which subtracts them again.
    pub leaked: u64,
    /// Open connections whose last worker had this seat.
    pub open: u64,
    /// The time between each connection that `next` returned and the following call of `next`.
    pub busy: Duration,
}

/// The phase of a group. It only advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// Workers of another process accept. Each response is the last of its connection.
    Retiring,
    /// The kernel queues no new connection; each response is the last of its connection.
    Draining,
    /// Acceptors return no further connection.
    Drained,
}

/// The index of the phase in the group's counters, which follow the counters of the seats and of the comparison.
const PHASE: usize = 0;
const IN_TRANSIT: usize = 1;
const RETIRES: usize = 2;
/// 1 while a dispatcher accepts.
const DISPATCHES: usize = 3;
/// Whether a dispatcher died.
const LOST: usize = 4;
const GROUP_WORDS: usize = 5;
/// A connection that the dispatcher holds, in the high half of [`Count::Open`] and of [`IN_TRANSIT`]; the low half is the number of all. One
/// operation changes both, so that a dispatcher that is killed leaves them in step.
const HELD: u64 = 1 << 32;
/// The low half.
const NUMBER: u64 = HELD - 1;

#[derive(Debug)]
pub(crate) struct Seats {
    counters: Counters,
    count: usize,
}

impl Seats {
    pub(crate) fn new(count: usize) -> io::Result<Seats> {
        let words = count.saturating_mul(STRIDE).saturating_add(Comparison::SUMS + GROUP_WORDS);
        Ok(Seats { counters: Counters::new(words)?, count })
    }

    fn group_word(&self, word: usize) -> &AtomicU64 {
        &self.counters.all()[self.count * STRIDE + Comparison::SUMS + word]
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.group_word(PHASE).load(Ordering::Acquire) {
            0 => Phase::Serving,
            1 => Phase::Retiring,
            2 => Phase::Draining,
            _ => Phase::Drained,
        }
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        if self.group_word(PHASE).fetch_max(phase as u64, Ordering::AcqRel) < phase as u64 {
            events::phase(phase);
        }
    }

    /// Returns whether another process accepts from the listeners of the group.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.group_word(RETIRES).load(Ordering::Acquire) != 0
    }

    /// Begins the end of the group while another process accepts from its listeners.
    pub(crate) fn hand_over(&self) {
        self.group_word(RETIRES).store(1, Ordering::Release);
        self.set_phase(Phase::Retiring);
    }

    /// Notes that the worker of a seat has stopped accepting. The connections that it has accepted are counted by then.
    pub(crate) fn worker_handed_over(&self, seat: usize) {
        self.of(seat, Count::Retired).store(1, Ordering::Release);
    }

    /// Notes whether the group has a dispatcher that accepts.
    pub(crate) fn set_dispatches(&self, dispatches: bool) {
        self.group_word(DISPATCHES).store(dispatches.into(), Ordering::Release);
    }

    /// Returns whether every worker and the dispatcher have stopped accepting.
    pub(crate) fn have_all_handed_over(&self) -> bool {
        let is_set = |seat, count| self.of(seat, count).load(Ordering::Acquire) != 0;
        self.group_word(DISPATCHES).load(Ordering::Acquire) == 0
            && (0..self.count).all(|seat| !is_set(seat, Count::Taken) || is_set(seat, Count::Retired))
    }

    /// Returns the connections of no worker: in a message between two workers, or held by the dispatcher.
    pub(crate) fn in_transit(&self) -> u64 {
        self.group_word(IN_TRANSIT).load(Ordering::Acquire) & NUMBER
    }

    pub(crate) fn add_in_transit(&self) {
        self.group_word(IN_TRANSIT).fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn sub_in_transit(&self) {
        self.group_word(IN_TRANSIT).fetch_sub(1, Ordering::AcqRel);
    }

    /// Counts a connection that the dispatcher holds: an open one of a seat, or one in transit.
    pub(crate) fn add_held(&self, seat: Option<usize>) {
        self.word_of(seat).fetch_add(HELD + 1, Ordering::AcqRel);
    }

    /// Ends [`Seats::add_held`].
    pub(crate) fn sub_held(&self, seat: Option<usize>) {
        self.word_of(seat).fetch_sub(HELD + 1, Ordering::AcqRel);
    }

    /// The dispatcher holds a connection that is already counted as in transit.
    pub(crate) fn hold(&self) {
        self.group_word(IN_TRANSIT).fetch_add(HELD, Ordering::AcqRel);
    }

    /// Ends [`Seats::hold`].
    pub(crate) fn let_go(&self) {
        self.group_word(IN_TRANSIT).fetch_sub(HELD, Ordering::AcqRel);
    }

    fn word_of(&self, seat: Option<usize>) -> &AtomicU64 {
        seat.map_or_else(|| self.group_word(IN_TRANSIT), |seat| self.of(seat, Count::Open))
    }

    /// Notes the death of the dispatcher's process: its connections are no longer counted. Of one that was in a call of sendmsg(2) or
    /// recvmsg(2) nobody knows: it stays counted.
    pub(crate) fn dispatcher_died(&self) {
        for seat in (0..self.count).map(Some).chain([None]) {
            let word = self.word_of(seat);
            let held = word.load(Ordering::Acquire) / HELD;
            word.fetch_sub(held * (HELD + 1), Ordering::AcqRel);
        }
        self.group_word(LOST).store(1, Ordering::Release);
        self.set_dispatches(false);
    }

    /// Returns whether the connections in transit, which no dispatcher holds, may be none: a dispatcher died.
    pub(crate) fn are_uncertain(&self) -> bool {
        self.group_word(LOST).load(Ordering::Acquire) != 0
            && self.group_word(IN_TRANSIT).load(Ordering::Acquire) < HELD
    }

    /// Notes the death of a worker: only the connections that the dispatcher holds are still counted in its seat.
    pub(crate) fn worker_died(&self, seat: usize) {
        let held = self.get(seat, Count::Open) / HELD;
        self.set(seat, Count::Open, held * (HELD + 1));
        self.free(seat);
    }

    /// Returns the number of open connections of a seat.
    pub(crate) fn open(&self, seat: usize) -> u64 {
        self.get(seat, Count::Open) & NUMBER
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the group's comparison of kept and fresh connections.
    pub(crate) fn comparison(&self) -> Comparison<'_> {
        Comparison::new(&self.counters.all()[self.count * STRIDE..])
    }

    /// Returns whether the worker of another seat is idle.
    pub(crate) fn others_idle(&self, seat: usize) -> bool {
        (0..self.count).any(|other| other != seat && self.get(other, Count::Idle) != 0)
    }

    fn of(&self, seat: usize, count: Count) -> &AtomicU64 {
        &self.counters.all()[seat * STRIDE + count as usize]
    }

    /// Takes the lowest free seat; `None` if all are taken.
    pub(crate) fn take(&self) -> Option<usize> {
        let seat = (0..self.count).find(|&seat| self.of(seat, Count::Taken).swap(1, Ordering::AcqRel) == 0);
        seat.inspect(|&seat| events::joined(seat))
    }

    pub(crate) fn free(&self, seat: usize) {
        self.set(seat, Count::Idle, 0);
        self.set(seat, Count::Retired, 0);
        self.set(seat, Count::Listener, 0);
        self.of(seat, Count::Taken).store(0, Ordering::Release);
        events::left(seat);
    }

    /// Returns whether a worker owns the listener with this cookie.
    pub(crate) fn is_owned(&self, cookie: u64) -> bool {
        (0..self.count).any(|seat| self.get(seat, Count::Listener) == cookie)
    }

    /// Returns whether a seat other than `seat` is taken.
    pub(crate) fn has_others(&self, seat: usize) -> bool {
        (0..self.count).any(|other| other != seat && self.get(other, Count::Taken) == 1)
    }

    pub(crate) fn add(&self, seat: usize, count: Count, more: u64) {
        self.of(seat, count).fetch_add(more, Ordering::Relaxed);
        events::counted(seat, count);
    }

    /// Subtracts one. The counter of one seat may wrap below zero; the wrapping sum over all seats is correct.
    pub(crate) fn subtract(&self, seat: usize, count: Count) {
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
        let failures =
            [Count::ProcessDescriptors, Count::HostDescriptors, Count::SocketMemory, Count::OtherAccepts]
                .map(|count| self.get(seat, count));
        SeatStats {
            accepts: self.get(seat, Count::Accepts),
            requests: self.get(seat, Count::Requests),
            wakeups: self.get(seat, Count::Wakeups),
            empty_accepts: self.get(seat, Count::EmptyAccepts),
            failed_accepts: failures.iter().sum(),
            out_of_process_descriptors: failures[0],
            out_of_host_descriptors: failures[1],
            out_of_memory: failures[2],
            other_failed_accepts: failures[3],
            unwatched: self.get(seat, Count::Unwatched),
            idle_closed: self.get(seat, Count::IdleClosed),
            leaked: self.get(seat, Count::Leaked),
            open: self.open(seat),
            busy: Duration::from_nanos(self.get(seat, Count::Busy)),
        }
    }
}

#[cfg(all(test, fourtuple_loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A seat has one worker at a time, and a worker sees the counters of the previous one: the relaxed read and write of `Busy`
    /// lose no update. The model fails with `Relaxed` in `take` or in `free`.
    #[test]
    fn loom_a_seat_has_one_worker_and_its_counts_stay() {
        loom::model(|| {
            let seats = Arc::new(Seats::new(1).unwrap());
            let work = |seats: &Seats| {
                let Some(seat) = seats.take() else { return 0 };
                let before = seats.get(seat, Count::Busy);
                seats.set(seat, Count::Busy, before + 1);
                seats.free(seat);
                1
            };
            let other = thread::spawn({
                let seats = Arc::clone(&seats);
                move || work(&seats)
            });
            let worked = work(&seats) + other.join().unwrap();
            assert!(worked >= 1);
            assert_eq!(seats.get(0, Count::Busy), worked);
        });
    }

    /// Two workers that join at once get two seats.
    #[test]
    fn loom_two_workers_have_two_seats() {
        loom::model(|| {
            let seats = Arc::new(Seats::new(2).unwrap());
            let other = thread::spawn({
                let seats = Arc::clone(&seats);
                move || seats.take()
            });
            let ours = seats.take();
            let mut taken = [ours, other.join().unwrap()];
            taken.sort();
            assert_eq!(taken, [Some(0), Some(1)]);
        });
    }
}

mod events {
    //! Events of a listener group, for the crate tracing. Without the feature `tracing` these functions do nothing.

    use crate::listen::seats::{Count, Phase};

    /// Reports a count that stands for a connection which a client lost, or for an accept(2) that failed.
    #[inline]
    pub(super) fn counted(seat: usize, count: Count) {
        #[cfg(feature = "tracing")]
        match count {
            Count::ProcessDescriptors => tracing::debug!(seat, errno = "EMFILE", "accept failed"),
            Count::HostDescriptors => tracing::debug!(seat, errno = "ENFILE", "accept failed"),
            Count::SocketMemory => tracing::debug!(seat, errno = "ENOBUFS or ENOMEM", "accept failed"),
            Count::OtherAccepts => tracing::debug!(seat, "accept failed"),
            Count::Unwatched => tracing::debug!(seat, "connection closed: epoll cannot watch it"),
            Count::IdleClosed => tracing::debug!(seat, "connection closed: idle limit"),
            _ => {}
        }
        #[cfg(not(feature = "tracing"))]
        let _ = (seat, count);
    }

    pub(super) fn joined(seat: usize) {
        #[cfg(feature = "tracing")]
        tracing::debug!(seat, "worker joined");
        #[cfg(not(feature = "tracing"))]
        let _ = seat;
    }

    pub(super) fn left(seat: usize) {
        #[cfg(feature = "tracing")]
        tracing::debug!(seat, "worker left");
        #[cfg(not(feature = "tracing"))]
        let _ = seat;
    }

    pub(super) fn phase(phase: Phase) {
        #[cfg(feature = "tracing")]
        tracing::debug!(?phase, "group ends");
        #[cfg(not(feature = "tracing"))]
        let _ = phase;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The dispatcher is killed between any two of its operations.
    #[test]
    fn a_dead_dispatcher_leaves_the_connections_of_others() {
        let open = |seats: &Seats| (seats.open(0), seats.open(1), seats.in_transit());
        let operations: [fn(&Seats); 8] = [
            // Accepted, and sent to a worker, which sends it back.
            |seats| seats.add_held(None),
            |seats| {
                seats.add_in_transit();
                seats.sub_held(None);
            },
            |seats| {
                seats.sub_in_transit();
                seats.add(1, Count::Open, 1);
            },
            |seats| {
                seats.add_in_transit();
                seats.subtract(1, Count::Open);
                seats.hold();
            },
            // Kept.
            |seats| seats.add_held(Some(1)),
            |seats| seats.sub_held(None),
            |seats| seats.sub_held(Some(1)),
            |_| {},
        ];
        // What is left belongs to a message or to a worker.
        let left = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0)];
        for (until, left) in left.into_iter().enumerate() {
            let seats = Seats::new(2).unwrap();
            seats.add(0, Count::Open, 1);
            operations[..=until].iter().for_each(|operation| operation(&seats));
            seats.dispatcher_died();
            assert_eq!(open(&seats), left, "after {until}");
            seats.worker_died(0);
            assert_eq!(seats.open(0), 0);
        }
    }

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
