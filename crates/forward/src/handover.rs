//! A new process takes over from the one that is at work, with its sockets: what waits in them waits on, and nothing is lost.
//!
//! The new one is told what there is, sees whether it can go on with that, and gets ready, while the old one forwards. Then
//! that one's planes end, and give back their sockets with what waits in them; those of the listeners are in both processes
//! already, those of clients and next hops follow. Until the new one has said that it has everything, the old one can go on
//! with its own, and does when the other one dies or is silent.

mod door;
mod error;
mod line;
mod offer;
mod sessions;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple::spread::Group;
use fourtuple_syscalls::message;

pub use door::{Door, Predecessor};
pub use error::HandoverError;
use line::{Line, PATIENCE, Said, Text};
use offer::Offer;

use crate::bfd;
use crate::error::ForwardError;
use crate::running::{Open, Parted, Running, failed};
use crate::settings::Forward;
use crate::target::{Target, TargetKey};
use crate::watch::{Sessions, Watch, Watched};
use crate::worker::{Order, Port};
use sessions::GivenSession;

/// The first words of the new one. Another version than this is another number.
const HELLO: &str = "fourtuple forward takes over, 1";
/// How long the new one may take until it is ready, with the old one at work.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// What came of looking whether somebody takes over.
#[derive(Debug)]
pub enum Handed {
    /// Nobody is there, or not ready yet.
    Nothing,
    /// Somebody was there, and it came to nothing: the planes go on.
    Failed(HandoverError),
    /// The planes have ended, and another process goes on.
    Done {
        /// Which; 0 when it is in another PID namespace.
        process: u32,
        /// The BFD sessions, as they were.
        bfd: Vec<Watched>,
        /// How long no plane was at work: from the word to end until the successor had everything. Packets waited meanwhile.
        pause: Duration,
    },
}

/// A forwarder that goes on with the sockets of another process.
#[derive(Debug)]
pub struct TakenOver {
    /// Its planes are at work.
    pub running: Running,
    /// Where it can be taken over from in turn.
    pub door: Door,
    /// The number of the process that it has taken over from, in the PID namespace of that.
    pub process: u32,
}

impl Running {
    /// Looks whether somebody is at the door who is to take over, without waiting for that; to be called now and then. One
    /// that is ready gets everything, which takes about as long as a system call for each plane, and one for every 250
    /// clients. When it is [`Handed::Done`], the door is to be kept until the process ends: the successor waits for that
    /// before it opens what only one process can have.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Plane`] and others of starting planes: they could not go on. What goes wrong with the successor is no
    /// error but [`Handed::Failed`].
    pub fn hand_over(&mut self, door: &mut Door) -> Result<Handed, ForwardError> {
        match self.speak(door) {
            Ok(false) => return Ok(Handed::Nothing),
            Ok(true) => {}
            Err(error) => {
                if let Some(visitor) = door.visitor.take() {
                    refuse(&visitor.line, &error);
                }
                return Ok(Handed::Failed(error));
            }
        }
        let Some(visitor) = &door.visitor else { return Ok(Handed::Nothing) };
        let begun = Instant::now();
        let mut ended = self.part()?;
        let bfd = self.sessions.part();
        let given = self.give(&visitor.line, &mut ended);
        match given.and_then(|()| taken(&visitor.line)) {
            Ok(()) => {
                let (process, pause) = (visitor.line.peer.process, begun.elapsed());
                self.sessions = Sessions::default();
                door.leave();
                Ok(Handed::Done { process, bfd, pause })
            }
            Err(error) => {
                // It finds its line cut, and does not begin.
                door.visitor = None;
                self.sessions.go_on()?;
                self.go_on(ended)?;
                Ok(Handed::Failed(error))
            }
        }
    }

    /// Whether somebody is ready to take over.
    fn speak(&self, door: &mut Door) -> Result<bool, HandoverError> {
        let path = door.path().to_owned();
        let listener = door.listener.try_clone();
        let Some(visitor) = door.visitor()? else { return Ok(false) };
        let Some(said) = visitor.line.hear()? else {
            let after = visitor.since.elapsed();
            return if after < READY_WITHIN { Ok(false) } else { Err(HandoverError::Silent { path, after }) };
        };
        visitor.since = Instant::now();
        match said.kind() {
            HELLO => {
                let call = |source| HandoverError::Call { call: "dup()", path: path.clone(), source };
                let listener = listener.map_err(call)?;
                self.offer(&visitor.line, listener.as_fd(), &path)?;
                Ok(false)
            }
            "ready" => Ok(true),
            _ => Err(said.unexpected(HELLO)),
        }
    }

    /// Tells what there is, with the sockets that listen.
    fn offer(&self, line: &Line, door: BorrowedFd<'_>, path: &std::path::Path) -> Result<(), HandoverError> {
        let failed = |call| move |source| HandoverError::Call { call, path: path.to_owned(), source };
        let offer = Text::of("offer")
            .with("process", std::process::id())
            .with("plane", self.forward.kind)
            .with("links", self.links.len());
        line.send(offer.as_str(), &[door])?;
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
            line.send(text.as_str(), &sockets)?;
            let seats = 0..open.group.len();
            let members: Vec<OwnedFd> = seats
                .map(|seat| open.group.member(seat))
                .collect::<Result<_, _>>()
                .map_err(failed("dup()"))?;
            for some in members.chunks(message::MOST) {
                let some: Vec<_> = some.iter().map(AsFd::as_fd).collect();
                line.send(Text::of("seats").with("link", number).as_str(), &some)?;
            }
        }
        line.say("that is all")
    }

    /// Gives what only a process whose planes have ended can give.
    fn give(&mut self, line: &Line, ended: &mut [Parted]) -> Result<(), HandoverError> {
        for port in ended.iter_mut().flat_map(|parted| &mut parted.ports) {
            let text = Text::of("port")
                .with("link", port.link)
                .with("seat", port.seat)
                .with("overflowed", port.overflowed);
            line.say(text.as_str())?;
            let tick = port.path.tick;
            let targets: Vec<&Target> = port.path.targets.iter().collect();
            for some in targets.chunks(message::MOST) {
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
                line.send(text.as_str(), &sockets)?;
            }
        }
        self.sessions.give(line)?;
        line.say("that is all")
    }
}

fn refuse(line: &Line, why: &dyn std::fmt::Display) {
    // One who is gone need not be told.
    let _ = line.say(&format!("no\n{why}"));
}

fn taken(line: &Line) -> Result<(), HandoverError> {
    let said = line.wait_or_shut(PATIENCE)?;
    if said.kind() == "taken" { Ok(()) } else { Err(said.unexpected("taken")) }
}

impl Forward {
    /// Starts in place of the process that is at work, with its sockets: no packet is lost. It has to listen where that one
    /// does, by the same [`fourtuple::spread::Spread`], with no more planes than that one had sockets at each address; planes
    /// that have put packets together ([`crate::PlaneKind::Offload`]) are followed by such ones, and BFD sessions among the data by
    /// such sessions. Routes and everything else may be different.
    ///
    /// # Errors
    ///
    /// [`ForwardError::Handover`], of which [`HandoverError::Differs`] says why it would not fit; others as of
    /// [`Forward::start`]. The one at work goes on then.
    pub fn take_over(&self, from: Predecessor) -> Result<TakenOver, ForwardError> {
        let Predecessor { path, line } = from;
        let tell = |error: ForwardError| {
            refuse(&line, &error);
            error
        };
        self.check()?;
        line.say(HELLO)?;
        let offer = Offer::hear(&line)?;
        let process = offer.process;
        let Prepared { mut running, places, listeners, door } = self.prepare(offer).map_err(tell)?;
        let mut door = Door::with(&path, door);
        line.say("ready")?;
        let given = Given::hear(&line)?;
        let (sessions, left) = running.follow(given.sessions).map_err(tell)?;
        running.sessions = sessions;
        // From here on the other one does not go on, unless this fails.
        line.say("taken")?;
        running.sessions.go_on()?;
        for mut link in left {
            // Dropped, it says that it is administratively down: the peer need not wait for its detection time.
            link.go_on().map_err(ForwardError::from)?;
        }
        door.taken_over_from(line);
        running.adopt(listeners, &places, given.ports)?;
        Ok(TakenOver { running, door, process })
    }

    /// Planes without a socket, and groups without a plane.
    fn prepare(&self, offer: Offer) -> Result<Prepared, ForwardError> {
        let seats = offer.fits(self)?;
        let (groups, door) = offer.groups(self)?;
        let (mut links, mut places, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
        let (groups, numbers): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        self.refuse_loops(groups.iter().map(Group::address).collect())?;
        for ((link, group), place) in self.links.iter().zip(groups).zip(numbers) {
            let members = (0..seats).map(|seat| group.member(seat)).collect::<Result<_, _>>();
            listeners.push(members.map_err(failed("dup()"))?);
            places.push(place);
            links.push(Open::new(group, link, None));
        }
        let mut running = Running::of(self, links, Sessions::default());
        for plane in 0..self.planes {
            let its = (0..seats).filter(|seat| seat % self.planes == plane).count();
            running.start_plane(None, Vec::new(), its)?;
        }
        Ok(Prepared { running, places, listeners, door })
    }
}

/// All that can be had while the old one is at work.
struct Prepared {
    running: Running,
    /// For each link its number there.
    places: Vec<usize>,
    /// For each link its sockets, by seat.
    listeners: Vec<Vec<OwnedFd>>,
    door: OwnedFd,
}

/// A socket that listens as it was when its plane ended, and where its packets went.
struct GivenPort {
    link: usize,
    seat: usize,
    overflowed: u32,
    targets: Vec<(TargetKey, u64, OwnedFd)>,
}

/// What comes when the old one's planes have ended.
struct Given {
    ports: Vec<GivenPort>,
    sessions: Vec<GivenSession>,
}

impl Given {
    fn hear(line: &Line) -> Result<Given, HandoverError> {
        let mut given = Given { ports: Vec::new(), sessions: Vec::new() };
        loop {
            let said = line.wait()?;
            match (said.kind(), given.ports.last_mut()) {
                ("port", _) => given.ports.push(GivenPort {
                    link: said.value("link")?,
                    seat: said.value("seat")?,
                    overflowed: said.value("overflowed")?,
                    targets: Vec::new(),
                }),
                ("targets", Some(port)) => port.targets.extend(targets(said)?),
                ("session", _) => given.sessions.push(GivenSession::of(said)?),
                ("that is all", _) => return Ok(given),
                _ => return Err(said.unexpected("port, targets, session")),
            }
        }
    }
}

fn targets(mut said: Said) -> Result<Vec<(TargetKey, u64, OwnedFd)>, HandoverError> {
    let sockets = std::mem::take(&mut said.descriptors);
    let read = |line: &str| -> Option<(TargetKey, u64)> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let (hop, age) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let client: Option<SocketAddr> = match kind {
            "client" => Some(words.next()?.parse().ok()?),
            _ => None,
        };
        // The address that replies come from, where the listener has several.
        let answer_from = words.next().map(str::parse).transpose().ok()?;
        Some(((client, hop, answer_from), age))
    };
    let keys: Option<Vec<_>> = said.lines().map(read).collect();
    match keys {
        Some(keys) if keys.len() == sockets.len() => {
            Ok(keys.into_iter().zip(sockets).map(|((key, age), socket)| (key, age, socket)).collect())
        }
        _ => Err(said.unexpected("a socket for each target")),
    }
}

impl Running {
    /// The sessions of the one before, new ones where it had none, and what it had alone. They begin to speak when they are
    /// told to go on.
    fn follow(&self, given: Vec<GivenSession>) -> Result<(Sessions, Vec<bfd::Link>), ForwardError> {
        let links = self.links.iter().zip(&self.forward.links);
        let peers = links.filter_map(|(open, link)| Some((link.bfd?, &open.group)));
        Ok(Sessions::follow(peers, given)?)
    }

    /// Gives the planes, which have nothing yet, what another process had.
    fn adopt(
        &mut self,
        listeners: Vec<Vec<OwnedFd>>,
        places: &[usize],
        mut given: Vec<GivenPort>,
    ) -> Result<(), ForwardError> {
        for (open, link) in self.links.iter_mut().zip(&self.forward.links) {
            open.watch = Watch::new(&self.sessions, link.bfd.as_ref(), open.group.address(), &link.routes);
        }
        let mut shares: Vec<Vec<Port>> = (0..self.planes.len()).map(|_| Vec::new()).collect();
        let planes = shares.len();
        for (link, (listeners, place)) in listeners.into_iter().zip(places).enumerate() {
            for (seat, listener) in listeners.into_iter().enumerate() {
                let mut port = self.port(link, seat, listener)?;
                let found = given.iter().position(|given| (given.link, given.seat) == (*place, seat));
                if let Some(given) = found.map(|found| given.swap_remove(found)) {
                    // What was lost in between is this one's to tell.
                    port.overflowed = given.overflowed;
                    port.path.adopt(given.targets);
                }
                shares[seat % planes].push(port);
            }
        }
        for (plane, ports) in self.planes.iter().zip(shares) {
            plane.desk.order(Order::Take(ports));
        }
        Ok(())
    }
}
