//! The channels between the dispatcher and its workers, and the messages on them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fourtuple_syscalls::{message, socket};

use crate::listen::seats::{Count, Seats};

/// Set in the first byte of a message to a worker if the connection is new. The remaining bits are the tenure of the worker
/// to which the dispatcher sent the message; the seat may have another worker when the message is read.
pub(crate) const FRESH: u8 = 1;
/// Message of a worker that has joined, with its tenure.
pub(crate) const JOINED: u8 = b'J';
/// Message of a worker that has served its connection.
pub(crate) const DONE: u8 = b'D';
/// Message of a worker that has left, with its tenure. The seat is free before the worker sends it, so the message of the
/// seat's next worker may arrive first.
pub(crate) const LEFT: u8 = b'X';
/// Message with a kept connection, from a worker that has more to serve.
pub(crate) const KEPT: u8 = b'K';
/// Message with a kept connection, from a worker that has served its connection.
pub(crate) const KEPT_AND_DONE: u8 = b'B';

/// One pair of connected sockets per seat, created before workers are forked so that every process has all of them.
#[derive(Debug)]
pub(crate) struct WorkerChannels {
    /// The dispatcher's end and the worker's end.
    ends: Vec<(OwnedFd, OwnedFd)>,
    /// The dispatcher's state of the workers, stored here while the group has no dispatcher.
    pub(crate) unattended: Mutex<Option<Vec<WorkerState>>>,
    /// Descriptors of this process that are reserved for connections in messages. The kernel closes a connection for which the
    /// receiver has no descriptor.
    spare: Mutex<Vec<OwnedFd>>,
}

/// The dispatcher's state of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkerState {
    pub(crate) present: bool,
    pub(crate) tenure: u8,
    /// Connections that the worker has received and not finished.
    pub(crate) outstanding: u32,
    /// The turn in which the worker finished its last connection.
    pub(crate) since: u64,
}

impl WorkerChannels {
    pub(crate) fn new(seats: usize) -> io::Result<WorkerChannels> {
        let ends = (0..seats).map(|_| message::pair()).collect::<io::Result<Vec<_>>>()?;
        let workers = vec![WorkerState::default(); seats];
        Ok(WorkerChannels { ends, unattended: Mutex::new(Some(workers)), spare: Mutex::new(Vec::new()) })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, spare: &mut Vec<OwnedFd>, wanted: usize) -> io::Result<()> {
        while spare.len() < wanted {
            spare.push(self.ends[0].0.try_clone()?);
        }
        Ok(())
    }

    /// Reserves `wanted` descriptors; EMFILE if the process has too few.
    pub(crate) fn reserve(&self, wanted: usize) -> io::Result<()> {
        self.fill(&mut self.spare(), wanted)
    }

    /// Accepts a connection if `wanted` descriptors are reserved afterwards; EMFILE if the process has too few.
    pub(crate) fn accept(&self, listener: BorrowedFd<'_>, wanted: usize) -> io::Result<OwnedFd> {
        let mut spare = self.spare();
        self.fill(&mut spare, wanted)?;
        socket::accept_nonblocking(listener)
    }

    /// Receives a message with a reserved descriptor, which no other worker and no accept(2) of the dispatcher can take.
    pub(crate) fn receive<T>(&self, receive: impl FnOnce() -> T) -> T {
        let mut spare = self.spare();
        drop(spare.pop());
        receive()
    }

    /// Closes the reserved descriptors.
    pub(crate) fn release(&self) {
        self.spare().clear();
    }

    pub(crate) fn count(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn of_worker(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].1.as_fd()
    }

    pub(crate) fn of_dispatcher(&self, seat: usize) -> BorrowedFd<'_> {
        self.ends[seat].0.as_fd()
    }
}

/// Returns the tenure of a worker that joins: the number of workers that have had the seat, modulo 128.
pub(crate) fn next_tenure(seats: &Seats, seat: usize) -> u8 {
    seats.add(seat, Count::Joins, 1);
    tenure(seats, seat)
}

/// Returns the tenure of the worker that has a seat.
pub(crate) fn tenure(seats: &Seats, seat: usize) -> u8 {
    seats.get(seat, Count::Joins) as u8 & 0x7f
}

/// Returns the first byte of a message to a worker.
pub(crate) fn kind(tenure: u8, fresh: bool) -> u8 {
    tenure << 1 | if fresh { FRESH } else { 0 }
}
