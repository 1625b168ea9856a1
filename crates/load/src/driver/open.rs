//! Opening connections, and waiting for a port where there is none.

use std::borrow::Cow;
use std::io;

use fourtuple::dial::Wanted;

use super::{Driver, PORT_RETRY, Phase, Stalled};
use crate::engine::Engine;

impl<E: Engine> Driver<'_, E> {
    /// Begins an operation on `slot`: a request on an open connection, else a connection with its first request.
    pub(super) fn start(&mut self, number: u32, intended: Option<u64>) -> io::Result<()> {
        let now = self.now();
        self.active += 1;
        let close_every = self.shared.load.close_every;
        let slot = &mut self.slots[number as usize];
        slot.started = now;
        slot.intended = intended.unwrap_or(now);
        slot.heard = false;
        slot.cancelled = false;
        if slot.phase != Phase::Warm {
            slot.request = 0;
            slot.talk.renew();
        }
        slot.request += 1;
        slot.talk.begin(slot.request == close_every);
        if intended.is_some() {
            self.tally.behind = now.saturating_sub(slot.intended);
            self.tally.late.record(self.tally.behind);
        }
        if slot.phase == Phase::Warm {
            slot.phase = Phase::Asking;
            slot.asked = now;
            return self.engine.exchange(number, slot.talk.outgoing());
        }
        if self.stalled.is_some() {
            self.portless.push_back(number);
            return Ok(());
        }
        self.open(number)
    }

    pub(super) fn open(&mut self, number: u32) -> io::Result<()> {
        match self.shared.origin.begin() {
            Ok((attempt, wanted)) => {
                self.slots[number as usize].attempt = attempt;
                self.open_as(number, wanted)
            }
            Err(_) => {
                self.no_port(number);
                Ok(())
            }
        }
    }

    pub(super) fn open_as(&mut self, number: u32, wanted: Wanted) -> io::Result<()> {
        let now = self.now();
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::Opening;
        slot.opened = now;
        slot.handshaking = true;
        slot.search_ns = None;
        let bytes = if slot.holds { &[] } else { slot.talk.outgoing() };
        self.engine.open(number, wanted, bytes)
    }

    /// There is no port for this one: it waits, and one of those that wait tries now and then.
    pub(super) fn no_port(&mut self, number: u32) {
        let now = self.now();
        self.tally.error(Cow::Borrowed("EADDRNOTAVAIL"));
        self.part.errors += 1;
        self.slots[number as usize].phase = Phase::Closed;
        self.portless.push_back(number);
        self.tally.stall.first.get_or_insert(now);
        self.tally.stall.last = now;
        let stalled = self.stalled.get_or_insert(Stalled { since: now, retry: 0, trying: None });
        stalled.retry = now + PORT_RETRY;
        stalled.trying = None;
    }

    pub(super) fn retry_port(&mut self, now: u64) -> io::Result<()> {
        let Some(stalled) = &mut self.stalled else { return Ok(()) };
        if now < stalled.retry || stalled.trying.is_some() || self.ended {
            return Ok(());
        }
        let Some(number) = self.portless.pop_front() else {
            return self.resume(now);
        };
        stalled.trying = Some(number);
        self.open(number)
    }

    /// There are ports again.
    pub(super) fn resume(&mut self, now: u64) -> io::Result<()> {
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now.saturating_sub(stalled.since);
        }
        while self.stalled.is_none()
            && let Some(number) = self.portless.pop_front()
        {
            self.open(number)?;
        }
        Ok(())
    }
}
