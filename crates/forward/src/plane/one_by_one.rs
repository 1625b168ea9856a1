use std::os::fd::{AsFd, BorrowedFd};

use fourtuple_syscalls::datagram::{Batch, Outgoing};

use crate::path::Path;
use crate::plane::Plane;
use crate::plane::sending::{give_back, send_all};

/// No datagram is longer.
const ROOM: usize = 65_536;

/// One packet with each call.
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
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> bool {
        if self.batch.receive(listener).is_err() {
            return false;
        }
        let Some(datagram) = self.batch.get(0) else { return false };
        path.take(0, &datagram);
        send_all(path, &self.batch);
        true
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) {
        give_back(&mut self.batch, &mut self.back, listener.as_fd(), index, path);
    }
}
