//! Many datagrams with one system call: recvmmsg(2) and sendmmsg(2), with UDP_GRO and UDP_SEGMENT.
//!
//! Forwarding copies no payload: [`Outgoing`] refers to ranges of the received [`Messages`].

use std::io;
use std::iter;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::address::{self, RawAddress};
use crate::check;

/// Socket option and control message of a send (include/uapi/linux/udp.h): the size of the datagrams that the kernel
/// cuts.
const UDP_SEGMENT: libc::c_int = 103;
/// Socket option that enables GRO, and control message with the size of the coalesced datagrams.
pub(crate) const UDP_GRO: libc::c_int = 104;

/// The maximum number of datagrams in one message on every kernel with UDP_SEGMENT (UDP_MAX_SEGMENTS before Linux 6.9).
pub const SEGMENTS: usize = 64;
/// The maximum payload of one message in bytes, over IPv4 and IPv6.
pub const MAX_PAYLOAD: usize = 65_507;

/// A buffer for the requested control messages: GRO size, overflow count, destination address, TTL.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct Control(pub(crate) [u8; 128]);

pub(crate) const NO_CONTROL: Control = Control([0; 128]);

/// Buffers for messages, and the messages of the last receive call.
pub struct Batch {
    capacity: usize,
    /// The payload buffers, `capacity` bytes for each message.
    bytes: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    control: Vec<Control>,
    parts: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    received: usize,
}

// SAFETY: all pointers in `parts` and `headers` are to heap memory of the other fields, which moves with the value.
unsafe impl Send for Batch {}

/// One message of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The payload. If `segment` is set, it contains several datagrams.
    pub bytes: &'a [u8],
    /// Whether the message was longer than its buffer, so that its end is missing.
    pub truncated: bool,
    /// With UDP_GRO: the size of each datagram in the payload; the last datagram may be shorter.
    pub segment: Option<u16>,
    /// With SO_RXQ_OVFL: the number of datagrams that this socket has lost since it was opened because its receive
    /// queue was full, modulo 2^32. The kernel omits a count of 0.
    pub overflowed: Option<u32>,
    /// With IP_PKTINFO or IPV6_RECVPKTINFO: the destination address.
    pub arrived_at: Option<IpAddr>,
    /// With the same options: a local address for replies. It differs from `arrived_at` for multicast and broadcast.
    pub answer_from: Option<IpAddr>,
    /// With IP_RECVTTL or IPV6_RECVHOPLIMIT: the TTL or hop limit of the received packet.
    pub hops: Option<u8>,
    pub(crate) name: &'a libc::sockaddr_storage,
}

impl<'a> Datagram<'a> {
    /// Returns a message with these flags of a msghdr, before its control messages are read.
    #[inline]
    pub(crate) fn new(bytes: &'a [u8], flags: libc::c_int, name: &'a libc::sockaddr_storage) -> Datagram<'a> {
        let truncated = flags & libc::MSG_TRUNC != 0;
        let (segment, overflowed, arrived_at, answer_from, hops) = (None, None, None, None, None);
        Datagram { bytes, truncated, segment, overflowed, arrived_at, answer_from, hops, name }
    }

    /// Returns the address of the sender.
    pub fn from(&self) -> Option<SocketAddr> {
        address::to_std(self.name).ok()
    }
}

/// Received messages by number, from which [`Outgoing`] sends without a copy.
pub trait Messages {
    /// Returns the bytes of message `index`, or its whole buffer.
    fn bytes(&self, index: usize) -> &[u8];
}

impl Messages for Batch {
    fn bytes(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.capacity..][..self.capacity]
    }
}

impl Batch {
    /// Allocates buffers of `capacity` bytes for `messages` messages. With UDP_GRO a message has up to 64 KiB.
    pub fn new(messages: usize, capacity: usize) -> Batch {
        let empty = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Batch {
            capacity,
            bytes: vec![0; messages * capacity],
            // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
            names: vec![unsafe { mem::zeroed() }; messages],
            control: vec![NO_CONTROL; messages],
            parts: vec![empty; messages],
            // SAFETY: mmsghdr consists of numbers and pointers, for which zero is a valid value.
            headers: vec![unsafe { mem::zeroed() }; messages],
            received: 0,
        }
    }

    /// Receives queued messages without waiting (recvmmsg(2)), as many as the batch has buffers for. Replaces the
    /// messages of the previous call.
    ///
    /// # Errors
    ///
    /// WouldBlock if the queue is empty. On a connected socket also ECONNREFUSED and other ICMP errors for earlier
    /// messages.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.received = 0;
        for (at, header) in self.headers.iter_mut().enumerate() {
            let buffer = &mut self.bytes[at * self.capacity..][..self.capacity];
            self.parts[at] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
            header.msg_len = 0;
            header.msg_hdr.msg_name = (&raw mut self.names[at]).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_hdr.msg_iov = &raw mut self.parts[at];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = self.control[at].0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = size_of::<Control>() as _;
            header.msg_hdr.msg_flags = 0;
        }
        // SAFETY: every header describes memory of this value with its exact length, and no other reference to this
        // memory exists.
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
        let start = index.saturating_mul(self.capacity);
        self.bytes.get_mut(start..start.saturating_add(self.capacity)).unwrap_or_default()
    }

    /// Returns the number of messages that the last [`Batch::receive`] returned.
    pub fn len(&self) -> usize {
        self.received
    }

    /// Returns whether the last [`Batch::receive`] returned no message.
    pub fn is_empty(&self) -> bool {
        self.received == 0
    }

    /// Returns message `index`, or `None` beyond the last message.
    pub fn get(&self, index: usize) -> Option<Datagram<'_>> {
        let header = self.headers[..self.received].get(index)?;
        let length = (header.msg_len as usize).min(self.capacity);
        let bytes = &self.bytes[index * self.capacity..][..length];
        let mut datagram = Datagram::new(bytes, header.msg_hdr.msg_flags, &self.names[index]);
        let control = &self.control[index].0;
        read_control(&control[..header.msg_hdr.msg_controllen.min(control.len())], &mut datagram);
        Some(datagram)
    }

    /// Iterates over all messages.
    pub fn iter(&self) -> impl Iterator<Item = Datagram<'_>> {
        (0..self.received).filter_map(|index| self.get(index))
    }
}

/// Fills in the fields of a datagram from the control messages in `control`, which the kernel wrote.
pub(crate) fn read_control(control: &[u8], datagram: &mut Datagram<'_>) {
    for message in messages(control) {
        match (message.level, message.kind) {
            (libc::SOL_UDP, UDP_GRO) => {
                datagram.segment =
                    message.word().and_then(|word| u16::try_from(i32::from_ne_bytes(word)).ok());
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                datagram.overflowed = message.word().map(u32::from_ne_bytes);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // Layout of struct in_pktinfo: device, ipi_spec_dst, ipi_addr.
                let Some([_, _, _, _, answer @ .., a, b, c, d]) = message.data.first_chunk::<12>() else {
                    continue;
                };
                datagram.arrived_at = Some(Ipv4Addr::new(*a, *b, *c, *d).into());
                // For a broadcast, ipi_spec_dst is the address of the receiving device.
                datagram.answer_from = Some(Ipv4Addr::from(*answer).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // Layout of struct in6_pktinfo: address, device.
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

/// A range of a received message.
#[derive(Clone, Debug)]
struct Part {
    message: usize,
    range: Range<usize>,
}

struct Message {
    name: Option<RawAddress>,
    /// The source address, of the same family as `name`.
    from: Option<IpAddr>,
    segment: Option<u16>,
    parts: Range<usize>,
}

/// Messages to send, which consist of ranges of received messages.
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
    /// Returns an empty list of messages.
    pub fn new() -> Outgoing {
        Outgoing::default()
    }

    /// Removes all messages.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.parts.clear();
    }

    /// Returns the number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Returns whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds an empty message to `to`, or to the peer of a connected socket. With `segment` the kernel splits the
    /// payload into datagrams of this size (UDP_SEGMENT, Linux 4.18), at most [`SEGMENTS`]; the last datagram may be
    /// shorter.
    pub fn message(&mut self, to: Option<SocketAddr>, segment: Option<u16>) {
        let at = self.parts.len();
        self.messages.push(Message { name: to.map(RawAddress::from), from: None, segment, parts: at..at });
    }

    /// Sets the source address of the last message, which goes to `to` (IP_PKTINFO, IPV6_PKTINFO), for sockets bound to
    /// the unspecified address. Has no effect without a message.
    pub fn from_last(&mut self, from: IpAddr, to: SocketAddr) {
        if let Some(message) = self.messages.last_mut() {
            message.from = match (from, to) {
                // A dual-stack socket sends IPv4 from a v4-mapped IPv6 address.
                (IpAddr::V4(from), SocketAddr::V6(_)) => Some(from.to_ipv6_mapped().into()),
                _ => Some(from),
            };
        }
    }

    /// Changes the segment size of the last message. Has no effect without a message.
    pub fn set_segment_last(&mut self, segment: u16) {
        if let Some(message) = self.messages.last_mut() {
            message.segment = Some(segment);
        }
    }

    /// Returns the parts of message `index`, as passed to [`Outgoing::part`].
    pub fn parts(&self, index: usize) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let parts = self.messages.get(index).map_or(0..0, |message| message.parts.clone());
        self.parts[parts].iter().map(|part| (part.message, part.range.clone()))
    }

    /// Appends bytes to the last message: `range` of message `index` of the [`Messages`] passed to [`Outgoing::send`].
    ///
    /// # Panics
    ///
    /// Panics if there is no message.
    pub fn part(&mut self, index: usize, range: Range<usize>) {
        let message = self.messages.last_mut().expect("a message was begun");
        self.parts.push(Part { message: index, range });
        message.parts.end = self.parts.len();
    }

    /// Returns the number of datagrams of message `index` on the wire and their total size; zeroes beyond the last
    /// message.
    pub fn size(&self, index: usize) -> (usize, usize) {
        let Some(message) = self.messages.get(index) else { return (0, 0) };
        let bytes: usize = self.parts[message.parts.clone()].iter().map(|part| part.range.len()).sum();
        let datagrams =
            message.segment.map_or(1, |segment| bytes.div_ceil(usize::from(segment.max(1))).max(1));
        (datagrams, bytes)
    }

    /// Returns the segment size of message `index`, if the message is split.
    pub fn segment(&self, index: usize) -> Option<u16> {
        self.messages.get(index)?.segment
    }

    /// Sends the messages from `first` on without waiting (sendmmsg(2)) and returns how many were sent. The kernel
    /// stops at the first message that fails; it returns the error of this message only if no message before it was
    /// sent.
    ///
    /// # Errors
    ///
    /// The error of message `first`: WouldBlock if the send buffer is full; EINVAL or EIO if UDP_SEGMENT is not
    /// possible (a datagram longer than the path MTU, a device without checksum offload); EMSGSIZE, ECONNREFUSED,
    /// ENETUNREACH.
    ///
    /// # Panics
    ///
    /// Panics if a part refers to a message that is not in `from`.
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
            // SAFETY: mmsghdr consists of numbers and pointers, for which zero is a valid value.
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
        // SAFETY: every header describes memory of this value or of `from` that outlives the call; the kernel only
        // reads it.
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

/// Writes the control messages of a message if it needs them.
fn put_control(header: &mut libc::msghdr, control: &mut Control, message: &Message) {
    let mut used = 0;
    if let Some(segment) = message.segment {
        used = put(control, used, libc::SOL_UDP, UDP_SEGMENT, segment);
    }
    match message.from {
        Some(IpAddr::V4(from)) => {
            // Device 0: the route determines the device.
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

/// Appends a control message after the first `used` bytes and returns the new number of used bytes.
pub(crate) fn put<T: Copy>(
    control: &mut Control,
    used: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: T,
) -> usize {
    let length = size_of::<T>() as libc::c_uint;
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
    let (space, length) = unsafe { (libc::CMSG_SPACE(length) as usize, libc::CMSG_LEN(length)) };
    let buffer = &mut control.0[used..used + space];
    let message = buffer.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: `buffer` is large enough for a header and its value (CMSG_SPACE), which is checked above; CMSG_SPACE keeps the
    // alignment, and nothing is read. The value is plain data.
    unsafe {
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        (*message).cmsg_len = length as _;
        libc::CMSG_DATA(message).cast::<T>().write_unaligned(value);
    }
    used + space
}

pub(crate) struct ControlMessage<'a> {
    /// The protocol level (cmsg_level).
    pub(crate) level: i32,
    /// The type of the message (cmsg_type).
    pub(crate) kind: i32,
    /// The data (CMSG_DATA), with the length in cmsg_len.
    pub(crate) data: &'a [u8],
}

impl ControlMessage<'_> {
    /// Returns the first four bytes of the data, or `None` if the data is shorter.
    pub(crate) fn word(&self) -> Option<[u8; 4]> {
        self.data.first_chunk().copied()
    }
}

/// Size of struct cmsghdr in bytes: cmsg_len (`__kernel_size_t`), cmsg_level, cmsg_type.
const HEADER: usize = LENGTH + 8;
const LENGTH: usize = size_of::<usize>();

/// Iterates over the messages in `control`, up to the first message with an impossible length.
pub(crate) fn messages(mut control: &[u8]) -> impl Iterator<Item = ControlMessage<'_>> {
    iter::from_fn(move || {
        let (length, rest) = control.split_first_chunk::<LENGTH>()?;
        let (level, rest) = rest.split_first_chunk::<4>()?;
        let (kind, _) = rest.split_first_chunk::<4>()?;
        let length = usize::from_ne_bytes(*length);
        let data = control.get(HEADER..length)?;
        // CMSG_ALIGN. Padding after the last message is optional.
        control = control.get(length.next_multiple_of(LENGTH)..).unwrap_or_default();
        Some(ControlMessage { level: i32::from_ne_bytes(*level), kind: i32::from_ne_bytes(*kind), data })
    })
}

/// Segment, overflow count, address of arrival, address to answer from, hops.
#[doc(hidden)]
pub type ControlFields = (Option<u16>, Option<u32>, Option<IpAddr>, Option<IpAddr>, Option<u8>);

/// Parses the control messages of a datagram, for the fuzzer (`fuzz/`).
#[doc(hidden)]
pub fn control_fields(control: &[u8]) -> ControlFields {
    // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
    let name: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let mut datagram = Datagram::new(&[], 0, &name);
    read_control(control, &mut datagram);
    let Datagram { segment, overflowed, arrived_at, answer_from, hops, .. } = datagram;
    (segment, overflowed, arrived_at, answer_from, hops)
}

/// MEMBARRIER_CMD_GLOBAL of include/uapi/linux/membarrier.h.
const GLOBAL: libc::c_long = 1;

/// Waits until every packet is delivered whose processing in the kernel began before the call. MEMBARRIER_CMD_GLOBAL
/// (Linux 4.3) is `synchronize_rcu`, and the kernel selects the socket of a packet and queues the packet under one RCU
/// lock (`__netif_receive_skb`). The call takes a few milliseconds, up to some tens on a busy machine.
///
/// # Errors
///
/// EINVAL on a kernel with nohz_full processors, which take no interrupts.
pub fn wait_for_packets_in_flight() -> io::Result<()> {
    // SAFETY: membarrier() takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0_u32, 0_i32) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
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
    fn received_data_is_forwarded_without_a_copy() {
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
    fn one_message_is_split_and_coalesced() {
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
    fn truncated_datagrams_are_marked() {
        let (sender, receiver) = pair();
        sender.send_to(&[1; 100], receiver.local_addr().unwrap()).expect("send");
        let mut batch = Batch::new(1, 60);
        receive(&mut batch, &receiver);
        let datagram = batch.get(0).unwrap();
        assert!(datagram.truncated);
        assert_eq!(datagram.bytes.len(), 60);
    }

    #[test]
    fn the_destination_address_is_reported() {
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
    fn a_reply_leaves_from_the_requested_address() {
        for (bind, to) in [("0.0.0.0:0", "127.0.0.7"), ("[::]:0", "127.0.0.8"), ("[::]:0", "::1")] {
            // The host has no IPv6.
            let Ok(receiver) = UdpSocket::bind(bind) else { continue };
            option::set_packet_info(receiver.as_fd(), true).expect("IP_PKTINFO");
            let there = SocketAddr::new(to.parse().unwrap(), receiver.local_addr().unwrap().port());
            let asks = if there.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
            let sender = UdpSocket::bind(asks).expect("bind");
            sender.send_to(b"question", there).expect("send");
            let mut batch = Batch::new(1, 60);
            receive(&mut batch, &receiver);
            let datagram = batch.get(0).unwrap();
            let (client, from) = (datagram.from().unwrap(), datagram.answer_from.unwrap());
            assert_eq!(from, there.ip(), "{bind}");
            let mut outgoing = Outgoing::new();
            // With a segment size the message needs a second control message, which must fit too.
            outgoing.message(Some(client), Some(4));
            outgoing.from_last(from, client);
            outgoing.part(0, 0..8);
            assert_eq!(outgoing.send(receiver.as_fd(), &batch, 0).expect("sendmmsg"), 1);
            let mut buffer = [0; 60];
            for part in ["ques", "tion"] {
                let (length, from) = sender.recv_from(&mut buffer).expect("recv");
                assert_eq!((&buffer[..length], from), (part.as_bytes(), there), "{bind}");
            }
        }
    }

    #[test]
    fn the_ttl_of_a_datagram_is_reported() {
        for (to, bind) in [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0"), ("127.0.0.1", "[::]:0")] {
            // The host has no IPv6.
            let Ok(receiver) = UdpSocket::bind(bind) else { continue };
            option::set_receive_hops(receiver.as_fd(), true).expect("IP_RECVTTL");
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

    fn message(length: usize, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&1_i32.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn kinds(control: &[u8]) -> Vec<(i32, usize)> {
        messages(control).map(|message| (message.kind, message.data.len())).collect()
    }

    #[test]
    fn messages_are_read_up_to_an_impossible_length() {
        let first = message(HEADER + 4, 7, &[0; 8]);
        let last = message(HEADER + 4, 8, &[0; 4]);
        assert_eq!(kinds(&[first.clone(), last].concat()), [(7, 4), (8, 4)]);
        for length in [0, HEADER - 1, HEADER + 5, usize::MAX] {
            let wrong = message(length, 9, &[0; 4]);
            assert_eq!(kinds(&[first.clone(), wrong].concat()), [(7, 4)], "{length}");
        }
        assert_eq!(kinds(&first[..HEADER - 1]), []);
    }

    #[test]
    fn the_call_returns() {
        super::wait_for_packets_in_flight().unwrap();
    }
}
