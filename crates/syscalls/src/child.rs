//! Options for child processes: lower limits, refused facilities, end with the parent; and signals that end processes.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::seccomp::{self, Facility};
use crate::{Errno, check, resource};

/// Makes `command` start by fork(): its start returns when the program has closed the descriptors of this process that it does not
/// inherit. By posix_spawn() it returns earlier, in `exec_mmap`.
pub fn start_by_fork(command: &mut Command) {
    // SAFETY: the closure runs in the forked child before exec and does nothing.
    unsafe { command.pre_exec(|| Ok(())) };
}

/// Makes `command` start with RLIMIT_NOFILE, soft and hard, at `limit`.
pub fn limit_descriptors(command: &mut Command, limit: u64) {
    let enter = move || resource::set_descriptor_limits(limit, limit);
    // SAFETY: the closure runs in the forked child before exec and makes one system call.
    unsafe { command.pre_exec(enter) };
}

/// Makes `command` start with RLIMIT_NPROC, soft and hard, at `limit`, which counts threads and processes of its user.
/// It does not limit root or processes with CAP_SYS_RESOURCE.
pub fn limit_threads(command: &mut Command, limit: u64) {
    let enter = move || {
        let limits = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: setrlimit() reads one rlimit, which outlives the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const limits) }).map(drop)
    };
    // SAFETY: the closure runs in the forked child before exec and makes one system call.
    unsafe { command.pre_exec(enter) };
}

/// Makes the kernel refuse `facility` to `command`.
pub fn refuse(command: &mut Command, facility: Facility) {
    let enter = move || seccomp::refuse(facility);
    // SAFETY: the closure runs in the forked child before exec; it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// Makes `command` start in a new mount namespace in which `directory` is an empty tmpfs of `bytes`, rounded up to
/// pages. Needs CAP_SYS_ADMIN; the tmpfs ends with the program.
///
/// # Errors
///
/// EINVAL for a path with a NUL byte. Starting the command returns the errors of unshare() and mount().
pub fn mount_small_disk(command: &mut Command, directory: &Path, bytes: u64) -> io::Result<()> {
    let directory = CString::new(directory.as_os_str().as_bytes())?;
    let size = CString::new(format!("size={bytes}"))?;
    let enter = move || {
        // SAFETY: unshare() takes no pointers.
        check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
        let none = std::ptr::null();
        // SAFETY: a change of mount propagation reads the target only, a string that ends in NUL.
        check(unsafe {
            libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, std::ptr::null())
        })?;
        let kind = c"tmpfs".as_ptr();
        // SAFETY: all strings end in NUL, belong to the closure or the program, and outlive the call.
        check(unsafe { libc::mount(kind, directory.as_ptr(), kind, 0, size.as_ptr().cast()) }).map(drop)
    };
    // SAFETY: the closure runs in the forked child before exec; it makes system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
    Ok(())
}

/// Makes the kernel send SIGKILL to `command` when the thread that starts it ends (PR_SET_PDEATHSIG). Children of the
/// program do not inherit this.
pub fn end_with_this_thread(command: &mut Command) {
    let parent = std::process::id();
    let enter = move || {
        // SAFETY: this operation takes a number and no pointers.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) })?;
        // SAFETY: getppid() takes nothing and cannot fail.
        if unsafe { libc::getppid() } as u32 == parent {
            Ok(())
        } else {
            // The parent ended before prctl(2), so the kernel will send no signal.
            Err(io::Error::from(Errno::ESRCH))
        }
    };
    // SAFETY: the closure runs in the forked child before exec; it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// Sends SIGINT to a process, as Ctrl-C does.
///
/// # Errors
///
/// ESRCH: the process has ended. EPERM: the process belongs to another user.
pub fn interrupt(process: u32) -> io::Result<()> {
    signal(process, libc::SIGINT)
}

/// Sends SIGHUP to a process; daemons reload their settings.
///
/// # Errors
///
/// ESRCH: the process has ended. EPERM: the process belongs to another user.
pub fn hang_up(process: u32) -> io::Result<()> {
    signal(process, libc::SIGHUP)
}

/// Sends SIGTERM to a process, a request to end.
///
/// # Errors
///
/// ESRCH: the process has ended. EPERM: the process belongs to another user.
pub fn terminate(process: u32) -> io::Result<()> {
    signal(process, libc::SIGTERM)
}

/// Sends SIGSTOP to a process, which the process cannot block.
///
/// # Errors
///
/// ESRCH: the process has ended. EPERM: the process belongs to another user.
pub fn stop(process: u32) -> io::Result<()> {
    signal(process, libc::SIGSTOP)
}

/// Sends SIGKILL to a process, which the process cannot block.
///
/// # Errors
///
/// ESRCH: the process has ended. EPERM: the process belongs to another user.
pub fn kill(process: u32) -> io::Result<()> {
    signal(process, libc::SIGKILL)
}

fn signal(process: u32, signal: libc::c_int) -> io::Result<()> {
    let Some(process) = i32::try_from(process).ok().filter(|process| *process > 1) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a process of ours"));
    };
    // SAFETY: kill(2) takes no pointers, and the check above excludes numbers that address several processes.
    check(unsafe { libc::kill(process, signal) }).map(drop)
}
