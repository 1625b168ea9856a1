//! Counters in memory that forked processes share.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

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
    /// Maps room for `count` numbers, at least one.
    ///
    /// # Errors
    ///
    /// ENOMEM, also for more numbers than an address space has room for.
    pub fn new(count: usize) -> io::Result<Counters> {
        Counters::map(count, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps room for `count` numbers, at least one, at the start of a file, which gets the necessary length. Other processes can
    /// map the same numbers.
    ///
    /// # Errors
    ///
    /// The errors of ftruncate(2) and mmap(2); ENOMEM, without a change of the file, for more numbers than an address space has room for.
    pub fn in_file(file: &File, count: usize) -> io::Result<Counters> {
        file.set_len(length(count.max(1))? as u64)?;
        Counters::map(count, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(count: usize, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<Counters> {
        let count = count.max(1);
        Ok(Counters { first: map(length(count)?, flags, descriptor)?.cast(), count })
    }

    /// Returns all counters.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has room for `count` numbers, is aligned to a page, zeroed, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Returns the bytes of `count` numbers. ENOMEM: an address space has no room for them.
fn length(count: usize) -> io::Result<usize> {
    let length = count.checked_mul(size_of::<AtomicU64>()).filter(|length| isize::try_from(*length).is_ok());
    length.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Maps anonymous memory, which processes forked later share.
pub(crate) fn map_anonymous(length: usize) -> io::Result<NonNull<u8>> {
    map(length, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
}

fn map(length: usize, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<NonNull<u8>> {
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
    use std::os::fd::FromRawFd;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::check;

    #[test]
    fn counters_larger_than_the_address_space_are_refused() {
        // The size in bytes wraps to 8, room for one number.
        // SAFETY: the name ends in NUL; on success the call returns a new descriptor, which has no other owner.
        let file = unsafe {
            File::from_raw_fd(check(libc::memfd_create(c"counters".as_ptr(), libc::MFD_CLOEXEC)).unwrap())
        };
        for count in [usize::MAX / 8 + 2, usize::MAX / 16 + 1, usize::MAX] {
            assert_eq!(Counters::new(count).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
            assert_eq!(Counters::in_file(&file, count).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
            assert_eq!(file.metadata().unwrap().len(), 0);
        }
    }

    #[test]
    fn numbers_begin_at_zero_and_are_kept() {
        let counters = Counters::new(1000).unwrap();
        assert!(counters.all().iter().all(|number| number.load(Ordering::Relaxed) == 0));
        counters.all()[999].fetch_add(7, Ordering::Relaxed);
        assert_eq!((counters.all().len(), counters.all()[999].load(Ordering::Relaxed)), (1000, 7));
    }
}
