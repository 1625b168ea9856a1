use std::net::SocketAddr;
use std::time::Duration;

use fourtuple::ports::{PortRange, PortSet};

/// What this host has for a run, in one network namespace and at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Where the run goes; `None`: a unix socket, and nothing about ports matters.
    pub destination: Option<SocketAddr>,
    /// net.ipv4.ip_local_port_range, of IPv6 too.
    pub range: PortRange,
    /// net.ipv4.ip_local_reserved_ports: the kernel does not choose these by itself.
    pub reserved: PortSet,
    /// Ports of the range, not reserved, that somebody listens at. A port that was bound by number, at whatever address,
    /// is passed over by the search of every connect() (`__inet_hash_connect`: `tb->fastreuse >= 0`). Of UDP: 0.
    pub listened_at: u32,
    /// Source addresses; 1 when the kernel chooses by route.
    pub sources: u64,
    /// Tuples towards the destination from these sources that are taken already, by whichever process.
    pub taken: Taken,
    /// Whether tcp_tw_reuse=2 counts the connections of the run as loopback: an end of them is in 127.0.0.0/8 or is ::1
    /// (`tcp_twsk_unique`). An address of this host's own that is neither does not count.
    pub loopback: bool,
    /// net.ipv4.tcp_tw_reuse. 0: never; 1: everywhere; 2, the default: on loopback.
    pub tcp_tw_reuse: u8,
    /// net.ipv4.tcp_tw_reuse_delay (Linux 6.14); `None` where there is none: then it is until the next full second.
    pub tcp_tw_reuse_delay: Option<Duration>,
    /// net.ipv4.tcp_timestamps is not 0. Without timestamps nothing is reused.
    pub tcp_timestamps: bool,
    /// Limits on descriptors.
    pub descriptors: Descriptors,
    /// net.core.somaxconn: what listen(2) cuts a backlog to; `None`: not shown, as older kernels do in a namespace that
    /// belongs to a user namespace (`sysctl_core_net_init`).
    pub somaxconn: Option<u64>,
    /// net.ipv4.tcp_max_syn_backlog: handshakes under way, where there are no SYN cookies.
    pub tcp_max_syn_backlog: u64,
    /// net.ipv4.tcp_syncookies is not 0.
    pub tcp_syncookies: bool,
    /// Who listens at the destination, if it is in this namespace.
    pub listener: Option<ListenQueue>,
    /// The connection tracking, where the kernel has it. That does not say that a rule uses it.
    pub conntrack: Option<Conntrack>,
    /// net.ipv4.tcp_max_tw_buckets: most sockets in TIME_WAIT, per namespace. One more is closed at once
    /// (`inet_twsk_alloc`, counted as TCPTimeWaitOverflow).
    pub tcp_max_tw_buckets: u64,
    /// Sockets in TIME_WAIT in this namespace (`tw` of /proc/net/sockstat).
    pub time_wait: u64,
}

/// Tuples that are taken, by the state of who has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// ESTABLISHED; of UDP, connected.
    pub established: u64,
    /// TIME_WAIT.
    pub time_wait: u64,
    /// Being opened or being closed.
    pub other: u64,
    /// How many of those in TIME_WAIT come back in the first second from now, in the second, and so on (idiag_expires).
    pub time_wait_back: Vec<u64>,
}

impl Taken {
    /// All of them.
    pub fn all(&self) -> u64 {
        self.established + self.time_wait + self.other
    }

    /// What is left once TIME_WAIT is over.
    pub(super) fn forget_time_wait(&mut self) {
        self.time_wait = 0;
        self.time_wait_back.clear();
    }
}

/// RLIMIT_NOFILE, and what is used of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The soft limit, which holds.
    pub soft: u64,
    /// The hard limit, up to which anybody may raise the soft one.
    pub hard: u64,
    /// Descriptors that this process has open.
    pub open: u64,
}

/// The accept queues at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenQueue {
    /// How many sockets listen there; more than one: SO_REUSEPORT.
    pub sockets: u64,
    /// What the kernel made of the backlogs of listen(2), all sockets together (sk_max_ack_backlog).
    pub backlog: u64,
    /// Connections that wait for accept(2) now, in all queues together (sk_ack_backlog).
    pub waiting: u64,
}

/// The table of the connection tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conntrack {
    /// net.netfilter.nf_conntrack_max
    pub max: u64,
    /// net.netfilter.nf_conntrack_count, of this namespace. 0 mostly means that no rule tracks anything here.
    pub count: u64,
}

impl Snapshot {
    /// Ports that one source has for the destination: the range without the reserved ones and those listened at.
    pub fn ports(&self) -> u64 {
        let open = self.range.len() - self.reserved.count_in(self.range);
        u64::from(open.saturating_sub(self.listened_at))
    }

    /// Tuples towards the destination, free or taken: ports x sources.
    pub fn budget(&self) -> u64 {
        self.ports().saturating_mul(self.sources)
    }

    /// How old a TIME_WAIT must be for `connect()` to take it over; `None`: tcp_tw_reuse does not apply to this
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
