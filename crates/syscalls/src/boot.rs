//! System calls of the init process of a virtual machine: mounts, kernel modules, limits, power off.
//!
//! Only `guest-init` of `crates/testing` uses them; they need the privileges of PID 1 in the initial namespaces.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

fn c_string(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a NUL byte in a path"))
}

/// Mounts a file system that has no device (`proc`, `sysfs`, `devtmpfs`, `tmpfs`) on an existing directory.
///
/// # Errors
/// The errors of mount(2): `EBUSY` if it is mounted there already, `ENODEV` if the kernel lacks the file system.
pub fn mount(kind: &str, target: &str) -> io::Result<()> {
    let (kind, target) = (c_string(kind)?, c_string(target)?);
    // SAFETY: the three strings end in NUL and outlive the call; these file systems take no data, so it is null.
    let result = unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    check(result).map(drop)
}

/// Loads an uncompressed kernel module from an open file with finit_module(2) and its parameters, such as `enable_hooks=1`.
///
/// # Errors `EEXIST` if the module is loaded already, `ENOENT` for a symbol of a module that must be loaded first.
pub fn load_module(module: BorrowedFd<'_>, parameters: &CStr) -> io::Result<()> {
    // SAFETY: the descriptor is open for the length of the borrow and the parameters end in NUL.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), parameters.as_ptr(), 0) };
    check(result as libc::c_int).map(drop)
}

/// Sends SIGKILL to a whole process group, given its leader's process id.
///
/// # Errors
/// `ESRCH`: the group has no process.
pub fn kill_group(leader: u32) -> io::Result<()> {
    let group = i32::try_from(leader).ok().filter(|&id| id > 1);
    let Some(group) = group else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a process group"));
    };
    // SAFETY: kill(2) takes no pointers, and the check above keeps it from meaning "every process".
    check(unsafe { libc::kill(-group, libc::SIGKILL) }).map(drop)
}

/// Powers the machine off; returns only if that fails.
pub fn power_off() -> io::Error {
    // SAFETY: sync(2) and reboot(2) take no pointers from us.
    unsafe {
        libc::sync();
        libc::reboot(libc::LINUX_REBOOT_CMD_POWER_OFF);
    }
    io::Error::last_os_error()
}
