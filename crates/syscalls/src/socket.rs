//! Sockets: open, bind, connect, accept, send, receive, wait.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::address::{Endpoint, RawAddress};
use crate::{Errno, check, owned};

/// The transport protocol of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// SOCK_STREAM
    Tcp,
    /// SOCK_DGRAM
    Udp,
}

/// Returns an IPv4-mapped IPv6 address as the IPv4 address for which it stands, and other addresses unchanged.
#[inline]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

/// Opens a socket of the family of `address`, close-on-exec.
#[inline]
pub fn open(transport: Transport, address: SocketAddr, nonblocking: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = match transport {
        Transport::Tcp => libc::SOCK_STREAM,
        Transport::Udp => libc::SOCK_DGRAM,
    };
    create(family, kind | if nonblocking { libc::SOCK_NONBLOCK } else { 0 }, 0)
}

/// Opens a socket, close-on-exec (socket(2)).
#[inline]
pub(crate) fn create(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: socket() takes no pointers and returns a new descriptor.
    unsafe { owned(libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol)) }
}

/// Opens a raw IPv4 socket for TCP segments that the caller builds (raw(7)), close-on-exec. Needs CAP_NET_RAW.
pub fn open_raw_tcp() -> io::Result<OwnedFd> {
    create(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_TCP)
}

/// Opens a raw IPv4 socket for ICMP messages, like [`open_raw_tcp`].
pub fn open_raw_icmp() -> io::Result<OwnedFd> {
    create(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP)
}

/// Opens a stream socket of the family of `endpoint`, close-on-exec.
pub fn open_stream(endpoint: &Endpoint, nonblocking: bool) -> io::Result<OwnedFd> {
    let flags = if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    create(endpoint.family(), libc::SOCK_STREAM | flags, 0)
}

/// Opens a non-blocking unix socket of this type, close-on-exec.
pub(crate) fn open_unix(kind: libc::c_int) -> io::Result<OwnedFd> {
    create(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK, 0)
}

/// Binds a socket to an endpoint (bind(2)). The path of a unix socket must not exist yet.
pub fn bind_endpoint(socket: BorrowedFd<'_>, endpoint: &Endpoint) -> io::Result<()> {
    bind_raw(socket, &endpoint.raw()?)
}

/// Connects a socket to an endpoint (connect(2)). EAGAIN: the accept queue of a unix socket is full and the socket is
/// non-blocking; no connection is in progress then.
pub fn connect_endpoint(socket: BorrowedFd<'_>, endpoint: &Endpoint) -> io::Result<Connect> {
    connect_raw(socket, &endpoint.raw()?)
}

/// Binds a socket to an address (bind(2)).
pub fn bind(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    bind_raw(socket, &RawAddress::from(address))
}

fn bind_raw(socket: BorrowedFd<'_>, raw: &RawAddress) -> io::Result<()> {
    // SAFETY: pointer and length describe one initialised address that outlives the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), raw.as_ptr(), raw.length()) }).map(drop)
}

/// The result of connect(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connect {
    /// Connected.
    Done,
    /// The port is chosen and the handshake is in progress: EINPROGRESS, or EINTR of a blocking socket. A second
    /// connect() would be wrong in both cases.
    Pending,
}

/// Connects a socket to an address (connect(2)).
#[inline]
pub fn connect(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<Connect> {
    connect_raw(socket, &RawAddress::from(address))
}

#[inline]
fn connect_raw(socket: BorrowedFd<'_>, raw: &RawAddress) -> io::Result<Connect> {
    // SAFETY: pointer and length describe one initialised address that outlives the call.
    match check(unsafe { libc::connect(socket.as_raw_fd(), raw.as_ptr(), raw.length()) }) {
        Ok(_) => Ok(Connect::Done),
        Err(error) => match Errno::of(&error) {
            Some(Errno::EINPROGRESS | Errno::EINTR) => Ok(Connect::Pending),
            _ => Err(error),
        },
    }
}

/// Removes the peer of a socket, and a local address that the kernel chose (connect(2) to AF_UNSPEC).
pub fn disconnect(socket: BorrowedFd<'_>) -> io::Result<()> {
    let raw = RawAddress::empty();
    // SAFETY: pointer and length describe one initialised address, whose family is AF_UNSPEC, that outlives the call.
    check(unsafe { libc::connect(socket.as_raw_fd(), raw.as_ptr(), raw.length()) }).map(drop)
}

/// Starts listening (listen(2)); the kernel cuts `backlog` to net.core.somaxconn.
pub fn listen(socket: BorrowedFd<'_>, backlog: i32) -> io::Result<()> {
    // SAFETY: listen() takes no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) }).map(drop)
}

/// Accepts a connection, close-on-exec, without the peer's address (accept4(2)).
pub fn accept(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    accept_with(socket, libc::SOCK_CLOEXEC)
}

/// Accepts a connection, close-on-exec and non-blocking, without the peer's address (accept4(2)).
pub fn accept_nonblocking(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    accept_with(socket, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
}

fn accept_with(socket: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    let none = std::ptr::null_mut();
    // SAFETY: both address pointers may be null, because no address is requested; the call returns a new descriptor.
    unsafe { owned(libc::accept4(socket.as_raw_fd(), none, none.cast(), flags)) }
}

/// The answer of a server to an error of accept(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptFailure {
    /// It waits for a connection: the queue is empty (EAGAIN), or a signal arrived (EINTR).
    Wait,
    /// It calls accept(2) again: the connection is gone from the queue, and the error was of this connection (accept(2), "Error handling").
    Retry,
    /// It pauses. Descriptors or memory are lacking, or a filter forbids the call (EPERM, EACCES): the queue keeps the connection, and an
    /// immediate call would fail too. Also each errno that accept(2) does not document.
    Pause,
    /// It ends: the descriptor is not a socket that listens, or the kernel lacks the call.
    Fatal,
}

impl AcceptFailure {
    /// Classifies an error of accept(2). EINVAL, [`AcceptFailure::Fatal`], is also the error of a listener that was shut down.
    pub fn of(error: &io::Error) -> AcceptFailure {
        match Errno::of(error) {
            Some(Errno::EAGAIN | Errno::EINTR) => AcceptFailure::Wait,
            Some(
                Errno::ECONNABORTED
                | Errno::ECONNRESET
                | Errno::EPROTO
                | Errno::ENOPROTOOPT
                | Errno::EOPNOTSUPP
                | Errno::ENETDOWN
                | Errno::ENETUNREACH
                | Errno::EHOSTDOWN
                | Errno::EHOSTUNREACH
                | Errno::ENONET
                | Errno::ETIMEDOUT,
            ) => AcceptFailure::Retry,
            Some(Errno::EBADF | Errno::EFAULT | Errno::EINVAL | Errno::ENOTSOCK | Errno::ENOSYS) => {
                AcceptFailure::Fatal
            }
            _ => AcceptFailure::Pause,
        }
    }
}

/// Sends bytes without SIGPIPE (send(2)): EPIPE if the peer has closed.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: pointer and length describe the bytes, which the kernel only reads.
    let sent =
        unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Sends a datagram to an address (sendto(2)).
pub fn send_to(socket: BorrowedFd<'_>, bytes: &[u8], to: SocketAddr) -> io::Result<usize> {
    let raw = RawAddress::from(to);
    // SAFETY: pointers and lengths describe the bytes and an initialised address, which the kernel only reads.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_NOSIGNAL,
            raw.as_ptr(),
            raw.length(),
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives bytes (recv(2)). 0 from a stream socket means the end of the stream.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: pointer and length describe a writable buffer.
    let received = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Returns whether recv(2) would not block: data, the end of the stream, or an error is pending.
pub fn has_something(socket: BorrowedFd<'_>) -> bool {
    let mut byte = 0_u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the pointer is to one writable byte.
    let result = unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
    result >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock
}

/// Waits with poll(2) until the socket is readable or has ended. Returns `false` if `timeout` expires first. Signals do
/// not end the wait.
pub fn wait_readable(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    wait_for(socket, libc::POLLIN, timeout)
}

/// Waits with poll(2) until the socket is writable or has ended. Returns `false` if `timeout` expires first. Signals do
/// not end the wait.
pub fn wait_writable(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    wait_for(socket, libc::POLLOUT, timeout)
}

fn wait_for(socket: BorrowedFd<'_>, events: libc::c_short, timeout: Option<Duration>) -> io::Result<bool> {
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
        let milliseconds = until.map_or(-1, |until| {
            let left = until.saturating_duration_since(Instant::now());
            libc::c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
        });
        // SAFETY: the pointer is to one pollfd.
        match check(unsafe { libc::poll(&raw mut entry, 1, milliseconds) }) {
            Ok(count) => return Ok(count > 0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Shuts both halves down (shutdown(2)): the peer reads the end of the stream. A listening unix socket refuses further
/// connections, and accept(2) returns the queued connections, then EINVAL.
pub fn shutdown(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: shutdown() takes no pointers.
    check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) }).map(drop)
}

/// Shuts the writing half down (shutdown(2)): the peer reads the end of the stream, and its data can still be received.
pub fn shutdown_write(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: shutdown() takes no pointers.
    check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) }).map(drop)
}

/// Returns the local address (getsockname(2)).
#[inline]
pub fn local_address(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    // SAFETY: the pointers describe a writable buffer for the longest address, and its length.
    check(unsafe { libc::getsockname(socket.as_raw_fd(), raw.as_mut_ptr(), raw.length_mut()) })?;
    raw.to_std()
}

/// Returns whether the socket is connected; for UDP: whether it has a peer.
pub fn has_peer(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut raw = RawAddress::empty();
    // SAFETY: the pointers describe a writable buffer for the longest address, and its length.
    let result = check(unsafe { libc::getpeername(socket.as_raw_fd(), raw.as_mut_ptr(), raw.length_mut()) });
    match result {
        Ok(_) => Ok(true),
        Err(error) if Errno::of(&error) == Some(Errno::ENOTCONN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Clears or sets O_NONBLOCK with one call.
pub fn set_nonblocking(socket: BorrowedFd<'_>, nonblocking: bool) -> io::Result<()> {
    let mut flag = libc::c_int::from(nonblocking);
    // SAFETY: FIONBIO reads one int through the pointer.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONBIO, &raw mut flag) }).map(drop)
}

/// The state of a connecting socket, from poll(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Connected,
    /// Failed; SO_ERROR has the reason.
    Failed,
    /// Still connecting when the timeout expired.
    Pending,
}

/// Waits until a connecting socket is connected or has failed, or `timeout` expires; `None` waits without a limit.
pub fn wait_connected(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<Progress> {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i64::MAX as u64) as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: one pollfd, a timespec that outlives the call or null, and no signal mask.
    let ready = check(unsafe { libc::ppoll(&raw mut entry, 1, timeout, std::ptr::null()) })?;
    Ok(if ready == 0 {
        Progress::Pending
    } else if entry.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0 {
        Progress::Failed
    } else {
        Progress::Connected
    })
}

/// Takes the descriptors that LISTEN_FDS announces (sd_listen_fds(3)) and sets close-on-exec for each. Returns none if LISTEN_PID names
/// another process or is not set, or after an earlier call: a descriptor has one owner.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`] if LISTEN_FDS is not a number of descriptors; EBADF if a descriptor is not open. The descriptors then
/// stay open without an owner.
pub fn take_listeners() -> io::Result<Vec<OwnedFd>> {
    /// The first descriptor (SD_LISTEN_FDS_START).
    const FIRST: RawFd = 3;
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok().map(|text| text.parse::<u32>());
    match number("LISTEN_PID") {
        Some(Ok(process)) if process == process::id() => {}
        _ => return Ok(Vec::new()),
    }
    let count = match number("LISTEN_FDS") {
        Some(Ok(count)) if count < 1 << 16 => count as RawFd,
        None => return Ok(Vec::new()),
        Some(_) => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "LISTEN_FDS is not a number of descriptors",
            ));
        }
    };
    // Asked first: the owner may have closed the descriptors, and other files may have their numbers.
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let descriptors = FIRST..FIRST + count;
    for descriptor in descriptors.clone() {
        // SAFETY: fcntl(F_SETFD) takes no pointers.
        check(unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    // SAFETY: each descriptor is open, as the call above has shown. The starter of the process gave it to this process (LISTEN_PID), and
    // `TAKEN` lets one caller only become its owner.
    Ok(descriptors.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) }).collect())
}

/// Calls `use_it` with a descriptor that another runtime of this process owns, such as the interpreter of Python.
///
/// A number does not prove that its file stays open: the caller must prevent that the other runtime closes it meanwhile, in Python by
/// the interpreter's lock. A duplicate would need no such condition, and costs two system calls.
///
/// # Errors
///
/// EBADF: the number is negative, as that of a closed socket in Python. A number without an open file is an error of the calls that
/// `use_it` makes.
pub fn lend<R>(descriptor: RawFd, use_it: impl FnOnce(BorrowedFd<'_>) -> R) -> io::Result<R> {
    if descriptor < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the number is not -1, and no copy of it outlives this call. That it stays open is up to the caller. No memory depends on
    // it: without an open file the kernel answers EBADF, and with another one the calls fail or act on that file, as they would if
    // the other runtime had made them.
    Ok(use_it(unsafe { BorrowedFd::borrow_raw(descriptor) }))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::socket::local_address;

    #[test]
    fn a_lent_descriptor_stays_open() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = lend(socket.as_raw_fd(), |lent| local_address(lent).unwrap()).unwrap();
        assert_eq!(socket.local_addr().unwrap(), address);
        assert_eq!(lend(-1, |_| ()).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
