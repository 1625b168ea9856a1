use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use fourtuple_syscalls::datagram::{Batch, Outgoing};

use crate::path::Path;
use crate::plane::interface::Plane;
use crate::plane::sending::{give_back, receive, send_all};

/// Maximum size of a datagram.
const ROOM: usize = 65_536;

/// Moves one packet with each system call.
pub(super) struct OneByOne {
    batch: Batch,
    back: Outgoing,
}

impl OneByOne {
    pub(super) fn new() -> OneByOne {
        OneByOne { batch: Batch::new(1, ROOM), back: Outgoing::new() }
    }
}

impl Plane for OneByOne {
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        if !receive(&mut self.batch, listener, &path.counters)? {
            return Ok(0);
        }
        let Some(datagram) = self.batch.get(0) else { return Ok(0) };
        path.take(0, &datagram);
        send_all(path, &self.batch);
        Ok(1)
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        give_back(&mut self.batch, &mut self.back, listener.as_fd(), index, path)
    }
}
