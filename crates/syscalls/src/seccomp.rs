//! Seccomp filters that make this kernel refuse a system call or a socket option, so that tests can simulate other
//! kernels and exhausted limits.
//!
//! Each filter holds for the calling thread, for the threads it starts, and across execve(2). It cannot be removed, so
//! install it on a thread of its own. Needs no privilege.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::option::IP_LOCAL_PORT_RANGE;
use crate::{Errno, architecture, check};

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
        Facility::Namespaces => install(&[libc::SYS_unshare], &[], libc::EPERM),
        Facility::IoUring => install(&[libc::SYS_io_uring_setup], &[], libc::EPERM),
        Facility::Bpf => install(&[libc::SYS_bpf], &[], libc::EPERM),
        Facility::EpollPwait2 => install(&[libc::SYS_epoll_pwait2], &[], libc::ENOSYS),
        Facility::ReceiveMany => install(&[libc::SYS_recvmmsg], &[], libc::EPERM),
        Facility::CloseRange => install(&[libc::SYS_close_range], &[], libc::ENOSYS),
        Facility::Threads => install(&[libc::SYS_clone, libc::SYS_clone3], &[], libc::EAGAIN),
        Facility::UdpGro => refuse_option(libc::SOL_UDP, libc::UDP_GRO),
        Facility::LocalPortRange => refuse_option(libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE),
        Facility::SocketDiag => {
            let conditions = [equal(0, libc::AF_NETLINK), equal(2, libc::NETLINK_SOCK_DIAG)];
            install(&[libc::SYS_socket], &conditions, libc::EPROTONOSUPPORT)
        }
    }
}

/// Makes setsockopt(2) of `name` at `level` fail with ENOPROTOOPT from now on.
pub fn refuse_option(level: libc::c_int, name: libc::c_int) -> io::Result<()> {
    install(&[libc::SYS_setsockopt], &[equal(1, level), equal(2, name)], libc::ENOPROTOOPT)
}

/// Makes epoll_ctl(EPOLL_CTL_ADD) fail with ENOSPC from now on, as when `fs.epoll.max_user_watches` is used up.
pub fn exhaust_watches() -> io::Result<()> {
    install(&[libc::SYS_epoll_ctl], &[equal(1, libc::EPOLL_CTL_ADD)], libc::ENOSPC)
}

/// Does the same as [`exhaust_watches`], but only for the descriptor `first` and descriptors with higher numbers.
pub fn refuse_watches_from(first: BorrowedFd<'_>) -> io::Result<()> {
    let conditions = [equal(1, libc::EPOLL_CTL_ADD), at_least(2, first.as_raw_fd())];
    install(&[libc::SYS_epoll_ctl], &conditions, libc::ENOSPC)
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
            return install(&[libc::SYS_epoll_ctl], &[equal(1, libc::EPOLL_CTL_ADD)], errno.number());
        }
    };
    install(&[number], &[], errno.number())
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
pub(crate) const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
/// The arguments are 64-bit slots; on a little-endian machine the low half of an int stands first.
const ARGUMENTS: u32 = 16;
pub(crate) const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
pub(crate) const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
pub(crate) const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Installs a filter that returns `errno` from each of the calls for which all conditions hold, and allows everything
/// else.
pub(crate) fn install(
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
pub(crate) fn native_only() -> io::Result<Vec<libc::sock_filter>> {
    let native = architecture::AUDIT.ok_or(io::ErrorKind::Unsupported)?;
    let mut is_native = instruction(JUMP_EQUAL, 0, native);
    is_native.jt = 1;
    Ok(vec![instruction(LOAD, 0, ARCHITECTURE), is_native, instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW)])
}

pub(crate) fn instruction(code: u16, skip_unless: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: skip_unless, k }
}

#[cfg(test)]
mod tests {
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
        // SAFETY: the call has room for 0 messages.
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
                // SAFETY: the call has room for 0 events, and the descriptor is not open.
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
}
