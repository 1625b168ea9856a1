use std::os::fd::BorrowedFd;

use fourtuple_syscalls::datagram::{Batch, Outgoing};

use crate::path::Path;
use crate::plane::Plane;
use crate::plane::sending::{give_back, send_all};

/// Packets with one call.
const BATCH: usize = 64;
/// Bytes for each: jumbo frames. That it is an odd number of cache lines keeps the beginnings of packets, which is all that
/// there is of short ones, from meeting in the same sets of the cache.
const ROOM: usize = 145 * 64;

/// As many packets with each call as there are, 64 at most.
pub(super) struct Batched {
    batch: Batch,
    back: Outgoing,
}

impl Batched {
    pub(super) fn new() -> Batched {
        Batched::with_room(ROOM)
    }

    pub(super) fn with_room(room: usize) -> Batched {
        Batched { batch: Batch::new(BATCH, room), back: Outgoing::new() }
    }
}

impl Plane for Batched {
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> bool {
        if self.batch.receive(listener).is_err() {
            return false;
        }
        for (index, datagram) in self.batch.iter().enumerate() {
            path.take(index, &datagram);
        }
        send_all(path, &self.batch);
        true
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) {
        give_back(&mut self.batch, &mut self.back, listener, index, path);
    }
}
