//! An epoll per worker, with its listener and its connections: the policies `plain`, `reuseport`, `exclusive` and `rotate`, and the base of
//! `least_busy`.

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{self, Epoll, Interest, Ready};
use fourtuple_syscalls::{option, socket};

use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::handoff::Arrival;
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::Count;
use crate::listen::wait::{AcceptOutcome, Idle, Released, Rounds, Seat, Wait, sooner};

const WAKER: u64 = u64::MAX;
const HANDOFF: u64 = u64::MAX - 1;
/// Set in the token of a listener. The low 32 bits of a token, with or without this bit, are the descriptor.
const LISTENER: u64 = 1 << 32;
/// Maximum number of events per epoll_wait(2).
const EVENTS: usize = 64;
/// The pause in accepting after accept(2) found no descriptor or epoll_ctl(2) no watches.
const BACK_OFF: Duration = Duration::from_millis(10);

/// How a worker watches the listener.
#[derive(Clone, Copy)]
pub(crate) struct ListenerInterest {
    pub(crate) interest: Interest,
    /// The number of accepts after which the worker adds the listener again; `None`: never.
    pub(crate) readd_after: Option<NonZeroU32>,
}

/// Without a flag the kernel wakes every waiting worker for each connection. One worker gets it, and accept(2) returns EAGAIN to the
/// others.
pub(crate) fn plain(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    boxed(seat, Interest::ACCEPT, None)
}

/// SO_REUSEPORT: one listener with its own accept queue per worker.
///
/// The hash of the 4-tuple chooses a listener at the SYN (`reuseport_select_sock`), before it is known which worker will be busy. The
/// shares of the workers become even only in the long run.
pub(crate) fn reuseport(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    boxed(seat, Interest::ACCEPT, None)
}

/// EPOLLEXCLUSIVE on the shared listener.
///
/// The kernel walks the waiting epolls in the order in which they were added and wakes the first whose worker sleeps (`__wake_up_common`,
/// `ep_poll_callback`). The first worker gets every connection that arrives while it is idle, the second gets those that arrive while
/// only the first is busy, and so on.
pub(crate) fn exclusive(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    boxed(seat, Interest::ACCEPT.and(Interest::EXCLUSIVE), None)
}

/// EPOLLEXCLUSIVE, but a worker removes the listener from its epoll after an accept and adds it again.
///
/// It is then last in the listener's wait queue, so workers take turns. It does this before it serves the request, so that the kernel
/// wakes another worker for the next connection. EPOLL_CTL_MOD is not an alternative: the kernel refuses it for an exclusive item
/// (EINVAL).
pub(crate) fn rotate(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let every = match seat.group.policy() {
        AcceptPolicy::Rotate { every } => every,
        _ => NonZeroU32::MIN,
    };
    boxed(seat, Interest::ACCEPT.and(Interest::EXCLUSIVE), Some(every))
}

fn boxed(
    seat: &Seat,
    interest: Interest,
    readd_after: Option<NonZeroU32>,
) -> Result<Box<dyn Wait>, ListenError> {
    Ok(Box::new(Pool::open(seat, ListenerInterest { interest, readd_after })?))
}

pub(crate) struct Pool {
    epoll: Epoll,
    watching: ListenerInterest,
    listener: Arc<OwnedFd>,
    /// Listeners without an owner and their cookies, until another worker owns them.
    inherited: Vec<(Arc<OwnedFd>, u64)>,
    /// Idle connections by descriptor. If the caller closes a descriptor, the kernel may reuse the number for a new connection.
    idle: Idle<Connection>,
    ready: VecDeque<Ready>,
    accepts_since_readd: u32,
    /// The times of the last polls, with `Recycle::Measured` only.
    rounds: Option<Rounds>,
    /// The end of a pause in accepting.
    accept_after: Option<Instant>,
    /// Whether the worker has stopped accepting because its group hands over.
    handed_over: bool,
}

impl Pool {
    pub(crate) fn open(seat: &Seat, watching: ListenerInterest) -> Result<Pool, ListenError> {
        let group = &seat.group;
        let epoll = Epoll::new().map_err(group.failed("epoll_create1()"))?;
        let failed = group.failed("epoll_ctl()");
        epoll.add(seat.waker.as_fd(), WAKER, Interest::ACCEPT).map_err(&failed)?;
        let interest = Interest::ACCEPT.and(Interest::EXCLUSIVE);
        epoll.add(group.0.handoff.receiver(), HANDOFF, interest).map_err(&failed)?;
        let pool = Pool {
            epoll,
            watching,
            listener: group.listener()?,
            inherited: Vec::new(),
            idle: Idle::new(group.0.idle),
            ready: VecDeque::with_capacity(EVENTS),
            accepts_since_readd: 0,
            rounds: group.is_measured().then(Rounds::default),
            accept_after: None,
            handed_over: false,
        };
        let token = LISTENER | pool.listener.as_raw_fd() as u64;
        let added = pool.epoll.add(pool.listener.as_fd(), token, watching.interest);
        added.map_err(&failed)?;
        if group.policy().has_listener_each() {
            // Another worker that accepts from this listener stops.
            let cookie =
                option::cookie(pool.listener.as_fd()).map_err(group.failed("getsockopt(SO_COOKIE)"))?;
            group.0.seats.set(seat.number, Count::Listener, cookie);
        }
        Ok(pool)
    }

    /// Returns the worker's own listener.
    #[cfg(feature = "bpf")]
    pub(crate) fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Returns the number of events that epoll_wait(2) has returned and `next` has not handled.
    #[cfg(feature = "bpf")]
    pub(crate) fn pending_events(&self) -> u64 {
        self.ready.len() as u64
    }

    fn listeners(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        iter::once(&self.listener).chain(self.inherited.iter().map(|(listener, _)| listener))
    }

    /// Accepts from a listener until another worker owns it.
    fn inherit(&mut self, seat: &Seat, listener: OwnedFd) -> Result<(), ListenError> {
        let group = &seat.group;
        let cookie = option::cookie(listener.as_fd()).map_err(group.failed("getsockopt(SO_COOKIE)"))?;
        if group.0.seats.is_owned(cookie) || self.inherited.iter().any(|(_, other)| *other == cookie) {
            return Ok(());
        }
        let listener = Arc::new(listener);
        group.register_listener(&listener)?;
        if self.accept_after.is_none() && !self.handed_over {
            let others: Vec<_> = self.listeners().map(Arc::clone).collect();
            self.listen_or_pause(seat, &listener, &others)?;
        }
        self.inherited.push((listener, cookie));
        Ok(())
    }

    /// Drops inherited listeners that another worker owns.
    fn drop_owned(&mut self, seat: &Seat) -> Result<(), ListenError> {
        let is_owned = |cookie| seat.group.0.seats.is_owned(cookie);
        for (listener, _) in self.inherited.extract_if(.., |(_, cookie)| is_owned(*cookie)) {
            if self.accept_after.is_none() && !self.handed_over {
                self.epoll.remove(listener.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
            }
        }
        Ok(())
    }

    /// Accepts one connection. A worker that accepted the whole queue would make these connections wait for each other.
    fn accept(&mut self, seat: &Seat, descriptor: i32) -> Result<Option<Connection>, ListenError> {
        if self.accept_after.is_some() {
            return Ok(None);
        }
        let found = self.listeners().find(|listener| listener.as_raw_fd() == descriptor);
        let Some(listener) = found.map(Arc::clone) else { return Ok(None) };
        match seat.accept(&listener)? {
            AcceptOutcome::Connection(connection) => {
                self.readd(seat, &listener)?;
                if socket::has_something(connection.as_fd()) {
                    return Ok(Some(connection));
                }
                self.watch(seat, connection)?;
            }
            AcceptOutcome::Empty => {}
            AcceptOutcome::Pause => {
                // The listener stays ready. Without the pause epoll_wait(2) would return it at once, again and again.
                self.stop_listening(seat)?;
                self.accept_after = Some(Instant::now() + BACK_OFF);
            }
        }
        Ok(None)
    }

    /// Accepts the connection of a consumed wakeup. epoll_wait(2) consumes at most one wakeup of a listener; workers of the new
    /// process got all further ones.
    fn accept_last(&mut self, seat: &Seat, listener: &OwnedFd) -> Result<(), ListenError> {
        match seat.accept(listener)? {
            AcceptOutcome::Connection(connection) => self.watch(seat, connection),
            AcceptOutcome::Empty | AcceptOutcome::Pause => Ok(()),
        }
    }

    /// Removes the listener from the epoll and adds it again, if the policy asks for it after this accept.
    fn readd(&mut self, seat: &Seat, listener: &OwnedFd) -> Result<(), ListenError> {
        let Some(every) = self.watching.readd_after else { return Ok(()) };
        self.accepts_since_readd += 1;
        if self.accepts_since_readd < every.get() {
            return Ok(());
        }
        self.accepts_since_readd = 0;
        self.epoll.remove(listener.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        let others: Vec<_> = self
            .listeners()
            .filter(|other| other.as_raw_fd() != listener.as_raw_fd())
            .map(Arc::clone)
            .collect();
        self.listen_or_pause(seat, listener, &others).map(drop)
    }

    /// Adds a listener to the epoll. If the kernel has no watches left, removes `others` from the epoll too, starts a pause and
    /// returns `false`.
    fn listen_or_pause(
        &mut self,
        seat: &Seat,
        listener: &OwnedFd,
        others: &[Arc<OwnedFd>],
    ) -> Result<bool, ListenError> {
        let failed = seat.group.failed("epoll_ctl()");
        let token = LISTENER | listener.as_raw_fd() as u64;
        match self.epoll.add(listener.as_fd(), token, self.watching.interest) {
            Ok(()) => Ok(true),
            Err(error) if epoll::is_watch_refused(&error) => {
                for other in others {
                    self.epoll.remove(other.as_fd()).map_err(&failed)?;
                }
                self.accept_after = Some(Instant::now() + BACK_OFF);
                Ok(false)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn stop_listening(&mut self, seat: &Seat) -> Result<(), ListenError> {
        for listener in self.listeners() {
            self.epoll.remove(listener.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(())
    }

    fn listen_again(&mut self, seat: &Seat) -> Result<(), ListenError> {
        self.accept_after = None;
        let listeners: Vec<_> = self.listeners().map(Arc::clone).collect();
        for (index, listener) in listeners.iter().enumerate() {
            if !self.listen_or_pause(seat, listener, &listeners[..index])? {
                break;
            }
        }
        Ok(())
    }

    /// Adds a connection to the epoll and to the idle connections. Its event is reported once: the epoll would report a readable
    /// connection that the caller holds again and again.
    fn watch(&mut self, seat: &Seat, mut connection: Connection) -> Result<(), ListenError> {
        let (socket, interest) = (connection.as_fd(), Interest::READ.and(Interest::ONESHOT));
        let token = socket.as_raw_fd() as u64;
        let watched = if connection.watched {
            self.epoll.modify(socket, token, interest)
        } else {
            self.epoll.add(socket, token, interest)
        };
        if seat.watched(watched)?.is_none() {
            return Ok(());
        }
        connection.watched = true;
        self.idle.put(connection);
        Ok(())
    }

    /// Waits for events.
    fn poll<'a>(
        &mut self,
        seat: &Seat,
        events: &'a mut [Ready],
        timeout: Option<Duration>,
    ) -> io::Result<&'a [Ready]> {
        let Some(rounds) = &mut self.rounds else { return self.epoll.wait(events, timeout) };
        let others_idle = || seat.group.0.seats.others_idle(seat.number);
        // A first call without a timeout tells whether the worker would have slept.
        let count = self.epoll.wait(events, Some(Duration::ZERO))?.len();
        if count > 0 {
            rounds.found(Instant::now(), others_idle());
            return Ok(&events[..count]);
        }
        let ready = self.epoll.wait(events, timeout)?;
        rounds.woken(Instant::now(), others_idle());
        Ok(ready)
    }

    /// Handles an event; returns a connection if one is ready to be served.
    fn handle(&mut self, seat: &Seat, event: Ready) -> Result<Option<Connection>, ListenError> {
        match event.token() {
            HANDOFF => match seat.take_handoff()? {
                // The epoll may not know of the connection, because the kernel woke only the worker that left.
                Some(Arrival::Nudge) if self.handed_over => {
                    let listener = Arc::clone(&self.listener);
                    self.accept_last(seat, &listener).map(|()| None)
                }
                Some(Arrival::Nudge) => self.accept(seat, self.listener.as_raw_fd()),
                None => Ok(None),
                Some(Arrival::Listener(listener)) => {
                    self.inherit(seat, listener)?;
                    Ok(None)
                }
                Some(Arrival::Connection(received)) => {
                    let connection = received.settle(seat.open_guard());
                    if socket::has_something(connection.as_fd()) {
                        return Ok(Some(connection));
                    }
                    self.watch(seat, connection).map(|()| None)
                }
            },
            token if token & LISTENER != 0 && self.handed_over => Ok(None),
            token if token & LISTENER != 0 => self.accept(seat, (token & !LISTENER) as i32),
            // `None` if the connection was closed after epoll_wait(2).
            token => Ok(self.idle.take(token as usize)),
        }
    }
}

impl Wait for Pool {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if !self.inherited.is_empty() {
            self.drop_owned(seat)?;
        }
        let mut has_polled = false;
        loop {
            while let Some(event) = self.ready.pop_front() {
                if event.token() == WAKER {
                    seat.waker.clear();
                    return Ok(None);
                }
                if let Some(connection) = self.handle(seat, event)? {
                    return Ok(Some(connection));
                }
            }
            let is_over = || until.is_some_and(|until| Instant::now() >= until) || seat.group.is_drained();
            if std::mem::replace(&mut has_polled, true) && is_over() {
                return Ok(None);
            }
            seat.close_idle(self.idle.sweep());
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            left = sooner(left, self.idle.until_sweep());
            if let Some(after) = self.accept_after {
                let pause = after.saturating_duration_since(Instant::now());
                if pause.is_zero() {
                    self.listen_again(seat)?;
                } else {
                    left = sooner(left, Some(pause));
                }
            }
            let mut events = [Ready::NONE; EVENTS];
            let ready = self.poll(seat, &mut events, left).map_err(seat.group.failed("epoll_wait()"))?;
            if !ready.is_empty() {
                seat.count(Count::Wakeups);
                self.ready.extend(ready);
            }
        }
    }

    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        self.watch(seat, connection)
    }

    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError> {
        if std::mem::take(&mut connection.watched) {
            self.epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(())
    }

    fn misplaced(&self, seat: &Seat, kept: Instant, asked: Instant) -> Duration {
        self.rounds.as_ref().map_or(Duration::ZERO, |rounds| {
            rounds.misplaced(kept, asked, || seat.group.0.seats.others_idle(seat.number))
        })
    }

    fn hand_over(&mut self, seat: &Seat) -> Result<(), ListenError> {
        self.handed_over = true;
        if self.accept_after.take().is_none() {
            self.stop_listening(seat)?;
        }
        let listeners: Vec<_> = self.listeners().map(Arc::clone).collect();
        for listener in listeners {
            self.accept_last(seat, &listener)?;
        }
        Ok(())
    }

    fn release(&mut self, seat: &Seat, until: Instant) -> Released {
        self.ready.clear();
        let mut told = Ok(());
        if self.accept_after.take().is_none() && !self.handed_over {
            told = self.stop_listening(seat);
        }
        for (listener, _) in self.inherited.drain(..) {
            let put = seat.group.0.handoff.put_listener(listener.as_fd(), until);
            told = told.and(put.map(drop).map_err(seat.group.failed("sendmsg()")));
        }
        let connections = self.idle.drain();
        if seat.group.policy().has_listener_each() {
            told = told.and(seat.group.hand_off_listener(seat.number, &self.listener, until));
        } else if !seat.group.0.seats.is_handed_over() {
            told = told.and(seat.nudge_if_queued(&self.listener));
        }
        for connection in connections.iter().filter(|connection| connection.watched) {
            // Without this the kernel removes it when this epoll instance is closed, a moment later.
            let _ = self.epoll.remove(connection.as_fd());
        }
        Released { connections, told }
    }
}
