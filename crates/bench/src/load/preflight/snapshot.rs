use std::net::SocketAddr;
use std::time::Duration;

use fourtuple::ports::{PortRange, PortSet};

/// The resources of this host for a run, in one network namespace at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The destination of the run; `None` for a unix socket, which has no ports. Of several, the first without a listening socket.
    pub destination: Option<SocketAddr>,
    /// net.ipv4.ip_local_port_range, of IPv6 too.
    pub range: PortRange,
    /// net.ipv4.ip_local_reserved_ports: the kernel does not choose these by itself.
    pub reserved: PortSet,
    /// Number of ports in the range, without reserved ones, on which a socket listens. The search of connect() skips each port
    /// that was bound by number, at any address (`__inet_hash_connect`: `tb->fastreuse >= 0`). 0 for UDP.
    pub listened_at: u32,
    /// Number of source addresses; 1 if the kernel chooses the source by route. Of several destinations the sum: their 4-tuples are
    /// distinct.
    pub sources: u64,
    /// 4-tuples from these sources to the destination that are in use by any process.
    pub taken: Taken,
    /// The reason why sockets could not be listed (sock_diag, unix_diag). If it is set, `taken`, `listened_at` and `listener`
    /// are unknown.
    pub unseen: Option<String>,
    /// Whether tcp_tw_reuse=2 treats the connections of the run as loopback: one of their addresses is in 127.0.0.0/8 or is
    /// ::1 (`tcp_twsk_unique`). Any other address of this host does not count.
    pub loopback: bool,
    /// net.ipv4.tcp_tw_reuse. 0: never; 1: everywhere; 2, the default: on loopback.
    pub tcp_tw_reuse: u8,
    /// net.ipv4.tcp_tw_reuse_delay (Linux 6.14). `None` on earlier kernels, where the delay lasts until the next full
    /// second.
    pub tcp_tw_reuse_delay: Option<Duration>,
    /// Whether net.ipv4.tcp_timestamps is not 0. Without timestamps no TIME_WAIT socket is reused.
    pub tcp_timestamps: bool,
    pub descriptors: Descriptors,
    /// net.core.somaxconn, to which listen(2) limits a backlog. `None` if it is not visible: older kernels hide it in a
    /// namespace that belongs to a user namespace (`sysctl_core_net_init`).
    pub somaxconn: Option<u64>,
    /// net.ipv4.tcp_max_syn_backlog: the limit on handshakes in progress without SYN cookies.
    pub tcp_max_syn_backlog: u64,
    /// Whether net.ipv4.tcp_syncookies is not 0.
    pub tcp_syncookies: bool,
    /// The listening sockets at the destination, if it is in this namespace.
    pub listener: Option<ListenQueue>,
    /// The table of connection tracking, if the kernel has one. It may be unused.
    pub conntrack: Option<Conntrack>,
    /// net.ipv4.tcp_max_tw_buckets: most sockets in TIME_WAIT, per namespace. A further socket is closed at once
    /// (`inet_twsk_alloc`, counted as TCPTimeWaitOverflow).
    pub tcp_max_tw_buckets: u64,
    /// Sockets in TIME_WAIT in this namespace (`tw` of /proc/net/sockstat).
    pub time_wait: u64,
}

/// The 4-tuples in use, by the state of their sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Sockets in ESTABLISHED; for UDP, connected sockets.
    pub established: u64,
    /// Sockets in TIME_WAIT.
    pub time_wait: u64,
    /// Sockets in the handshake, or closing.
    pub other: u64,
    /// Number of TIME_WAIT sockets that expire in the first second from now, in the second one, and so on (idiag_expires).
    pub time_wait_back: Vec<u64>,
}

impl Taken {
    /// Returns the number of all 4-tuples in use.
    pub fn all(&self) -> u64 {
        self.established + self.time_wait + self.other
    }

    /// Returns the number of 4-tuples that are in use even after all TIME_WAIT sockets have expired.
    pub(super) fn forget_time_wait(&mut self) {
        self.time_wait = 0;
        self.time_wait_back.clear();
    }
}

/// The limits of RLIMIT_NOFILE and the number of open descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The soft limit, which the kernel enforces.
    pub soft: u64,
    /// The hard limit, up to which any process may raise its soft limit.
    pub hard: u64,
    /// Number of open descriptors of this process.
    pub open: u64,
}

/// The accept queues at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenQueue {
    /// Number of listening sockets; more than one with SO_REUSEPORT.
    pub sockets: u64,
    /// Sum of the effective backlogs of all sockets (sk_max_ack_backlog).
    pub backlog: u64,
    /// Number of connections in all accept queues now (sk_ack_backlog).
    pub waiting: u64,
}

/// The table of connection tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conntrack {
    /// The sysctl net.netfilter.nf_conntrack_max.
    pub max: u64,
    /// net.netfilter.nf_conntrack_count, of this namespace. 0 usually means that no rule uses connection tracking.
    pub count: u64,
}

impl Snapshot {
    /// Adds the snapshot of another destination, to which connections go in turn with the connections of this snapshot.
    pub(crate) fn add(&mut self, other: Snapshot) {
        self.sources += other.sources;
        self.loopback &= other.loopback;
        self.unseen = self.unseen.take().or(other.unseen);
        let (taken, more) = (&mut self.taken, other.taken);
        taken.established += more.established;
        taken.time_wait += more.time_wait;
        taken.other += more.other;
        let seconds = taken.time_wait_back.len().max(more.time_wait_back.len());
        taken.time_wait_back.resize(seconds, 0);
        taken.time_wait_back.iter_mut().zip(more.time_wait_back).for_each(|(sum, more)| *sum += more);
        (self.destination, self.listener) = match (self.listener, other.listener) {
            // Both may be the queue of one socket (`[::]`): the smaller one is certain.
            (Some(one), Some(two)) => {
                (self.destination, Some(if one.backlog <= two.backlog { one } else { two }))
            }
            (Some(_), None) => (other.destination, None),
            (None, _) => (self.destination, None),
        };
    }

    /// Returns the number of ports that one source can use: the range without reserved ports and ports of listening sockets.
    pub fn ports(&self) -> u64 {
        let open = self.range.len() - self.reserved.count_in(self.range);
        u64::from(open.saturating_sub(self.listened_at))
    }

    /// Returns the number of 4-tuples to the destination, free or in use: ports x sources.
    pub fn budget(&self) -> u64 {
        self.ports().saturating_mul(self.sources)
    }

    /// Returns the age from which connect() reuses a TIME_WAIT socket; `None` if tcp_tw_reuse does not apply to this
    /// destination. Before Linux 6.14, which has no tcp_tw_reuse_delay, the upper bound of 1 s: `tcp_twsk_unique`
    /// compared clocks of whole seconds then.
    pub fn reuse(&self) -> Option<Duration> {
        let applies = self.tcp_timestamps
            && match self.tcp_tw_reuse {
                0 => false,
                2 => self.loopback,
                _ => true,
            };
        applies.then(|| self.tcp_tw_reuse_delay.unwrap_or(Duration::from_secs(1)))
    }
}
