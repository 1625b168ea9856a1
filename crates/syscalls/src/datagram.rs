//! Many datagrams with one system call: recvmmsg(2), sendmmsg(2), and what lets one message be many (UDP_GRO, UDP_SEGMENT).
//!
//! What is sent lies where it was received: [`Outgoing`] names parts of [`Messages`], so that forwarding copies nothing.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::address::{self, RawAddress};
use crate::check;

/// include/uapi/linux/udp.h: of a message that is sent, the bytes of each datagram that it is cut into.
const UDP_SEGMENT: libc::c_int = 103;
/// The same of a message that was put together when it was received; as an option, whether that is done.
pub(crate) const UDP_GRO: libc::c_int = 104;

/// The most datagrams that every kernel with UDP_SEGMENT makes of one message (UDP_MAX_SEGMENTS before Linux 6.9).
pub const SEGMENTS: usize = 64;
/// The most bytes of one message, over IPv4 and IPv6 alike.
pub const LONGEST: usize = 65_507;

/// Room for the control messages that are asked for: GRO size, overflow count, address of arrival, hops.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; 128]);

const NO_CONTROL: Control = Control([0; 128]);

/// Room for messages, and what was received into it.
pub struct Batch {
    room: usize,
    /// `room` bytes for each message.
    bytes: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    control: Vec<Control>,
    parts: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    received: usize,
}

// SAFETY: all pointers in `parts` and `headers` are to the heap memory of the other fields, which goes where the value goes.
unsafe impl Send for Batch {}

/// One message of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// What is in it; of more than one datagram when `segment` is set.
    pub bytes: &'a [u8],
    /// Whether it was longer than the room, so that its end is missing.
    pub truncated: bool,
    /// With UDP_GRO: the bytes of each datagram in it; the last may be shorter.
    pub segment: Option<u16>,
    /// With SO_RXQ_OVFL: how many datagrams this socket has lost since it was made because its queue was full, modulo 2^32.
    /// The kernel tells it when it is not 0.
    pub overflowed: Option<u32>,
    /// With IP_PKTINFO, or IPV6_RECVPKTINFO: the address that it was sent to.
    pub arrived_at: Option<IpAddr>,
    /// With IP_RECVTTL, or IPV6_RECVHOPLIMIT: how many hops it had left.
    pub hops: Option<u8>,
    pub(crate) name: &'a libc::sockaddr_storage,
}

impl Datagram<'_> {
    /// Who sent it.
    pub fn from(&self) -> Option<SocketAddr> {
        address::to_std(self.name).ok()
    }
}

/// What messages that are sent are made of: by number, as they were received.
pub trait Messages {
    /// The bytes of message `index`, or of all the room that it is in.
    fn bytes(&self, index: usize) -> &[u8];
}

impl Messages for Batch {
    fn bytes(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.room..][..self.room]
    }
}

impl Batch {
    /// Room for `messages` of `room` bytes each. With UDP_GRO a message is up to 64 KiB.
    pub fn new(messages: usize, room: usize) -> Batch {
        let empty = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Batch {
            room,
            bytes: vec![0; messages * room],
            // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
            names: vec![unsafe { mem::zeroed() }; messages],
            control: vec![NO_CONTROL; messages],
            parts: vec![empty; messages],
            // SAFETY: mmsghdr is numbers and pointers, for which zero is a value.
            headers: vec![unsafe { mem::zeroed() }; messages],
            received: 0,
        }
    }

    /// recvmmsg(2): as many messages as there are and as have room, without waiting, in place of those of the last time.
    ///
    /// # Errors
    ///
    /// WouldBlock when there is none; ECONNREFUSED and the like of a connected socket, whose last message met no one.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.received = 0;
        for (at, header) in self.headers.iter_mut().enumerate() {
            let room = &mut self.bytes[at * self.room..][..self.room];
            self.parts[at] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            header.msg_len = 0;
            header.msg_hdr.msg_name = (&raw mut self.names[at]).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_iov = &raw mut self.parts[at];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = self.control[at].0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = size_of::<Control>() as _;
            header.msg_hdr.msg_flags = 0;
        }
        // SAFETY: every header describes memory of this value, large enough for what it says, and nothing else refers to that.
        let received = check(unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                ptr::null_mut(),
            )
        })?;
        self.received = received as usize;
        Ok(self.received)
    }

    /// The room of message `index`, for those who send what they have made themselves; empty beyond the last.
    pub fn room_mut(&mut self, index: usize) -> &mut [u8] {
        let start = index.saturating_mul(self.room);
        self.bytes.get_mut(start..start.saturating_add(self.room)).unwrap_or_default()
    }

    /// How many messages the last [`Batch::receive`] brought.
    pub fn len(&self) -> usize {
        self.received
    }

    /// Whether it brought none.
    pub fn is_empty(&self) -> bool {
        self.received == 0
    }

    /// One of them; `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<Datagram<'_>> {
        let header = self.headers[..self.received].get(index)?;
        let length = (header.msg_len as usize).min(self.room);
        let mut datagram = Datagram {
            bytes: &self.bytes[index * self.room..][..length],
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            segment: None,
            overflowed: None,
            arrived_at: None,
            hops: None,
            name: &self.names[index],
        };
        read_control(&header.msg_hdr, &mut datagram);
        Some(datagram)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Datagram<'_>> {
        (0..self.received).filter_map(|index| self.get(index))
    }
}

pub(crate) fn read_control(header: &libc::msghdr, datagram: &mut Datagram<'_>) {
    // SAFETY: the kernel has written the control messages, and msg_controllen says how far they go; of each the data is
    // read only as far as its length says it is there.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(ptr::from_ref(header));
        while let Some(message) = next.as_ref() {
            let data = libc::CMSG_DATA(next);
            let length = message.cmsg_len - (data as usize - next as usize);
            match (message.cmsg_level, message.cmsg_type) {
                (libc::SOL_UDP, UDP_GRO) if length >= 4 => {
                    datagram.segment = u16::try_from(data.cast::<i32>().read_unaligned()).ok();
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) if length >= 4 => {
                    datagram.overflowed = Some(data.cast::<u32>().read_unaligned());
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) if length >= size_of::<libc::in_pktinfo>() => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    let address = Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes());
                    datagram.arrived_at = Some(address.into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if length >= size_of::<libc::in6_pktinfo>() => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    datagram.arrived_at = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT)
                    if length >= 4 =>
                {
                    datagram.hops = u8::try_from(data.cast::<i32>().read_unaligned()).ok();
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(ptr::from_ref(header), next);
        }
    }
}

/// A part of a message that was received.
#[derive(Clone, Debug)]
struct Part {
    message: usize,
    range: Range<usize>,
}

/// A message that is to be sent.
struct Message {
    name: Option<RawAddress>,
    segment: Option<u16>,
    parts: Range<usize>,
}

/// Messages to be sent, made of parts of what was received.
#[derive(Default)]
pub struct Outgoing {
    messages: Vec<Message>,
    parts: Vec<Part>,
    control: Vec<Control>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

// SAFETY: the pointers in `iovecs` and `headers` are made anew by every call that uses them.
unsafe impl Send for Outgoing {}

impl Outgoing {
    /// Nothing yet.
    pub fn new() -> Outgoing {
        Outgoing::default()
    }

    /// Forgets all messages.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.parts.clear();
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Begins a message, to `to` or to whom the socket is connected. With `segment` the kernel makes datagrams of so many
    /// bytes of it (UDP_SEGMENT, Linux 4.18), [`SEGMENTS`] at most, the last of them perhaps shorter.
    pub fn message(&mut self, to: Option<SocketAddr>, segment: Option<u16>) {
        let at = self.parts.len();
        self.messages.push(Message { name: to.map(RawAddress::from), segment, parts: at..at });
    }

    /// Changes into how long datagrams the message that was begun last is cut; without a message nothing.
    pub fn cut_last(&mut self, segment: u16) {
        if let Some(message) = self.messages.last_mut() {
            message.segment = Some(segment);
        }
    }

    /// The parts of message `index`, as they were given to [`Outgoing::part`].
    pub fn parts(&self, index: usize) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let parts = self.messages.get(index).map_or(0..0, |message| message.parts.clone());
        self.parts[parts].iter().map(|part| (part.message, part.range.clone()))
    }

    /// Adds bytes to the message that was begun last: those in `range` of message `index` of what will be given to
    /// [`Outgoing::send`].
    ///
    /// # Panics
    ///
    /// Without a message.
    pub fn part(&mut self, index: usize, range: Range<usize>) {
        let message = self.messages.last_mut().expect("a message was begun");
        self.parts.push(Part { message: index, range });
        message.parts.end = self.parts.len();
    }

    /// How many datagrams message `index` is on the wire, and their bytes together; nothing beyond the last.
    pub fn size(&self, index: usize) -> (usize, usize) {
        let Some(message) = self.messages.get(index) else { return (0, 0) };
        let bytes: usize = self.parts[message.parts.clone()].iter().map(|part| part.range.len()).sum();
        let datagrams =
            message.segment.map_or(1, |segment| bytes.div_ceil(usize::from(segment.max(1))).max(1));
        (datagrams, bytes)
    }

    /// Into how long datagrams message `index` is cut, if it is.
    pub fn segment(&self, index: usize) -> Option<u16> {
        self.messages.get(index)?.segment
    }

    /// sendmmsg(2) of the messages from `first` on, without waiting: how many of them were sent. The kernel stops at the first
    /// that it does not send, and gives that one's error only when nothing was sent before it.
    ///
    /// # Errors
    ///
    /// That of message `first`: WouldBlock when the socket's buffer is full; EINVAL or EIO where UDP_SEGMENT cannot be
    /// done (a datagram longer than the path's MTU, a device that cannot checksum); EMSGSIZE, ECONNREFUSED, ENETUNREACH.
    ///
    /// # Panics
    ///
    /// When a part is not in `from`.
    pub fn send(&mut self, socket: BorrowedFd<'_>, from: &impl Messages, first: usize) -> io::Result<usize> {
        let messages = self.messages.get(first..).unwrap_or_default();
        if messages.is_empty() {
            return Ok(0);
        }
        self.iovecs.clear();
        self.iovecs.extend(self.parts.iter().map(|part| {
            let bytes = &from.bytes(part.message)[part.range.clone()];
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }));
        self.control.resize(self.control.len().max(messages.len()), NO_CONTROL);
        self.headers.clear();
        for (message, control) in messages.iter().zip(&mut self.control) {
            // SAFETY: mmsghdr is numbers and pointers, for which zero is a value.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            if let Some(name) = &message.name {
                header.msg_hdr.msg_name = name.as_ptr().cast_mut().cast();
                header.msg_hdr.msg_namelen = name.length();
            }
            header.msg_hdr.msg_iov = self.iovecs[message.parts.clone()].as_mut_ptr();
            header.msg_hdr.msg_iovlen = message.parts.len() as _;
            if let Some(segment) = message.segment {
                put_segment(&mut header.msg_hdr, control, segment);
            }
            self.headers.push(header);
        }
        // SAFETY: every header describes memory of this value or of `from` that outlives the call; the kernel only reads it.
        let sent = check(unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as libc::c_uint,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        })?;
        Ok(sent as usize)
    }
}

fn put_segment(header: &mut libc::msghdr, control: &mut Control, segment: u16) {
    let length = size_of::<u16>() as libc::c_uint;
    header.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE only computes; the header then describes room that is aligned and large enough for one control
    // message of two bytes.
    unsafe {
        header.msg_controllen = libc::CMSG_SPACE(length) as _;
        let message = libc::CMSG_FIRSTHDR(ptr::from_ref(header));
        (*message).cmsg_level = libc::SOL_UDP;
        (*message).cmsg_type = UDP_SEGMENT;
        (*message).cmsg_len = libc::CMSG_LEN(length) as _;
        libc::CMSG_DATA(message).cast::<u16>().write_unaligned(segment);
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;
    use crate::option;

    fn pair() -> (UdpSocket, UdpSocket) {
        let one = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let other = UdpSocket::bind("127.0.0.1:0").expect("bind");
        (one, other)
    }

    fn receive(batch: &mut Batch, socket: &UdpSocket) -> usize {
        assert!(crate::socket::wait_readable(socket.as_fd(), None).expect("poll"));
        batch.receive(socket.as_fd()).expect("recvmmsg")
    }

    #[test]
    fn what_came_goes_on_without_a_copy() {
        let (sender, router) = pair();
        let target = UdpSocket::bind("127.0.0.1:0").expect("bind");
        for text in ["one", "", "three"] {
            sender.send_to(text.as_bytes(), router.local_addr().unwrap()).expect("send");
        }
        let mut batch = Batch::new(8, 2048);
        assert_eq!(receive(&mut batch, &router), 3);
        assert_eq!(batch.get(0).unwrap().from(), Some(sender.local_addr().unwrap()));
        let mut outgoing = Outgoing::new();
        for (index, datagram) in batch.iter().enumerate() {
            outgoing.message(Some(target.local_addr().unwrap()), None);
            outgoing.part(index, 0..datagram.bytes.len());
        }
        assert_eq!(outgoing.send(router.as_fd(), &batch, 0).expect("sendmmsg"), 3);
        let mut there = Batch::new(8, 2048);
        assert_eq!(receive(&mut there, &target), 3);
        let texts: Vec<_> = there.iter().map(|datagram| datagram.bytes.to_vec()).collect();
        assert_eq!(texts, [&b"one"[..], b"", b"three"]);
        assert!(there.get(3).is_none());
    }

    #[test]
    fn one_message_is_many_datagrams_and_back() {
        let (sender, receiver) = pair();
        let (source, _) = pair();
        let answer = option::set_udp_gro(receiver.as_fd(), true).expect("UDP_GRO");
        assert_eq!(answer, option::Answer::Done);
        source.send_to(&[7; 250], sender.local_addr().unwrap()).expect("send");
        let mut batch = Batch::new(1, 2048);
        assert_eq!(receive(&mut batch, &sender), 1);
        let mut outgoing = Outgoing::new();
        outgoing.message(Some(receiver.local_addr().unwrap()), Some(100));
        outgoing.part(0, 0..250);
        assert_eq!(outgoing.size(0), (3, 250));
        assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).expect("sendmmsg"), 1);
        let mut there = Batch::new(4, 65_536);
        let mut bytes = 0;
        while bytes < 250 {
            receive(&mut there, &receiver);
            for datagram in there.iter() {
                assert!(datagram.segment.is_none_or(|segment| segment == 100), "{datagram:?}");
                bytes += datagram.bytes.len();
            }
        }
        assert_eq!(bytes, 250);
    }

    #[test]
    fn what_is_too_long_is_said() {
        let (sender, receiver) = pair();
        sender.send_to(&[1; 100], receiver.local_addr().unwrap()).expect("send");
        let mut batch = Batch::new(1, 60);
        receive(&mut batch, &receiver);
        let datagram = batch.get(0).unwrap();
        assert!(datagram.truncated);
        assert_eq!(datagram.bytes.len(), 60);
    }

    #[test]
    fn where_it_was_sent_to_is_told() {
        let (sender, _) = pair();
        let receiver = UdpSocket::bind("0.0.0.0:0").expect("bind");
        option::set_packet_info(receiver.as_fd(), true).expect("IP_PKTINFO");
        let port = receiver.local_addr().unwrap().port();
        sender.send_to(b"x", ("127.0.0.7", port)).expect("send");
        let mut batch = Batch::new(1, 60);
        receive(&mut batch, &receiver);
        assert_eq!(batch.get(0).unwrap().arrived_at, Some(Ipv4Addr::new(127, 0, 0, 7).into()));
    }

    #[test]
    fn how_many_hops_it_had_left_is_told() {
        for (to, bind) in [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0"), ("127.0.0.1", "[::]:0")] {
            // A host without IPv6.
            let Ok(receiver) = UdpSocket::bind(bind) else { continue };
            option::set_hops_told(receiver.as_fd(), true).expect("IP_RECVTTL");
            let target = (to.parse::<IpAddr>().unwrap(), receiver.local_addr().unwrap().port());
            let mut batch = Batch::new(1, 60);
            for hops in [255, 64, 1] {
                let sender =
                    UdpSocket::bind((if to == "::1" { "::1" } else { "127.0.0.1" }, 0)).expect("bind");
                option::set_hops(sender.as_fd(), hops).expect("IP_TTL");
                sender.send_to(b"x", target).expect("send");
                receive(&mut batch, &receiver);
                assert_eq!(batch.get(0).unwrap().hops, Some(hops), "{bind}");
            }
        }
    }
}
