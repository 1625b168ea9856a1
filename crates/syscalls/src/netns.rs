//! Network and user namespaces, and their loopback device.

use std::fs::{self, File};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::Errno;
use crate::check;
use crate::device;
use crate::option;
use crate::route;

/// Moves the calling thread into a new, empty network namespace and sets its loopback device up.
///
/// The namespace ends with its last thread and socket, without cleanup. Needs CAP_SYS_ADMIN (or
/// [`become_root_of_new_user_namespace`] first).
pub fn enter_new() -> io::Result<()> {
    // SAFETY: unshare() takes no pointers; CLONE_NEWNET concerns this thread only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    set_loopback_up()
}

/// Returns what to do about an error of [`enter_new`] or [`become_root_of_new_user_namespace`], for the end of a message; empty if that is
/// unknown.
pub fn remedy(error: &io::Error) -> &'static str {
    match Errno::of(error) {
        Some(Errno::EPERM | Errno::EACCES) => {
            ". Run as root, or allow user namespaces \
             (user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        }
        // Also without a right to a user namespace: 0 is a limit that is reached (inc_ucount).
        Some(Errno::ENOSPC) => {
            ". The limit of namespaces is reached: raise user.max_user_namespaces or user.max_net_namespaces"
        }
        _ => "",
    }
}

/// Checks whether [`enter_new`] is permitted: enters a new network namespace and returns to the current one.
pub fn try_new() -> io::Result<()> {
    let home = current()?;
    // SAFETY: unshare() takes no pointers; CLONE_NEWNET concerns this thread only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    enter(home.as_fd())
}

/// Moves the calling thread into an existing network namespace: a descriptor from [`current`], or an open
/// `/proc/PID/ns/net`. Needs no privilege if the thread is in this namespace.
///
/// # Errors
///
/// EPERM without CAP_SYS_ADMIN, both here and in the user namespace that owns the network namespace; EINVAL for any
/// other file.
pub fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // The kernel requires CAP_SYS_ADMIN for the current namespace too.
    if is_current(namespace).unwrap_or(false) {
        return Ok(());
    }
    // SAFETY: setns() takes no pointers; it concerns this thread only.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
}

/// Runs a closure on a thread in an existing network namespace, so that the calling thread stays where it is.
///
/// # Errors
///
/// As [`enter`]; EAGAIN if no thread can be created.
pub fn within<T: Send>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let entered = thread::Builder::new().name("namespace".to_owned()).spawn_scoped(scope, || {
            enter(namespace)?;
            Ok(work())
        })?;
        entered.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
    })
}

/// Returns whether a file is the calling thread's network namespace.
fn is_current(namespace: BorrowedFd<'_>) -> io::Result<bool> {
    let identity = |file: File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    Ok(identity(namespace.try_clone_to_owned()?.into())? == identity(current()?.into())?)
}

/// Opens the calling thread's network namespace, for [`enter`] and for new devices. The descriptor keeps the namespace
/// alive.
pub fn current() -> io::Result<OwnedFd> {
    Ok(File::open("/proc/thread-self/ns/net")?.into())
}

/// Moves this process into a new user namespace in which it is root, so that it may create network namespaces.
///
/// Needs no privilege if the host allows unprivileged user namespaces. EINVAL if the process has several threads.
pub fn become_root_of_new_user_namespace() -> io::Result<()> {
    // SAFETY: geteuid() and getegid() take no pointers and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: unshare() takes no pointers; the kernel refuses it if the process has several threads.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    // An unprivileged process may write gid_map only after setgroups(2) is denied (user_namespaces(7)).
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// Makes `command` start as root of a new user namespace and in a new network namespace with loopback up. This serves
/// callers with several threads, which cannot enter a user namespace themselves.
pub fn start_in_new(command: &mut Command) {
    let enter = || {
        become_root_of_new_user_namespace()?;
        enter_new()
    };
    // SAFETY: the closure runs in the forked child before exec. Besides system calls it allocates small strings, which
    // glibc allows after a fork, and it takes no lock that another thread of the parent may hold.
    unsafe { command.pre_exec(enter) };
}

/// Returns an id of the calling thread's network namespace that the host never reuses (SO_NETNS_COOKIE, Linux 5.14).
/// The inode of /proc/self/ns/net, in contrast, is reused after a namespace ends.
pub fn identity() -> io::Result<u64> {
    let probe = device::control_socket()?;
    option::get_u64(probe.as_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// Time after which the route of a new address counts as missing.
const ROUTE_WAIT: Duration = Duration::from_secs(10);

/// Option number of include/uapi/asm-generic/socket.h, which some libc versions lack.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Adds an IPv6 address to the loopback device, as a single host (/128), and waits until connections to it have a route.
pub fn add_loopback_address(address: Ipv6Addr) -> io::Result<()> {
    // Without duplicate address detection, whose end a kernel worker may delay; until then bind(2) fails.
    device::add_address("lo", address.into(), 128)?;
    // The route in the table `local`, too, is added by a kernel worker. Until then connect(2) may fail with ENETUNREACH.
    let begun = Instant::now();
    while !route::has_local_route(address.into())? {
        if begun.elapsed() > ROUTE_WAIT {
            return Err(io::Error::from(io::ErrorKind::NetworkUnreachable));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Sets the loopback device of the calling thread's network namespace up, which gives it 127.0.0.1/8 and ::1.
pub fn set_loopback_up() -> io::Result<()> {
    device::set_up("lo")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_fits_its_error() {
        let of = |errno: Errno| remedy(&io::Error::from(errno));
        assert!(of(Errno::EPERM).starts_with(". Run as root, or allow user namespaces"));
        assert!(
            of(Errno::ENOSPC).contains("raise user.max_user_namespaces")
                && !of(Errno::ENOSPC).contains("root")
        );
        assert_eq!([of(Errno::ENOMEM), of(Errno::EINVAL)], [""; 2]);
    }
}
