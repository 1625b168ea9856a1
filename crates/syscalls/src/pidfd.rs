//! pidfd_open(2) and pidfd_getfd(2): processes by descriptor, and duplicates of their descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Opens a process. The descriptor refers to this process also after the number is used again; it keeps nothing of the process
/// alive.
///
/// # Errors
///
/// ESRCH: there is no such process. ENOSYS before Linux 5.3.
pub fn open(process: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open(2) takes no pointers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })
}

/// Duplicates a descriptor of another process into this process, with FD_CLOEXEC. Both refer to the same open file: a socket is
/// closed when the last of them is.
///
/// # Errors
///
/// EBADF: the process has no such descriptor. EPERM: this process may not trace the other one (ptrace(2),
/// PTRACE_MODE_ATTACH_REALCREDS). ESRCH: the process has ended. ENOSYS before Linux 5.6.
pub fn duplicate(process: BorrowedFd<'_>, descriptor: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_getfd(2) takes no pointers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), descriptor, 0) })
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created the descriptor for this call, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(result as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::socket::{self, Transport};

    #[test]
    fn a_duplicate_is_the_same_socket() {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = socket::open(Transport::Udp, address, false).unwrap();
        let own = open(std::process::id()).unwrap();
        let duplicate = duplicate(own.as_fd(), socket.as_raw_fd()).unwrap();
        assert_eq!(
            crate::option::cookie(duplicate.as_fd()).unwrap(),
            crate::option::cookie(socket.as_fd()).unwrap()
        );
        let number = socket.as_raw_fd();
        drop((socket, duplicate));
        let error = super::duplicate(own.as_fd(), number + 1_000_000).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
