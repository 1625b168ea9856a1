//! What is counted, and what takes too long.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::Ordering;

use fourtuple_record::Slow;

use super::{Driver, LONGEST_LOOK, Phase, TICK};
use crate::engine::Engine;
use crate::tally::MOST_SLOW;

impl<E: Engine> Driver<'_, E> {
    /// Counts an operation that is over.
    pub(super) fn count(&mut self, number: u32, now: u64) {
        let slot = &self.slots[number as usize];
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
        if self.tally.slow.len() >= MOST_SLOW {
            return;
        }
        let slot = &self.slots[number as usize];
        let parts = [
            ("late", slot.started - slot.intended),
            ("connect", if slot.request == 1 { slot.asked.saturating_sub(slot.started) } else { 0 }),
            ("response", now - slot.asked.max(slot.started)),
        ];
        let longest = parts.into_iter().max_by_key(|(_, time)| *time).expect("three parts").0;
        self.tally.slow.push(Slow {
            at_ns: slot.intended,
            total_ns: total,
            longest: longest.to_owned(),
            request: slot.request,
        });
    }

    pub(super) fn error(&mut self, name: Cow<'static, str>) {
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
        Ok(())
    }

    /// Cancels what takes longer than the timeout.
    pub(super) fn look_for_late(&mut self, now: u64) -> io::Result<()> {
        let timeout = self.timeout();
        self.next_look = now + (timeout / 16).clamp(TICK, LONGEST_LOOK);
        // Those that are held wait for nothing, and there may be a million of them.
        let first = if self.to_hold + self.opening_held == 0 { self.share.hold } else { 0 };
        for number in first..self.slots.len() as u32 {
            let slot = &mut self.slots[number as usize];
            let is_waiting = matches!(slot.phase, Phase::Opening | Phase::Asking | Phase::Draining);
            // Time without a port is not the server's. Cancelling may find nothing between two steps of a chain: then again.
            if is_waiting && now.saturating_sub(slot.started.max(slot.opened)) > timeout {
                slot.cancelled = true;
                self.engine.cancel(number)?;
            }
        }
        Ok(())
    }

    /// Hands the numbers of the current second over; `next` is the one that begins.
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

    /// Answers that did not come in time at the end.
    pub(super) fn abandon(&mut self) {
        for slot in &self.slots {
            if matches!(slot.phase, Phase::Opening | Phase::Asking) {
                *self.tally.errors.entry(Cow::Borrowed("unanswered")).or_default() += 1;
                self.part.errors += 1;
            }
        }
    }
}
