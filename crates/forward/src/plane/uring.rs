use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use fourtuple_syscalls::Errno;
use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::datagram_ring::DatagramRing;

use crate::error::ForwardError;
use crate::path::Path;
use crate::plane::sending::{give_back, not_received, send_all};
use crate::plane::{Plane, PlaneKind};

/// The buffers of the ring of a port, and the most messages of a turn.
const BUFFERS: u16 = 64;
/// Bytes for each buffer, as in `offload.rs`: UDP_GRO coalesces up to 64 KiB.
const ROOM: usize = 1025 * 64;
/// Maximum number of replies of one call.
const BATCH: usize = 64;

/// Checks that the kernel has and permits the required io_uring calls.
pub(super) fn probe() -> Result<(), ForwardError> {
    let kind = PlaneKind::Uring;
    // The check runs in its own thread: a closed ring interrupts the thread that has created it a little later (`io_ring_exit_work`),
    // which could interrupt a system call of the caller.
    let tried = thread::Builder::new().spawn(DatagramRing::works);
    let tried = tried.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))));
    match tried {
        Ok(true) => Ok(()),
        Ok(false) => Err(ForwardError::Absent {
            kind,
            what: "a request of io_uring that receives one message after the other (Linux 6.0)",
            source: io::ErrorKind::Unsupported.into(),
        }),
        Err(source) => Err(match Errno::of(&source) {
            Some(Errno::EPERM | Errno::EACCES) => ForwardError::NotPermitted {
                kind,
                call: "io_uring_setup()",
                needs: "it takes the sysctl kernel.io_uring_disabled at 0 (or 1 with the group of kernel.io_uring_group) and \
                        a seccomp profile that allows io_uring",
                source,
            },
            Some(Errno::ENOSYS) => ForwardError::Absent { kind, what: "a kernel with io_uring", source },
            Some(Errno::EINVAL) => {
                ForwardError::Absent { kind, what: "IORING_SETUP_DEFER_TASKRUN (Linux 6.1)", source }
            }
            _ => ForwardError::Call { call: "io_uring", source },
        }),
    }
}

/// Like `Offload`, with a ring for each port. Packets are sent from the buffers of the ring without a copy, and the kernel gets the buffers
/// back at the end of the turn. Replies arrive at many sockets, and are received as with `Offload`.
pub(super) struct Uring {
    /// The rings by port number.
    rings: Vec<Option<DatagramRing>>,
    /// Buffers for replies, allocated at the first reply.
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
            ring.resume(listener)?;
            self.rings[number] = Some(ring);
        }
        self.rings[number].as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        let Some(Some(ring)) = self.rings.get_mut(number) else { return Ok(0) };
        let count = match ring.receive() {
            Ok(count) => count,
            Err(error) => return not_received("io_uring_enter()", error, &path.counters).map(|()| 0),
        };
        if let Some(errno) = ring.take_failure() {
            not_received("recvmsg() of io_uring", errno.into(), &path.counters)?;
        }
        path.is_behind = count == usize::from(BUFFERS);
        send_on(ring, path);
        // The call fails when the kernel has no memory for one more request. The request then stays queued for the next call.
        let _ = ring.resume(listener);
        Ok(count)
    }

    /// Ends the receive request. Packets that are not in a buffer stay in the receive queue of the socket.
    fn release(&mut self, number: usize, _: BorrowedFd<'_>, path: &mut Path) {
        let Some(mut ring) = self.rings.get_mut(number).and_then(Option::take) else { return };
        while ring.stop().is_ok_and(|left| left > 0) {
            send_on(&ring, path);
        }
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        let (batch, back) = self.back.get_or_insert_with(|| (Batch::new(BATCH, ROOM), Outgoing::new()));
        give_back(batch, back, listener, index, path)
    }
}
