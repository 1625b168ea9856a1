//! Takeover: a new process continues with the sockets of the running process. Packets in the receive queues stay there, and none is lost.
//!
//! The running process sends its listening sockets. The new process checks that its settings fit them and prepares its planes, while
//! the running process still forwards. Then the planes of the running process end, and it sends the sockets of clients and next hops.
//! Until the new process confirms that it has all sockets, the running process can continue, and does so if the new process ends or
//! sends nothing in time.

mod connection;
#[doc(hidden)]
pub mod fuzzing;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple::spread::{DeviceName, UdpGroup};
use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::unix_socket::{Kind, SocketPath, has_no_listener};
use fourtuple_syscalls::{errno_name, unix_socket};

use crate::bfd::{self, LinkError, LinkSettings, Receive, SavedState};
use crate::handover::connection::{Message, Offer, PATIENCE, PeerConnection, Text};
use crate::running::{EndedPlane, Open, Running, failed};
use crate::settings::{Forward, ForwardError, Peer};
use crate::target::{Target, TargetKey};
use crate::watch::{SessionReport, SessionView, Sessions};
use crate::worker::{Port, Request};

/// The first message of the new process. The number is the version of the protocol.
const HELLO: &str = "fourtuple forward takes over, 1";
/// The time limit for the preparation of the new process. The running process still forwards.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// The outcome of one check for a takeover.
#[derive(Debug)]
pub enum TakeoverOutcome {
    /// No process has connected, or the new process is not ready.
    Nothing,
    /// The takeover failed. The planes continue.
    Failed(HandoverError),
    /// The planes have ended, and the new process forwards.
    Done {
        /// The PID of the new process; 0 when it is in another PID namespace.
        process: u32,
        /// The BFD sessions before the takeover.
        bfd: Vec<SessionReport>,
        /// The time without a running plane: from the end of the planes to the confirmation. Packets waited in the receive queues.
        pause: Duration,
    },
}

/// A forwarder that continues with the sockets of another process.
#[derive(Debug)]
pub struct TakenOver {
    /// The forwarder with running planes.
    pub running: Running,
    /// The socket at which a later process can take over.
    pub takeover_socket: TakeoverSocket,
    /// The PID of the predecessor, in the predecessor's PID namespace.
    pub process: u32,
}

impl Running {
    /// Checks without waiting for a process that requests the takeover; call this regularly. If that process is ready, this call sends it
    /// all sockets, with about one system call for each plane and for every 250 clients. After [`TakeoverOutcome::Done`], keep the takeover socket until the
    /// process ends: the successor waits for this end before it binds addresses that only one process can have.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Plane`] and the errors of starting planes, when the own planes could not be restarted. An error of the successor is
    /// [`TakeoverOutcome::Failed`].
    pub fn hand_over(
        &mut self,
        takeover_socket: &mut TakeoverSocket,
    ) -> Result<TakeoverOutcome, ForwardError> {
        match self.handle_message(takeover_socket) {
            Ok(false) => return Ok(TakeoverOutcome::Nothing),
            Ok(true) => {}
            Err(error) => {
                if let Some(request) = takeover_socket.request.take() {
                    refuse(&request.connection, &error);
                }
                return Ok(TakeoverOutcome::Failed(error));
            }
        }
        let Some(request) = &takeover_socket.request else { return Ok(TakeoverOutcome::Nothing) };
        let begun = Instant::now();
        let mut ended = self.end_planes()?;
        let bfd = self.sessions.pause();
        let inherited = self.send_final_state(&request.connection, &mut ended);
        match inherited.and_then(|()| taken(&request.connection)) {
            Ok(()) => {
                let (process, pause) = (request.connection.peer.process, begun.elapsed());
                self.sessions = Sessions::default();
                takeover_socket.leave();
                Ok(TakeoverOutcome::Done { process, bfd, pause })
            }
            Err(error) => {
                // The new process finds the connection closed, and does not start.
                takeover_socket.request = None;
                self.sessions.resume()?;
                self.resume(ended)?;
                Ok(TakeoverOutcome::Failed(error))
            }
        }
    }

    /// Handles one message of the new process. Returns whether it is ready to take over.
    fn handle_message(&self, takeover_socket: &mut TakeoverSocket) -> Result<bool, HandoverError> {
        let path = takeover_socket.path().to_owned();
        let listener = takeover_socket.listener.try_clone();
        let Some(request) = takeover_socket.request()? else { return Ok(false) };
        let Some(received) = request.connection.receive()? else {
            let after = request.since.elapsed();
            return if after < READY_WITHIN { Ok(false) } else { Err(HandoverError::Silent { path, after }) };
        };
        request.since = Instant::now();
        match received.kind() {
            HELLO => {
                let call = |source| HandoverError::Call { call: "dup()", path: path.clone(), source };
                let listener = listener.map_err(call)?;
                self.offer(&request.connection, listener.as_fd(), &path)?;
                Ok(false)
            }
            "ready" => Ok(true),
            _ => Err(received.unexpected(HELLO)),
        }
    }

    /// Sends the offer: the links with their listening sockets.
    fn offer(
        &self,
        connection: &PeerConnection,
        takeover_socket: BorrowedFd<'_>,
        path: &std::path::Path,
    ) -> Result<(), HandoverError> {
        let failed = |call| move |source| HandoverError::Call { call, path: path.to_owned(), source };
        let offer = Text::of("offer")
            .with("process", std::process::id())
            .with("plane", self.forward.kind)
            .with("links", self.links.len());
        connection.send(offer.as_str(), &[takeover_socket])?;
        for (number, (open, link)) in self.links.iter().zip(&self.forward.links).enumerate() {
            let text = Text::of("link")
                .with("number", number)
                .with("listen", link.listen)
                .with("at", open.group.address())
                .with("spread", open.group.spread())
                .with("seats", open.group.len())
                .with("in-band", link.is_in_band())
                .with("control", open.group.has_control())
                .with("link", open.group.link().is_some());
            let control = open.group.has_control().then(|| open.group.control()).transpose();
            let control = control.map_err(failed("dup()"))?;
            let sockets: Vec<_> = control.iter().map(AsFd::as_fd).chain(open.group.link()).collect();
            connection.send(text.as_str(), &sockets)?;
            let seats = 0..open.group.len();
            let members: Vec<OwnedFd> = seats
                .map(|seat| open.group.member(seat))
                .collect::<Result<_, _>>()
                .map_err(failed("dup()"))?;
            for some in members.chunks(unix_socket::MAX_DESCRIPTORS) {
                let some: Vec<_> = some.iter().map(AsFd::as_fd).collect();
                connection.send(Text::of("seats").with("link", number).as_str(), &some)?;
            }
        }
        connection.send_text("that is all")
    }

    /// Sends the state that is final only after the planes have ended: counters, clients and sessions.
    fn send_final_state(
        &mut self,
        connection: &PeerConnection,
        ended: &mut [EndedPlane],
    ) -> Result<(), HandoverError> {
        for port in ended.iter_mut().flat_map(|plane| &mut plane.ports) {
            let text = Text::of("port")
                .with("link", port.link)
                .with("seat", port.seat)
                .with("overflowed", port.overflowed);
            connection.send_text(text.as_str())?;
            let tick = port.path.tick;
            let targets: Vec<&Target> = port.path.targets.iter().collect();
            for some in targets.chunks(unix_socket::MAX_DESCRIPTORS) {
                let mut text = Text::of("targets");
                for target in some {
                    let (client, hop, answer_from) = target.key;
                    let age = tick.saturating_sub(target.used_at);
                    text = match (client, answer_from) {
                        (Some(client), None) => text.with("client", format_args!("{hop} {age} {client}")),
                        (Some(client), Some(from)) => {
                            text.with("client", format_args!("{hop} {age} {client} {from}"))
                        }
                        (None, _) => text.with("hop", format_args!("{hop} {age}")),
                    };
                }
                let sockets: Vec<_> = some.iter().map(|target| target.socket.as_fd()).collect();
                connection.send(text.as_str(), &sockets)?;
            }
        }
        self.sessions.send_final_state(connection)?;
        connection.send_text("that is all")
    }
}

fn refuse(connection: &PeerConnection, why: &dyn std::fmt::Display) {
    // The send fails if the peer process has ended, which needs no message.
    let _ = connection.send_text(&format!("no\n{why}"));
}

fn taken(connection: &PeerConnection) -> Result<(), HandoverError> {
    let received = connection.wait_or_shut(PATIENCE)?;
    if received.kind() == "taken" { Ok(()) } else { Err(received.unexpected("taken")) }
}

impl Forward {
    /// Takes over from the running process with its sockets: no packet is lost. The addresses and the [`fourtuple::spread::Selector`] must
    /// be the same, and the number of planes at most the number of sockets at each address. Planes that use UDP_GRO
    /// ([`crate::PlaneKind::Offload`]) must be followed by planes that use it, and in-band BFD sessions by in-band sessions. Routes and all
    /// other settings may differ.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Handover`], with [`HandoverError::Differs`] when the settings do not fit; the errors of [`Forward::start`]. The running
    /// process then continues.
    pub fn take_over(&self, from: Predecessor) -> Result<TakenOver, ForwardError> {
        let Predecessor { path, connection } = from;
        let tell = |error: ForwardError| {
            refuse(&connection, &error);
            error
        };
        self.check()?;
        connection.send_text(HELLO)?;
        let offer = Offer::receive(&connection)?;
        let process = offer.process;
        let Prepared { mut running, places, listeners, takeover_socket } =
            self.prepare(offer).map_err(tell)?;
        let mut takeover_socket = TakeoverSocket::with(&path, takeover_socket);
        connection.send_text("ready")?;
        let inherited = FinalState::receive(&connection)?;
        let (sessions, left) = running.follow(inherited.sessions).map_err(tell)?;
        running.sessions = sessions;
        // After this message the predecessor does not continue, unless the send fails.
        connection.send_text("taken")?;
        running.sessions.resume()?;
        for mut link in left {
            // The drop sends AdminDown, so that the peer need not wait for its detection time.
            link.resume().map_err(ForwardError::from)?;
        }
        takeover_socket.taken_over_from(connection);
        running.adopt(listeners, &places, inherited.ports)?;
        Ok(TakenOver { running, takeover_socket, process })
    }

    /// Prepares planes without sockets, and groups without planes.
    fn prepare(&self, offer: Offer) -> Result<Prepared, ForwardError> {
        let seats = offer.fits(self)?;
        let (groups, takeover_socket) = offer.groups(self)?;
        let (mut links, mut places, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
        let (groups, numbers): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        self.refuse_loops(groups.iter().map(UdpGroup::address).collect())?;
        for ((link, group), place) in self.links.iter().zip(groups).zip(numbers) {
            let members = (0..seats).map(|seat| group.member(seat)).collect::<Result<_, _>>();
            listeners.push(members.map_err(failed("dup()"))?);
            places.push(place);
            links.push(Open::new(group, link, None));
        }
        let mut running = Running::of(self, links, Sessions::default())?;
        for plane in 0..self.planes {
            let its = (0..seats).filter(|seat| seat % self.planes == plane).count();
            running.start_plane(None, Vec::new(), its)?;
        }
        Ok(Prepared { running, places, listeners, takeover_socket })
    }
}

/// The parts that can be prepared while the predecessor still forwards.
struct Prepared {
    running: Running,
    /// The number of each link in the offer.
    places: Vec<usize>,
    /// The listening sockets of each link, by index.
    listeners: Vec<Vec<OwnedFd>>,
    takeover_socket: OwnedFd,
}

/// A listening socket with its state at the end of its plane, and its targets.
struct InheritedPort {
    link: usize,
    seat: usize,
    overflowed: u32,
    targets: Vec<(TargetKey, u64, OwnedFd)>,
}

/// The state that the predecessor sends after its planes have ended.
struct FinalState {
    ports: Vec<InheritedPort>,
    sessions: Vec<InheritedSession>,
}

impl FinalState {
    fn receive(connection: &PeerConnection) -> Result<FinalState, HandoverError> {
        let mut inherited = FinalState { ports: Vec::new(), sessions: Vec::new() };
        loop {
            let received = connection.wait()?;
            match (received.kind(), inherited.ports.last_mut()) {
                ("port", _) => inherited.ports.push(InheritedPort {
                    link: received.value("link")?,
                    seat: received.value("seat")?,
                    overflowed: received.value("overflowed")?,
                    targets: Vec::new(),
                }),
                ("targets", Some(port)) => port.targets.extend(targets(received)?),
                ("session", _) => inherited.sessions.push(InheritedSession::of(received)?),
                ("that is all", _) => return Ok(inherited),
                _ => return Err(received.unexpected("port, targets, session")),
            }
        }
    }
}

fn targets(mut received: Message) -> Result<Vec<(TargetKey, u64, OwnedFd)>, HandoverError> {
    let sockets = std::mem::take(&mut received.descriptors);
    let read = |line: &str| -> Option<(TargetKey, u64)> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let (hop, age) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let client: Option<SocketAddr> = match kind {
            "client" => Some(words.next()?.parse().ok()?),
            _ => None,
        };
        // The source address of replies, for a wildcard listener.
        let answer_from = words.next().map(str::parse).transpose().ok()?;
        Some(((client, hop, answer_from), age))
    };
    let keys: Option<Vec<_>> = received.lines().map(read).collect();
    match keys {
        Some(keys) if keys.len() == sockets.len() => {
            Ok(keys.into_iter().zip(sockets).map(|((key, age), socket)| (key, age, socket)).collect())
        }
        _ => Err(received.unexpected("a socket for each target")),
    }
}

impl Running {
    /// Prepares the sessions: sessions of the predecessor, new sessions where it had none, and its sessions that are no longer used. They send
    /// nothing until they are resumed.
    fn follow(&self, inherited: Vec<InheritedSession>) -> Result<(Sessions, Vec<bfd::Link>), ForwardError> {
        let links = self.links.iter().zip(&self.forward.links);
        let peers = links.filter_map(|(open, link)| Some((link.bfd?, &open.group)));
        Ok(Sessions::follow(peers, inherited)?)
    }

    /// Gives the prepared planes the sockets of the predecessor.
    fn adopt(
        &mut self,
        listeners: Vec<Vec<OwnedFd>>,
        places: &[usize],
        mut inherited: Vec<InheritedPort>,
    ) -> Result<(), ForwardError> {
        for (open, link) in self.links.iter_mut().zip(&self.forward.links) {
            open.watch =
                SessionView::new(&self.sessions, link.bfd.as_ref(), open.group.address(), &link.routes);
        }
        let mut shares: Vec<Vec<Port>> = (0..self.planes.len()).map(|_| Vec::new()).collect();
        let planes = shares.len();
        for (link, (listeners, place)) in listeners.into_iter().zip(places).enumerate() {
            for (seat, listener) in listeners.into_iter().enumerate() {
                let mut port = self.port(link, seat, listener)?;
                let found =
                    inherited.iter().position(|inherited| (inherited.link, inherited.seat) == (*place, seat));
                if let Some(inherited) = found.map(|found| inherited.swap_remove(found)) {
                    // Drops during the takeover count for this process.
                    port.overflowed = inherited.overflowed;
                    port.path.adopt(inherited.targets);
                }
                shares[seat % planes].push(port);
            }
        }
        for (plane, ports) in self.planes.iter().zip(shares) {
            plane.requests.request(Request::Take(ports));
        }
        Ok(())
    }
}

/// An error of a takeover. The running process continues.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// A system call failed.
    #[error("{call} for {}: {} ({source})", path.display(), errno_name(source))]
    Call {
        call: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The error of the call.
        source: io::Error,
    },
    /// The peer process belongs neither to this user nor to root.
    #[error("the process at the other end of {} is of user {user}: neither this one nor root", path.display())]
    Stranger {
        /// The path of the socket.
        path: PathBuf,
        /// The user of the peer process.
        user: u32,
    },
    /// The peer process sent nothing within the time limit.
    #[error("the process at the other end of {} has said nothing for {} s", path.display(), after.as_secs())]
    Silent {
        /// The path of the socket.
        path: PathBuf,
        /// The time since its last message.
        after: Duration,
    },
    /// The peer process has ended or closed the connection.
    #[error("the process at the other end of {} went away before the sockets were handed over", path.display())]
    Gone {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The peer process sent a message of another version.
    #[error("the process at the other end of {} says {said:?}, which is not of this version: {expected}", path.display())]
    Unexpected {
        /// The path of the socket.
        path: PathBuf,
        /// The beginning of the message.
        said: String,
        expected: &'static str,
    },
    /// The settings of the new process do not fit the sockets of the running process: a restart is needed.
    #[error("the one at work cannot be taken over: {why}")]
    Differs {
        /// The difference.
        why: String,
    },
    /// The peer process gave up and sent the reason.
    #[error("the other one: {why}")]
    Refused {
        /// The reason, as received.
        why: String,
    },
}

/// A session of another process.
pub(crate) struct InheritedSession {
    /// The destination of its control packets.
    peer: SocketAddr,
    /// The address that receives its control packets. Several sessions may share it, or data may arrive at it too.
    at: SocketAddr,
    saved_state: SavedState,
    sender: OwnedFd,
    /// The device that the session is bound to.
    device: Option<DeviceName>,
    /// The socket that receives control packets; `None` for an in-band session.
    receiver: Option<OwnedFd>,
}

impl InheritedSession {
    fn of(mut received: Message) -> Result<InheritedSession, HandoverError> {
        let mut saved_state = SavedState::default();
        for line in received.lines() {
            if let Some((name, number)) =
                line.split_once(' ').and_then(|(name, text)| Some((name, text.parse().ok()?)))
            {
                saved_state.set(name, number);
            }
        }
        let (peer, at) = (received.value("peer")?, received.value("at")?);
        // Only sessions that are bound to a device send this line.
        let device = received.value("device").ok();
        let mut descriptors = std::mem::take(&mut received.descriptors).into_iter();
        match (descriptors.next(), descriptors.next()) {
            (Some(sender), receiver) => {
                Ok(InheritedSession { peer, at, saved_state, sender, device, receiver })
            }
            _ => Err(received.unexpected("the socket that a session sends from")),
        }
    }

    /// Continues the session of the other process between these addresses, or prepares a new session if there is none.
    fn resume(
        inherited: &mut Vec<InheritedSession>,
        settings: &LinkSettings,
    ) -> Result<bfd::Link, LinkError> {
        let wanted = (settings.local, settings.device, settings.peer);
        let found =
            inherited.iter().position(|inherited| (inherited.at, inherited.device, inherited.peer) == wanted);
        let followed = match found.map(|found| inherited.swap_remove(found)) {
            Some(inherited) => bfd::Link::follow(settings, &inherited.saved_state, inherited.sender)?,
            None => None,
        };
        followed.map_or_else(|| bfd::Link::prepare(settings), Ok)
    }
}

impl Sessions {
    /// Pauses all sessions and returns their state. Received packets are still handled; later packets wait in the receive queues.
    fn pause(&mut self) -> Vec<SessionReport> {
        self.ports().for_each(|port| port.pause());
        self.0.iter_mut().for_each(|session| session.link.pause());
        self.read()
    }

    /// Resumes all paused sessions.
    fn resume(&mut self) -> Result<(), LinkError> {
        self.0.iter_mut().try_for_each(|session| session.link.resume())?;
        self.ports().try_for_each(|port| port.resume())
    }

    fn ports(&self) -> impl Iterator<Item = &Arc<bfd::Port>> {
        self.0.iter().filter_map(|session| session.port.as_ref())
    }

    fn send_final_state(&self, connection: &PeerConnection) -> Result<(), HandoverError> {
        for session in &self.0 {
            let Some(saved_state) = session.link.saved_state() else { continue };
            let port = session.link.port();
            let at = port.map_or(session.at, |port| port.address());
            let text = Text::of("session").with("peer", session.link.peer()).with("at", at);
            let text = match session.peer.device {
                Some(device) => text.with("device", device),
                None => text,
            };
            let text = saved_state.iter().fold(text, |text, (name, number)| text.with(name, number));
            let receiver = port.map(|port| port.receiver());
            let sockets: Vec<_> = [session.link.sender()].into_iter().chain(receiver).collect();
            connection.send(text.as_str(), &sockets)?;
        }
        Ok(())
    }

    /// Prepares a session for each peer: the session of the other process where it has one, else a new session. Also returns the given
    /// sessions that no peer uses any more. None of them runs yet.
    fn follow<'a>(
        peers: impl Iterator<Item = (Peer, &'a UdpGroup)>,
        mut inherited: Vec<InheritedSession>,
    ) -> Result<(Sessions, Vec<bfd::Link>), LinkError> {
        let open_port = |inherited: &Vec<InheritedSession>, local, device| {
            let mut there =
                inherited.iter().filter(|inherited| (inherited.at, inherited.device) == (local, device));
            let receiver = there.find_map(|inherited| inherited.receiver.as_ref());
            match receiver.map(OwnedFd::try_clone) {
                Some(Ok(receiver)) => bfd::Port::prepare(local, device, receiver),
                Some(Err(source)) => Err(LinkError::Thread { call: "dup()", source }),
                None => bfd::Port::open(local, device),
            }
        };
        let sessions = Sessions::open(peers, &mut inherited, open_port, InheritedSession::resume)?;
        let left = inherited.into_iter().map(|inherited| {
            let settings = LinkSettings::new(inherited.at.ip(), inherited.peer.ip());
            let settings = LinkSettings {
                local: inherited.at,
                peer: inherited.peer,
                receive: Receive::Inbox,
                ..settings
            };
            bfd::Link::follow(&settings, &inherited.saved_state, inherited.sender)
        });
        let left = left.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        Ok((sessions, left))
    }
}

/// The accept backlog: one connection is enough.
const BACKLOG: i32 = 8;

/// A unix socket at which a process with the same path takes over from this process: [`crate::Running::hand_over`]. Only this user and
/// root can take over (the path has mode 0600, and both sides check SO_PEERCRED). A drop removes the path, unless another process owns
/// it by then.
#[derive(Debug)]
pub struct TakeoverSocket {
    path: SocketPath,
    listener: OwnedFd,
    request: Option<TakeoverRequest>,
    /// The connection to the process that this process has taken over from.
    predecessor: Option<PeerConnection>,
}

/// A process that requests the takeover.
#[derive(Debug)]
struct TakeoverRequest {
    connection: PeerConnection,
    /// The time of its last message.
    since: Instant,
}

/// The running process, for [`crate::Forward::take_over`].
#[derive(Debug)]
pub struct Predecessor {
    path: PathBuf,
    connection: PeerConnection,
}

impl Predecessor {
    /// Connects to the process at this path. Returns `None` when the path does not exist or a killed process has left it.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Stranger`], and [`HandoverError::Call`]: EPROTOTYPE when the path is another kind of socket.
    pub fn at(path: &Path) -> Result<Option<Predecessor>, HandoverError> {
        match Kind::Packets.connect(path) {
            Ok(socket) => Ok(Some(Predecessor {
                path: path.to_owned(),
                connection: PeerConnection::new(socket, path)?,
            })),
            Err(error) if has_no_listener(&error) => Ok(None),
            Err(source) => Err(HandoverError::Call { call: "connect()", path: path.to_owned(), source }),
        }
    }
}

impl TakeoverSocket {
    /// Binds the path. Replaces a socket that a killed process has left there.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Call`]: EADDRINUSE when the path is a file other than a socket, or another process listens there.
    pub fn open(path: &Path) -> Result<TakeoverSocket, HandoverError> {
        let failed = |source| HandoverError::Call { call: "bind()", path: path.to_owned(), source };
        let (path, listener) = SocketPath::bind(path, Kind::Packets, BACKLOG).map_err(failed)?;
        Ok(TakeoverSocket { path, listener, request: None, predecessor: None })
    }

    /// Returns a takeover socket with the listening socket of another process, which still owns the path.
    fn with(path: &Path, listener: OwnedFd) -> TakeoverSocket {
        TakeoverSocket { path: SocketPath::of_another(path), listener, request: None, predecessor: None }
    }

    /// Makes this process the owner of the path.
    fn own(&mut self) {
        self.path.own();
    }

    fn taken_over_from(&mut self, predecessor: PeerConnection) {
        self.own();
        self.predecessor = Some(predecessor);
    }

    /// Leaves the path to the successor.
    fn leave(&mut self) {
        self.path.leave();
    }

    /// Waits until the predecessor has ended, which closes its other sockets. Returns whether it has ended within this time; true without a
    /// predecessor.
    pub fn predecessor_has_ended(&self, time: Duration) -> bool {
        self.predecessor.as_ref().is_none_or(|predecessor| predecessor.wait_for_end(time))
    }

    /// Returns the connected process, or accepts a connection if there is none.
    fn request(&mut self) -> Result<Option<&mut TakeoverRequest>, HandoverError> {
        if self.request.is_none() {
            let socket = match socket::accept_nonblocking(self.listener.as_fd()) {
                Ok(socket) => socket,
                Err(error)
                    if matches!(AcceptFailure::of(&error), AcceptFailure::Wait | AcceptFailure::Retry) =>
                {
                    return Ok(None);
                }
                Err(source) => {
                    return Err(HandoverError::Call {
                        call: "accept4()",
                        path: self.path().to_owned(),
                        source,
                    });
                }
            };
            self.request = Some(TakeoverRequest {
                connection: PeerConnection::new(socket, self.path.path())?,
                since: Instant::now(),
            });
        }
        Ok(self.request.as_mut())
    }

    fn path(&self) -> &Path {
        self.path.path()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_socket_without_a_process_has_no_predecessor() {
        let directory = std::env::temp_dir().join(format!("fourtuple-door-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("door");
        assert!(Predecessor::at(&path).unwrap().is_none());
        drop(Kind::Packets.listen(&path, 1).unwrap());
        assert!(path.exists() && Predecessor::at(&path).unwrap().is_none());
        let takeover_socket = TakeoverSocket::open(&path).unwrap();
        assert_eq!(Predecessor::at(&path).unwrap().unwrap().connection.peer.process, std::process::id());
        let error = TakeoverSocket::open(&path).unwrap_err();
        assert!(error.to_string().contains("EADDRINUSE"), "{error}");
        drop(takeover_socket);
        assert!(!path.exists());
        fs::remove_dir_all(&directory).unwrap();
    }
}
