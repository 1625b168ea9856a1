//! fork(2): worker processes that inherit descriptors and shared memory; and noticing a fork, since random numbers must not
//! repeat in the child.

use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::check;

/// A number that is the same for all threads of this process and differs from the one its parent had.
///
/// It lives on a page of its own that the kernel empties in a child (MADV_WIPEONFORK, Linux 4.14), so asking costs one
/// load and no system call. Where that advice is refused it is the process id, asked for every time.
pub fn generation() -> u32 {
    static PAGE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(cell) = PAGE.get_or_init(wiped_page) else {
        return std::process::id();
    };
    match cell.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            cell.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// A forked process. Dropping it neither ends it nor waits for it.
#[derive(Debug)]
pub struct Process(libc::pid_t);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

/// Runs `body` in a child process, which ends with its answer as exit code (101 after a panic), or when the thread that
/// called this ends (PR_SET_PDEATHSIG).
///
/// # Errors
///
/// This process has several threads, whose locks the child could find taken for ever; or fork() failed.
pub fn run_in_child(body: impl FnOnce() -> i32) -> io::Result<Process> {
    if fs::read_dir("/proc/self/task")?.count() > 1 {
        return Err(io::Error::other("fork() needs a process with one thread"));
    }
    // SAFETY: there is no other thread, so that the child finds no lock taken and no state half changed.
    let child = check(unsafe { libc::fork() })?;
    if child != 0 {
        return Ok(Process(child));
    }
    // SAFETY: prctl() takes plain numbers here.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0) };
    // What the parent would do at its end is not the child's.
    let code = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(101);
    // SAFETY: _exit takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}

impl Process {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.0.cast_unsigned()
    }

    /// SIGKILL.
    pub fn kill(&self) -> io::Result<()> {
        // SAFETY: kill(2) takes no pointers; the process is a child that nobody has waited for, so its number is its own.
        check(unsafe { libc::kill(self.0, libc::SIGKILL) }).map(drop)
    }

    /// waitpid(2): waits until it has ended, and says how.
    pub fn wait(self) -> io::Result<End> {
        let mut status = 0;
        loop {
            // SAFETY: the status is writable for the length of the call.
            match check(unsafe { libc::waitpid(self.0, &raw mut status, 0) }) {
                Ok(_) if libc::WIFEXITED(status) => return Ok(End::Exited(libc::WEXITSTATUS(status))),
                Ok(_) => return Ok(End::Killed(libc::WTERMSIG(status))),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn wiped_page() -> Option<&'static AtomicU32> {
    const LENGTH: usize = 4096;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no memory in use.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            LENGTH,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range is the mapping made above.
    if unsafe { libc::madvise(page, LENGTH, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: the mapping made above, to which no reference exists.
        unsafe { libc::munmap(page, LENGTH) };
        return None;
    }
    // SAFETY: the page is zeroed, aligned for a u32, never unmapped, and only ever used through this atomic.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_child_has_a_generation_of_its_own() {
        let parent = super::generation();
        assert_eq!(parent, super::generation());
        // SAFETY: the child only makes async-signal-safe calls (a load, getpid, _exit).
        let child = unsafe { libc::fork() };
        if child == 0 {
            let differs = super::generation() != parent;
            // SAFETY: _exit takes no pointers and does not return.
            unsafe { libc::_exit(if differs { 42 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: the status is writable for the length of the call, and the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 42);
    }
}
