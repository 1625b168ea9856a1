use std::io;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A socket address in the kernel's form, with the length that goes with it.
pub(crate) struct RawAddress {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl RawAddress {
    /// Room for any address, for calls that fill one in.
    pub(crate) fn empty() -> Self {
        RawAddress {
            // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
            storage: unsafe { mem::zeroed() },
            length: mem::size_of::<libc::sockaddr_storage>() as libc::socklen_t,
        }
    }

    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn length(&self) -> libc::socklen_t {
        self.length
    }

    pub(crate) fn length_mut(&mut self) -> *mut libc::socklen_t {
        &raw mut self.length
    }

    pub(crate) fn to_std(&self) -> io::Result<SocketAddr> {
        match libc::c_int::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that the storage holds a sockaddr_in; storage is larger and aligned for it.
                let raw = unsafe { &*(&raw const self.storage).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
                Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that the storage holds a sockaddr_in6; storage is larger and aligned for it.
                let raw = unsafe { &*(&raw const self.storage).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                let port = u16::from_be(raw.sin6_port);
                Ok(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
            }
            family => Err(io::Error::other(format!("address family {family} is neither IPv4 nor IPv6"))),
        }
    }
}

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> Self {
        let mut raw = RawAddress::empty();
        match address {
            SocketAddr::V4(v4) => {
                let filled = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is at least as large as sockaddr_in and aligned for it.
                unsafe { (&raw mut raw.storage).cast::<libc::sockaddr_in>().write(filled) };
                raw.length = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
            }
            SocketAddr::V6(v6) => {
                let filled = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: sockaddr_storage is at least as large as sockaddr_in6 and aligned for it.
                unsafe { (&raw mut raw.storage).cast::<libc::sockaddr_in6>().write(filled) };
                raw.length = mem::size_of::<libc::sockaddr_in6>() as libc::socklen_t;
            }
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_kernel_form() {
        for text in ["127.0.0.1:80", "255.255.255.255:65535", "[::1]:443", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(RawAddress::from(address).to_std().unwrap(), address, "{text}");
        }
        assert!(RawAddress::empty().to_std().is_err());
    }
}
