//! A BFD session on a link: one thread owns the session, and any thread can read its state.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::spread::DeviceName;
use fourtuple_syscalls::epoll::Epoll;
use fourtuple_syscalls::{device, option, route};

use crate::bfd::demultiplexer::Demultiplexer;
use crate::bfd::error::{LinkError, socket_failed, thread_failed};
use crate::bfd::inbox::{self, Inbox};
use crate::bfd::packet::Diagnostic;
use crate::bfd::port::Port;
use crate::bfd::session::{SavedState, Session, Settings};
use crate::bfd::sockets::{self, PORT, Sender as Outwards};
use crate::bfd::state::{LinkReport, LinkState};
use crate::bfd::task::{Command, Task};
use crate::bfd::timers::Timers;

/// The source of the session's received packets.
#[derive(Clone, Debug)]
pub enum Receive {
    /// A socket of the session's own, at [`LinkSettings::local`]. Only one session can use an address this way; it discards
    /// packets from other peers.
    Own,
    /// A socket that several sessions share, one for each peer.
    Shared(Arc<Port>),
    /// The [`Inbox`] only: BFD packets arrive on data sockets, and the peer must be configured to send them there.
    Inbox,
    /// The [`Inbox`], with control packets sent from a data socket bound to [`LinkSettings::local`]: the peer sees one 4-tuple.
    /// The session leaves the socket's data alone.
    InBand {
        /// The data socket.
        socket: Arc<OwnedFd>,
        /// True if only control packets reach the socket (`ControlFilter`) and the session reads it. Otherwise the thread that
        /// reads the socket passes control packets to the [`Inbox`].
        is_steered: bool,
    },
}

/// The parameters of a link.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// The local address. With [`Receive::Own`] the session receives at it, and its port is the receiving port.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
    /// The interface that the session is bound to with SO_BINDTODEVICE (RFC 5881, section 3); `None` leaves the choice to
    /// routing, and is invalid for link-local IPv6 addresses. With [`Receive::Shared`] the port is bound to the same interface.
    pub device: Option<DeviceName>,
    /// The intervals and the detection multiplier.
    pub timers: Timers,
    /// The source of received packets.
    pub receive: Receive,
    /// The seed for discriminator, source port and jitter; it differs for each session of a host.
    pub seed: u64,
}

impl LinkSettings {
    /// Returns settings for a session with its own socket at port 3784, default timers and a random seed.
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

    /// Like [`LinkSettings::new`], with the local address that the kernel would choose for the peer.
    ///
    /// # Errors
    ///
    /// [`LinkError::NoRoute`]
    pub fn towards(peer: IpAddr) -> Result<LinkSettings, LinkError> {
        let local = route::source_for(peer).map_err(|source| LinkError::NoRoute { peer, source })?;
        Ok(LinkSettings::new(local, peer))
    }

    /// Like [`LinkSettings::new`], bound to a device. The local address is `local`, or the address of the device that the
    /// kernel would choose. A link-local IPv6 address gets the index of the device as its scope.
    ///
    /// # Errors
    ///
    /// [`LinkError::NoDevice`], [`LinkError::NoRoute`]
    pub fn on_device(
        name: DeviceName,
        peer: IpAddr,
        local: Option<IpAddr>,
    ) -> Result<LinkSettings, LinkError> {
        let index =
            device::index(name.name()).map_err(|source| LinkError::NoDevice { device: name, source })?;
        let local = match local {
            Some(local) => local,
            None => {
                route::source_for_device(peer, index).map_err(|source| LinkError::NoRoute { peer, source })?
            }
        };
        let scoped = |address: IpAddr| match address {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, PORT, 0, index).into(),
            _ => SocketAddr::new(address, PORT),
        };
        let settings = LinkSettings::new(local, peer);
        Ok(LinkSettings { local: scoped(local), peer: scoped(peer), device: Some(name), ..settings })
    }

    fn check(&self) -> Result<(), LinkError> {
        let (local, peer) = (self.local.ip(), self.peer.ip());
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(LinkError::Families { local, peer });
        }
        if self.local == self.peer {
            return Err(LinkError::Itself(local));
        }
        for address in [self.peer, self.local] {
            if let SocketAddr::V6(v6) = address
                && v6.ip().is_unicast_link_local()
                && v6.scope_id() == 0
            {
                return Err(LinkError::NoScope(address.ip()));
            }
        }
        Ok(())
    }
}

/// A running session with its own thread. When dropped, it sends AdminDown once and ends.
#[derive(Debug)]
pub struct Link {
    commands: Sender<Command>,
    inbox: Inbox,
    state: LinkState,
    source: SocketAddr,
    peer: SocketAddr,
    thread: Option<JoinHandle<Task>>,
    /// The state of the session's thread while it is not running: before the start, or after [`Link::part`].
    paused: Option<Box<Task>>,
    sender: Arc<OwnedFd>,
    /// The shared port at which the session is registered, with its discriminator and peer; used to remove it at the end.
    registered: Option<(Arc<Port>, u32, IpAddr)>,
}

impl Link {
    /// Opens the sockets and starts the session.
    ///
    /// # Errors
    ///
    /// [`LinkError`]
    pub fn start(settings: &LinkSettings) -> Result<Link, LinkError> {
        let mut link = Link::prepare(settings)?;
        link.resume()?;
        Ok(link)
    }

    /// Opens a new session that starts with [`Link::resume`].
    pub(crate) fn prepare(settings: &LinkSettings) -> Result<Link, LinkError> {
        settings.check()?;
        let LinkSettings { local, device, timers, seed, .. } = *settings;
        let mut random = Rng::with_seed(seed);
        let local_discriminator = NonZeroU32::new(random.u32(1..)).unwrap_or(NonZeroU32::MIN);
        let sender = match &settings.receive {
            Receive::InBand { socket, .. } => Outwards(Arc::clone(socket)),
            Receive::Own | Receive::Shared(_) | Receive::Inbox => {
                Outwards(Arc::new(sockets::sender(local, device, &mut random)?))
            }
        };
        let session = Session::new(Settings { timers, local_discriminator }, Duration::ZERO, random);
        Link::paused(settings, session, sender, Instant::now())
    }

    /// Restores a session that another process had, with its sending socket. The session starts with [`Link::resume`]. Returns
    /// `None` if a saved value is missing or out of range.
    pub(crate) fn follow(
        settings: &LinkSettings,
        saved_state: &SavedState,
        sender: OwnedFd,
    ) -> Result<Option<Link>, LinkError> {
        settings.check()?;
        // The session's times count from an origin, and no saved event may be older than the origin.
        let now = saved_state.longest_age();
        let began = Instant::now();
        let origin = began.checked_sub(now).unwrap_or(began);
        let Some(mut session) = Session::restore(saved_state, now, Rng::with_seed(settings.seed)) else {
            return Ok(None);
        };
        if session.timers() != settings.timers {
            session.set_timers(settings.timers);
        }
        let link = Link::paused(settings, session, Outwards(Arc::new(sender)), origin)?;
        link.state.set_failed(saved_state.has_failed());
        Ok(Some(link))
    }

    fn paused(
        settings: &LinkSettings,
        session: Session,
        sender: Outwards,
        origin: Instant,
    ) -> Result<Link, LinkError> {
        let LinkSettings { local, peer, device, ref receive, .. } = *settings;
        let local_discriminator = session.local_discriminator();
        let receiver = match receive {
            Receive::Own => Some(sockets::receiver(local, device)?),
            Receive::InBand { socket, is_steered: true } => {
                option::set_receive_hops(socket.as_fd(), true)
                    .map_err(socket_failed("setsockopt(IP_RECVTTL)", local))?;
                Some(socket.try_clone().map_err(socket_failed("dup()", local))?)
            }
            Receive::Shared(_) | Receive::Inbox | Receive::InBand { .. } => None,
        };
        let kept = Arc::clone(&sender.0);
        let source = sender.address().map_err(socket_failed("getsockname()", local))?;
        let (inbox, inbox_receiver) = inbox::open().map_err(thread_failed("eventfd()"))?;
        let (commands, orders) = mpsc::channel();
        let state = LinkState::new(origin, LinkReport::of(&session, origin.elapsed()));
        let mut peers = Demultiplexer::new();
        peers.add(local_discriminator.get(), peer.ip(), ());
        let task = Task {
            session,
            origin,
            state: state.clone(),
            inbox: inbox.clone(),
            inbox_receiver,
            commands: orders,
            sender,
            peer,
            receiver,
            peers,
            epoll: Epoll::new().map_err(thread_failed("epoll_create1()"))?,
            unsent: 0,
            leaving: None,
            pauses: false,
        };
        task.watch()?;
        let registered = match receive {
            Receive::Shared(port) => {
                port.add(local_discriminator.get(), peer.ip(), inbox.clone())?;
                Some((Arc::clone(port), local_discriminator.get(), peer.ip()))
            }
            Receive::Own | Receive::Inbox | Receive::InBand { .. } => None,
        };
        let paused = Some(Box::new(task));
        Ok(Link { commands, inbox, state, source, peer, thread: None, paused, sender: kept, registered })
    }

    /// Starts the thread of a prepared or stopped session.
    pub(crate) fn resume(&mut self) -> Result<(), LinkError> {
        if let Some(task) = self.paused.take() {
            let thread = thread::Builder::new().name("bfd".to_owned()).spawn(move || task.run());
            self.thread = Some(thread.map_err(thread_failed("clone()"))?);
        }
        Ok(())
    }

    /// Stops the thread and sends nothing to the peer. The session can continue here or in another process before the peer's
    /// detection time expires.
    pub(crate) fn pause(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.tell(Command::Pause);
        // The panic hook has already reported a panic of the thread.
        self.paused = thread.join().ok().map(Box::new);
    }

    /// Returns the saved state of a stopped session, for another process.
    pub(crate) fn saved_state(&self) -> Option<SavedState> {
        let task = self.paused.as_ref()?;
        Some(task.session.saved_state(task.origin.elapsed(), self.state.has_failed()))
    }

    /// Returns the port that the session shares with other sessions, if any.
    pub(crate) fn port(&self) -> Option<&Arc<Port>> {
        self.registered.as_ref().map(|(port, ..)| port)
    }

    /// Returns the socket that the session sends from.
    pub(crate) fn sender(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }

    /// Returns the inbox to which data planes pass received control packets.
    pub fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Returns the state that data planes read.
    pub fn state(&self) -> LinkState {
        self.state.clone()
    }

    /// Returns the source address of control packets: its port is unique to the session, or the port of the data socket.
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// Returns the destination address of control packets.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Holds the session down, or lets it come up again.
    pub fn set_admin_down(&self, is_down: bool) {
        self.tell(Command::AdminDown(is_down));
    }

    /// Changes the timers, also while the session is up: see [`Session::set_timers`].
    pub fn set_timers(&self, timers: Timers) {
        self.tell(Command::Timers(timers));
    }

    /// Reports a reset of the forwarding plane: see [`Session::reset_forwarding_plane`].
    pub fn reset_forwarding_plane(&self) {
        self.tell(Command::Reset);
    }

    /// Signals the state of a concatenated path to the peer: see [`Session::signal`].
    pub fn signal(&self, diagnostic: Diagnostic) {
        self.tell(Command::Signal(diagnostic));
    }

    /// Ends the session in order: sends AdminDown until the peer has confirmed it, or until the peer's detection time has
    /// expired (RFC 5880, section 6.8.16). Returns the final report.
    ///
    /// The report counts every packet offered to the inbox: `handed_dropped` includes the packets that the session did not
    /// process.
    pub fn drain(mut self) -> LinkReport {
        let task = self.end(Command::Drain);
        // From here on a shared port passes no more packets to the session.
        self.unregister();
        let mut report = self.state.report();
        let (handed, dropped) = self.inbox.counts();
        let left = task.map_or(0, |task| task.left());
        (report.handed, report.handed_dropped) = (handed, dropped + left);
        report
    }

    fn tell(&self, command: Command) {
        // The send fails only if the thread has ended.
        let _ = self.commands.send(command);
        self.inbox.wake();
    }

    fn end(&mut self, how: Command) -> Option<Task> {
        let thread = self.thread.take()?;
        self.tell(how);
        // The panic hook has already reported a panic of the thread.
        thread.join().ok()
    }

    fn unregister(&mut self) {
        if let Some((port, discriminator, peer)) = self.registered.take() {
            port.remove(discriminator, peer);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end(Command::End);
        self.unregister();
    }
}
