use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::Errno;

/// The address of a socket: an IP address with a port, or a path in the file system.
///
/// The enum is exhaustive on purpose: a program that matches it handles every family that this library knows, and another family would
/// be a new major version.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// An IP address and a port.
    Inet(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

impl Endpoint {
    /// Returns address and port, or `None` for a unix socket.
    pub fn inet(&self) -> Option<SocketAddr> {
        match self {
            Endpoint::Inet(address) => Some(*address),
            Endpoint::Unix(_) => None,
        }
    }

    pub(crate) fn family(&self) -> libc::c_int {
        match self {
            Endpoint::Inet(SocketAddr::V4(_)) => libc::AF_INET,
            Endpoint::Inet(SocketAddr::V6(_)) => libc::AF_INET6,
            Endpoint::Unix(_) => libc::AF_UNIX,
        }
    }

    pub(crate) fn raw(&self) -> io::Result<RawAddress> {
        match self {
            Endpoint::Inet(address) => Ok(RawAddress::from(*address)),
            Endpoint::Unix(path) => RawAddress::unix(path),
        }
    }
}

impl From<SocketAddr> for Endpoint {
    #[inline]
    fn from(address: SocketAddr) -> Self {
        Endpoint::Inet(address)
    }
}

/// As for [`SocketAddr`]: `([127, 0, 0, 1], 8080)` is an endpoint too.
impl<I: Into<IpAddr>> From<(I, u16)> for Endpoint {
    fn from(address: (I, u16)) -> Self {
        Endpoint::Inet(address.into())
    }
}

impl From<PathBuf> for Endpoint {
    fn from(path: PathBuf) -> Self {
        Endpoint::Unix(path)
    }
}

impl From<&Path> for Endpoint {
    fn from(path: &Path) -> Self {
        Endpoint::Unix(path.to_owned())
    }
}

/// A text that is not the address of a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointParseError {
    text: String,
    is_path: bool,
}

impl fmt::Display for EndpointParseError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EndpointParseError { text, is_path } = self;
        if *is_path {
            write!(formatter, "{text:?} is not a path of a unix socket: expected 1 to 107 bytes")
        } else {
            write!(
                formatter,
                "{text:?} is not an address: expected ADDRESS:PORT, [ADDRESS]:PORT or unix:/path, such as 127.0.0.1:8080"
            )
        }
    }
}

impl std::error::Error for EndpointParseError {}

/// Reads an IP address with a port, or `unix:` and a path.
impl FromStr for Endpoint {
    type Err = EndpointParseError;

    fn from_str(text: &str) -> Result<Self, EndpointParseError> {
        let refused = |is_path| EndpointParseError { text: text.to_owned(), is_path };
        match text.strip_prefix("unix:") {
            // A socket path has at most 108 bytes, including its final 0 byte.
            Some(path) if (1..=107).contains(&path.len()) && !path.contains('\0') => {
                Ok(Endpoint::Unix(PathBuf::from(path)))
            }
            Some(_) => Err(refused(true)),
            None => text.parse().map(Endpoint::Inet).map_err(|_| refused(false)),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Inet(address) => address.fmt(formatter),
            Endpoint::Unix(path) => path.display().fmt(formatter),
        }
    }
}

/// A socket address in the kernel's form, with its length.
pub(crate) struct RawAddress {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl RawAddress {
    /// Returns zeroed memory for any address, for calls that fill in an address.
    pub(crate) fn empty() -> Self {
        RawAddress {
            // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
            storage: unsafe { mem::zeroed() },
            length: mem::size_of::<libc::sockaddr_storage>() as libc::socklen_t,
        }
    }

    fn unix(path: &Path) -> io::Result<Self> {
        let bytes = path.as_os_str().as_bytes();
        // SAFETY: sockaddr_un is plain data for which all zeroes is a valid value.
        let mut filled: libc::sockaddr_un = unsafe { mem::zeroed() };
        filled.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // A path must end in NUL within the address, and a leading NUL would make the name abstract.
        if bytes.is_empty() || bytes.len() >= filled.sun_path.len() || bytes.contains(&0) {
            let message = format!("the path of a unix socket has 1 to 107 bytes, none of them 0: {path:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        for (to, from) in filled.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let mut raw = RawAddress::empty();
        // SAFETY: sockaddr_storage is at least as large as sockaddr_un and aligned for it.
        unsafe { (&raw mut raw.storage).cast::<libc::sockaddr_un>().write(filled) };
        raw.length = (mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1) as libc::socklen_t;
        Ok(raw)
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

    #[inline]
    pub(crate) fn to_std(&self) -> io::Result<SocketAddr> {
        to_std(&self.storage)
    }

    /// Returns the bytes of the address, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let storage = &raw mut self.storage;
        // SAFETY: sockaddr_storage is plain data without a pointer, for which all bytes are valid values, and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(storage.cast(), size_of::<libc::sockaddr_storage>()) }
    }

    /// Converts an address of which this number of bytes has been written.
    ///
    /// # Errors
    ///
    /// EINVAL: the family is neither AF_INET nor AF_INET6, or has longer addresses.
    pub(crate) fn to_std_of(&self, length: usize) -> io::Result<SocketAddr> {
        /// SIN6_LEN_RFC2133, without the scope.
        const SHORTEST_IPV6: usize = 24;
        let least = match libc::c_int::from(self.storage.ss_family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => SHORTEST_IPV6,
            _ => usize::MAX,
        };
        if length < least { Err(io::Error::from(Errno::EINVAL)) } else { self.to_std() }
    }
}

/// Converts an address that the kernel or this crate has written.
#[inline]
pub(crate) fn to_std(storage: &libc::sockaddr_storage) -> io::Result<SocketAddr> {
    match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that the storage holds a sockaddr_in; storage is larger and aligned for it.
            let raw = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that the storage holds a sockaddr_in6; storage is larger and aligned for it.
            let raw = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            let port = u16::from_be(raw.sin6_port);
            Ok(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
        }
        family => Err(io::Error::other(format!("address family {family} is neither IPv4 nor IPv6"))),
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
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn endpoints_are_read() {
        let read = |text: &str| text.parse::<Endpoint>();
        assert_eq!(read("127.0.0.1:80"), Ok(Endpoint::Inet(SocketAddr::from(([127, 0, 0, 1], 80)))));
        assert_eq!(read("unix:a"), Ok(Endpoint::Unix("a".into())));
        for path in [String::new(), "a\0b".to_owned(), "p".repeat(108)] {
            let error = read(&format!("unix:{path}")).unwrap_err().to_string();
            assert!(error.ends_with("expected 1 to 107 bytes"), "{error}");
        }
        for text in ["", "127.0.0.1", "localhost:80", "/run/app.sock"] {
            assert!(read(text).unwrap_err().to_string().contains("is not an address"), "{text:?}");
        }
    }

    #[test]
    fn addresses_survive_the_kernel_form() {
        for text in ["127.0.0.1:80", "255.255.255.255:65535", "[::1]:443", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(RawAddress::from(address).to_std().unwrap(), address, "{text}");
        }
        assert!(RawAddress::empty().to_std().is_err());
    }

    /// `char` is signed on x86-64 and unsigned on arm64.
    #[test]
    fn bytes_above_127_of_a_path_are_kept() {
        let path = OsStr::from_bytes(&[b'/', 0x7f, 0x80, 0xff]);
        let mut raw = RawAddress::unix(Path::new(path)).unwrap();
        assert_eq!(raw.bytes_mut()[2..7], [b'/', 0x7f, 0x80, 0xff, 0]);
    }

    #[test]
    fn paths_that_no_unix_socket_can_have_are_refused() {
        assert_eq!(RawAddress::unix(Path::new("/run/x")).unwrap().length(), 2 + 6 + 1);
        for path in ["", "a\0b", &"x".repeat(108)] {
            assert!(RawAddress::unix(Path::new(path)).is_err(), "{path:?}");
        }
    }
}
