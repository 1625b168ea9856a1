//! Seccomp filters. Those of [`refuse`] and [`fail`] make this kernel refuse a system call or a socket option, so that tests can simulate
//! other kernels and exhausted limits. That of [`install`] tells a supervisor about system calls of other processes, and lets them proceed
//! (seccomp_unotify(2)).
//!
//! Each filter holds for the calling thread, for the threads it starts, and across execve(2). It cannot be removed, so
//! install it on a thread of its own. Needs no privilege.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::address::RawAddress;
use crate::option::IP_LOCAL_PORT_RANGE;
use crate::{Errno, check, owned, privileges, shared};

/// A facility that a host may disable, or that older kernels lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Facility {
    /// New namespaces by unshare(2): EPERM.
    Namespaces,
    /// io_uring_setup(2): EPERM.
    IoUring,
    /// bpf(2): EPERM.
    Bpf,
    /// epoll_pwait2(2): ENOSYS, as before Linux 5.11.
    EpollPwait2,
    /// recvmmsg(2): EPERM.
    ReceiveMany,
    /// close_range(2): ENOSYS, as before Linux 5.9.
    CloseRange,
    /// New threads and processes by clone(2) and clone3(2): EAGAIN, as at RLIMIT_NPROC.
    Threads,
    /// The socket option UDP_GRO: ENOPROTOOPT, as before Linux 5.0.
    UdpGro,
    /// The socket option IP_LOCAL_PORT_RANGE: ENOPROTOOPT, as before Linux 6.3.
    LocalPortRange,
    /// sock_diag(7): EPROTONOSUPPORT, as without its kernel module.
    SocketDiag,
}

/// Makes the kernel refuse `facility` from now on.
pub fn refuse(facility: Facility) -> io::Result<()> {
    match facility {
        Facility::Namespaces => refuse_calls(&[libc::SYS_unshare], &[], libc::EPERM),
        Facility::IoUring => refuse_calls(&[libc::SYS_io_uring_setup], &[], libc::EPERM),
        Facility::Bpf => refuse_calls(&[libc::SYS_bpf], &[], libc::EPERM),
        Facility::EpollPwait2 => refuse_calls(&[libc::SYS_epoll_pwait2], &[], libc::ENOSYS),
        Facility::ReceiveMany => refuse_calls(&[libc::SYS_recvmmsg], &[], libc::EPERM),
        Facility::CloseRange => refuse_calls(&[libc::SYS_close_range], &[], libc::ENOSYS),
        Facility::Threads => refuse_calls(&[libc::SYS_clone, libc::SYS_clone3], &[], libc::EAGAIN),
        Facility::UdpGro => refuse_option(libc::SOL_UDP, libc::UDP_GRO),
        Facility::LocalPortRange => refuse_option(libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE),
        Facility::SocketDiag => {
            let conditions = [equal(0, libc::AF_NETLINK), equal(2, libc::NETLINK_SOCK_DIAG)];
            refuse_calls(&[libc::SYS_socket], &conditions, libc::EPROTONOSUPPORT)
        }
    }
}

/// Makes setsockopt(2) of `name` at `level` fail with ENOPROTOOPT from now on.
pub fn refuse_option(level: libc::c_int, name: libc::c_int) -> io::Result<()> {
    refuse_calls(&[libc::SYS_setsockopt], &[equal(1, level), equal(2, name)], libc::ENOPROTOOPT)
}

/// Makes epoll_ctl(EPOLL_CTL_ADD) fail with ENOSPC from now on, as when `fs.epoll.max_user_watches` is used up.
pub fn exhaust_watches() -> io::Result<()> {
    refuse_calls(&[libc::SYS_epoll_ctl], &[equal(1, libc::EPOLL_CTL_ADD)], libc::ENOSPC)
}

/// Does the same as [`exhaust_watches`], but only for the descriptor `first` and descriptors with higher numbers.
pub fn refuse_watches_from(first: BorrowedFd<'_>) -> io::Result<()> {
    let conditions = [equal(1, libc::EPOLL_CTL_ADD), at_least(2, first.as_raw_fd())];
    refuse_calls(&[libc::SYS_epoll_ctl], &conditions, libc::ENOSPC)
}

/// A call that [`fail`] makes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailingCall {
    /// socket(2).
    Socket,
    /// accept4(2).
    Accept,
    /// connect(2).
    Connect,
    /// recvmsg(2).
    ReceiveMessage,
    /// recvmmsg(2).
    ReceiveMessages,
    /// sendmsg(2).
    SendMessage,
    /// sendmmsg(2).
    SendMessages,
    /// sendto(2), which send(2) calls too.
    Send,
    /// recvfrom(2), which recv(2) calls too.
    Receive,
    /// epoll_ctl(EPOLL_CTL_ADD).
    AddWatch,
    /// openat(2), which open(2) calls too.
    Open,
    /// io_uring_enter(2).
    EnterRing,
    /// io_uring_setup(2).
    SetUpRing,
}

/// Makes each such call fail with `errno` from now on.
pub fn fail(call: FailingCall, errno: Errno) -> io::Result<()> {
    let number = match call {
        FailingCall::Socket => libc::SYS_socket,
        FailingCall::Accept => libc::SYS_accept4,
        FailingCall::Connect => libc::SYS_connect,
        FailingCall::ReceiveMessage => libc::SYS_recvmsg,
        FailingCall::ReceiveMessages => libc::SYS_recvmmsg,
        FailingCall::SendMessage => libc::SYS_sendmsg,
        FailingCall::SendMessages => libc::SYS_sendmmsg,
        FailingCall::Send => libc::SYS_sendto,
        FailingCall::Receive => libc::SYS_recvfrom,
        FailingCall::Open => libc::SYS_openat,
        FailingCall::EnterRing => libc::SYS_io_uring_enter,
        FailingCall::SetUpRing => libc::SYS_io_uring_setup,
        FailingCall::AddWatch => {
            return refuse_calls(&[libc::SYS_epoll_ctl], &[equal(1, libc::EPOLL_CTL_ADD)], errno.number());
        }
    };
    refuse_calls(&[number], &[], errno.number())
}

/// A condition on an argument of the call: position, comparison, value.
type Condition = (u32, u16, u32);

fn equal(argument: u32, value: libc::c_int) -> Condition {
    (argument, JUMP_EQUAL, value as u32)
}

fn at_least(argument: u32, value: libc::c_int) -> Condition {
    (argument, JUMP_AT_LEAST, value as u32)
}

/// Offset of the call's number in struct seccomp_data: nr 0, arch 4, instruction_pointer 8, args 16.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
/// The arguments are 64-bit slots; on a little-endian machine the low half of an int stands first.
const ARGUMENTS: u32 = 16;
const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Installs a filter that returns `errno` from each of the calls for which all conditions hold, and allows everything
/// else.
pub(crate) fn refuse_calls(
    calls: &[libc::c_long],
    conditions: &[Condition],
    errno: libc::c_int,
) -> io::Result<()> {
    let mut program = native_only()?;
    // A failed comparison skips to the next call: over two instructions per further condition, and the return.
    for &call in calls {
        let mut skip = 2 * conditions.len() as u8 + 1;
        program.push(instruction(LOAD, 0, NUMBER));
        program.push(instruction(JUMP_EQUAL, skip, call as u32));
        for &(argument, comparison, value) in conditions {
            skip -= 2;
            program.push(instruction(LOAD, 0, ARGUMENTS + 8 * argument));
            program.push(instruction(comparison, skip, value));
        }
        program.push(instruction(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    }
    program.push(instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: this prctl takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: the filter describes `program`, which outlives the call; the kernel copies and checks it.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) })
        .map(drop)
}

/// Returns the beginning of a filter, which allows all calls of other architectures: their numbers stand for other calls.
///
/// # Errors
///
/// [`io::ErrorKind::Unsupported`] on an architecture that this crate does not know.
fn native_only() -> io::Result<Vec<libc::sock_filter>> {
    let native = AUDIT.ok_or(io::ErrorKind::Unsupported)?;
    let mut is_native = instruction(JUMP_EQUAL, 0, native);
    is_native.jt = 1;
    Ok(vec![instruction(LOAD, 0, ARCHITECTURE), is_native, instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW)])
}

fn instruction(code: u16, skip_unless: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: skip_unless, k }
}

/// Number of the machine in ELF files (elf(5)) of 64 bits and little-endian byte order; `None` on an architecture that this crate does
/// not know.
pub const ELF_MACHINE: Option<u16> = if cfg!(not(all(target_pointer_width = "64", target_endian = "little")))
{
    None
} else if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else if cfg!(target_arch = "riscv64") {
    Some(243)
} else {
    None
};

/// The value of `arch` in struct seccomp_data (AUDIT_ARCH_*): the machine with the flags __AUDIT_ARCH_64BIT and __AUDIT_ARCH_LE.
const AUDIT: Option<u32> = match ELF_MACHINE {
    Some(machine) => Some(0xc000_0000 | machine as u32),
    None => None,
};

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
    /// A call that [`install`] does not select.
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
        // SAFETY: the mapping is as large as one notification, for which all zeroes is a valid value, and `self` is borrowed
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
    // SAFETY: the filter describes `program`, which outlives the call; the kernel copies and checks it, and returns a new descriptor.
    unsafe {
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        owned(libc::syscall(libc::SYS_seccomp, mode, flags, &raw const filter) as libc::c_int)
    }
    .map(Listener)
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
        // SAFETY: the kernel writes one struct seccomp_notif, as large as the inbox.
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

/// Copies bytes from the memory of a thread, and returns their number, which is less than the length of the buffer if the memory ends before.
///
/// # Errors
///
/// EFAULT: no memory at the address; EPERM: no right to trace the thread; ESRCH: no such thread.
pub fn read(thread: u32, address: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let ours = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: buffer.len() };
    // SAFETY: `ours` describes writable memory. The kernel checks the address of the other process, which this process never uses.
    let read =
        unsafe { libc::process_vm_readv(thread as libc::pid_t, &raw const ours, 1, &raw const theirs, 1, 0) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(read as usize) }
}

/// Copies an IP address from the memory of a thread, as the kernel does for bind(2) and connect(2) with this length.
///
/// # Errors
///
/// The errors of [`read`]; EINVAL if the memory or the length is too short for an address of its family, or the family is another.
pub fn read_address(thread: u32, address: u64, length: u64) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let length = usize::try_from(length).unwrap_or(usize::MAX).min(size_of::<libc::sockaddr_in6>());
    let address_bytes = &mut raw.bytes_mut()[..length];
    let read = read(thread, address, address_bytes)?;
    raw.to_std_of(read)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ptr;
    use std::thread;

    use super::*;

    /// A descriptor that is not open: if the filter allows a system call, it fails with EBADF.
    const CLOSED: libc::c_int = -1;

    /// Runs `test` on a thread of its own, since a filter cannot be removed.
    fn on_a_thread(test: impl FnOnce() + Send + 'static) {
        thread::spawn(test).join().unwrap();
    }

    fn errno<T>(result: io::Result<T>) -> Option<i32> {
        result.err().and_then(|error| error.raw_os_error())
    }

    fn set_option(level: libc::c_int, name: libc::c_int) -> Option<i32> {
        // SAFETY: the kernel reads no value: its length is 0, and the descriptor is not open.
        errno(check(unsafe { libc::setsockopt(CLOSED, level, name, ptr::null(), 0) }))
    }

    fn netlink_socket(protocol: libc::c_int) -> Option<i32> {
        // SAFETY: socket() takes numbers only.
        let socket = check(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol) });
        if let Ok(socket) = socket {
            // SAFETY: close() takes a number, and socket() returned this descriptor.
            unsafe { libc::close(socket) };
        }
        errno(socket)
    }

    fn receive_many() -> Option<i32> {
        // SAFETY: the call has a buffer for 0 messages.
        errno(check(unsafe { libc::recvmmsg(CLOSED, ptr::null_mut(), 0, 0, ptr::null_mut()) }))
    }

    fn add_watch(descriptor: libc::c_int, operation: libc::c_int) -> Option<i32> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: the kernel reads one event.
        errno(check(unsafe { libc::epoll_ctl(CLOSED, operation, descriptor, &raw mut event) }))
    }

    #[test]
    fn each_facility_fails_with_its_errno() {
        type Call = fn() -> Option<i32>;
        let cases: [(Facility, i32, Call); 10] = [
            // SAFETY: unshare() takes flags only; without a flag it succeeds.
            (Facility::Namespaces, libc::EPERM, || errno(check(unsafe { libc::unshare(0) }))),
            (Facility::IoUring, libc::EPERM, || {
                // SAFETY: without parameters the kernel creates no ring: EFAULT.
                let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 2, ptr::null::<u8>()) };
                errno(check(result as libc::c_int))
            }),
            (Facility::Bpf, libc::EPERM, || {
                // SAFETY: no command has this number, and the attributes have length 0.
                let result = unsafe { libc::syscall(libc::SYS_bpf, 0xffff, ptr::null::<u8>(), 0) };
                errno(check(result as libc::c_int))
            }),
            (Facility::EpollPwait2, libc::ENOSYS, || {
                let none = ptr::null::<u8>();
                // SAFETY: the call has a buffer for 0 events, and the descriptor is not open.
                let result = unsafe { libc::syscall(libc::SYS_epoll_pwait2, CLOSED, none, 0, none, none, 0) };
                errno(check(result as libc::c_int))
            }),
            (Facility::ReceiveMany, libc::EPERM, receive_many),
            (Facility::CloseRange, libc::ENOSYS, || {
                // SAFETY: the call takes numbers only, and closes nothing: the first descriptor is above the last.
                let result = unsafe { libc::syscall(libc::SYS_close_range, 1, 0, 0) };
                errno(check(result as libc::c_int))
            }),
            (Facility::Threads, libc::EAGAIN, || errno(thread::Builder::new().spawn(|| ()))),
            (Facility::UdpGro, libc::ENOPROTOOPT, || set_option(libc::SOL_UDP, libc::UDP_GRO)),
            (Facility::LocalPortRange, libc::ENOPROTOOPT, || {
                set_option(libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE)
            }),
            (Facility::SocketDiag, libc::EPROTONOSUPPORT, || netlink_socket(libc::NETLINK_SOCK_DIAG)),
        ];
        for (facility, expected, call) in cases {
            on_a_thread(move || {
                refuse(facility).unwrap();
                assert_eq!(call(), Some(expected), "{facility:?}");
            });
        }
    }

    #[test]
    fn calls_with_other_arguments_pass() {
        on_a_thread(|| {
            refuse(Facility::UdpGro).unwrap();
            refuse(Facility::LocalPortRange).unwrap();
            refuse(Facility::SocketDiag).unwrap();
            assert_eq!(set_option(libc::SOL_UDP, libc::UDP_SEGMENT), Some(libc::EBADF));
            assert_eq!(set_option(libc::SOL_SOCKET, libc::UDP_GRO), Some(libc::EBADF));
            assert_eq!(set_option(libc::IPPROTO_IPV6, IP_LOCAL_PORT_RANGE), Some(libc::EBADF));
            assert_eq!(netlink_socket(libc::NETLINK_ROUTE), None);
            assert_ne!(receive_many(), Some(libc::EPERM));
            assert!(thread::Builder::new().spawn(|| ()).is_ok());
        });
    }

    #[test]
    fn watches_are_refused_from_a_descriptor_on() {
        on_a_thread(|| {
            // SAFETY: standard error is open as long as the process runs.
            refuse_watches_from(unsafe { BorrowedFd::borrow_raw(2) }).unwrap();
            let refused = [2, 3].map(|descriptor| add_watch(descriptor, libc::EPOLL_CTL_ADD));
            assert_eq!(refused, [Some(libc::ENOSPC); 2]);
            assert_eq!(add_watch(1, libc::EPOLL_CTL_ADD), Some(libc::EBADF));
            assert_eq!(add_watch(2, libc::EPOLL_CTL_DEL), Some(libc::EBADF));
            exhaust_watches().unwrap();
            assert_eq!(add_watch(1, libc::EPOLL_CTL_ADD), Some(libc::ENOSPC));
        });
    }

    #[test]
    fn this_program_has_the_machine_of_its_elf_file() {
        let file = fs::read("/proc/self/exe").unwrap();
        assert_eq!(ELF_MACHINE, Some(u16::from_le_bytes([file[18], file[19]])));
    }

    #[test]
    fn memory_is_read_and_a_bad_address_refused() {
        let text = *b"hello";
        let mut buffer = [0; 5];
        let this = std::process::id();
        assert_eq!(read(this, text.as_ptr() as u64, &mut buffer).unwrap(), 5);
        assert_eq!(buffer, text);
        assert_eq!(read(this, 8, &mut buffer).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
    #[test]
    fn addresses_of_both_families_are_read() {
        let this = std::process::id();
        let read = |bytes: &[u8]| read_address(this, bytes.as_ptr() as u64, bytes.len() as u64).ok();
        let four = [2, 0, 0x1f, 0x90, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(read(&four), Some("127.0.0.1:8080".parse().unwrap()));
        let mut six = [0; 28];
        six[0] = 10;
        six[23] = 1;
        assert_eq!(read(&six), Some("[::1]:0".parse().unwrap()));
        assert_eq!(read(&four[..15]), None);
        assert_eq!(read(&six[..23]), None);
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[1, 0, 47, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None, "another family");
    }
}
