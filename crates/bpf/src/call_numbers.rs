//! The numbers of system calls in the BPF programs, which have no header of the kernel: each must be the number of the C library. The
//! programs have the numbers of x86-64 first, then those of arm64; each is compared where the tests run.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

use std::mem;

/// Returns the part of a source with the numbers of this architecture: `parts` are divided by `divider`, that of x86-64 first.
fn of_this_architecture<'a>(source: &'a str, function: &str, divider: &str) -> &'a str {
    let (_, body) = source.split_once(function).expect("the function is in the source");
    let (body, _) = body.split_once("\n}\n").expect("a function ends");
    let mut parts = body.split(divider).skip(1);
    let part = if cfg!(target_arch = "x86_64") { parts.next() } else { parts.nth(1) };
    part.expect("both architectures have a part")
}

/// Returns the numbers that follow a text, sorted.
fn numbers(text: &str, before: &str) -> Vec<libc::c_long> {
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    let found = text.split(before).skip(1).map(|rest| digits(rest).parse().expect("a number"));
    sorted(found.collect())
}

fn sorted(mut numbers: Vec<libc::c_long>) -> Vec<libc::c_long> {
    numbers.sort_unstable();
    numbers
}

#[test]
fn accepts_and_waits_have_the_numbers_of_libc() {
    let source = include_str!("current.h");
    let calls = |function| numbers(of_this_architecture(source, function, "return "), "call == ");
    assert_eq!(calls("INLINE int is_accept("), sorted(vec![libc::SYS_accept, libc::SYS_accept4]));
    let waits = vec![
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_ppoll,
        libc::SYS_pselect6,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select,
    ];
    assert_eq!(calls("INLINE int is_wait("), sorted(waits));
}

#[test]
fn failed_calls_have_the_numbers_of_libc() {
    let source = include_str!("failed_calls.bpf.c");
    let calls = of_this_architecture(source, "INLINE u32 call_kind(", "switch (call)");
    for (kind, wanted) in [
        ("SOCKET", vec![libc::SYS_socket]),
        ("CONNECT", vec![libc::SYS_connect]),
        ("ACCEPT", vec![libc::SYS_accept, libc::SYS_accept4]),
        ("BIND", vec![libc::SYS_bind]),
        ("LISTEN_", vec![libc::SYS_listen]),
        ("SO_ERROR_", vec![libc::SYS_getsockopt]),
        (
            "SEND",
            vec![
                libc::SYS_write,
                libc::SYS_writev,
                libc::SYS_sendfile,
                libc::SYS_sendto,
                libc::SYS_sendmsg,
                libc::SYS_sendmmsg,
            ],
        ),
        (
            "RECV",
            vec![libc::SYS_read, libc::SYS_readv, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_recvmmsg],
        ),
    ] {
        let line = calls.lines().find(|line| line.ends_with(&format!("return {kind};")));
        assert_eq!(numbers(line.expect(kind), "case "), sorted(wanted), "{kind}");
    }
}

#[test]
fn epoll_ctl_has_the_number_and_the_layout_of_libc() {
    let source = include_str!("fix_rotate.bpf.c");
    let of_this = |function: &str| {
        let (_, body) = source.split_once(function).expect("the function is in the source");
        let (_, choice) = body.split_once("IS_THERE(registers->orig_ax) ? ").expect("a choice");
        let (x86_64, others) = choice.split_once(" : ").expect("two values");
        let text = if cfg!(target_arch = "x86_64") { x86_64 } else { others };
        text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().expect("a number")
    };
    assert_eq!(of_this("INLINE int is_epoll_ctl("), libc::SYS_epoll_ctl as usize);
    assert_eq!(of_this("INLINE void read_event("), mem::offset_of!(libc::epoll_event, u64));
}
