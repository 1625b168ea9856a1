//! Sends a single datagram to a neighbour on the link. Control messages of sendmsg(2) set TTL and traffic class of this
//! datagram only, because the socket sends other packets too.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::address::RawAddress;
use crate::datagram::{NO_CONTROL, put};
use crate::option;

/// The TTL or hop limit of packets that only a neighbour on the link can send (GTSM, RFC 5082).
pub const HOPS: u8 = 255;

/// Sends a datagram with a TTL of 255 and a traffic class (DSCP in the upper six bits), without waiting: sendmsg(2)
/// with IP_TTL and IP_TOS, or IPV6_HOPLIMIT and IPV6_TCLASS.
///
/// # Errors
///
/// WouldBlock if the send buffer is full; ENETUNREACH, EHOSTUNREACH, ENETDOWN, EPERM (a firewall).
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], to: SocketAddr, class: u8) -> io::Result<()> {
    let (level, hops_name, class_name) = match to {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TTL, libc::IP_TOS),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS),
    };
    let name = RawAddress::from(to);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = NO_CONTROL;
    let used = put(&mut control, 0, level, hops_name, libc::c_int::from(HOPS));
    let used = put(&mut control, used, level, class_name, libc::c_int::from(class));
    // SAFETY: msghdr consists of numbers and pointers, for which zero is a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = name.as_ptr().cast_mut().cast();
    header.msg_namelen = name.length();
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = used as _;
    // SAFETY: the header describes initialised memory that outlives the call, which the kernel only reads.
    let sent = unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a UDP socket drop every packet with a TTL or hop limit below 255 (SO_ATTACH_FILTER). A packet that has passed
/// a router then takes no space in the queue and wakes no thread; the kernel counts it in `sk_drops`
/// ([`option::dropped`]). Call this before bind(2): earlier packets are not filtered.
///
/// # Errors
///
/// The errors of setsockopt(2): ENOMEM; ENOPROTOOPT from a kernel without socket filters.
pub fn refuse_distant(socket: BorrowedFd<'_>) -> io::Result<()> {
    // Classic BPF (include/uapi/linux/bpf_common.h, filter.h). Loads from NETWORK on read the IP header. An IPv6 socket
    // receives both families, so the program checks the IP version first.
    const LOAD_BYTE: u16 = 0x30;
    const SHIFT_RIGHT: u16 = 0x74;
    const JUMP: u16 = 0x05;
    const IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const NETWORK: u32 = -0x10_0000_i32 as u32;
    const KEEP_ALL: u32 = u32::MAX;
    let program = [
        (LOAD_BYTE, 0, 0, NETWORK),
        (SHIFT_RIGHT, 0, 0, 4),
        (IF_EQUAL, 0, 2, 4),
        (LOAD_BYTE, 0, 0, NETWORK + 8), // IPv4: time to live
        (JUMP, 0, 0, 1),
        (LOAD_BYTE, 0, 0, NETWORK + 7), // IPv6: hop limit
        (IF_EQUAL, 0, 1, u32::from(HOPS)),
        (RETURN, 0, 0, KEEP_ALL),
        (RETURN, 0, 0, 0),
    ];
    option::attach_filter(socket, &program)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;
    use crate::datagram::Batch;
    use crate::socket;

    #[test]
    fn only_this_datagram_has_all_hops() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (sender, receiver) = (UdpSocket::bind(address).unwrap(), UdpSocket::bind(address).unwrap());
            let to = receiver.local_addr().unwrap();
            option::set_receive_hops(receiver.as_fd(), true).unwrap();
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

    #[test]
    fn distant_packets_do_not_reach_the_queue() {
        // The last pair sends IPv4 to an IPv6 socket.
        for (at, from) in [("127.0.0.1:0", "127.0.0.1:0"), ("[::1]:0", "[::1]:0"), ("[::]:0", "127.0.0.1:0")]
        {
            let (sender, receiver) = (UdpSocket::bind(from).unwrap(), UdpSocket::bind(at).unwrap());
            refuse_distant(receiver.as_fd()).unwrap();
            let to =
                SocketAddr::new(sender.local_addr().unwrap().ip(), receiver.local_addr().unwrap().port());
            for hops in [1, 64, 254] {
                option::set_hops(sender.as_fd(), hops).unwrap();
                sender.send_to(b"far", to).unwrap();
            }
            send(sender.as_fd(), b"near", to, 0).unwrap();
            let mut buffer = [0; 8];
            assert_eq!(receiver.recv(&mut buffer).unwrap(), 4, "{at}");
            assert_eq!(&buffer[..4], b"near");
            assert_eq!(option::dropped(receiver.as_fd()).unwrap(), 3, "{at}");
        }
    }
}
