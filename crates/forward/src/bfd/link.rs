//! A BFD session on a link: one thread owns the session, and any thread can read its state.

#[cfg(all(test, fourtuple_loom))]
use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
#[cfg(not(all(test, fourtuple_loom)))]
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::spread::DeviceName;
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{device, option, route, schedule};
use thiserror::Error;

use crate::bfd::packet::{Demultiplexer, Diagnostic, Discard, Discards, Packet, State};
use crate::bfd::session::{Action, HOPS, SavedState, Session, Settings, Timers};
use crate::bfd::{self, Inbox, InboxReceiver, MAX_PACKET, PORT, PacketSender, Port};

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
            Receive::InBand { socket, .. } => PacketSender(Arc::clone(socket)),
            Receive::Own | Receive::Shared(_) | Receive::Inbox => {
                PacketSender(Arc::new(bfd::sender(local, device, &mut random)?))
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
        let link = Link::paused(settings, session, PacketSender(Arc::new(sender)), origin)?;
        link.state.set_failed(saved_state.has_failed());
        Ok(Some(link))
    }

    fn paused(
        settings: &LinkSettings,
        session: Session,
        sender: PacketSender,
        origin: Instant,
    ) -> Result<Link, LinkError> {
        let LinkSettings { local, peer, device, ref receive, .. } = *settings;
        let local_discriminator = session.local_discriminator();
        let receiver = match receive {
            Receive::Own => Some(bfd::receiver(local, device)?),
            Receive::InBand { socket, is_steered: true } => {
                option::set_receive_hops(socket.as_fd(), true)
                    .map_err(socket_failed("setsockopt(IP_RECVTTL)", local))?;
                Some(socket.try_clone().map_err(socket_failed("dup()", local))?)
            }
            Receive::Shared(_) | Receive::Inbox | Receive::InBand { .. } => None,
        };
        let kept = Arc::clone(&sender.0);
        let source = sender.address().map_err(socket_failed("getsockname()", local))?;
        let (inbox, inbox_receiver) = bfd::open_inbox().map_err(thread_failed("eventfd()"))?;
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

/// An error of opening a link, or the port that several links share.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The local address and the peer are of different IP versions.
    #[error("{local} cannot reach {peer}: one is IPv4, the other IPv6")]
    Families { local: IpAddr, peer: IpAddr },
    /// Both ends of the link have the same address, so that the session would receive its own packets.
    #[error("{0} is the address of both ends of the link")]
    Itself(IpAddr),
    /// The kernel has no route to the peer, or its route names no local address: ENETUNREACH, ENOENT.
    #[error("which address {peer} would be reached from: {source}")]
    NoRoute {
        peer: IpAddr,
        /// The error from the kernel.
        source: io::Error,
    },
    /// A link-local address is only valid with a device.
    #[error("{0} is a link-local address: name the device that it is on")]
    NoScope(IpAddr),
    /// The network device does not exist: ENODEV.
    #[error("the network device {device}: {source}")]
    NoDevice {
        device: DeviceName,
        /// The error from the kernel.
        source: io::Error,
    },
    /// Another session on this port has the same peer (RFC 5881, section 3).
    #[error("there is a session with {0} at this address already")]
    Taken(IpAddr),
    /// None of the 16384 source ports of RFC 5881, section 4 is free at this address.
    #[error("no source port from 49152 to 65535 is free at {0}: end what holds them")]
    NoSourcePort(IpAddr),
    /// A system call failed.
    #[error("{call} of {address}: {source}")]
    Socket {
        /// The name of the system call.
        call: &'static str,
        /// The address that the call was made for.
        address: SocketAddr,
        /// The error from the kernel.
        source: io::Error,
    },
    /// The thread or its waker could not be created.
    #[error("{call}: {source}")]
    Thread {
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
}

pub(super) fn socket_failed(call: &'static str, address: SocketAddr) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Socket { call, address, source }
}

pub(super) fn thread_failed(call: &'static str) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Thread { call, source }
}

/// The state of a link, which any thread can read without a lock.
#[derive(Clone)]
pub struct LinkState(Arc<Published>);

struct Published {
    /// The instant from which the session counts its times.
    origin: Instant,
    state: AtomicU8,
    since_ns: AtomicU64,
    transitions: AtomicU64,
    failed: AtomicBool,
    report: Mutex<LinkReport>,
}

/// A report on a link at one moment.
#[derive(Clone, Debug)]
pub struct LinkReport {
    /// State of the local session.
    pub state: State,
    /// The reason for this state, if a failure led to it.
    pub diagnostic: Diagnostic,
    /// Time since the last change of state.
    pub for_time: Duration,
    /// Number of state changes.
    pub transitions: u64,
    /// Number of changes to Up.
    pub ups: u64,
    /// Number of changes from Up to a lower state.
    pub downs: u64,
    /// The reason for the last change from Up; [`Diagnostic::None`] if there was none.
    pub last_failure: Diagnostic,
    /// State in the peer's last packet.
    pub remote_state: State,
    /// Diagnostic in the peer's last packet.
    pub remote_diagnostic: Diagnostic,
    pub local_discriminator: u32,
    /// The peer's discriminator; `None` while it is unknown.
    pub remote_discriminator: Option<u32>,
    /// The negotiated transmit interval, before jitter.
    pub transmit_interval: Duration,
    /// The time without a packet after which the session goes down; 0 before the peer's first packet.
    pub detection_time: Duration,
    /// Packets sent.
    pub transmitted: u64,
    /// Packets that the kernel failed to send.
    pub unsent: u64,
    /// Packets accepted.
    pub received: u64,
    /// Packets discarded, by reason.
    pub discards: Discards,
    /// Packets that the data planes put into the inbox.
    pub handed: u64,
    /// Packets that the data planes received and the inbox dropped because it was full.
    pub handed_dropped: u64,
    /// Packets that the kernel dropped at the session's own socket, if it has one (`sk_drops`): the socket filter rejected them
    /// because they had passed a router, or the receive queue was full.
    pub overflowed: u64,
}

impl LinkReport {
    fn of(session: &Session, now: Duration) -> LinkReport {
        let (remote_state, remote_diagnostic) = session.remote();
        let (ups, downs) = session.ups_and_downs();
        LinkReport {
            state: session.state(),
            diagnostic: session.diagnostic(),
            for_time: now.saturating_sub(session.since()),
            transitions: session.transitions(),
            ups,
            downs,
            last_failure: session.last_failure(),
            remote_state,
            remote_diagnostic,
            local_discriminator: session.local_discriminator().get(),
            remote_discriminator: session.remote_discriminator().map(u32::from),
            transmit_interval: session.transmit_interval(),
            detection_time: session.detection_time(),
            transmitted: session.transmitted(),
            unsent: 0,
            received: session.received(),
            discards: *session.discards(),
            handed: 0,
            handed_dropped: 0,
            overflowed: 0,
        }
    }
}

impl LinkState {
    fn new(origin: Instant, report: LinkReport) -> LinkState {
        let state = LinkState(Arc::new(Published {
            origin,
            state: AtomicU8::new(report.state as u8),
            since_ns: AtomicU64::new(0),
            transitions: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            report: Mutex::new(report.clone()),
        }));
        state.publish(Duration::ZERO, report);
        state
    }

    /// Sets whether the session has failed, as the previous process reported it.
    fn set_failed(&self, failed: bool) {
        self.0.failed.store(failed, Ordering::Relaxed);
    }

    fn publish(&self, since: Duration, report: LinkReport) {
        let published = &self.0;
        // Held until all is stored: a thread that has seen a change in the state sees it in the report too, and the reverse.
        let mut current = published.report.lock().unwrap_or_else(PoisonError::into_inner);
        published.since_ns.store(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        published.transitions.store(report.transitions, Ordering::Relaxed);
        let is_meant = State::AdminDown == report.state || State::AdminDown == report.remote_state;
        if report.state == State::Up || is_meant {
            published.failed.store(false, Ordering::Relaxed);
        } else if self.state() == State::Up {
            published.failed.store(true, Ordering::Relaxed);
        }
        // The state is stored last: a thread that loads the state first then reads the values of the same change or of a later
        // one.
        published.state.store(report.state as u8, Ordering::Release);
        *current = report;
    }

    /// Returns the state, with one atomic load.
    pub fn state(&self) -> State {
        State::from_bits(self.0.state.load(Ordering::Acquire))
    }

    /// Returns whether both ends receive each other's packets, as far as BFD knows.
    pub fn is_up(&self) -> bool {
        self.state() == State::Up
    }

    /// Returns whether BFD has detected a failure: the session was Up, went down, and is not Up again. A session that was never
    /// Up may have a peer without BFD, and a session that an administrator holds down at either end has not failed (RFC 5882,
    /// sections 3.2 and 4.1). Costs one atomic load.
    pub fn has_failed(&self) -> bool {
        self.0.failed.load(Ordering::Relaxed)
    }

    /// Returns the time of the last change of state.
    pub fn since(&self) -> Instant {
        self.0.origin + Duration::from_nanos(self.0.since_ns.load(Ordering::Relaxed))
    }

    /// Returns the number of state changes.
    pub fn transitions(&self) -> u64 {
        self.0.transitions.load(Ordering::Relaxed)
    }

    /// Returns the report as of the session's last event. Takes a lock, so data planes must not call it per packet.
    pub fn report(&self) -> LinkReport {
        let mut report = self.0.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
        report.for_time = self.since().elapsed();
        report
    }
}

impl fmt::Debug for LinkState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LinkState")
            .field("state", &self.state())
            .field("transitions", &self.transitions())
            .finish_non_exhaustive()
    }
}

/// A command from the owner of a link.
#[derive(Debug)]
enum Command {
    AdminDown(bool),
    Timers(Timers),
    Reset,
    Signal(Diagnostic),
    /// End when the peer has confirmed AdminDown, or when its detection time has expired.
    Drain,
    /// Send one last packet and end.
    End,
    /// Stop without a packet: another thread or process continues the session.
    Pause,
}

/// The number of packets to receive before the thread checks the timers again.
const BATCH: usize = 32;

/// The thread that owns a session: only this thread reads its packets, sends for it and changes it.
struct Task {
    session: Session,
    /// The instant from which the session counts its times.
    origin: Instant,
    state: LinkState,
    /// The inbox, for its counters.
    inbox: Inbox,
    inbox_receiver: InboxReceiver,
    commands: Receiver<Command>,
    sender: PacketSender,
    peer: SocketAddr,
    receiver: Option<OwnedFd>,
    peers: Demultiplexer<()>,
    epoll: Epoll,
    unsent: u64,
    /// The latest time at which the thread ends.
    leaving: Option<Duration>,
    /// Whether the thread stops without ending the session.
    pauses: bool,
}

impl std::fmt::Debug for Task {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Task").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Task {
    /// Adds every descriptor that the thread waits for to its epoll.
    fn watch(&self) -> Result<(), LinkError> {
        let failed = || thread_failed("epoll_ctl()");
        self.epoll.add(self.inbox_receiver.waker().as_fd(), 0, Interest::READ).map_err(failed())?;
        if let Some(receiver) = &self.receiver {
            self.epoll.add(receiver.as_fd(), 1, Interest::READ).map_err(failed())?;
        }
        Ok(())
    }

    /// Runs the session until it ends or stops, and returns the task, which can run again after a stop.
    fn run(mut self) -> Task {
        // The session needs little CPU time, but a late packet can take it down, so the thread asks for a high priority.
        // Without permission it runs at the normal priority.
        let _ = schedule::go_first();
        let mut batch = Batch::new(BATCH, MAX_PACKET);
        loop {
            // Queued packets are processed before the detection time is checked.
            self.receive(&mut batch);
            self.handle_commands();
            let wait = if self.pauses { None } else { self.act() };
            self.publish();
            if self.is_over() || std::mem::take(&mut self.pauses) {
                return self;
            }
            // `epoll_wait` fails only for invalid arguments; then a busy loop is better than a dead session.
            let _ = self.epoll.wait(&mut [Ready::NONE; 2], wait);
        }
    }

    /// Returns the number of packets in the inbox that the session did not process before its end.
    fn left(&self) -> u64 {
        self.inbox_receiver.take().count() as u64
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn receive(&mut self, batch: &mut Batch) {
        if let Some(receiver) = &self.receiver
            && batch.receive(receiver.as_fd()).is_ok()
        {
            for datagram in batch.iter() {
                take(
                    &mut self.session,
                    &self.peers,
                    self.origin.elapsed(),
                    datagram.bytes,
                    datagram.from(),
                    datagram.hops,
                );
            }
        }
        for queued in self.inbox_receiver.take() {
            take(
                &mut self.session,
                &self.peers,
                self.origin.elapsed(),
                queued.bytes(),
                Some(queued.from),
                queued.hops,
            );
        }
    }

    fn handle_commands(&mut self) {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return,
                // The link was dropped, and no other command can arrive.
                Err(TryRecvError::Disconnected) => Command::End,
            };
            let now = self.now();
            match command {
                Command::AdminDown(is_down) => self.session.set_admin_down(now, is_down),
                Command::Timers(timers) => self.session.set_timers(timers),
                Command::Reset => self.session.reset_forwarding_plane(now),
                Command::Signal(diagnostic) => self.session.signal(diagnostic),
                Command::Pause => self.pauses = true,
                Command::Drain => {
                    // The session knows no peer, so no peer waits for AdminDown.
                    let is_known = self.session.remote_discriminator().is_some();
                    let time = if is_known { self.session.detection_time_of_peer() } else { Duration::ZERO };
                    self.session.set_admin_down(now, true);
                    self.leaving = Some(now + time);
                    return;
                }
                Command::End => {
                    self.session.set_admin_down(now, true);
                    self.leaving = Some(now);
                    return;
                }
            }
        }
    }

    /// Sends all due packets, and returns the time until the next step.
    fn act(&mut self) -> Option<Duration> {
        // The interval may be shorter than the time that sending takes; the thread must receive packets in between.
        let mut until = Some(Duration::ZERO);
        for _ in 0..BATCH {
            match self.session.next_action(self.now()) {
                Action::Transmit(packet) => {
                    // A send error does not end the session: detecting a failed link is its purpose.
                    if self.sender.send(&packet.encode(), self.peer).is_err() {
                        self.unsent += 1;
                    }
                }
                Action::Wait(time) => {
                    until = Some(time);
                    break;
                }
                Action::WaitForPacket => {
                    until = None;
                    break;
                }
            }
        }
        let until = until.into_iter().chain(self.leaving).min();
        until.map(|until| until.saturating_sub(self.now()))
    }

    fn publish(&self) {
        let (handed, handed_dropped) = self.inbox.counts();
        let report = LinkReport::of(&self.session, self.now());
        let transmitted = report.transmitted - self.unsent;
        let overflowed = self.receiver.as_ref().and_then(|receiver| option::dropped(receiver.as_fd()).ok());
        let report = LinkReport {
            transmitted,
            unsent: self.unsent,
            handed,
            handed_dropped,
            overflowed: overflowed.unwrap_or(0).into(),
            ..report
        };
        self.state.publish(self.session.since(), report);
    }

    fn is_over(&self) -> bool {
        self.leaving.is_some_and(|latest| self.session.peer_expects_silence() || self.now() >= latest)
    }
}

/// Passes a packet to the session if it comes from the peer's address. Each packet is counted once: by the session, or as a
/// packet from a stranger.
fn take(
    session: &mut Session,
    peers: &Demultiplexer<()>,
    now: Duration,
    bytes: &[u8],
    from: Option<SocketAddr>,
    hops: Option<u8>,
) {
    let hops = hops.unwrap_or(0);
    let is_stranger = hops == HOPS
        && Packet::parse(bytes).is_ok_and(|packet| {
            from.is_none_or(|from| peers.find(&packet, from.ip()) == Err(Discard::Stranger))
        });
    if is_stranger {
        session.discard(Discard::Stranger);
    } else {
        // The session counts the packets that it discards.
        let _ = session.receive(now, bytes, hops);
    }
}

#[cfg(all(test, fourtuple_loom))]
mod models {
    use std::num::NonZeroU32;

    use loom::thread;

    use super::*;
    use crate::bfd::{Settings, Timers};

    /// A reader that sees a state also sees the counters of the same change or of a later one. The test fails if the state is
    /// stored or loaded with `Relaxed`.
    #[test]
    fn loom_a_reader_of_the_state_reads_its_counters() {
        loom::model(|| {
            let settings =
                Settings { timers: Timers::default(), local_discriminator: NonZeroU32::new(7).unwrap() };
            let session = Session::new(settings, Duration::ZERO, fastrand::Rng::with_seed(1));
            let down = LinkReport::of(&session, Duration::ZERO);
            let changes = [(State::Init, 1), (State::Up, 2), (State::Down, 3)];
            let link = LinkState::new(
                Instant::now(),
                LinkReport { state: State::Init, transitions: 1, ..down.clone() },
            );
            let reader = thread::spawn({
                let link = link.clone();
                move || (link.state(), link.transitions(), link.has_failed())
            });
            for (state, transitions) in changes {
                link.publish(Duration::ZERO, LinkReport { state, transitions, ..down.clone() });
            }
            let (state, transitions, failed) = reader.join().unwrap();
            let (_, least) = changes.into_iter().find(|(its, _)| *its == state).unwrap();
            assert!(transitions >= least, "{state} with {transitions}");
            assert!(failed || state != State::Down, "it went down and did not fail");
        });
    }
}
