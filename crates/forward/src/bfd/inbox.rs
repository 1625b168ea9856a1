//! Where data planes put the control packets that they receive, for the one task that owns the session.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};

use fourtuple_syscalls::bell::Bell;

/// No control packet is longer: its length is a byte.
const LONGEST: usize = 255;
/// Packets that may wait. A session gets a few dozen a second; whoever sends more is not its peer.
const WAITING: usize = 64;

/// A packet on its way from whoever received it to the session.
pub(super) struct Handed {
    bytes: [u8; LONGEST],
    length: usize,
    pub(super) from: SocketAddr,
    pub(super) hops: Option<u8>,
}

impl Handed {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[derive(Debug)]
struct Shared {
    bell: Bell,
    /// The bell was rung, and nobody has looked since.
    rung: AtomicBool,
    offered: AtomicU64,
    dropped: AtomicU64,
}

/// The side of those who receive: every plane has one, and none of them ever waits.
#[derive(Clone, Debug)]
pub struct Inbox {
    queue: SyncSender<Handed>,
    shared: Arc<Shared>,
}

impl Inbox {
    /// Hands over a datagram that came from an address with so many hops left; `None` where the socket does not tell
    /// (`option::set_hops_told`), which the session takes for too far. `false` when there is no room, or the session is gone:
    /// the packet is dropped and counted.
    ///
    /// Costs a copy, and a system call when the session has nothing to do yet: never a wait.
    pub fn offer(&self, datagram: &[u8], from: SocketAddr, hops: Option<u8>) -> bool {
        let length = datagram.len().min(LONGEST);
        let mut bytes = [0; LONGEST];
        bytes[..length].copy_from_slice(&datagram[..length]);
        self.shared.offered.fetch_add(1, Ordering::Relaxed);
        let taken = self.queue.try_send(Handed { bytes, length, from, hops }).is_ok();
        if !taken {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
        // Also when it is full: whoever is to empty it must not have missed a ring.
        if !self.shared.rung.swap(true, Ordering::AcqRel) {
            self.shared.bell.ring();
        }
        taken
    }

    /// Makes the task look, though nothing was handed over.
    pub(super) fn wake(&self) {
        self.shared.bell.ring();
    }

    /// Packets that were handed over, and those among them that found no room.
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.offered.load(Ordering::Relaxed), self.shared.dropped.load(Ordering::Relaxed))
    }
}

/// The side of the session.
pub(super) struct Outlet {
    queue: Receiver<Handed>,
    shared: Arc<Shared>,
}

/// Both sides.
pub(super) fn open() -> io::Result<(Inbox, Outlet)> {
    let (sender, receiver) = mpsc::sync_channel(WAITING);
    let shared = Arc::new(Shared {
        bell: Bell::new()?,
        rung: AtomicBool::new(false),
        offered: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
    });
    Ok((Inbox { queue: sender, shared: Arc::clone(&shared) }, Outlet { queue: receiver, shared }))
}

impl Outlet {
    /// Readable when something was handed over.
    pub(super) fn bell(&self) -> &Bell {
        &self.shared.bell
    }

    /// What waits, as much as there is room for: what comes meanwhile rings again.
    pub(super) fn take(&self) -> impl Iterator<Item = Handed> + '_ {
        self.shared.bell.silence();
        // Before the look into the queue: what is put there after it rings.
        self.shared.rung.swap(false, Ordering::AcqRel);
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

    fn is_rung(outlet: &Outlet) -> bool {
        socket::wait_readable(outlet.bell().as_fd(), Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn what_is_handed_over_comes_out_as_it_was() {
        let (inbox, outlet) = open().unwrap();
        assert!(!is_rung(&outlet));
        assert!(inbox.offer(b"one", from(), Some(255)));
        assert!(inbox.clone().offer(&[7; 1000], from(), None));
        assert!(is_rung(&outlet));
        let handed: Vec<_> = outlet.take().collect();
        assert_eq!(handed[0].bytes(), b"one");
        assert_eq!((handed[0].from, handed[0].hops), (from(), Some(255)));
        assert_eq!(handed[1].bytes(), [7; LONGEST]);
        assert!(!is_rung(&outlet));
        assert!(inbox.offer(b"", from(), Some(1)));
        assert!(is_rung(&outlet));
        assert_eq!(outlet.take().count(), 1);
    }

    #[test]
    fn a_flood_is_dropped_and_counted_and_nobody_waits() {
        let (inbox, outlet) = open().unwrap();
        let taken = (0..1000).filter(|_| inbox.offer(b"x", from(), Some(255))).count();
        assert_eq!(taken, WAITING);
        assert_eq!(inbox.counts(), (1000, 1000 - WAITING as u64));
        assert_eq!(outlet.take().count(), WAITING);
        assert!(inbox.offer(b"x", from(), Some(255)));
        drop(outlet);
        assert!(!inbox.offer(b"x", from(), Some(255)));
    }

    /// From four threads at once, and not one is left lying without a ring.
    #[test]
    fn no_ring_is_missed() {
        const EACH: u64 = 20_000;
        let (inbox, outlet) = open().unwrap();
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
            let rung = socket::wait_readable(outlet.bell().as_fd(), Some(Duration::from_secs(20))).unwrap();
            assert!(rung, "{got} came, and nothing rings");
            got += outlet.take().count() as u64;
        }
        for plane in planes {
            plane.join().unwrap();
        }
    }
}
