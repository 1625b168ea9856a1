//! One-shot accept and poll operations of io_uring, each with exactly one completion.
//!
//! No operation of the ring reads or writes memory of the process, so the ring can be dropped at any time.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::{check, ring, socket};

/// Bit in the user data of an accept operation, whose result is a descriptor.
const ACCEPT: u64 = 1 << 63;
/// Bit in the user data of a cancel operation.
const CANCEL: u64 = 1 << 62;
const TOKEN: u64 = CANCEL - 1;
/// Number of entries in the submission queue.
const ENTRIES: u32 = 256;
/// Number of entries in the completion queue. The kernel buffers further completions (IORING_FEAT_NODROP).
const COMPLETIONS: u32 = 1024;

/// The result of an operation.
#[derive(Debug)]
pub enum Outcome {
    /// A connection, close-on-exec and non-blocking.
    Accepted(OwnedFd),
    /// The descriptor is readable or has reached its end.
    Ready,
    /// The operation was cancelled. A cancelled accept may have consumed the wakeup for a connection, which then woke no other waiter.
    Cancelled,
    Failed(io::Error),
}

/// An io_uring instance for the thread that created it.
pub struct AcceptRing {
    ring: IoUring,
    in_progress: usize,
    /// A submission failed. The queued entry names a descriptor that may be closed by now, so nothing is submitted any
    /// more.
    is_broken: bool,
}

impl AcceptRing {
    /// Creates a ring that processes completions only while its thread waits for them (IORING_SETUP_DEFER_TASKRUN), so
    /// that completions never interrupt the thread.
    ///
    /// # Errors
    ///
    /// ENOSYS, EPERM: io_uring is disabled on this host. EINVAL: before Linux 6.1.
    pub fn new() -> io::Result<AcceptRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(ENTRIES)?;
        Ok(AcceptRing { ring, in_progress: 0, is_broken: false })
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

    /// Submits an accept of the next connection of `listener`. The ring keeps the listener open until the operation has
    /// completed. `token`, like the token of each operation, is below 2^62. The kernel adds the waiter to the end of
    /// the listener's wait queue (`io_async_queue_proc`) and removes it when it is woken.
    pub fn accept(&mut self, token: u64, listener: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let descriptor = Fd(listener.as_raw_fd());
        let entry = opcode::Accept::new(descriptor, ptr::null_mut(), ptr::null_mut()).flags(flags).build();
        self.push(entry.user_data(token & TOKEN | ACCEPT))?;
        self.submit_last()
    }

    /// Submits a poll that completes when `descriptor` is readable or has reached its end. The ring keeps the
    /// descriptor open until the operation has completed.
    pub fn poll(&mut self, token: u64, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
        let entry = opcode::PollAdd::new(Fd(descriptor.as_raw_fd()), events).build();
        self.push(entry.user_data(token & TOKEN))?;
        self.submit_last()
    }

    /// Submits the operation that was queued last, while its descriptor is borrowed. If the entry waited in the queue,
    /// its descriptor number could belong to a different file when the kernel reads it.
    fn submit_last(&mut self) -> io::Result<()> {
        let submitted = self.submit();
        self.is_broken |= submitted.is_err();
        self.in_progress += usize::from(submitted.is_ok());
        submitted
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            ring::persist(|| self.ring.submit())?;
        }
        Ok(())
    }

    /// Cancels the accept under `token`. Its outcome follows and may still be a connection.
    pub fn cancel(&mut self, token: u64) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(token & TOKEN | ACCEPT).build();
        self.push(entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(CANCEL))
    }

    /// Submits the queued operations and waits until an operation completes, a signal arrives or `timeout` expires
    /// (`None`: no timeout).
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
        ring::without_completion(result)
    }

    /// Returns the next completed operation, with its token.
    pub fn outcome(&mut self) -> Option<(u64, Outcome)> {
        loop {
            let completion = self.ring.completion().next()?;
            let (data, result) = (completion.user_data(), completion.result());
            // The result of a cancel operation does not matter: the cancelled operation has a completion of its own.
            if data & ACCEPT == 0 && data & CANCEL != 0 {
                continue;
            }
            self.in_progress -= 1;
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
        // SAFETY: the entries of this ring have null pointers only, so the kernel reads and writes no memory for them.
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
    /// Waits until no operation is in progress, so that a later close() of a descriptor takes effect at once. When
    /// another thread drops the ring, the kernel cancels the operations a little later.
    fn drop(&mut self) {
        let begun = Instant::now();
        let all = opcode::AsyncCancel2::new(io_uring::types::CancelBuilder::any()).build().user_data(CANCEL);
        while self.in_progress > 0 && begun.elapsed() < Duration::from_secs(1) {
            if self.push(all.clone()).is_err() || self.wait(Some(Duration::from_millis(1))).is_err() {
                break;
            }
            // An accept without a caller may complete with a connection; dropping the outcome closes it.
            while self.outcome().is_some() {}
        }
        while self.outcome().is_some() {}
    }
}

/// Opens a listener whose address no other process knows.
fn private_listener() -> io::Result<OwnedFd> {
    let listener = socket::open_unix(libc::SOCK_STREAM)?;
    let family = libc::AF_UNIX as libc::sa_family_t;
    // SAFETY: pointer and length describe an address family only; bind() then chooses an abstract name and reads
    // nothing else.
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
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::Errno;
    use crate::signals::IntervalTimer;

    /// Returns a ring, or `None` if io_uring is disabled on this host.
    fn ring() -> Option<AcceptRing> {
        match AcceptRing::new() {
            Ok(ring) => Some(ring),
            Err(error) => {
                assert!(
                    matches!(Errno::of(&error), Some(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL)),
                    "{error}"
                );
                None
            }
        }
    }

    #[test]
    fn accepts_and_polls_complete_once() {
        let Some(mut ring) = ring() else { return };
        assert!(ring.waits().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        ring.accept(1, listener.as_fd()).unwrap();
        ring.wait(Some(Duration::ZERO)).unwrap();
        assert!(ring.outcome().is_none());
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ring.wait(None).unwrap();
        let Some((1, Outcome::Accepted(server))) = ring.outcome() else {
            panic!("no connection was accepted")
        };
        ring.poll(2, server.as_fd()).unwrap();
        ring.wait(Some(Duration::ZERO)).unwrap();
        assert!(ring.outcome().is_none());
        client.write_all(b"x").unwrap();
        ring.wait(None).unwrap();
        assert!(matches!(ring.outcome(), Some((2, Outcome::Ready))));
        ring.wait(Some(Duration::ZERO)).unwrap();
        assert!(ring.outcome().is_none());
    }

    #[test]
    fn a_cancelled_accept_loses_no_connection() {
        let Some(mut ring) = ring() else { return };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for _ in 0..50 {
            ring.accept(1, listener.as_fd()).unwrap();
            ring.wait(Some(Duration::ZERO)).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            ring.cancel(1).unwrap();
            let outcome = loop {
                ring.wait(Some(Duration::from_secs(60))).unwrap();
                if let Some((1, outcome)) = ring.outcome() {
                    break outcome;
                }
            };
            match outcome {
                Outcome::Accepted(_) => {}
                Outcome::Cancelled => drop(listener.accept().unwrap()),
                other => panic!("{other:?}"),
            }
            drop(client);
        }
    }

    #[test]
    fn dropping_a_ring_releases_its_descriptors() {
        let Some(mut ring) = ring() else { return };
        let (mut near, far) = UnixStream::pair().unwrap();
        ring.poll(1, far.as_fd()).unwrap();
        ring.wait(Some(Duration::ZERO)).unwrap();
        drop(ring);
        drop(far);
        // A child of another test has a copy of the descriptor until exec() or its end.
        let error = loop {
            if let Err(error) = near.write(b"x") {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_pending_accept_keeps_its_listener_open() {
        let Some(mut ring) = ring() else { return };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        ring.accept(1, listener.as_fd()).unwrap();
        // The descriptor number of the closed listener may be reused; the request must not refer to the new file.
        drop(listener);
        let _other = UnixStream::pair().unwrap();
        let _client = TcpStream::connect(address).unwrap();
        ring.wait(Some(Duration::from_secs(60))).unwrap();
        assert!(matches!(ring.outcome(), Some((1, Outcome::Accepted(_)))));
    }

    #[test]
    fn signals_do_not_change_what_the_probe_finds() {
        let Some(mut ring) = ring() else { return };
        let before = IntervalTimer::signals();
        let _timer = IntervalTimer::for_this_thread(Duration::from_micros(20)).unwrap();
        while IntervalTimer::signals() < before + 1000 {
            assert!(ring.waits().unwrap());
        }
    }
}
