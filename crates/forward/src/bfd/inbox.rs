//! The queue in which data planes put received control packets for the thread that owns the session.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};

use fourtuple_syscalls::event_fd::EventFd;

/// The maximum length of a control packet: the length field is one byte.
const MAX_BYTES: usize = 255;
/// The capacity in packets. A peer sends a few dozen packets per second; a faster sender is not the peer.
const WAITING: usize = 64;

/// A packet on its way from the receiving thread to the session.
pub(super) struct QueuedPacket {
    bytes: [u8; MAX_BYTES],
    length: usize,
    pub(super) from: SocketAddr,
    pub(super) hops: Option<u8>,
}

impl QueuedPacket {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[derive(Debug)]
struct Shared {
    waker: EventFd,
    /// Whether a wakeup is pending: the eventfd was written and not read since.
    wakeup_pending: AtomicBool,
    offered: AtomicU64,
    dropped: AtomicU64,
}

/// The sending side, of which every data plane has a clone; it never blocks.
#[derive(Clone, Debug)]
pub struct Inbox {
    queue: SyncSender<QueuedPacket>,
    shared: Arc<Shared>,
}

impl Inbox {
    /// Queues a datagram for the session, with its source address and its TTL or hop limit. `hops` is `None` if the socket does
    /// not report the hop limit (`option::set_receive_hops`); the session then discards the packet as one from beyond the link.
    /// Returns `false` if the queue is full or the session has ended: the packet is dropped and counted.
    ///
    /// Costs a copy, and a write to the eventfd if no wakeup is pending. Never blocks.
    pub fn offer(&self, datagram: &[u8], from: SocketAddr, hops: Option<u8>) -> bool {
        let length = datagram.len().min(MAX_BYTES);
        let mut bytes = [0; MAX_BYTES];
        bytes[..length].copy_from_slice(&datagram[..length]);
        self.shared.offered.fetch_add(1, Ordering::Relaxed);
        let taken = self.queue.try_send(QueuedPacket { bytes, length, from, hops }).is_ok();
        if !taken {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
        // The wakeup is sent even if the queue is full, so that the session cannot miss it.
        if !self.shared.wakeup_pending.swap(true, Ordering::AcqRel) {
            self.shared.waker.signal();
        }
        taken
    }

    /// Wakes the session's thread without queuing a packet.
    pub(super) fn wake(&self) {
        self.shared.waker.signal();
    }

    /// Returns the number of packets offered, and the number of them dropped because the queue was full.
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.offered.load(Ordering::Relaxed), self.shared.dropped.load(Ordering::Relaxed))
    }
}

/// The receiving side, which the session's thread owns.
pub(super) struct InboxReceiver {
    queue: Receiver<QueuedPacket>,
    shared: Arc<Shared>,
}

/// Creates an inbox: both of its sides.
pub(super) fn open() -> io::Result<(Inbox, InboxReceiver)> {
    let (sender, receiver) = mpsc::sync_channel(WAITING);
    let shared = Arc::new(Shared {
        waker: EventFd::new()?,
        wakeup_pending: AtomicBool::new(false),
        offered: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
    });
    Ok((Inbox { queue: sender, shared: Arc::clone(&shared) }, InboxReceiver { queue: receiver, shared }))
}

impl InboxReceiver {
    /// Returns the eventfd, readable when the queue has received a packet.
    pub(super) fn waker(&self) -> &EventFd {
        &self.shared.waker
    }

    /// Takes the queued packets, at most one capacity; a packet that arrives meanwhile causes another wakeup.
    pub(super) fn take(&self) -> impl Iterator<Item = QueuedPacket> + '_ {
        self.shared.waker.clear();
        // The flag is cleared before the queue is read: a packet queued after that causes another wakeup.
        self.shared.wakeup_pending.swap(false, Ordering::AcqRel);
        self.queue.try_iter().take(WAITING)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use fourtuple_syscalls::socket;

    use super::*;

    fn from() -> SocketAddr {
        ([192, 0, 2, 1], 50_000).into()
    }

    fn is_rung(inbox_receiver: &InboxReceiver) -> bool {
        socket::wait_readable(inbox_receiver.waker().as_fd(), Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn packets_pass_unchanged() {
        let (inbox, inbox_receiver) = open().unwrap();
        assert!(!is_rung(&inbox_receiver));
        assert!(inbox.offer(b"one", from(), Some(255)));
        assert!(inbox.clone().offer(&[7; 1000], from(), None));
        assert!(is_rung(&inbox_receiver));
        let queued: Vec<_> = inbox_receiver.take().collect();
        assert_eq!(queued[0].bytes(), b"one");
        assert_eq!((queued[0].from, queued[0].hops), (from(), Some(255)));
        assert_eq!(queued[1].bytes(), [7; MAX_BYTES]);
        assert!(!is_rung(&inbox_receiver));
        assert!(inbox.offer(b"", from(), Some(1)));
        assert!(is_rung(&inbox_receiver));
        assert_eq!(inbox_receiver.take().count(), 1);
    }

    #[test]
    fn a_flood_is_dropped_and_counted_without_blocking() {
        let (inbox, inbox_receiver) = open().unwrap();
        let taken = (0..1000).filter(|_| inbox.offer(b"x", from(), Some(255))).count();
        assert_eq!(taken, WAITING);
        assert_eq!(inbox.counts(), (1000, 1000 - WAITING as u64));
        assert_eq!(inbox_receiver.take().count(), WAITING);
        assert!(inbox.offer(b"x", from(), Some(255)));
        drop(inbox_receiver);
        assert!(!inbox.offer(b"x", from(), Some(255)));
    }

    /// Four threads offer packets at once, and no packet stays in the queue without a wakeup.
    #[test]
    fn no_wakeup_is_missed() {
        const EACH: u64 = 20_000;
        let (inbox, inbox_receiver) = open().unwrap();
        let planes: Vec<_> = (0..4)
            .map(|_| {
                let inbox = inbox.clone();
                std::thread::spawn(move || {
                    for _ in 0..EACH {
                        while !inbox.offer(b"x", from(), Some(255)) {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut got = 0;
        while got < 4 * EACH {
            let wakeup_pending =
                socket::wait_readable(inbox_receiver.waker().as_fd(), Some(Duration::from_secs(60))).unwrap();
            assert!(wakeup_pending, "{got} came, and nothing rings");
            got += inbox_receiver.take().count() as u64;
        }
        for plane in planes {
            plane.join().unwrap();
        }
    }
}
