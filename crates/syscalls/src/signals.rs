//! The signal mask of a thread, signals as data of a descriptor (signalfd(2)), and timers that interrupt the blocking system calls of a
//! thread, as a sampling profiler does (timer_create(2)).

use std::fs;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{check, owned};

pub use libc::{SIGCHLD, SIGCONT};

/// Returns whether this process ignores a signal, as programs started by nohup(1) ignore SIGHUP.
///
/// # Errors
///
/// EINVAL: there is no such signal.
pub fn is_ignored(signal: i32) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call only writes the current one, which outlives the call.
    check(unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) })?;
    // SAFETY: the call has succeeded, so it has written the action.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}

/// A signal mask of a thread.
#[derive(Clone, Copy)]
pub struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Mask")
    }
}

/// Blocks all signals of the calling thread that can be blocked, and returns the mask from before.
pub fn block_all() -> io::Result<Mask> {
    set(&full())
}

/// Returns whether a signal is pending that ends this process once it is not blocked: SIGHUP, SIGINT, SIGQUIT or SIGTERM.
pub fn is_to_end() -> io::Result<bool> {
    let mut pending = MaybeUninit::uninit();
    // SAFETY: the call writes the set, which outlives it.
    check(unsafe { libc::sigpending(pending.as_mut_ptr()) })?;
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: sigpending() has written the set.
        if unsafe { libc::sigismember(pending.as_ptr(), signal) } == 1 && !is_ignored(signal)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Mask {
    /// Makes this mask the mask of the calling thread.
    pub fn restore(&self) -> io::Result<()> {
        set(&self.0).map(drop)
    }
}

fn full() -> libc::sigset_t {
    let mut all = MaybeUninit::uninit();
    // SAFETY: sigfillset() initialises the set that the pointer names, and cannot fail with a valid pointer.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        all.assume_init()
    }
}

fn set(mask: &libc::sigset_t) -> io::Result<Mask> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: the call reads one set and writes one set; both outlive the call.
    match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, before.as_mut_ptr()) } {
        // SAFETY: the call has succeeded, so it has written the set.
        0 => Ok(Mask(unsafe { before.assume_init() })),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// A signal that was sent to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The number of the signal.
    pub number: i32,
    /// Whether the kernel sent the signal, as for Ctrl-C, and not a process.
    pub is_from_kernel: bool,
    /// The process that sent the signal; 0 for the kernel.
    pub sender: u32,
}

/// A descriptor that is readable when a blocked signal is pending.
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

impl SignalFd {
    /// Creates a non-blocking descriptor for all signals. The calling thread must have blocked them.
    pub fn new() -> io::Result<SignalFd> {
        let all = full();
        // SAFETY: the call reads one set, which outlives it, and returns a new descriptor.
        unsafe { owned(libc::signalfd(-1, &raw const all, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)) }
            .map(SignalFd)
    }

    /// Returns the next pending signal; `None` if there is none.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut record = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let length = mem::size_of::<libc::signalfd_siginfo>();
        // SAFETY: the pointer is to writable memory of this length.
        let result = unsafe { libc::read(self.0.as_raw_fd(), record.as_mut_ptr().cast(), length) };
        if result == length as isize {
            // SAFETY: the kernel has written a whole record.
            let record = unsafe { record.assume_init() };
            let is_from_kernel = record.ssi_code == libc::SI_KERNEL;
            let sender = if is_from_kernel { 0 } else { record.ssi_pid };
            return Ok(Some(Signal { number: record.ssi_signo as i32, is_from_kernel, sender }));
        }
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Stops this process until SIGCONT, also if signals are blocked.
pub fn stop_this_process() -> io::Result<()> {
    // SAFETY: raise() takes a number.
    check(unsafe { libc::raise(libc::SIGSTOP) }).map(drop)
}

/// Number of signals that the handler has received, in all threads of the process.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

/// A timer that sends SIGALRM to the thread that created it, until it is dropped.
///
/// The handler only counts. It is installed without SA_RESTART, so each blocking system call fails with EINTR. The
/// handler stays installed for the life of the process.
#[derive(Debug)]
pub struct IntervalTimer(libc::timer_t);

// SAFETY: a timer belongs to the process; any thread may delete it.
unsafe impl Send for IntervalTimer {}

impl IntervalTimer {
    /// Sends a signal to the calling thread every `period`, which is at least 1 us.
    ///
    /// # Errors
    ///
    /// EAGAIN: RLIMIT_SIGPENDING is reached.
    pub fn for_this_thread(period: Duration) -> io::Result<IntervalTimer> {
        install_handler()?;
        // SAFETY: sigevent is plain data for which all zeroes is a valid value.
        let mut event: libc::sigevent = unsafe { mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: gettid() takes no arguments.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut id: libc::timer_t = ptr::null_mut();
        // SAFETY: the kernel reads one sigevent and writes the timer id.
        check(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) })?;
        let timer = IntervalTimer(id);
        let period = period.max(Duration::from_micros(1));
        let interval = libc::timespec {
            tv_sec: libc::time_t::try_from(period.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(period.subsec_nanos().cast_signed()),
        };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        // SAFETY: the timer was created above; the kernel reads one itimerspec, and the pointer for the old value is
        // null.
        check(unsafe { libc::timer_settime(timer.0, 0, &raw const times, ptr::null_mut()) })?;
        Ok(timer)
    }

    /// Returns the number of signals that timers of this process have delivered so far.
    pub fn signals() -> u64 {
        SIGNALS.load(Ordering::Relaxed)
    }
}

impl Drop for IntervalTimer {
    fn drop(&mut self) {
        // SAFETY: this value created the timer and deletes it once.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Sends SIGALRM to every other thread of this process again and again until it is dropped, with the handler of [`IntervalTimer`]:
/// threads that a library has started are interrupted too.
#[derive(Debug)]
pub struct SignalStorm {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SignalStorm {
    /// Starts the thread that sends a signal to each thread every `period`.
    ///
    /// # Errors
    ///
    /// The thread cannot be created.
    pub fn start(period: Duration) -> io::Result<SignalStorm> {
        install_handler()?;
        let stop = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&stop);
        let thread = thread::Builder::new().spawn(move || {
            while !over.load(Ordering::Acquire) {
                signal_other_threads();
                thread::sleep(period);
            }
        })?;
        Ok(SignalStorm { stop, thread: Some(thread) })
    }
}

impl Drop for SignalStorm {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

fn signal_other_threads() {
    // SAFETY: getpid() and gettid() take no arguments.
    let (process, own) = unsafe { (libc::getpid(), libc::gettid()) };
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
    for thread in threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<libc::pid_t>().ok()) {
        if thread != own {
            // SAFETY: tgkill() takes numbers. It fails for a thread that has ended.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGALRM) };
        }
    }
}

extern "C" fn count(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Installs the handler, which is never removed: a signal of another thread's timer may be pending, and its default
/// action ends the process.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let errno = INSTALLED.get_or_init(|| {
        // SAFETY: sigaction is plain data for which all zeroes is a valid value: no flags, and no signal masked.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = count as *const () as libc::sighandler_t;
        // SAFETY: the handler is async-signal-safe (one atomic addition), and the pointer for the old action is null.
        let installed = check(unsafe { libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut()) });
        installed.err().and_then(|error| error.raw_os_error())
    });
    errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_read_and_the_mask_restored() {
        std::thread::spawn(|| {
            let before = block_all().unwrap();
            let signals = SignalFd::new().unwrap();
            assert_eq!(signals.next().unwrap(), None);
            // SAFETY: pthread_kill() of the calling thread takes numbers.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
            let sender = std::process::id();
            let expected = Signal { number: libc::SIGUSR1, is_from_kernel: false, sender };
            assert_eq!(signals.next().unwrap(), Some(expected));
            assert!(!is_to_end().unwrap());
            // SAFETY: as above.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGTERM) };
            assert!(is_to_end().unwrap());
            assert_eq!(signals.next().unwrap().map(|signal| signal.number), Some(libc::SIGTERM));
            assert!(!is_to_end().unwrap());
            before.restore().unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn blocking_calls_are_interrupted_until_the_timer_is_dropped() {
        let interrupted = || {
            // SAFETY: poll() of no descriptors reads no memory.
            let result = check(unsafe { libc::poll(ptr::null_mut(), 0, 50) });
            result.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted)
        };
        let timer = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
        assert!(interrupted());
        assert!(!thread::spawn(interrupted).join().unwrap(), "other threads are left alone");
        drop(timer);
        assert!(!interrupted());
        assert!(IntervalTimer::signals() > 0);
    }
}
