//! Accepts for all workers, waits until a connection has something to say, and hands it to a worker that is idle: no request
//! waits behind a busy worker while another is idle, also where workers are processes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{errno_name, message, socket};

use crate::listen::acceptor::Waker;
use crate::listen::connection::Place;
use crate::listen::error::ListenError;
use crate::listen::group::Group;
use crate::listen::lobby::{self, Arrival, Passenger, ROOM};
use crate::listen::policy::Policy;
use crate::listen::seats::{Count, Seats};
use crate::listen::wait::Common;

/// Set in the kind of a message to a worker whose connection nobody had before. The rest of it is the tenure of the worker
/// for which it was meant: a seat may have another one by the time.
pub(crate) const FRESH: u8 = 1;
/// Kinds of messages from a worker: it waits for the first time, it has done what it was given, it is gone. The first and the
/// last with its tenure: the seat is free before the worker is gone, so that its successor may be heard first.
pub(crate) const JOINED: u8 = b'J';
pub(crate) const DONE: u8 = b'D';
pub(crate) const LEFT: u8 = b'X';
/// A connection that is kept, and one that is kept from a worker that is done.
pub(crate) const KEPT: u8 = b'K';
pub(crate) const KEPT_AND_DONE: u8 = b'B';

const BELL: u64 = u64::MAX;
const LOBBY: u64 = u64::MAX - 1;
const LISTENER: u64 = u64::MAX - 2;
/// Set in the token of a worker's end; the rest of it is the seat. That of a connection is its descriptor.
const WORKER: u64 = 1 << 32;
const EVENTS: usize = 128;
/// Connections accepted in a row before somebody else is looked at.
const ACCEPTS: usize = 64;
/// How often it looks at the flag that ends it, and for workers that died.
const LOOK: Duration = Duration::from_millis(50);
/// How long it rests after a call for which there was no descriptor or no room.
const BACK_OFF: Duration = Duration::from_millis(10);

/// The dispatcher's and the worker's end, for each seat: made before workers are forked, so that all have them.
#[derive(Debug)]
pub(crate) struct Pairs {
    ends: Vec<(OwnedFd, OwnedFd)>,
    /// What is known of the workers, while there is no dispatcher.
    unattended: Mutex<Option<Vec<Worker>>>,
}

impl Pairs {
    pub(crate) fn new(seats: usize) -> io::Result<Pairs> {
        let ends = (0..seats).map(|_| message::pair()).collect::<io::Result<Vec<_>>>()?;
        Ok(Pairs { ends, unattended: Mutex::new(Some(vec![Worker::default(); seats])) })
    }

    pub(crate) fn of_worker(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].1.as_fd()
    }

    fn of_dispatcher(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].0.as_fd()
    }
}

/// How many workers had a seat before, as far as it is told in messages.
pub(crate) fn tenure(seats: &Seats, seat: usize) -> u8 {
    seats.add(seat, Count::Joins, 1);
    seats.get(seat, Count::Joins) as u8 & 0x7f
}

/// The kind of a message to a worker.
pub(crate) fn kind(tenure: u8, fresh: bool) -> u8 {
    tenure << 1 | if fresh { FRESH } else { 0 }
}

/// What the dispatcher knows of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Worker {
    present: bool,
    tenure: u8,
    /// Connections that it was given and is not done with.
    outstanding: u32,
    /// When it got so idle, in turns.
    since: u64,
}

/// A connection between two requests, or with one that nobody serves yet.
#[derive(Debug)]
struct Guest {
    passenger: Passenger,
    /// It counts as open with the worker that had it last.
    _place: Option<Place>,
    fresh: bool,
}

/// What a dispatcher has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DispatcherStats {
    /// Connections accepted.
    pub accepts: u64,
    /// accept() calls that failed: no descriptor, no memory.
    pub failed_accepts: u64,
    /// Connections given to workers, each as often as it was.
    pub handed: u64,
    /// Kept connections that were lost, because there was no descriptor for them when they came back.
    pub lost: u64,
    /// Times it was woken from waiting.
    pub wakeups: u64,
    /// The most connections at one time that had something to say while no worker was idle.
    pub longest_queue: usize,
}

/// Accepts for the workers of a group. It does nothing until it [runs](Dispatcher::run), on a thread or in a process of its
/// own, and holds the connections that are between two requests. What it holds when it is dropped the next one takes over,
/// as far as that finds room (some 200 connections); the others are closed.
#[derive(Debug)]
pub struct Dispatcher {
    group: Group,
    listener: Arc<OwnedFd>,
    bell: Arc<Bell>,
    epoll: Epoll,
    depth: u32,
    workers: Vec<Worker>,
    turn: u64,
    /// By descriptor: connections that have nothing to say.
    quiet: Vec<Option<Guest>>,
    /// Those that have, in the order in which they had.
    ready: VecDeque<Guest>,
    /// Descriptors that are kept for connections that come back, and let go of where accept() finds none.
    spare: Vec<OwnedFd>,
    /// Nobody is accepted before.
    accept_after: Option<Instant>,
    /// Nobody is given anything before.
    hand_after: Option<Instant>,
    looked: Instant,
    room: Vec<u8>,
    stats: DispatcherStats,
}

impl Dispatcher {
    pub(crate) fn of(group: &Group) -> Result<Dispatcher, ListenError> {
        let policy = group.policy();
        let Common::Pairs(pairs) = &group.0.common else {
            let why = "its workers accept by themselves; open it with Policy::Dispatcher";
            return Err(ListenError::NoDispatcher { policy, why });
        };
        let listener = group.listener()?;
        let bell = Arc::new(Bell::new().map_err(group.failed("eventfd()"))?);
        let epoll = Epoll::new().map_err(group.failed("epoll_create1()"))?;
        let failed = group.failed("epoll_ctl()");
        epoll.add(bell.as_fd(), BELL, Interest::ACCEPT).map_err(&failed)?;
        epoll.add(group.0.lobby.exit(), LOBBY, Interest::ACCEPT).map_err(&failed)?;
        epoll.add(listener.as_fd(), LISTENER, Interest::ACCEPT).map_err(&failed)?;
        for seat in 0..pairs.ends.len() {
            epoll.add(pairs.of_dispatcher(seat), WORKER | seat as u64, Interest::ACCEPT).map_err(&failed)?;
        }
        let workers = pairs.unattended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(workers) = workers else {
            let why = "it has one already; drop that first";
            return Err(ListenError::NoDispatcher { policy: Policy::Dispatcher, why });
        };
        let turn = workers.iter().map(|worker| worker.since).max().unwrap_or(0);
        Ok(Dispatcher {
            group: group.clone(),
            listener,
            bell,
            epoll,
            depth: 1,
            workers,
            turn,
            quiet: Vec::new(),
            ready: VecDeque::new(),
            spare: Vec::new(),
            accept_after: None,
            hand_after: None,
            looked: Instant::now(),
            room: vec![0; ROOM],
            stats: DispatcherStats::default(),
        })
    }

    /// How many connections a worker may have been given and not be done with; 1 at first. With 1 nobody waits behind a busy
    /// worker. More hides the way of a message, at the price of such waits.
    #[must_use]
    pub fn depth(mut self, depth: u32) -> Dispatcher {
        self.depth = depth.max(1);
        self
    }

    /// Ends [`run`](Dispatcher::run) at once, after the flag was set; without it, that takes up to 50 ms.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.bell))
    }

    /// What it has done so far.
    pub fn stats(&self) -> DispatcherStats {
        self.stats
    }

    /// Accepts and hands out until `stop` is true. Whoever was not accepted by then stays in the listener's queue, and
    /// whoever was is served when it runs again.
    ///
    /// # Errors
    ///
    /// A call of the kernel that should not fail. What concerns one connection alone is counted.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<(), ListenError> {
        self.reserve();
        while !stop.load(Ordering::Acquire) {
            self.hand_out()?;
            let now = Instant::now();
            if now.duration_since(self.looked) >= LOOK {
                self.looked = now;
                self.look_after_the_dead()?;
            }
            let mut left = LOOK;
            for after in [self.accept_after, self.hand_after].into_iter().flatten() {
                left = left.min(after.saturating_duration_since(now));
            }
            let mut events = [Ready::NONE; EVENTS];
            let ready =
                self.epoll.wait(&mut events, Some(left)).map_err(self.group.failed("epoll_wait()"))?;
            self.stats.wakeups += u64::from(!ready.is_empty());
            for event in ready {
                match event.token() {
                    BELL => drop(self.bell.silence()),
                    LOBBY => self.take_over()?,
                    LISTENER => self.accept()?,
                    token if token & WORKER != 0 => self.hear((token & !WORKER) as usize)?,
                    descriptor => self.speaks(descriptor as usize)?,
                }
            }
            self.listen_again()?;
        }
        Ok(())
    }

    fn pairs(&self) -> &Pairs {
        match &self.group.0.common {
            Common::Pairs(pairs) => pairs,
            _ => unreachable!("looked at when it was made"),
        }
    }

    fn seats(&self) -> &Arc<Seats> {
        &self.group.0.seats
    }

    /// Gives what is ready to those who are idle, the first to the one who has been so for longest.
    fn hand_out(&mut self) -> Result<(), ListenError> {
        if self.hand_after.is_some_and(|after| Instant::now() < after) {
            return Ok(());
        }
        self.hand_after = None;
        while let Some(guest) = self.ready.front() {
            let Some(seat) = self.idlest() else { break };
            let tenure = self.workers[seat].tenure;
            match guest.passenger.send(self.pairs().of_dispatcher(seat), kind(tenure, guest.fresh)) {
                Ok(()) => {
                    // Our copy of the descriptor is closed; the worker has its own.
                    self.ready.pop_front();
                    self.workers[seat].outstanding += 1;
                    self.stats.handed += 1;
                }
                Err(error) if lobby::is_full(&error) => {
                    self.hand_after = Some(Instant::now() + BACK_OFF);
                    break;
                }
                Err(error) => return Err(self.group.failed("sendmsg()")(error)),
            }
        }
        self.stats.longest_queue = self.stats.longest_queue.max(self.ready.len());
        Ok(())
    }

    fn idlest(&self) -> Option<usize> {
        let idle = self.workers.iter().enumerate().filter(|(seat, worker)| {
            worker.present && worker.outstanding < self.depth && self.seats().get(*seat, Count::Taken) != 0
        });
        idle.min_by_key(|(_, worker)| (worker.outstanding, worker.since)).map(|(seat, _)| seat)
    }

    fn accept(&mut self) -> Result<(), ListenError> {
        for _ in 0..ACCEPTS {
            match socket::accept_nonblocking(self.listener.as_fd()) {
                Ok(socket) => {
                    self.stats.accepts += 1;
                    let guest = Guest { passenger: Passenger::new(socket), _place: None, fresh: true };
                    self.arrive(guest)?;
                }
                Err(error) => match errno_name(&error).as_str() {
                    "EAGAIN" => break,
                    "EINTR" | "ECONNABORTED" | "EPROTO" | "EPERM" => {}
                    "EMFILE" | "ENFILE" | "ENOBUFS" | "ENOMEM" => {
                        self.stats.failed_accepts += 1;
                        self.spare.clear();
                        let removed = self.epoll.remove(self.listener.as_fd());
                        removed.map_err(self.group.failed("epoll_ctl()"))?;
                        self.accept_after = Some(Instant::now() + BACK_OFF);
                        break;
                    }
                    _ => return Err(self.group.failed("accept()")(error)),
                },
            }
        }
        Ok(())
    }

    /// Listens again after a rest, if there is room for everybody who may come back.
    fn listen_again(&mut self) -> Result<(), ListenError> {
        if self.accept_after.is_none_or(|after| Instant::now() < after) {
            return Ok(());
        }
        if !self.reserve() {
            self.spare.clear();
            self.accept_after = Some(Instant::now() + BACK_OFF);
            return Ok(());
        }
        self.accept_after = None;
        let added = self.epoll.add(self.listener.as_fd(), LISTENER, Interest::ACCEPT);
        added.map_err(self.group.failed("epoll_ctl()"))
    }

    /// Takes a descriptor for each connection that workers may have; whether it got them.
    fn reserve(&mut self) -> bool {
        let wanted = self.workers.iter().filter(|worker| worker.present).count().max(1) * self.depth as usize;
        while self.spare.len() < wanted {
            let Ok(spare) = self.bell.as_fd().try_clone_to_owned() else { return false };
            self.spare.push(spare);
        }
        true
    }

    /// A connection that may have something to say.
    fn arrive(&mut self, guest: Guest) -> Result<(), ListenError> {
        if socket::has_something(guest.passenger.as_fd()) {
            self.ready.push_back(guest);
            return Ok(());
        }
        self.watch(guest)
    }

    fn watch(&mut self, guest: Guest) -> Result<(), ListenError> {
        let descriptor = guest.passenger.as_fd().as_raw_fd();
        let added = self.epoll.add(guest.passenger.as_fd(), descriptor as u64, Interest::READ);
        added.map_err(self.group.failed("epoll_ctl()"))?;
        let place = descriptor as usize;
        if self.quiet.len() <= place {
            self.quiet.resize_with(place + 1, || None);
        }
        self.quiet[place] = Some(guest);
        Ok(())
    }

    fn speaks(&mut self, place: usize) -> Result<(), ListenError> {
        if let Some(guest) = self.take_quiet(place)? {
            self.ready.push_back(guest);
        }
        Ok(())
    }

    /// Closing our copy would not do: the epoll watches what all copies have in common.
    fn take_quiet(&mut self, place: usize) -> Result<Option<Guest>, ListenError> {
        let Some(guest) = self.quiet.get_mut(place).and_then(Option::take) else { return Ok(None) };
        self.epoll.remove(guest.passenger.as_fd()).map_err(self.group.failed("epoll_ctl()"))?;
        Ok(Some(guest))
    }

    /// Takes what a worker that left had.
    fn take_over(&mut self) -> Result<(), ListenError> {
        match self.group.0.lobby.take().map_err(self.group.failed("recvmsg()"))? {
            Some(Arrival::Connection(passenger)) => {
                self.arrive(Guest { passenger, _place: None, fresh: false })
            }
            Some(Arrival::Listener(_) | Arrival::Nudge) | None => Ok(()),
        }
    }

    /// What a worker has to say.
    fn hear(&mut self, seat: usize) -> Result<(), ListenError> {
        let mut room = std::mem::take(&mut self.room);
        let heard = message::receive(self.pairs().of_dispatcher(seat), &mut room);
        let result = match heard {
            Ok((count, socket)) => self.heed(seat, &room[..count], socket),
            Err(error) => match errno_name(&error).as_str() {
                "EAGAIN" => Ok(()),
                // What it brought is closed, and only those who bring something are told so.
                "EMFILE" => {
                    self.stats.lost += 1;
                    self.is_done(seat);
                    Ok(())
                }
                _ => Err(self.group.failed("recvmsg()")(error)),
            },
        };
        self.room = room;
        result
    }

    fn heed(&mut self, seat: usize, bytes: &[u8], socket: Option<OwnedFd>) -> Result<(), ListenError> {
        let Some((kind, rest)) = bytes.split_first() else { return Ok(()) };
        match *kind {
            JOINED => {
                self.turn += 1;
                let tenure = rest.first().copied().unwrap_or(0);
                self.workers[seat] = Worker { present: true, tenure, outstanding: 0, since: self.turn };
                if self.accept_after.is_none() {
                    self.reserve();
                }
            }
            LEFT if rest.first() == Some(&self.workers[seat].tenure) => return self.gone(seat),
            DONE | KEPT_AND_DONE => self.is_done(seat),
            _ => {}
        }
        let Some(passenger) = socket.and_then(|socket| Passenger::read(rest, socket)) else { return Ok(()) };
        let place = Some(Place::new(self.seats(), seat));
        self.watch(Guest { passenger, _place: place, fresh: false })
    }

    fn is_done(&mut self, seat: usize) {
        self.turn += 1;
        let worker = &mut self.workers[seat];
        worker.outstanding = worker.outstanding.saturating_sub(1);
        worker.since = self.turn;
    }

    /// Takes back what a worker that is no more did not take. Whoever has its seat by now may have taken it, too.
    fn gone(&mut self, seat: usize) -> Result<(), ListenError> {
        self.workers[seat].present = false;
        self.workers[seat].outstanding = 0;
        let mut returned = Vec::new();
        let mut room = vec![0; ROOM];
        loop {
            match message::receive(self.pairs().of_worker(seat), &mut room) {
                Ok((count, Some(socket))) => {
                    let Some((kind, rest)) = room[..count].split_first() else { continue };
                    let fresh = kind & FRESH != 0;
                    let passenger = Passenger::read(rest, socket);
                    returned.extend(passenger.map(|passenger| Guest { passenger, _place: None, fresh }));
                }
                Ok((_, None)) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if errno_name(&error) == "EMFILE" => self.stats.lost += 1,
                Err(error) => return Err(self.group.failed("recvmsg()")(error)),
            }
        }
        for guest in returned.into_iter().rev() {
            self.ready.push_front(guest);
        }
        Ok(())
    }

    /// Workers that died without leaving, whose seats somebody has vacated.
    fn look_after_the_dead(&mut self) -> Result<(), ListenError> {
        for seat in 0..self.workers.len() {
            if self.workers[seat].present && self.seats().get(seat, Count::Taken) == 0 {
                self.gone(seat)?;
            }
        }
        Ok(())
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        let quiet = std::mem::take(&mut self.quiet).into_iter().flatten();
        for guest in self.ready.drain(..).chain(quiet) {
            // Those that find no room are closed. The epoll goes with us, so that they need not leave it.
            let _ = self.group.0.lobby.offer(&guest.passenger);
        }
        let workers = std::mem::take(&mut self.workers);
        *self.pairs().unattended.lock().unwrap_or_else(PoisonError::into_inner) = Some(workers);
    }
}
