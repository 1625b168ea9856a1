//! sock_diag(7): lists the sockets of the kernel that match a tuple, filtered inside the kernel.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::socket::Transport;
use crate::{Errno, netlink};

/// TCP states with their numbers in sock_diag (include/net/tcp_states.h); UDP uses `ESTABLISHED` and `CLOSE`.
pub mod state {
    /// Connected.
    pub const ESTABLISHED: u8 = 1;
    /// A connect() whose handshake is in progress.
    pub const SYN_SENT: u8 = 2;
    /// This host closed the connection first, and its FIN is not yet acknowledged.
    pub const FIN_WAIT1: u8 = 4;
    /// This host closed the connection first; the tuple stays in use for 60 s.
    pub const TIME_WAIT: u8 = 6;
    /// Without a peer (UDP); bound without a peer (TCP).
    pub const CLOSE: u8 = 7;
    /// The peer has closed the connection, this host has not.
    pub const CLOSE_WAIT: u8 = 8;
    /// The peer closed the connection first, then this host, whose FIN is not yet acknowledged.
    pub const LAST_ACK: u8 = 9;
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
    pub local: SocketAddr,
    /// Address and port of the peer.
    pub remote: SocketAddr,
    /// Time until the timer of the socket expires, if one is active (idiag_expires). In TIME_WAIT: until the state
    /// ends.
    pub expires: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Local address; the unspecified address stands for all addresses.
    pub local: SocketAddr,
    /// For the unspecified IPv6 address: whether the socket excludes IPv4 (IPV6_V6ONLY).
    pub ipv6_only: bool,
    /// Connections in the accept queue (sk_ack_backlog, which sock_diag returns in idiag_rqueue).
    pub waiting: u32,
    /// Limit of the accept queue: the backlog of listen(2), cut to net.core.somaxconn (sk_max_ack_backlog, in
    /// idiag_wqueue). The kernel admits one more connection (`sk_acceptq_is_full`).
    pub backlog: u32,
}

/// A socket that a SO_REUSEPORT group may contain: a TCP listener, or a UDP socket without a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub transport: Transport,
    /// Local address; the unspecified address stands for all addresses.
    pub local: SocketAddr,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd.
    pub inode: u32,
    /// Connections in the accept queue, or bytes in the receive queue of a UDP socket (idiag_rqueue).
    pub queue: u32,
    /// Whether it is the queue of a listener of MPTCP.
    pub mptcp: bool,
}

/// A filter for sockets; `None` matches all values.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    pub transport: Transport,
    pub source: Option<IpAddr>,
    pub source_port: Option<u16>,
    /// Address and port of the peer.
    pub destination: SocketAddr,
}

/// Calls `found` for every matching socket in the calling thread's network namespace.
///
/// # Errors
///
/// ENOENT: the kernel has no inet_diag, tcp_diag or udp_diag and cannot load it. EPROTONOSUPPORT: it has no sock_diag.
/// EBADMSG: a reply is too short to describe a socket. Other errors are from netlink. After an error `found` may have been called for
/// some of the sockets.
pub fn each(filter: &Filter, mut found: impl FnMut(Entry)) -> io::Result<()> {
    // Without a peer no socket in these states can match, and for LISTEN and BOUND the kernel would walk two more tables.
    const WITHOUT_PEER: u32 = 1 << state::LISTEN | 1 << state::CLOSE | 1 << state::BOUND;
    let has_peer = filter.destination.port() != 0;
    let mut request = Request::new(filter.transport, if has_peer { !WITHOUT_PEER } else { u32::MAX });
    if filter.destination.is_ipv6() {
        request.families = &[libc::AF_INET6];
    }
    request.peer_port = filter.destination.port();
    request.program = program(filter);
    request.send(|reply, _| found(entry(reply)))
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
        let mut request = Request::new(transport, states);
        request.extensions = INFO;
        request.send(|reply, attributes| {
            let [low, high] = reply.id.cookie.map(u64::from);
            let local = SocketAddr::new(plain_address(reply), u16::from_be_bytes(reply.id.source_port));
            let (inode, queue, mptcp) = (reply.inode, reply.receive_queue, is_mptcp(attributes));
            found(Member { transport, local, cookie: high << 32 | low, inode, queue, mptcp });
        })
    };
    each(Transport::Tcp, 1 << state::LISTEN)?;
    match each(Transport::Udp, 1 << state::CLOSE) {
        Err(error) if Errno::of(&error) == Some(Errno::ENOENT) => Ok(()),
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
    // Sockets in these states have no options: LISTEN is left out as well, because a listener is not a source.
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

/// Returns the number of TCP handshakes in progress (SYN_RECV) that a listener at this address gets, in the calling thread's network
/// namespace. A listener at `[::]` counts as one for both families, also with IPV6_V6ONLY. Handshakes whose state is in a SYN cookie
/// do not count.
///
/// # Errors
///
/// The errors of [`each_listener`].
pub fn handshakes(listener: SocketAddr) -> io::Result<usize> {
    let has_address = |local: IpAddr| match listener.ip().to_canonical() {
        IpAddr::V6(ip) if ip.is_unspecified() => true,
        IpAddr::V4(ip) if ip.is_unspecified() => local.is_ipv4(),
        ip => ip == local,
    };
    let mut count = 0;
    each_tcp(SYN_RECV, |reply, _| {
        let local = entry(reply).local;
        count += usize::from(local.port() == listener.port() && has_address(local.ip()));
    })?;
    Ok(count)
}

/// States of a request socket, which waits for the last ACK: SYN_RECV to users, TCP_NEW_SYN_RECV in the kernel.
const SYN_RECV: u32 = 1 << 3 | 1 << 12;

/// Passes the reply about each TCP socket in one of these states, of both families.
fn each_tcp(states: u32, found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    Request::new(Transport::Tcp, states).send(found)
}

/// The older request, which lists both families in one pass over the hash table. It exists for TCP only.
const TCPDIAG_GETSOCK: u16 = 18;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_REQ_BYTECODE: u16 = 1;
/// Attribute of replies about listening IPv6 sockets.
const INET_DIAG_SKV6ONLY: u16 = 11;
/// Attribute of replies with socket options as bits (struct inet_diag_sockopt).
const INET_DIAG_SOCKOPT: u16 = 22;
const INET_DIAG_BC_S_COND: u8 = 7;
const INET_DIAG_BC_D_COND: u8 = 8;

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

/// A request for the sockets of a transport protocol.
pub(crate) struct Request {
    transport: Transport,
    /// The address families, each of which has a request of its own. TCP has one request for both.
    families: &'static [libc::c_int],
    states: u32,
    /// Attributes of the replies (idiag_ext): bit N - 1 asks for attribute N.
    pub(crate) extensions: u8,
    /// Local port and port of the peer, which the kernel compares before it runs `program`; 0: any port.
    pub(crate) port: u16,
    peer_port: u16,
    /// Conditions for the kernel's filter machine; empty: all sockets.
    program: Vec<u8>,
}

impl Request {
    pub(crate) fn new(transport: Transport, states: u32) -> Request {
        let families = &[libc::AF_INET, libc::AF_INET6];
        Request { transport, families, states, extensions: 0, port: 0, peer_port: 0, program: Vec::new() }
    }

    /// Limits the request to the sockets of a peer; without a port: any port of the address.
    pub(crate) fn peer(mut self, address: IpAddr, port: Option<u16>) -> Request {
        self.peer_port = port.unwrap_or(0);
        self.program = joined(vec![condition(INET_DIAG_BC_D_COND, address, port)]);
        self
    }

    /// Passes each reply, with the bytes of its attributes, to `found`.
    pub(crate) fn send(&self, mut found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
        if self.transport == Transport::Tcp {
            return match ask(TCPDIAG_GETSOCK, &self.of_both_families(), &mut found) {
                // The answer to this request if the kernel has no inet_diag.
                Err(error) if Errno::of(&error) == Some(Errno::EOPNOTSUPP) => {
                    Err(io::Error::from(Errno::ENOENT))
                }
                result => result,
            };
        }
        for family in self.families {
            match ask(SOCK_DIAG_BY_FAMILY, &self.of_family(*family as u8), &mut found) {
                // A kernel without IPv6 has no handler for the family.
                Err(error) if *family == libc::AF_INET6 && Errno::of(&error) == Some(Errno::ENOENT) => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Returns struct inet_diag_req_v2 and the filter.
    fn of_family(&self, family: u8) -> Vec<u8> {
        // Family, protocol, extensions, padding, states, socket id.
        let mut body = vec![family, libc::IPPROTO_UDP as u8, self.extensions, 0];
        body.extend_from_slice(&self.states.to_ne_bytes());
        self.put_socket_id(&mut body);
        self.put_program(&mut body);
        body
    }

    /// Returns struct inet_diag_req and the filter.
    fn of_both_families(&self) -> Vec<u8> {
        // Family and lengths of addresses, which the kernel does not read, extensions, socket id, states, tables.
        let mut body = vec![0, 0, 0, self.extensions];
        self.put_socket_id(&mut body);
        body.extend_from_slice(&self.states.to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        self.put_program(&mut body);
        body
    }

    fn put_socket_id(&self, body: &mut Vec<u8>) {
        body.extend_from_slice(&self.port.to_be_bytes());
        body.extend_from_slice(&self.peer_port.to_be_bytes());
        body.extend_from_slice(&[0; mem::size_of::<SocketId>() - 4]);
    }

    fn put_program(&self, body: &mut Vec<u8>) {
        if !self.program.is_empty() {
            netlink::put_attribute(body, INET_DIAG_REQ_BYTECODE, &self.program);
        }
    }
}

/// Passes each reply, with the bytes of its attributes, to `found`; EBADMSG: a reply is too short to describe a socket.
fn ask(kind: u16, body: &[u8], found: &mut impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    let mut is_short = false;
    netlink::ask(libc::NETLINK_SOCK_DIAG, kind, true, body, |body| match read(body) {
        Some((reply, attributes)) => found(&reply, attributes),
        None => is_short = true,
    })?;
    if is_short { Err(io::Error::from(Errno::EBADMSG)) } else { Ok(()) }
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

fn is_ipv6_only(attributes: &[u8]) -> bool {
    netlink::attribute(attributes, INET_DIAG_SKV6ONLY).is_some_and(|value| value.first() == Some(&1))
}

fn listener(reply: &Reply, attributes: &[u8]) -> Listener {
    Listener {
        local: entry(reply).local,
        ipv6_only: is_ipv6_only(attributes),
        waiting: reply.receive_queue,
        backlog: reply.send_queue,
    }
}

/// Parses a reply as both kinds of dumps do; for the fuzzer.
pub(crate) fn read_any(body: &[u8]) -> Option<(Entry, Listener)> {
    read(body).map(|(reply, attributes)| (entry(&reply), listener(&reply, attributes)))
}

/// Returns the conditions of a filter.
fn program(filter: &Filter) -> Vec<u8> {
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
    joined(conditions)
}

/// Returns a program for the kernel's filter machine (inet_diag_bc_run): a list of conditions. A condition that does
/// not hold jumps past the end, which excludes the socket.
fn joined(conditions: Vec<Vec<u8>>) -> Vec<u8> {
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
fn condition(code: u8, address: IpAddr, port: Option<u16>) -> Vec<u8> {
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
    /// Whether it is the queue of a listener of MPTCP.
    pub mptcp: bool,
    /// For the unspecified IPv6 address: whether the socket excludes IPv4 (IPV6_V6ONLY).
    pub ipv6_only: bool,
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
/// INET_DIAG_INFO, without which the kernel does not tell the protocol above TCP.
const INFO: u8 = 1 << 1;

fn each_detail(transport: Transport, states: u32, mut found: impl FnMut(Detail)) -> io::Result<()> {
    let mut request = Request::new(transport, states);
    request.extensions = 1 << (INET_DIAG_SKMEMINFO - 1) | INFO;
    request.send(|reply, attributes| found(detail(reply, attributes)))
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
        mptcp: is_mptcp(attributes),
        ipv6_only: is_ipv6_only(attributes),
    }
}

/// Returns whether the protocol above TCP (ULP) is MPTCP.
fn is_mptcp(attributes: &[u8]) -> bool {
    const INET_DIAG_ULP_INFO: u16 = 19;
    const INET_ULP_INFO_NAME: u16 = 1;
    let name = netlink::attribute(attributes, INET_DIAG_ULP_INFO)
        .and_then(|above| netlink::attribute(above, INET_ULP_INFO_NAME));
    name.is_some_and(|name| name.starts_with(b"mptcp\0"))
}
