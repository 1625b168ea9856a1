//! One-shot accept and poll operations of io_uring, each with exactly one completion.
//!
//! No operation of it reads or writes memory of the process, so that dropping it at any time is safe.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::{check, socket};

/// Set in the user data of an accept, whose result is a descriptor.
const ACCEPT: u64 = 1 << 63;
/// Set in the user data of what cancels another operation.
const CANCEL: u64 = 1 << 62;
const TOKEN: u64 = CANCEL - 1;
/// Operations handed over with one call.
const ENTRIES: u32 = 256;
/// Completions that have room; the kernel keeps those beyond (IORING_FEAT_NODROP).
const COMPLETIONS: u32 = 1024;

/// The result of an operation.
#[derive(Debug)]
pub enum Outcome {
    /// A connection, close-on-exec and non-blocking.
    Accepted(OwnedFd),
    /// There is something to read, or an end.
    Ready,
    /// The operation was cancelled. A cancelled accept may have consumed the wakeup for a connection, which then woke no other waiter.
    Cancelled,
    /// It failed.
    Failed(io::Error),
}

/// A ring for the thread that created it.
pub struct AcceptRing {
    ring: IoUring,
    /// Operations whose completion is still to come.
    under_way: usize,
    /// An operation could not be handed over. It names a descriptor that may be closed by now, so nothing is handed over any more.
    is_broken: bool,
}

impl AcceptRing {
    /// A ring whose completions come when the thread waits for them, and never interrupt what it does else
    /// (IORING_SETUP_DEFER_TASKRUN).
    ///
    /// # Errors
    ///
    /// ENOSYS, EPERM: switched off here. EINVAL: before Linux 6.1.
    pub fn new() -> io::Result<AcceptRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(ENTRIES)?;
        Ok(AcceptRing { ring, under_way: 0, is_broken: false })
    }

    /// Probes whether an accept on a non-blocking listener waits for a connection and can be cancelled. Older kernels complete it with
    /// EAGAIN at once.
    pub fn waits(&mut self) -> io::Result<bool> {
        let listener = private_listener()?;
        self.accept(0, listener.as_fd())?;
        self.wait(Some(Duration::ZERO))?;
        if self.outcome().is_some() {
            return Ok(false);
        }
        self.cancel(0)?;
        self.wait(Some(Duration::from_secs(1)))?;
        Ok(matches!(self.outcome(), Some((0, Outcome::Cancelled))))
    }

    /// Asks for the next connection of `listener`. From then on the ring holds it open until the operation is over.
    /// `token`, like the token of each operation, is below 2^62. The waiter is the last in the listener's queue of waiters
    /// (`io_async_queue_proc`) and leaves it when it is woken.
    pub fn accept(&mut self, token: u64, listener: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let descriptor = Fd(listener.as_raw_fd());
        let entry = opcode::Accept::new(descriptor, ptr::null_mut(), ptr::null_mut()).flags(flags).build();
        self.push(entry.user_data(token & TOKEN | ACCEPT))?;
        self.hand_over()
    }

    /// Asks to be told when `descriptor` has something to read or has come to an end. From then on the ring holds it open until
    /// the operation is over.
    pub fn poll(&mut self, token: u64, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(descriptor.as_raw_fd()), events).build();
        self.push(entry.user_data(token & TOKEN))?;
        self.hand_over()
    }

    /// Hands over the operation that was queued last, while its descriptor is borrowed: a number that waited in the queue could
    /// be another file's by the time the kernel looks at it.
    fn hand_over(&mut self) -> io::Result<()> {
        let handed = self.submit();
        self.is_broken |= handed.is_err();
        self.under_way += usize::from(handed.is_ok());
        handed
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the accept under `token`; its outcome follows, which may be a connection.
    pub fn cancel(&mut self, token: u64) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(token & TOKEN | ACCEPT).build();
        self.push(entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(CANCEL))
    }

    /// Hands over what was asked and waits until an operation is over, a signal comes or `timeout` is over (`None`: for
    /// ever).
    ///
    /// # Errors
    ///
    /// EEXIST: the calling thread did not create the ring. BrokenPipe: an earlier operation could not be submitted.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.check()?;
        let result = match timeout {
            None => self.ring.submitter().submit_and_wait(1),
            Some(timeout) => {
                let timeout = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY)) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The next operation that is over, by its token.
    pub fn outcome(&mut self) -> Option<(u64, Outcome)> {
        loop {
            let completion = self.ring.completion().next()?;
            let (data, result) = (completion.user_data(), completion.result());
            // Nothing to cancel: it is over already, or will be at once.
            if data & ACCEPT == 0 && data & CANCEL != 0 {
                continue;
            }
            self.under_way -= 1;
            let outcome = if result == -libc::ECANCELED {
                Outcome::Cancelled
            } else if result < 0 {
                Outcome::Failed(io::Error::from_raw_os_error(-result))
            } else if data & ACCEPT != 0 {
                // SAFETY: the kernel has made this descriptor for this completion, which is read once.
                Outcome::Accepted(unsafe { OwnedFd::from_raw_fd(result) })
            } else {
                Outcome::Ready
            };
            return Some((data & TOKEN, outcome));
        }
    }

    fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        self.check()?;
        // SAFETY: an entry of this ring has no pointer but null: the kernel reads and writes no memory for it.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        if self.is_broken { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }
}

impl Drop for AcceptRing {
    /// Waits until no operation is in progress, so that a later close() of a descriptor takes effect at once. In another thread
    /// than its own that is left to the kernel, which does it a little later.
    fn drop(&mut self) {
        let begun = Instant::now();
        let all = opcode::AsyncCancel2::new(io_uring::types::CancelBuilder::any()).build().user_data(CANCEL);
        while self.under_way > 0 && begun.elapsed() < Duration::from_secs(1) {
            if self.push(all.clone()).is_err() || self.wait(Some(Duration::from_millis(1))).is_err() {
                break;
            }
            // The connection of an accept without a caller is closed.
            while self.outcome().is_some() {}
        }
        while self.outcome().is_some() {}
    }
}

/// Opens a listener whose address no other process knows.
fn private_listener() -> io::Result<OwnedFd> {
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket() takes no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, flags, 0) })?;
    // SAFETY: the call above returned a new descriptor, which has no other owner.
    let listener = unsafe { OwnedFd::from_raw_fd(fd) };
    let family = libc::AF_UNIX as libc::sa_family_t;
    // SAFETY: pointer and length describe a family, which is all that a bind to a name of the kernel's choice reads.
    check(unsafe {
        libc::bind(
            listener.as_raw_fd(),
            (&raw const family).cast(),
            size_of::<libc::sa_family_t>() as libc::socklen_t,
        )
    })?;
    socket::listen(listener.as_fd(), 1)?;
    Ok(listener)
}

#[cfg(test)]
mod tests;
