//! Errors of system calls after which the same call may succeed later.

use std::error::Error;
use std::io;

use fourtuple_syscalls::Errno;

/// Returns whether the same system call may succeed later: the host may get descriptors, memory or a route.
pub(crate) fn is_temporary(error: &io::Error) -> bool {
    match error.kind() {
        io::ErrorKind::ConnectionAborted
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::Interrupted
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::OutOfMemory
        | io::ErrorKind::WouldBlock => true,
        _ => matches!(Errno::of(error), Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS)),
    }
}

/// Returns whether the same system call of a server may succeed later: as [`is_temporary`], or another process may give up the address
/// (EADDRINUSE), the device (EBUSY) or watches of epoll (ENOSPC).
pub(crate) fn is_temporary_for_server(error: &io::Error) -> bool {
    is_temporary(error) || matches!(Errno::of(error), Some(Errno::EADDRINUSE | Errno::EBUSY | Errno::ENOSPC))
}

/// Returns whether [`is_temporary_for_server`] is true for the error of a system call in this chain of errors.
pub(crate) fn has_temporary_cause(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(is_temporary_for_server) {
            return true;
        }
        cause = error.source();
    }
    false
}
