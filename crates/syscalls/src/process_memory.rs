//! Memory of other processes (process_vm_readv(2)).

use std::io;

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
}
