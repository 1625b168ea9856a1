//! One socket at port 3784 for several sessions at the same address.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::schedule;

use super::demultiplexer::Demultiplexer;
use super::discard::{Discard, Discards};
use super::error::{LinkError, socket_failed, thread_failed};
use super::inbox::Inbox;
use super::packet::Packet;
use super::session::HOPS;
use super::sockets;

const BATCH: usize = 64;
const ROOM: usize = 256;

#[derive(Debug)]
struct Shared {
    sessions: Mutex<Demultiplexer<Inbox>>,
    discards: Mutex<Discards>,
    bell: Bell,
    ends: AtomicBool,
}

/// Receives for sessions that tell their peers apart, and hands each what is its own.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    receiver: Arc<OwnedFd>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Port {
    /// Receives at an address, on a device if one is named; what is for none of the sessions that use it is discarded.
    ///
    /// # Errors
    ///
    /// [`LinkError::Socket`], among others when somebody has the port (EADDRINUSE), and [`LinkError::Thread`].
    pub fn open(local: SocketAddr, device: Option<&str>) -> Result<Arc<Port>, LinkError> {
        let port = Port::prepare(local, sockets::receiver(local, device)?)?;
        port.go_on()?;
        Ok(port)
    }

    /// With a socket that another process has received at. It begins with [`Port::go_on`]: what waits in the socket is to find
    /// its session.
    pub(crate) fn prepare(local: SocketAddr, receiver: OwnedFd) -> Result<Arc<Port>, LinkError> {
        let address = fourtuple_syscalls::socket::local_address(receiver.as_fd())
            .map_err(socket_failed("getsockname()", local))?;
        let shared = Arc::new(Shared {
            sessions: Mutex::new(Demultiplexer::new()),
            discards: Mutex::new(Discards::default()),
            bell: Bell::new().map_err(thread_failed("eventfd()"))?,
            ends: AtomicBool::new(false),
        });
        Ok(Arc::new(Port { address, receiver: Arc::new(receiver), shared, thread: Mutex::default() }))
    }

    /// Starts to receive, unless it does.
    pub(crate) fn go_on(&self) -> Result<(), LinkError> {
        let mut thread = locked(&self.thread);
        if thread.is_some() {
            return Ok(());
        }
        self.shared.ends.store(false, Ordering::Release);
        self.shared.bell.silence();
        let epoll = Epoll::new().map_err(thread_failed("epoll_create1()"))?;
        epoll.add(self.shared.bell.as_fd(), 0, Interest::READ).map_err(thread_failed("epoll_ctl()"))?;
        epoll.add(self.receiver.as_fd(), 1, Interest::READ).map_err(thread_failed("epoll_ctl()"))?;
        let (receiver, shared) = (Arc::clone(&self.receiver), Arc::clone(&self.shared));
        let started = thread::Builder::new()
            .name("bfd-port".to_owned())
            .spawn(move || receive(&receiver, &epoll, &shared))
            .map_err(thread_failed("clone()"))?;
        *thread = Some(started);
        Ok(())
    }

    /// Stops to receive: what comes waits in the socket.
    pub(crate) fn part(&self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(thread) = locked(&self.thread).take() {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
    }

    /// Where it receives.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its socket.
    pub(crate) fn receiver(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }

    /// What it has discarded itself, because it was for no session; sessions count what they discard.
    pub fn discards(&self) -> Discards {
        *locked(&self.shared.discards)
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
        self.part();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receive(receiver: &OwnedFd, epoll: &Epoll, shared: &Shared) {
    // As the sessions that it receives for.
    let _ = schedule::go_first();
    let mut batch = Batch::new(BATCH, ROOM);
    while !shared.ends.load(Ordering::Acquire) {
        if batch.receive(receiver.as_fd()).is_err() {
            // It fails for bad arguments only.
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
    // What finds no room is counted by the inbox.
    sessions.find(&packet, from.ip())?.offer(datagram.bytes, from, datagram.hops);
    Ok(())
}
