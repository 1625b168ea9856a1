//! Lists the sockets of a network namespace in one pass over sock_diag(7), filtered inside the kernel.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::netlink;
use crate::sock_diag::{self, Entry, INET_DIAG_BC_D_COND, INET_DIAG_REQ_BYTECODE, Reply, SocketId};
use crate::socket::Transport;

/// A request for the sockets of a transport protocol, of both families.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// Transport protocol.
    pub transport: Transport,
    /// A bit `1 << state` for each state of [`sock_diag::state`] to list.
    pub states: u32,
    /// The only peer whose sockets are listed; without a port: any port of the address. `None`: all sockets.
    pub peer: Option<(IpAddr, Option<u16>)>,
    /// Whether to ask for [`Socket::silent`]. The kernel then locks each socket and the replies are larger.
    pub times: bool,
}

/// A socket and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket {
    /// A constant of [`sock_diag::state`], or another TCP state.
    pub state: u8,
    /// Local address and port. An IPv4-mapped IPv6 address is an IPv4 address here.
    pub local: SocketAddr,
    /// Address and port of the peer.
    pub remote: SocketAddr,
    /// Time until the timer of the socket expires, if one is active. In TIME_WAIT: until the state ends.
    pub expires: Option<Duration>,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd; 0 for a socket without a process.
    pub inode: u32,
    /// User ID of the owner of the socket.
    pub user: u32,
    /// Time since the last segment of the peer (the smaller of tcpi_last_data_recv and tcpi_last_ack_recv).
    pub silent: Option<Duration>,
}

/// Extension bit of a request: TCP_INFO (INET_DIAG_INFO is attribute 2; the bit is one less).
const WITH_INFO: u8 = 1 << (INET_DIAG_INFO - 1);
const INET_DIAG_INFO: u16 = 2;
/// Offset of tcpi_last_data_recv in struct tcp_info; tcpi_last_ack_recv follows it. Both are in milliseconds.
const LAST_RECEIVED: usize = 52;

/// Calls `found` for each socket in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`sock_diag::each`]; EBADMSG: a reply is too short to describe a socket. After an error `found` may have been called for
/// some of the sockets.
pub fn each(query: &Query, mut found: impl FnMut(&Socket)) -> io::Result<()> {
    if query.transport == Transport::Tcp {
        return dump(TCPDIAG_GETSOCK, &request_of_both(query), &mut found);
    }
    for family in [libc::AF_INET, libc::AF_INET6] {
        match dump(sock_diag::SOCK_DIAG_BY_FAMILY, &request(query, family), &mut found) {
            // A kernel without IPv6 has no handler for the family.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {}
            result => result?,
        }
    }
    Ok(())
}

/// The older request, which lists both families in one pass over the hash table. It exists for TCP only.
const TCPDIAG_GETSOCK: u16 = 18;

fn dump(kind: u16, body: &[u8], found: &mut impl FnMut(&Socket)) -> io::Result<()> {
    let mut short = false;
    netlink::ask(libc::NETLINK_SOCK_DIAG, kind, true, body, |body| match sock_diag::read(body) {
        Some((reply, attributes)) => found(&socket(&reply, attributes)),
        None => short = true,
    })?;
    if short { Err(io::Error::from_raw_os_error(libc::EBADMSG)) } else { Ok(()) }
}

/// Returns struct inet_diag_req_v2 and the filter.
fn request(query: &Query, family: libc::c_int) -> Vec<u8> {
    // Family, protocol, no extensions, padding, states, and an empty socket id.
    let mut body = vec![family as u8, libc::IPPROTO_UDP as u8, 0, 0];
    body.extend_from_slice(&query.states.to_ne_bytes());
    body.extend_from_slice(&[0; mem::size_of::<SocketId>()]);
    put_filter(&mut body, query);
    body
}

/// Returns struct inet_diag_req and the filter.
fn request_of_both(query: &Query) -> Vec<u8> {
    // Family and lengths of addresses, which the kernel does not read, extensions, an empty socket id, states, tables.
    let mut body = vec![0, 0, 0, if query.times { WITH_INFO } else { 0 }];
    body.extend_from_slice(&[0; mem::size_of::<SocketId>()]);
    body.extend_from_slice(&query.states.to_ne_bytes());
    body.extend_from_slice(&[0; 4]);
    put_filter(&mut body, query);
    body
}

fn put_filter(body: &mut Vec<u8>, query: &Query) {
    let Some((address, port)) = query.peer else { return };
    let mut condition = sock_diag::condition(INET_DIAG_BC_D_COND, address, port);
    // A jump past the end excludes the socket.
    let no = (condition.len() + 4) as u16;
    condition[2..4].copy_from_slice(&no.to_ne_bytes());
    netlink::put_attribute(body, INET_DIAG_REQ_BYTECODE, &condition);
}

fn socket(reply: &Reply, attributes: &[u8]) -> Socket {
    let Entry { state, local, remote, expires } = sock_diag::entry(reply);
    let info = netlink::attribute(attributes, INET_DIAG_INFO);
    let silent = info.and_then(|info| info.get(LAST_RECEIVED..)?.first_chunk::<8>()).map(|times| {
        let [data, ack] =
            [0, 4].map(|at| u32::from_ne_bytes([times[at], times[at + 1], times[at + 2], times[at + 3]]));
        Duration::from_millis(data.min(ack).into())
    });
    Socket { state, local, remote, expires, inode: reply.inode, user: reply.user, silent }
}
