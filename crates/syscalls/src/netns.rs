//! Network and user namespaces, and the loopback device within.

use std::fs::{self, File};
use std::io;
use std::mem;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::check;
use crate::device;
use crate::option;
use crate::socket::{self, Transport};

/// Moves the calling thread into a new, empty network namespace and sets its loopback device up.
///
/// The namespace ends with the last thread and socket within it; there is nothing to put back. Needs CAP_SYS_ADMIN (or
/// [`become_root_of_new_user_namespace`] first).
pub fn enter_new() -> io::Result<()> {
    // SAFETY: unshare() takes no pointers; CLONE_NEWNET concerns this thread only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    set_loopback_up()
}

/// Finds out whether [`enter_new`] would be allowed, by making a network namespace and going back.
pub fn try_new() -> io::Result<()> {
    let home = current()?;
    // SAFETY: unshare() takes no pointers; CLONE_NEWNET concerns this thread only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    enter(home.as_fd())
}

/// Moves the calling thread into a network namespace that there is: what [`current`] gave, or an open `/proc/PID/ns/net`.
///
/// # Errors
///
/// EPERM without CAP_SYS_ADMIN, both here and in the user namespace that the other one belongs to; EINVAL for any other file.
pub fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: setns() takes no pointers; it concerns this thread only.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
}

/// The calling thread's network namespace, for [`enter`] and for devices that are to be there. It stays as long as this is open.
pub fn current() -> io::Result<OwnedFd> {
    Ok(File::open("/proc/thread-self/ns/net")?.into())
}

/// Moves this process into a user namespace in which it is root, so that it may make network namespaces.
///
/// Works without privilege, where the host allows it, and only while the process has one thread (EINVAL otherwise).
pub fn become_root_of_new_user_namespace() -> io::Result<()> {
    // SAFETY: geteuid() and getegid() take no pointers and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: unshare() takes no pointers; the kernel refuses it when there are other threads.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    // Without this the kernel refuses a group map to the unprivileged (user_namespaces(7)).
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// Makes `command` start in a new user namespace, as its root, and in a new network namespace with loopback up: for
/// callers with several threads, which cannot move themselves.
pub fn start_in_new(command: &mut Command) {
    let enter = || {
        become_root_of_new_user_namespace()?;
        enter_new()
    };
    // SAFETY: the closure runs in the forked child before exec. Besides system calls it allocates small strings, which
    // glibc allows after a fork, and it takes no lock that another thread of the parent may hold.
    unsafe { command.pre_exec(enter) };
}

/// The number of the calling thread's network namespace, which no other one gets as long as the host runs
/// (SO_NETNS_COOKIE, Linux 5.14); the inode of /proc/self/ns/net is given to the next namespace when one ends.
pub fn identity() -> io::Result<u64> {
    let probe = control_socket(SocketAddr::from(([0, 0, 0, 0], 0)))?;
    option::get_u64(probe.as_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// Not in every libc (include/uapi/asm-generic/socket.h).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Adds an IPv6 address to the loopback device, as a single host (/128).
pub fn add_loopback_address(address: Ipv6Addr) -> io::Result<()> {
    // Without duplicate address detection: a kernel worker that ends it may be late, and until then bind(2) fails.
    device::add_address("lo", address.into(), 128)
}

/// Sets the loopback device of the calling thread's network namespace up, which gives it 127.0.0.1/8 and ::1.
pub fn set_loopback_up() -> io::Result<()> {
    let control = control_socket(SocketAddr::from(([0, 0, 0, 0], 0)))?;
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one ifreq with a terminated name.
    check(unsafe { libc::ioctl(control.as_fd().as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) }).map(drop)
}

fn control_socket(family: SocketAddr) -> io::Result<OwnedFd> {
    socket::open(Transport::Udp, family, false)
}
