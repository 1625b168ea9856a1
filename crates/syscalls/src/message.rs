//! unix(7) messages that carry a descriptor (SCM_RIGHTS).

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check;

/// Two ends of a SOCK_SEQPACKET connection: messages keep their bounds, close-on-exec and non-blocking.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the pointer is to room for two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    // SAFETY: the call above gave two fresh descriptors that nobody else owns.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// ETOOMANYREFS of [`send`]: the user has more descriptors under way than RLIMIT_NOFILE.
pub const TOO_MANY: i32 = libc::ETOOMANYREFS;

/// Room for the control message of one descriptor, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// sendmsg(2) of `bytes`, at least one, in one message, with `descriptor` if there is one: the kernel makes a copy of that.
/// WouldBlock: the other end has no room.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain numbers and pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if let Some(descriptor) = descriptor {
        let length = size_of::<libc::c_int>() as libc::c_uint;
        header.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE only computes.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(length) } as _;
        // SAFETY: the header describes room that is aligned and large enough for one control message of one int.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(length) as _;
            libc::CMSG_DATA(first).cast::<libc::c_int>().write_unaligned(descriptor.as_raw_fd());
        }
    }
    // SAFETY: the header describes initialised memory that outlives the call, which the kernel only reads.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// recvmsg(2) of one message: how many bytes of it came into `room` and the descriptor that came with it, close-on-exec. 0
/// bytes: the other end is closed. A message that is longer than `room`, or whose descriptor found no place
/// (RLIMIT_NOFILE), is an error.
pub fn receive(socket: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain numbers and pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len() as _;
    // SAFETY: the header describes writable memory that outlives the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let mut descriptor = None;
    // SAFETY: the kernel has filled the header and the control room that it describes; CMSG_FIRSTHDR looks at its length.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        if !first.is_null()
            && (*first).cmsg_level == libc::SOL_SOCKET
            && (*first).cmsg_type == libc::SCM_RIGHTS
        {
            let fd = libc::CMSG_DATA(first).cast::<libc::c_int>().read_unaligned();
            // The kernel has just made this descriptor for us alone.
            descriptor = Some(OwnedFd::from_raw_fd(fd));
        }
    }
    if header.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(io::Error::other("the message is longer than the room for it"));
    }
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok((count, descriptor))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_descriptor_comes_with_its_message() {
        let (ours, theirs) = pair().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        send(ours.as_fd(), b"one", Some(far.as_fd())).unwrap();
        send(ours.as_fd(), b"two", None).unwrap();
        drop(far);
        let mut room = [0; 16];
        let (count, descriptor) = receive(theirs.as_fd(), &mut room).unwrap();
        assert_eq!(&room[..count], b"one");
        let mut far = UnixStream::from(descriptor.unwrap());
        near.write_all(b"x").unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).unwrap();
        let (count, descriptor) = receive(theirs.as_fd(), &mut room).unwrap();
        assert_eq!((&room[..count], descriptor.is_none()), (b"two".as_slice(), true));
        assert_eq!(receive(theirs.as_fd(), &mut room).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut room).unwrap().0, 0);
    }

    #[test]
    fn a_message_that_does_not_fit_is_an_error() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), b"longer", None).unwrap();
        assert!(receive(theirs.as_fd(), &mut [0; 3]).is_err());
    }
}
