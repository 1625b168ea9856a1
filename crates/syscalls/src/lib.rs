//! The system calls that fourtuple makes, one file per kernel facility.
//!
//! This crate is internal to `fourtuple` and promises no stability: any version may change its API.
//!
//! This crate decides nothing. It takes [`BorrowedFd`](std::os::fd::BorrowedFd), returns
//! [`OwnedFd`](std::os::fd::OwnedFd), and turns -1 into an [`io::Error`] with the errno. `unsafe` is allowed only here
//! and in the crate `bpf`. Linux only.
#![allow(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::io;
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
pub mod errno;
pub mod fork;
#[doc(hidden)]
pub mod fuzzing;
pub mod neighbour;
mod netlink;
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

// The modules by further names, under which other crates import parts of them.
pub use datagram as membarrier;
pub use epoll as event_fd;
pub use resource as allocator;
pub use resource as resolver;
pub use seccomp as architecture;
pub use seccomp as process_memory;
pub use seccomp as user_notification;
pub use signals as interval_timer;
pub use socket as foreign;
pub use socket as inherited;
pub use unix_socket as message;
pub use unix_socket as socket_path;

pub use address::{Endpoint, EndpointParseError};
pub use errno::{Errno, errno_name};

/// Converts the result of a call that returns -1 on failure.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
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
