//! Listening sockets that the starter of this process has opened: the protocol of sd_listen_fds(3).

use std::env;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::check;

/// The first descriptor (SD_LISTEN_FDS_START).
const FIRST: RawFd = 3;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the descriptors that LISTEN_FDS announces and sets close-on-exec for each. Returns none if LISTEN_PID names another process or
/// is not set, or after an earlier call: a descriptor has one owner.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`] if LISTEN_FDS is not a number of descriptors; EBADF if a descriptor is not open. The descriptors then
/// stay open without an owner.
pub fn take_listeners() -> io::Result<Vec<OwnedFd>> {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u32>());
    match number("LISTEN_PID") {
        Some(Ok(process)) if process == process::id() => {}
        _ => return Ok(Vec::new()),
    }
    let count = match number("LISTEN_FDS") {
        Some(Ok(count)) if count < 1 << 16 => count as RawFd,
        None => return Ok(Vec::new()),
        Some(_) => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "LISTEN_FDS is no number of descriptors"));
        }
    };
    // Asked first: the owner may have closed the descriptors, and other files may have their numbers.
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let descriptors = FIRST..FIRST + count;
    for descriptor in descriptors.clone() {
        // SAFETY: fcntl(F_SETFD) takes no pointers.
        check(unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    // SAFETY: each descriptor is open, as the call above has shown. The starter of the process gave it to this process (LISTEN_PID), and
    // `TAKEN` lets one caller only become its owner.
    Ok(descriptors.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) }).collect())
}
