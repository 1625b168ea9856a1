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
use crate::control;

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
    /// The payload: of several datagrams if `segment` is set.
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
    /// With the same: an address of this host that an answer can be sent from. That is the one above, unless that is of many.
    pub answer_from: Option<IpAddr>,
    /// With IP_RECVTTL, or IPV6_RECVHOPLIMIT: how many hops it had left.
    pub hops: Option<u8>,
    pub(crate) name: &'a libc::sockaddr_storage,
}

impl Datagram<'_> {
    /// Returns the address of the sender.
    pub fn from(&self) -> Option<SocketAddr> {
        address::to_std(self.name).ok()
    }
}

/// Received messages by number, from which [`Outgoing`] sends without a copy.
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

    /// Receives the queued messages, as many as there is room for, without waiting (recvmmsg(2)). Replaces the messages of the last
    /// call.
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

    /// Returns the buffer of message `index`, for callers that write messages of their own; empty beyond the last message.
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
            answer_from: None,
            hops: None,
            name: &self.names[index],
        };
        let control = &self.control[index].0;
        read_control(&control[..header.msg_hdr.msg_controllen.min(control.len())], &mut datagram);
        Some(datagram)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Datagram<'_>> {
        (0..self.received).filter_map(|index| self.get(index))
    }
}

/// Fills in what the control messages in `control`, as the kernel wrote them, tell about a datagram.
pub(crate) fn read_control(control: &[u8], datagram: &mut Datagram<'_>) {
    for message in control::messages(control) {
        match (message.level, message.kind) {
            (libc::SOL_UDP, UDP_GRO) => {
                datagram.segment =
                    message.word().and_then(|word| u16::try_from(i32::from_ne_bytes(word)).ok());
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                datagram.overflowed = message.word().map(u32::from_ne_bytes);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // struct in_pktinfo: device, ipi_spec_dst, ipi_addr.
                let Some([_, _, _, _, answer @ .., a, b, c, d]) = message.data.first_chunk::<12>() else {
                    continue;
                };
                datagram.arrived_at = Some(Ipv4Addr::new(*a, *b, *c, *d).into());
                // Of a broadcast the address of the device that it came to.
                datagram.answer_from = Some(Ipv4Addr::from(*answer).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // struct in6_pktinfo: address, device.
                let Some([address @ .., _, _, _, _]) = message.data.first_chunk::<20>() else { continue };
                let address = Ipv6Addr::from(*address).to_canonical();
                datagram.arrived_at = Some(address);
                datagram.answer_from = (!address.is_multicast()).then_some(address);
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                datagram.hops = message.word().and_then(|word| u8::try_from(i32::from_ne_bytes(word)).ok());
            }
            _ => {}
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
    /// Of the family of `name`.
    from: Option<IpAddr>,
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

// SAFETY: each call that uses the pointers in `iovecs` and `headers` sets them first.
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

    /// Begins a message to `to`, or to the peer of a connected socket. With `segment` the kernel makes datagrams of so many
    /// bytes of it (UDP_SEGMENT, Linux 4.18), [`SEGMENTS`] at most, the last of them perhaps shorter.
    pub fn message(&mut self, to: Option<SocketAddr>, segment: Option<u16>) {
        let at = self.parts.len();
        self.messages.push(Message { name: to.map(RawAddress::from), from: None, segment, parts: at..at });
    }

    /// Has the message that was begun last, which is to `to`, sent from this address of the host (IP_PKTINFO, IPV6_PKTINFO), of
    /// a socket that is bound to all; without a message nothing.
    pub fn from_last(&mut self, from: IpAddr, to: SocketAddr) {
        if let Some(message) = self.messages.last_mut() {
            message.from = match (from, to) {
                // A socket of both families sends over IPv4 from an address that is written as IPv6.
                (IpAddr::V4(from), SocketAddr::V6(_)) => Some(from.to_ipv6_mapped().into()),
                _ => Some(from),
            };
        }
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

    /// Appends bytes to the message that was begun last: `range` of message `index` of the [`Messages`] passed to
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
    /// The error of message `first`: WouldBlock when the socket's buffer is full; EINVAL or EIO where UDP_SEGMENT cannot be
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
            put_control(&mut header.msg_hdr, control, message);
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

/// Writes the control messages of a message, if it has any.
fn put_control(header: &mut libc::msghdr, control: &mut Control, message: &Message) {
    let mut used = 0;
    if let Some(segment) = message.segment {
        used = put(control, used, libc::SOL_UDP, UDP_SEGMENT, segment);
    }
    match message.from {
        Some(IpAddr::V4(from)) => {
            // The device is the route's business.
            let address = libc::in_addr { s_addr: u32::from(from).to_be() };
            let none = libc::in_addr { s_addr: 0 };
            let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: none };
            used = put(control, used, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        Some(IpAddr::V6(from)) => {
            let address = libc::in6_addr { s6_addr: from.octets() };
            let info = libc::in6_pktinfo { ipi6_addr: address, ipi6_ifindex: 0 };
            used = put(control, used, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        None => {}
    }
    if used > 0 {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = used as _;
    }
}

/// Writes a control message behind the `used` bytes of those before it: how many are used now.
fn put<T: Copy>(
    control: &mut Control,
    used: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: T,
) -> usize {
    let length = size_of::<T>() as libc::c_uint;
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
    let (space, length) = unsafe { (libc::CMSG_SPACE(length) as usize, libc::CMSG_LEN(length)) };
    let room = &mut control.0[used..used + space];
    let message = room.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: `room` has space for a header and the value behind it, as CMSG_SPACE says, which is checked above; CMSG_SPACE
    // keeps it aligned, and nothing is read. The value is plain data.
    unsafe {
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        (*message).cmsg_len = length as _;
        libc::CMSG_DATA(message).cast::<T>().write_unaligned(value);
    }
    used + space
}

#[cfg(test)]
mod tests;
