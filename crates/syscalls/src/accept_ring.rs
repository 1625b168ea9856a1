//! io_uring for whoever waits: one-shot accepts and polls, each of which is told of once.
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

/// What came of an operation.
#[derive(Debug)]
pub enum Outcome {
    /// A connection, close-on-exec and non-blocking.
    Accepted(OwnedFd),
    /// There is something to read, or an end.
    Ready,
    /// It was cancelled. An accept may have been woken for somebody all the same, and nobody else was then.
    Cancelled,
    /// It failed.
    Failed(io::Error),
}

/// A ring of one thread: the one that made it.
pub struct AcceptRing {
    ring: IoUring,
    /// Operations whose completion is still to come.
    under_way: usize,
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
        Ok(AcceptRing { ring, under_way: 0 })
    }

    /// Whether an accept of a non-blocking listener waits for somebody and can be cancelled, found by trying. Older kernels
    /// answer it with EAGAIN at once.
    pub fn waits(&mut self) -> io::Result<bool> {
        let listener = nobodys_listener()?;
        self.accept(0, listener.as_fd())?;
        self.wait(Some(Duration::ZERO))?;
        if self.outcome().is_some() {
            return Ok(false);
        }
        self.cancel(0)?;
        self.wait(Some(Duration::from_secs(1)))?;
        Ok(matches!(self.outcome(), Some((0, Outcome::Cancelled))))
    }

    /// Asks for the next connection of `listener`, which must stay open until the next [`wait`](AcceptRing::wait).
    /// `token`, as those of all operations, is below 2^62. The waiter is the last in the listener's queue of waiters
    /// (`io_async_queue_proc`) and leaves it when it is woken.
    pub fn accept(&mut self, token: u64, listener: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let descriptor = Fd(listener.as_raw_fd());
        let entry = opcode::Accept::new(descriptor, ptr::null_mut(), ptr::null_mut()).flags(flags).build();
        self.push(entry.user_data(token & TOKEN | ACCEPT))?;
        self.under_way += 1;
        Ok(())
    }

    /// Asks to be told when `descriptor` has something to read or has come to an end. It must stay open until the next
    /// [`wait`](AcceptRing::wait); from then on the ring holds it open until the operation is over.
    pub fn poll(&mut self, token: u64, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(descriptor.as_raw_fd()), events).build();
        self.push(entry.user_data(token & TOKEN))?;
        self.under_way += 1;
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
    /// EEXIST: another thread than the one that made the ring.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
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
        // SAFETY: an entry of this ring has no pointer but null: the kernel reads and writes no memory for it.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for AcceptRing {
    /// Waits until nothing is under way, so that whoever closes a descriptor afterwards closes it then. In another thread
    /// than its own that is left to the kernel, which does it a little later.
    fn drop(&mut self) {
        let begun = Instant::now();
        let all = opcode::AsyncCancel2::new(io_uring::types::CancelBuilder::any()).build().user_data(CANCEL);
        while self.under_way > 0 && begun.elapsed() < Duration::from_secs(1) {
            if self.push(all.clone()).is_err() || self.wait(Some(Duration::from_millis(1))).is_err() {
                break;
            }
            // An accepted connection that nobody asked for is closed.
            while self.outcome().is_some() {}
        }
        while self.outcome().is_some() {}
    }
}

/// A listener that nobody can know of.
fn nobodys_listener() -> io::Result<OwnedFd> {
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket() takes no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, flags, 0) })?;
    // SAFETY: the call above gave a fresh descriptor that nobody else owns.
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
