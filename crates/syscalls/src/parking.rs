//! Keeps more sockets open than the descriptors that RLIMIT_NOFILE allows for a process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::IoUring;

use crate::netlink::uninterrupted;
use crate::{Errno, check, fork, resource, socket, unix_socket};

/// Number of descriptors per call, below the limit of one SCM_RIGHTS message (SCM_MAX_FD is 253).
const BATCH: usize = 250;

/// Slots per ring. The kernel refuses a table larger than RLIMIT_NOFILE; additional rings are cheap.
const RING_SLOTS: u64 = 16_384;

/// Keeps sockets open without using one descriptor of this process for each.
///
/// Sockets become direct descriptors of io_uring, because RLIMIT_NOFILE limits each ring's table separately. Without
/// io_uring, forked child processes hold them. Dropping the value closes all sockets.
pub struct Parking {
    waiting: Vec<OwnedFd>,
    parked: u64,
    place: Place,
}

enum Place {
    Rings { rings: Vec<IoUring>, slots: u32, used: u32 },
    Holders { holders: Vec<Holder>, capacity: u64 },
}

/// The place where a [`Parking`] keeps its sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceKind {
    /// io_uring direct descriptors.
    Rings,
    /// Child processes.
    Holders,
}

impl Parking {
    /// Uses io_uring if it is allowed, otherwise child processes.
    pub fn new() -> io::Result<Self> {
        match Parking::with(PlaceKind::Rings) {
            // io_uring is not built in, or a sysctl or seccomp profile disables it. EINVAL: before Linux 5.19 there are
            // no sparse tables (IORING_RSRC_REGISTER_SPARSE).
            Err(error)
                if matches!(
                    Errno::of(&error),
                    Some(Errno::ENOSYS | Errno::EPERM | Errno::EACCES | Errno::EINVAL)
                ) =>
            {
                Parking::with(PlaceKind::Holders)
            }
            result => result,
        }
    }

    /// Uses the named place or fails.
    pub fn with(kind: PlaceKind) -> io::Result<Self> {
        let (soft, _) = resource::descriptor_limits()?;
        let place = match kind {
            PlaceKind::Rings => {
                let slots = soft.min(RING_SLOTS) as u32;
                Place::Rings { rings: vec![ring(slots)?], slots, used: 0 }
            }
            PlaceKind::Holders => {
                // A holder needs its own end of the pair, and further descriptors only while it receives a message.
                let capacity = soft.saturating_sub(8).max(1);
                Place::Holders { holders: vec![Holder::fork(capacity)?], capacity }
            }
        };
        Ok(Parking { waiting: Vec::with_capacity(BATCH), parked: 0, place })
    }

    /// Returns the place where the sockets are kept.
    pub fn kind(&self) -> PlaceKind {
        match self.place {
            Place::Rings { .. } => PlaceKind::Rings,
            Place::Holders { .. } => PlaceKind::Holders,
        }
    }

    /// Returns the number of sockets.
    pub fn len(&self) -> u64 {
        self.parked + self.waiting.len() as u64
    }

    /// Returns whether there are no sockets.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes `socket`. Returns true if a batch is complete, so that the caller should call [`Parking::settle`] soon.
    pub fn park(&mut self, socket: OwnedFd) -> bool {
        self.waiting.push(socket);
        self.waiting.len() >= BATCH
    }

    /// Moves the sockets of `park` out of this process's descriptors. Separate from `park` so that a measuring loop can
    /// exclude its duration.
    ///
    /// # Errors
    ///
    /// The errors of io_uring_register(2), fork(2) and sendmsg(2). Sockets that were not moved are still held and
    /// counted once.
    pub fn settle(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let rest = self.waiting.as_slice();
            let taken = match &mut self.place {
                Place::Rings { rings, slots, used } => {
                    if *used == *slots {
                        rings.push(ring(*slots)?);
                        *used = 0;
                    }
                    let batch = &rest[..rest.len().min((*slots - *used) as usize)];
                    let raw: Vec<i32> = batch.iter().map(AsRawFd::as_raw_fd).collect();
                    let last = rings.last().expect("there is always a ring");
                    let taken = last.submitter().register_files_update(*used, &raw)?;
                    *used += taken as u32;
                    taken
                }
                Place::Holders { holders, capacity } => {
                    if holders.last().expect("there is always a holder").free == 0 {
                        holders.push(Holder::fork(*capacity)?);
                    }
                    let last = holders.last_mut().expect("there is always a holder");
                    let taken = rest.len().min(BATCH).min(last.free as usize);
                    last.give(&rest[..taken])?;
                    last.free -= taken as u64;
                    taken
                }
            };
            self.parked += taken as u64;
            // Drops the local descriptors before any call that can fail, so that each socket is counted once.
            self.waiting.drain(..taken);
        }
        Ok(())
    }
}

impl Drop for Parking {
    fn drop(&mut self) {
        if let Place::Rings { rings, .. } = &self.place {
            for ring in rings {
                // Unregisters the files to close the sockets at once. Otherwise a kernel worker closes them after the
                // end of the ring, during the next measurement. If this fails, that worker closes them.
                let _ = ring.submitter().unregister_files();
            }
        }
    }
}

fn ring(slots: u32) -> io::Result<IoUring> {
    let ring = IoUring::new(2)?;
    ring.submitter().register_files_sparse(slots)?;
    Ok(ring)
}

/// A child process that receives descriptors and holds them until the parent closes the channel.
struct Holder {
    channel: OwnedFd,
    process: libc::pid_t,
    free: u64,
}

impl Holder {
    fn fork(capacity: u64) -> io::Result<Self> {
        let (ours, theirs) = unix_socket::pair_of(0)?;
        // SAFETY: the child calls nothing but async-signal-safe functions and never returns (see `hold`).
        let process = check(unsafe { libc::fork() })?;
        if process == 0 {
            hold(theirs.as_raw_fd());
        }
        Ok(Holder { channel: ours, process, free: capacity })
    }

    fn give(&self, sockets: &[OwnedFd]) -> io::Result<()> {
        let borrowed: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        uninterrupted(|| unix_socket::send_all(self.channel.as_fd(), &[0], &borrowed))?;
        // Waits for the holder's answer: a descriptor in flight would keep the socket open, but would count against the limit on
        // descriptors in flight. If a signal prevented this read, the answer would be taken for the answer to the next message.
        let mut byte = [0_u8];
        match uninterrupted(|| socket::receive(self.channel.as_fd(), &mut byte))? {
            1 if byte == [1] => Ok(()),
            _ => Err(io::Error::other("a process that holds sockets could not take more")),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SAFETY: the child belongs to this process and has not been reaped. Its end closes the sockets that it holds.
        unsafe { libc::kill(self.process, libc::SIGKILL) };
        // Another waitpid() may have reaped the child, which is not an error here.
        let _ = uninterrupted(|| {
            // SAFETY: the pointer for the exit status is null.
            check(unsafe { libc::waitpid(self.process, std::ptr::null_mut(), 0) })
        });
    }
}

/// Runs a holder: receives descriptors until the parent closes its end. Runs between fork and _exit, so it must not
/// allocate, lock or unwind.
fn hold(channel: libc::c_int) -> ! {
    // SAFETY: only async-signal-safe calls on descriptors of this process and on buffers of this stack frame.
    unsafe {
        // Descriptors inherited from the parent would keep its sockets alive and use up this process's limit.
        if libc::dup2(channel, 0) == -1 {
            libc::_exit(1);
        }
        if fork::close_all_but_0().is_err() {
            libc::_exit(1);
        }
        let mut control = unix_socket::Control::new();
        loop {
            let mut byte = 0_u8;
            let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
            let mut message = control.message(&mut vector);
            match libc::recvmsg(0, &raw mut message, 0) {
                1.. => {}
                -1 if *libc::__errno_location() == libc::EINTR => continue,
                _ => libc::_exit(0),
            }
            byte = u8::from(message.msg_flags & libc::MSG_CTRUNC == 0);
            libc::send(0, (&raw const byte).cast(), 1, libc::MSG_NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::signals::IntervalTimer;

    fn keeps_sockets_open_until_dropped(kind: PlaceKind) {
        let mut parking = match Parking::with(kind) {
            Ok(parking) => parking,
            Err(error) if kind == PlaceKind::Rings => {
                eprintln!("SKIPPED parking in rings: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let mut ours = Vec::new();
        for _ in 0..BATCH + 10 {
            let (kept, parked) = UnixStream::pair().unwrap();
            ours.push(kept);
            if parking.park(parked.into()) {
                parking.settle().unwrap();
            }
        }
        parking.settle().unwrap();
        assert_eq!(parking.len(), BATCH as u64 + 10);
        for stream in &mut ours {
            stream.set_nonblocking(true).unwrap();
            let error = stream.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "the other end is still open");
        }
        drop(parking);
        for stream in &mut ours {
            stream.set_nonblocking(false).unwrap();
            // As read() does not, it goes on after a signal.
            assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0, "the other end is closed");
        }
    }

    #[test]
    fn rings_keep_sockets_open_until_dropped() {
        keeps_sockets_open_until_dropped(PlaceKind::Rings);
    }

    #[test]
    fn holders_keep_sockets_open_until_dropped() {
        keeps_sockets_open_until_dropped(PlaceKind::Holders);
    }

    #[test]
    fn signals_do_not_disturb_parking() {
        let before = IntervalTimer::signals();
        let timer = IntervalTimer::for_this_thread(Duration::from_micros(50)).unwrap();
        for _ in 0..20 {
            keeps_sockets_open_until_dropped(PlaceKind::Holders);
        }
        keeps_sockets_open_until_dropped(PlaceKind::Rings);
        drop(timer);
        assert!(IntervalTimer::signals() > before);
    }

    #[test]
    fn a_socket_is_counted_once_when_settling_fails() {
        let mut parking = Parking::with(PlaceKind::Holders).unwrap();
        let Place::Holders { holders, .. } = &parking.place else { panic!("no holders") };
        let process = holders[0].process;
        let mut far_ends = Vec::new();
        for parked in 1..=3 {
            let (near, far) = UnixStream::pair().unwrap();
            far_ends.push(near);
            parking.park(far.into());
            if parked == 1 {
                parking.settle().unwrap();
                // SAFETY: kill() takes numbers, and the child has not been reaped.
                check(unsafe { libc::kill(process, libc::SIGKILL) }).unwrap();
            } else {
                assert!(parking.settle().is_err());
            }
            assert_eq!((parking.parked, parking.len()), (1, parked));
        }
    }
}
