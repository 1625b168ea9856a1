//! The worker's side of the policy `dispatcher`: it receives connections from the dispatcher, and reports each as done,
//! together with the connection if it is kept.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{Errno, unix_socket};

use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::dispatcher::{self, DONE, FRESH, JOINED, KEPT, KEPT_AND_DONE, LEFT, WorkerChannels};
use crate::listen::handoff::{self, HandoffConnection, MAX_MESSAGE};
use crate::listen::seats::Count;
use crate::listen::wait::{Idle, Preparation, Released, Seat, SharedState, Wait, sooner};

const WAKER: u64 = u64::MAX;
const DISPATCHER: u64 = u64::MAX - 1;
const EVENTS: usize = 16;
/// The time after which a worker retries a message for which the channel had no space.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

struct Dispatched {
    epoll: Epoll,
    tenure: u8,
    /// The next message to the dispatcher: [`JOINED`] or [`DONE`].
    unsent: Option<u8>,
    /// Whether the worker serves a connection of the dispatcher.
    has_work: bool,
    /// A kept connection, sent to the dispatcher together with [`DONE`].
    kept: Option<Connection>,
    /// Connections that cannot be sent because their `carry` is too long; the worker waits for their next bytes itself.
    own: Idle<Connection>,
    ready: VecDeque<Ready>,
    buffer: Vec<u8>,
}

/// Creates the channels between the dispatcher and the workers.
pub(crate) fn prepare(preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    let channels = WorkerChannels::new(preparation.seats).map(SharedState::Channels);
    channels.map_err(ListenError::call("socketpair()", preparation.endpoint))
}

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let group = &seat.group;
    let epoll = Epoll::new().map_err(group.failed("epoll_create1()"))?;
    let failed = group.failed("epoll_ctl()");
    epoll.add(seat.waker.as_fd(), WAKER, Interest::ACCEPT).map_err(&failed)?;
    epoll.add(end(seat), DISPATCHER, Interest::ACCEPT).map_err(&failed)?;
    Ok(Box::new(Dispatched {
        epoll,
        tenure: dispatcher::next_tenure(&group.0.seats, seat.number),
        unsent: Some(JOINED),
        has_work: false,
        kept: None,
        own: Idle::new(group.0.idle),
        ready: VecDeque::with_capacity(EVENTS),
        buffer: vec![0; MAX_MESSAGE],
    }))
}

fn channels(seat: &Seat) -> &WorkerChannels {
    match &seat.group.0.shared {
        SharedState::Channels(channels) => channels,
        _ => unreachable!("the group was opened with this policy"),
    }
}

/// Returns this worker's end of its channel.
fn end(seat: &Seat) -> BorrowedFd<'_> {
    channels(seat).of_worker(seat.number)
}

impl Dispatched {
    /// Sends the kept connection and the next message. A message for which the channel has no space stays for a retry.
    fn report(&mut self, seat: &Seat) -> Result<(), ListenError> {
        if let Some(connection) = self.kept.take() {
            if self.unsent == Some(DONE) {
                if self.give_back(seat, connection, KEPT_AND_DONE)? {
                    self.unsent = None;
                }
            } else {
                self.give_back(seat, connection, KEPT)?;
            }
        }
        if let Some(unsent) = self.unsent {
            match unix_socket::send(end(seat), &[unsent, self.tenure], None) {
                Ok(()) => self.unsent = None,
                Err(error) if handoff::is_full(&error) => {}
                Err(error) => return Err(seat.group.failed("sendmsg()")(error)),
            }
        }
        Ok(())
    }

    /// Sends a connection to the dispatcher. Returns `false` if it cannot be sent; the worker then waits for its next request.
    fn give_back(&mut self, seat: &Seat, connection: Connection, kind: u8) -> Result<bool, ListenError> {
        match handoff::send_connection(end(seat), kind, &connection) {
            Ok(()) => Ok(true),
            Err(error) if handoff::is_full(&error) => {
                let token = connection.as_fd().as_raw_fd() as u64;
                let added = self.epoll.add(connection.as_fd(), token, Interest::READ);
                if seat.watched(added)?.is_some() {
                    self.own.put(connection);
                }
                Ok(false)
            }
            Err(error) => Err(seat.group.failed("sendmsg()")(error)),
        }
    }

    fn receive(&mut self, seat: &Seat) -> Result<Option<Connection>, ListenError> {
        match channels(seat).receive(|| unix_socket::receive(end(seat), &mut self.buffer)) {
            Ok((count, socket)) => {
                let Some((kind, rest)) = self.buffer[..count].split_first() else { return Ok(None) };
                let seats = &seat.group.0.seats;
                let received = socket.and_then(|socket| HandoffConnection::read(rest, socket, seats));
                let Some(received) = received else { return Ok(None) };
                let (kind, ours) = (*kind, kind >> 1 == self.tenure);
                if kind & FRESH != 0 {
                    seat.count(Count::Accepts);
                }
                // A message to the seat's previous worker does not count as this worker's.
                self.has_work |= ours;
                Ok(Some(received.settle(seat.open_guard())))
            }
            Err(error) if handoff::is_empty(&error) => Ok(None),
            Err(error) => match Errno::of(&error) {
                // The kernel has closed the connection, because this process has no free descriptor.
                Some(Errno::EMFILE) => {
                    seat.count(Count::ProcessDescriptors);
                    seat.group.0.seats.sub_in_transit();
                    self.unsent = Some(DONE);
                    Ok(None)
                }
                _ => Err(seat.group.failed("recvmsg()")(error)),
            },
        }
    }

    fn take_own(&mut self, seat: &Seat, descriptor: usize) -> Result<Option<Connection>, ListenError> {
        let Some(connection) = self.own.take(descriptor) else { return Ok(None) };
        self.epoll.remove(connection.as_fd()).map_err(seat.group.failed("epoll_ctl()"))?;
        Ok(Some(connection))
    }
}

impl Wait for Dispatched {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if std::mem::take(&mut self.has_work) {
            self.unsent = Some(DONE);
        }
        let mut has_polled = false;
        loop {
            self.report(seat)?;
            while let Some(event) = self.ready.pop_front() {
                let found = match event.token() {
                    WAKER => {
                        seat.waker.clear();
                        return Ok(None);
                    }
                    DISPATCHER => self.receive(seat)?,
                    descriptor => self.take_own(seat, descriptor as usize)?,
                };
                if found.is_some() {
                    return Ok(found);
                }
            }
            // Also if events arrive again and again, as when the kernel has no memory for a message.
            if std::mem::replace(&mut has_polled, true) && until.is_some_and(|until| Instant::now() >= until)
            {
                return Ok(None);
            }
            seat.close_idle(self.own.sweep());
            let mut left = until.map(|until| until.saturating_duration_since(Instant::now()));
            left = sooner(left, self.own.until_sweep());
            left = sooner(left, self.unsent.map(|_| RETRY_INTERVAL));
            let mut events = [Ready::NONE; EVENTS];
            let ready = self.epoll.wait(&mut events, left).map_err(seat.group.failed("epoll_wait()"))?;
            if !ready.is_empty() {
                seat.count(Count::Wakeups);
                self.ready.extend(ready);
            }
        }
    }

    /// Stores the connection until the next call of `next`: one message then carries it and reports the worker as done.
    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        if let Some(earlier) = self.kept.replace(connection) {
            self.give_back(seat, earlier, KEPT)?;
        }
        Ok(())
    }

    /// Does nothing: the dispatcher accepts.
    fn hand_over(&mut self, _seat: &Seat) -> Result<(), ListenError> {
        Ok(())
    }

    fn release(&mut self, seat: &Seat, _until: Instant) -> Released {
        self.ready.clear();
        let mut connections: Vec<_> = self.kept.take().into_iter().collect();
        for connection in self.own.drain() {
            // Without this the kernel removes it when this epoll instance is closed, a moment later.
            let _ = self.epoll.remove(connection.as_fd());
            connections.push(connection);
        }
        // The dispatcher takes back the messages that this worker did not read, or the seat's next worker reads them. If the
        // channel has no space, the dispatcher finds the seat free.
        let told = match unix_socket::send(end(seat), &[LEFT, self.tenure], None) {
            Err(error) if !handoff::is_full(&error) => Err(seat.group.failed("sendmsg()")(error)),
            _ => Ok(()),
        };
        Released { connections, told }
    }
}
