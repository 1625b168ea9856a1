//! Process descriptors (pidfd_open(2)): a process or a thread that cannot be confused with a later one of the same number.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::{Errno, check, epoll, owned};

/// PIDFD_THREAD (include/uapi/linux/pidfd.h, Linux 6.9), which has the value of O_EXCL.
const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;

/// A descriptor of a process or a thread.
#[derive(Debug)]
pub struct Pidfd(OwnedFd);

/// The object of a descriptor for a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The thread: the descriptor is of no use once the thread has ended.
    Thread,
    /// The process of the thread. The number of the thread may belong to a thread of another process while this process lives.
    ItsProcess,
}

impl Pidfd {
    /// Opens a process by its number.
    ///
    /// # Errors
    ///
    /// ESRCH: no such process; EINVAL: the number belongs to a thread other than the first of its process; ENOSYS before Linux 5.3.
    pub fn of_process(id: u32) -> io::Result<Pidfd> {
        open(id, 0)
    }

    /// Opens a thread by its number. Before Linux 6.9, opens the process of the thread.
    ///
    /// # Errors
    ///
    /// ESRCH: no such thread.
    pub fn of_thread(id: u32) -> io::Result<(Pidfd, Opened)> {
        match open(id, PIDFD_THREAD) {
            Err(error) if Errno::of(&error) == Some(Errno::EINVAL) => of_process_of(id),
            result => result.map(|thread| (thread, Opened::Thread)),
        }
    }

    /// Gives the descriptor a number from `first` on.
    ///
    /// # Errors
    ///
    /// EMFILE; EINVAL: `first` is above RLIMIT_NOFILE.
    pub fn numbered_from(self, first: RawFd) -> io::Result<Pidfd> {
        epoll::from(self.0, first).map(Pidfd)
    }

    /// Duplicates a descriptor of the process into this process, with FD_CLOEXEC (pidfd_getfd(2), Linux 5.6).
    ///
    /// # Errors
    ///
    /// EBADF: the process has no such descriptor; ESRCH: the process has ended; EPERM: no right to trace it (ptrace(2)); EMFILE.
    pub fn duplicate(&self, descriptor: RawFd) -> io::Result<OwnedFd> {
        // SAFETY: the call takes numbers only and returns a new descriptor.
        unsafe {
            owned(libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), descriptor, 0) as libc::c_int)
        }
    }

    /// Sends a signal (pidfd_send_signal(2)).
    ///
    /// # Errors
    ///
    /// ESRCH: the process has ended; EPERM: it belongs to another user; EINVAL: no such signal.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let information = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the kernel fills in the information itself if the pointer is null.
        let result =
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), signal, information, 0) };
        check(result as libc::c_int).map(drop)
    }
}

impl AsFd for Pidfd {
    /// The descriptor is readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open(id: u32, flags: libc::c_uint) -> io::Result<Pidfd> {
    // SAFETY: the call takes numbers only and returns a new descriptor.
    unsafe { owned(libc::syscall(libc::SYS_pidfd_open, id, flags) as libc::c_int) }.map(Pidfd)
}

/// Opens the process of a thread. The number of its first thread belongs to the process as long as it exists.
fn of_process_of(thread: u32) -> io::Result<(Pidfd, Opened)> {
    let process = process_of(thread)?;
    let opened = if process == thread { Opened::Thread } else { Opened::ItsProcess };
    Ok((open(process, 0)?, opened))
}

/// Returns the process of a thread (Tgid in proc_pid_status(5)).
fn process_of(thread: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
    let id = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::from(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_descriptor_of_a_process_is_duplicated() {
        let file = File::open("/proc/self/stat").unwrap();
        let this = Pidfd::of_process(std::process::id()).unwrap();
        match this.duplicate(file.as_raw_fd()) {
            // Only a duplicate shares the offset.
            Ok(copy) => {
                assert_ne!(copy.as_raw_fd(), file.as_raw_fd());
                assert_eq!(File::from(copy).read(&mut [0]).unwrap(), 1);
                assert_eq!((&file).stream_position().unwrap(), 1);
            }
            // A sandbox may refuse ptrace(2).
            Err(error) => assert_eq!(Errno::of(&error), Some(Errno::EPERM)),
        }
        assert_eq!(this.duplicate(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
        this.signal(0).unwrap();
    }

    #[test]
    fn a_thread_has_a_descriptor_and_a_process() {
        std::thread::spawn(|| {
            // SAFETY: gettid() takes no arguments.
            let id = unsafe { libc::gettid() } as u32;
            Pidfd::of_thread(id).unwrap();
            assert_eq!(process_of(id).unwrap(), std::process::id());
            assert_eq!(of_process_of(id).unwrap().1, Opened::ItsProcess);
            assert_eq!(of_process_of(std::process::id()).unwrap().1, Opened::Thread);
        })
        .join()
        .unwrap();
        assert_eq!(Pidfd::of_process(u32::MAX).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
