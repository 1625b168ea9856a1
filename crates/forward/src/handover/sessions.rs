//! BFD sessions on their way to another process: the peer does not notice.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fourtuple::spread::Group;

use super::error::HandoverError;
use super::line::{Line, Said, Text};
use crate::bfd::{self, LinkError, LinkSettings, Past, Port, Receive};
use crate::watch::{Peer, Session, Sessions, Watched};

/// A session that another process had.
pub(crate) struct GivenSession {
    /// Where its packets go.
    peer: SocketAddr,
    /// Where they come to: what several sessions share, or where data come as well.
    at: SocketAddr,
    past: Past,
    sender: OwnedFd,
    /// Not of one among the data.
    receiver: Option<OwnedFd>,
}

impl GivenSession {
    pub(super) fn of(mut said: Said) -> Result<GivenSession, HandoverError> {
        let mut past = Past::default();
        for line in said.lines() {
            if let Some((name, number)) =
                line.split_once(' ').and_then(|(name, text)| Some((name, text.parse().ok()?)))
            {
                past.set(name, number);
            }
        }
        let (peer, at) = (said.value("peer")?, said.value("at")?);
        let mut descriptors = std::mem::take(&mut said.descriptors).into_iter();
        match (descriptors.next(), descriptors.next()) {
            (Some(sender), receiver) => Ok(GivenSession { peer, at, past, sender, receiver }),
            _ => Err(said.unexpected("the socket that a session sends from")),
        }
    }

    /// The session between these addresses, from where it is: of another process where it is given, else a new one.
    fn go_on(given: &mut Vec<GivenSession>, settings: &LinkSettings) -> Result<bfd::Link, LinkError> {
        let found = given.iter().position(|given| (given.at, given.peer) == (settings.local, settings.peer));
        let followed = match found.map(|found| given.swap_remove(found)) {
            Some(given) => bfd::Link::follow(settings, &given.past, given.sender)?,
            None => None,
        };
        followed.map_or_else(|| bfd::Link::prepare(settings), Ok)
    }
}

impl Sessions {
    /// Stops all of them in the middle, and tells how they are. What was received they still hear, what comes waits.
    pub(super) fn part(&mut self) -> Vec<Watched> {
        self.ports().for_each(|port| port.part());
        self.0.iter_mut().for_each(|session| session.link.part());
        self.read()
    }

    /// Starts all that have parted.
    pub(super) fn go_on(&mut self) -> Result<(), LinkError> {
        self.0.iter_mut().try_for_each(|session| session.link.go_on())?;
        self.ports().try_for_each(|port| port.go_on())
    }

    fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.0.iter().filter_map(|session| session.port.as_ref())
    }

    pub(super) fn give(&self, line: &Line) -> Result<(), HandoverError> {
        for session in &self.0 {
            let Some(past) = session.link.past() else { continue };
            let port = session.link.port();
            let at = port.map_or(session.at, |port| port.address());
            let text = Text::of("session").with("peer", session.goes_to()).with("at", at);
            let text = past.iter().fold(text, |text, (name, number)| text.with(name, number));
            let receiver = port.map(|port| port.receiver());
            let sockets: Vec<_> = [session.link.sender()].into_iter().chain(receiver).collect();
            line.send(text.as_str(), &sockets)?;
        }
        Ok(())
    }

    /// A session for each peer: that of another process where it is given, else a new one. And the links of those that are
    /// given and for no peer any more. None has begun yet.
    pub(super) fn follow<'a>(
        peers: impl Iterator<Item = (Peer, &'a Group)>,
        mut given: Vec<GivenSession>,
    ) -> Result<(Sessions, Vec<bfd::Link>), LinkError> {
        let mut sessions = Sessions::default();
        let mut ports: Vec<Arc<Port>> = Vec::new();
        for (peer, group) in peers {
            let (at, reception) = (group.address(), peer.reception(group));
            if sessions.0.iter().any(|session| session.peer.is_at(&peer, session.at, at)) {
                continue;
            }
            if let Some(in_band) = peer.in_band {
                let link = GivenSession::go_on(&mut given, &in_band.settings(&peer, group)?)?;
                sessions.0.push(Session { peer, at, reception, link, port: None });
                continue;
            }
            let settings = peer.settings()?;
            let local = settings.local;
            let known = ports.iter().find(|port| port.address() == local).cloned();
            let is_first = known.is_none();
            let port = match known {
                Some(port) => port,
                None => {
                    let mut there = given.iter().filter(|given| given.at == local);
                    let receiver = there.find_map(|given| given.receiver.as_ref());
                    let port = match receiver.map(OwnedFd::try_clone) {
                        Some(Ok(receiver)) => Port::prepare(local, receiver)?,
                        Some(Err(source)) => return Err(LinkError::Thread { call: "dup()", source }),
                        None => Port::open(local, None)?,
                    };
                    ports.push(Arc::clone(&port));
                    port
                }
            };
            let settings = LinkSettings { receive: Receive::Shared(Arc::clone(&port)), ..settings };
            let link = GivenSession::go_on(&mut given, &settings)?;
            sessions.0.push(Session { peer, at, reception, link, port: is_first.then_some(port) });
        }
        let left = given.into_iter().map(|given| {
            let settings = LinkSettings::new(given.at.ip(), given.peer.ip());
            let settings =
                LinkSettings { local: given.at, peer: given.peer, receive: Receive::Handed, ..settings };
            bfd::Link::follow(&settings, &given.past, given.sender)
        });
        let left = left.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        Ok((sessions, left))
    }
}
