//! Counters in memory that forked processes share.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use crate::{Errno, check};

/// Name of a sealed file of counters in /proc/PID/fd.
const SEALED: &CStr = c"fourtuple-counters";

/// 64-bit counters in anonymous memory mapped with MAP_SHARED, visible to all threads and to processes that are forked
/// later. All start at 0.
#[derive(Debug)]
pub struct Counters {
    first: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the memory is mapped for as long as the value lives, and is only ever used through atomics.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    /// Maps memory for `count` numbers, at least one.
    ///
    /// # Errors
    ///
    /// ENOMEM, also for more numbers than fit into an address space.
    pub fn new(count: usize) -> io::Result<Counters> {
        Counters::map(count, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps memory for `count` numbers, at least one, of a file without a name (memfd_create(2)), which is returned too. Other processes
    /// can map the same numbers. The file is sealed: no process can change its size, after which access would end in SIGBUS.
    ///
    /// # Errors
    ///
    /// The errors of memfd_create(2), ftruncate(2), mmap(2) and fcntl(2); ENOMEM for more numbers than fit into an address space.
    pub fn in_sealed_file(count: usize) -> io::Result<(Counters, File)> {
        let length = length(count.max(1))? as u64;
        let create = |flags| {
            // SAFETY: the name ends in NUL.
            check(unsafe {
                libc::memfd_create(SEALED.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags)
            })
        };
        // MFD_NOEXEC_SEAL exists since Linux 6.3, and the sysctl vm.memfd_noexec=2 requires it.
        let descriptor = match create(libc::MFD_NOEXEC_SEAL) {
            Err(error) if Errno::of(&error) == Some(Errno::EINVAL) => create(0),
            result => result,
        }?;
        // SAFETY: the kernel has just returned this descriptor, and no other code owns it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(length)?;
        let counters = Counters::map(count, libc::MAP_SHARED, file.as_raw_fd())?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: the call takes numbers only.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Ok((counters, file))
    }

    fn map(count: usize, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<Counters> {
        let count = count.max(1);
        Ok(Counters { first: map(length(count)?, flags, descriptor)?.cast(), count })
    }

    /// Returns all counters.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is as large as `count` numbers, is aligned to a page, zeroed, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Returns the bytes of `count` numbers. ENOMEM: they do not fit into an address space.
fn length(count: usize) -> io::Result<usize> {
    let length = count.checked_mul(size_of::<AtomicU64>()).filter(|length| isize::try_from(*length).is_ok());
    length.ok_or_else(|| io::Error::from(Errno::ENOMEM))
}

/// Maps anonymous memory, which processes forked later share.
pub(crate) fn map_anonymous(length: usize) -> io::Result<NonNull<u8>> {
    map(length, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
}

/// Maps memory to read and write, of a file or, with MAP_ANONYMOUS and the descriptor -1, of none.
pub(crate) fn map(length: usize, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so that the mapping touches no memory in use.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, descriptor, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap() gave address 0"))
}

/// Returns whether the file system of a file allows to execute it (no mount option `noexec`).
pub fn is_executable(file: &File) -> bool {
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the kernel chooses the address, and nothing accesses the mapping.
    let address =
        unsafe { libc::mmap(std::ptr::null_mut(), 1, protection, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    if address == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the mapping was made above, and no reference to it exists.
    unsafe { libc::munmap(address, 1) };
    true
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this address with this length (the product did not wrap there), and no reference to it exists.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn counters_larger_than_the_address_space_are_refused() {
        // The size in bytes wraps to 8, as for one number.
        for count in [usize::MAX / 8 + 2, usize::MAX / 16 + 1, usize::MAX] {
            assert_eq!(Counters::new(count).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
            assert_eq!(Counters::in_sealed_file(count).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        }
    }

    #[test]
    fn no_process_can_change_the_size_of_a_sealed_file() {
        let (counters, file) = Counters::in_sealed_file(3).unwrap();
        let again = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        for length in [0, 1 << 20] {
            assert_eq!(again.set_len(length).unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        counters.all()[2].fetch_add(7, Ordering::Relaxed);
        assert_eq!((file.metadata().unwrap().len(), counters.all()[2].load(Ordering::Relaxed)), (24, 7));
    }

    #[test]
    fn numbers_begin_at_zero_and_are_kept() {
        let counters = Counters::new(1000).unwrap();
        assert!(counters.all().iter().all(|number| number.load(Ordering::Relaxed) == 0));
        counters.all()[999].fetch_add(7, Ordering::Relaxed);
        assert_eq!((counters.all().len(), counters.all()[999].load(Ordering::Relaxed)), (1000, 7));
    }
}
