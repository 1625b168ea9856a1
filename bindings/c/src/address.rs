use std::mem;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::error::Failure;

/// Reads an IPv4 or IPv6 address of C.
///
/// # Safety
///
/// `address` must be null or point to `length` bytes.
pub(crate) unsafe fn read(address: *const sockaddr, length: socklen_t) -> Result<SocketAddr, Failure> {
    let length = length as usize;
    if address.is_null() || length < size_of::<libc::sa_family_t>() {
        return Err(Failure::invalid("the address is null or too short"));
    }
    // SAFETY: the family is at the start of the address, which is long enough for it. C promises no alignment.
    let family = i32::from(unsafe { address.cast::<libc::sa_family_t>().read_unaligned() });
    match family {
        libc::AF_INET if length >= size_of::<sockaddr_in>() => {
            // SAFETY: the address has the bytes of this structure, which is plain data.
            let found = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            let ip = IpAddr::from(found.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddr::new(ip, u16::from_be(found.sin_port)))
        }
        libc::AF_INET6 if length >= size_of::<sockaddr_in6>() => {
            // SAFETY: the address has the bytes of this structure, which is plain data.
            let found = unsafe { address.cast::<sockaddr_in6>().read_unaligned() };
            let ip = found.sin6_addr.s6_addr.into();
            let port = u16::from_be(found.sin6_port);
            Ok(SocketAddrV6::new(ip, port, found.sin6_flowinfo, found.sin6_scope_id).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(Failure::invalid("the address is too short for its family")),
        _ => Err(Failure::invalid("the address is neither AF_INET nor AF_INET6")),
    }
}

/// Returns an address of C and its length.
pub(crate) fn write(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    // SAFETY: the structure is plain data for which all zeroes is a valid value.
    let mut storage: sockaddr_storage = unsafe { mem::zeroed() };
    let at = &raw mut storage;
    let length = match address {
        SocketAddr::V4(address) => {
            // SAFETY: the storage is as large and as aligned as each address, and zeroes are a valid address.
            let v4 = unsafe { &mut *at.cast::<sockaddr_in>() };
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = address.port().to_be();
            v4.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            size_of::<sockaddr_in>()
        }
        SocketAddr::V6(address) => {
            // SAFETY: the storage is as large and as aligned as each address, and zeroes are a valid address.
            let v6 = unsafe { &mut *at.cast::<sockaddr_in6>() };
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = address.port().to_be();
            v6.sin6_addr.s6_addr = address.ip().octets();
            v6.sin6_scope_id = address.scope_id();
            size_of::<sockaddr_in6>()
        }
    };
    (storage, length as socklen_t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_were_written() {
        for text in ["127.0.0.1:80", "[::1]:65535", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let (storage, length) = write(address);
            // SAFETY: the pointer and the length belong to one structure.
            assert_eq!(unsafe { read((&raw const storage).cast(), length) }.unwrap(), address);
            // SAFETY: the same, with fewer bytes.
            assert!(unsafe { read((&raw const storage).cast(), length - 1) }.is_err());
        }
        // SAFETY: null is permitted.
        assert!(unsafe { read(std::ptr::null(), 16) }.is_err());
    }
}
