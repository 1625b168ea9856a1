//! A BPF array of one value, in this process's memory.

use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use fourtuple_syscalls::Errno;

/// A type that the kernel, BPF programs and forked processes may change at any time.
///
/// # Safety
///
/// All fields are atomics or never read; zeroes and any other bytes are a valid value.
pub(crate) unsafe trait AllAtomic: Sync {}

/// The mapped value of a map with [`MMAPABLE`](crate::call::MMAPABLE). Forked children share it.
#[derive(Debug)]
pub(crate) struct Shared<T: AllAtomic> {
    value: NonNull<T>,
    owns: PhantomData<T>,
}

// SAFETY: it gives out `&T` alone, which AllAtomic makes Sync; the mapping belongs to the process, not to a thread.
unsafe impl<T: AllAtomic> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: AllAtomic> Sync for Shared<T> {}

impl<T: AllAtomic> Shared<T> {
    /// Maps the only value of the array.
    pub(crate) fn map(array: BorrowedFd<'_>) -> io::Result<Shared<T>> {
        // SAFETY: a mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mem::size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                array.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let value = NonNull::new(start.cast::<T>()).ok_or_else(|| io::Error::from(Errno::EFAULT))?;
        Ok(Shared { value, owns: PhantomData })
    }
}

impl<T: AllAtomic> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, as long as a T, and stays until drop; the kernel refuses to map more pages
        // than the array has. AllAtomic allows others to write meanwhile.
        unsafe { self.value.as_ref() }
    }
}

impl<T: AllAtomic> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that was made above, and no reference outlives self.
        unsafe { libc::munmap(self.value.as_ptr().cast(), mem::size_of::<T>()) };
    }
}
