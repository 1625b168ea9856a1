//! Waits for what the dispatcher hands out. The worker tells it when it is done with that, together with the connection if
//! it is kept.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{errno_name, message};

use crate::listen::connection::Connection;
use crate::listen::dispatcher::{self, DONE, FRESH, JOINED, KEPT, KEPT_AND_DONE, LEFT};
use crate::listen::error::ListenError;
use crate::listen::lobby::{self, Passenger, ROOM};
use crate::listen::seats::Count;
use crate::listen::wait::{Common, Seat, Wait};

const BELL: u64 = u64::MAX;
const DISPATCHER: u64 = u64::MAX - 1;
const EVENTS: usize = 16;
/// How long a worker waits until it tries again to tell what there was no room for.
const TELL_AGAIN: Duration = Duration::from_millis(10);

struct Dispatched {
    epoll: Epoll,
    tenure: u8,
    /// What the dispatcher is still to be told: [`JOINED`], [`DONE`].
    news: Option<u8>,
    /// It has something of the dispatcher's to do.
    given: bool,
    /// Goes back with the news that this worker is done.
    kept: Option<Connection>,
    /// By descriptor: connections that could not travel (a carry too long), and wait for the rest here.
    own: Vec<Option<Connection>>,
    ready: VecDeque<Ready>,
    room: Vec<u8>,
}

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let group = &seat.group;
    let epoll = Epoll::new().map_err(group.failed("epoll_create1()"))?;
    let failed = group.failed("epoll_ctl()");
    epoll.add(seat.bell.as_fd(), BELL, Interest::ACCEPT).map_err(&failed)?;
    epoll.add(end(seat), DISPATCHER, Interest::ACCEPT).map_err(&failed)?;
    Ok(Box::new(Dispatched {
        epoll,
        tenure: dispatcher::tenure(&group.0.seats, seat.number),
        news: Some(JOINED),
        given: false,
        kept: None,
        own: Vec::new(),
        ready: VecDeque::with_capacity(EVENTS),
        room: vec![0; ROOM],
    }))
}

/// This worker's end of its pair.
fn end(seat: &Seat) -> BorrowedFd<'_> {
    match &seat.group.0.common {
        Common::Pairs(pairs) => pairs.of_worker(seat.number),
        _ => unreachable!("the group was opened with this policy"),
    }
}

impl Dispatched {
    /// Tells what there is to tell; what finds no room stays.
    fn tell(&mut self, seat: &Seat) -> Result<(), ListenError> {
        if let Some(connection) = self.kept.take() {
            if self.news == Some(DONE) {
                if self.give_back(seat, connection, KEPT_AND_DONE)? {
                    self.news = None;
                }
            } else {
                self.give_back(seat, connection, KEPT)?;
            }
        }
        if let Some(news) = self.news {
            match message::send(end(seat), &[news, self.tenure], None) {
                Ok(()) => self.news = None,
                Err(error) if lobby::is_full(&error) => {}
                Err(error) => return Err(seat.group.failed("sendmsg()")(error)),
            }
        }
        Ok(())
    }

    /// Sends a connection back, or else waits for it here; whether it went.
    fn give_back(&mut self, seat: &Seat, connection: Connection, kind: u8) -> Result<bool, ListenError> {
        match lobby::send_connection(end(seat), kind, &connection) {
            Ok(()) => Ok(true),
            Err(error) if lobby::is_full(&error) => {
                let descriptor = connection.as_fd().as_raw_fd();
                let added = self.epoll.add(connection.as_fd(), descriptor as u64, Interest::READ);
                added.map_err(seat.group.failed("epoll_ctl()"))?;
                let place = descriptor as usize;
                if self.own.len() <= place {
                    self.own.resize_with(place + 1, || None);
                }
                self.own[place] = Some(connection);
                Ok(false)
            }
            Err(error) => Err(seat.group.failed("sendmsg()")(error)),
        }
    }

    fn receive(&mut self, seat: &Seat) -> Result<Option<Connection>, ListenError> {
        match message::receive(end(seat), &mut self.room) {
            Ok((count, socket)) => {
                let Some((kind, rest)) = self.room[..count].split_first() else { return Ok(None) };
                let passenger = socket.and_then(|socket| Passenger::read(rest, socket));
                let Some(passenger) = passenger else { return Ok(None) };
                let (kind, ours) = (*kind, kind >> 1 == self.tenure);
                if kind & FRESH != 0 {
                    seat.count(Count::Accepts);
                }
                // What was meant for somebody who had the seat before is not reckoned as this worker's.
                self.given |= ours;
                Ok(Some(passenger.settle(seat.place())))
            }
            Err(error) => match errno_name(&error).as_str() {
                "EAGAIN" => Ok(None),
                // The kernel has closed it.
                "EMFILE" => {
                    seat.count(Count::FailedAccepts);
                    self.news = Some(DONE);
                    Ok(None)
                }
                _ => Err(seat.group.failed("recvmsg()")(error)),
            },
        }
    }

    fn take_own(&mut self, seat: &Seat, place: usize) -> Result<Option<Connection>, ListenError> {
        let Some(connection) = self.own.get_mut(place).and_then(Option::take) else { return Ok(None) };
        self.epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        Ok(Some(connection))
    }
}

impl Wait for Dispatched {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if std::mem::take(&mut self.given) {
            self.news = Some(DONE);
        }
        loop {
            self.tell(seat)?;
            while let Some(event) = self.ready.pop_front() {
                let found = match event.token() {
                    BELL => {
                        seat.bell.silence();
                        return Ok(None);
                    }
                    DISPATCHER => self.receive(seat)?,
                    descriptor => self.take_own(seat, descriptor as usize)?,
                };
                if found.is_some() {
                    return Ok(found);
                }
            }
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if self.news.is_some() {
                left = Some(left.map_or(TELL_AGAIN, |left| left.min(TELL_AGAIN)));
            }
            let mut events = [Ready::NONE; EVENTS];
            let ready = self.epoll.wait(&mut events, left).map_err(seat.group.failed("epoll_wait()"))?;
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

    /// It goes back when the worker asks for the next: one message says both.
    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        if let Some(earlier) = self.kept.replace(connection) {
            self.give_back(seat, earlier, KEPT)?;
        }
        Ok(())
    }

    /// It waited for nobody in particular.
    fn misplaced(&self, _seat: &Seat, _kept: Instant) -> Duration {
        Duration::ZERO
    }

    /// What `next` gives is in no epoll.
    fn forget(&mut self, _seat: &Seat, _connection: &mut Connection) -> Result<(), ListenError> {
        Ok(())
    }

    fn release(&mut self, seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        self.ready.clear();
        let mut released: Vec<_> = self.kept.take().into_iter().collect();
        for place in 0..self.own.len() {
            released.extend(self.take_own(seat, place)?);
        }
        // What it was given and did not take the dispatcher takes back, or the seat's next worker has it. Without room for
        // this the dispatcher sees that the seat is free.
        match message::send(end(seat), &[LEFT, self.tenure], None) {
            Err(error) if !lobby::is_full(&error) => Err(seat.group.failed("sendmsg()")(error)),
            _ => Ok(released),
        }
    }
}
