//! sock_diag(7): which sockets the kernel has on a tuple, filtered inside the kernel.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::netlink;
use crate::socket::Transport;

/// States of TCP as sock_diag numbers them (include/net/tcp_states.h); UDP uses the first and `CLOSE`.
pub mod state {
    /// Connected.
    pub const ESTABLISHED: u8 = 1;
    /// Closed by us last; the port is kept for 60 s.
    pub const TIME_WAIT: u8 = 6;
    /// Listening.
    pub const LISTEN: u8 = 10;
}

/// A socket that the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// One of [`state`], or another of the kernel's.
    pub state: u8,
    /// Its own address and port.
    pub local: SocketAddr,
    /// Its peer's.
    pub remote: SocketAddr,
    /// Until its timer fires, as far as it has one (idiag_expires): of TIME_WAIT, until its end.
    pub expires: Option<Duration>,
}

/// A socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Local address; an unspecified address stands for all.
    pub local: SocketAddr,
    /// Of the unspecified address of IPv6: whether IPv4 is left out (IPV6_V6ONLY).
    pub only_ipv6: bool,
    /// Connections that wait for accept(2) (sk_ack_backlog, which sock_diag has in idiag_rqueue).
    pub waiting: u32,
    /// How many may wait: the backlog of listen(2), cut to net.core.somaxconn (sk_max_ack_backlog, in idiag_wqueue). The
    /// kernel lets one more in (`sk_acceptq_is_full`).
    pub backlog: u32,
}

/// A filter for sockets; `None` matches all values.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Protocol.
    pub transport: Transport,
    /// Address of this side.
    pub source: Option<IpAddr>,
    /// Port of this side.
    pub source_port: Option<u16>,
    /// Address and port of the peer.
    pub destination: SocketAddr,
}

/// Calls `found` for every socket in the calling thread's network namespace that matches.
///
/// # Errors
///
/// ENOENT: the kernel has no inet_diag, tcp_diag or udp_diag and cannot load it. EPROTONOSUPPORT: it has no sock_diag. Others
/// are netlink's. After an error `found` may have been called for some of the sockets.
pub fn each(filter: &Filter, mut found: impl FnMut(Entry)) -> io::Result<()> {
    let family = if filter.destination.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    dump(filter, family as u8, &mut found)?;
    if family == libc::AF_INET {
        // IPv6 sockets with v4-mapped addresses share the tables of IPv4, but are listed under their own family.
        dump(filter, libc::AF_INET6 as u8, &mut found)?;
    }
    Ok(())
}

/// Calls `found` for every TCP socket that listens in the calling thread's network namespace.
///
/// # Errors
///
/// The same as [`each`].
pub fn each_listener(mut found: impl FnMut(Listener)) -> io::Result<()> {
    for family in [libc::AF_INET, libc::AF_INET6] {
        let body = request(family as u8, Transport::Tcp, 1 << state::LISTEN, &[]);
        let result = ask(&body, |reply, attributes| {
            found(listener(reply, attributes));
        });
        match result {
            // A kernel without IPv6 has no handler for it.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Number of TCP handshakes under way towards a local port (SYN_RECV), in the calling thread's network namespace. Those whose
/// state is in a SYN cookie are not among them.
///
/// # Errors
///
/// The same as [`each_listener`].
pub fn handshakes(port: u16) -> io::Result<usize> {
    // A request socket that waits for the last ACK is SYN_RECV to users, and TCP_NEW_SYN_RECV in the kernel.
    const SYN_RECV: u32 = 1 << 3 | 1 << 12;
    let mut count = 0;
    for family in [libc::AF_INET, libc::AF_INET6] {
        let body = request(family as u8, Transport::Tcp, SYN_RECV, &[]);
        match ask(&body, |reply, _| count += usize::from(entry(reply).local.port() == port)) {
            // A kernel without IPv6 has no handler for it.
            Err(error) if family == libc::AF_INET6 && error.raw_os_error() == Some(libc::ENOENT) => {}
            result => result?,
        }
    }
    Ok(count)
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_REQ_BYTECODE: u16 = 1;
/// An attribute of replies about IPv6 sockets that listen.
const INET_DIAG_SKV6ONLY: u16 = 11;
const INET_DIAG_BC_S_COND: u8 = 7;
const INET_DIAG_BC_D_COND: u8 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct SocketId {
    source_port: [u8; 2],
    destination_port: [u8; 2],
    source: [u8; 16],
    destination: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Reply {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    send_queue: u32,
    user: u32,
    inode: u32,
}

fn dump(filter: &Filter, family: u8, found: &mut impl FnMut(Entry)) -> io::Result<()> {
    let body = request(family, filter.transport, u32::MAX, &bytecode(filter));
    ask(&body, |reply, _| found(entry(reply)))
}

/// Gives each reply, with the bytes of the attributes behind it, to `found`.
fn ask(body: &[u8], mut found: impl FnMut(&Reply, &[u8])) -> io::Result<()> {
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, body, |body| {
        if let Some((reply, attributes)) = read(body) {
            found(&reply, attributes);
        }
    })
}

/// A reply, with the bytes of the attributes behind it.
fn read(body: &[u8]) -> Option<(Reply, &[u8])> {
    let attributes = body.get(mem::size_of::<Reply>()..)?;
    // SAFETY: as many bytes as a reply has; it is plain data, and read_unaligned asks for no alignment.
    Some((unsafe { body.as_ptr().cast::<Reply>().read_unaligned() }, attributes))
}

fn entry(reply: &Reply) -> Entry {
    let address = |bytes: [u8; 16], port: [u8; 2]| {
        let ip = if i32::from(reply.family) == libc::AF_INET {
            IpAddr::from(*bytes.first_chunk::<4>().expect("16 bytes hold 4"))
        } else {
            // Mapped addresses are the IPv4 ones that the caller knows.
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

/// A reply as both kinds of dumps read it; for the fuzzer.
pub(crate) fn read_any(body: &[u8]) -> Option<(Entry, Listener)> {
    read(body).map(|(reply, attributes)| (entry(&reply), listener(&reply, attributes)))
}

fn request(family: u8, transport: Transport, states: u32, program: &[u8]) -> Vec<u8> {
    let protocol = match transport {
        Transport::Tcp => libc::IPPROTO_TCP,
        Transport::Udp => libc::IPPROTO_UDP,
    };
    // struct inet_diag_req_v2: family, protocol, no extensions, padding, states, and no socket in particular.
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

/// A program for the kernel's filter machine (inet_diag_bc_run): conditions in a row, each of which jumps past the end
/// when it does not hold, which means: leave this socket out.
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

/// struct inet_diag_bc_op and struct inet_diag_hostcond; the jump for "no" is left open.
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
