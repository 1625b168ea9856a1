//! The system calls that fourtuple makes, one file per kernel facility.
//!
//! This crate is internal to `fourtuple` and promises no stability: any version may change its API.
//!
//! This crate decides nothing. It takes [`BorrowedFd`](std::os::fd::BorrowedFd), returns
//! [`OwnedFd`], and turns -1 into an [`io::Error`] with the errno. `unsafe` is allowed only here
//! and in the crate `bpf`. Linux only.
#![allow(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

#[cfg(feature = "io-uring")]
pub mod accept_ring;
mod address;
pub mod boot;
pub mod child;
pub mod datagram;
#[cfg(feature = "io-uring")]
pub mod datagram_ring;
pub mod device;
pub mod epoll;
pub mod fork;
pub mod neighbour;
#[doc(hidden)]
pub mod netlink;
pub mod netns;
pub mod option;
#[cfg(feature = "io-uring")]
pub mod parking;
pub mod pidfd;
pub mod privileges;
pub mod procfs;
pub mod qdisc;
pub mod resource;
#[cfg(feature = "io-uring")]
pub mod ring;
pub mod route;
pub mod schedule;
pub mod seccomp;
pub mod shared;
pub mod signals;
pub mod sock_diag;
pub mod socket;
pub mod socket_census;
pub mod unix_diag;
pub mod unix_socket;
pub mod veth;

pub use address::{Endpoint, EndpointParseError};

/// Converts the result of a call that returns -1 on failure.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Converts the result of a call that returns a new descriptor, or -1 on failure.
///
/// # Safety
///
/// A descriptor other than -1 has no other owner.
unsafe fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the caller promises that nothing else owns the descriptor.
    check(result).map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Returns whether the error of a connect() that took this time may be caused by the source address: no route from it, a prohibiting
/// route, a rule of a cgroup, a device that is down, or a loopback source for a destination elsewhere.
///
/// "Unreachable" may also be an ICMP message from the network (`icmp_err_convert`). After 100 ms it counts as one, because another source
/// would take as long again.
pub fn is_of_source(error: &io::Error, took: Duration) -> bool {
    const AT_ONCE: Duration = Duration::from_millis(100);
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput | io::ErrorKind::NetworkDown => true,
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => took < AT_ONCE,
        _ => false,
    }
}

/// An error number of a system call. Code compares numbers, never names: a name that a table lacks would make a comparison false without
/// any message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident)*) => {
        /// The errnos of Linux. EWOULDBLOCK, ENOTSUP and EDEADLOCK are other names of EAGAIN, EOPNOTSUPP and EDEADLK.
        impl Errno {
            $(pub const $name: Errno = Errno(libc::$name);)*
            /// A number of the kernel's own that bpf(2) returns: the architecture has no trampolines.
            pub const ENOTSUPP: Errno = Errno(524);

            /// All errnos that have a name, in the order of `asm-generic/errno.h`.
            pub const ALL: &[Errno] = &[$(Errno::$name,)* Errno::ENOTSUPP];

            /// Returns the name in errno(3); `None` for a number that Linux does not use.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Errno::$name => Some(stringify!($name)),)*
                    Errno::ENOTSUPP => Some("ENOTSUPP"),
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT ENOTBLK EBUSY EEXIST EXDEV ENODEV ENOTDIR
    EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS
    ENOTEMPTY ELOOP ENOMSG EIDRM ECHRNG EL2NSYNC EL3HLT EL3RST ELNRNG EUNATCH ENOCSI EL2HLT EBADE EBADR EXFULL ENOANO EBADRQC EBADSLT
    EBFONT ENOSTR ENODATA ETIME ENOSR ENONET ENOPKG EREMOTE ENOLINK EADV ESRMNT ECOMM EPROTO EMULTIHOP EDOTDOT EBADMSG EOVERFLOW
    ENOTUNIQ EBADFD EREMCHG ELIBACC ELIBBAD ELIBSCN ELIBMAX ELIBEXEC EILSEQ ERESTART ESTRPIPE EUSERS ENOTSOCK EDESTADDRREQ EMSGSIZE
    EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT ESOCKTNOSUPPORT EOPNOTSUPP EPFNOSUPPORT EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN
    ENETUNREACH ENETRESET ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN ETOOMANYREFS ETIMEDOUT ECONNREFUSED EHOSTDOWN
    EHOSTUNREACH EALREADY EINPROGRESS ESTALE EUCLEAN ENOTNAM ENAVAIL EISNAM EREMOTEIO EDQUOT ENOMEDIUM EMEDIUMTYPE ECANCELED ENOKEY
    EKEYEXPIRED EKEYREVOKED EKEYREJECTED EOWNERDEAD ENOTRECOVERABLE ERFKILL EHWPOISON
}

impl Errno {
    pub const fn new(number: i32) -> Errno {
        Errno(number)
    }

    /// Returns the errno of an error; `None` if the error is not of a system call.
    pub fn of(error: &io::Error) -> Option<Errno> {
        error.raw_os_error().map(Errno)
    }

    pub const fn number(self) -> i32 {
        self.0
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => formatter.pad(name),
            None => write!(formatter, "errno {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.0)
    }
}

/// The name of an error in messages. Not a string, so that no code compares it: [`Errno::of`] is for comparisons.
#[derive(Clone, Copy, Debug)]
pub struct ErrnoName(Result<Errno, io::ErrorKind>);

/// Returns the name of the errno of an error, `errno N` for a number without a name, or the description of an error without an errno.
pub fn errno_name(error: &io::Error) -> ErrnoName {
    ErrnoName(Errno::of(error).ok_or_else(|| error.kind()))
}

impl fmt::Display for ErrnoName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ok(errno) => fmt::Display::fmt(&errno, formatter),
            Err(kind) => fmt::Display::fmt(&kind, formatter),
        }
    }
}

impl From<ErrnoName> for Cow<'static, str> {
    fn from(name: ErrnoName) -> Cow<'static, str> {
        match name.0.ok().and_then(Errno::name) {
            Some(known) => Cow::Borrowed(known),
            None => Cow::Owned(name.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_errno_of_linux_has_a_name() {
        // asm-generic/errno.h leaves out 41 (EWOULDBLOCK) and 58 (EDEADLOCK). Other architectures number some errnos differently.
        if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
            let nameless: Vec<_> = (1..=133).filter(|number| Errno(*number).name().is_none()).collect();
            assert_eq!(nameless, [41, 58]);
        }
        let names: BTreeSet<_> = Errno::ALL.iter().map(|errno| errno.name()).collect();
        assert_eq!((names.len(), names.contains(&None)), (132, false));
        assert_eq!(Errno::of(&io::Error::from_raw_os_error(libc::EWOULDBLOCK)), Some(Errno::EAGAIN));
        assert_eq!(Errno::new(libc::ENOTSUP), Errno::EOPNOTSUPP);
    }

    #[test]
    fn unknown_errors_have_a_number_or_a_description() {
        let shown = |error: io::Error| errno_name(&error).to_string();
        assert_eq!(shown(Errno::EPROTO.into()), "EPROTO");
        assert_eq!(shown(Errno::new(4_000).into()), "errno 4000");
        assert_eq!(shown(io::ErrorKind::TimedOut.into()), "timed out");
        assert_eq!(format!("{:>7}|{:?}", Errno::EPIPE, Errno::ENONET), "  EPIPE|ENONET");
    }
}
