//! Entry points for the fuzzer (`fuzz/`): parsers of the kernel's replies.

use std::io;
use std::mem;
use std::net::IpAddr;

use crate::datagram::{self, Datagram};
use crate::{netlink, qdisc, route, sock_diag, unix_diag};

/// The parsed content of a netlink datagram.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// Sockets of sock_diag, each parsed as a socket and as a listener.
    pub sockets: Vec<(sock_diag::Entry, sock_diag::Listener)>,
    /// Queues of unix_diag, of the socket with the wanted inode and device.
    pub queues: Vec<unix_diag::Queue>,
    /// Connections of unix_diag.
    pub connections: Vec<unix_diag::Connection>,
    /// Clients in the queues of unix_diag.
    pub clients: Vec<(u64, Vec<u32>)>,
    pub sources: Vec<IpAddr>,
    /// Queueing disciplines of rtnetlink.
    pub qdiscs: Vec<qdisc::Qdisc>,
}

/// Parses one netlink datagram as every kind of reply that this crate requests. `wanted` is the inode and the device of
/// a unix socket. Also returns whether the datagram ends the dump.
pub fn netlink(datagram: &[u8], wanted: &[u8]) -> (io::Result<bool>, Answers) {
    let mut answers = Answers::default();
    let done = netlink::read_datagram(datagram, &mut |body: &[u8]| {
        answers.sockets.extend(sock_diag::read_any(body));
        answers.queues.extend(unix_diag::queue(body, wanted));
        answers.connections.extend(unix_diag::connection(body));
        answers.clients.extend(unix_diag::clients(body));
        answers.sources.extend(body.get(route::HEADER..).and_then(route::preferred_source));
        answers.qdiscs.extend(qdisc::parse(body));
    });
    (done, answers)
}

/// Returns the value of the attribute `kind` among `attributes`.
pub fn attribute(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    netlink::attribute(attributes, kind)
}

pub fn put_attribute(attributes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    netlink::put_attribute(attributes, kind, value);
}

/// Segment, overflow count, address of arrival, address to answer from, hops.
pub type ControlFields = (Option<u16>, Option<u32>, Option<IpAddr>, Option<IpAddr>, Option<u8>);

/// Parses the control messages of a datagram.
pub fn control(control: &[u8]) -> ControlFields {
    // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value (AF_UNSPEC).
    let name: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let mut datagram = Datagram {
        bytes: &[],
        truncated: false,
        segment: None,
        overflowed: None,
        arrived_at: None,
        answer_from: None,
        hops: None,
        name: &name,
    };
    datagram::read_control(control, &mut datagram);
    let Datagram { segment, overflowed, arrived_at, answer_from, hops, .. } = datagram;
    (segment, overflowed, arrived_at, answer_from, hops)
}
