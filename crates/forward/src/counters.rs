//! What a plane counts: by itself, on cache lines of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Why a packet was not sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Drop {
    /// No route is for it.
    NoRoute,
    /// It was longer than the room for one, so that its end was missing.
    Truncated,
    /// EAGAIN, ENOBUFS: what is to be sent had no room.
    QueueFull,
    /// EMSGSIZE: it is longer than the path to the next hop lets pass.
    TooLong,
    /// ECONNREFUSED: nobody listens at the next hop (ICMP port unreachable).
    Refused,
    /// EHOSTUNREACH, ENETUNREACH and the like: the next hop is out of reach.
    Unreachable,
    /// BFD says that the link to the next hop is down, and the default route is no other one.
    LinkDown,
    /// No further client had room, or no socket could be had for it.
    NoClient,
    /// Any other error of send().
    Other,
    /// The kernel had no room for it in the queue of the socket that it came to (`sk_drops`).
    Overflow,
}

impl Drop {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Drop; 10] = [
        Drop::NoRoute,
        Drop::Truncated,
        Drop::QueueFull,
        Drop::TooLong,
        Drop::Refused,
        Drop::Unreachable,
        Drop::LinkDown,
        Drop::NoClient,
        Drop::Other,
        Drop::Overflow,
    ];

    /// As in records.
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
            Drop::Other => "other",
            Drop::Overflow => "overflow",
        }
    }

    /// Why send() failed.
    pub(crate) fn of(error: &std::io::Error) -> Drop {
        use std::io::ErrorKind;
        match error.kind() {
            ErrorKind::WouldBlock => Drop::QueueFull,
            ErrorKind::ConnectionRefused => Drop::Refused,
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::NetworkDown => {
                Drop::Unreachable
            }
            // ENOBUFS and EMSGSIZE, which the standard library has no kinds for.
            _ => match error.raw_os_error() {
                Some(NO_BUFFER) => Drop::QueueFull,
                Some(TOO_LONG) => Drop::TooLong,
                _ => Drop::Other,
            },
        }
    }
}

/// errno ENOBUFS and EMSGSIZE on Linux, all architectures that Rust has but MIPS and SPARC.
const NO_BUFFER: i32 = 105;
const TOO_LONG: i32 = 90;

/// The counters of one plane, which it alone writes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    received: AtomicU64,
    received_bytes: AtomicU64,
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    returned: AtomicU64,
    dropped: [AtomicU64; Drop::ALL.len()],
    clients: AtomicU64,
    /// Messages that UDP_SEGMENT would not take, and that went one by one.
    unsegmented: AtomicU64,
    /// Processor time of the thread, as it was last.
    cpu_ns: AtomicU64,
}

/// What a plane did so far. A message of many datagrams counts as these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaneCounts {
    /// Packets that came, on the way there.
    pub received: u64,
    /// Bytes of their payloads.
    pub received_bytes: u64,
    /// Packets sent on, on the way there.
    pub sent: u64,
    /// Bytes of their payloads.
    pub sent_bytes: u64,
    /// Packets sent back to clients.
    pub returned: u64,
    /// Packets that were not sent on, by reason: those that are not 0.
    pub dropped: Vec<(Drop, u64)>,
    /// Clients that it has sockets for now.
    pub clients: u64,
    /// Messages that UDP_SEGMENT would not take, and that went one by one.
    pub unsegmented: u64,
    /// Processor time of the plane's thread, of all links, as it was within the last second or at its end.
    pub cpu_ns: u64,
}

impl PlaneCounts {
    /// All packets that were not sent on.
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped.iter().map(|(_, number)| number).sum()
    }
}

/// One writer: no need for an atomic addition.
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

    /// A packet that was sent came back as an ICMP error.
    pub(crate) fn failed_later(&self, reason: Drop) {
        let sent = self.sent.load(Ordering::Relaxed);
        if sent > 0 {
            self.sent.store(sent - 1, Ordering::Relaxed);
            self.dropped(reason, 1);
        }
    }

    /// What the kernel has counted since it was asked last.
    pub(crate) fn overflowed(&self, packets: u32) {
        add(&self.dropped[Drop::Overflow as usize], u64::from(packets));
    }

    pub(crate) fn unsegmented(&self) {
        add(&self.unsegmented, 1);
    }

    pub(crate) fn cpu(&self, time: Duration) {
        self.cpu_ns.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn cpu_so_far(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// One of its sockets has `now` clients, which had `before`.
    pub(crate) fn clients(&self, before: usize, now: usize) {
        add(&self.clients, (now as u64).wrapping_sub(before as u64));
    }

    pub(crate) fn read(&self) -> PlaneCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let dropped = Drop::ALL.into_iter().map(|reason| (reason, get(&self.dropped[reason as usize])));
        PlaneCounts {
            received: get(&self.received),
            received_bytes: get(&self.received_bytes),
            sent: get(&self.sent),
            sent_bytes: get(&self.sent_bytes),
            returned: get(&self.returned),
            dropped: dropped.filter(|(_, number)| *number > 0).collect(),
            clients: get(&self.clients),
            unsegmented: get(&self.unsegmented),
            cpu_ns: get(&self.cpu_ns),
        }
    }
}
