//! An interval timer that interrupts the blocking system calls of one thread, as a sampling profiler does (timer_create(2)).

use std::io;
use std::mem;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::check;

/// Signals that the handler has taken, in all threads of the process.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

/// A timer that sends SIGALRM to the thread that made it, until it is dropped.
///
/// The handler only counts, and is installed without SA_RESTART: each waiting system call fails with EINTR. The handler stays installed for the life of the process.
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
        // SAFETY: one sigevent, which the kernel reads, and room for the timer's number.
        check(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) })?;
        let timer = IntervalTimer(id);
        let period = period.max(Duration::from_micros(1));
        let interval = libc::timespec {
            tv_sec: libc::time_t::try_from(period.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(period.subsec_nanos().cast_signed()),
        };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        // SAFETY: the timer was made above; the kernel reads one itimerspec, and the old one is not asked for.
        check(unsafe { libc::timer_settime(timer.0, 0, &raw const times, ptr::null_mut()) })?;
        Ok(timer)
    }

    /// Signals that timers of this process have delivered so far.
    pub fn signals() -> u64 {
        SIGNALS.load(Ordering::Relaxed)
    }
}

impl Drop for IntervalTimer {
    fn drop(&mut self) {
        // SAFETY: the timer was made by this value and is deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

extern "C" fn count(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Never taken back: a signal of another thread's timer may be on its way, and its default action ends the process.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let errno = INSTALLED.get_or_init(|| {
        // SAFETY: sigaction is plain data for which all zeroes is a valid value: no flags, and no signal masked.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = count as *const () as libc::sighandler_t;
        // SAFETY: the handler is async-signal-safe (one atomic addition); the old action is not asked for.
        let installed = check(unsafe { libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut()) });
        installed.err().and_then(|error| error.raw_os_error())
    });
    errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_call_that_waits_is_interrupted_until_the_timer_is_dropped() {
        let interrupted = || {
            // SAFETY: no descriptors, 50 ms.
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
