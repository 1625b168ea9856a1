//! A one-shot accept of io_uring, armed while the worker waits and only then: the waiter goes to the tail of the listener's
//! queue and is taken out of it when it is woken (`io_arm_poll_handler`, `io_poll_wake`), so that workers take turns. A
//! multishot accept would stay in its place, also while its worker is busy.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use fourtuple_syscalls::accept_ring::{AcceptRing, Outcome};
use fourtuple_syscalls::{Endpoint, errno_name, socket};

use crate::listen::connection::Connection;
use crate::listen::error::ListenError;
use crate::listen::lobby::Arrival;
use crate::listen::policy::Policy;
use crate::listen::rounds::Rounds;
use crate::listen::seats::Count;
use crate::listen::wait::{Seat, Wait};

/// Tokens; those of connections are their descriptors.
const ACCEPT: u64 = 1 << 32;
const BELL: u64 = ACCEPT + 1;
const LOBBY: u64 = ACCEPT + 2;
/// How long nobody is accepted after an accept has found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// Finds out whether it can be done here, before anybody relies on it.
pub(super) fn probe(endpoint: &Endpoint) -> Result<(), ListenError> {
    let mut ring = AcceptRing::new().map_err(|error| refused(endpoint, error))?;
    let waits = ring.waits();
    if waits.map_err(|source| ListenError::Call {
        call: "io_uring_enter()",
        endpoint: endpoint.clone(),
        source,
    })? {
        return Ok(());
    }
    Err(ListenError::Absent {
        policy: Policy::UringOneshot,
        what: "an accept of io_uring that waits for a connection",
        source: io::ErrorKind::WouldBlock.into(),
    })
}

fn refused(endpoint: &Endpoint, source: io::Error) -> ListenError {
    let policy = Policy::UringOneshot;
    match errno_name(&source).as_str() {
        "EPERM" | "EACCES" => ListenError::NotPermitted {
            policy,
            call: "io_uring_setup()",
            needs: "it takes the sysctl kernel.io_uring_disabled at 0 (or 1 with the group of kernel.io_uring_group) and a \
                    seccomp profile that allows io_uring",
            source,
        },
        "ENOSYS" => ListenError::Absent { policy, what: "a kernel with io_uring", source },
        "EINVAL" => ListenError::Absent { policy, what: "IORING_SETUP_DEFER_TASKRUN (Linux 6.1)", source },
        _ => ListenError::Call { call: "io_uring_setup()", endpoint: endpoint.clone(), source },
    }
}

struct UringOneshot {
    listener: Arc<OwnedFd>,
    /// Made by the thread that waits, which alone may use it. An acceptor that goes to another thread gets another ring.
    ring: Option<(ThreadId, AcceptRing)>,
    /// By descriptor. Each is in `unarmed`, or has a poll under way, or is in `ready`.
    idle: Vec<Option<Connection>>,
    unarmed: Vec<i32>,
    ready: VecDeque<u64>,
    /// Operations under way beside those of connections.
    accepting: bool,
    hears_bell: bool,
    sees_lobby: bool,
    /// Nobody is accepted before.
    accept_after: Option<Instant>,
    /// When it looked what is ready, where that is asked for.
    rounds: Option<Rounds>,
}

/// What was over when the ring was looked at.
#[derive(Clone, Copy)]
struct Gathered {
    /// There was something.
    any: bool,
    /// An accept was cancelled.
    cancelled: bool,
}

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    // Also a worker alone may lack the permission: a process with a seccomp filter of its own.
    drop(AcceptRing::new().map_err(|error| refused(&seat.group.0.endpoint, error))?);
    Ok(Box::new(UringOneshot {
        listener: seat.group.listener()?,
        ring: None,
        idle: Vec::new(),
        unarmed: Vec::new(),
        ready: VecDeque::new(),
        accepting: false,
        hears_bell: false,
        sees_lobby: false,
        accept_after: None,
        rounds: seat.group.is_measured().then(Rounds::default),
    }))
}

impl UringOneshot {
    /// The ring of this thread. Outside of `next` no accept is under way, so that no connection is lost with an old ring.
    fn take_ring(&mut self, seat: &Seat, here: ThreadId) -> Result<AcceptRing, ListenError> {
        match self.ring.take() {
            Some((thread, ring)) if thread == here => return Ok(ring),
            other => drop(other),
        }
        (self.accepting, self.hears_bell, self.sees_lobby) = (false, false, false);
        self.ready.clear();
        self.unarmed.clear();
        self.unarmed.extend(self.idle.iter().flatten().map(|connection| connection.as_fd().as_raw_fd()));
        AcceptRing::new().map_err(|error| refused(&seat.group.0.endpoint, error))
    }

    fn put(&mut self, connection: Connection) -> i32 {
        let descriptor = connection.as_fd().as_raw_fd();
        let place = descriptor as usize;
        if self.idle.len() <= place {
            self.idle.resize_with(place + 1, || None);
        }
        self.idle[place] = Some(connection);
        descriptor
    }

    /// A connection that may have something to say already.
    fn arrive(&mut self, connection: Connection) {
        let speaks = socket::has_something(connection.as_fd());
        let descriptor = self.put(connection);
        if speaks { self.ready.push_back(descriptor as u64) } else { self.unarmed.push(descriptor) }
    }

    /// Asks for everything that is not asked for yet.
    fn arm(&mut self, ring: &mut AcceptRing, seat: &Seat) -> io::Result<()> {
        for descriptor in self.unarmed.drain(..) {
            if let Some(Some(connection)) = self.idle.get(descriptor as usize) {
                ring.poll(descriptor as u64, connection.as_fd())?;
            }
        }
        if !std::mem::replace(&mut self.hears_bell, true) {
            ring.poll(BELL, seat.bell.as_fd())?;
        }
        if !std::mem::replace(&mut self.sees_lobby, true) {
            ring.poll(LOBBY, seat.group.0.lobby.exit())?;
        }
        if self.accept_after.is_none() && !std::mem::replace(&mut self.accepting, true) {
            ring.accept(ACCEPT, self.listener.as_fd())?;
        }
        Ok(())
    }

    /// What is over, now or when something is. What `disarm` finds beside the accept came a moment after this look, and
    /// counts as found in it.
    fn look(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<(), ListenError> {
        // Only where one does not wait at first does one know whether one would have slept. Polls that are handed over with
        // this, of connections that have something already, are over at once.
        let at_once = self.rounds.is_some() && self.gather(ring, seat, Some(Duration::ZERO))?.any;
        if !at_once {
            self.gather(ring, seat, timeout)?;
        }
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        let others_idle = seat.group.0.seats.others_idle(seat.number);
        let now = Instant::now();
        if at_once {
            rounds.found(now, others_idle)
        } else {
            rounds.woken(now, others_idle)
        }
        Ok(())
    }

    /// Waits, and takes note of what is over.
    fn gather(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<Gathered, ListenError> {
        ring.wait(timeout).map_err(seat.group.failed("io_uring_enter()"))?;
        let mut gathered = Gathered { any: false, cancelled: false };
        while let Some((token, outcome)) = ring.outcome() {
            gathered.any = true;
            match token {
                ACCEPT => {
                    self.accepting = false;
                    match outcome {
                        Outcome::Accepted(socket) => self.arrive(seat.welcome(socket)),
                        Outcome::Failed(error) => self.not_accepted(seat, error)?,
                        Outcome::Cancelled | Outcome::Ready => gathered.cancelled = true,
                    }
                }
                BELL => {
                    self.hears_bell = false;
                    self.ready.push_back(BELL);
                }
                LOBBY => {
                    self.sees_lobby = false;
                    self.ready.push_back(LOBBY);
                }
                // Whatever went wrong is found by reading.
                descriptor => self.ready.push_back(descriptor),
            }
        }
        if gathered.any && !gathered.cancelled {
            seat.count(Count::Wakeups);
        }
        Ok(gathered)
    }

    fn not_accepted(&mut self, seat: &Seat, error: io::Error) -> Result<(), ListenError> {
        match errno_name(&error).as_str() {
            "EAGAIN" => seat.count(Count::EmptyAccepts),
            "EINTR" | "ECONNABORTED" | "EPROTO" | "EPERM" => {}
            // It takes its descriptor before it looks whether anybody is there.
            "EMFILE" | "ENFILE" | "ENOBUFS" | "ENOMEM" => {
                seat.count(Count::FailedAccepts);
                self.accept_after = Some(Instant::now() + BACK_OFF);
            }
            _ => return Err(seat.group.failed("accept()")(error)),
        }
        Ok(())
    }

    /// Ends the accept and waits until it is over: whom it accepted meanwhile is among those that are ready or idle. Whether
    /// it was cancelled.
    fn disarm(&mut self, ring: &mut AcceptRing, seat: &Seat) -> Result<bool, ListenError> {
        if !self.accepting {
            return Ok(false);
        }
        ring.cancel(ACCEPT).map_err(seat.group.failed("io_uring_enter()"))?;
        let mut cancelled = false;
        while self.accepting {
            cancelled |= self.gather(ring, seat, None)?.cancelled;
        }
        Ok(cancelled)
    }

    /// As `disarm`, of a worker that will be busy. A waiter that was woken and then cancelled has swallowed what woke it
    /// (`io_poll_check_events` looks at the cancellation first), so the others are told to look.
    fn retire(&mut self, ring: &mut AcceptRing, seat: &Seat) -> Result<(), ListenError> {
        if self.disarm(ring, seat)? {
            let waiting = socket::wait_readable(self.listener.as_fd(), Some(Duration::ZERO));
            if waiting.map_err(seat.group.failed("poll()"))? {
                seat.group.0.lobby.nudge().map_err(seat.group.failed("sendmsg()"))?;
            }
        }
        Ok(())
    }

    /// What a token brings; `Some(None)` is the bell.
    fn handle(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        token: u64,
    ) -> Result<Option<Option<Connection>>, ListenError> {
        match token {
            BELL => {
                seat.bell.silence();
                Ok(Some(None))
            }
            LOBBY => {
                match seat.group.0.lobby.take().map_err(seat.group.failed("recvmsg()"))? {
                    Some(Arrival::Connection(passenger)) => self.arrive(passenger.settle(seat.place())),
                    // Somebody may be in the queue of whom our waiter was not told: one that is armed anew looks first.
                    Some(Arrival::Listener(_) | Arrival::Nudge) | None => {
                        self.disarm(ring, seat)?;
                    }
                }
                Ok(None)
            }
            descriptor => Ok(self.idle.get_mut(descriptor as usize).and_then(Option::take).map(Some)),
        }
    }

    fn search(
        &mut self,
        ring: &mut AcceptRing,
        seat: &Seat,
        timeout: Option<Duration>,
    ) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looked = false;
        loop {
            while let Some(token) = self.ready.pop_front() {
                if let Some(found) = self.handle(ring, seat, token)? {
                    self.retire(ring, seat)?;
                    return Ok(found);
                }
            }
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if looked && left.is_some_and(|left| left.is_zero()) {
                self.retire(ring, seat)?;
                if self.ready.is_empty() {
                    return Ok(None);
                }
                continue;
            }
            looked = true;
            if let Some(after) = self.accept_after {
                let pause = after.saturating_duration_since(Instant::now());
                if pause.is_zero() {
                    self.accept_after = None;
                } else {
                    left = Some(left.map_or(pause, |left| left.min(pause)));
                }
            }
            self.arm(ring, seat).map_err(seat.group.failed("io_uring_enter()"))?;
            self.look(ring, seat, left)?;
        }
    }
}

impl Wait for UringOneshot {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let here = thread::current().id();
        let mut ring = self.take_ring(seat, here)?;
        let found = self.search(&mut ring, seat, timeout);
        self.ring = Some((here, ring));
        found
    }

    /// Its poll is handed over together with the next accept.
    fn keep(&mut self, _seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        let descriptor = self.put(connection);
        self.unarmed.push(descriptor);
        Ok(())
    }

    fn misplaced(&self, seat: &Seat, kept: Instant) -> Duration {
        self.rounds.as_ref().map_or(Duration::ZERO, |rounds| {
            rounds.misplaced(kept, Instant::now(), || seat.group.0.seats.others_idle(seat.number))
        })
    }

    /// Its poll told once, and is over.
    fn forget(&mut self, _seat: &Seat, _connection: &mut Connection) -> Result<(), ListenError> {
        Ok(())
    }

    fn release(&mut self, _seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        // Waits until no poll is under way. Nobody is in the ring itself: no accept is.
        self.ring = None;
        self.ready.clear();
        self.unarmed.clear();
        Ok(self.idle.drain(..).flatten().collect())
    }
}
