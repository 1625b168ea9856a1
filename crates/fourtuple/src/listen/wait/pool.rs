//! An epoll of the worker's own, with its listener and its connections in it: what several policies have in common.

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::socket;

use crate::listen::connection::Connection;
use crate::listen::error::ListenError;
use crate::listen::group::Ward;
use crate::listen::lobby::Arrival;
use crate::listen::rounds::Rounds;
use crate::listen::seats::Count;
use crate::listen::wait::{Accepted, Seat, Wait};

const BELL: u64 = u64::MAX;
const LOBBY: u64 = u64::MAX - 1;
/// Set in the token of a listener; the rest of it, as of a connection, is the descriptor.
const LISTENER: u64 = 1 << 32;
/// Events that one epoll_wait() may bring.
const EVENTS: usize = 64;
/// How long nobody is accepted after accept() has found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);

/// How a worker watches the listener.
#[derive(Clone, Copy)]
pub(super) struct Watching {
    pub(super) interest: Interest,
    /// The listener is added anew after so many connections, before they are served.
    pub(super) anew_after: Option<NonZeroU32>,
}

pub(super) struct Pool {
    epoll: Epoll,
    watching: Watching,
    listener: Arc<OwnedFd>,
    /// Listeners of workers that left, until others join.
    wards: Vec<Ward>,
    /// By descriptor. A descriptor that a user of the library closed comes back with another connection at most.
    idle: Vec<Option<Connection>>,
    ready: VecDeque<Ready>,
    since_anew: u32,
    /// When it looked what is ready, where that is asked for.
    rounds: Option<Rounds>,
    /// Nobody is accepted before.
    accept_after: Option<Instant>,
}

impl Pool {
    pub(super) fn open(seat: &Seat, watching: Watching) -> Result<Pool, ListenError> {
        let group = &seat.group;
        let epoll = Epoll::new().map_err(group.failed("epoll_create1()"))?;
        let failed = group.failed("epoll_ctl()");
        epoll.add(seat.bell.as_fd(), BELL, Interest::ACCEPT).map_err(&failed)?;
        let lobby = Interest::ACCEPT.and(Interest::EXCLUSIVE);
        epoll.add(group.0.lobby.exit(), LOBBY, lobby).map_err(&failed)?;
        let pool = Pool {
            epoll,
            watching,
            listener: group.listener()?,
            wards: Vec::new(),
            idle: Vec::new(),
            ready: VecDeque::with_capacity(EVENTS),
            since_anew: 0,
            rounds: group.is_measured().then(Rounds::default),
            accept_after: None,
        };
        pool.listen(seat, &pool.listener)?;
        Ok(pool)
    }

    /// The worker's own, or the one of all.
    #[cfg(feature = "bpf")]
    pub(super) fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Events that were fetched and not looked at yet.
    #[cfg(feature = "bpf")]
    pub(super) fn waiting(&self) -> u64 {
        self.ready.len() as u64
    }

    pub(super) fn boxed(seat: &Seat, watching: Watching) -> Result<Box<dyn Wait>, ListenError> {
        Ok(Box::new(Pool::open(seat, watching)?))
    }

    fn listen(&self, seat: &Seat, listener: &OwnedFd) -> Result<(), ListenError> {
        let token = LISTENER | listener.as_raw_fd() as u64;
        let added = self.epoll.add(listener.as_fd(), token, self.watching.interest);
        added.map_err(seat.group.failed("epoll_ctl()"))
    }

    fn listeners(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        iter::once(&self.listener).chain(self.wards.iter().map(|ward| &ward.listener))
    }

    /// Lets go of listeners that others have taken.
    fn look_at_wards(&mut self, seat: &Seat) -> Result<(), ListenError> {
        for ward in self.wards.iter().filter(|ward| ward.is_claimed()) {
            if self.accept_after.is_none() {
                self.epoll.remove(ward.listener.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
            }
        }
        self.wards.retain(|ward| !ward.is_claimed());
        Ok(())
    }

    /// One connection per event: whoever empties the queue makes others wait behind its own requests.
    fn accept(&mut self, seat: &Seat, descriptor: i32) -> Result<Option<Connection>, ListenError> {
        let found = self.listeners().find(|listener| listener.as_raw_fd() == descriptor);
        let Some(listener) = found.map(Arc::clone) else { return Ok(None) };
        match seat.accept(&listener)? {
            Accepted::Somebody(connection) => {
                self.turn(seat, &listener)?;
                if socket::has_something(connection.as_fd()) {
                    return Ok(Some(connection));
                }
                self.watch(seat, connection)?;
            }
            Accepted::Nobody => {}
            Accepted::NoRoom => {
                // The listener stays ready: without this the worker would do nothing but ask again.
                self.stop_listening(seat)?;
                self.accept_after = Some(Instant::now() + BACK_OFF);
            }
        }
        Ok(None)
    }

    fn turn(&mut self, seat: &Seat, listener: &OwnedFd) -> Result<(), ListenError> {
        let Some(every) = self.watching.anew_after else { return Ok(()) };
        self.since_anew += 1;
        if self.since_anew < every.get() {
            return Ok(());
        }
        self.since_anew = 0;
        let token = LISTENER | listener.as_raw_fd() as u64;
        self.epoll
            .remove(listener.as_fd())
            .and_then(|()| self.epoll.add(listener.as_fd(), token, self.watching.interest))
            .map_err(seat.group.failed("epoll_ctl()"))
    }

    fn stop_listening(&mut self, seat: &Seat) -> Result<(), ListenError> {
        for listener in self.listeners() {
            self.epoll.remove(listener.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(())
    }

    fn listen_again(&mut self, seat: &Seat) -> Result<(), ListenError> {
        self.accept_after = None;
        self.listeners().try_for_each(|listener| self.listen(seat, listener))
    }

    /// Puts a connection among those that have nothing to say.
    fn watch(&mut self, seat: &Seat, mut connection: Connection) -> Result<(), ListenError> {
        let descriptor = connection.as_fd().as_raw_fd();
        let place = descriptor as usize;
        if !connection.watched {
            let added = self.epoll.add(connection.as_fd(), descriptor as u64, Interest::READ);
            added.map_err(seat.group.failed("epoll_ctl()"))?;
            connection.watched = true;
        }
        if self.idle.len() <= place {
            self.idle.resize_with(place + 1, || None);
        }
        self.idle[place] = Some(connection);
        Ok(())
    }

    /// What is ready, now or when something is.
    fn look<'a>(
        &mut self,
        seat: &Seat,
        events: &'a mut [Ready],
        timeout: Option<Duration>,
    ) -> io::Result<&'a [Ready]> {
        let Some(rounds) = &mut self.rounds else { return self.epoll.wait(events, timeout) };
        let others_idle = || seat.group.0.seats.others_idle(seat.number);
        // Only so does one know whether it would have slept.
        let count = self.epoll.wait(events, Some(Duration::ZERO))?.len();
        if count > 0 {
            rounds.found(Instant::now(), others_idle());
            return Ok(&events[..count]);
        }
        let ready = self.epoll.wait(events, timeout)?;
        rounds.woken(Instant::now(), others_idle());
        Ok(ready)
    }

    /// What an event brings: a connection to serve, or nothing.
    fn handle(&mut self, seat: &Seat, event: Ready) -> Result<Option<Connection>, ListenError> {
        match event.token() {
            LOBBY => match seat.group.0.lobby.take().map_err(seat.group.failed("recvmsg()"))? {
                Some(Arrival::Nudge) | None => Ok(None),
                Some(Arrival::Listener(listener)) => {
                    let ward = seat.group.look_after(listener);
                    if self.accept_after.is_none() {
                        self.listen(seat, &ward.listener)?;
                    }
                    self.wards.push(ward);
                    Ok(None)
                }
                Some(Arrival::Connection(passenger)) => {
                    let connection = passenger.settle(seat.place());
                    if socket::has_something(connection.as_fd()) {
                        return Ok(Some(connection));
                    }
                    self.watch(seat, connection).map(|()| None)
                }
            },
            token if token & LISTENER != 0 => self.accept(seat, (token & !LISTENER) as i32),
            // Nobody: it was closed after the event was fetched, or its user asks for the next before giving it back.
            token => Ok(self.idle.get_mut(token as usize).and_then(Option::take)),
        }
    }
}

impl Wait for Pool {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if !self.wards.is_empty() {
            self.look_at_wards(seat)?;
        }
        loop {
            while let Some(event) = self.ready.pop_front() {
                if event.token() == BELL {
                    seat.bell.silence();
                    return Ok(None);
                }
                if let Some(connection) = self.handle(seat, event)? {
                    return Ok(Some(connection));
                }
            }
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if let Some(after) = self.accept_after {
                let pause = after.saturating_duration_since(Instant::now());
                if pause.is_zero() {
                    self.listen_again(seat)?;
                } else {
                    left = Some(left.map_or(pause, |left| left.min(pause)));
                }
            }
            let mut events = [Ready::NONE; EVENTS];
            let ready = self.look(seat, &mut events, left).map_err(seat.group.failed("epoll_wait()"))?;
            if ready.is_empty() {
                if until.is_some_and(|until| Instant::now() >= until) {
                    return Ok(None);
                }
                continue;
            }
            seat.count(Count::Wakeups);
            self.ready.extend(ready);
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

    fn misplaced(&self, seat: &Seat, kept: Instant) -> Duration {
        self.rounds.as_ref().map_or(Duration::ZERO, |rounds| {
            rounds.misplaced(kept, Instant::now(), || seat.group.0.seats.others_idle(seat.number))
        })
    }

    fn release(&mut self, seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        self.ready.clear();
        if self.accept_after.take().is_none() {
            self.stop_listening(seat)?;
        }
        for ward in self.wards.drain(..) {
            seat.group.leave_ward(seat.number, &ward)?;
        }
        if seat.group.policy().has_listener_each() {
            seat.group.leave_behind(seat.number, &self.listener)?;
        } else {
            // It may have been woken for somebody whom it did not accept yet, and nobody else was.
            let listener = Arc::clone(&self.listener);
            while let Accepted::Somebody(connection) = seat.accept(&listener)? {
                self.idle.push(Some(connection));
            }
        }
        let released: Vec<_> = self.idle.drain(..).flatten().collect();
        for connection in released.iter().filter(|connection| connection.watched) {
            self.epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        }
        Ok(released)
    }
}
