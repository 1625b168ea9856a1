//! sock_diag(7): lists the sockets of the kernel that match a tuple, filtered inside the kernel.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::netlink;
use crate::socket::Transport;

/// TCP states with their numbers in sock_diag (include/net/tcp_states.h); UDP uses `ESTABLISHED` and `CLOSE`.
pub mod state {
    /// Connected.
    pub const ESTABLISHED: u8 = 1;
    /// This host closed the connection first; the tuple stays in use for 60 s.
    pub const TIME_WAIT: u8 = 6;
    /// Without a peer (UDP); bound without a peer (TCP).
    pub const CLOSE: u8 = 7;
    /// The peer has closed the connection, this host has not.
    pub const CLOSE_WAIT: u8 = 8;
    /// Listening.
    pub const LISTEN: u8 = 10;
    /// In a request: TCP sockets that bind() bound to a port, without connect() or listen(). The replies have the state [`CLOSE`].
    /// Linux 6.8; older kernels do not list these sockets.
    pub const BOUND: u8 = 13;
}

/// A socket in the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// A constant of [`state`], or another TCP state.
    pub state: u8,
    /// Local address and port.
    pub local: SocketAddr,
    /// Address and port of the peer.
    pub remote: SocketAddr,
    /// Time until the timer of the socket expires, if one is active (idiag_expires). In TIME_WAIT: until the state
    /// ends.
    pub expires: Option<Duration>,
}

/// A listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Local address; the unspecified address stands for all addresses.
    pub local: SocketAddr,
    /// For the unspecified IPv6 address: whether the socket excludes IPv4 (IPV6_V6ONLY).
    pub only_ipv6: bool,
    /// Connections in the accept queue (sk_ack_backlog, which sock_diag returns in idiag_rqueue).
    pub waiting: u32,
    /// Limit of the accept queue: the backlog of listen(2), cut to net.core.somaxconn (sk_max_ack_backlog, in
    /// idiag_wqueue). The kernel admits one more connection (`sk_acceptq_is_full`).
    pub backlog: u32,
}

/// A socket that a SO_REUSEPORT group may contain: a TCP listener, or a UDP socket without a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Transport protocol.
    pub transport: Transport,
    /// Local address; the unspecified address stands for all addresses.
    pub local: SocketAddr,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd.
    pub inode: u32,
    /// Connections in the accept queue, or bytes in the receive queue of a UDP socket (idiag_rqueue).
    pub queue: u32,
}

/// A filter for sockets; `None` matches all values.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Transport protocol.
    pub transport: Transport,
    /// Local address.
    pub source: Option<IpAddr>,
    /// Local port.
    pub source_port: Option<u16>,
    /// Address and port of the peer.
    pub destination: SocketAddr,
}

/// Calls `found` for every matching socket in the calling thread's network namespace.
///
/// # Errors
///
/// ENOENT: the kernel has no inet_diag, tcp_diag or udp_diag and cannot load it. EPROTONOSUPPORT: it has no sock_diag.
/// Other errors are from netlink. After an error `found` may have been called for some of the sockets.
pub fn each(filter: &Filter, mut found: impl FnMut(Entry)) -> io::Result<()> {
    let family = if filter.destination.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    dump(filter, family as u8, &mut found)?;
    if family == libc::AF_INET {
        // IPv6 sockets with v4-mapped addresses share the tables of IPv4, but are listed under their own family.
        dump(filter, libc::AF_INET6 as u8, &mut found)?;
    }
    Ok(())
}

/// Calls `found` for every listening TCP socket in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`each`].
pub fn each_listener(mut found: impl FnMut(Listener)) -> io::Result<()> {
    each_tcp(1 << state::LISTEN, |reply, attributes| found(listener(reply, attributes)))
}

/// Calls `found` for every listening TCP socket and every UDP socket without a peer in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`each`]. Without UDP in sock_diag only TCP sockets are found.
pub fn each_member(mut found: impl FnMut(Member)) -> io::Result<()> {
    let mut each = |transport, states| {
        each_in(transport, states, |reply, _| {
            let [low, high] = reply.id.cookie.map(u64::from);
            let local = SocketAddr::new(plain_address(reply), u16::from_be_bytes(reply.id.source_port));
            let (inode, queue) = (reply.inode, reply.receive_queue);
            found(Member { transport, local, cookie: high << 32 | low, inode, queue });
        })
    };
    each(Transport::Tcp, 1 << state::LISTEN)?;
    match each(Transport::Udp, 1 << state::CLOSE) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}

/// Returns the local address. An IPv6 socket keeps its form of an IPv4 address, as its group has no IPv4 sockets.
fn plain_address(reply: &Reply) -> IpAddr {
    if i32::from(reply.family) == libc::AF_INET {
        IpAddr::from(*reply.id.source.first_chunk::<4>().expect("16 bytes hold 4"))
    } else {
        IpAddr::from(reply.id.source)
    }
}

/// Calls `found` for every TCP socket with a peer, sockets in TIME_WAIT included, in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`each`].
pub fn each_connection(mut found: impl FnMut(Entry)) -> io::Result<()> {
    each_tcp(!(1 << state::LISTEN), |reply, _| found(entry(reply)))
}

/// Returns whether a TCP socket with this local address has IP_TRANSPARENT or IP_FREEBIND, which allow an address that is not of this
/// host, in the calling thread's network namespace. Linux before 5.10 does not tell; the answer is then `true`.
///
/// # Errors
///
/// The errors of [`each_listener`].
pub fn has_foreign_source(source: IpAddr) -> io::Result<bool> {
    // Bits freebind and transparent of the first byte of struct inet_diag_sockopt: bits 2 and 5, from either end.
    const FOREIGN: u8 = 1 << 2 | 1 << 5;
    // Sockets in these states have no options: LISTEN is left out as well, because a listener is no source.
    const WITHOUT: u32 = 1 << state::LISTEN | 1 << state::TIME_WAIT | SYN_RECV;
    let mut is_foreign = false;
    each_tcp(!WITHOUT, |reply, attributes| {
        if entry(reply).local.ip() == source {
            let options = netlink::attribute(attributes, INET_DIAG_SOCKOPT).and_then(<[u8]>::first);
            is_foreign |= options.is_none_or(|options| options & FOREIGN != 0);
        }
    })?;
    Ok(is_foreign)
}

/// Returns the number of TCP handshakes in progress at a local port (SYN_RECV), in the calling thread's network
/// namespace. Handshakes whose state is in a SYN cookie do not count.
///
/// # Errors
///
/// The errors of [`each_listener`].
pub fn handshakes(port: u16) -> io::Result<usize> {
    let mut count = 0;
    each_tcp(SYN_RECV, |reply, _| count += usize::from(entry(reply).local.port() == port))?;
    Ok(count)
}

/// States of a request socket, which waits for the last ACK: SYN_RECV to users, TCP_NEW_SYN_RECV in the kernel.
const SYN_RECV: u32 = 1 << 3 | 1 << 12;

/// Passes the reply about each TCP socket in one of these states, of both families.
fn each_tcp(states: u32, found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    each_in(Transport::Tcp, states, found)
}

fn each_in(transport: Transport, states: u32, mut found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        match ask(&request(family as u8, transport, states, &[]), &mut found) {
            // A kernel without IPv6 has no handler for the family.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {}
            result => result?,
        }
    }
    Ok(())
}

pub(crate) const SOCK_DIAG_BY_FAMILY: u16 = 20;
pub(crate) const INET_DIAG_REQ_BYTECODE: u16 = 1;
/// Attribute of replies about listening IPv6 sockets.
const INET_DIAG_SKV6ONLY: u16 = 11;
/// Attribute of replies with socket options as bits (struct inet_diag_sockopt).
const INET_DIAG_SOCKOPT: u16 = 22;
const INET_DIAG_BC_S_COND: u8 = 7;
pub(crate) const INET_DIAG_BC_D_COND: u8 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SocketId {
    pub(crate) source_port: [u8; 2],
    pub(crate) destination_port: [u8; 2],
    pub(crate) source: [u8; 16],
    pub(crate) destination: [u8; 16],
    pub(crate) interface: u32,
    pub(crate) cookie: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Reply {
    pub(crate) family: u8,
    pub(crate) state: u8,
    pub(crate) timer: u8,
    pub(crate) retransmits: u8,
    pub(crate) id: SocketId,
    pub(crate) expires: u32,
    pub(crate) receive_queue: u32,
    pub(crate) send_queue: u32,
    pub(crate) user: u32,
    pub(crate) inode: u32,
}

fn dump(filter: &Filter, family: u8, found: &mut impl FnMut(Entry)) -> io::Result<()> {
    let body = request(family, filter.transport, u32::MAX, &bytecode(filter));
    ask(&body, |reply, _| found(entry(reply)))
}

/// Passes each reply, with the bytes of its attributes, to `found`.
fn ask(body: &[u8], mut found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, body, |body| {
        if let Some((reply, attributes)) = read(body) {
            found(&reply, attributes);
        }
    })
}

/// Parses a reply. Returns it with the bytes of its attributes.
pub(crate) fn read(body: &[u8]) -> Option<(Reply, &[u8])> {
    let attributes = body.get(mem::size_of::<Reply>()..)?;
    // SAFETY: the slice is at least as long as a reply, which is plain data; read_unaligned needs no alignment.
    Some((unsafe { body.as_ptr().cast::<Reply>().read_unaligned() }, attributes))
}

pub(crate) fn entry(reply: &Reply) -> Entry {
    let address = |bytes: [u8; 16], port: [u8; 2]| {
        let ip = if i32::from(reply.family) == libc::AF_INET {
            IpAddr::from(*bytes.first_chunk::<4>().expect("16 bytes hold 4"))
        } else {
            // Callers know v4-mapped addresses as IPv4 addresses.
            IpAddr::from(bytes).to_canonical()
        };
        SocketAddr::new(ip, u16::from_be_bytes(port))
    };
    Entry {
        state: reply.state,
        local: address(reply.id.source, reply.id.source_port),
        remote: address(reply.id.destination, reply.id.destination_port),
        expires: (reply.timer != 0).then(|| Duration::from_millis(reply.expires.into())),
    }
}

fn listener(reply: &Reply, attributes: &[u8]) -> Listener {
    Listener {
        local: entry(reply).local,
        only_ipv6: netlink::attribute(attributes, INET_DIAG_SKV6ONLY)
            .is_some_and(|value| value.first() == Some(&1)),
        waiting: reply.receive_queue,
        backlog: reply.send_queue,
    }
}

/// Parses a reply as both kinds of dumps do; for the fuzzer.
pub(crate) fn read_any(body: &[u8]) -> Option<(Entry, Listener)> {
    read(body).map(|(reply, attributes)| (entry(&reply), listener(&reply, attributes)))
}

fn request(family: u8, transport: Transport, states: u32, program: &[u8]) -> Vec<u8> {
    let protocol = match transport {
        Transport::Tcp => libc::IPPROTO_TCP,
        Transport::Udp => libc::IPPROTO_UDP,
    };
    // Layout of struct inet_diag_req_v2: family, protocol, no extensions, padding, states, and an empty socket id.
    let mut body = vec![family, protocol as u8, 0, 0];
    body.extend_from_slice(&states.to_ne_bytes());
    body.extend_from_slice(&[0; mem::size_of::<SocketId>()]);
    if program.is_empty() {
        return body;
    }
    body.extend_from_slice(&((4 + program.len()) as u16).to_ne_bytes());
    body.extend_from_slice(&INET_DIAG_REQ_BYTECODE.to_ne_bytes());
    body.extend_from_slice(program);
    body
}

/// Returns a program for the kernel's filter machine (inet_diag_bc_run): a list of conditions. A condition that does
/// not hold jumps past the end, which excludes the socket.
fn bytecode(filter: &Filter) -> Vec<u8> {
    let mut conditions =
        vec![condition(INET_DIAG_BC_D_COND, filter.destination.ip(), Some(filter.destination.port()))];
    match (filter.source, filter.source_port) {
        (Some(source), port) => conditions.push(condition(INET_DIAG_BC_S_COND, source, port)),
        (None, Some(port)) => {
            // A prefix of length 0 matches any address of any family.
            let mut any = condition(INET_DIAG_BC_S_COND, IpAddr::V4(Ipv4Addr::UNSPECIFIED), Some(port));
            any[4] = libc::AF_UNSPEC as u8;
            any[5] = 0;
            any.truncate(12);
            any[1] = 12;
            conditions.push(any);
        }
        (None, None) => {}
    }
    let mut rest: usize = conditions.iter().map(Vec::len).sum();
    let mut program = Vec::with_capacity(rest);
    for mut one in conditions {
        let no = (rest + 4) as u16;
        rest -= one.len();
        one[2..4].copy_from_slice(&no.to_ne_bytes());
        program.append(&mut one);
    }
    program
}

/// Returns struct inet_diag_bc_op and struct inet_diag_hostcond; the caller fills in the jump for "no".
pub(crate) fn condition(code: u8, address: IpAddr, port: Option<u16>) -> Vec<u8> {
    let (family, octets): (i32, Vec<u8>) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, Ipv6Addr::octets(&v6).to_vec()),
    };
    let length = 12 + octets.len();
    let port = port.map_or(-1, i32::from);
    let mut bytes = vec![code, length as u8, 0, 0, family as u8, (octets.len() * 8) as u8, 0, 0];
    bytes.extend_from_slice(&port.to_ne_bytes());
    bytes.extend_from_slice(&octets);
    bytes
}

/// A TCP listener or a UDP socket with its memory and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detail {
    /// Local address; the unspecified address stands for all addresses.
    pub local: SocketAddr,
    /// Address and port of the peer; port 0: no peer.
    pub remote: SocketAddr,
    /// Index of the interface to which the socket is bound (SO_BINDTODEVICE); 0: all interfaces.
    pub interface: u32,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// User ID of the owner of the socket.
    pub user: u32,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd.
    pub inode: u32,
    /// Connections in the accept queue, or bytes in the receive queue of a UDP socket (idiag_rqueue).
    pub queue: u32,
    /// Limit of the accept queue of a listener; bytes in the send queue of a UDP socket (idiag_wqueue).
    pub limit: u32,
    /// Receive buffer and drops; `None`: the kernel does not tell.
    pub memory: Option<Memory>,
}

/// The part of INET_DIAG_SKMEMINFO that concerns received packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Limit of the receive queue in bytes of kernel memory (sk_rcvbuf).
    pub receive_limit: u32,
    /// Packets that the socket dropped since it was created (sk_drops).
    pub drops: u32,
}

/// Calls `found` for every TCP listener in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`each`].
pub fn each_listener_detail(found: impl FnMut(Detail)) -> io::Result<()> {
    each_detail(Transport::Tcp, 1 << state::LISTEN, found)
}

/// Calls `found` for every UDP socket with a local port in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`each`].
pub fn each_udp_detail(found: impl FnMut(Detail)) -> io::Result<()> {
    each_detail(Transport::Udp, u32::MAX, found)
}

const INET_DIAG_SKMEMINFO: u16 = 7;

fn each_detail(transport: Transport, states: u32, mut found: impl FnMut(Detail)) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut body = request(family as u8, transport, states, &[]);
        // idiag_ext has bit N - 1 for attribute N.
        body[2] = 1 << (INET_DIAG_SKMEMINFO - 1);
        match ask(&body, |reply, attributes| found(detail(reply, attributes))) {
            // A kernel without IPv6 has no handler for the family.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {}
            result => result?,
        }
    }
    Ok(())
}

fn detail(reply: &Reply, attributes: &[u8]) -> Detail {
    let Entry { local, remote, .. } = entry(reply);
    let [low, high] = reply.id.cookie.map(u64::from);
    // SK_MEMINFO_RCVBUF is the second and SK_MEMINFO_DROPS the ninth of the numbers.
    let number = |index: usize| {
        let bytes = netlink::attribute(attributes, INET_DIAG_SKMEMINFO)?.get(index * 4..)?;
        Some(u32::from_ne_bytes(*bytes.first_chunk()?))
    };
    Detail {
        local,
        remote,
        interface: reply.id.interface,
        cookie: high << 32 | low,
        user: reply.user,
        inode: reply.inode,
        queue: reply.receive_queue,
        limit: reply.send_queue,
        memory: number(1).zip(number(8)).map(|(receive_limit, drops)| Memory { receive_limit, drops }),
    }
}
