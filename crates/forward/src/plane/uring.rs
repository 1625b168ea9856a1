use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::datagram_ring::DatagramRing;
use fourtuple_syscalls::errno_name;

use crate::error::ForwardError;
use crate::path::Path;
use crate::plane::sending::{give_back, send_all};
use crate::plane::{Plane, PlaneKind};

/// Buffers of a port's ring, and the most messages of a turn.
const BUFFERS: u16 = 64;
/// Bytes for each, as in `offload.rs`: what UDP_GRO puts together is up to 64 KiB.
const ROOM: usize = 1025 * 64;
/// Replies with one call.
const BATCH: usize = 64;

/// Finds out whether it can be done here, before anybody relies on it.
pub(super) fn try_out() -> Result<(), ForwardError> {
    let kind = PlaneKind::Uring;
    // In a thread of its own: what is left of a ring when it is closed interrupts the thread that had made it a little later
    // (`io_ring_exit_work`), and whoever asks may wait in a system call by then.
    let tried = thread::Builder::new().spawn(DatagramRing::works);
    let tried = tried.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))));
    match tried {
        Ok(true) => Ok(()),
        Ok(false) => Err(ForwardError::Absent {
            kind,
            what: "a request of io_uring that receives one message after the other (Linux 6.0)",
            source: io::ErrorKind::Unsupported.into(),
        }),
        Err(source) => Err(match errno_name(&source).as_str() {
            "EPERM" | "EACCES" => ForwardError::NotPermitted {
                kind,
                call: "io_uring_setup()",
                needs: "it takes the sysctl kernel.io_uring_disabled at 0 (or 1 with the group of kernel.io_uring_group) and \
                        a seccomp profile that allows io_uring",
                source,
            },
            "ENOSYS" => ForwardError::Absent { kind, what: "a kernel with io_uring", source },
            "EINVAL" => ForwardError::Absent { kind, what: "IORING_SETUP_DEFER_TASKRUN (Linux 6.1)", source },
            _ => ForwardError::Call { call: "io_uring", source },
        }),
    }
}

/// As `Offload`, with a ring for each port. There is no copy: what is sent lies in the ring's buffers, which the kernel gets back
/// at the end of the turn. Replies come to many sockets, and are received as `Offload` does.
pub(super) struct Uring {
    /// By the numbers of the ports.
    rings: Vec<Option<DatagramRing>>,
    /// For replies, where there are any.
    back: Option<(Batch, Outgoing)>,
}

impl Uring {
    pub(super) fn new() -> Uring {
        Uring { rings: Vec::new(), back: None }
    }
}

fn send_on(ring: &DatagramRing, path: &mut Path) {
    for (index, datagram) in ring.iter().enumerate() {
        path.take(index, &datagram);
    }
    send_all(path, ring);
}

impl Plane for Uring {
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        if self.rings.len() <= number {
            self.rings.resize_with(number + 1, || None);
        }
        if self.rings[number].is_none() {
            let mut ring = DatagramRing::new(BUFFERS, ROOM)?;
            ring.go_on(listener)?;
            self.rings[number] = Some(ring);
        }
        // There is one now.
        self.rings[number].as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> bool {
        let Some(Some(ring)) = self.rings.get_mut(number) else { return false };
        let Ok(came) = ring.receive() else { return false };
        send_on(ring, path);
        // It fails when the kernel has no memory for one more request. It is in the queue then, and goes with the next call.
        let _ = ring.go_on(listener);
        came > 0
    }

    /// The request is ended, which leaves in the socket's queue what is not in a buffer.
    fn release(&mut self, number: usize, _: BorrowedFd<'_>, path: &mut Path) {
        let Some(mut ring) = self.rings.get_mut(number).and_then(Option::take) else { return };
        while ring.stop().is_ok_and(|left| left > 0) {
            send_on(&ring, path);
        }
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) {
        let (batch, back) = self.back.get_or_insert_with(|| (Batch::new(BATCH, ROOM), Outgoing::new()));
        give_back(batch, back, listener, index, path);
    }
}
