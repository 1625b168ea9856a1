//! Error numbers (errno(3)) and numbers of signals, for crates that do not use libc.

pub use libc::{
    EBADF, EBUSY, ECONNRESET, EINVAL, EIO, EMFILE, EMSGSIZE, ENOSYS, ENOTSOCK, EPERM, EPIPE, EPROTO, ESRCH,
    SIGCHLD, SIGCONT,
};
