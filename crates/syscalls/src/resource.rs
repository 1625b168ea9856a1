//! Limits and clocks of this process, and what its C library and its allocator do.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::time::Duration;

use crate::check;

/// Returns the soft and the hard limit on descriptors (RLIMIT_NOFILE).
pub fn descriptor_limits() -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to writable memory for one rlimit.
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
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the time of CLOCK_MONOTONIC. It differs between hosts and between time namespaces (time_namespaces(7)).
pub fn monotonic_time() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

/// Returns how often the calling thread has given up its processor to wait in the kernel, for example for a lock
/// (ru_nvcsw of getrusage(2)). Preemption does not count.
pub fn voluntary_switches() -> u64 {
    // SAFETY: rusage is plain data for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to writable memory for one rusage.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0, "every Linux thread has counters");
    usage.ru_nvcsw.cast_unsigned()
}

/// Returns the CPU time of all threads of this process, in user and kernel mode (CLOCK_PROCESS_CPUTIME_ID).
pub fn process_cpu_time() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns CLOCK_MONOTONIC in nanoseconds. All threads and processes of this host share this clock, so their times are
/// comparable.
pub fn monotonic_ns() -> u64 {
    let time = monotonic_time();
    time.as_secs() * 1_000_000_000 + u64::from(time.subsec_nanos())
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to writable memory for one timespec.
    let result = unsafe { libc::clock_gettime(id, &raw mut time) };
    assert_eq!(result, 0, "every Linux has the clock {id}");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the columns of the terminal at stdout, or `None` if stdout is not a terminal or its width is unknown.
pub fn terminal_width() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ fills in one winsize through the pointer.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

thread_local! {
    // Const-initialised and without a destructor, so that access never allocates and is allowed while a thread ends.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator with a count of the allocations of each thread.
///
/// Make it the `#[global_allocator]` of a test binary.
#[derive(Debug)]
pub struct CountingAllocator;

/// Returns how often the calling thread has allocated or reallocated. Always 0 if [`CountingAllocator`] is not the
/// global allocator.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call passes its arguments to `System` and returns the result unchanged, so the contract of `System`
// holds. The counter is a cell of this thread; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::alloc`].
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller fulfils the contract for `layout`, which is also the contract of `System`.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::alloc_zeroed`].
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller fulfils the contract for `layout`, which is also the contract of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::realloc`].
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the block came from `System` with this layout, through the methods here; the caller promises the rest.
        unsafe { System.realloc(block, layout, size) }
    }

    /// # Safety
    ///
    /// The contract of [`GlobalAlloc::dealloc`].
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block came from `System` with this layout, through the methods here.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Makes getaddrinfo(3) of a static program use /etc/hosts and DNS only, whatever nsswitch.conf(5) says. Does nothing in other programs.
///
/// The other sources are libraries of the host, which a static program loads together with the host's glibc. If that has another
/// version, the process ends by a signal: SIGFPE with glibc 2.36 in the program and 2.41 on the host.
pub fn restrict_static_lookups() {
    #[cfg(all(target_feature = "crt-static", target_env = "gnu"))]
    {
        use std::ffi::{c_char, c_int};

        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        // SAFETY: both are texts with a zero at the end, which glibc copies. It takes a lock of its own.
        let failed = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
        // It fails for names that it does not know.
        debug_assert_eq!(failed, 0);
    }
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
