//! A session on a link: one thread owns it, everybody reads it.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple_syscalls::epoll::Epoll;
use fourtuple_syscalls::{option, route};

use super::demultiplexer::Demultiplexer;
use super::error::{LinkError, socket_failed, thread_failed};
use super::inbox::{self, Inbox};
use super::packet::Diagnostic;
use super::port::Port;
use super::session::{Past, Session, Settings};
use super::sockets::{self, PORT, Sender as Outwards};
use super::state::{LinkReport, LinkState};
use super::task::{Command, Task};
use super::timers::Timers;

/// Where the packets of a session come from.
#[derive(Clone, Debug)]
pub enum Receive {
    /// A socket of its own, at [`LinkSettings::local`], of which there can be one at an address: what else comes there is
    /// discarded.
    Own,
    /// A socket that several sessions share, one for each peer.
    Shared(Arc<Port>),
    /// Nobody but those who have the [`Inbox`]: BFD within the data, which has to fit how the peer is configured.
    Handed,
    /// The same, and they go out from a socket of whoever has the data, which is bound to [`LinkSettings::local`]: the peer
    /// sees one 4-tuple. What else this socket sends is not touched.
    InBand {
        /// The socket.
        socket: Arc<OwnedFd>,
        /// Control packets come to it and nothing else does (`ControlFilter`): the session reads it. Otherwise whoever reads it
        /// hands over.
        is_steered: bool,
    },
}

/// A link that is to be watched.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Where packets are sent from, and with [`Receive::Own`] received at: the port is that of receiving.
    pub local: SocketAddr,
    /// Where they are sent to.
    pub peer: SocketAddr,
    /// SO_BINDTODEVICE: the interface that the session is bound to (RFC 5881, section 3); `None` leaves it to routing.
    pub device: Option<String>,
    /// How often, and what is lost.
    pub timers: Timers,
    /// How packets come.
    pub receive: Receive,
    /// Of discriminator, source port and jitter: another one for each session of a host.
    pub seed: u64,
}

impl LinkSettings {
    /// A session at its own port 3784, with the timers that are usual, and a seed by chance.
    pub fn new(local: IpAddr, peer: IpAddr) -> LinkSettings {
        LinkSettings {
            local: SocketAddr::new(local, PORT),
            peer: SocketAddr::new(peer, PORT),
            device: None,
            timers: Timers::default(),
            receive: Receive::Own,
            seed: fastrand::u64(..),
        }
    }

    /// The same, from the address that the kernel would send from.
    ///
    /// # Errors
    ///
    /// [`LinkError::NoRoute`]
    pub fn towards(peer: IpAddr) -> Result<LinkSettings, LinkError> {
        let local = route::source_for(peer).map_err(|source| LinkError::NoRoute { peer, source })?;
        Ok(LinkSettings::new(local, peer))
    }

    fn check(&self) -> Result<(), LinkError> {
        let (local, peer) = (self.local.ip(), self.peer.ip());
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(LinkError::Families { local, peer });
        }
        if self.local == self.peer {
            return Err(LinkError::Itself(local));
        }
        Ok(())
    }
}

/// A session at work, on a thread of its own. Dropped, it says once that it is administratively down, and ends.
#[derive(Debug)]
pub struct Link {
    commands: Sender<Command>,
    inbox: Inbox,
    state: LinkState,
    source: SocketAddr,
    thread: Option<JoinHandle<Task>>,
    /// What the thread left behind that has stopped in the middle, or is to begin.
    parted: Option<Box<Task>>,
    sender: Arc<OwnedFd>,
    /// Where it is to be taken out when it ends.
    registered: Option<(Arc<Port>, u32, IpAddr)>,
}

impl Link {
    /// Opens the sockets and begins to send.
    ///
    /// # Errors
    ///
    /// [`LinkError`]
    pub fn start(settings: &LinkSettings) -> Result<Link, LinkError> {
        let mut link = Link::prepare(settings)?;
        link.go_on()?;
        Ok(link)
    }

    /// A new session that begins with [`Link::go_on`].
    pub(crate) fn prepare(settings: &LinkSettings) -> Result<Link, LinkError> {
        settings.check()?;
        let LinkSettings { local, ref device, timers, seed, .. } = *settings;
        let mut random = Rng::with_seed(seed);
        let local_discriminator = NonZeroU32::new(random.u32(1..)).unwrap_or(NonZeroU32::MIN);
        let sender = match &settings.receive {
            Receive::InBand { socket, .. } => Outwards(Arc::clone(socket)),
            Receive::Own | Receive::Shared(_) | Receive::Handed => {
                Outwards(Arc::new(sockets::sender(local, device.as_deref(), &mut random)?))
            }
        };
        let session = Session::new(Settings { timers, local_discriminator }, Duration::ZERO, random);
        Link::parted(settings, session, sender, Instant::now())
    }

    /// A session that another process had, with the socket that it sends from. It begins with [`Link::go_on`]. `None`: what is
    /// told of it is no session.
    pub(crate) fn follow(
        settings: &LinkSettings,
        past: &Past,
        sender: OwnedFd,
    ) -> Result<Option<Link>, LinkError> {
        settings.check()?;
        // Times of the session are those since an origin, before which nothing may have been.
        let now = past.longest_age();
        let began = Instant::now();
        let origin = began.checked_sub(now).unwrap_or(began);
        let Some(mut session) = Session::after(past, now, Rng::with_seed(settings.seed)) else {
            return Ok(None);
        };
        if session.timers() != settings.timers {
            session.set_timers(settings.timers);
        }
        let link = Link::parted(settings, session, Outwards(Arc::new(sender)), origin)?;
        link.state.set_failed(past.has_failed());
        Ok(Some(link))
    }

    fn parted(
        settings: &LinkSettings,
        session: Session,
        sender: Outwards,
        origin: Instant,
    ) -> Result<Link, LinkError> {
        let LinkSettings { local, peer, ref device, ref receive, .. } = *settings;
        let device = device.as_deref();
        let local_discriminator = session.local_discriminator();
        let receiver = match receive {
            Receive::Own => Some(sockets::receiver(local, device)?),
            Receive::InBand { socket, is_steered: true } => {
                option::set_hops_told(socket.as_fd(), true)
                    .map_err(socket_failed("setsockopt(IP_RECVTTL)", local))?;
                Some(socket.try_clone().map_err(socket_failed("dup()", local))?)
            }
            Receive::Shared(_) | Receive::Handed | Receive::InBand { .. } => None,
        };
        let kept = Arc::clone(&sender.0);
        let source = sender.address().map_err(socket_failed("getsockname()", local))?;
        let (inbox, outlet) = inbox::open().map_err(thread_failed("eventfd()"))?;
        let (commands, orders) = mpsc::channel();
        let state = LinkState::new(origin, LinkReport::of(&session, origin.elapsed()));
        let mut peers = Demultiplexer::new();
        peers.add(local_discriminator.get(), peer.ip(), ());
        let task = Task {
            session,
            origin,
            state: state.clone(),
            inbox: inbox.clone(),
            outlet,
            commands: orders,
            sender,
            peer,
            receiver,
            peers,
            epoll: Epoll::new().map_err(thread_failed("epoll_create1()"))?,
            unsent: 0,
            leaving: None,
            parts: false,
        };
        task.watch()?;
        let registered = match receive {
            Receive::Shared(port) => {
                port.add(local_discriminator.get(), peer.ip(), inbox.clone())?;
                Some((Arc::clone(port), local_discriminator.get(), peer.ip()))
            }
            Receive::Own | Receive::Handed | Receive::InBand { .. } => None,
        };
        let parted = Some(Box::new(task));
        Ok(Link { commands, inbox, state, source, thread: None, parted, sender: kept, registered })
    }

    /// Starts the thread of a session that has parted.
    pub(crate) fn go_on(&mut self) -> Result<(), LinkError> {
        if let Some(task) = self.parted.take() {
            let thread = thread::Builder::new().name("bfd".to_owned()).spawn(move || task.run());
            self.thread = Some(thread.map_err(thread_failed("clone()"))?);
        }
        Ok(())
    }

    /// Stops, and says nothing to the peer, which finds out after a detection time; before that the session can go on, here
    /// or in another process.
    pub(crate) fn part(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.tell(Command::Part);
        // A thread that has panicked has said so.
        self.parted = thread.join().ok().map(Box::new);
    }

    /// What another process has to know of a session that has parted.
    pub(crate) fn past(&self) -> Option<Past> {
        let task = self.parted.as_ref()?;
        Some(task.session.past(task.origin.elapsed(), self.state.has_failed()))
    }

    /// The socket that it shares with others, if it does.
    pub(crate) fn port(&self) -> Option<&Arc<Port>> {
        self.registered.as_ref().map(|(port, ..)| port)
    }

    /// The socket that it sends from.
    pub(crate) fn sender(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }

    /// For the planes: where they put what they receive of this session.
    pub fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// For the planes: what they read.
    pub fn state(&self) -> LinkState {
        self.state.clone()
    }

    /// Where its packets come from: a port that no other session has, or that of the data.
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// Holds the session down, or lets it come up again.
    pub fn set_admin_down(&self, is_down: bool) {
        self.tell(Command::AdminDown(is_down));
    }

    /// Changes the timers, also while the session is up: see [`Session::set_timers`].
    pub fn set_timers(&self, timers: Timers) {
        self.tell(Command::Timers(timers));
    }

    /// The data plane began anew: see [`Session::reset_forwarding_plane`].
    pub fn reset_forwarding_plane(&self) {
        self.tell(Command::Reset);
    }

    /// Tells the peer of a path behind this link: see [`Session::signal`].
    pub fn signal(&self, diagnostic: Diagnostic) {
        self.tell(Command::Signal(diagnostic));
    }

    /// Ends the session in order: says that it is administratively down until the peer has heard it, or for the time in which
    /// the peer finds out by itself (RFC 5880, section 6.8.16). Gives what there is to say of the session.
    pub fn drain(mut self) -> LinkReport {
        self.end(Command::Drain);
        self.state.report()
    }

    fn tell(&self, command: Command) {
        // It fails when the thread is gone, which is after this value is.
        let _ = self.commands.send(command);
        self.inbox.wake();
    }

    fn end(&mut self, how: Command) {
        let Some(thread) = self.thread.take() else { return };
        self.tell(how);
        // A thread that has panicked has said so.
        let _ = thread.join();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end(Command::End);
        if let Some((port, discriminator, peer)) = self.registered.take() {
            port.remove(discriminator, peer);
        }
    }
}
