//! One socket at port 3784 for several sessions at the same address.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use fourtuple::spread::DeviceName;
use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::event_fd::EventFd;
use fourtuple_syscalls::{option, schedule};

use crate::bfd::demultiplexer::Demultiplexer;
use crate::bfd::discard::{Discard, Discards};
use crate::bfd::error::{LinkError, socket_failed, thread_failed};
use crate::bfd::inbox::Inbox;
use crate::bfd::packet::Packet;
use crate::bfd::session::HOPS;
use crate::bfd::sockets;

const BATCH: usize = 64;
const ROOM: usize = 256;

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
        let port = Port::prepare(local, device, sockets::receiver(local, device)?)?;
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

    pub(super) fn add(&self, discriminator: u32, peer: IpAddr, inbox: Inbox) -> Result<(), LinkError> {
        let added = locked(&self.shared.sessions).add(discriminator, peer, inbox);
        if added { Ok(()) } else { Err(LinkError::Taken(peer)) }
    }

    pub(super) fn remove(&self, discriminator: u32, peer: IpAddr) {
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
    let mut batch = Batch::new(BATCH, ROOM);
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
