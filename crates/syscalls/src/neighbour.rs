//! One datagram to a neighbour, from a socket that has other packets to send too: how far it may go, and how it is to be
//! treated on the way, is said with the datagram (control messages of sendmsg(2)) and not set on the socket.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::address::RawAddress;

/// What a neighbour alone can send, and what it knows a neighbour's packet by (GTSM, RFC 5082).
pub const HOPS: u8 = 255;

/// Room for two control messages of an int each, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// sendmsg(2) with 255 hops to live and a traffic class (DSCP in the upper six bits), without waiting: IP_TTL and IP_TOS, over
/// IPv6 IPV6_HOPLIMIT and IPV6_TCLASS.
///
/// # Errors
///
/// WouldBlock when the socket's buffer is full; ENETUNREACH, EHOSTUNREACH, ENETDOWN, EPERM (a firewall).
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], to: SocketAddr, class: u8) -> io::Result<()> {
    let (level, hops_name, class_name) = match to {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TTL, libc::IP_TOS),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS),
    };
    let name = RawAddress::from(to);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain numbers and pointers, for which zero is a value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = name.as_ptr().cast_mut().cast();
    header.msg_namelen = name.length();
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    let length = size_of::<libc::c_int>() as libc::c_uint;
    // SAFETY: CMSG_SPACE only computes.
    header.msg_controllen = unsafe { 2 * libc::CMSG_SPACE(length) } as _;
    // SAFETY: the header describes room that is aligned, zeroed, and large enough for both control messages.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        for (name, value) in [(hops_name, HOPS), (class_name, class)] {
            (*message).cmsg_level = level;
            (*message).cmsg_type = name;
            (*message).cmsg_len = libc::CMSG_LEN(length) as _;
            libc::CMSG_DATA(message).cast::<libc::c_int>().write_unaligned(value.into());
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    // SAFETY: the header describes initialised memory that outlives the call, which the kernel only reads.
    let sent = unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;
    use crate::datagram::Batch;
    use crate::{option, socket};

    #[test]
    fn only_this_datagram_has_all_hops() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (sender, receiver) = (UdpSocket::bind(address).unwrap(), UdpSocket::bind(address).unwrap());
            let to = receiver.local_addr().unwrap();
            option::set_hops_told(receiver.as_fd(), true).unwrap();
            option::set_hops(sender.as_fd(), 7).unwrap();
            send(sender.as_fd(), b"near", to, 48 << 2).unwrap();
            sender.send_to(b"far", to).unwrap();
            let mut batch = Batch::new(1, 64);
            for (bytes, hops) in [(&b"near"[..], HOPS), (b"far", 7)] {
                assert!(socket::wait_readable(receiver.as_fd(), None).unwrap());
                batch.receive(receiver.as_fd()).unwrap();
                let datagram = batch.get(0).unwrap();
                assert_eq!((datagram.bytes, datagram.hops), (bytes, Some(hops)), "{address}");
                assert_eq!(datagram.from(), Some(sender.local_addr().unwrap()));
            }
        }
    }
}
