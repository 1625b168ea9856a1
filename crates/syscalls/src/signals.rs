//! The signal mask of a thread, and signals as data of a descriptor (signalfd(2)).

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

use crate::check;

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
        // SAFETY: the call reads one set, which outlives it.
        let descriptor =
            check(unsafe { libc::signalfd(-1, &raw const all, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
        // SAFETY: the kernel has just returned this descriptor, and no other code owns it.
        Ok(SignalFd(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// Returns the next pending signal; `None` if there is none.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut record = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let length = mem::size_of::<libc::signalfd_siginfo>();
        // SAFETY: the pointer is to writable room of this length.
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
}
