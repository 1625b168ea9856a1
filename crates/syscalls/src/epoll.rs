//! epoll(7) and eventfd(2): waits for readiness of many descriptors.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::pidfd::Pidfd;
use crate::{Errno, check, owned};

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
        // SAFETY: epoll_create1() takes no pointers and returns a new descriptor.
        unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }.map(Epoll)
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
    pub fn wait<'a>(&self, buffer: &'a mut [Ready], timeout: Option<Duration>) -> io::Result<&'a [Ready]> {
        let timeout = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
        });
        let most = libc::c_int::try_from(buffer.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: Ready has the layout of epoll_event; pointer and count describe writable memory.
        let result =
            check(unsafe { libc::epoll_wait(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), most, timeout) });
        unless_interrupted(result).map(|count| &buffer[..count])
    }

    /// Waits like [`Epoll::wait`], but `timeout` is not rounded to milliseconds (epoll_pwait2(2), Linux 5.11). Where a seccomp
    /// filter refuses the call, ppoll(2) waits for the epoll instance first: three system calls instead of one.
    pub fn wait_precisely<'a>(&self, buffer: &'a mut [Ready], timeout: Duration) -> io::Result<&'a [Ready]> {
        let most = libc::c_int::try_from(buffer.len()).unwrap_or(libc::c_int::MAX);
        // struct __kernel_timespec has two 64-bit numbers on every architecture.
        let time = [timeout.as_secs().min(i64::MAX as u64) as i64, i64::from(timeout.subsec_nanos())];
        // SAFETY: as in `wait`; the timeout outlives the call, and there is no signal mask.
        let result = check(unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.0.as_raw_fd(),
                buffer.as_mut_ptr().cast::<libc::epoll_event>(),
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
                _ => self.wait(buffer, Some(Duration::ZERO)),
            };
        }
        unless_interrupted(result).map(|count| &buffer[..count])
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

/// A descriptor that an epoll instance watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Number of the descriptor when it was added. It identifies the registration, together with the open file.
    pub descriptor: RawFd,
    /// The events and flags of struct epoll_event.
    pub events: u32,
    pub data: u64,
}

impl Registration {
    /// Returns whether the registration has EPOLLEXCLUSIVE.
    pub fn is_exclusive(&self) -> bool {
        self.events & libc::EPOLLEXCLUSIVE as u32 != 0
    }

    /// Parses /proc/PID/fdinfo/FD of an epoll instance: its registrations with the inodes of their files.
    pub fn listed(fdinfo: &str) -> impl Iterator<Item = (Registration, u64)> {
        fdinfo.lines().filter_map(|line| {
            let field = |name: &str| line.split_once(name)?.1.split_whitespace().next();
            let hexadecimal = |name| u64::from_str_radix(field(name)?, 16).ok();
            let registration = Registration {
                descriptor: field("tfd:")?.parse().ok()?,
                events: hexadecimal("events:")? as u32,
                data: hexadecimal("data:")?,
            };
            Some((registration, hexadecimal("ino:")?))
        })
    }
}

/// A registration in the epoll instance of another process, by duplicates of both descriptors. The other process cannot close the file
/// as long as this value exists.
#[derive(Debug)]
pub struct Borrowed {
    epoll: Epoll,
    /// Has the same number as in the other process.
    descriptor: OwnedFd,
    registration: Registration,
}

impl Borrowed {
    /// Duplicates the descriptors of a process.
    ///
    /// # Errors
    ///
    /// Those of [`Pidfd::duplicate`]; EBUSY: this process uses the number of the descriptor; EINVAL: the number is above RLIMIT_NOFILE.
    pub fn of(process: &Pidfd, epoll: RawFd, registration: Registration) -> io::Result<Borrowed> {
        let epoll = process.duplicate(epoll)?;
        let number = registration.descriptor;
        let epoll = if epoll.as_raw_fd() == number { epoll.try_clone()? } else { epoll };
        let descriptor = at(process.duplicate(number)?, number)?;
        Ok(Borrowed { epoll: Epoll(epoll), descriptor, registration })
    }

    /// Adds the registration (EPOLL_CTL_ADD) as the last of those with EPOLLEXCLUSIVE. The kernel wakes the other process if the file is
    /// ready already.
    pub fn add(&self) -> io::Result<()> {
        let Registration { events, data, .. } = self.registration;
        self.epoll.add(self.descriptor.as_fd(), data, Interest(events))
    }

    /// Removes the registration (EPOLL_CTL_DEL).
    ///
    /// # Errors
    ///
    /// ENOENT: the other process has removed it.
    pub fn remove(&self) -> io::Result<()> {
        self.epoll.remove(self.descriptor.as_fd())
    }
}

impl AsFd for Borrowed {
    /// Returns the duplicate of the watched descriptor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Moves a descriptor to a number. EBUSY: this process uses the number.
fn at(descriptor: OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() == number {
        return Ok(descriptor);
    }
    let moved = duplicate(&descriptor, number)?;
    if moved.as_raw_fd() == number { Ok(moved) } else { Err(Errno::EBUSY.into()) }
}

/// Moves a descriptor to a number from `first` on. EINVAL: the number is above RLIMIT_NOFILE.
pub(crate) fn from(descriptor: OwnedFd, first: RawFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() >= first { Ok(descriptor) } else { duplicate(&descriptor, first) }
}

fn duplicate(descriptor: &OwnedFd, first: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(F_DUPFD_CLOEXEC) takes numbers and returns a new descriptor.
    unsafe { owned(libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first)) }
}

/// A thread that is asked again and again whether it sleeps in epoll_wait(2). When its number is another thread's, the calls fail with ESRCH.
#[derive(Debug)]
pub struct Sleeper {
    call: File,
    runs: File,
    /// Whether `runs` is /proc/PID/schedstat, 20 bytes, and not /proc/PID/status, of which the kernel writes 1,500 for each reading.
    is_short: bool,
}

impl Sleeper {
    /// Opens the files of a thread, at numbers from `first` on.
    ///
    /// # Errors
    ///
    /// ENOENT: there is no such thread; EMFILE; EINVAL: `first` is above RLIMIT_NOFILE.
    pub fn of(thread: u32, first: RawFd) -> io::Result<Sleeper> {
        let open = |name: &str| {
            let file = File::open(format!("/proc/{thread}/{name}"))?;
            from(file.into(), first).map(File::from)
        };
        let call = open("syscall")?;
        // Absent without CONFIG_SCHED_INFO, and zeroes if the kernel does not count.
        let short = match open("schedstat") {
            Ok(file) => Some(file).filter(|file| read(file, runs_of_schedstat).is_ok_and(|runs| runs > 0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let is_short = short.is_some();
        Ok(Sleeper { call, runs: short.map_or_else(|| open("status"), Ok)?, is_short })
    }

    /// Returns the epoll instance, by the descriptor of its process, for which the thread sleeps in epoll_wait(2), epoll_pwait(2) or
    /// epoll_pwait2(2) (/proc/PID/syscall). `None`: the thread runs, or sleeps in another call.
    ///
    /// # Errors
    ///
    /// ESRCH: the thread has ended; EPERM: no right to trace it (ptrace(2)).
    pub fn waits_for(&self) -> io::Result<Option<RawFd>> {
        read(&self.call, |text| Some(first_argument_of_wait(text)))
    }

    /// Returns a number that is the same as before if the thread slept before and has not run since.
    ///
    /// # Errors
    ///
    /// ESRCH: the thread has ended.
    pub fn runs(&self) -> io::Result<u64> {
        read(&self.runs, if self.is_short { runs_of_schedstat } else { switches_of_status })
    }
}

/// Reads a file of a thread from its beginning.
fn read<T>(file: &File, parse: impl FnOnce(&str) -> Option<T>) -> io::Result<T> {
    let mut buffer = [0; 4096];
    let length = file.read_at(&mut buffer, 0)?;
    let text = std::str::from_utf8(&buffer[..length]).ok();
    text.and_then(parse).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns how often a thread has begun to run.
fn runs_of_schedstat(text: &str) -> Option<u64> {
    text.split_whitespace().nth(2)?.parse().ok()
}

/// Returns how often a thread has gone to sleep by itself.
fn switches_of_status(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok())
}

fn first_argument_of_wait(text: &str) -> Option<RawFd> {
    const WAITS: &[libc::c_long] = &[
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
    ];
    let mut words = text.split_whitespace();
    let call: libc::c_long = words.next()?.parse().ok()?;
    let argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    WAITS.contains(&call).then_some(argument as RawFd)
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An eventfd: readable from [`EventFd::signal`] until [`EventFd::clear`].
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Opens an eventfd, close-on-exec and non-blocking.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: eventfd() takes no pointers and returns a new descriptor.
        unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(EventFd)
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
    use std::io::Write;
    use std::net::Shutdown;
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
        let mut buffer = [Ready::NONE; 4];
        assert!(epoll.wait(&mut buffer, Some(Duration::ZERO)).unwrap().is_empty());
        ours.write_all(b"x").unwrap();
        let ready = epoll.wait(&mut buffer, None).unwrap();
        assert_eq!((ready.len(), ready[0].token(), ready[0].readable()), (1, 7, true));
        assert!(!ready[0].failed() && !ready[0].ended());
        ours.shutdown(Shutdown::Write).unwrap();
        assert!(epoll.wait(&mut buffer, None).unwrap()[0].ended());
        epoll.remove(theirs.as_fd()).unwrap();
        assert!(epoll.wait(&mut buffer, Some(Duration::ZERO)).unwrap().is_empty());
    }

    #[test]
    fn the_fdinfo_of_an_epoll_instance_is_parsed() {
        let text = "pos:\t0\ntfd:        5 events: 10000019 data:     7f0000000005  pos:0 ino:1a sdev:9\n\
                    tfd: 11 events: 1 data: b pos:0\n";
        let found = Registration { descriptor: 5, events: 0x1000_0019, data: 0x7f00_0000_0005 };
        assert_eq!(Registration::listed(text).collect::<Vec<_>>(), [(found, 0x1a)]);
        assert!(found.is_exclusive());
    }

    #[test]
    fn a_number_in_use_is_refused() {
        let (epoll, (ours, _theirs)) = (Epoll::new().unwrap(), UnixStream::pair().unwrap());
        let this = Pidfd::of_process(std::process::id()).unwrap();
        let registration = Registration { descriptor: ours.as_raw_fd(), events: 1, data: 7 };
        let refused = Borrowed::of(&this, epoll.as_fd().as_raw_fd(), registration).unwrap_err();
        assert_eq!(Errno::of(&refused), Some(Errno::EBUSY));
    }

    #[test]
    fn a_sleeping_thread_names_its_epoll_instance() {
        let text = format!("{} 0x9 0x7f13 0x200 0xffffffff 0x0 0x8 0x7ffd 0x7f13\n", libc::SYS_epoll_pwait);
        assert_eq!(first_argument_of_wait(&text), Some(9));
        for text in ["running\n", "-1 0x7ffd 0x7f13\n", "0 0x9 0x7f13\n", ""] {
            assert_eq!(first_argument_of_wait(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_told_from_one_that_has_run() {
        let (epoll, (mut ours, theirs)) = (Epoll::new().unwrap(), UnixStream::pair().unwrap());
        epoll.add(theirs.as_fd(), 7, Interest::READ.and(Interest::EDGE)).unwrap();
        let number = epoll.as_fd().as_raw_fd();
        thread::scope(|scope| {
            let (sender, threads) = std::sync::mpsc::channel();
            let epoll = &epoll;
            scope.spawn(move || {
                // SAFETY: gettid() takes no arguments.
                sender.send(unsafe { libc::gettid() } as u32).unwrap();
                (0..2).for_each(|_| drop(epoll.wait(&mut [Ready::NONE], None)));
            });
            let id = threads.recv().unwrap();
            let short = Sleeper::of(id, 100).unwrap();
            assert!(short.call.as_raw_fd() >= 100 && short.runs.as_raw_fd() >= 100);
            // As on a kernel without schedstat.
            let long = Sleeper {
                call: File::open(format!("/proc/{id}/syscall")).unwrap(),
                runs: File::open(format!("/proc/{id}/status")).unwrap(),
                is_short: false,
            };
            let asleep = || {
                while short.waits_for().unwrap() != Some(number) {
                    thread::yield_now();
                }
                [short.runs().unwrap(), long.runs().unwrap()]
            };
            let before = asleep();
            assert_eq!(asleep(), before);
            ours.write_all(b"x").unwrap();
            let begun = Instant::now();
            while asleep().iter().zip(before).any(|(now, before)| *now == before) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it has run");
            }
            ours.write_all(b"x").unwrap();
            while short.waits_for().is_ok() {
                thread::yield_now();
            }
            assert_eq!(short.waits_for().map_err(|error| Errno::of(&error)), Err(Some(Errno::ESRCH)));
            assert_eq!(Sleeper::of(id, 0).map(drop).unwrap_err().kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn a_precise_wait_may_be_shorter_than_a_millisecond() {
        fn check() {
            const TIMEOUT: Duration = Duration::from_micros(100);
            /// On a busy machine a wait may take longer than a millisecond, but not every wait. A signal may end one early.
            const DEADLINE: Duration = Duration::from_secs(60);
            let epoll = Epoll::new().unwrap();
            let mut buffer = [Ready::NONE; 4];
            let begun = Instant::now();
            loop {
                let before = Instant::now();
                assert!(epoll.wait_precisely(&mut buffer, TIMEOUT).unwrap().is_empty());
                if (TIMEOUT..Duration::from_millis(1)).contains(&before.elapsed()) {
                    break;
                }
                assert!(begun.elapsed() < DEADLINE, "no wait took between 100 us and 1 ms");
            }
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            epoll.add(theirs.as_fd(), 7, Interest::READ.and(Interest::EDGE)).unwrap();
            ours.write_all(b"x").unwrap();
            let ready = epoll.wait_precisely(&mut buffer, DEADLINE).unwrap();
            assert_eq!((ready.len(), ready[0].token(), ready[0].readable()), (1, 7, true));
            assert!(
                epoll.wait_precisely(&mut buffer, Duration::ZERO).unwrap().is_empty(),
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
