use std::os::fd::BorrowedFd;

use fourtuple_syscalls::datagram::{Batch, Outgoing};

use crate::path::Path;
use crate::plane::Plane;
use crate::plane::sending::{give_back, send_all};

/// Messages with one call.
const BATCH: usize = 64;
/// Bytes for each: what UDP_GRO puts together is up to 64 KiB. An odd number of cache lines: see `batched.rs`.
const ROOM: usize = 1025 * 64;

/// As `Batched`, and the kernel puts packets together and cuts them again: one message goes through the stack for many.
pub(super) struct Offload {
    batch: Batch,
    back: Outgoing,
}

impl Offload {
    pub(super) fn new() -> Offload {
        Offload { batch: Batch::new(BATCH, ROOM), back: Outgoing::new() }
    }
}

impl Plane for Offload {
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
