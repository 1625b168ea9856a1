//! Descriptors of another language's runtime in the same process.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use crate::check;

/// Returns a duplicate of a descriptor that another runtime of this process owns, such as the interpreter of Python: fcntl(2) with
/// F_DUPFD_CLOEXEC.
///
/// A number does not prove that its file stays open. If the other runtime closes the number meanwhile, calls with the duplicate
/// still reach the same socket, and never a file that got the number later.
///
/// # Errors
///
/// EBADF: the number is not open. EMFILE: the process has no further descriptor.
pub fn duplicate(descriptor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer. It only adds a descriptor, also if `descriptor` is not open.
    let duplicate = check(unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) })?;
    // SAFETY: the call has just returned this descriptor, and no other code has its number.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_duplicate_outlives_the_closed_number() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let copy = duplicate(socket.as_raw_fd()).unwrap();
        drop(socket);
        assert_eq!(UdpSocket::from(copy).local_addr().unwrap(), address);
        assert_eq!(duplicate(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
