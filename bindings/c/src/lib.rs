//! The C library: `fourtuple.h` describes its functions and types.
//!
//! C passes pointers, so this crate contains `unsafe`; it decides nothing and calls `fourtuple::dial`. A panic does not cross the border:
//! it becomes the error `FOURTUPLE_FAILED`.
//!
//! An attempt keeps its dialer alive. The header is kept by hand, because its comments are the documentation for C: `tests/programs.rs` compares
//! it with `fourtuple.abi` and the library. Wrappers in `syscalls` instead would make the lowest crate depend on the library.
#![allow(unsafe_code, reason = "C passes pointers")]
#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::ffi::{CStr, c_char};
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::panic::{self, AssertUnwindSafe};

use fourtuple::dial::{BuildError, DialError};
use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

mod attempt;
mod dialer;
mod step;

/// Runs the body of a function of the library. Returns its result, or the kind of its error.
///
/// # Safety
///
/// `error` must be null or point to a `struct fourtuple_error`.
unsafe fn run(error: *mut Error, body: impl FnOnce() -> Result<i32, Failure>) -> i32 {
    let failure = match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::Panicked,
    };
    let kind = failure.kind();
    // SAFETY: the caller passes null or a valid pointer.
    if let Some(error) = unsafe { error.as_mut() } {
        *error = Error::new(&failure);
    }
    kind
}

/// Returns a text of C; `None` for null.
///
/// # Safety
///
/// `text` must be null or end with a null byte, and must outlive the result.
unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a text that ends with a null byte.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// Returns the version of the library.
#[unsafe(no_mangle)]
extern "C" fn fourtuple_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// `enum fourtuple_kind`.
mod kind {
    pub(super) const FAILED: i32 = -1;
    pub(super) const PORTS_EXHAUSTED: i32 = -2;
    pub(super) const SOURCE_NOT_LOCAL: i32 = -3;
    pub(super) const TUPLE_BUSY: i32 = -4;
    pub(super) const REFUSED: i32 = -5;
    pub(super) const SELF_CONNECT: i32 = -6;
    pub(super) const TIMED_OUT: i32 = -7;
    pub(super) const NOT_SUPPORTED: i32 = -8;
    pub(super) const INVALID: i32 = -9;
}

const MESSAGE: usize = 372;

/// `struct fourtuple_error`.
#[repr(C)]
struct Error {
    kind: i32,
    errnum: i32,
    retryable: i32,
    message: [u8; MESSAGE],
}

const _: () = assert!(size_of::<Error>() == 384);

/// A failed function of the library.
#[derive(Debug)]
enum Failure {
    Dial(DialError),
    Build(BuildError),
    Io(io::Error),
    Invalid(String),
    Panicked,
}

impl Failure {
    fn invalid(reason: impl Into<String>) -> Failure {
        Failure::Invalid(reason.into())
    }

    fn kind(&self) -> i32 {
        match self {
            Failure::Dial(error) => match error {
                DialError::PortsExhausted { .. } => kind::PORTS_EXHAUSTED,
                DialError::SourceNotLocal { .. } => kind::SOURCE_NOT_LOCAL,
                DialError::TupleBusy { .. } => kind::TUPLE_BUSY,
                DialError::Refused { .. } => kind::REFUSED,
                DialError::SelfConnect { .. } => kind::SELF_CONNECT,
                DialError::TimedOut { .. } => kind::TIMED_OUT,
                DialError::NotSupported { .. } => kind::NOT_SUPPORTED,
                _ => kind::FAILED,
            },
            Failure::Build(error) if error.kind() == io::ErrorKind::InvalidInput => kind::INVALID,
            Failure::Build(_) | Failure::Io(_) | Failure::Panicked => kind::FAILED,
            Failure::Invalid(_) => kind::INVALID,
        }
    }

    /// Returns the errno of the failed call, or the errno that package users expect for the kind; 0 if there is none.
    fn errnum(&self) -> i32 {
        match self {
            Failure::Dial(error) => error.raw_os_error().unwrap_or(0),
            Failure::Io(error) => errno(error),
            Failure::Invalid(_) => libc::EINVAL,
            Failure::Build(error) => match error {
                BuildError::Probe(probe) => errno(&probe.error),
                BuildError::Range { error, .. } => errno(error),
                _ => libc::EINVAL,
            },
            Failure::Panicked => 0,
        }
    }

    fn is_retryable(&self) -> bool {
        match self {
            Failure::Dial(error) => error.is_retryable(),
            Failure::Build(error) => error.is_retryable(),
            _ => false,
        }
    }

    fn message(&self) -> String {
        match self {
            Failure::Dial(error) => chain(error),
            Failure::Build(error) => chain(error),
            Failure::Io(error) => error.to_string(),
            Failure::Invalid(reason) => reason.clone(),
            Failure::Panicked => "a defect of the library: it panicked, see stderr".to_owned(),
        }
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

/// Returns the text of an error and of its sources: C has one message.
fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", chain(source)))
}

impl Error {
    fn new(failure: &Failure) -> Error {
        let mut message = [0; MESSAGE];
        copy(&failure.message(), &mut message);
        Error {
            kind: failure.kind(),
            errnum: failure.errnum(),
            retryable: i32::from(failure.is_retryable()),
            message,
        }
    }
}

/// Copies the start of a text that fits, and a null byte.
fn copy(text: &str, into: &mut [u8]) {
    let Some(space) = into.len().checked_sub(1) else { return };
    let length = text.floor_char_boundary(space.min(text.len()));
    into[..length].copy_from_slice(&text.as_bytes()[..length]);
    into[length] = 0;
}

/// Reads an IPv4 or IPv6 address of C.
///
/// # Safety
///
/// `address` must be null or point to `length` bytes.
unsafe fn read_address(address: *const sockaddr, length: socklen_t) -> Result<SocketAddr, Failure> {
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
fn c_address(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
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
    fn texts_are_cut_between_characters() {
        let mut buffer = [1; 5];
        copy("abcé", &mut buffer);
        assert_eq!(buffer, *b"abc\0\x01");
        copy("ab", &mut buffer);
        assert_eq!(&buffer[..3], b"ab\0");
        copy("ab", &mut []);
    }

    #[test]
    fn addresses_are_read_as_they_were_written() {
        for text in ["127.0.0.1:80", "[::1]:65535", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let (storage, length) = c_address(address);
            // SAFETY: the pointer and the length belong to one structure.
            assert_eq!(unsafe { read_address((&raw const storage).cast(), length) }.unwrap(), address);
            // SAFETY: the same, with fewer bytes.
            assert!(unsafe { read_address((&raw const storage).cast(), length - 1) }.is_err());
        }
        // SAFETY: null is permitted.
        assert!(unsafe { read_address(std::ptr::null(), 16) }.is_err());
    }
}
