//! An interval timer that interrupts the blocking system calls of one thread, as a sampling profiler does (timer_create(2)).

use std::fs;
use std::io;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::check;

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
