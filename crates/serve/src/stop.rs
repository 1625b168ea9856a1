//! How the workers are told to end, wherever they are.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag for those who are busy, and a descriptor that becomes readable for those who wait in epoll.
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

    /// Tells everybody.
    pub(crate) fn set(&self) {
        self.0.set.store(true, Ordering::Release);
        // The end of the stream is there for all epolls, and for as long as they look.
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
