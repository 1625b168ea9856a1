//! The driver: the state machine of one thread and its connections.
//!
//! Each turn starts the operations that are due, waits at most 5 ms for events of the engine, and handles them: an established connection
//! gives the times of the search and the handshake, and received bytes go to the protocol, whose outcome is more, send, done or an error. If
//! the port was in use, the `Attempt` gives the next one; if none is free, the connection waits in the queue `portless`, and one connection
//! per thread tries again.
//!
//! Engines know no protocol and keep no statistics. A protocol has neither a socket nor a clock. A failure on a connection is counted and
//! does not end the run.

mod events;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::ConnectRequest;
use fourtuple_record::errno;
use fourtuple_syscalls::resource;
use fourtuple_syscalls::socket::Transport;

use crate::load::arrival::Schedule;
use crate::load::engine::Engine;
use crate::load::origin::{Attempt, Origin};
use crate::load::settings::Load;
use crate::load::tally::{SecondSums, Streams, Tally, ThreadSecond};
use crate::load::workload::{ProtocolState, Requests, TlsSetup};

/// Time between two publications of counts, in nanoseconds. Deadlines are checked at most as often.
const TICK: u64 = 5_000_000;

/// Minimum time between two searches for overdue operations, in nanoseconds.
const MIN_LOOK_NS: u64 = 20_000_000;

/// Maximum number of events that one turn of the loop handles, and of operations that it begins. The loop checks limits and the
/// stop flag between two turns; the bound keeps a peer that sends without end from delaying these checks.
const MAX_PER_TURN: usize = 256;

/// Time between two attempts to get a port while none is free, in nanoseconds. One connection tries; the others wait.
const PORT_RETRY: u64 = 50_000_000;

/// Maximum duration of an operation, from its start, after the end of the run.
const MAX_GRACE: u64 = 2_000_000_000;

/// Maximum remaining time of operations in progress after the run was stopped from outside.
const GRACE_WHEN_STOPPED: u64 = 25_000_000;

/// Idle time, in nanoseconds, after which a kept connection is read before it is used again: the server may have closed it.
const IDLE: u64 = 1_000_000;

/// Pause after a connection could not be opened, in nanoseconds, in a closed loop. It doubles with each further failure of the
/// connection, up to [`MAX_RETRY`]: a closed port is not flooded.
const FAILED_RETRY: u64 = 1_000_000;

/// Maximum pause after a connection could not be opened, in nanoseconds. A server that starts again is loaded after this time.
const MAX_RETRY: u64 = 100_000_000;

/// Time in nanoseconds after which a run ends if everything was refused so far.
const REFUSED: u64 = 1_000_000_000;

/// The data that all threads of a run share.
pub(crate) struct Shared<'a> {
    pub(crate) load: &'a Load,
    pub(crate) origin: &'a Origin,
    pub(crate) board: &'a SecondSums,
    pub(crate) live: &'a Live,
    pub(crate) stop: &'a AtomicBool,
    /// A thread has seen that everything is refused: the run ends.
    pub(crate) refused: AtomicBool,
    pub(crate) begun: Instant,
    /// Whether a coordinator set `begun`: the threads wait for it.
    pub(crate) awaits_start: bool,
    /// Delay of the last thread behind `begun`, in nanoseconds.
    pub(crate) start_error: AtomicU64,
    /// Whether the seconds have failures by name and all parts of an operation.
    pub(crate) detailed: bool,
    /// Number of operations begun, if `--operations` limits it.
    pub(crate) tickets: AtomicU64,
    /// Number of threads that are still opening their held connections.
    pub(crate) ramping: AtomicU64,
    /// The requests of HTTP.
    pub(crate) requests: Arc<Requests>,
    /// The TLS configuration, with https.
    pub(crate) tls: Option<TlsSetup>,
}

impl Shared<'_> {
    /// Waits until the start that a coordinator set, or until the run is stopped, and notes the delay.
    pub(crate) fn wait_for_start(&self) {
        /// Time between two looks at the stop flag.
        const LOOK: Duration = Duration::from_millis(20);
        if !self.awaits_start {
            return;
        }
        while !self.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            match self.begun.checked_duration_since(now) {
                Some(left) if !left.is_zero() => thread::sleep(left.min(LOOK)),
                _ => {
                    let late = nanoseconds(now.saturating_duration_since(self.begun));
                    self.start_error.fetch_max(late, Ordering::Relaxed);
                    return;
                }
            }
        }
    }

    fn protocol(&self) -> Box<dyn ProtocolState> {
        let protocol = self.load.workload.protocol(&self.requests);
        match &self.tls {
            // The engine of HTTP/2 speaks TLS itself; the protocol only chooses requests.
            Some(tls) if self.load.streams.is_none() => tls.wrap(protocol),
            _ => protocol,
        }
    }
}

/// Counts that the progress callback reads during the run.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub(crate) operations: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) open: AtomicU64,
}

/// The share of the work of one thread.
pub(crate) struct Share {
    pub(crate) number: usize,
    pub(crate) connections: u32,
    pub(crate) hold: u32,
    pub(crate) schedule: Option<Schedule>,
}

/// The state of a connection.
enum Phase<'a> {
    Closed,
    /// `since`: the start of the last try of a port and a source.
    Opening {
        attempt: Attempt<'a>,
        since: u64,
    },
    /// An operation has begun on a kept connection; a read before the request finds out whether the server has closed it.
    Probing,
    /// The request was sent; the response is not complete.
    AwaitingResponse {
        /// Start of the TLS handshake, while it is in progress.
        tls_since: Option<u64>,
        has_first_byte: bool,
    },
    /// The operation is complete; the FIN of the server is due.
    Draining,
    /// Open and idle, since the end of the last operation.
    Warm {
        since: u64,
    },
    Held,
}

impl Phase<'_> {
    /// Returns whether the timeout applies in this phase.
    fn is_waiting(&self) -> bool {
        !matches!(self, Phase::Closed | Phase::Warm { .. } | Phase::Held)
    }
}

struct Slot<'a> {
    phase: Phase<'a>,
    protocol: Box<dyn ProtocolState>,
    /// The number of the destination.
    to: usize,
    /// The local address and port, if known: the dialer gets them back when the connection is closed.
    local: Option<SocketAddr>,
    /// The number of the request on its connection, from 1; 0 before the first.
    request: u64,
    intended: u64,
    started: u64,
    /// Start of the timeout: the actual start of the operation, or the end of its wait for a port.
    timed_from: u64,
    /// Time at which the connection was established or, on a kept connection, the request was sent.
    requested_at: u64,
    /// Why the connection broke while an operation was in progress. A server may have answered before it read the whole request, and
    /// then closed: what has arrived is read.
    broken: Option<io::Error>,
    /// Number of failures to open a connection since the last operation that succeeded.
    failures: u32,
    cancelled: bool,
    /// The request was sent on a shared connection that did not process it, and is sent again.
    is_again: bool,
    holds: bool,
    /// The operation did not begin in the warm-up.
    counts: bool,
}

pub(crate) struct Driver<'a, E> {
    engine: E,
    shared: &'a Shared<'a>,
    share: Share,
    slots: Vec<Slot<'a>>,
    /// Idle open connections; the most recently used one is taken first.
    warm: Vec<u32>,
    /// Closed connections without an operation, in an open loop.
    closed: Vec<u32>,
    /// Pausing connections with the end of their pause, in order of time, in a closed loop.
    pausing: VecDeque<(u64, u32)>,
    /// Connections that have an operation and wait for a port.
    portless: VecDeque<u32>,
    stalled: Option<Stalled>,
    /// Number of operations in progress.
    active: u32,
    /// Number of held connections whose opening has not begun.
    to_hold: u32,
    /// Number of held connections that are being opened.
    opening_held: u32,
    tally: Tally,
    part: ThreadSecond,
    second: u64,
    ended: bool,
    /// The run has reached its end: an operation in progress has at most [`MAX_GRACE`] from its start.
    is_past_end: bool,
    started_from: u64,
    /// Operations that begin are part of the warm-up, and count apart. The loop changes it between two turns.
    warms_up: bool,
    /// End of the warm-up, where the times of the result begin. Without a warm-up 0; with one `u64::MAX` until the held connections
    /// are open.
    zero: u64,
    /// Start of the current time in which an operation is due and all connections are busy.
    busy_since: Option<u64>,
    published: (u64, u64, u64),
    /// Time of the next check of deadlines.
    next_look: u64,
}

struct Stalled {
    since: u64,
    retry: u64,
    trying: Option<u32>,
}

impl<'a, E: Engine> Driver<'a, E> {
    pub(crate) fn new(engine: E, shared: &'a Shared<'a>, share: Share) -> Self {
        let count = share.connections * shared.load.streams.unwrap_or(1) + share.hold;
        let slot = |number| Slot {
            phase: Phase::Closed,
            protocol: shared.protocol(),
            to: 0,
            local: None,
            request: 0,
            intended: 0,
            started: 0,
            timed_from: 0,
            requested_at: 0,
            broken: None,
            failures: 0,
            cancelled: false,
            is_again: false,
            holds: number < share.hold,
            counts: true,
        };
        Driver {
            engine,
            shared,
            slots: (0..count).map(slot).collect(),
            warm: Vec::new(),
            closed: (share.hold..count).rev().collect(),
            pausing: VecDeque::new(),
            portless: VecDeque::new(),
            stalled: None,
            active: 0,
            to_hold: share.hold,
            opening_held: 0,
            tally: Tally::new(shared.origin.destinations, shared.load.list().len()),
            part: ThreadSecond::new(shared.detailed),
            second: 0,
            ended: false,
            is_past_end: false,
            started_from: 0,
            warms_up: !shared.load.warm_up.is_zero(),
            zero: if shared.load.warm_up.is_zero() { 0 } else { u64::MAX },
            busy_since: None,
            published: (0, 0, 0),
            next_look: 0,
            share,
        }
    }

    fn now(&self) -> u64 {
        self.shared.begun.elapsed().as_nanos() as u64
    }

    /// Runs until the run ends, and returns the counts.
    pub(crate) fn run(mut self) -> io::Result<Tally> {
        // The reported CPU time excludes the creation of the engine and its end.
        let mut cpu_before = resource::thread_cpu_time();
        let mut calls_before = 0;
        let mut streams_before = Streams::default();
        // A thread without held connections takes part too: the threads wait for each other.
        if self.shared.load.hold > 0 {
            self.ramp_up()?;
        }
        self.started_from = self.now();
        let warm_up = nanoseconds(self.shared.load.warm_up);
        if self.warms_up {
            self.zero = self.started_from + warm_up;
        }
        let end = self.shared.load.length.map(|length| self.started_from + warm_up + nanoseconds(length));
        let mut next_tick = 0;
        let mut give_up = u64::MAX;
        if self.share.schedule.is_none() {
            let all: Vec<u32> = self.closed.drain(..).rev().collect();
            self.pausing.extend(all.into_iter().map(|slot| (0, slot)));
        }
        loop {
            let now = self.now();
            if self.warms_up && now >= self.zero {
                self.warms_up = false;
                (cpu_before, calls_before) = (resource::thread_cpu_time(), self.engine.system_calls());
                streams_before = self.engine.streams().unwrap_or_default();
                self.tally.all_busy = 0;
                self.busy_since = self.busy_since.map(|since| since.max(self.zero));
            }
            if !self.ended && (end.is_some_and(|end| now >= end) || self.is_stopped() || self.is_given_out())
            {
                if self.share.schedule.is_some() && !self.is_stopped() {
                    // Operations that were due before the end begin, even if this thread woke up late.
                    self.start_due(end.map_or(now, |end| now.min(end.saturating_sub(1))), 4 * MAX_PER_TURN)?;
                }
                self.end(now, end);
            }
            if !self.ended {
                self.start_due(now, MAX_PER_TURN)?;
            }
            self.retry_port(now)?;
            if self.ended {
                // Not from `now`: operations that have just begun have all of their time.
                give_up = give_up.min(self.now() + self.patience());
                // Operations that still wait for a port never begin.
                for slot in std::mem::take(&mut self.portless) {
                    self.active -= 1;
                    self.slots[slot as usize].phase = Phase::Closed;
                }
                self.withdraw();
                if self.active == 0 {
                    break;
                } else if now >= give_up {
                    self.abandon(now);
                    break;
                }
            }
            let wait = self.until_due(now, end, next_tick);
            self.turn(wait, &mut next_tick)?;
        }
        let now = self.now();
        // Seconds in which other threads still run do not wait for this one.
        self.flush(u64::MAX);
        self.publish();
        self.note_busy(false, now);
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now.saturating_sub(stalled.since);
        }
        self.tally.syscalls = self.engine.system_calls() - calls_before;
        self.tally.streams = self.engine.streams();
        if let Some(streams) = self.tally.streams {
            self.tally.sent_bytes = streams.sent_bytes - streams_before.sent_bytes;
            self.tally.received_bytes = streams.received_bytes - streams_before.received_bytes;
        }
        self.tally.last_end = self.tally.last_end.saturating_sub(self.zero);
        self.tally.stall.first = self.tally.stall.first.map(|first| first.saturating_sub(self.zero));
        self.tally.stall.last = self.tally.stall.last.saturating_sub(self.zero);
        self.tally.cpu_ns = (resource::thread_cpu_time() - cpu_before).as_nanos() as u64;
        Ok(self.tally)
    }

    /// Waits for events and handles at most [`MAX_PER_TURN`] of them.
    fn turn(&mut self, wait: Duration, next_tick: &mut u64) -> io::Result<()> {
        self.engine.wait(wait)?;
        let now = self.now();
        for _ in 0..MAX_PER_TURN {
            let Some(event) = self.engine.event() else { break };
            self.handle(event, now)?;
        }
        if now >= *next_tick {
            *next_tick = now + TICK;
            self.tick(now)?;
        }
        Ok(())
    }

    /// Opens the held connections, a few at a time, and waits until the other threads have opened theirs.
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
        self.tally.ramp = Some(self.now());
        Ok(())
    }

    /// Gives up on held connections for which there is no port, and continues with the open ones.
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
        self.shared.stop.load(Ordering::Relaxed) || self.shared.refused.load(Ordering::Relaxed)
    }

    fn timeout(&self) -> u64 {
        nanoseconds(self.shared.load.timeout)
    }

    /// Returns whether what happens on a connection counts: its operation did not begin in the warm-up.
    fn counts(&self, number: u32) -> bool {
        let slot = &self.slots[number as usize];
        slot.holds || slot.counts
    }

    /// Returns the number of a second of the result.
    fn second_at(&self, now: u64) -> u64 {
        now.saturating_sub(self.zero) / 1_000_000_000
    }

    /// Returns the maximum duration of an operation, from its start.
    fn operation_limit(&self) -> u64 {
        if self.is_past_end { self.timeout().min(MAX_GRACE) } else { self.timeout() }
    }

    /// Returns how much longer the run may wait for operations in progress, once none begins any more. Each of them ends by
    /// [`Driver::operation_limit`]; this bound holds for an operation that does not.
    fn patience(&self) -> u64 {
        if self.is_stopped() {
            GRACE_WHEN_STOPPED
        } else if self.is_past_end {
            self.operation_limit() + 2 * MIN_LOOK_NS
        } else {
            self.timeout() + MAX_GRACE
        }
    }

    /// Ends the run: no operation begins any more.
    fn end(&mut self, now: u64, end: Option<u64>) {
        self.ended = true;
        if end.is_some_and(|end| now >= end) {
            self.is_past_end = true;
            self.next_look = now;
        }
        if self.is_given_out() {
            return;
        }
        let until = end.unwrap_or(u64::MAX).min(now);
        // The reported rate covers the whole time of the run, even if no operation succeeded near its end.
        self.tally.last_end = self.tally.last_end.max(until);
        if let Some(schedule) = &mut self.share.schedule {
            // Starts in the warm-up are not offered.
            schedule.count_until(self.zero.saturating_sub(self.started_from));
            self.tally.offered += schedule.count_until(until.saturating_sub(self.started_from));
        }
    }

    /// Returns whether all operations of a run with `--operations` have begun. A thread without connections needs this
    /// check, because it never takes a ticket.
    fn is_given_out(&self) -> bool {
        let most = self.shared.load.operations;
        most.is_some_and(|most| self.shared.tickets.load(Ordering::Relaxed) >= most)
    }

    /// Returns whether an operation that begins now counts: in an open loop by its intended start.
    fn is_counted(&self, intended: Option<u64>) -> bool {
        intended.map_or(!self.warms_up, |intended| intended >= self.zero)
    }

    /// Takes one of the operations that `--operations` allows; those of the warm-up are not limited. Returns false, and ends the run, if
    /// none is left.
    fn ticket(&mut self, intended: Option<u64>) -> bool {
        let Some(most) = self.shared.load.operations.filter(|_| self.is_counted(intended)) else {
            return true;
        };
        if self.shared.tickets.fetch_add(1, Ordering::Relaxed) < most {
            return true;
        }
        self.ended = true;
        false
    }

    /// Begins the operations that are due, at most `most`.
    fn start_due(&mut self, now: u64, most: usize) -> io::Result<()> {
        if self.share.schedule.is_some() {
            for _ in 0..most {
                let schedule = self.share.schedule.as_mut().expect("seen above");
                let intended = self.started_from + schedule.next();
                let busy = !self.has_free();
                self.note_busy(busy && intended <= now && self.stalled.is_none(), now);
                if intended > now || busy {
                    return Ok(());
                }
                if !self.ticket(Some(intended)) {
                    return Ok(());
                }
                self.share.schedule.as_mut().expect("seen above").advance(1);
                self.tally.offered += u64::from(intended >= self.zero);
                let slot = self.warm.pop().or_else(|| self.closed.pop()).expect("seen above");
                self.start(slot, Some(intended))?;
            }
            return Ok(());
        }
        for _ in 0..most {
            let Some((at, slot)) = self.pausing.front().copied() else { break };
            if at > now || !self.ticket(None) {
                return Ok(());
            }
            self.pausing.pop_front();
            self.tally.offered += 1;
            self.start(slot, None)?;
        }
        Ok(())
    }

    /// Returns whether an operation can begin: on an idle connection, or on a new one unless the ports are exhausted.
    fn has_free(&self) -> bool {
        !self.warm.is_empty() || (!self.closed.is_empty() && self.stalled.is_none())
    }

    /// Returns the time until the next deadline of the driver: how long it may wait for events.
    fn until_due(&self, now: u64, end: Option<u64>, next_tick: u64) -> Duration {
        let mut due = next_tick.max(now);
        if !self.ended {
            if let Some(schedule) = &self.share.schedule {
                if self.has_free() {
                    due = due.min(self.started_from + schedule.next());
                }
            } else if let Some((at, _)) = self.pausing.front() {
                due = due.min(*at);
            }
            due = due.min(end.unwrap_or(u64::MAX));
            if !self.portless.is_empty() && self.stalled.is_none() {
                due = now;
            }
        }
        if self.warms_up {
            due = due.min(self.zero);
        }
        if let Some(stalled) = self.stalled.as_ref().filter(|stalled| stalled.trying.is_none() && !self.ended)
        {
            due = due.min(stalled.retry);
        }
        Duration::from_nanos(due.saturating_sub(now))
    }
}

/// Converts to nanoseconds, limited to a quarter of `u64::MAX` so that adding a time does not overflow.
fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos().min(u128::from(u64::MAX / 4)) as u64
}

impl<E: Engine> Driver<'_, E> {
    /// Begins an operation: sends a request on the open connection of `number`, or opens a connection for its first request.
    fn start(&mut self, number: u32, intended: Option<u64>) -> io::Result<()> {
        let now = self.now();
        self.active += 1;
        let counts = self.is_counted(intended);
        let slot = &mut self.slots[number as usize];
        slot.counts = counts;
        slot.started = now;
        slot.timed_from = now;
        slot.intended = intended.unwrap_or(now);
        (slot.cancelled, slot.is_again, slot.broken) = (false, false, None);
        if intended.is_some() {
            self.tally.behind = now.saturating_sub(slot.intended);
            if counts {
                self.tally.late.record(self.tally.behind);
                if let Some(detail) = &mut self.part.detail {
                    detail.late.record(self.tally.behind);
                }
            }
        }
        let Phase::Warm { since } = slot.phase else { return self.connect(number) };
        if E::SHARES_CONNECTIONS {
            return self.connect(number);
        }
        let may_be_closed = self.shared.load.transport() == Transport::Tcp && now - since >= IDLE;
        if may_be_closed {
            slot.phase = Phase::Probing;
            return self.engine.probe(number);
        }
        self.send_request(number, now)
    }

    /// Sends the request of an operation on its open connection.
    fn send_request(&mut self, number: u32, now: u64) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        slot.phase = Phase::AwaitingResponse { tls_since: None, has_first_byte: false };
        slot.requested_at = now;
        slot.request += 1;
        slot.protocol.begin(slot.request == self.shared.load.close_every);
        let bytes = slot.protocol.outgoing();
        self.tally.sent_bytes += if slot.counts { bytes.len() as u64 } else { 0 };
        self.engine.exchange(number, bytes)
    }

    /// Opens a connection for an operation, now or when a port is free.
    fn connect(&mut self, number: u32) -> io::Result<()> {
        let slot = &mut self.slots[number as usize];
        slot.request = 1;
        slot.protocol.renew();
        slot.protocol.begin(slot.request == self.shared.load.close_every);
        if self.stalled.is_some() && !E::SHARES_CONNECTIONS {
            self.portless.push_back(number);
            return Ok(());
        }
        self.open(number)
    }

    /// Opens another connection for an operation whose kept connection the server has closed before the first byte of a response.
    fn reconnect(&mut self, number: u32) -> io::Result<()> {
        // The FIN of the server came first, so this side has no TIME_WAIT socket.
        self.give_back(number);
        self.close(number)?;
        self.connect(number)
    }

    fn open(&mut self, number: u32) -> io::Result<()> {
        if E::SHARES_CONNECTIONS && self.join(number) {
            return Ok(());
        }
        match self.shared.origin.begin() {
            Ok((to, attempt, request)) => {
                let slot = &mut self.slots[number as usize];
                (slot.to, slot.phase) = (to, Phase::Opening { attempt, since: 0 });
                self.open_as(number, request)
            }
            Err(_) => {
                self.no_port(number);
                Ok(())
            }
        }
    }

    /// Opens a connection in the phase [`Phase::Opening`].
    fn open_as(&mut self, number: u32, request: ConnectRequest) -> io::Result<()> {
        let now = self.now();
        let slot = &mut self.slots[number as usize];
        if let Phase::Opening { since, .. } = &mut slot.phase {
            *since = now;
        }
        let bytes = if slot.holds { &[] } else { slot.protocol.outgoing() };
        self.engine.open(number, slot.to, request, bytes)
    }

    /// Lets an operation wait because no port is free. One of the waiting operations tries again each [`PORT_RETRY`].
    fn no_port(&mut self, number: u32) {
        let now = self.now();
        self.error(number, errno::EADDRNOTAVAIL.into());
        self.slots[number as usize].phase = Phase::Closed;
        self.portless.push_back(number);
        self.tally.stall.first.get_or_insert(now);
        self.tally.stall.last = now;
        let stalled = self.stalled.get_or_insert(Stalled { since: now, retry: 0, trying: None });
        stalled.retry = now + PORT_RETRY;
        stalled.trying = None;
    }

    /// Opens connections that wait for a port: a single one each [`PORT_RETRY`] while no port is free, else all.
    fn retry_port(&mut self, now: u64) -> io::Result<()> {
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
    fn resume(&mut self, now: u64) {
        if let Some(stalled) = self.stalled.take() {
            self.tally.stall.length += now.saturating_sub(stalled.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::VecDeque;
    use std::rc::Rc;
    use std::sync::atomic::AtomicU64;

    use fourtuple::dial::ConnectRequest;

    use super::*;
    use crate::load::engine::{EngineChoice, Event};
    use crate::load::workload::Workload;

    /// Number of events of one turn after which the engine returns none, so that a driver without a bound fails the test
    /// and does not hang.
    const ENDLESS: u64 = 100_000;

    /// An engine whose connections always have more bytes to receive.
    struct Endless {
        events: VecDeque<Event>,
        this_turn: u64,
        most: Rc<Cell<u64>>,
    }

    impl Engine for Endless {
        fn open(&mut self, slot: u32, _to: usize, _request: ConnectRequest, _bytes: &[u8]) -> io::Result<()> {
            self.events.push_back(Event::Connected { slot, search_ns: None });
            self.events.push_back(Event::Received { slot, count: 1 });
            Ok(())
        }

        fn exchange(&mut self, slot: u32, _bytes: &[u8]) -> io::Result<()> {
            self.events.push_back(Event::Received { slot, count: 1 });
            Ok(())
        }

        fn probe(&mut self, slot: u32) -> io::Result<()> {
            self.exchange(slot, &[])
        }

        fn watch(&mut self, _slot: u32) -> io::Result<()> {
            Ok(())
        }

        fn close(&mut self, _slot: u32) -> io::Result<()> {
            Ok(())
        }

        fn cancel(&mut self, _slot: u32) -> io::Result<()> {
            // Each slot always has another event before the cancellation.
            Ok(())
        }

        fn wait(&mut self, _timeout: Duration) -> io::Result<()> {
            self.this_turn = 0;
            Ok(())
        }

        fn event(&mut self) -> Option<Event> {
            if self.this_turn == ENDLESS {
                return None;
            }
            self.this_turn += 1;
            self.most.set(self.most.get().max(self.this_turn));
            self.events.pop_front()
        }

        fn received(&self, _slot: u32, _count: usize) -> &[u8] {
            b"x"
        }

        fn system_calls(&self) -> u64 {
            0
        }
    }

    /// Returns a run of 50 ms with two connections, whose operations have `timeout`.
    fn load(timeout: Duration) -> Load {
        let workload = Workload::Crr { request: 1, response: usize::MAX };
        Load {
            connections: 2,
            length: Some(Duration::from_millis(50)),
            timeout,
            engine: EngineChoice::Epoll,
            ..Load::new("tcp://127.0.0.1:1".parse().unwrap(), workload)
        }
    }

    /// Runs `load` with the endless engine. Returns the tally and the largest number of events that one turn asked for.
    fn run(load: &Load, stop: &AtomicBool) -> (Tally, u64) {
        let shared = Shared {
            load,
            origin: &Origin::plain(&load.sources, 1),
            board: &SecondSums::new(1, false, Duration::ZERO, None),
            live: &Live::default(),
            stop,
            refused: AtomicBool::new(false),
            begun: Instant::now(),
            awaits_start: false,
            start_error: AtomicU64::new(0),
            detailed: false,
            tickets: AtomicU64::new(0),
            ramping: AtomicU64::new(1),
            requests: load.encoded(),
            tls: None,
        };
        let most = Rc::new(Cell::new(0));
        let engine = Endless { events: VecDeque::new(), this_turn: 0, most: Rc::clone(&most) };
        let share = Share { number: 0, connections: load.connections, hold: 0, schedule: None };
        (Driver::new(engine, &shared, share).run().unwrap(), most.get())
    }

    /// A server that sends bytes and its FIN too early: they are there when the next request is sent.
    #[test]
    fn a_response_of_the_same_turn_takes_no_time() {
        let mut load = load(Duration::from_secs(60));
        load.workload = Workload::Crr { request: 1, response: 1 };
        let (tally, _) = run(&load, &AtomicBool::new(false));
        assert!(tally.operations > 2 && tally.errors.is_empty(), "{:?}", tally.errors);
        assert!(tally.first_byte.max() < 60_000_000_000, "{}", tally.first_byte.max());
    }

    #[test]
    fn a_turn_is_bounded_though_bytes_keep_coming() {
        let (tally, most) = run(&load(Duration::from_millis(10)), &AtomicBool::new(false));
        assert!(most <= MAX_PER_TURN as u64, "{most} events in one turn");
        assert_eq!(tally.operations, 0);
        assert!(tally.errors["timeout"] >= 2, "{:?}", tally.errors);
    }

    #[test]
    fn a_run_ends_within_the_grace_of_its_operations() {
        // The operations begin with the run: MAX_GRACE from their start ends before MAX_GRACE from the end of the run.
        let (tally, _) = run(&load(Duration::from_secs(60)), &AtomicBool::new(false));
        assert_eq!(tally.errors.into_iter().collect::<Vec<_>>(), [("unanswered".into(), 2)]);
        assert!(tally.last_end >= MAX_GRACE, "{}", tally.last_end);
    }

    #[test]
    fn a_stopped_run_ends_though_bytes_keep_coming() {
        let mut load = load(Duration::from_secs(60));
        load.length = None;
        let (tally, most) = run(&load, &AtomicBool::new(true));
        assert!(most <= MAX_PER_TURN as u64, "{most} events in one turn");
        assert_eq!(tally.operations, 0);
    }
}
