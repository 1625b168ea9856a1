//! One request to the kernel over netlink, and its answers.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::check;

/// Sends a request of `kind` with `body` and gives each answer's body to `answer`, until the kernel is done.
pub(crate) fn ask(
    protocol: libc::c_int,
    kind: u16,
    dump: bool,
    body: &[u8],
    answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    request(protocol, kind, if dump { libc::NLM_F_DUMP } else { libc::NLM_F_ACK }, body, answer)
}

/// Sends a request of `kind` that changes something, with `flags` such as NLM_F_CREATE, and waits until it is done.
pub(crate) fn change(protocol: libc::c_int, kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    request(protocol, kind, libc::NLM_F_ACK | flags, body, |_| {})
}

fn request(
    protocol: libc::c_int,
    kind: u16,
    flags: libc::c_int,
    body: &[u8],
    mut answer: impl FnMut(&[u8]),
) -> io::Result<()> {
    // SAFETY: socket() takes no pointers.
    let netlink =
        check(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: the call above gave a fresh descriptor that nobody else owns.
    let netlink = unsafe { OwnedFd::from_raw_fd(netlink) };
    let flags = libc::NLM_F_REQUEST | flags;
    let mut message = Vec::with_capacity(HEADER + body.len());
    // struct nlmsghdr: length, type, flags, sequence number, port.
    message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&(flags as u16).to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(body);
    // SAFETY: pointer and length describe the bytes of the message; without an address it goes to the kernel.
    let sent = unsafe { libc::send(netlink.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
    if sent == -1 {
        return Err(io::Error::last_os_error());
    }
    let mut buffer = vec![0_u8; 64 << 10];
    loop {
        // SAFETY: pointer and length describe writable room.
        let length = unsafe { libc::recv(netlink.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        if length == -1 {
            return Err(io::Error::last_os_error());
        }
        if read_datagram(&buffer[..length as usize], &mut answer)? {
            return Ok(());
        }
    }
}

const HEADER: usize = mem::size_of::<libc::nlmsghdr>();

/// True when the kernel is done.
fn read_datagram(mut datagram: &[u8], answer: &mut impl FnMut(&[u8])) -> io::Result<bool> {
    while datagram.len() >= HEADER {
        // SAFETY: at least as many bytes as a header has; it is plain data, and read_unaligned asks for no alignment.
        let header = unsafe { datagram.as_ptr().cast::<libc::nlmsghdr>().read_unaligned() };
        let length = (header.nlmsg_len as usize).clamp(HEADER, datagram.len());
        let body = &datagram[HEADER..length];
        match i32::from(header.nlmsg_type) {
            libc::NLMSG_DONE => return Ok(true),
            // An acknowledgement is an error of 0.
            libc::NLMSG_ERROR => match body.first_chunk::<4>().map(|bytes| i32::from_ne_bytes(*bytes)) {
                Some(0) => return Ok(true),
                errno => {
                    return Err(io::Error::from_raw_os_error(errno.map_or(libc::EPROTO, |errno| -errno)));
                }
            },
            _ => answer(body),
        }
        datagram = &datagram[length.next_multiple_of(4).min(datagram.len())..];
    }
    Ok(false)
}

/// Adds an attribute to those of a request.
pub(crate) fn put_attribute(request: &mut Vec<u8>, kind: u16, value: &[u8]) {
    request.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    request.extend_from_slice(&kind.to_ne_bytes());
    request.extend_from_slice(value);
    request.resize(request.len().next_multiple_of(4), 0);
}

/// The value of the attribute `kind` among those of a netlink message.
pub(crate) fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
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
