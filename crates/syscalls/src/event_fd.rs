//! eventfd(2): a descriptor that one thread makes readable to wake another.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check;

/// An eventfd: readable from [`EventFd::signal`] until [`EventFd::clear`].
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Opens an eventfd, close-on-exec and non-blocking.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: eventfd() takes no pointers.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: the call above returned a new descriptor, which has no other owner.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        let one = 1_u64;
        // The write fails only if the counter is at its maximum, when the descriptor is readable anyway. SAFETY: the
        // pointer is to eight initialised bytes, which the kernel only reads.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Resets the descriptor to not readable and returns whether it was readable.
    pub fn clear(&self) -> bool {
        let mut value = 0_u64;
        // SAFETY: the pointer is to eight writable bytes.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut value).cast(), 8) == 8 }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_wakeups_are_one_event() {
        let event = EventFd::new().unwrap();
        assert!(!event.clear());
        event.signal();
        event.signal();
        assert!(event.clear());
        assert!(!event.clear());
    }
}
