//! The stop flag of the workers.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag for busy workers, and a descriptor that becomes readable for workers in epoll_wait().
#[derive(Clone, Debug)]
pub(crate) struct Stop(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    set: AtomicBool,
    ours: UnixStream,
    theirs: UnixStream,
}

impl Stop {
    pub(crate) fn new() -> io::Result<Stop> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok(Stop(Arc::new(Inner { set: AtomicBool::new(false), ours, theirs })))
    }

    /// Sets the flag and wakes all workers.
    pub(crate) fn set(&self) {
        self.0.set.store(true, Ordering::Release);
        // The end of the stream makes the descriptor readable in each epoll, and it stays readable.
        let _ = self.0.ours.shutdown(Shutdown::Both);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.set.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.theirs.as_fd()
    }
}
