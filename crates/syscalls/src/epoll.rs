//! epoll(7): waits for readiness of many descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::{Errno, check};

/// The events of a descriptor to report, and the mode of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(u32);

impl Interest {
    /// Readable, or the peer closed its sending half.
    pub const READ: Interest = Interest(libc::EPOLLIN as u32 | libc::EPOLLRDHUP as u32);
    /// A connection to accept. EPOLL_CTL_ADD allows no other flag of this list with [`Interest::EXCLUSIVE`] (EINVAL).
    pub const ACCEPT: Interest = Interest(libc::EPOLLIN as u32);
    /// Writable. For a connecting socket: connected or failed.
    pub const WRITE: Interest = Interest(libc::EPOLLOUT as u32);
    /// Edge-triggered: reported once per change.
    pub const EDGE: Interest = Interest(libc::EPOLLET as u32);
    /// One-shot: reported once, then disabled until the next [`Epoll::modify`].
    pub const ONESHOT: Interest = Interest(libc::EPOLLONESHOT as u32);
    /// EPOLLEXCLUSIVE: an event wakes only one of several epoll instances that watch the descriptor (Linux 4.5).
    pub const EXCLUSIVE: Interest = Interest(libc::EPOLLEXCLUSIVE as u32);

    /// Combines two interests.
    #[must_use]
    pub const fn and(self, other: Interest) -> Interest {
        Interest(self.0 | other.0)
    }
}

/// A descriptor that is ready.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Ready(libc::epoll_event);

impl Ready {
    /// An empty entry, to fill the buffer of [`Epoll::wait`].
    pub const NONE: Ready = Ready(libc::epoll_event { events: 0, u64: 0 });

    /// Returns the token that the descriptor was added with.
    pub fn token(&self) -> u64 {
        self.0.u64
    }

    /// Returns whether data or the end of the stream can be read.
    pub fn readable(&self) -> bool {
        self.0.events & (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }

    /// Returns whether the descriptor is writable, or connect() has finished.
    pub fn writable(&self) -> bool {
        self.0.events & (libc::EPOLLOUT | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }

    /// Returns whether the peer has closed its sending half or the whole connection, so that reads reach the end of the
    /// stream.
    pub fn ended(&self) -> bool {
        self.0.events & (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0
    }

    /// Returns whether an error is pending, which SO_ERROR returns.
    pub fn failed(&self) -> bool {
        self.0.events & libc::EPOLLERR as u32 != 0
    }
}

/// Returns whether epoll_ctl(2) refused only this watch: the user has no watches left (ENOSPC, `fs.epoll.max_user_watches`), the kernel
/// no memory (ENOMEM), a filter forbids the call or the file has no poll (EPERM), or the descriptor is the reason (EEXIST, ENOENT,
/// ELOOP). Any other error is of the epoll instance or of the arguments.
pub fn is_watch_refused(error: &io::Error) -> bool {
    matches!(
        Errno::of(error),
        Some(Errno::ENOSPC | Errno::ENOMEM | Errno::EPERM | Errno::EEXIST | Errno::ENOENT | Errno::ELOOP)
    )
}

/// An epoll instance: a set of watched descriptors.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// Opens an epoll instance (epoll_create1(2)).
    pub fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1() takes no pointers.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the call above returned a new descriptor, which has no other owner.
        Ok(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds `descriptor` to the set. Closing all copies of the descriptor removes it.
    pub fn add(&self, descriptor: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, descriptor, token, interest)
    }

    /// Changes the interest in a descriptor.
    pub fn modify(&self, descriptor: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, descriptor, token, interest)
    }

    /// Removes `descriptor` from the set.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, descriptor, 0, Interest(0))
    }

    fn control(
        &self,
        operation: libc::c_int,
        descriptor: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.0, u64: token };
        // SAFETY: the pointer is to one initialised event, which the kernel only reads.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), operation, descriptor.as_raw_fd(), &raw mut event)
        })
        .map(drop)
    }

    /// Waits until a descriptor is ready, a signal arrives or `timeout` expires (in whole milliseconds, rounded up;
    /// `None`: no timeout). Returns the ready descriptors.
    pub fn wait<'a>(&self, room: &'a mut [Ready], timeout: Option<Duration>) -> io::Result<&'a [Ready]> {
        let timeout = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
        });
        let most = libc::c_int::try_from(room.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: Ready has the layout of epoll_event; pointer and count describe the writable room.
        let result =
            check(unsafe { libc::epoll_wait(self.0.as_raw_fd(), room.as_mut_ptr().cast(), most, timeout) });
        unless_interrupted(result).map(|count| &room[..count])
    }

    /// Waits like [`Epoll::wait`], but `timeout` is not rounded to milliseconds (epoll_pwait2(2), Linux 5.11). Where a seccomp
    /// filter refuses the call, ppoll(2) waits for the epoll instance first: three system calls instead of one.
    pub fn wait_precisely<'a>(&self, room: &'a mut [Ready], timeout: Duration) -> io::Result<&'a [Ready]> {
        let most = libc::c_int::try_from(room.len()).unwrap_or(libc::c_int::MAX);
        // struct __kernel_timespec has two 64-bit numbers on every architecture.
        let time = [timeout.as_secs().min(i64::MAX as u64) as i64, i64::from(timeout.subsec_nanos())];
        // SAFETY: as in `wait`; the timeout outlives the call, and there is no signal mask.
        let result = check(unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.0.as_raw_fd(),
                room.as_mut_ptr().cast::<libc::epoll_event>(),
                most,
                time.as_ptr(),
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            ) as libc::c_int
        });
        if result.as_ref().is_err_and(|error| matches!(Errno::of(error), Some(Errno::ENOSYS | Errno::EPERM)))
        {
            let mut entry = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let timeout =
                libc::timespec { tv_sec: time[0] as libc::time_t, tv_nsec: time[1] as libc::c_long };
            // SAFETY: one pollfd, a timespec that outlives the call, and no signal mask.
            let polled =
                check(unsafe { libc::ppoll(&raw mut entry, 1, &raw const timeout, std::ptr::null()) });
            return match unless_interrupted(polled)? {
                0 => Ok(&[]),
                _ => self.wait(room, Some(Duration::ZERO)),
            };
        }
        unless_interrupted(result).map(|count| &room[..count])
    }
}

/// Returns the number of ready descriptors: none if a signal interrupted the call.
fn unless_interrupted(result: io::Result<libc::c_int>) -> io::Result<usize> {
    match result {
        Ok(count) => Ok(count as usize),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(error),
    }
}

impl std::os::fd::AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::seccomp::{self, Facility};

    #[test]
    fn events_carry_the_token_of_their_descriptor() {
        let epoll = Epoll::new().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        epoll.add(theirs.as_fd(), 7, Interest::READ).unwrap();
        let mut room = [Ready::NONE; 4];
        assert!(epoll.wait(&mut room, Some(Duration::ZERO)).unwrap().is_empty());
        ours.write_all(b"x").unwrap();
        let ready = epoll.wait(&mut room, None).unwrap();
        assert_eq!((ready.len(), ready[0].token(), ready[0].readable()), (1, 7, true));
        assert!(!ready[0].failed() && !ready[0].ended());
        ours.shutdown(Shutdown::Write).unwrap();
        assert!(epoll.wait(&mut room, None).unwrap()[0].ended());
        epoll.remove(theirs.as_fd()).unwrap();
        assert!(epoll.wait(&mut room, Some(Duration::ZERO)).unwrap().is_empty());
    }

    #[test]
    fn a_precise_wait_may_be_shorter_than_a_millisecond() {
        fn check() {
            const TIMEOUT: Duration = Duration::from_micros(100);
            /// On a busy machine a wait may take longer than a millisecond, but not every wait. A signal may end one early.
            const DEADLINE: Duration = Duration::from_secs(60);
            let epoll = Epoll::new().unwrap();
            let mut room = [Ready::NONE; 4];
            let begun = Instant::now();
            loop {
                let before = Instant::now();
                assert!(epoll.wait_precisely(&mut room, TIMEOUT).unwrap().is_empty());
                if (TIMEOUT..Duration::from_millis(1)).contains(&before.elapsed()) {
                    break;
                }
                assert!(begun.elapsed() < DEADLINE, "no wait took between 100 us and 1 ms");
            }
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            epoll.add(theirs.as_fd(), 7, Interest::READ.and(Interest::EDGE)).unwrap();
            ours.write_all(b"x").unwrap();
            let ready = epoll.wait_precisely(&mut room, DEADLINE).unwrap();
            assert_eq!((ready.len(), ready[0].token(), ready[0].readable()), (1, 7, true));
            assert!(
                epoll.wait_precisely(&mut room, Duration::ZERO).unwrap().is_empty(),
                "the edge was reported"
            );
        }
        check();
        let refused = || {
            seccomp::refuse(Facility::EpollPwait2).unwrap();
            check();
        };
        thread::spawn(refused).join().unwrap();
    }
}
