//! Socket options. Setting an option has three outcomes: set, unknown to this kernel, failed.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::{Errno, check};

/// IP_LOCAL_PORT_RANGE (include/uapi/linux/in.h, Linux 6.3), which libc does not define.
pub const IP_LOCAL_PORT_RANGE: libc::c_int = 51;

/// The result of setting an option that a kernel may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an option that the kernel has not got was not set"]
pub enum Answer {
    /// The option is set.
    Done,
    /// The kernel does not know the option (ENOPROTOOPT).
    Absent,
}

/// Sets an option with an int value (setsockopt(2)).
pub fn set_int(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: i32) -> io::Result<()> {
    set(socket, level, name, &value)
}

/// Returns an option with an int value (getsockopt(2)).
pub fn get_int(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<i32> {
    get(socket, level, name, 0)
}

/// Returns an option with a 64-bit value (getsockopt(2)).
pub fn get_u64(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<u64> {
    get(socket, level, name, 0)
}

/// Returns an option that consists of three numbers (getsockopt(2)).
pub(crate) fn get_three(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
) -> io::Result<[u32; 3]> {
    get(socket, level, name, [0; 3])
}

/// Returns the value of an option. `T` must be an integer or an array of integers, because the kernel writes any bytes
/// into it.
fn get<T: Copy>(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    mut value: T,
) -> io::Result<T> {
    let mut length = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointers describe writable memory for one T, and its length. All callers use integers or arrays of
    // integers, for which every bit pattern is valid.
    check(unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut length)
    })?;
    Ok(value)
}

fn set<T: ?Sized>(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let length = mem::size_of_val(value) as libc::socklen_t;
    // SAFETY: pointer and length describe one initialised value that outlives the call.
    check(unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length)
    })
    .map(drop)
}

fn answer(result: io::Result<()>) -> io::Result<Answer> {
    match result {
        Ok(()) => Ok(Answer::Done),
        Err(error) if Errno::of(&error) == Some(Errno::ENOPROTOOPT) => Ok(Answer::Absent),
        Err(error) => Err(error),
    }
}

/// Sets IP_LOCAL_PORT_RANGE: the ports for automatic choice, both bounds inclusive. A bound of 0 means the bound of
/// ip_local_port_range.
///
/// Works on IPv6 sockets too, at level IPPROTO_IP.
pub fn set_local_port_range(socket: BorrowedFd<'_>, low: u16, high: u16) -> io::Result<Answer> {
    let packed = u32::from(low) | u32::from(high) << 16;
    answer(set(socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &packed))
}

/// Sets IP_BIND_ADDRESS_NO_PORT (Linux 4.2): bind() with port 0 defers the choice of the port to connect().
pub fn set_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<Answer> {
    answer(set_int(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1))
}

/// Returns the two numbers of IP_LOCAL_PORT_RANGE as they were set; both 0 if they were not.
pub fn local_port_range(socket: BorrowedFd<'_>) -> io::Result<(u16, u16)> {
    let packed = get_int(socket, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE)?.cast_unsigned();
    Ok((packed as u16, (packed >> 16) as u16))
}

/// Returns whether IP_BIND_ADDRESS_NO_PORT is set.
pub fn has_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get_int(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT)? != 0)
}

/// Clears IP_BIND_ADDRESS_NO_PORT: bind() with port 0 chooses a port.
pub fn clear_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 0)
}

/// Returns the protocol of a socket (SO_PROTOCOL): 6 for TCP, 17 for UDP.
pub fn protocol(socket: BorrowedFd<'_>) -> io::Result<i32> {
    get_int(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL)
}

/// Sets SO_REUSEADDR.
pub fn set_reuse_address(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, i32::from(on))
}

/// Sets SO_REUSEPORT: sockets of one user may share address and port, and the kernel distributes connections and
/// datagrams.
pub fn set_reuse_port(socket: BorrowedFd<'_>) -> io::Result<Answer> {
    answer(set_int(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1))
}

/// Sets TCP_DEFER_ACCEPT: accept() returns a connection when its first data has arrived, or at the first retransmission
/// of the SYN-ACK after `seconds`.
pub fn set_defer_accept(socket: BorrowedFd<'_>, seconds: i32) -> io::Result<Answer> {
    answer(set_int(socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, seconds))
}

/// Returns TCP_DEFER_ACCEPT in seconds; 0: not set.
pub fn defer_accept(listener: BorrowedFd<'_>) -> io::Result<u32> {
    get(listener, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0)
}

/// Sets TCP_FASTOPEN on a listener: a SYN may carry data, for at most `queue` connections whose handshake is in progress. The kernel
/// does so only if bit 1 of net.ipv4.tcp_fastopen is set.
pub fn set_fast_open(listener: BorrowedFd<'_>, queue: i32) -> io::Result<Answer> {
    answer(set_int(listener, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, queue))
}

/// Returns the length of the queue of TCP_FASTOPEN; 0: not set.
pub fn fast_open(listener: BorrowedFd<'_>) -> io::Result<u32> {
    get(listener, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 0)
}

/// Sets IPV6_V6ONLY, before bind(): whether a socket at the unspecified IPv6 address leaves IPv4 to other sockets.
pub fn set_ipv6_only(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, i32::from(on))
}

/// Returns whether IPV6_V6ONLY is set on an IPv6 socket.
pub fn is_ipv6_only(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get_int(socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)? != 0)
}

/// Returns whether the socket listens (SO_ACCEPTCONN).
pub fn is_listening(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get_int(socket, libc::SOL_SOCKET, libc::SO_ACCEPTCONN)? != 0)
}

/// Returns whether SO_REUSEPORT is set.
pub fn has_reuse_port(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get_int(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT)? != 0)
}

/// Sets SO_RCVTIMEO: recv() and accept() of a blocking socket fail with EAGAIN after `timeout`.
pub fn set_receive_timeout(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let value = libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: timeout.subsec_micros() as libc::suseconds_t,
    };
    set(socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &value)
}

/// Sets TCP_NODELAY: small segments do not wait for the ACK of earlier segments. Accepted sockets inherit it from the
/// listener.
pub fn set_no_delay(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Sets SO_BINDTODEVICE: the name of a network device or VRF, at most 15 bytes.
pub fn set_device(socket: BorrowedFd<'_>, device: &str) -> io::Result<()> {
    // The kernel needs no terminator.
    set(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device)
}

/// Takes a bound UDP socket out of the lookup for incoming packets, by a device that does not exist (SO_BINDTOIFINDEX). The port stays
/// bound, and queued packets can still be read.
///
/// # Errors
///
/// EPERM for a socket with SO_BINDTODEVICE without CAP_NET_RAW.
pub fn set_unreachable(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, libc::c_int::MAX)
}

/// Sets SO_LINGER to 0 seconds: close() sends RST and leaves no TIME_WAIT. Intended for tests and measurements.
pub fn set_reset_on_close(socket: BorrowedFd<'_>) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    set(socket, libc::SOL_SOCKET, libc::SO_LINGER, &linger)
}

/// Clears TCP_QUICKACK before connect(): the last ACK of the handshake waits for data that follows at once and is sent
/// with it (`tcp_rcv_synsent_state_process`), which saves both sides a segment.
pub fn set_ack_with_data(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0)
}

/// Sets UDP_GRO (Linux 5.0): the kernel coalesces consecutive datagrams of one sender into one message.
pub fn set_udp_gro(socket: BorrowedFd<'_>, on: bool) -> io::Result<Answer> {
    answer(set_int(socket, libc::SOL_UDP, crate::datagram::UDP_GRO, i32::from(on)))
}

/// Sets SO_RXQ_OVFL: each message carries the number of datagrams that the socket has lost because its queue was full.
pub fn set_overflow_count(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, i32::from(on))
}

/// Returns the number of packets that this socket has dropped since it was opened, modulo 2^32 (SO_MEMINFO:
/// `sk_drops`): its queue was full, a checksum was wrong, or its filter refused them.
pub fn dropped(socket: BorrowedFd<'_>) -> io::Result<u32> {
    const SK_MEMINFO_DROPS: usize = 8;
    Ok(memory(socket)?[SK_MEMINFO_DROPS])
}

/// Returns the memory of the messages in the receive queue of this socket, their overhead included (SO_MEMINFO: `sk_rmem_alloc`). A
/// UDP socket may count messages that were received shortly before too (`forward_deficit`).
pub fn queued(socket: BorrowedFd<'_>) -> io::Result<u32> {
    const SK_MEMINFO_RMEM_ALLOC: usize = 0;
    Ok(memory(socket)?[SK_MEMINFO_RMEM_ALLOC])
}

/// Returns the numbers of include/uapi/linux/sock_diag.h.
fn memory(socket: BorrowedFd<'_>) -> io::Result<[u32; 9]> {
    const SO_MEMINFO: libc::c_int = 55;
    get(socket, libc::SOL_SOCKET, SO_MEMINFO, [0; 9])
}

/// Returns whether this UDP socket has received a datagram since it was connected (SO_INCOMING_CPU: the kernel notes the processor of each
/// datagram in `__udp_queue_rcv_skb`, if the socket has a peer).
pub fn has_received(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get_int(socket, libc::SOL_SOCKET, libc::SO_INCOMING_CPU)? >= 0)
}

/// Sets IP_PKTINFO or IPV6_RECVPKTINFO: each message carries its destination address.
pub fn set_packet_info(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let (level, name) = by_family(socket, libc::IP_PKTINFO, libc::IPV6_RECVPKTINFO)?;
    set_int(socket, level, name, i32::from(on))
}

/// Sets the TTL or hop limit of sent packets (IP_TTL or IPV6_UNICAST_HOPS).
pub fn set_hops(socket: BorrowedFd<'_>, hops: u8) -> io::Result<()> {
    let (level, name) = by_family(socket, libc::IP_TTL, libc::IPV6_UNICAST_HOPS)?;
    set_int(socket, level, name, i32::from(hops))
}

/// Sets IP_RECVTTL or IPV6_RECVHOPLIMIT: each message carries its TTL. UDP needs it to accept packets from the link
/// only (GTSM, RFC 5082): IP_MINTTL and IPV6_MINHOPCOUNT can be set on a UDP socket, but only TCP checks them.
pub fn set_receive_hops(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let (level, name) = by_family(socket, libc::IP_RECVTTL, libc::IPV6_RECVHOPLIMIT)?;
    if level == libc::IPPROTO_IPV6 {
        // A dual-stack socket reports the TTL of IPv4 packets in the IPv4 message.
        set_int(socket, libc::IPPROTO_IP, libc::IP_RECVTTL, i32::from(on))?;
    }
    set_int(socket, level, name, i32::from(on))
}

/// Sets the traffic class of sent packets, DSCP in the upper six bits (IP_TOS or IPV6_TCLASS). Over IPv4 it also sets
/// their priority in the queue of the device (`rt_tos2priority`).
pub fn set_traffic_class(socket: BorrowedFd<'_>, class: u8) -> io::Result<()> {
    let (level, name) = by_family(socket, libc::IP_TOS, libc::IPV6_TCLASS)?;
    set_int(socket, level, name, i32::from(class))
}

/// Returns level and name of an option that has different names for IPv4 and IPv6.
fn by_family(
    socket: BorrowedFd<'_>,
    ipv4: libc::c_int,
    ipv6: libc::c_int,
) -> io::Result<(libc::c_int, libc::c_int)> {
    match get_int(socket, libc::SOL_SOCKET, libc::SO_DOMAIN)? {
        libc::AF_INET6 => Ok((libc::IPPROTO_IPV6, ipv6)),
        _ => Ok((libc::IPPROTO_IP, ipv4)),
    }
}

/// Sets SO_RCVBUF, the receive buffer in bytes, and returns the resulting size. The kernel limits the value to
/// `net.core.rmem_max` and doubles it.
pub fn set_receive_buffer(socket: BorrowedFd<'_>, bytes: i32) -> io::Result<i32> {
    set_int(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
    get_int(socket, libc::SOL_SOCKET, libc::SO_RCVBUF)
}

/// One instruction of classic BPF (bpf(4)): code, jumps when true and when false, operand.
pub type Instruction = (u16, u8, u8, u32);

/// Attaches a classic BPF program that selects the socket of the group by its index in the order of bind()
/// (SO_ATTACH_REUSEPORT_CBPF). Without a valid index the hash selects. The program sees a datagram from its payload on.
/// Needs no privilege.
pub fn attach_group_selector(socket: BorrowedFd<'_>, program: &[Instruction]) -> io::Result<Answer> {
    answer(attach(socket, libc::SO_ATTACH_REUSEPORT_CBPF, program))
}

/// Detaches the selector of the socket's SO_REUSEPORT group, so that the kernel's hash selects (SO_DETACH_REUSEPORT_BPF, Linux
/// 5.3).
///
/// # Errors
///
/// ENOENT: the group has no selector. EINVAL: the socket is not in a group.
pub fn detach_group_selector(socket: BorrowedFd<'_>) -> io::Result<()> {
    const DETACH_REUSEPORT_BPF: libc::c_int = 68;
    set_int(socket, libc::SOL_SOCKET, DETACH_REUSEPORT_BPF, 0)
}

/// Makes a TCP listener drop every SYN (SO_ATTACH_FILTER) without affecting its accept queue and handshakes in
/// progress. The client retransmits a dropped SYN, after 1 s at first. Accepted sockets inherit the filter, which never
/// matches their packets.
///
/// # Errors
///
/// EPERM without CAP_NET_ADMIN in the user namespace of the network namespace: upstream commit 5d39580f68e6 ("tcp: restrict SO_ATTACH_FILTER to
/// priv users"), in stable kernels since June 2026. Earlier kernels need no privilege.
pub fn drop_syns(listener: BorrowedFd<'_>) -> io::Result<()> {
    // The filter of a TCP socket sees a segment from the TCP header on (`tcp_filter`).
    const FLAGS: u32 = 13;
    const SYN: u32 = 0x02;
    const ACK: u32 = 0x10;
    let program = [
        ((libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16, 0, 0, FLAGS),
        ((libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16, 0, 0, SYN | ACK),
        ((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, 0, 1, SYN),
        ((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0),
        ((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, u32::MAX),
    ];
    attach_filter(listener, &program)
}

/// Attaches a filter (SO_ATTACH_FILTER): the socket receives only packets for which the program returns a number other
/// than 0 (the bytes to keep). The program of a UDP socket sees the datagram from its UDP header on. A refused packet
/// takes no space in the queue and wakes no thread; the kernel counts it in `sk_drops` ([`dropped`]). Needs no
/// privilege.
pub fn attach_filter(socket: BorrowedFd<'_>, program: &[Instruction]) -> io::Result<()> {
    attach(socket, libc::SO_ATTACH_FILTER, program)
}

fn attach(socket: BorrowedFd<'_>, name: libc::c_int, program: &[Instruction]) -> io::Result<()> {
    let mut filter: Vec<libc::sock_filter> =
        program.iter().map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k }).collect();
    let length = u16::try_from(filter.len()).map_err(|_| io::Error::from(Errno::EINVAL))?;
    let program = libc::sock_fprog { len: length, filter: filter.as_mut_ptr() };
    // The program describes `filter`, which outlives the call; the kernel copies it.
    set(socket, libc::SOL_SOCKET, name, &program)
}

/// Returns the number of connections in a listener's accept queue (TCP_INFO: `tcp_get_info` returns it in `tcpi_unacked`), without
/// handshakes in progress.
pub fn accept_queue(listener: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(queue(listener)?[0])
}

/// Returns the length of the accept queue of a TCP listener, as listen(2) has limited it.
pub fn backlog(listener: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(queue(listener)?[1])
}

/// Returns tcpi_unacked and tcpi_sacked of a listener.
fn queue(listener: BorrowedFd<'_>) -> io::Result<[u32; 2]> {
    // struct tcp_info starts with 8 bytes and 4 numbers that are unused here; the kernel fills only the given length.
    const UNACKED: usize = 6;
    let info = get(listener, libc::IPPROTO_TCP, libc::TCP_INFO, [0_u32; UNACKED + 2])?;
    Ok([info[UNACKED], info[UNACKED + 1]])
}

/// Returns the state of a TCP socket (tcpi_state): a constant of [`crate::sock_diag::state`], or another TCP state. A socket whose
/// connection is in TIME_WAIT has the state CLOSE.
pub fn tcp_state(socket: BorrowedFd<'_>) -> io::Result<u8> {
    Ok(get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, [0_u8; 1])?[0])
}

/// Returns the cookie of this socket (SO_COOKIE), never 0, which the host never reuses.
pub fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    get_u64(socket, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// Returns and clears the pending error of the socket (SO_ERROR).
pub fn take_error(socket: BorrowedFd<'_>) -> io::Result<Option<io::Error>> {
    let errno = get_int(socket, libc::SOL_SOCKET, libc::SO_ERROR)?;
    Ok((errno != 0).then(|| io::Error::from_raw_os_error(errno)))
}
