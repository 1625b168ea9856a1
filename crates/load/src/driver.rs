//! One thread of a run: what each of its connections does next.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fourtuple::dial::{Attempt, Wanted};
use fourtuple_record::Slow;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{errno_name, resource};

use crate::arrival::Schedule;
use crate::board::{Board, Part};
use crate::engine::{Engine, Event, Stage};
use crate::origin::Origin;
use crate::settings::{Close, Load};
use crate::tally::{MOST_SLOW, Tally};
use crate::workload::{Heard, Talk, TlsSetup};

/// How often numbers are published and the flag to stop read; deadlines are looked at no more often.
const TICK: u64 = 5_000_000;

/// Deadlines are looked at no less often.
const LONGEST_LOOK: u64 = 1_000_000_000;

/// How often one connection tries for a port when there is none; the others wait until it has one.
const PORT_RETRY: u64 = 50_000_000;

/// How long an answer that is due may take once the run is over.
const LAST_ANSWERS: u64 = 2_000_000_000;

/// A connection that could not be opened is tried again no sooner, so that a closed port is not hammered.
const FAILED_RETRY: u64 = 1_000_000;

/// What all threads of a run share.
pub(crate) struct Shared<'a> {
    pub(crate) load: &'a Load,
    pub(crate) origin: &'a Origin,
    pub(crate) board: &'a Board,
    pub(crate) live: &'a Live,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) begun: Instant,
    /// Operations begun so far, where their number is bounded.
    pub(crate) tickets: AtomicU64,
    /// Threads that still open connections to hold.
    pub(crate) ramping: AtomicU64,
    /// With https.
    pub(crate) tls: Option<TlsSetup>,
}

impl Shared<'_> {
    fn talk(&self) -> Box<dyn Talk> {
        let talk = self.load.workload.talk();
        match &self.tls {
            Some(tls) => tls.talk(talk),
            None => talk,
        }
    }
}

/// Numbers for whoever watches.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub(crate) operations: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) open: AtomicU64,
}

/// The part of a thread.
pub(crate) struct Share {
    pub(crate) number: usize,
    pub(crate) connections: u32,
    pub(crate) hold: u32,
    pub(crate) schedule: Option<Schedule>,
}

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Closed,
    Opening,
    /// A response is due.
    Asking,
    /// The operation is over, and the server closes.
    Draining,
    /// Open, and nothing to do.
    Warm,
    Held,
}

struct Slot<'a> {
    phase: Phase,
    talk: Box<dyn Talk>,
    attempt: Option<Attempt<'a>>,
    /// Address and port, where they are known: to be given back when the connection is closed.
    local: Option<std::net::SocketAddr>,
    /// Which request of its connection this is; 0: none yet.
    request: u64,
    intended: u64,
    started: u64,
    /// When the connection's opening began, the one with a port.
    opened: u64,
    /// When the connection was there, or the request sent.
    asked: u64,
    search_ns: Option<u64>,
    /// Whether the handshake, with TLS its own included, is still to be counted.
    handshaking: bool,
    heard: bool,
    cancelled: bool,
    holds: bool,
}

pub(crate) struct Driver<'a, E> {
    engine: E,
    shared: &'a Shared<'a>,
    share: Share,
    slots: Vec<Slot<'a>>,
    /// Open connections without work, the last used first.
    warm: Vec<u32>,
    /// Closed ones.
    closed: Vec<u32>,
    /// When a resting one may go on, in a closed loop; in the order of their times.
    resting: VecDeque<(u64, u32)>,
    /// Those that have an operation and no port.
    portless: VecDeque<u32>,
    stalled: Option<Stalled>,
    /// Operations under way.
    active: u32,
    /// Connections to hold that are still to be opened, and that are opening.
    to_hold: u32,
    opening_held: u32,
    tally: Tally,
    part: Part,
    second: u64,
    ended: bool,
    started_from: u64,
    /// Since when an operation is due and every connection is busy.
    busy_since: Option<u64>,
    published: (u64, u64, u64),
    /// When deadlines are looked at again.
    next_look: u64,
}

struct Stalled {
    since: u64,
    retry: u64,
    trying: Option<u32>,
}

impl<'a, E: Engine> Driver<'a, E> {
    pub(crate) fn new(engine: E, shared: &'a Shared<'a>, share: Share) -> Self {
        let count = share.connections + share.hold;
        let slot = |number| Slot {
            phase: Phase::Closed,
            talk: shared.talk(),
            attempt: None,
            local: None,
            request: 0,
            intended: 0,
            started: 0,
            opened: 0,
            asked: 0,
            search_ns: None,
            handshaking: false,
            heard: false,
            cancelled: false,
            holds: number < share.hold,
        };
        Driver {
            engine,
            shared,
            slots: (0..count).map(slot).collect(),
            warm: Vec::new(),
            closed: (share.hold..count).rev().collect(),
            resting: VecDeque::new(),
            portless: VecDeque::new(),
            stalled: None,
            active: 0,
            to_hold: share.hold,
            opening_held: 0,
            tally: Tally::new(),
            part: Part::new(),
            second: 0,
            ended: false,
            started_from: 0,
            busy_since: None,
            published: (0, 0, 0),
            next_look: 0,
            share,
        }
    }

    fn now(&self) -> u64 {
        self.shared.begun.elapsed().as_nanos() as u64
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> io::Result<Tally> {
        // Making the engine and taking it down are outside of the time that the run is said to take.
        let cpu_before = resource::thread_cpu_time();
        // Also a thread with none to hold: the others wait for it.
        if self.shared.load.hold > 0 {
            self.ramp_up()?;
        }
        self.started_from = self.now();
        let end = self.shared.load.length.map(|length| self.started_from + length.as_nanos() as u64);
        let mut next_tick = 0;
        let mut give_up = u64::MAX;
        if self.share.schedule.is_none() {
            let all: Vec<u32> = self.closed.drain(..).rev().collect();
            self.resting.extend(all.into_iter().map(|slot| (0, slot)));
        }
        loop {
            let now = self.now();
            if !self.ended && (end.is_some_and(|end| now >= end) || self.is_stopped() || self.is_given_out())
            {
                if self.share.schedule.is_some() && !self.is_stopped() {
                    // What was intended before the end begins, also when this thread was woken late.
                    self.start_due(end.map_or(now, |end| now.min(end.saturating_sub(1))))?;
                }
                self.end(now, end);
            }
            if !self.ended {
                self.start_due(now)?;
            }
            self.retry_port(now)?;
            if self.ended {
                give_up = give_up.min(now + self.patience(now, end));
                // Whoever waits for a port waits for nothing.
                for slot in std::mem::take(&mut self.portless) {
                    self.active -= 1;
                    self.slots[slot as usize].phase = Phase::Closed;
                }
                if self.active == 0 {
                    break;
                } else if now >= give_up {
                    self.abandon();
                    break;
                }
            }
            let wait = self.until_due(now, end, next_tick);
            self.engine.wait(wait)?;
            let now = self.now();
            while let Some(event) = self.engine.event() {
                self.handle(event, now)?;
            }
            if now >= next_tick {
                next_tick = now + TICK;
                self.tick(now)?;
            }
        }
        let now = self.now();
        self.flush(now / 1_000_000_000 + 1);
        self.publish();
        self.note_busy(false, now);
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now - stalled.since;
        }
        self.tally.syscalls = self.engine.system_calls();
        self.tally.cpu_ns = (resource::thread_cpu_time() - cpu_before).as_nanos() as u64;
        Ok(self.tally)
    }

    /// Opens the connections to hold, a few at a time, and waits for the other threads to have theirs.
    fn ramp_up(&mut self) -> io::Result<()> {
        const AT_ONCE: u32 = 64;
        let mut next_tick = 0;
        let mut waited = false;
        while !self.is_stopped() {
            while self.to_hold > 0 && self.opening_held < AT_ONCE && self.stalled.is_none() {
                self.to_hold -= 1;
                self.opening_held += 1;
                let slot = self.share.hold - 1 - self.to_hold;
                self.start(slot, None)?;
            }
            if self.to_hold == 0 && self.opening_held == 0 && !waited {
                waited = true;
                self.shared.ramping.fetch_sub(1, Ordering::Relaxed);
            }
            if waited && self.shared.ramping.load(Ordering::Relaxed) == 0 {
                break;
            }
            let now = self.now();
            self.retry_port(now)?;
            let late = |stalled: &Stalled| stalled.trying.is_none() && now > stalled.since + self.timeout();
            if self.stalled.as_ref().is_some_and(late) {
                self.hold_fewer(now);
            }
            self.engine.wait(Duration::from_millis(5))?;
            let now = self.now();
            while let Some(event) = self.engine.event() {
                self.handle(event, now)?;
            }
            if now >= next_tick {
                next_tick = now + TICK;
                self.tick(now)?;
            }
        }
        self.tally.ramp = self.now();
        Ok(())
    }

    /// There are not as many ports as connections to hold: those that are there must do.
    fn hold_fewer(&mut self, now: u64) {
        self.to_hold = 0;
        for number in std::mem::take(&mut self.portless) {
            self.slots[number as usize].phase = Phase::Closed;
            self.opening_held -= 1;
            self.active -= 1;
        }
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now - stalled.since;
        }
    }

    fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    fn timeout(&self) -> u64 {
        self.shared.load.timeout.as_nanos() as u64
    }

    /// How long answers that are due are waited for. Each of a number of operations has its whole timeout; whoever gave a
    /// time wants to have the result then.
    fn patience(&self, now: u64, end: Option<u64>) -> u64 {
        let is_over = self.is_stopped() || end.is_some_and(|end| now >= end);
        if is_over { LAST_ANSWERS.min(self.timeout() + 4 * TICK) } else { self.timeout() + LAST_ANSWERS }
    }

    /// No operation begins any more.
    fn end(&mut self, now: u64, end: Option<u64>) {
        self.ended = true;
        if self.is_given_out() {
            return;
        }
        let until = end.unwrap_or(u64::MAX).min(now);
        // The rate is over the whole time that was asked for, also where nothing succeeded at its end.
        self.tally.last_end = self.tally.last_end.max(until);
        if let Some(schedule) = &mut self.share.schedule {
            self.tally.offered += schedule.count_until(until.saturating_sub(self.started_from));
        }
    }

    /// Whether all operations of a bounded run have begun: a thread without connections of its own does not try to take one.
    fn is_given_out(&self) -> bool {
        let most = self.shared.load.operations;
        most.is_some_and(|most| self.shared.tickets.load(Ordering::Relaxed) >= most)
    }

    /// Takes one of the operations that the run is bounded to.
    fn ticket(&mut self) -> bool {
        let Some(most) = self.shared.load.operations else { return true };
        if self.shared.tickets.fetch_add(1, Ordering::Relaxed) < most {
            return true;
        }
        self.ended = true;
        false
    }

    /// Begins what is due.
    fn start_due(&mut self, now: u64) -> io::Result<()> {
        if self.share.schedule.is_some() {
            loop {
                let schedule = self.share.schedule.as_mut().expect("seen above");
                let intended = self.started_from + schedule.next();
                let busy = !self.has_free();
                self.note_busy(busy && intended <= now && self.stalled.is_none(), now);
                if intended > now || busy {
                    return Ok(());
                }
                if !self.ticket() {
                    return Ok(());
                }
                self.share.schedule.as_mut().expect("seen above").advance();
                self.tally.offered += 1;
                let slot = self.warm.pop().or_else(|| self.closed.pop()).expect("seen above");
                self.start(slot, Some(intended))?;
            }
        }
        while let Some((at, slot)) = self.resting.front().copied() {
            if at > now || !self.ticket() {
                return Ok(());
            }
            self.resting.pop_front();
            self.tally.offered += 1;
            self.start(slot, None)?;
        }
        Ok(())
    }

    /// Whether an operation can begin: without ports, on a connection that is there.
    fn has_free(&self) -> bool {
        !self.warm.is_empty() || (!self.closed.is_empty() && self.stalled.is_none())
    }

    fn note_busy(&mut self, busy: bool, now: u64) {
        match (busy, self.busy_since) {
            (true, None) => self.busy_since = Some(now),
            (false, Some(since)) => {
                self.tally.all_busy += now - since;
                self.busy_since = None;
            }
            _ => {}
        }
    }

    /// How long nothing is to be done unless something happens.
    fn until_due(&self, now: u64, end: Option<u64>, next_tick: u64) -> Duration {
        let mut due = next_tick.max(now);
        if !self.ended {
            if let Some(schedule) = &self.share.schedule {
                if self.has_free() {
                    due = due.min(self.started_from + schedule.next());
                }
            } else if let Some((at, _)) = self.resting.front() {
                due = due.min(*at);
            }
            due = due.min(end.unwrap_or(u64::MAX));
        }
        if let Some(stalled) = self.stalled.as_ref().filter(|stalled| stalled.trying.is_none() && !self.ended)
        {
            due = due.min(stalled.retry);
        }
        Duration::from_nanos(due.saturating_sub(now))
    }

    /// Begins an operation on `slot`: a request on an open connection, else a connection with its first request.
    fn start(&mut self, number: u32, intended: Option<u64>) -> io::Result<()> {
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

    fn open(&mut self, number: u32) -> io::Result<()> {
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

    fn open_as(&mut self, number: u32, wanted: Wanted) -> io::Result<()> {
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
    fn no_port(&mut self, number: u32) {
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

    fn retry_port(&mut self, now: u64) -> io::Result<()> {
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
    fn resume(&mut self, now: u64) -> io::Result<()> {
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now - stalled.since;
        }
        while self.stalled.is_none()
            && let Some(number) = self.portless.pop_front()
        {
            self.open(number)?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event, now: u64) -> io::Result<()> {
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

    fn connected(&mut self, number: u32, search_ns: Option<u64>, now: u64) -> io::Result<()> {
        self.tally.connections += 1;
        self.part.connections += 1;
        let slot = &mut self.slots[number as usize];
        slot.local = slot.attempt.take().and_then(Attempt::keep);
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
    fn count_handshake(&mut self, number: u32, now: u64) {
        let slot = &mut self.slots[number as usize];
        if slot.handshaking && slot.talk.established() {
            slot.handshaking = false;
            slot.asked = now;
            if let Some(search) = slot.search_ns {
                self.tally.handshake.record(now.saturating_sub(slot.opened).saturating_sub(search));
            }
        }
    }

    fn received(&mut self, number: u32, count: usize, now: u64) -> io::Result<()> {
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

    /// Counts an operation that is over.
    fn count(&mut self, number: u32, now: u64) {
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

    fn slow(&mut self, number: u32, total: u64, now: u64) {
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

    /// An operation has succeeded. What becomes of its connection?
    fn done(&mut self, number: u32, closing: bool, now: u64) -> io::Result<()> {
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
    fn ended_by_server(&mut self, number: u32, now: u64) -> io::Result<()> {
        // Its FIN came first: no TIME_WAIT is ours.
        self.give_back(number);
        self.close(number)?;
        self.free(number, now)
    }

    /// An operation has failed, on a connection of which nothing is under way.
    fn failed(&mut self, number: u32, stage: Stage, error: &io::Error, now: u64) -> io::Result<()> {
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

    fn give_up_on(&mut self, number: u32, name: Cow<'static, str>, now: u64) -> io::Result<()> {
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

    fn error(&mut self, name: Cow<'static, str>) {
        self.tally.error(name);
        self.part.errors += 1;
    }

    /// The port can be named again where no TIME_WAIT keeps it.
    fn give_back(&mut self, number: u32) {
        if let Some(local) = self.slots[number as usize].local.take() {
            self.shared.origin.release(local);
        }
    }

    fn close(&mut self, number: u32) -> io::Result<()> {
        if self.shared.load.close == Close::Reset {
            self.give_back(number);
        }
        let slot = &mut self.slots[number as usize];
        slot.local = None;
        slot.phase = Phase::Closed;
        self.engine.close(number)
    }

    /// The operation of `number` is over: the next one, at once or later.
    fn free(&mut self, number: u32, now: u64) -> io::Result<()> {
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
    fn rest(&mut self, until: u64, number: u32) {
        let at = self.resting.partition_point(|(at, _)| *at <= until);
        self.resting.insert(at, (until, number));
    }

    fn tick(&mut self, now: u64) -> io::Result<()> {
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
    fn look_for_late(&mut self, now: u64) -> io::Result<()> {
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
    fn flush(&mut self, next: u64) {
        self.part.in_flight = u64::from(self.active);
        self.shared.board.add(self.share.number, self.second, &self.part, next);
        self.part.clear();
        self.second = next;
    }

    fn publish(&mut self) {
        let errors = self.tally.errors.values().sum::<u64>();
        let now = (self.tally.operations, self.tally.connections, errors);
        let live = self.shared.live;
        live.operations.fetch_add(now.0 - self.published.0, Ordering::Relaxed);
        live.connections.fetch_add(now.1 - self.published.1, Ordering::Relaxed);
        live.errors.fetch_add(now.2 - self.published.2, Ordering::Relaxed);
        self.published = now;
    }

    /// Answers that did not come in time at the end.
    fn abandon(&mut self) {
        for slot in &self.slots {
            if matches!(slot.phase, Phase::Opening | Phase::Asking) {
                *self.tally.errors.entry(Cow::Borrowed("unanswered")).or_default() += 1;
                self.part.errors += 1;
            }
        }
    }
}

/// EADDRNOTAVAIL of connect(), EADDRINUSE of bind() and connect(). UDP, whose ports connect() does not share, has EAGAIN.
fn is_port_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse)
}
