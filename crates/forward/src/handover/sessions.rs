//! The takeover of BFD sessions, which the peer does not notice.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fourtuple::spread::{DeviceName, UdpGroup};

use crate::bfd::{self, LinkError, LinkSettings, Past, Port, Receive};
use crate::handover::error::HandoverError;
use crate::handover::line::{Line, Message, Text};
use crate::peer::Peer;
use crate::watch::{Session, Sessions, Watched};

/// A session of another process.
pub(crate) struct GivenSession {
    /// The destination of its control packets.
    peer: SocketAddr,
    /// The address that receives its control packets. Several sessions may share it, or data may arrive at it too.
    at: SocketAddr,
    pub(super) past: Past,
    sender: OwnedFd,
    /// The device that the session is bound to.
    device: Option<DeviceName>,
    /// The socket that receives control packets; `None` for an in-band session.
    receiver: Option<OwnedFd>,
}

impl GivenSession {
    pub(super) fn of(mut received: Message) -> Result<GivenSession, HandoverError> {
        let mut past = Past::default();
        for line in received.lines() {
            if let Some((name, number)) =
                line.split_once(' ').and_then(|(name, text)| Some((name, text.parse().ok()?)))
            {
                past.set(name, number);
            }
        }
        let (peer, at) = (received.value("peer")?, received.value("at")?);
        // Only sessions that are bound to a device send this line.
        let device = received.value("device").ok();
        let mut descriptors = std::mem::take(&mut received.descriptors).into_iter();
        match (descriptors.next(), descriptors.next()) {
            (Some(sender), receiver) => Ok(GivenSession { peer, at, past, sender, device, receiver }),
            _ => Err(received.unexpected("the socket that a session sends from")),
        }
    }

    /// Continues the session of the other process between these addresses, or prepares a new session if there is none.
    fn go_on(given: &mut Vec<GivenSession>, settings: &LinkSettings) -> Result<bfd::Link, LinkError> {
        let wanted = (settings.local, settings.device, settings.peer);
        let found = given.iter().position(|given| (given.at, given.device, given.peer) == wanted);
        let followed = match found.map(|found| given.swap_remove(found)) {
            Some(given) => bfd::Link::follow(settings, &given.past, given.sender)?,
            None => None,
        };
        followed.map_or_else(|| bfd::Link::prepare(settings), Ok)
    }
}

impl Sessions {
    /// Pauses all sessions and returns their state. Received packets are still handled; later packets wait in the receive queues.
    pub(super) fn part(&mut self) -> Vec<Watched> {
        self.ports().for_each(|port| port.part());
        self.0.iter_mut().for_each(|session| session.link.part());
        self.read()
    }

    /// Resumes all paused sessions.
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
            let text = Text::of("session").with("peer", session.link.peer()).with("at", at);
            let text = match session.peer.device {
                Some(device) => text.with("device", device),
                None => text,
            };
            let text = past.iter().fold(text, |text, (name, number)| text.with(name, number));
            let receiver = port.map(|port| port.receiver());
            let sockets: Vec<_> = [session.link.sender()].into_iter().chain(receiver).collect();
            line.send(text.as_str(), &sockets)?;
        }
        Ok(())
    }

    /// Prepares a session for each peer: the session of the other process where it has one, else a new session. Also returns the given
    /// sessions that no peer uses any more. None of them runs yet.
    pub(super) fn follow<'a>(
        peers: impl Iterator<Item = (Peer, &'a UdpGroup)>,
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
            let (local, device) = (settings.local, settings.device);
            let known = ports.iter().find(|port| port.is_at(local, device)).cloned();
            let is_first = known.is_none();
            let port = match known {
                Some(port) => port,
                None => {
                    let mut there = given.iter().filter(|given| (given.at, given.device) == (local, device));
                    let receiver = there.find_map(|given| given.receiver.as_ref());
                    let port = match receiver.map(OwnedFd::try_clone) {
                        Some(Ok(receiver)) => Port::prepare(local, device, receiver)?,
                        Some(Err(source)) => return Err(LinkError::Thread { call: "dup()", source }),
                        None => Port::open(local, device)?,
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
