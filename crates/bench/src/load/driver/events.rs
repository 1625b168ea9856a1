//! The reaction of a connection to each event of its engine.

use std::borrow::Cow;
use std::io;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fourtuple_record::{Slow, errno};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{errno_name, is_of_source};

use crate::load::driver::{Driver, FAILED_RETRY, MAX_RETRY, MIN_LOOK_NS, Phase, REFUSED};
use crate::load::engine::{Engine, Event, Stage, StreamEvent};
use crate::load::settings::Close;
use crate::load::tally::MAX_SLOW;
use crate::load::workload::{Failure, ParseOutcome, Session};

impl<E: Engine> Driver<'_, E> {
    pub(super) fn handle(&mut self, event: Event, now: u64) -> io::Result<()> {
        match event {
            Event::Connected { slot, search_ns } => self.connected(slot, search_ns, now),
            Event::Received { slot, count } => self.received(slot, count, now),
            Event::Failed { slot, stage, error } => self.failed(slot, stage, &error, now),
            Event::Stream { slot, event } => self.stream(slot, event, now),
            Event::Free { to, local } => {
                self.shared.origin.release(to, local);
                Ok(())
            }
            Event::Lost { slot } => {
                self.tally.held_lost += 1;
                self.slots[slot as usize].phase = Phase::Closed;
                self.shared.live.open.fetch_sub(1, Ordering::Relaxed);
                self.close(slot)
            }
        }
    }

    pub(super) fn connected(&mut self, number: u32, search_ns: Option<u64>, now: u64) -> io::Result<()> {
        let counts = self.counts(number);
        let slot = &mut self.slots[number as usize];
        if counts {
            self.tally.connections += 1;
            self.part.connections += 1;
            self.tally.by_destination[slot.to] += 1;
        } else {
            self.tally.warm_up.connections += 1;
        }
        // The end of the port search, if its time is known.
        let mut searched = None;
        if let Phase::Opening { attempt, since } = mem::replace(&mut slot.phase, Phase::Closed) {
            slot.local = attempt.keep();
            searched = search_ns.map(|search| since + search);
        }
        let waits = E::SHARES_CONNECTIONS || !slot.protocol.established();
        let tls_since = (!slot.holds && waits).then_some(now);
        slot.phase = Phase::AwaitingResponse { tls_since, has_first_byte: false };
        slot.requested_at = now;
        if let (Some(search), Some(since), true) = (search_ns, searched, counts) {
            let handshake = now.saturating_sub(since);
            self.tally.search.record(search);
            self.tally.handshake.record(handshake);
            if let Some(detail) = &mut self.part.detail {
                detail.search.record(search);
                detail.handshake.record(handshake);
            }
        }
        if E::SHARES_CONNECTIONS {
            // The port belongs to the connection, which outlives the operation.
            if let Some(local) = self.slots[number as usize].local.take() {
                self.engine.lend(number, local);
            }
            self.resume(now);
            return Ok(());
        }
        self.resume(now);
        let slot = &mut self.slots[number as usize];
        if slot.holds {
            slot.phase = Phase::Held;
            self.opening_held -= 1;
            self.tally.held += 1;
            self.shared.live.open.fetch_add(1, Ordering::Relaxed);
            // A held connection is not an operation.
            self.active -= 1;
            return self.engine.watch(number);
        }
        let sent = slot.protocol.outgoing().len();
        self.tally.sent_bytes += if counts { sent as u64 } else { 0 };
        if sent > 0 {
            return Ok(());
        }
        // The workload sends nothing: the operation is complete.
        match self.overdue(number, now) {
            Some(name) => self.give_up_on(number, name.into(), now),
            None => self.done(number, false, now),
        }
    }

    /// Records the time of the TLS handshake once requests can be sent, and what it negotiated.
    fn count_tls(&mut self, number: u32, now: u64) {
        let protocol = &self.slots[number as usize].protocol;
        if protocol.established() {
            let session = protocol.session();
            self.count_session(number, session, now);
        }
    }

    /// Records the time of the TLS handshake that `session` ended.
    pub(super) fn count_session(&mut self, number: u32, session: Option<Session>, now: u64) {
        let counts = self.counts(number);
        let slot = &mut self.slots[number as usize];
        if let Phase::AwaitingResponse { tls_since, .. } = &mut slot.phase
            && let Some(since) = *tls_since
        {
            *tls_since = None;
            slot.requested_at = now;
            if let Some(session) = session.filter(|_| counts) {
                self.tally.tls.record(now.saturating_sub(since));
                *self.tally.sessions.entry(session).or_default() += 1;
            }
        }
    }

    pub(super) fn received(&mut self, number: u32, count: usize, now: u64) -> io::Result<()> {
        // A part of a long response is an answer too.
        self.part.answers += u64::from(count > 0);
        let counts = self.counts(number);
        self.tally.received_bytes += if counts { count as u64 } else { 0 };
        // A server that keeps sending leaves nothing to cancel: each receive checks the timeout too.
        if let Some(name) = self.overdue(number, now) {
            return self.give_up_on(number, name.into(), now);
        }
        let slot = &mut self.slots[number as usize];
        match slot.phase {
            Phase::Probing => {
                let goes_on = count > 0 && slot.protocol.idle(self.engine.received(number, count));
                return if goes_on { self.engine.probe(number) } else { self.reconnect(number) };
            }
            Phase::Draining if count == 0 => return self.ended_by_server(number, now),
            Phase::Draining => return self.engine.exchange(number, &[]),
            _ if count == 0 && slot.broken.is_some() => return self.broke(number, now),
            _ => {}
        }
        let outcome = slot.protocol.receive(self.engine.received(number, count));
        if count > 0 && slot.protocol.answered() {
            self.first_byte(number, now);
        }
        self.outcome(number, outcome, now)
    }

    /// Records the time of the first byte of a response, once.
    pub(super) fn first_byte(&mut self, number: u32, now: u64) {
        let counts = self.counts(number);
        let slot = &mut self.slots[number as usize];
        if let Phase::AwaitingResponse { has_first_byte, .. } = &mut slot.phase
            && !*has_first_byte
        {
            *has_first_byte = true;
            if counts {
                // The request may have been sent after the turn that `now` began.
                let first_byte = now.saturating_sub(slot.requested_at);
                self.tally.first_byte.record(first_byte);
                if let Some(detail) = &mut self.part.detail {
                    detail.first_byte.record(first_byte);
                }
            }
        }
    }

    pub(super) fn outcome(&mut self, number: u32, outcome: ParseOutcome, now: u64) -> io::Result<()> {
        let counts = self.counts(number);
        match outcome {
            ParseOutcome::NeedMore => self.engine.exchange(number, &[]),
            ParseOutcome::Send => {
                self.count_tls(number, now);
                let bytes = self.slots[number as usize].protocol.outgoing();
                self.tally.sent_bytes += if counts { bytes.len() as u64 } else { 0 };
                self.engine.exchange(number, bytes)
            }
            ParseOutcome::Complete { closing, status } => {
                if let Some(status) = status {
                    if status.code >= 400 {
                        self.error(number, format!("status-{}", status.code).into());
                    }
                    if counts {
                        self.tally.status(status);
                    }
                }
                let is_broken = self.slots[number as usize].broken.is_some();
                self.done(number, closing || is_broken, now)
            }
            ParseOutcome::ClosedUnanswered if self.may_retry(number) => self.retry_request(number),
            ParseOutcome::ClosedUnanswered => self.give_up_on(number, "closed-early".into(), now),
            ParseOutcome::Failed(failure) => self.give_up_on(number, failure, now),
        }
    }

    /// Returns whether the request of `number` may be sent again after its connection ended before the first byte of a
    /// response: yes on a kept connection, which the server may have closed before it read the request (RFC 9112,
    /// 9.3.1).
    fn may_retry(&self, number: u32) -> bool {
        let slot = &self.slots[number as usize];
        slot.request > 1 && slot.protocol.may_be_sent_again()
    }

    /// Sends a request again on a new connection. It is the first request there, so it is not sent a third time.
    fn retry_request(&mut self, number: u32) -> io::Result<()> {
        self.tally.retried += u64::from(self.counts(number));
        self.slots[number as usize].protocol.repeat();
        self.reconnect(number)
    }

    /// Counts an operation that succeeded, and closes its connection, keeps it, or waits for the server to close it.
    pub(super) fn done(&mut self, number: u32, closing: bool, now: u64) -> io::Result<()> {
        self.count(number, now);
        let load = self.shared.load;
        let slot = &mut self.slots[number as usize];
        if E::SHARES_CONNECTIONS {
            slot.phase = Phase::Warm { since: now };
            return self.free(number, now);
        }
        // A workload that sends nothing closes each connection at once.
        let last = slot.request == load.close_every || load.workload.sends_nothing();
        if (closing || last) && load.close == Close::Server {
            slot.phase = Phase::Draining;
            slot.timed_from = now;
            return self.engine.exchange(number, &[]);
        }
        // With `Connection: close` clients do not wait for the FIN of the server; either FIN may be first.
        if last || closing {
            self.close(number)?;
            return self.free(number, now);
        }
        slot.phase = Phase::Warm { since: now };
        self.free(number, now)
    }

    /// Handles the expected close of a connection by the server.
    fn ended_by_server(&mut self, number: u32, now: u64) -> io::Result<()> {
        // The FIN of the server came first, so this side has no TIME_WAIT socket.
        self.give_back(number);
        self.close(number)?;
        self.free(number, now)
    }

    /// Handles the failure of a call on a connection: tries another port or source, sends the request again, or counts an error.
    pub(super) fn failed(
        &mut self,
        number: u32,
        stage: Stage,
        error: &io::Error,
        now: u64,
    ) -> io::Result<()> {
        let slot = &self.slots[number as usize];
        match slot.phase {
            // Without its watch, the end of the connection would go unnoticed: it counts as lost.
            Phase::Held => return self.handle(Event::Lost { slot: number }, now),
            // A RST instead of a FIN ends the connection too.
            Phase::Draining if !slot.cancelled => return self.ended_by_server(number, now),
            Phase::Opening { .. } => return self.not_opened(number, stage, error, now),
            _ => {}
        }
        if let Some(name) = self.overdue(number, now) {
            return self.give_up_on(number, name.into(), now);
        }
        let is_gone = matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
        match slot.phase {
            // The connection is open: neither data nor FIN has arrived.
            Phase::Probing if error.kind() == io::ErrorKind::WouldBlock => self.send_request(number, now),
            Phase::Probing => self.reconnect(number),
            Phase::AwaitingResponse { .. } if slot.broken.is_some() => self.broke(number, now),
            Phase::AwaitingResponse { .. } if is_gone => {
                self.slots[number as usize].broken = Some(copy_of(error));
                self.engine.probe(number)
            }
            _ => self.give_up_on(number, errno_name(error).into(), now),
        }
    }

    /// Handles the end of a broken connection whose response is not complete: sends the request again, or counts an error.
    fn broke(&mut self, number: u32, now: u64) -> io::Result<()> {
        let is_unanswered = matches!(
            self.slots[number as usize].phase,
            Phase::AwaitingResponse { has_first_byte: false, .. }
        );
        let Some(error) = self.slots[number as usize].broken.take() else { return Ok(()) };
        if is_unanswered && self.may_retry(number) {
            return self.retry_request(number);
        }
        self.give_up_on(number, errno_name(&error).into(), now)
    }

    /// Tries another port or source for a connection that could not be opened, or counts an error.
    fn not_opened(&mut self, number: u32, stage: Stage, error: &io::Error, now: u64) -> io::Result<()> {
        let is_udp = self.shared.load.transport() == Transport::Udp;
        let overdue = self.overdue(number, now);
        let Phase::Opening { attempt, since } = &mut self.slots[number as usize].phase else { return Ok(()) };
        let is_bind = stage == Stage::Bind;
        let is_taken = is_port_taken(stage, error, is_udp);
        let other = match &overdue {
            _ if is_taken => attempt.taken(is_bind),
            None if may_be_of_source(stage, error, now.saturating_sub(*since)) => {
                attempt.failed(is_bind, copy_of(error))
            }
            _ => None,
        };
        match other {
            Some(request) => {
                self.engine.close(number)?;
                self.open_as(number, request)
            }
            None if is_taken => {
                self.engine.close(number)?;
                self.no_port(number);
                Ok(())
            }
            None => {
                let failure = overdue.map_or_else(|| errno_name(error).into(), Failure::from);
                self.give_up_on(number, failure, now)
            }
        }
    }

    pub(super) fn give_up_on(&mut self, number: u32, failure: Failure, now: u64) -> io::Result<()> {
        // A UDP socket is open before its peer refuses.
        let is_refused = failure.name == errno::ECONNREFUSED;
        self.error(number, failure);
        self.tally.last_end = now;
        let slot = &mut self.slots[number as usize];
        let was_open = !matches!(slot.phase, Phase::Opening { .. });
        self.close(number)?;
        let slot = &mut self.slots[number as usize];
        if slot.holds {
            self.opening_held -= 1;
            self.active -= 1;
        }
        if self.stalled.as_ref().is_some_and(|stalled| stalled.trying == Some(number)) {
            // The failed connection had a port: ports are free again.
            self.resume(now);
        }
        if self.slots[number as usize].holds {
            return Ok(());
        }
        if (was_open && !is_refused) || self.share.schedule.is_some() {
            return self.free(number, now);
        }
        self.active -= 1;
        let slot = &mut self.slots[number as usize];
        let pause = (FAILED_RETRY << slot.failures.min(10)).min(MAX_RETRY);
        slot.failures += 1;
        self.pause_until(now + pause.max(self.shared.load.pause.as_nanos() as u64), number);
        Ok(())
    }

    /// Returns the port of a closed connection to the dialer, unless it is in TIME_WAIT on this side.
    pub(super) fn give_back(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if let Some(local) = slot.local.take() {
            self.shared.origin.release(slot.to, local);
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

    /// Makes `number` available for the next operation, which begins at once or later.
    pub(super) fn free(&mut self, number: u32, now: u64) -> io::Result<()> {
        self.active -= 1;
        if self.share.schedule.is_some() {
            if matches!(self.slots[number as usize].phase, Phase::Warm { .. }) {
                self.warm.push(number)
            } else {
                self.closed.push(number)
            }
            return Ok(());
        }
        let pause = self.shared.load.pause.as_nanos() as u64;
        if pause > 0 {
            self.pause_until(now + pause, number);
            return Ok(());
        }
        if self.ended || !self.ticket(None) {
            return Ok(());
        }
        self.tally.offered += 1;
        self.start(number, None)
    }

    /// Inserts into the queue by time, nearly always at its end, because all pauses except those after a failure have
    /// the same length.
    fn pause_until(&mut self, until: u64, number: u32) {
        let at = self.pausing.partition_point(|(at, _)| *at <= until);
        self.pausing.insert(at, (until, number));
    }
}

/// Returns whether opening a connection failed because its local port, or every local port, is in use: EADDRINUSE of
/// bind(), EADDRINUSE or EADDRNOTAVAIL of connect(), EAGAIN of connect() on a UDP socket (`inet_autobind`).
fn is_port_taken(stage: Stage, error: &io::Error, is_udp: bool) -> bool {
    match (stage, error.kind()) {
        (Stage::Bind | Stage::Connect, io::ErrorKind::AddrInUse) => true,
        (Stage::Connect, io::ErrorKind::AddrNotAvailable) => true,
        (Stage::Bind | Stage::Connect, io::ErrorKind::WouldBlock) => is_udp,
        _ => false,
    }
}

/// Returns whether an error may be due to the source address: the address was removed, or no route or rule lets it reach the
/// destination. `took` is the time since the connection began to open, in nanoseconds.
fn may_be_of_source(stage: Stage, error: &io::Error, took: u64) -> bool {
    match stage {
        Stage::Bind => true,
        Stage::Connect => is_of_source(error, Duration::from_nanos(took)),
        Stage::Exchange => false,
    }
}

/// Returns an error with the same errno.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

impl<E: Engine> Driver<'_, E> {
    /// Counts an operation that succeeded.
    pub(super) fn count(&mut self, number: u32, now: u64) {
        let counts = self.counts(number);
        let slot = &mut self.slots[number as usize];
        slot.failures = 0;
        if !counts {
            self.tally.warm_up.operations += 1;
            return;
        }
        let total = now - slot.intended.min(now);
        self.tally.operations += 1;
        self.tally.last_end = now;
        self.tally.total.record(total);
        let second = self.second_at(now);
        if second != self.second {
            self.flush(second);
        }
        if let Some(responses) = self.tally.by_request.get_mut(self.slots[number as usize].protocol.current())
        {
            *responses += 1;
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
            at_ns: slot.intended.saturating_sub(self.zero),
            total_ns: total,
            longest: longest.to_owned(),
            request: slot.request,
        });
    }

    pub(super) fn error(&mut self, number: u32, Failure { name, detail }: Failure) {
        if !self.counts(number) {
            self.tally.warm_up.errors += 1;
            return;
        }
        if let Some(text) = detail {
            self.tally.details.entry(name.clone()).or_insert(text);
        }
        if let Some(detail) = &mut self.part.detail {
            *detail.errors.entry(name.clone()).or_default() += 1;
        }
        let is_answer = !matches!(
            name.as_ref(),
            "timeout" | "unanswered" | "not-closed" | errno::ETIMEDOUT | errno::EADDRNOTAVAIL
        );
        self.part.answers += u64::from(is_answer);
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
        let second = self.second_at(now);
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
            && names.all(|name| name == errno::ECONNREFUSED || name == errno::ENOENT)
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
    fn look_for_late(&mut self, now: u64) -> io::Result<()> {
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
        // The connections of a warm-up have ports too.
        let connections = self.tally.connections + self.tally.warm_up.connections;
        let now = (self.tally.operations, connections, errors);
        let live = self.shared.live;
        live.operations.fetch_add(now.0 - self.published.0, Ordering::Relaxed);
        live.connections.fetch_add(now.1 - self.published.1, Ordering::Relaxed);
        live.errors.fetch_add(now.2 - self.published.2, Ordering::Relaxed);
        self.published = now;
    }

    /// Counts the operations that are still in progress at the end of the run as errors.
    pub(super) fn abandon(&mut self, now: u64) {
        for number in 0..self.slots.len() as u32 {
            let phase = &self.slots[number as usize].phase;
            if phase.is_waiting() && !matches!(phase, Phase::Draining) {
                let name = self.overdue(number, now).unwrap_or(Cow::Borrowed("unanswered"));
                self.error(number, name.into());
                // As an operation that ends by its own limit: this thread may be late.
                self.tally.last_end = now;
            }
        }
    }
}

/// Operations on shared connections: the slots of HTTP/2 are streams.
impl<E: Engine> Driver<'_, E> {
    /// Begins the operation of `number` on a shared connection, at once or when one has a free stream; or lets it wait for a port, if it had
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
