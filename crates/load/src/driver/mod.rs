//! One thread of a run: what each of its connections does next.

mod account;
mod events;
mod open;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fourtuple::dial::Attempt;
use fourtuple_syscalls::resource;

use crate::arrival::Schedule;
use crate::board::{Board, Part};
use crate::engine::Engine;
use crate::origin::Origin;
use crate::settings::Load;
use crate::tally::Tally;
use crate::workload::{Talk, TlsSetup};

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
    local: Option<SocketAddr>,
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
            self.turn(wait, &mut next_tick)?;
        }
        let now = self.now();
        self.flush(now / 1_000_000_000 + 1);
        self.publish();
        self.note_busy(false, now);
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now.saturating_sub(stalled.since);
        }
        self.tally.syscalls = self.engine.system_calls();
        self.tally.cpu_ns = (resource::thread_cpu_time() - cpu_before).as_nanos() as u64;
        Ok(self.tally)
    }

    /// Waits, and handles what there is.
    fn turn(&mut self, wait: Duration, next_tick: &mut u64) -> io::Result<()> {
        self.engine.wait(wait)?;
        let now = self.now();
        while let Some(event) = self.engine.event() {
            self.handle(event, now)?;
        }
        if now >= *next_tick {
            *next_tick = now + TICK;
            self.tick(now)?;
        }
        Ok(())
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
            self.turn(Duration::from_millis(5), &mut next_tick)?;
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
            self.tally.stall.length += now.saturating_sub(stalled.since);
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
}
