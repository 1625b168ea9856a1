//! Descriptors of another language's runtime in the same process.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// Calls `use_it` with a descriptor that another runtime of this process owns, such as the interpreter of Python.
///
/// A number does not prove that its file stays open: the caller must prevent that the other runtime closes it meanwhile, in Python by
/// the interpreter's lock. A duplicate would need no such condition, and costs two system calls.
///
/// # Errors
///
/// EBADF: the number is negative, as that of a closed socket in Python. A number without an open file is an error of the calls that
/// `use_it` makes.
pub fn lend<R>(descriptor: RawFd, use_it: impl FnOnce(BorrowedFd<'_>) -> R) -> io::Result<R> {
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the number is not -1, and no copy of it outlives this call. That it stays open is up to the caller. No memory depends on
    // it: without an open file the kernel answers EBADF, and with another one the calls fail or act on that file, as they would if
    // the other runtime had made them.
    Ok(use_it(unsafe { BorrowedFd::borrow_raw(descriptor) }))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::socket::local_address;

    #[test]
    fn a_lent_descriptor_stays_open() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = lend(socket.as_raw_fd(), |lent| local_address(lent).unwrap()).unwrap();
        assert_eq!(socket.local_addr().unwrap(), address);
        assert_eq!(lend(-1, |_| ()).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
