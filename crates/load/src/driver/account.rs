//! Counts, the list of slow operations, and timeouts.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use fourtuple_record::Slow;
use fourtuple_syscalls::socket::Transport;

use crate::driver::{Driver, MIN_LOOK_NS, Phase, REFUSED};
use crate::engine::Engine;
use crate::tally::MAX_SLOW;
use crate::workload::Failure;

impl<E: Engine> Driver<'_, E> {
    /// Counts an operation that succeeded.
    pub(super) fn count(&mut self, number: u32, now: u64) {
        let slot = &mut self.slots[number as usize];
        slot.failures = 0;
        let total = now - slot.intended.min(now);
        self.tally.operations += 1;
        self.tally.last_end = now;
        self.tally.total.record(total);
        let second = now / 1_000_000_000;
        if second != self.second {
            self.flush(second);
        }
        self.part.operations += 1;
        self.part.total.record(total);
        if self.shared.load.threshold.is_some_and(|most| u128::from(total) > most.as_nanos()) {
            self.slow(number, total, now);
        }
    }

    pub(super) fn slow(&mut self, number: u32, total: u64, now: u64) {
        self.tally.slow_count += 1;
        if self.tally.slow.len() >= MAX_SLOW {
            return;
        }
        let slot = &self.slots[number as usize];
        let parts = [
            ("late", slot.started - slot.intended),
            ("connect", if slot.request == 1 { slot.requested_at.saturating_sub(slot.started) } else { 0 }),
            ("response", now.saturating_sub(slot.requested_at.max(slot.started))),
        ];
        let longest = parts.into_iter().max_by_key(|(_, time)| *time).expect("three parts").0;
        self.tally.slow.push(Slow {
            at_ns: slot.intended,
            total_ns: total,
            longest: longest.to_owned(),
            request: slot.request,
        });
    }

    pub(super) fn error(&mut self, Failure { name, detail }: Failure) {
        if let Some(text) = detail {
            self.tally.details.entry(name.clone()).or_insert(text);
        }
        if let Some(detail) = &mut self.part.detail {
            *detail.errors.entry(name.clone()).or_default() += 1;
        }
        let is_answer =
            !matches!(name.as_ref(), "timeout" | "unanswered" | "not-closed" | "ETIMEDOUT" | "EADDRNOTAVAIL");
        self.part.refusals += u64::from(is_answer);
        self.tally.error(name);
        self.part.errors += 1;
    }

    pub(super) fn note_busy(&mut self, busy: bool, now: u64) {
        match (busy, self.busy_since) {
            (true, None) => self.busy_since = Some(now),
            (false, Some(since)) => {
                self.tally.all_busy += now - since;
                self.busy_since = None;
            }
            _ => {}
        }
    }

    pub(super) fn tick(&mut self, now: u64) -> io::Result<()> {
        if now >= self.next_look {
            self.look_for_late(now)?;
        }
        let second = now / 1_000_000_000;
        if second != self.second {
            self.flush(second);
        }
        self.publish();
        if now - self.started_from >= REFUSED && self.is_refused() {
            self.shared.refused.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns whether nothing listens at the target: all attempts of this thread were refused, and no thread had another result. A
    /// UDP socket is open without a peer.
    fn is_refused(&self) -> bool {
        let live = self.shared.live;
        let none = |count: &AtomicU64| count.load(Ordering::Relaxed) == 0;
        let is_udp = self.shared.load.transport() == Transport::Udp;
        let mut names = self.tally.errors.keys();
        self.tally.errors.len() == 1
            && names.all(|name| name == "ECONNREFUSED" || name == "ENOENT")
            && none(&live.operations)
            && (is_udp || none(&live.connections))
    }

    /// Returns the error name of the operation of `number` if its timeout has expired.
    pub(super) fn overdue(&self, number: u32, now: u64) -> Option<Cow<'static, str>> {
        let slot = &self.slots[number as usize];
        let took = now.saturating_sub(slot.timed_from);
        let is_over = slot.cancelled || took > self.operation_limit();
        is_over.then_some(Cow::Borrowed(match slot.phase {
            // The response was complete; the FIN of the server did not follow.
            Phase::Draining => "not-closed",
            _ if took > self.timeout() => "timeout",
            _ => "unanswered",
        }))
    }

    /// Cancels the operations whose timeout has expired. The next call is due when the next operation can be overdue.
    pub(super) fn look_for_late(&mut self, now: u64) -> io::Result<()> {
        let timeout = self.operation_limit();
        let mut next = now + timeout;
        // Held connections have no timeout once they are open, and there may be a million of them.
        let first = if self.to_hold + self.opening_held == 0 { self.share.hold } else { 0 };
        for number in first..self.slots.len() as u32 {
            let slot = &mut self.slots[number as usize];
            if !slot.phase.is_waiting() {
                continue;
            }
            let deadline = slot.timed_from + timeout;
            next = next.min(deadline);
            if now > deadline {
                // Between two steps of a chain there is nothing to cancel: the next call cancels again.
                slot.cancelled = true;
                self.engine.cancel(number)?;
            }
        }
        self.next_look = next.max(now + MIN_LOOK_NS);
        Ok(())
    }

    /// Publishes the counts of the current second. `next` is the second that begins.
    pub(super) fn flush(&mut self, next: u64) {
        self.part.in_flight = u64::from(self.active);
        self.shared.board.add(self.share.number, self.second, &self.part, next);
        self.part.clear();
        self.second = next;
    }

    pub(super) fn publish(&mut self) {
        let errors = self.tally.errors.values().sum::<u64>();
        let now = (self.tally.operations, self.tally.connections, errors);
        let live = self.shared.live;
        live.operations.fetch_add(now.0 - self.published.0, Ordering::Relaxed);
        live.connections.fetch_add(now.1 - self.published.1, Ordering::Relaxed);
        live.errors.fetch_add(now.2 - self.published.2, Ordering::Relaxed);
        self.published = now;
    }

    /// Counts the operations that are still in progress at the end of the run as errors.
    pub(super) fn abandon(&mut self, now: u64) {
        for number in 0..self.slots.len() as u32 {
            let phase = self.slots[number as usize].phase;
            if phase.is_waiting() && phase != Phase::Draining {
                let name = self.overdue(number, now).unwrap_or(Cow::Borrowed("unanswered"));
                self.error(name.into());
            }
        }
    }
}
