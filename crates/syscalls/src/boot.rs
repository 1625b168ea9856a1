//! What a first process calls while it brings a virtual machine up: mounts, modules, limits, the end.
//!
//! Nothing else uses these; they need the privileges of PID 1 in the initial namespaces.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Turns the "-1 and errno" of a system call into a result.
fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_string(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a NUL byte in a path"))
}

/// Mounts a file system that has no device (`proc`, `sysfs`, `devtmpfs`, `tmpfs`) on an existing directory.
///
/// # Errors
/// Whatever mount(2) says: `EBUSY` when it is mounted there already, `ENODEV` when the kernel lacks it.
pub fn mount(kind: &str, target: &str) -> io::Result<()> {
    let (kind, target) = (c_string(kind)?, c_string(target)?);
    // SAFETY: the three strings end in NUL and outlive the call; these file systems take no data, so it is null.
    let result = unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    checked(result.into())?;
    Ok(())
}

/// Loads an uncompressed kernel module from an open file: finit_module(2).
///
/// # Errors
/// `EEXIST` when it is loaded already, `ENOENT` for a symbol of a module that should have come first.
pub fn load_module(module: BorrowedFd<'_>) -> io::Result<()> {
    let parameters: &CStr = c"";
    // SAFETY: the descriptor is open for the length of the borrow and the parameters end in NUL.
    checked(unsafe { libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), parameters.as_ptr(), 0) })?;
    Ok(())
}

/// Sets both the soft and the hard RLIMIT_NOFILE of this process and of what it starts.
///
/// # Errors
/// `EPERM` above the hard limit without CAP_SYS_RESOURCE or above `fs.nr_open`.
pub fn set_descriptor_limit(descriptors: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: descriptors, rlim_max: descriptors };
    // SAFETY: the limit is a valid rlimit that the kernel only reads.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }.into())?;
    Ok(())
}

/// Sets IFF_UP on `lo`; the kernel then gives it 127.0.0.1/8 and ::1.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN in the network namespace.
pub fn raise_loopback() -> io::Result<()> {
    // SAFETY: socket(2) takes no pointers.
    let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    checked(raw.into())?;
    // SAFETY: the kernel has just given us this descriptor, so nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };

    // SAFETY: an ifreq is plain old data; all zeros is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
        *slot = byte as libc::c_char;
    }
    // SAFETY: SIOCGIFFLAGS writes within the ifreq, which outlives the call.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &mut request) }.into())?;
    // SAFETY: SIOCGIFFLAGS has filled the flags member of the union, and any bit pattern is a valid one.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    // SAFETY: SIOCSIFFLAGS only reads the ifreq.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) }.into())?;
    Ok(())
}

/// Sends SIGKILL to a whole process group, given its leader's process id.
///
/// # Errors
/// `ESRCH` when nobody of the group is left.
pub fn kill_group(leader: u32) -> io::Result<()> {
    let group = i32::try_from(leader).ok().filter(|&id| id > 1);
    let Some(group) = group else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a process group"));
    };
    // SAFETY: kill(2) takes no pointers, and the check above keeps it from meaning "every process".
    checked(unsafe { libc::kill(-group, libc::SIGKILL) }.into())?;
    Ok(())
}

/// Switches the machine off; returns only when that fails.
pub fn power_off() -> io::Error {
    // SAFETY: sync(2) and reboot(2) take no pointers from us.
    unsafe {
        libc::sync();
        libc::reboot(libc::LINUX_REBOOT_CMD_POWER_OFF);
    }
    io::Error::last_os_error()
}
