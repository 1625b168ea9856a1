//! Operations on shared connections: the slots of HTTP/2 are streams.

use std::io;

use crate::load::driver::{Driver, Phase};
use crate::load::engine::{Engine, StreamEvent};
use crate::load::workload::ParseOutcome;

impl<E: Engine> Driver<'_, E> {
    /// Begins the operation of `number` on a shared connection, at once or when one has room; or lets it wait for a port, if it had
    /// to open a connection and there is no port. Returns false if it must open a connection.
    pub(super) fn join(&mut self, number: u32) -> bool {
        let joins = self.engine.join(number, self.slots[number as usize].protocol.current());
        let slot = &mut self.slots[number as usize];
        if joins {
            slot.phase = Phase::AwaitingResponse { tls_since: None, has_first_byte: false };
        }
        let Some(stalled) = &mut self.stalled else { return joins };
        let tries = stalled.trying == Some(number);
        if joins && tries {
            // The next one tries.
            stalled.trying = None;
        } else if !joins && !tries {
            slot.phase = Phase::Closed;
            self.portless.push_back(number);
            return true;
        }
        joins
    }

    pub(super) fn stream(&mut self, number: u32, event: StreamEvent, now: u64) -> io::Result<()> {
        match event {
            StreamEvent::Ready { session } => self.count_session(number, session, now),
            StreamEvent::Sent { request } => self.sent(number, request, now),
            StreamEvent::Answer => {
                self.part.answers += 1;
                self.first_byte(number, now);
            }
            StreamEvent::Again => return self.open(number),
            // A server that processes no request of a connection would process none of the next one either.
            StreamEvent::Unprocessed
                if self.slots[number as usize].is_again && self.slots[number as usize].request == 1 =>
            {
                return self.give_up_on(number, "GOAWAY".into(), now);
            }
            StreamEvent::Unprocessed => {
                self.slots[number as usize].is_again = true;
                self.tally.retried += u64::from(self.counts(number));
                return self.open(number);
            }
            StreamEvent::Ended(outcome) => {
                self.part.answers += 1;
                if let Some(name) = self.overdue(number, now) {
                    return self.give_up_on(number, name.into(), now);
                }
                if matches!(outcome, ParseOutcome::Complete { .. }) {
                    self.first_byte(number, now);
                }
                return self.outcome(number, outcome, now);
            }
        }
        Ok(())
    }

    /// Notes that the request of `number` was sent. In a closed loop its operation begins now: the wait for a stream is none of the
    /// server's. The timeout does not include the wait.
    fn sent(&mut self, number: u32, request: u64, now: u64) {
        let is_closed_loop = self.share.schedule.is_none();
        let slot = &mut self.slots[number as usize];
        slot.request = request;
        slot.requested_at = now;
        if !slot.cancelled {
            slot.timed_from = now;
        }
        // With the first request of a connection its handshake counts.
        if is_closed_loop && !slot.is_again && request > 1 {
            (slot.intended, slot.started) = (now, now);
        }
    }

    /// Withdraws operations that wait for a stream after the end of a closed loop: they never begin.
    pub(super) fn withdraw(&mut self) {
        if self.share.schedule.is_some() || !(self.is_past_end || self.is_stopped()) {
            return;
        }
        for number in self.engine.withdraw() {
            self.active -= 1;
            self.tally.offered -= 1;
            self.slots[number as usize].phase = Phase::Closed;
        }
    }
}
