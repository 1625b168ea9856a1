//! Opening connections, and waiting for a port while none is free.

use std::io;

use fourtuple::dial::ConnectRequest;
use fourtuple_syscalls::socket::Transport;

use crate::driver::{Driver, IDLE, MAX_PER_TURN, PORT_RETRY, Phase, Stalled};
use crate::engine::Engine;

impl<E: Engine> Driver<'_, E> {
    /// Begins an operation: sends a request on the open connection of `number`, or opens a connection for its first request.
    pub(super) fn start(&mut self, number: u32, intended: Option<u64>) -> io::Result<()> {
        let now = self.now();
        self.active += 1;
        let slot = &mut self.slots[number as usize];
        slot.started = now;
        slot.timed_from = now;
        slot.intended = intended.unwrap_or(now);
        slot.cancelled = false;
        if intended.is_some() {
            self.tally.behind = now.saturating_sub(slot.intended);
            self.tally.late.record(self.tally.behind);
            if let Some(detail) = &mut self.part.detail {
                detail.late.record(self.tally.behind);
            }
        }
        if slot.phase != Phase::Warm {
            return self.connect(number);
        }
        let may_be_closed = self.shared.load.transport() == Transport::Tcp && now - slot.idle_since >= IDLE;
        if may_be_closed {
            slot.phase = Phase::Probing;
            return self.engine.probe(number);
        }
        self.send_request(number, now)
    }

    /// Sends the request of an operation on its open connection.
    pub(super) fn send_request(&mut self, number: u32, now: u64) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::AwaitingResponse;
        slot.requested_at = now;
        slot.has_first_byte = false;
        slot.request += 1;
        slot.protocol.begin(slot.request == self.shared.load.close_every);
        self.engine.exchange(number, slot.protocol.outgoing())
    }

    /// Opens a connection for an operation, now or when a port is free.
    fn connect(&mut self, number: u32) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        slot.has_first_byte = false;
        slot.request = 1;
        slot.protocol.renew();
        slot.protocol.begin(slot.request == self.shared.load.close_every);
        if self.stalled.is_some() {
            self.portless.push_back(number);
            return Ok(());
        }
        self.open(number)
    }

    /// Opens another connection for an operation whose kept connection the server has closed before the first byte of a response.
    pub(super) fn reconnect(&mut self, number: u32) -> io::Result<()> {
        // The FIN of the server came first, so this side has no TIME_WAIT socket.
        self.give_back(number);
        self.close(number)?;
        self.connect(number)
    }

    pub(super) fn open(&mut self, number: u32) -> io::Result<()> {
        match self.shared.origin.begin() {
            Ok((to, attempt, request)) => {
                let slot = &mut self.slots[number as usize];
                (slot.to, slot.attempt) = (to, Some(attempt));
                self.open_as(number, request)
            }
            Err(_) => {
                self.no_port(number);
                Ok(())
            }
        }
    }

    pub(super) fn open_as(&mut self, number: u32, request: ConnectRequest) -> io::Result<()> {
        let now = self.now();
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::Opening;
        slot.opened = now;
        slot.handshaking = true;
        slot.search_ns = None;
        let bytes = if slot.holds { &[] } else { slot.protocol.outgoing() };
        self.engine.open(number, slot.to, request, bytes)
    }

    /// Lets an operation wait because no port is free. One of the waiting operations tries again each [`PORT_RETRY`].
    pub(super) fn no_port(&mut self, number: u32) {
        let now = self.now();
        self.error("EADDRNOTAVAIL".into());
        self.slots[number as usize].phase = Phase::Closed;
        self.portless.push_back(number);
        self.tally.stall.first.get_or_insert(now);
        self.tally.stall.last = now;
        let stalled = self.stalled.get_or_insert(Stalled { since: now, retry: 0, trying: None });
        stalled.retry = now + PORT_RETRY;
        stalled.trying = None;
    }

    /// Opens connections that wait for a port: a single one each [`PORT_RETRY`] while no port is free, else all.
    pub(super) fn retry_port(&mut self, now: u64) -> io::Result<()> {
        for _ in 0..MAX_PER_TURN {
            let may_try =
                self.stalled.as_ref().is_none_or(|stalled| now >= stalled.retry && stalled.trying.is_none());
            if !may_try || self.ended {
                break;
            }
            let Some(number) = self.portless.pop_front() else {
                self.resume(now);
                break;
            };
            if let Some(stalled) = &mut self.stalled {
                stalled.trying = Some(number);
            }
            // The timeout does not include the wait for a port.
            self.slots[number as usize].timed_from = now;
            self.open(number)?;
        }
        Ok(())
    }

    /// Ends a stall: a port was free, so that the next turns open the waiting connections.
    pub(super) fn resume(&mut self, now: u64) {
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now.saturating_sub(stalled.since);
        }
    }
}
