//! The counters of a plane. Each plane has its own cache lines, so that planes share no memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fourtuple_syscalls::Errno;

/// The reason why a packet was not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Drop {
    /// No route matched the packet, and the link has no default next hop.
    NoRoute,
    /// The packet was longer than the receive buffer of the plane.
    Truncated,
    /// EAGAIN or ENOBUFS: the send queue of the socket or the queue of the device was full.
    QueueFull,
    /// EMSGSIZE: the packet is longer than the path MTU to the next hop.
    TooLong,
    /// ECONNREFUSED: no socket listens at the next hop (ICMP port unreachable).
    Refused,
    /// EHOSTUNREACH, ENETUNREACH or ENETDOWN: the kernel has no route to the next hop.
    Unreachable,
    /// BFD reports that the link to the next hop is down, and no other default route exists.
    LinkDown,
    /// The packet is from a new client, and the limit of clients is reached, the kernel refuses another socket, or too many new clients
    /// arrive at once.
    NoClient,
    /// The packet came from a next hop or from the address of a link: replies would return to the forwarder.
    Circulating,
    /// Any other error of sendmsg(2).
    Other,
    /// The receive queue of the listening socket was full (`sk_drops`).
    Overflow,
    /// The UDP checksum of the packet was wrong (`sk_drops` and Udp.InCsumErrors).
    Checksum,
}

impl Drop {
    /// All reasons, in the order of reports.
    pub const ALL: [Drop; 12] = [
        Drop::NoRoute,
        Drop::Truncated,
        Drop::QueueFull,
        Drop::TooLong,
        Drop::Refused,
        Drop::Unreachable,
        Drop::LinkDown,
        Drop::NoClient,
        Drop::Circulating,
        Drop::Other,
        Drop::Overflow,
        Drop::Checksum,
    ];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Drop::NoRoute => "no-route",
            Drop::Truncated => "truncated",
            Drop::QueueFull => "queue-full",
            Drop::TooLong => "too-long",
            Drop::Refused => "refused",
            Drop::Unreachable => "unreachable",
            Drop::LinkDown => "link-down",
            Drop::NoClient => "no-client",
            Drop::Circulating => "circulating",
            Drop::Other => "other",
            Drop::Overflow => "overflow",
            Drop::Checksum => "checksum",
        }
    }

    /// Returns the reason for an error of sendmsg(2).
    pub(crate) fn of(error: &std::io::Error) -> Drop {
        use std::io::ErrorKind;
        match error.kind() {
            ErrorKind::WouldBlock => Drop::QueueFull,
            ErrorKind::ConnectionRefused => Drop::Refused,
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::NetworkDown => {
                Drop::Unreachable
            }
            // The standard library has no kinds for ENOBUFS and EMSGSIZE.
            _ => match Errno::of(error) {
                Some(Errno::ENOBUFS) => Drop::QueueFull,
                Some(Errno::EMSGSIZE) => Drop::TooLong,
                _ => Drop::Other,
            },
        }
    }
}

/// The counters of one plane. Only the thread of the plane writes them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    received: AtomicU64,
    received_bytes: AtomicU64,
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    /// Packets of `sent` for which an ICMP error arrived later. Two counters, because a counter must not decrease.
    failed_later: AtomicU64,
    returned: AtomicU64,
    dropped: [AtomicU64; Drop::ALL.len()],
    dropped_replies: [AtomicU64; Drop::ALL.len()],
    clients: AtomicU64,
    evicted: AtomicU64,
    unanswered: AtomicU64,
    /// Messages that the kernel refused to segment (UDP_SEGMENT), and that the plane sent as single packets.
    unsegmented: AtomicU64,
    failed_receives: AtomicU64,
    /// CPU time of the thread as of the last tick.
    cpu_ns: AtomicU64,
}

/// The counters of one plane for one link. A message that carries several datagrams counts as several packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaneCounts {
    /// Packets received from clients.
    pub received: u64,
    /// Bytes of their payloads.
    pub received_bytes: u64,
    /// Packets sent to next hops, without [`PlaneCounts::failed_later`].
    pub sent: u64,
    /// Bytes of the payloads of all packets given to the kernel; it does not report the length of a packet that failed later.
    pub sent_bytes: u64,
    /// Packets given to the kernel for which an ICMP error arrived later. They are in `dropped`.
    pub failed_later: u64,
    /// Replies returned to clients.
    pub returned: u64,
    /// Packets that were not forwarded, by reason. Reasons with 0 packets are left out.
    pub dropped: Vec<(Drop, u64)>,
    /// Replies that were not returned to their clients, by reason. Reasons with 0 replies are left out.
    pub dropped_replies: Vec<(Drop, u64)>,
    /// Clients that have a socket now.
    pub clients: u64,
    /// Clients closed early to make space for new clients. Established clients are never evicted.
    pub evicted: u64,
    /// Clients closed 2 s after their only packet, without a reply.
    pub unanswered: u64,
    /// Messages that the kernel refused to segment (UDP_SEGMENT), and that the plane sent as single packets.
    pub unsegmented: u64,
    /// Receive calls that failed, for example for lack of memory, and that the plane repeated. They lose no packet.
    pub failed_receives: u64,
    /// CPU time of the plane's thread for all links, at most one second old, or as of the end of the thread.
    pub cpu_ns: u64,
}

impl PlaneCounts {
    /// Returns the number of packets that were not forwarded.
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped.iter().map(|(_, number)| number).sum()
    }
}

/// Adds to a counter. The thread of the plane is the only writer, so that a load and a store suffice.
fn add(counter: &AtomicU64, number: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn received(&self, packets: usize, bytes: usize) {
        add(&self.received, packets as u64);
        add(&self.received_bytes, bytes as u64);
    }

    pub(crate) fn sent(&self, packets: usize, bytes: usize) {
        add(&self.sent, packets as u64);
        add(&self.sent_bytes, bytes as u64);
    }

    pub(crate) fn returned(&self, packets: usize) {
        add(&self.returned, packets as u64);
    }

    pub(crate) fn dropped(&self, reason: Drop, packets: usize) {
        add(&self.dropped[reason as usize], packets as u64);
    }

    pub(crate) fn dropped_reply(&self, reason: Drop) {
        add(&self.dropped_replies[reason as usize], 1);
    }

    /// Counts one packet of `sent` for the reason: an ICMP error arrived for a packet that was sent earlier.
    pub(crate) fn failed_later(&self, reason: Drop) {
        // The packet may have been sent by the process before a takeover.
        if self.failed_later.load(Ordering::Relaxed) < self.sent.load(Ordering::Relaxed) {
            add(&self.failed_later, 1);
            self.dropped(reason, 1);
        }
    }

    pub(crate) fn unsegmented(&self) {
        add(&self.unsegmented, 1);
    }

    pub(crate) fn failed_receive(&self) {
        add(&self.failed_receives, 1);
    }

    pub(crate) fn cpu(&self, time: Duration) {
        self.cpu_ns.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn cpu_so_far(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// Replaces the contribution of one listening socket: `now` clients instead of `before`.
    pub(crate) fn clients(&self, before: usize, now: usize) {
        add(&self.clients, (now as u64).wrapping_sub(before as u64));
    }

    pub(crate) fn evicted(&self, clients: usize) {
        add(&self.evicted, clients as u64);
    }

    pub(crate) fn unanswered(&self, clients: usize) {
        add(&self.unanswered, clients as u64);
    }

    pub(crate) fn read(&self) -> PlaneCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // Read before `sent`, which is never smaller.
        let failed_later = get(&self.failed_later);
        let by_reason = |counters: &[AtomicU64; Drop::ALL.len()]| {
            let counts = Drop::ALL.into_iter().map(|reason| (reason, get(&counters[reason as usize])));
            counts.filter(|(_, number)| *number > 0).collect()
        };
        PlaneCounts {
            received: get(&self.received),
            received_bytes: get(&self.received_bytes),
            sent: get(&self.sent).saturating_sub(failed_later),
            sent_bytes: get(&self.sent_bytes),
            failed_later,
            returned: get(&self.returned),
            dropped: by_reason(&self.dropped),
            dropped_replies: by_reason(&self.dropped_replies),
            clients: get(&self.clients),
            evicted: get(&self.evicted),
            unanswered: get(&self.unanswered),
            unsegmented: get(&self.unsegmented),
            failed_receives: get(&self.failed_receives),
            cpu_ns: get(&self.cpu_ns),
        }
    }
}
