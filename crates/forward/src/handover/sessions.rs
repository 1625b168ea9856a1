//! BFD sessions on their way to another process: the peer does not notice.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::error::HandoverError;
use super::line::{Line, Said, Text};
use crate::bfd::{self, LinkError, LinkSettings, PORT, Past, Port, Receive};
use crate::in_band::Reception;
use crate::watch::{Peer, Session, Sessions, Watched};

/// A session that another process had.
pub(crate) struct GivenSession {
    peer: IpAddr,
    local: IpAddr,
    past: Past,
    sender: OwnedFd,
    receiver: OwnedFd,
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
        let (peer, local) = (said.value("peer")?, said.value("local")?);
        let (receiver, sender) = (said.descriptors.pop(), said.descriptors.pop());
        match (sender, receiver) {
            (Some(sender), Some(receiver)) => Ok(GivenSession { peer, local, past, sender, receiver }),
            _ => Err(said.unexpected("the two sockets of a session")),
        }
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
            let (local, port) = (session.link.source().ip(), session.link.port());
            let (Some(past), Some(port)) = (session.link.past(), port) else { continue };
            let text = Text::of("session").with("peer", session.peer.address).with("local", local);
            let text = past.iter().fold(text, |text, (name, number)| text.with(name, number));
            line.send(text.as_str(), &[session.link.sender(), port.receiver()])?;
        }
        Ok(())
    }

    /// A session for each peer: that of another process where it is given, else a new one. And the links of those that are
    /// given and for no peer any more. None has begun yet.
    pub(super) fn follow(
        peers: impl Iterator<Item = (Peer, SocketAddr)>,
        mut given: Vec<GivenSession>,
    ) -> Result<(Sessions, Vec<bfd::Link>), LinkError> {
        let mut sessions = Sessions::default();
        let mut ports: Vec<Arc<Port>> = Vec::new();
        for (peer, where_it_listens) in peers {
            if sessions.0.iter().any(|session| session.peer == peer) {
                continue;
            }
            let settings = peer.settings()?;
            let (local, at) = (settings.local.ip(), SocketAddr::new(settings.local.ip(), PORT));
            let known = ports.iter().find(|port| port.address() == at).cloned();
            let is_first = known.is_none();
            let port = match known {
                Some(port) => port,
                None => {
                    let receiver = given.iter().find(|given| given.local == local);
                    let port = match receiver.map(|given| given.receiver.try_clone()) {
                        Some(Ok(receiver)) => Port::prepare(at, receiver)?,
                        Some(Err(source)) => return Err(LinkError::Thread { call: "dup()", source }),
                        None => Port::open(at, None)?,
                    };
                    ports.push(Arc::clone(&port));
                    port
                }
            };
            let settings = LinkSettings { receive: Receive::Shared(Arc::clone(&port)), ..settings };
            let found = given.iter().position(|given| given.local == local && given.peer == peer.address);
            let followed = match found.map(|found| given.swap_remove(found)) {
                Some(given) => bfd::Link::follow(&settings, &given.past, given.sender)?,
                None => None,
            };
            let link = match followed {
                Some(link) => link,
                None => bfd::Link::prepare(&settings)?,
            };
            sessions.0.push(Session {
                peer,
                at: where_it_listens,
                reception: Reception::Port,
                link,
                port: is_first.then_some(port),
            });
        }
        let left = given.into_iter().map(|given| {
            let settings =
                LinkSettings { receive: Receive::Handed, ..LinkSettings::new(given.local, given.peer) };
            bfd::Link::follow(&settings, &given.past, given.sender)
        });
        let left = left.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        Ok((sessions, left))
    }
}
