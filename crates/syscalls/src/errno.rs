//! Error numbers (errno(3)) and numbers of signals, for crates that do not use libc.

pub use libc::{
    EADDRINUSE, EADDRNOTAVAIL, EBADF, EBUSY, ECONNREFUSED, ECONNRESET, EINVAL, EIO, EMFILE, EMSGSIZE,
    ENOPROTOOPT, ENOSYS, ENOTSOCK, EPERM, EPIPE, EPROTO, ESRCH, ETIMEDOUT, SIGCHLD, SIGCONT,
};
