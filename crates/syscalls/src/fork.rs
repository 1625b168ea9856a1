//! Noticing a fork: random numbers must not repeat in the child.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

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
