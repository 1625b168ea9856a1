//! Bidirectional Forwarding Detection (RFC 5880, over UDP: RFC 5881), asynchronous mode.
//!
//! A [`Session`] is a state machine without a clock or a socket. A [`Demultiplexer`] selects the session for a packet. A
//! [`Link`] runs a session on its own thread: only this thread transmits, and data planes pass received packets to the link and
//! read its state.

mod link;
mod packet;
mod session;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use fastrand::Rng;
use fourtuple::spread::DeviceName;
use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::EventFd;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{neighbour, option, schedule};

use crate::bfd::link::{socket_failed, thread_failed};
use crate::bfd::session::HOPS;

pub use link::{Link, LinkError, LinkReport, LinkSettings, LinkState, Receive};
pub use packet::{Demultiplexer, Diagnostic, Discard, Discards, LENGTH, Packet, State};
pub(crate) use session::SavedState;
pub use session::{Action, Session, Settings, Timers, TimersError};

const BATCH: usize = 64;
/// The buffer for one packet in bytes: the length field of a control packet is one byte.
const MAX_PACKET: usize = 256;

#[derive(Debug)]
struct Shared {
    sessions: Mutex<Demultiplexer<Inbox>>,
    discards: Mutex<Discards>,
    waker: EventFd,
    ends: AtomicBool,
}

/// A socket that several sessions with different peers share; it passes each packet to the session of its peer.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    device: Option<DeviceName>,
    receiver: Arc<OwnedFd>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Port {
    /// Opens a socket at an address, bound to a device if one is given. The port discards packets for which it has no session.
    ///
    /// # Errors
    ///
    /// [`LinkError::Socket`], such as EADDRINUSE when another socket has the port; [`LinkError::Thread`].
    pub fn open(local: SocketAddr, device: Option<DeviceName>) -> Result<Arc<Port>, LinkError> {
        let port = Port::prepare(local, device, receiver(local, device)?)?;
        port.resume()?;
        Ok(port)
    }

    /// Creates a port from a socket that another process has received at. The caller starts it with [`Port::resume`] after it
    /// has registered the sessions, so that packets in the receive queue find them.
    pub(crate) fn prepare(
        local: SocketAddr,
        device: Option<DeviceName>,
        receiver: OwnedFd,
    ) -> Result<Arc<Port>, LinkError> {
        let address = fourtuple_syscalls::socket::local_address(receiver.as_fd())
            .map_err(socket_failed("getsockname()", local))?;
        let shared = Arc::new(Shared {
            sessions: Mutex::new(Demultiplexer::new()),
            discards: Mutex::new(Discards::default()),
            waker: EventFd::new().map_err(thread_failed("eventfd()"))?,
            ends: AtomicBool::new(false),
        });
        let receiver = Arc::new(receiver);
        Ok(Arc::new(Port { address, device, receiver, shared, thread: Mutex::default() }))
    }

    /// Starts to receive, unless the port already does.
    pub(crate) fn resume(&self) -> Result<(), LinkError> {
        let mut thread = locked(&self.thread);
        if thread.is_some() {
            return Ok(());
        }
        self.shared.ends.store(false, Ordering::Release);
        self.shared.waker.clear();
        let epoll = Epoll::new().map_err(thread_failed("epoll_create1()"))?;
        epoll.add(self.shared.waker.as_fd(), 0, Interest::READ).map_err(thread_failed("epoll_ctl()"))?;
        epoll.add(self.receiver.as_fd(), 1, Interest::READ).map_err(thread_failed("epoll_ctl()"))?;
        let (receiver, shared) = (Arc::clone(&self.receiver), Arc::clone(&self.shared));
        let started = thread::Builder::new()
            .name("bfd-port".to_owned())
            .spawn(move || receive(&receiver, &epoll, &shared))
            .map_err(thread_failed("clone()"))?;
        *thread = Some(started);
        Ok(())
    }

    /// Stops receiving: packets stay in the receive queue of the socket.
    pub(crate) fn pause(&self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.waker.signal();
        if let Some(thread) = locked(&self.thread).take() {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }

    /// Returns the local address of the socket.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns whether the port receives at this address, on this device or, with `None`, without a device.
    pub(crate) fn is_at(&self, local: SocketAddr, device: Option<DeviceName>) -> bool {
        (self.address, self.device) == (local, device)
    }

    /// Returns the socket.
    pub(crate) fn receiver(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }

    /// Returns the packets that the port has discarded because no session matched; sessions count their own discards.
    pub fn discards(&self) -> Discards {
        *locked(&self.shared.discards)
    }

    /// Returns the number of packets that the kernel dropped at the socket before the port could receive them (`sk_drops`):
    /// packets that the socket filter rejected because they had passed a router, and packets that found the receive queue full.
    pub fn overflowed(&self) -> u64 {
        option::dropped(self.receiver.as_fd()).unwrap_or(0).into()
    }

    fn add(&self, discriminator: u32, peer: IpAddr, inbox: Inbox) -> Result<(), LinkError> {
        let added = locked(&self.shared.sessions).add(discriminator, peer, inbox);
        if added { Ok(()) } else { Err(LinkError::Taken(peer)) }
    }

    fn remove(&self, discriminator: u32, peer: IpAddr) {
        locked(&self.shared.sessions).remove(discriminator, peer);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.pause();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receive(receiver: &OwnedFd, epoll: &Epoll, shared: &Shared) {
    // The thread has the same priority as the sessions that it receives for.
    let _ = schedule::go_first();
    let mut batch = Batch::new(BATCH, MAX_PACKET);
    while !shared.ends.load(Ordering::Acquire) {
        if batch.receive(receiver.as_fd()).is_err() {
            // `epoll_wait` fails only for invalid arguments.
            let _ = epoll.wait(&mut [Ready::NONE; 2], None);
            continue;
        }
        let sessions = locked(&shared.sessions);
        for datagram in batch.iter() {
            if let Err(why) = hand_over(&sessions, &datagram) {
                locked(&shared.discards).count(why);
            }
        }
    }
}

fn hand_over(sessions: &Demultiplexer<Inbox>, datagram: &Datagram<'_>) -> Result<(), Discard> {
    if datagram.hops != Some(HOPS) {
        return Err(Discard::Hops);
    }
    let packet = Packet::parse(datagram.bytes)?;
    let from = datagram.from().ok_or(Discard::Stranger)?;
    // The inbox counts the packets that it drops.
    sessions.find(&packet, from.ip())?.offer(datagram.bytes, from, datagram.hops);
    Ok(())
}

/// The maximum length of a control packet: the length field is one byte.
const MAX_BYTES: usize = 255;

/// The capacity in packets. A peer sends a few dozen packets per second; a faster sender is not the peer.
const WAITING: usize = 64;

/// A packet on its way from the receiving thread to the session.
struct QueuedPacket {
    bytes: [u8; MAX_BYTES],
    length: usize,
    from: SocketAddr,
    hops: Option<u8>,
}

impl QueuedPacket {
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[derive(Debug)]
struct SharedQueue {
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
    shared: Arc<SharedQueue>,
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
    fn wake(&self) {
        self.shared.waker.signal();
    }

    /// Returns the number of packets offered, and the number of them dropped because the queue was full.
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.offered.load(Ordering::Relaxed), self.shared.dropped.load(Ordering::Relaxed))
    }
}

/// The receiving side, which the session's thread owns.
struct InboxReceiver {
    queue: Receiver<QueuedPacket>,
    shared: Arc<SharedQueue>,
}

/// Creates an inbox: both of its sides.
fn open_inbox() -> io::Result<(Inbox, InboxReceiver)> {
    let (sender, receiver) = mpsc::sync_channel(WAITING);
    let shared = Arc::new(SharedQueue {
        waker: EventFd::new()?,
        wakeup_pending: AtomicBool::new(false),
        offered: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
    });
    Ok((Inbox { queue: sender, shared: Arc::clone(&shared) }, InboxReceiver { queue: receiver, shared }))
}

impl InboxReceiver {
    /// Returns the eventfd, readable when the queue has received a packet.
    fn waker(&self) -> &EventFd {
        &self.shared.waker
    }

    /// Takes the queued packets, at most one capacity; a packet that arrives meanwhile causes another wakeup.
    fn take(&self) -> impl Iterator<Item = QueuedPacket> + '_ {
        self.shared.waker.clear();
        // The flag is cleared before the queue is read: a packet queued after that causes another wakeup.
        self.shared.wakeup_pending.swap(false, Ordering::AcqRel);
        self.queue.try_iter().take(WAITING)
    }
}

/// The UDP port of control packets (RFC 5881, section 4).
pub const PORT: u16 = 3784;

/// The source ports of RFC 5881, section 4: each session keeps one of its own.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 49_152..=65_535;
/// The number of random ports to try before all ports are tried in turn.
const GUESSES: usize = 32;
/// DSCP CS6, network control (RFC 4594, section 3.1): queues that classify by DSCP send these packets first.
const CLASS: u8 = 48 << 2;

fn open(address: SocketAddr, device: Option<DeviceName>) -> Result<OwnedFd, LinkError> {
    let opened = socket::open(Transport::Udp, address, true).map_err(socket_failed("socket()", address))?;
    if let Some(device) = device {
        option::set_device(opened.as_fd(), device.name())
            .map_err(socket_failed("setsockopt(SO_BINDTODEVICE)", address))?;
    }
    Ok(opened)
}

/// Opens a socket that receives packets from the link only. The socket filter rejects packets with a hop limit below 255 (GTSM;
/// RFC 5881, section 5) before they occupy the receive queue or wake the thread; the session checks the hop limit again.
fn receiver(address: SocketAddr, device: Option<DeviceName>) -> Result<OwnedFd, LinkError> {
    let receiver = open(address, device)?;
    option::set_receive_hops(receiver.as_fd(), true)
        .map_err(socket_failed("setsockopt(IP_RECVTTL)", address))?;
    neighbour::refuse_distant(receiver.as_fd())
        .map_err(socket_failed("setsockopt(SO_ATTACH_FILTER)", address))?;
    socket::bind(receiver.as_fd(), address).map_err(socket_failed("bind()", address))?;
    Ok(receiver)
}

/// The socket that a session sends from: its own, or one that also sends data.
struct PacketSender(Arc<OwnedFd>);

impl PacketSender {
    /// Sends a packet with a TTL or hop limit of 255 and DSCP CS6.
    fn send(&self, packet: &[u8], to: SocketAddr) -> io::Result<()> {
        neighbour::send(self.0.as_fd(), packet, to, CLASS)
    }

    fn address(&self) -> io::Result<SocketAddr> {
        socket::local_address(self.0.as_fd())
    }
}

/// Opens a socket to send from, at a source port of its own: no other socket can bind the same port.
fn sender(local: SocketAddr, device: Option<DeviceName>, random: &mut Rng) -> Result<OwnedFd, LinkError> {
    let sender = open(local, device)?;
    let guesses: Vec<u16> = std::iter::repeat_with(|| random.u16(SOURCE_PORTS)).take(GUESSES).collect();
    for port in guesses.into_iter().chain(SOURCE_PORTS) {
        let address = with_port(local, port);
        match socket::bind(sender.as_fd(), address) {
            Ok(()) => return Ok(sender),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(socket_failed("bind()", address)(error)),
        }
    }
    Err(LinkError::NoSourcePort(local.ip()))
}

/// Sets the port of an address, and keeps the scope (interface) of a link-local IPv6 address.
fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

#[cfg(test)]
mod tests {
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
        let (inbox, inbox_receiver) = open_inbox().unwrap();
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
        let (inbox, inbox_receiver) = open_inbox().unwrap();
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
        let (inbox, inbox_receiver) = open_inbox().unwrap();
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
