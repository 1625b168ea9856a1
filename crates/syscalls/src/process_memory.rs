//! Memory of other processes (process_vm_readv(2)).

use std::io;
use std::net::SocketAddr;

use crate::address::RawAddress;

/// Copies bytes from the memory of a thread, and returns their number, which is less than the room if the memory ends before.
///
/// # Errors
///
/// EFAULT: no memory at the address; EPERM: no right to trace the thread; ESRCH: no such thread.
pub fn read(thread: u32, address: u64, room: &mut [u8]) -> io::Result<usize> {
    let ours = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: room.len() };
    // SAFETY: `ours` describes writable room. The kernel checks the address of the other process, which this process never uses.
    let read =
        unsafe { libc::process_vm_readv(thread as libc::pid_t, &raw const ours, 1, &raw const theirs, 1, 0) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(read as usize) }
}

/// Copies an IP address from the memory of a thread, as the kernel does for bind(2) and connect(2) with this length.
///
/// # Errors
///
/// The errors of [`read`]; EINVAL if the memory or the length is too short for an address of its family, or the family is another.
pub fn read_address(thread: u32, address: u64, length: u64) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let length = usize::try_from(length).unwrap_or(usize::MAX).min(size_of::<libc::sockaddr_in6>());
    let room = &mut raw.bytes_mut()[..length];
    let read = read(thread, address, room)?;
    raw.to_std_of(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_and_a_bad_address_refused() {
        let text = *b"hello";
        let mut room = [0; 5];
        let this = std::process::id();
        assert_eq!(read(this, text.as_ptr() as u64, &mut room).unwrap(), 5);
        assert_eq!(room, text);
        assert_eq!(read(this, 8, &mut room).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
    #[test]
    fn addresses_of_both_families_are_read() {
        let this = std::process::id();
        let read = |bytes: &[u8]| read_address(this, bytes.as_ptr() as u64, bytes.len() as u64).ok();
        let four = [2, 0, 0x1f, 0x90, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(read(&four), Some("127.0.0.1:8080".parse().unwrap()));
        let mut six = [0; 28];
        six[0] = 10;
        six[23] = 1;
        assert_eq!(read(&six), Some("[::1]:0".parse().unwrap()));
        assert_eq!(read(&four[..15]), None);
        assert_eq!(read(&six[..23]), None);
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[1, 0, 47, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None, "another family");
    }
}
