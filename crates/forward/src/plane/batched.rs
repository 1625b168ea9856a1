use std::io;
use std::os::fd::BorrowedFd;

use fourtuple_syscalls::datagram::{Batch, Outgoing};

use crate::path::Path;
use crate::plane::interface::Plane;
use crate::plane::sending::{give_back, receive, send_all};

/// Maximum number of packets of one call.
const BATCH: usize = 64;
/// Bytes for each packet: a jumbo frame. The odd number of cache lines places the beginnings of packets, which is all of a short packet,
/// in different cache sets.
const ROOM: usize = 145 * 64;

/// Moves up to 64 packets with each system call.
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
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        if !receive(&mut self.batch, listener, &path.counters)? {
            return Ok(0);
        }
        path.is_behind = self.batch.len() == BATCH;
        for (index, datagram) in self.batch.iter().enumerate() {
            path.take(index, &datagram);
        }
        send_all(path, &self.batch);
        Ok(self.batch.len())
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        give_back(&mut self.batch, &mut self.back, listener, index, path)
    }
}
