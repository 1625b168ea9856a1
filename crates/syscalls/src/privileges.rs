//! Capabilities of a process (capabilities(7)), and the flag that forbids new ones.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::check;

/// CAP_DAC_OVERRIDE: change files of other users, and files without write permission.
pub const CAP_DAC_OVERRIDE: u32 = 1;
/// CAP_KILL: send signals to processes of other users.
pub const CAP_KILL: u32 = 5;
/// CAP_NET_ADMIN.
pub const CAP_NET_ADMIN: u32 = 12;
/// CAP_SYS_PTRACE: trace processes of other users.
pub const CAP_SYS_PTRACE: u32 = 19;
/// CAP_SYS_ADMIN.
pub const CAP_SYS_ADMIN: u32 = 21;
/// CAP_PERFMON: trace the kernel (Linux 5.8).
pub const CAP_PERFMON: u32 = 38;
/// CAP_BPF: load BPF programs and maps (Linux 5.8).
pub const CAP_BPF: u32 = 39;

/// _LINUX_CAPABILITY_VERSION_3: two words for each set.
const VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct Header {
    version: u32,
    pid: libc::c_int,
}

/// One half of the three sets of a process.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Returns whether the calling thread has a capability in its effective set.
pub fn has(capability: u32) -> bool {
    read().is_ok_and(|sets| {
        sets.get(capability as usize / 32).is_some_and(|half| half.effective >> (capability % 32) & 1 == 1)
    })
}

/// Removes all capabilities of the calling thread that are not in `kept`.
pub fn keep_only(kept: &[u32]) -> io::Result<()> {
    let mut sets = read()?;
    for (index, half) in sets.iter_mut().enumerate() {
        let bits = kept.iter().filter(|capability| **capability as usize / 32 == index);
        let mask = bits.fold(0, |mask, capability| mask | 1 << (capability % 32));
        half.permitted &= mask;
        half.effective &= mask;
        half.inheritable = 0;
    }
    let mut header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: the kernel reads one header and two halves, which outlive the call.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) } as libc::c_int).map(drop)
}

/// Forbids new privileges by execve(2) for this thread and its descendants (PR_SET_NO_NEW_PRIVS). Cannot be undone.
pub fn forbid_new() -> io::Result<()> {
    // SAFETY: this operation takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(drop)
}

/// Returns whether a file gives capabilities to a process that executes it (the attribute security.capability).
pub fn has_file_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    let name = c"security.capability";
    // SAFETY: both strings end in NUL; the kernel writes nothing into a buffer of length 0.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

fn read() -> io::Result<[Sets; 2]> {
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: version 3 writes two halves, as many as `sets` has; the header outlives the call.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) } as libc::c_int)?;
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_that_are_not_kept_are_gone() {
        // Capabilities belong to a thread, so a thread of its own loses them.
        std::thread::spawn(|| {
            let could = has(CAP_KILL);
            keep_only(&[CAP_KILL]).unwrap();
            assert_eq!((has(CAP_KILL), has(CAP_SYS_ADMIN), has(39)), (could, false, false));
            forbid_new().unwrap();
            assert!(!has(200), "no such capability");
        })
        .join()
        .unwrap();
    }
}
