//! Limits and clocks of this process.

use std::io;
use std::time::Duration;

use crate::check;

/// Returns the soft and the hard limit on descriptors (RLIMIT_NOFILE).
pub fn descriptor_limits() -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to writable room for one rlimit.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// Raises the soft limit on descriptors to the hard limit and returns it. Needs no privilege.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let (_, hard) = descriptor_limits()?;
    set_descriptor_limits(hard, hard)?;
    Ok(hard)
}

/// Makes the allocator keep little: at most two arenas for all threads to come. glibc has eight for each processor otherwise, and each keeps
/// what its threads have freed. Nothing happens with another C library.
pub fn keep_little_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt() takes numbers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Returns memory that was freed to the kernel (malloc_trim(3)). Nothing happens with another C library than glibc.
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim() takes a number.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Sets RLIMIT_NOFILE, soft and hard, of this process and its future children.
///
/// # Errors
///
/// EPERM: above the hard limit without CAP_SYS_RESOURCE, or above fs.nr_open.
pub fn set_descriptor_limits(soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: the pointer is to one initialised rlimit, which the kernel only reads.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }).map(drop)
}

/// Returns the CPU time of the calling thread, in user and kernel mode (CLOCK_THREAD_CPUTIME_ID).
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to writable room for one timespec; the clock exists for every thread.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every Linux thread has a CPU clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the time of CLOCK_MONOTONIC. It differs between hosts and between time namespaces (time_namespaces(7)).
pub fn monotonic_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to writable room for one timespec; every kernel has this clock.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0, "every kernel has a monotonic clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns how often the calling thread has given up its processor to wait in the kernel, for example for a lock
/// (ru_nvcsw of getrusage(2)). Preemption does not count.
pub fn voluntary_switches() -> u64 {
    // SAFETY: rusage is plain data for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to writable room for one rusage.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0, "every Linux thread has counters");
    usage.ru_nvcsw.cast_unsigned()
}

/// Returns the CPU time of all threads of this process, in user and kernel mode (CLOCK_PROCESS_CPUTIME_ID).
pub fn process_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to writable room for one timespec; the clock exists for every process.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every Linux process has a CPU clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns CLOCK_MONOTONIC in nanoseconds. All threads and processes of this host share this clock, so their times are
/// comparable.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to writable room for one timespec; the clock exists on every Linux.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0, "every Linux has a monotonic clock");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the columns of the terminal at stdout, or `None` if stdout is not a terminal or its width is unknown.
pub fn terminal_width() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ fills in one winsize through the pointer.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_sleep_is_a_voluntary_switch() {
        let before = voluntary_switches();
        thread::sleep(Duration::from_millis(1));
        assert!(voluntary_switches() > before);
    }
}
