//! The BFD sessions of a forwarder, and the state of a session as planes read it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple::spread::{ControlFilter, DeviceName, FlowKey, Selector, UdpGroup, UdpGroupError};
use fourtuple_syscalls::datagram::Datagram;

use crate::bfd::{self, Inbox, LinkError, LinkReport, LinkSettings, LinkState, PORT, Port, Receive};
use crate::route::Routes;
use crate::settings::{Link, Peer};

/// The state and counters of one BFD session.
#[derive(Clone, Debug)]
pub struct SessionReport {
    pub peer: IpAddr,
    /// The device that the session is bound to.
    pub device: Option<DeviceName>,
    /// The port that control packets are sent to: 3784, or the port of the peer's data in-band.
    pub port: u16,
    /// The current state of the session, or its last state before it was ended.
    pub report: LinkReport,
    /// How control packets reach the session.
    pub reception: Reception,
    /// Control packets that belonged to no session of the shared port, by reason. Only the first session of a port reports them.
    pub discarded_by_port: bfd::Discards,
    /// Packets that the kernel dropped at the socket of the port, see [`Port::overflowed`]. Only the first session of a port reports
    /// them.
    pub overflowed_at_port: u64,
}

impl SessionReport {
    /// Adds the counters of the port, if this session reports them.
    fn with_port(self, port: Option<&Port>) -> SessionReport {
        let Some(port) = port else { return self };
        SessionReport { discarded_by_port: port.discards(), overflowed_at_port: port.overflowed(), ..self }
    }
}

/// A running session and its settings.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) peer: Peer,
    /// The address of its link, or of the first link if several links use the session.
    pub(crate) at: SocketAddr,
    pub(crate) reception: Reception,
    pub(crate) link: bfd::Link,
    /// The port whose discards this session reports: only the first session of a port has it.
    pub(crate) port: Option<Arc<Port>>,
}

/// All sessions of a forwarder: one for each peer at port 3784, which any number of links may use, and one for each in-band link.
#[derive(Debug, Default)]
pub(crate) struct Sessions(pub(crate) Vec<Session>);

impl Sessions {
    pub(crate) fn start<'a>(
        peers: impl Iterator<Item = (Peer, &'a UdpGroup)>,
    ) -> Result<Sessions, LinkError> {
        let open_port = |_: &(), local, device| Port::open(local, device);
        Sessions::open(peers, &mut (), open_port, |_, settings| bfd::Link::start(settings))
    }

    /// Makes a session for each peer, from what `state` has. Sessions at one address and device share a port.
    pub(crate) fn open<'a, S>(
        peers: impl Iterator<Item = (Peer, &'a UdpGroup)>,
        state: &mut S,
        open_port: impl Fn(&S, SocketAddr, Option<DeviceName>) -> Result<Arc<Port>, LinkError>,
        open_link: impl Fn(&mut S, &LinkSettings) -> Result<bfd::Link, LinkError>,
    ) -> Result<Sessions, LinkError> {
        let mut sessions: Vec<Session> = Vec::new();
        let mut ports: Vec<Arc<Port>> = Vec::new();
        for (peer, group) in peers {
            let (at, reception) = (group.address(), peer.reception(group));
            if sessions.iter().any(|session| session.peer.is_at(&peer, session.at, at)) {
                continue;
            }
            if let Some(in_band) = peer.in_band {
                let link = open_link(state, &in_band.settings(&peer, group)?)?;
                sessions.push(Session { peer, at, reception, link, port: None });
                continue;
            }
            let settings = peer.settings()?;
            let (local, device) = (settings.local, settings.device);
            let known = ports.iter().find(|port| port.is_at(local, device)).cloned();
            let is_first = known.is_none();
            let port = match known {
                Some(port) => port,
                None => {
                    let port = open_port(state, local, device)?;
                    ports.push(Arc::clone(&port));
                    port
                }
            };
            let receive = Receive::Shared(Arc::clone(&port));
            let link = open_link(state, &LinkSettings { receive, ..settings })?;
            sessions.push(Session { peer, at, reception, link, port: is_first.then_some(port) });
        }
        Ok(Sessions(sessions))
    }

    fn find(&self, peer: &Peer, at: SocketAddr) -> Option<&Session> {
        self.0.iter().find(|session| session.peer.is_at(peer, session.at, at))
    }

    pub(crate) fn read(&self) -> Vec<SessionReport> {
        self.0.iter().map(|session| session.watched(session.link.state().report())).collect()
    }

    /// Sends AdminDown in all sessions at the same time, and ends each session after its peer has acknowledged or timed out.
    pub(crate) fn drain(&mut self) -> Vec<SessionReport> {
        let before = self.read();
        self.0.iter().for_each(|session| session.link.set_admin_down(true));
        let ports: Vec<_> = self.0.iter().map(|session| session.port.clone()).collect();
        let links: Vec<_> = self.0.drain(..).map(|session| session.link.drain()).collect();
        // Ports are read after all sessions have ended: until then the ports receive for them.
        let ended = before.into_iter().zip(links).zip(ports).map(|((before, link), port)| {
            // The report has the state from before the end, and the counters from after it.
            let report = LinkReport {
                transmitted: link.transmitted,
                unsent: link.unsent,
                received: link.received,
                discards: link.discards,
                handed: link.handed,
                handed_dropped: link.handed_dropped,
                overflowed: link.overflowed,
                ..before.report.clone()
            };
            SessionReport { report, ..before }.with_port(port.as_deref())
        });
        ended.collect()
    }
}

impl Session {
    /// Returns the destination of the control packets.
    fn goes_to(&self) -> SocketAddr {
        SocketAddr::new(self.peer.address, self.peer.in_band.map_or(PORT, |in_band| in_band.port))
    }

    fn watched(&self, report: LinkReport) -> SessionReport {
        let watched = SessionReport {
            peer: self.peer.address,
            device: self.peer.device,
            port: self.goes_to().port(),
            report,
            reception: self.reception,
            discarded_by_port: bfd::Discards::default(),
            overflowed_at_port: 0,
        };
        watched.with_port(self.port.as_deref())
    }
}

/// The part of a session that planes read: its state, and its inbox for control packets among the data.
#[derive(Clone, Debug)]
pub(crate) struct SessionView {
    peer: IpAddr,
    state: LinkState,
    /// True when no next hop has the address of the peer: the peer is then a router on the way to all next hops.
    is_for_all: Arc<AtomicBool>,
    /// The inbox of a session whose control packets reach a plane among the data; `None` when a filter or a port separates them.
    inbox: Option<Inbox>,
}

impl SessionView {
    pub(crate) fn new(
        sessions: &Sessions,
        peer: Option<&Peer>,
        at: SocketAddr,
        routes: &Routes,
    ) -> Option<SessionView> {
        let peer = peer?;
        let session = sessions.find(peer, at)?;
        let watch = SessionView {
            peer: peer.address,
            state: session.link.state(),
            is_for_all: Arc::new(AtomicBool::new(false)),
            inbox: (session.reception == Reception::Planes).then(|| session.link.inbox()),
        };
        watch.look_at(routes);
        Some(watch)
    }

    /// Reads the new routes of the link.
    pub(crate) fn look_at(&self, routes: &Routes) {
        let is_for_all = !routes.hops().any(|hop| hop.ip() == self.peer);
        self.is_for_all.store(is_for_all, Ordering::Relaxed);
    }

    /// Returns whether planes search for control packets among the data. They need the TTL of each packet for this.
    pub(crate) fn searches_data(&self) -> bool {
        self.inbox.is_some()
    }

    /// Passes a control packet to the session. Returns false when the packet is data.
    pub(crate) fn takes_control(&self, payload: &[u8], datagram: &Datagram<'_>) -> bool {
        let (Some(inbox), Some(from)) = (&self.inbox, datagram.from()) else { return false };
        let is_control = CONTROL.finds(payload, datagram.hops, from.port());
        if is_control {
            // The inbox counts control packets that it has no space for.
            inbox.offer(payload, from, datagram.hops);
        }
        is_control
    }

    /// Returns whether the link to this next hop is down. While the link is up, this is a single atomic load.
    pub(crate) fn is_down(&self, hop: SocketAddr) -> bool {
        self.state.has_failed() && (hop.ip() == self.peer || self.is_for_all.load(Ordering::Relaxed))
    }
}

/// A filter for the control packets of sessions without authentication: version 1, neither authenticated nor multipoint, 24 bytes long
/// (RFC 5880, section 4.1), TTL or hop limit 255 (RFC 5881, section 5).
pub const CONTROL: ControlFilter =
    ControlFilter::Neighbour { key: FlowKey { offset: 0, width: 4, mask: 0xe005_00ff }, value: 0x2000_0018 };

/// How the control packets of a session reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reception {
    /// Control packets use port 3784, separate from the data.
    Port,
    /// Control packets use the port of the data. The kernel separates them by the filter [`CONTROL`] into a socket of the session.
    Filter,
    /// Control packets use the port of the data. Planes separate them, so they wait behind data in the queue and are dropped with data.
    Planes,
}

impl Reception {
    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Reception::Port => "port",
            Reception::Filter => "filter",
            Reception::Planes => "planes",
        }
    }
}

impl Peer {
    /// Returns how control packets reach the session of a link with these sockets.
    pub(crate) fn reception(&self, group: &UdpGroup) -> Reception {
        match self.in_band {
            None => Reception::Port,
            Some(_) if group.has_control() => Reception::Filter,
            Some(_) => Reception::Planes,
        }
    }
}

impl Link {
    pub(crate) fn is_in_band(&self) -> bool {
        self.bfd.is_some_and(|peer| peer.in_band.is_some())
    }

    fn has_filter(&self) -> bool {
        self.bfd.and_then(|peer| peer.in_band).is_some_and(|in_band| in_band.filter)
    }

    /// Returns the selector for a number of sockets. With one socket every selector is equal, so that `random`, which supports a filter,
    /// replaces `hash`, which does not.
    pub(crate) fn spread_over(&self, sockets: usize) -> Selector {
        let is_free = sockets == 1 && self.spread == Selector::Hash && self.has_filter();
        if is_free { Selector::Random } else { self.spread }
    }

    /// Opens the sockets of the link, with one more socket for in-band control packets where the selector supports a filter.
    pub(crate) fn open(&self, planes: usize) -> Result<UdpGroup, UdpGroupError> {
        let spread = self.spread_over(planes);
        if self.has_filter() {
            match UdpGroup::open_with_control(self.listen, planes, &spread, &CONTROL) {
                // `SessionReport::reception` reports that the session has no filter.
                Err(UdpGroupError::NoControl { .. }) => {}
                opened => return opened,
            }
        }
        UdpGroup::open(self.listen, planes, &spread)
    }
}
