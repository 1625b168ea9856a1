//! CPU affinity, priority and timer slack of the calling thread.

use std::io;
use std::mem;

use crate::{Errno, check};

/// Returns the processors that the calling thread may run on, in ascending order (sched_getaffinity(2)).
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // SAFETY: cpu_set_t is plain data for which all zeroes is a valid value: no processor.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: pointer and size describe writable memory for one set; 0 is the calling thread.
    check(unsafe { libc::sched_getaffinity(0, mem::size_of_val(&set), &raw mut set) })?;
    // SAFETY: CPU_ISSET only reads the set, and no number is past its end.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect())
}

/// Restricts the calling thread, and threads that it starts later, to this processor (sched_setaffinity(2)).
///
/// # Errors
///
/// EINVAL: there is no such processor, or this thread may not use it.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    pin_among(&[cpu])
}

/// Restricts the calling thread, and threads and processes that it starts later, to these processors
/// (sched_setaffinity(2)).
///
/// # Errors
///
/// EINVAL: this thread may use none of them, or a number is too large for a cpu_set_t.
pub fn pin_among(cpus: &[usize]) -> io::Result<()> {
    if cpus.iter().any(|cpu| *cpu >= libc::CPU_SETSIZE as usize) {
        return Err(io::Error::from(Errno::EINVAL));
    }
    // SAFETY: cpu_set_t is plain data for which all zeroes is a valid value: no processor.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in cpus {
        // SAFETY: the check above ensures that the number is within the set.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    // SAFETY: pointer and size describe one initialised set, which the kernel only reads; 0 is the calling thread.
    check(unsafe { libc::sched_setaffinity(0, mem::size_of_val(&set), &raw const set) }).map(drop)
}

/// Sets SCHED_BATCH: the calling thread, and threads that it starts later, do not preempt other threads when they wake.
/// Needs no privilege.
pub fn give_way() -> io::Result<()> {
    // SAFETY: sched_param is plain data for which zero is a value, the only one that SCHED_BATCH takes.
    let parameters: libc::sched_param = unsafe { mem::zeroed() };
    // SAFETY: the call reads one sched_param; 0 is the calling thread.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) }).map(drop)
}

/// Sets a nice value of -20 (setpriority(2)): the calling thread, and threads that it starts later, preempt other
/// threads as soon as they wake.
///
/// # Errors
///
/// EACCES without CAP_SYS_NICE in the initial user namespace, or RLIMIT_NICE.
pub fn go_first() -> io::Result<()> {
    // SAFETY: the call takes numbers only; for Linux 0 is the calling thread, not its process.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) }).map(drop)
}

/// Sets a timer slack of 1 ns (PR_SET_TIMERSLACK): sleeps of the calling thread end on time, not up to 50 us later.
pub fn sleep_precisely() -> io::Result<()> {
    let slack: libc::c_ulong = 1;
    // SAFETY: this operation takes a number and no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, slack) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_pinned_thread_has_one_processor() {
        let allowed = allowed_cpus().unwrap();
        let last = *allowed.last().unwrap();
        let pinned = thread::spawn(move || pin_to(last).and_then(|()| allowed_cpus())).join().unwrap();
        assert_eq!(pinned.unwrap(), [last]);
        assert_eq!(allowed_cpus().unwrap(), allowed, "other threads stay as they were");
        let among = allowed.clone();
        let several = thread::spawn(move || pin_among(&among).and_then(|()| allowed_cpus())).join().unwrap();
        assert_eq!(several.unwrap(), allowed);
        assert!(thread::spawn(|| pin_among(&[])).join().unwrap().is_err(), "on none it could not run");
        for nowhere in [libc::CPU_SETSIZE as usize - 1, usize::MAX] {
            let error = thread::spawn(move || pin_to(nowhere)).join().unwrap().unwrap_err();
            assert_eq!(Errno::of(&error), Some(Errno::EINVAL));
        }
    }

    #[test]
    fn going_first_is_a_setting_of_the_thread() {
        // SAFETY: the call takes numbers only.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        match thread::spawn(move || go_first().map(|()| nice())).join().unwrap() {
            Ok(after) => assert_eq!(after, -20),
            Err(error) => assert_eq!(Errno::of(&error), Some(Errno::EACCES)),
        }
        assert_eq!(nice(), before, "other threads stay as they were");
    }

    #[test]
    fn slack_is_a_setting_of_the_thread() {
        let slack = || {
            sleep_precisely().unwrap();
            // SAFETY: this operation takes no pointers.
            unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) }
        };
        assert_eq!(thread::spawn(slack).join().unwrap(), 1);
    }
}
