//! Requests to the kernel over netlink, and their replies. What is public is for the fuzzer.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use crate::{Errno, qdisc, route, sock_diag, socket, unix_diag};

/// Sends a dump request of `kind` with `body` and passes the body of each reply to `answer` until the dump ends.
///
/// # Errors
///
/// EBADMSG: a message is truncated. EAGAIN: the table changed during the dump (NLM_F_DUMP_INTR). Other errors are from the kernel.
pub(crate) fn ask(
    protocol: libc::c_int,
    kind: u16,
    dump: bool,
    body: &[u8],
    answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    request(protocol, kind, if dump { libc::NLM_F_DUMP } else { libc::NLM_F_ACK }, body, answer)
}

/// Sends a dump request like [`ask`], and repeats the dump if the table changed in the meantime. `answer` then sees replies again.
pub(crate) fn ask_again(
    protocol: libc::c_int,
    kind: u16,
    body: &[u8],
    mut answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    const TRIES: u32 = 10;
    for _ in 1..TRIES {
        match ask(protocol, kind, true, body, &mut answer) {
            Err(error) if Errno::of(&error) == Some(Errno::EAGAIN) => {}
            result => return result,
        }
    }
    ask(protocol, kind, true, body, answer)
}

/// Sends a request of `kind` that changes state, with `flags` such as NLM_F_CREATE, and waits for the acknowledgement.
pub(crate) fn change(protocol: libc::c_int, kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    request(protocol, kind, libc::NLM_F_ACK | flags, body, |_| {})
}

/// Opens a netlink socket, close-on-exec. `flags`: 0 or SOCK_NONBLOCK.
pub(crate) fn open(protocol: libc::c_int, flags: libc::c_int) -> io::Result<OwnedFd> {
    socket::create(libc::AF_NETLINK, libc::SOCK_RAW | flags, protocol)
}

fn request(
    protocol: libc::c_int,
    kind: u16,
    flags: libc::c_int,
    body: &[u8],
    mut answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    let netlink = open(protocol, 0)?;
    let flags = libc::NLM_F_REQUEST | flags;
    let mut message = Vec::with_capacity(HEADER + body.len());
    // Layout of struct nlmsghdr: length, type, flags, sequence number, port.
    message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&(flags as u16).to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(body);
    uninterrupted(|| socket::send(netlink.as_fd(), &message))?;
    let mut buffer = vec![0_u8; 64 << 10];
    let mut is_inconsistent = false;
    loop {
        let length = uninterrupted(|| socket::receive(netlink.as_fd(), &mut buffer))?;
        is_inconsistent |= has_changed(&buffer[..length]);
        if read_datagram(&buffer[..length], &mut answer)? {
            // The table changed during the dump, so that entries may be missing. The caller may repeat the request.
            return if is_inconsistent { Err(io::Error::from(Errno::EAGAIN)) } else { Ok(()) };
        }
    }
}

/// Returns whether a message of a dump has the flag NLM_F_DUMP_INTR. The kernel sets the flag in the messages after a change of the
/// table, NLMSG_DONE included.
fn has_changed(mut datagram: &[u8]) -> bool {
    while let Some(header) = datagram.first_chunk::<8>() {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        if i32::from(u16::from_ne_bytes([header[6], header[7]])) & libc::NLM_F_DUMP_INTR != 0 {
            return true;
        }
        let next = length.max(HEADER).saturating_add(3) & !3;
        datagram = datagram.get(next..).unwrap_or_default();
    }
    false
}

const HEADER: usize = mem::size_of::<libc::nlmsghdr>();

/// Parses a datagram. Returns whether it ends the reply.
pub(crate) fn read_datagram(mut datagram: &[u8], answer: &mut impl FnMut(&[u8])) -> io::Result<bool> {
    while datagram.len() >= HEADER {
        // SAFETY: the slice is at least as long as a header, which is plain data; read_unaligned needs no alignment.
        let header = unsafe { datagram.as_ptr().cast::<libc::nlmsghdr>().read_unaligned() };
        let length = header.nlmsg_len as usize;
        if !(HEADER..=datagram.len()).contains(&length) {
            // The rest of the message is missing.
            return Err(io::Error::from(Errno::EBADMSG));
        }
        let body = &datagram[HEADER..length];
        match i32::from(header.nlmsg_type) {
            // The end of a dump carries an errno (netlink_dump_done): sock_diag returns -ENOENT here for a protocol
            // whose module is missing. Without a number the dump is complete.
            libc::NLMSG_DONE => return errno_of(body).map_or(Ok(()), result_of).map(|()| true),
            // An acknowledgement is NLMSG_ERROR with errno 0.
            libc::NLMSG_ERROR => return result_of(errno_of(body).unwrap_or(-libc::EPROTO)).map(|()| true),
            _ => answer(body),
        }
        datagram = &datagram[length.next_multiple_of(4).min(datagram.len())..];
    }
    Ok(false)
}

/// Returns the number at the start of NLMSG_ERROR and NLMSG_DONE: 0 or a negated errno.
fn errno_of(body: &[u8]) -> Option<i32> {
    body.first_chunk::<4>().map(|bytes| i32::from_ne_bytes(*bytes))
}

fn result_of(errno: i32) -> io::Result<()> {
    if errno < 0 { Err(io::Error::from_raw_os_error(errno.saturating_neg())) } else { Ok(()) }
}

/// Repeats a call while a signal interrupts it (EINTR).
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Appends an attribute to a request.
pub fn put_attribute(request: &mut Vec<u8>, kind: u16, value: &[u8]) {
    request.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    request.extend_from_slice(&kind.to_ne_bytes());
    request.extend_from_slice(value);
    request.resize(request.len().next_multiple_of(4), 0);
}

/// Returns the number at an offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

/// Returns the value of the attribute `kind` of a netlink message.
pub fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    while let Some(header) = attributes.first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([header[2], header[3]]) == kind {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

/// The parsed content of a netlink datagram, for the fuzzer (`fuzz/`).
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
pub fn read_all(datagram: &[u8], wanted: &[u8]) -> (io::Result<bool>, Answers) {
    let mut answers = Answers::default();
    let done = read_datagram(datagram, &mut |body: &[u8]| {
        answers.sockets.extend(sock_diag::read_any(body));
        answers.queues.extend(unix_diag::queue(body, wanted));
        answers.connections.extend(unix_diag::connection(body));
        answers.clients.extend(unix_diag::clients(body));
        answers.sources.extend(body.get(route::HEADER..).and_then(route::preferred_source));
        answers.qdiscs.extend(qdisc::parse(body));
    });
    (done, answers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a message as the kernel sends it: header, body, padding.
    fn message(kind: libc::c_int, body: &[u8]) -> Vec<u8> {
        let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend_from_slice(&(kind as u16).to_ne_bytes());
        message.extend_from_slice(&[0; 10]);
        message.extend_from_slice(body);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    fn read(datagram: &[u8]) -> (Result<bool, Option<i32>>, u32) {
        let mut answers = 0;
        let result = read_datagram(datagram, &mut |_| answers += 1);
        (result.map_err(|error| error.raw_os_error()), answers)
    }

    #[test]
    fn attributes_are_padded_and_carry_their_length() {
        let mut body = Vec::new();
        put_attribute(&mut body, 3, b"ab\0");
        assert_eq!(body, [&7_u16.to_ne_bytes()[..], &3_u16.to_ne_bytes(), b"ab\0\0"].concat());
    }

    #[test]
    fn the_end_of_a_dump_carries_its_errno() {
        let done = |errno: i32| message(libc::NLMSG_DONE, &errno.to_ne_bytes());
        let answer = message(20, b"socket");
        assert_eq!(read(&[answer.clone(), done(0)].concat()), (Ok(true), 1));
        assert_eq!(read(&done(-libc::ENOENT)), (Err(Some(libc::ENOENT)), 0));
        // A dump that fails after its first reply is incomplete, so the error must be returned.
        assert_eq!(read(&[answer.clone(), done(-libc::ENOMEM)].concat()), (Err(Some(libc::ENOMEM)), 1));
        assert_eq!(read(&message(libc::NLMSG_DONE, &[])), (Ok(true), 0));
        assert_eq!(read(&answer), (Ok(false), 1));
    }

    #[test]
    fn a_truncated_message_is_an_error() {
        let whole = message(20, b"socket");
        assert_eq!(read(&whole[..whole.len() - 4]), (Err(Some(libc::EBADMSG)), 0));
        let mut short = whole.clone();
        short[0] = 3;
        assert_eq!(read(&short), (Err(Some(libc::EBADMSG)), 0));
        assert_eq!(read(&[whole.clone(), short].concat()), (Err(Some(libc::EBADMSG)), 1));
    }

    #[test]
    fn a_dump_of_a_table_that_changed_is_noticed() {
        let whole = [message(20, b"socket"), message(libc::NLMSG_DONE, &[0; 4])].concat();
        assert!(!has_changed(&whole) && !has_changed(&[]) && !has_changed(&[0; 40]));
        let mut changed = whole.clone();
        changed[message(20, b"socket").len() + 6] = libc::NLM_F_DUMP_INTR as u8;
        assert!(has_changed(&changed));
        assert_eq!(read(&changed), (Ok(true), 1), "the replies are valid");
    }

    #[test]
    fn an_acknowledgement_is_an_error_of_0() {
        let error = |errno: i32| message(libc::NLMSG_ERROR, &errno.to_ne_bytes());
        assert_eq!(read(&error(0)), (Ok(true), 0));
        assert_eq!(read(&error(-libc::EPERM)), (Err(Some(libc::EPERM)), 0));
        assert_eq!(read(&error(i32::MIN)).1, 0);
        assert_eq!(read(&message(libc::NLMSG_ERROR, &[1])), (Err(Some(libc::EPROTO)), 0));
    }
}
