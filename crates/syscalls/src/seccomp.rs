//! Seccomp filters that make this kernel look like one without a socket option, or without a system call.

use std::io;

use crate::check;
use crate::option::IP_LOCAL_PORT_RANGE;

/// From now on setsockopt of `name` at `level` answers ENOPROTOOPT in this thread and in those it starts.
///
/// There is no way back, so call it on a thread of its own. No privilege is needed.
pub fn refuse_option(level: libc::c_int, name: libc::c_int) -> io::Result<()> {
    // The arguments are ints, so on a little-endian machine the low half of each 64-bit slot is enough.
    const ARGUMENT_1: u32 = 16 + 8;
    const ARGUMENT_2: u32 = 16 + 16;
    let mut program = [
        load(NUMBER),
        equal_or_skip(libc::SYS_setsockopt as u32, 5),
        load(ARGUMENT_1),
        equal_or_skip(level as u32, 3),
        load(ARGUMENT_2),
        equal_or_skip(name as u32, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    install(&mut program)
}

/// A facility that hosts switch off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Facility {
    /// New namespaces, by unshare().
    Namespaces,
    /// io_uring_setup().
    IoUring,
    /// bpf().
    Bpf,
    /// The socket option IP_LOCAL_PORT_RANGE, which older kernels answer with ENOPROTOOPT.
    LocalPortRange,
}

/// From now on this thread, those that it starts, and what they execute get EPERM where they ask for `facility` (for the
/// option ENOPROTOOPT): what a container runtime's profile does, or an older kernel.
///
/// There is no way back. No privilege is needed.
pub fn refuse(facility: Facility) -> io::Result<()> {
    let call = match facility {
        Facility::Namespaces => libc::SYS_unshare,
        Facility::IoUring => libc::SYS_io_uring_setup,
        Facility::Bpf => libc::SYS_bpf,
        Facility::LocalPortRange => return refuse_option(libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE),
    };
    let mut program = [
        load(NUMBER),
        equal_or_skip(call as u32, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    install(&mut program)
}

/// Offset of the call's number in struct seccomp_data: nr 0, arch 4, instruction_pointer 8, args 16.
const NUMBER: u32 = 0;
const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

fn load(offset: u32) -> libc::sock_filter {
    libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: offset }
}

fn equal_or_skip(value: u32, skip: u8) -> libc::sock_filter {
    libc::sock_filter { code: JUMP_EQUAL, jt: 0, jf: skip, k: value }
}

fn answer(value: u32) -> libc::sock_filter {
    libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: value }
}

fn install(program: &mut [libc::sock_filter]) -> io::Result<()> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: this prctl takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: the filter describes the slice, which outlives the call; the kernel copies and checks it.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) })
        .map(drop)
}
