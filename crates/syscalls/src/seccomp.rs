//! A seccomp filter that makes this kernel look like one without a socket option.

use std::io;

use crate::check;

/// From now on setsockopt of `name` at `level` answers ENOPROTOOPT in this thread and in those it starts.
///
/// There is no way back, so call it on a thread of its own. No privilege is needed.
pub fn refuse_option(level: libc::c_int, name: libc::c_int) -> io::Result<()> {
    // Offsets into struct seccomp_data: nr 0, arch 4, instruction_pointer 8, args 16. The arguments are ints, so on a
    // little-endian machine the low half of each 64-bit slot is enough.
    const NUMBER: u32 = 0;
    const ARGUMENT_1: u32 = 16 + 8;
    const ARGUMENT_2: u32 = 16 + 16;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let load = |offset| libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: offset };
    let equal_or_skip = |value, skip| libc::sock_filter { code: JUMP_EQUAL, jt: 0, jf: skip, k: value };
    let answer = |value| libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: value };
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
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: this prctl takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: the filter describes the array above, which outlives the call; the kernel copies and checks it.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) })
        .map(drop)
}
