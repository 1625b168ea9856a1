//! Seccomp user notification (seccomp_unotify(2)): a supervisor is told about system calls of other processes, and lets them
//! proceed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::seccomp::{JUMP_EQUAL, LOAD, NUMBER, RETURN, instruction, native_only};
use crate::{check, privileges, shared};

/// SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 5.19): a signal handler does not interrupt a call that the supervisor has received.
const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;
/// SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP (Linux 6.6): both sides expect to run on one processor in turn.
const SYNC_WAKE_UP: libc::c_ulong = 1;
/// SECCOMP_USER_NOTIF_FLAG_CONTINUE (Linux 5.5).
const CONTINUE: u32 = 1;

// The ioctl numbers of <linux/seccomp.h>: type '!', direction and size of the argument.
const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
const ID_VALID: libc::c_ulong = 0x4008_2102;
const SET_FLAGS: libc::c_ulong = 0x4008_2104;

/// A call of which the listener is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// connect(2)
    Connect,
    /// bind(2)
    Bind,
    /// getsockname(2)
    LocalAddress,
    /// A call that no filter of this module selects.
    Other,
}

/// Struct seccomp_notif.
#[repr(C)]
struct Raw {
    id: AtomicU64,
    pid: u32,
    flags: u32,
    number: i32,
    architecture: u32,
    instruction_pointer: u64,
    arguments: [u64; 6],
}

const _: () = assert!(size_of::<Raw>() == 80);

/// Struct seccomp_notif_resp.
#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

const _: () = assert!(size_of::<Response>() == 24);

/// A system call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Identifier of the notification.
    pub id: u64,
    /// The thread that made the call, as numbered in the PID namespace of the listener's process; 0 if not visible there.
    pub thread: u32,
    pub call: Call,
    /// The first argument, a descriptor of the thread.
    pub descriptor: RawFd,
    /// The second argument, where the thread has an address.
    pub address: u64,
    /// The third argument; for connect(2) and bind(2) the length of the address.
    pub length: u64,
}

/// Memory for one notification that processes forked later share: after the death of the process that received a notification,
/// another process can still answer it.
#[derive(Debug)]
pub struct Inbox(NonNull<Raw>);

// SAFETY: only `Listener::receive` writes to the memory other than through the atomic, and it takes `&mut Inbox`.
unsafe impl Send for Inbox {}

impl Inbox {
    /// Maps memory for a notification.
    pub fn new() -> io::Result<Inbox> {
        Ok(Inbox(shared::map_anonymous(size_of::<Raw>())?.cast()))
    }

    /// Returns the identifier of the notification that was received last and not answered yet.
    pub fn unanswered(&self) -> Option<u64> {
        // SAFETY: the mapping lives as long as `self`; the field is only read through the atomic.
        let id = unsafe { &(*self.0.as_ptr()).id }.load(Ordering::Acquire);
        (id != 0).then_some(id)
    }

    fn clear(&mut self) {
        // SAFETY: the mapping has room for one notification, for which all zeroes is a valid value, and `self` is borrowed
        // exclusively in this process.
        unsafe { self.0.as_ptr().write_bytes(0, 1) };
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this address with this length, and no reference to it exists.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Raw>()) };
    }
}

/// The listener of a filter: receives notifications of all processes that have the filter.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// Installs a filter for the calling thread, its future threads and its children, also after execve(2): connect(2), bind(2) and
/// getsockname(2) wait until the listener has answered. Calls of another architecture, or of x32, are not selected. Sets
/// PR_SET_NO_NEW_PRIVS unless the thread has CAP_SYS_ADMIN.
///
/// # Errors
///
/// EBUSY: the thread has a filter with a listener already; EINVAL: the kernel lacks SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux
/// 5.19); [`io::ErrorKind::Unsupported`]: an architecture that this crate does not know.
pub fn install() -> io::Result<Listener> {
    let calls = [libc::SYS_connect, libc::SYS_bind, libc::SYS_getsockname];
    let count = calls.len() as u8;
    let mut program = native_only()?;
    program.push(instruction(LOAD, 0, NUMBER));
    for (call, position) in calls.iter().zip(0..) {
        let mut jump = instruction(JUMP_EQUAL, 0, *call as u32);
        // To the last instruction, over the other comparisons and the return before it.
        jump.jt = count - position;
        program.push(jump);
    }
    program.push(instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    program.push(instruction(RETURN, 0, libc::SECCOMP_RET_USER_NOTIF));
    if !privileges::has(privileges::CAP_SYS_ADMIN) {
        privileges::forbid_new()?;
    }
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE_RECV;
    // SAFETY: the filter describes `program`, which outlives the call; the kernel copies and checks it.
    let descriptor = check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    } as libc::c_int)?;
    // SAFETY: the kernel has just returned this descriptor, and no other code owns it.
    Ok(Listener(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}

impl From<OwnedFd> for Listener {
    /// Wraps a descriptor that is a duplicate of the descriptor of a listener.
    fn from(descriptor: OwnedFd) -> Listener {
        Listener(descriptor)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Listener {
    /// Makes wake-ups synchronous: the calling thread continues on the processor of the supervisor. Returns whether the kernel
    /// supports this.
    pub fn set_synchronous(&self) -> bool {
        // SAFETY: the argument is a number.
        unsafe { libc::ioctl(self.0.as_raw_fd(), SET_FLAGS as libc::Ioctl, SYNC_WAKE_UP) == 0 }
    }

    /// Waits for a notification and stores it in the inbox. Before the wait, the inbox has no unanswered notification.
    ///
    /// # Errors
    ///
    /// ENOENT: the call was interrupted by a signal before it could be received; EINTR.
    pub fn receive(&self, inbox: &mut Inbox) -> io::Result<Notification> {
        // The kernel refuses memory that is not zero.
        inbox.clear();
        // SAFETY: the kernel writes one struct seccomp_notif, for which the inbox has room.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), RECEIVE as libc::Ioctl, inbox.0.as_ptr()) })?;
        // SAFETY: the kernel has written the struct, and no other process writes to it while this process lives.
        let raw = unsafe { &*inbox.0.as_ptr() };
        let call = match libc::c_long::from(raw.number) {
            libc::SYS_connect => Call::Connect,
            libc::SYS_bind => Call::Bind,
            libc::SYS_getsockname => Call::LocalAddress,
            _ => Call::Other,
        };
        let id = raw.id.load(Ordering::Relaxed);
        let [descriptor, address, length, ..] = raw.arguments;
        Ok(Notification { id, thread: raw.pid, call, descriptor: descriptor as RawFd, address, length })
    }

    /// Lets the call proceed unchanged.
    ///
    /// # Errors
    ///
    /// ENOENT: the thread does not wait any more.
    pub fn proceed(&self, id: u64) -> io::Result<()> {
        let mut response = Response { id, value: 0, error: 0, flags: CONTINUE };
        // SAFETY: the kernel reads one struct seccomp_notif_resp.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), SEND as libc::Ioctl, &raw mut response) }).map(drop)
    }

    /// Returns whether the thread still waits for this answer, so that its number has not been reused.
    pub fn is_valid(&self, id: u64) -> bool {
        // SAFETY: the kernel reads one number.
        unsafe { libc::ioctl(self.0.as_raw_fd(), ID_VALID as libc::Ioctl, &raw const id) == 0 }
    }
}
