//! What an event means for its connection.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::Ordering;

use fourtuple::dial::Attempt;
use fourtuple_syscalls::errno_name;
use fourtuple_syscalls::socket::Transport;

use super::{Driver, FAILED_RETRY, Phase};
use crate::engine::{Engine, Event, Stage};
use crate::settings::Close;
use crate::workload::Heard;

impl<E: Engine> Driver<'_, E> {
    pub(super) fn handle(&mut self, event: Event, now: u64) -> io::Result<()> {
        match event {
            Event::Connected { slot, search_ns } => self.connected(slot, search_ns, now),
            Event::Received { slot, count } => self.received(slot, count, now),
            Event::Failed { slot, stage, error } => self.failed(slot, stage, &error, now),
            Event::Lost { slot } => {
                self.tally.held_lost += 1;
                self.slots[slot as usize].phase = Phase::Closed;
                self.shared.live.open.fetch_sub(1, Ordering::Relaxed);
                self.close(slot)
            }
        }
    }

    pub(super) fn connected(&mut self, number: u32, search_ns: Option<u64>, now: u64) -> io::Result<()> {
        self.tally.connections += 1;
        self.part.connections += 1;
        let slot = &mut self.slots[number as usize];
        slot.local = slot.attempt.take().map(Attempt::keep);
        slot.asked = now;
        slot.search_ns = search_ns;
        slot.phase = Phase::Asking;
        if let Some(search) = search_ns {
            self.tally.search.record(search);
        }
        self.count_handshake(number, now);
        if self.stalled.is_some() {
            self.resume(now)?;
        }
        let slot = &mut self.slots[number as usize];
        if slot.holds {
            slot.phase = Phase::Held;
            self.opening_held -= 1;
            self.tally.held += 1;
            self.shared.live.open.fetch_add(1, Ordering::Relaxed);
            // No operation: it only makes room for those that are.
            self.active -= 1;
            return self.engine.watch(number);
        }
        if slot.talk.outgoing().is_empty() {
            return self.done(number, false, now);
        }
        Ok(())
    }

    /// The handshake is over when requests can be sent; it is counted where the search before it was timed.
    pub(super) fn count_handshake(&mut self, number: u32, now: u64) {
        let slot = &mut self.slots[number as usize];
        if slot.handshaking && slot.talk.established() {
            slot.handshaking = false;
            slot.asked = now;
            if let Some(search) = slot.search_ns {
                self.tally.handshake.record(now.saturating_sub(slot.opened).saturating_sub(search));
            }
        }
    }

    pub(super) fn received(&mut self, number: u32, count: usize, now: u64) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        if slot.phase == Phase::Draining {
            return if count == 0 {
                self.ended_by_server(number, now)
            } else {
                self.engine.exchange(number, &[])
            };
        }
        if !slot.heard && slot.talk.established() && count > 0 {
            slot.heard = true;
            self.tally.first_byte.record(now - slot.asked);
        }
        match slot.talk.heard(self.engine.received(number, count)) {
            Heard::More => self.engine.exchange(number, &[]),
            Heard::Send => {
                self.count_handshake(number, now);
                self.engine.exchange(number, self.slots[number as usize].talk.outgoing())
            }
            Heard::Answer { closing, failure } => {
                if let Some(failure) = failure {
                    self.error(failure);
                }
                self.done(number, closing, now)
            }
            Heard::Failed(name) => self.give_up_on(number, name, now),
        }
    }

    /// An operation has succeeded. What becomes of its connection?
    pub(super) fn done(&mut self, number: u32, closing: bool, now: u64) -> io::Result<()> {
        self.count(number, now);
        let load = self.shared.load;
        let slot = &mut self.slots[number as usize];
        // A connection on which nothing is said is closed at once.
        let last = slot.request == load.close_every || load.workload.says_nothing();
        if (closing || last) && load.close == Close::Server {
            slot.phase = Phase::Draining;
            slot.started = now;
            return self.engine.exchange(number, &[]);
        }
        // A server that says that it closes is not waited for: clients do not, and whose FIN is first is up to chance.
        if last || closing {
            self.close(number)?;
            return self.free(number, now);
        }
        self.slots[number as usize].phase = Phase::Warm;
        self.free(number, now)
    }

    /// The server has closed, as it was to.
    pub(super) fn ended_by_server(&mut self, number: u32, now: u64) -> io::Result<()> {
        // Its FIN came first: no TIME_WAIT is ours.
        self.give_back(number);
        self.close(number)?;
        self.free(number, now)
    }

    /// An operation has failed, on a connection of which nothing is under way.
    pub(super) fn failed(
        &mut self,
        number: u32,
        stage: Stage,
        error: &io::Error,
        now: u64,
    ) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        if slot.phase == Phase::Held {
            // Its watch has failed: the connection is as good as lost.
            return self.handle(Event::Lost { slot: number }, now);
        }
        if slot.phase == Phase::Draining && !slot.cancelled {
            // A reset ends a connection too.
            return self.ended_by_server(number, now);
        }
        // Of UDP the kernel says EAGAIN (inet_autobind).
        let is_udp = self.shared.load.transport() == Transport::Udp;
        let is_taken = is_port_taken(error) || (is_udp && error.kind() == io::ErrorKind::WouldBlock);
        if stage == Stage::Connect && is_taken {
            self.engine.close(number)?;
            let slot = &mut self.slots[number as usize];
            let again = slot.attempt.as_mut().and_then(|attempt| attempt.taken().ok());
            return match again {
                Some(wanted) => self.open_as(number, wanted),
                None => {
                    slot.attempt = None;
                    self.no_port(number);
                    Ok(())
                }
            };
        }
        let name = match slot.cancelled {
            // The answer was there; the end that was to follow was not.
            true if slot.phase == Phase::Draining => Cow::Borrowed("not-closed"),
            true => Cow::Borrowed("timeout"),
            false => Cow::Owned(errno_name(error)),
        };
        self.give_up_on(number, name, now)
    }

    pub(super) fn give_up_on(&mut self, number: u32, name: Cow<'static, str>, now: u64) -> io::Result<()> {
        self.error(name);
        self.tally.last_end = now;
        let slot = &mut self.slots[number as usize];
        let was_open = slot.phase != Phase::Opening;
        slot.attempt = None;
        self.close(number)?;
        let slot = &mut self.slots[number as usize];
        if slot.holds {
            self.opening_held -= 1;
            self.active -= 1;
        }
        if self.stalled.as_ref().is_some_and(|stalled| stalled.trying == Some(number)) {
            // It had a port, whatever happened then.
            self.resume(now)?;
        }
        if self.slots[number as usize].holds {
            return Ok(());
        }
        if was_open || self.share.schedule.is_some() {
            return self.free(number, now);
        }
        self.active -= 1;
        self.rest(now + FAILED_RETRY.max(self.shared.load.pause.as_nanos() as u64), number);
        Ok(())
    }

    /// The port can be named again where no TIME_WAIT keeps it.
    pub(super) fn give_back(&mut self, number: u32) {
        if let Some(local) = self.slots[number as usize].local.take() {
            self.shared.origin.release(local);
        }
    }

    pub(super) fn close(&mut self, number: u32) -> io::Result<()> {
        if self.shared.load.close == Close::Reset {
            self.give_back(number);
        }
        let slot = &mut self.slots[number as usize];
        slot.local = None;
        slot.phase = Phase::Closed;
        self.engine.close(number)
    }

    /// The operation of `number` is over: the next one, at once or later.
    pub(super) fn free(&mut self, number: u32, now: u64) -> io::Result<()> {
        self.active -= 1;
        if self.share.schedule.is_some() {
            let warm = self.slots[number as usize].phase == Phase::Warm;
            if warm {
                self.warm.push(number)
            } else {
                self.closed.push(number)
            }
            return Ok(());
        }
        let pause = self.shared.load.pause.as_nanos() as u64;
        if pause > 0 {
            self.rest(now + pause, number);
            return Ok(());
        }
        if self.ended || !self.ticket() {
            return Ok(());
        }
        self.tally.offered += 1;
        self.start(number, None)
    }

    /// All rest equally long, but for those that failed: nearly always the new one goes to the end.
    pub(super) fn rest(&mut self, until: u64, number: u32) {
        let at = self.resting.partition_point(|(at, _)| *at <= until);
        self.resting.insert(at, (until, number));
    }
}

/// EADDRNOTAVAIL of connect(), EADDRINUSE of bind() and connect(). UDP, whose ports connect() does not share, has EAGAIN.
fn is_port_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse)
}
