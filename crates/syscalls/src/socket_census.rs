//! Lists the sockets of a network namespace in one pass over sock_diag(7), filtered inside the kernel.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::netlink;
use crate::sock_diag::{self, Entry, Reply, Request};
use crate::socket::Transport;

/// A request for the sockets of a transport protocol, of both families.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    pub transport: Transport,
    /// A bit `1 << state` for each state of [`sock_diag::state`] to list.
    pub states: u32,
    /// The only peer whose sockets are listed; without a port: any port of the address. `None`: all sockets.
    pub peer: Option<(IpAddr, Option<u16>)>,
    /// The only local port whose sockets are listed; 0: all ports.
    pub port: u16,
    /// Whether to ask for [`Socket::info`]. The kernel then locks each socket and the replies are larger.
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
    /// How many times the oldest segment without an answer, such as a SYN, was sent again. Or how many probes of a window in succession had
    /// no answer: a peer that does not read answers them.
    pub retransmits: u8,
    /// Bytes that the program has not read; after the peer has closed one more.
    pub unread: u32,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd; 0 for a socket without a process.
    pub inode: u32,
    /// User ID of the owner of the socket.
    pub user: u32,
    /// The answer of TCP, if it was asked for.
    pub info: Option<Info>,
}

/// A part of struct tcp_info.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Time since the last segment of the peer (the smaller of tcpi_last_data_recv and tcpi_last_ack_recv).
    pub silent: Duration,
    /// Time since the last data from the peer (tcpi_last_data_recv).
    pub received_ago: Duration,
    /// Time since the last data to the peer, or since the boot if there was none (tcpi_last_data_sent).
    pub sent_ago: Duration,
    /// Whether both sides use TCP timestamps. Before the handshake is over: not.
    pub timestamps: bool,
    /// Bytes that the peer has acknowledged; the SYN of a client is one (tcpi_bytes_acked).
    pub acknowledged: u64,
    /// Bytes that were sent, again and for the first time (tcpi_bytes_sent).
    pub sent: u64,
    /// Whether the last attempt to send did not leave this host, after [`Socket::retransmits`] others.
    pub unsent: bool,
}

impl Info {
    /// Returns the time since the last data in either direction.
    #[must_use]
    pub fn idle(&self) -> Duration {
        self.received_ago.min(self.sent_ago)
    }
}

/// The timers of retransmissions and of window probes (idiag_timer). With that of keepalives the peer has no data to answer.
const RETRANSMISSION: u8 = 1;
const PROBE: u8 = 4;
/// Extension bit of a request: TCP_INFO (INET_DIAG_INFO is attribute 2; the bit is one less).
const WITH_INFO: u8 = 1 << (INET_DIAG_INFO - 1);
const INET_DIAG_INFO: u16 = 2;
/// Offset of tcpi_options in struct tcp_info, and TCPI_OPT_TIMESTAMPS.
const OPTIONS: usize = 5;
const TIMESTAMPS: u8 = 1;
/// Offsets of tcpi_unacked and tcpi_retrans.
const UNACKED: usize = 24;
const RETRANS: usize = 36;
/// Offsets of tcpi_bytes_acked, tcpi_bytes_sent and tcpi_snd_wnd (Linux 5.4).
const BYTES_ACKED: usize = 120;
const BYTES_SENT: usize = 200;
const SND_WND: usize = 228;
/// Offset of tcpi_last_data_sent, tcpi_last_ack_sent, tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds.
const LAST: usize = 44;

/// Calls `found` for each socket in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of [`sock_diag::each`]. After an error `found` may have been called for some of the sockets.
pub fn each(query: &Query, mut found: impl FnMut(&Socket)) -> io::Result<()> {
    let mut request = Request::new(query.transport, query.states);
    if let Some((address, port)) = query.peer {
        request = request.peer(address, port);
    }
    request.port = query.port;
    if query.times && query.transport == Transport::Tcp {
        request.extensions = WITH_INFO;
    }
    request.send(|reply, attributes| found(&socket(reply, attributes)))
}

fn socket(reply: &Reply, attributes: &[u8]) -> Socket {
    let Entry { state, local, remote, expires } = sock_diag::entry(reply);
    let retransmits = if [RETRANSMISSION, PROBE].contains(&reply.timer) { reply.retransmits } else { 0 };
    let info = netlink::attribute(attributes, INET_DIAG_INFO).and_then(|info| {
        let u32_at = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let u64_at = |at: usize| Some(u64::from_ne_bytes(*info.get(at..)?.first_chunk()?));
        let (sent, received, acknowledged) = (u32_at(LAST)?, u32_at(LAST + 8)?, u32_at(LAST + 12)?);
        // What tcp_retransmit_skb cannot send is not counted as on its way. What has not left at all waits for the timer of window probes,
        // though the window is open (tcp_check_probe_timer).
        let is_on_its_way = u32_at(RETRANS)? > 0 || (u32_at(UNACKED)? == 0 && u32_at(SND_WND)? == 0);
        Some(Info {
            silent: Duration::from_millis(received.min(acknowledged).into()),
            received_ago: Duration::from_millis(received.into()),
            sent_ago: Duration::from_millis(sent.into()),
            timestamps: info[OPTIONS] & TIMESTAMPS != 0,
            acknowledged: u64_at(BYTES_ACKED)?,
            sent: u64_at(BYTES_SENT)?,
            unsent: retransmits > 0 && !is_on_its_way,
        })
    });
    let Reply { inode, user, receive_queue: unread, .. } = *reply;
    Socket { state, local, remote, expires, retransmits, unread, inode, user, info }
}
