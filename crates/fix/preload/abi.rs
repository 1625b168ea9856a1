//! Constants of the C library, which preload.rs is compiled without. Their values differ by architecture in general: the crate checks
//! each against libc when it is compiled for tests.

use core::ffi::c_int;

pub(crate) const AF_INET: c_int = 2;
pub(crate) const AF_INET6: c_int = 10;
pub(crate) const SOCK_STREAM: c_int = 1;
/// The bits of a socket's type without SOCK_NONBLOCK and SOCK_CLOEXEC.
pub(crate) const SOCK_TYPE_MASK: c_int = 0xf;
pub(crate) const IPPROTO_IP: c_int = 0;
pub(crate) const IPPROTO_TCP: c_int = 6;
pub(crate) const IPPROTO_UDP: c_int = 17;
pub(crate) const SOL_SOCKET: c_int = 1;
pub(crate) const SO_PROTOCOL: c_int = 38;
pub(crate) const IP_BIND_ADDRESS_NO_PORT: c_int = 24;
pub(crate) const IP_LOCAL_PORT_RANGE: c_int = 51;
pub(crate) const EINPROGRESS: c_int = 115;
pub(crate) const EADDRNOTAVAIL: c_int = 99;
pub(crate) const CLOCK_MONOTONIC: c_int = 1;
pub(crate) const O_RDWR: c_int = 2;
pub(crate) const O_CLOEXEC: c_int = 0o2_000_000;
pub(crate) const F_GET_SEALS: c_int = 1034;
/// F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW: the size of the file, which its owner has set, stays.
pub(crate) const SEALS: c_int = 7;
pub(crate) const SEEK_END: c_int = 2;
pub(crate) const PROT_READ_WRITE: c_int = 3;
pub(crate) const MAP_SHARED: c_int = 1;

#[cfg(test)]
const _: () = {
    assert!(AF_INET == libc::AF_INET && AF_INET6 == libc::AF_INET6 && SOCK_STREAM == libc::SOCK_STREAM);
    assert!(SOCK_TYPE_MASK & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == 0);
    assert!(
        IPPROTO_IP == libc::IPPROTO_IP
            && IPPROTO_TCP == libc::IPPROTO_TCP
            && IPPROTO_UDP == libc::IPPROTO_UDP
    );
    assert!(SOL_SOCKET == libc::SOL_SOCKET && SO_PROTOCOL == libc::SO_PROTOCOL);
    assert!(IP_BIND_ADDRESS_NO_PORT == libc::IP_BIND_ADDRESS_NO_PORT);
    assert!(IP_LOCAL_PORT_RANGE == fourtuple_syscalls::option::IP_LOCAL_PORT_RANGE);
    assert!(EINPROGRESS == libc::EINPROGRESS && EADDRNOTAVAIL == libc::EADDRNOTAVAIL);
    assert!(
        CLOCK_MONOTONIC == libc::CLOCK_MONOTONIC && O_RDWR == libc::O_RDWR && O_CLOEXEC == libc::O_CLOEXEC
    );
    assert!(F_GET_SEALS == libc::F_GET_SEALS && SEEK_END == libc::SEEK_END && MAP_SHARED == libc::MAP_SHARED);
    assert!(SEALS == libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
    assert!(PROT_READ_WRITE == libc::PROT_READ | libc::PROT_WRITE);
};
