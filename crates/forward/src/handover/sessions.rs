//! The takeover of BFD sessions, which the peer does not notice.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fourtuple::spread::{DeviceName, UdpGroup};

use crate::bfd::{self, LinkError, LinkSettings, Port, Receive, SavedState};
use crate::handover::connection::{Message, PeerConnection, Text};
use crate::handover::error::HandoverError;
use crate::peer::Peer;
use crate::watch::{Session, SessionReport, Sessions};

/// A session of another process.
pub(crate) struct InheritedSession {
    /// The destination of its control packets.
    peer: SocketAddr,
    /// The address that receives its control packets. Several sessions may share it, or data may arrive at it too.
    at: SocketAddr,
    pub(super) saved_state: SavedState,
    sender: OwnedFd,
    /// The device that the session is bound to.
    device: Option<DeviceName>,
    /// The socket that receives control packets; `None` for an in-band session.
    receiver: Option<OwnedFd>,
}

impl InheritedSession {
    pub(super) fn of(mut received: Message) -> Result<InheritedSession, HandoverError> {
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
    pub(super) fn pause(&mut self) -> Vec<SessionReport> {
        self.ports().for_each(|port| port.pause());
        self.0.iter_mut().for_each(|session| session.link.pause());
        self.read()
    }

    /// Resumes all paused sessions.
    pub(super) fn resume(&mut self) -> Result<(), LinkError> {
        self.0.iter_mut().try_for_each(|session| session.link.resume())?;
        self.ports().try_for_each(|port| port.resume())
    }

    fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.0.iter().filter_map(|session| session.port.as_ref())
    }

    pub(super) fn send_final_state(&self, connection: &PeerConnection) -> Result<(), HandoverError> {
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
    pub(super) fn follow<'a>(
        peers: impl Iterator<Item = (Peer, &'a UdpGroup)>,
        mut inherited: Vec<InheritedSession>,
    ) -> Result<(Sessions, Vec<bfd::Link>), LinkError> {
        let mut sessions = Sessions::default();
        let mut ports: Vec<Arc<Port>> = Vec::new();
        for (peer, group) in peers {
            let (at, reception) = (group.address(), peer.reception(group));
            if sessions.0.iter().any(|session| session.peer.is_at(&peer, session.at, at)) {
                continue;
            }
            if let Some(in_band) = peer.in_band {
                let link = InheritedSession::resume(&mut inherited, &in_band.settings(&peer, group)?)?;
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
                    let mut there = inherited
                        .iter()
                        .filter(|inherited| (inherited.at, inherited.device) == (local, device));
                    let receiver = there.find_map(|inherited| inherited.receiver.as_ref());
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
            let link = InheritedSession::resume(&mut inherited, &settings)?;
            sessions.0.push(Session { peer, at, reception, link, port: is_first.then_some(port) });
        }
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
