//! BFD for the next hops of links: which sessions there are, and what a plane does with their state.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple::spread::Group;
use fourtuple_syscalls::datagram::Datagram;

use crate::bfd::{self, Inbox, LinkError, LinkReport, LinkSettings, LinkState, PORT, Port, Receive, Timers};
use crate::in_band::{self, InBand, Reception};
use crate::route::Routes;

/// Whom a link has a BFD session with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where control packets go to.
    pub address: IpAddr,
    /// Where they are sent from and received at; `None`: the address that the kernel would send from. In-band it is where the
    /// link listens, whatever this is.
    pub local: Option<IpAddr>,
    /// How often, and how many may be lost.
    pub timers: Timers,
    /// Control packets are among the data; `None`: at port 3784.
    pub in_band: Option<InBand>,
}

impl Peer {
    /// With the timers that are usual: 300 ms, 3 lost.
    pub fn new(address: IpAddr) -> Peer {
        Peer { address, local: None, timers: Timers::default(), in_band: None }
    }

    /// The same among the data: control packets go from where the link listens to this address, and come to where it listens.
    pub fn in_band(address: SocketAddr) -> Peer {
        Peer { in_band: Some(InBand::at(address.port())), ..Peer::new(address.ip()) }
    }

    pub(crate) fn settings(&self) -> Result<LinkSettings, LinkError> {
        let settings = match self.local {
            Some(local) => LinkSettings::new(local, self.address),
            None => LinkSettings::towards(self.address)?,
        };
        Ok(LinkSettings { timers: self.timers, ..settings })
    }

    /// The same session in one link; only for those that are in-band.
    pub(crate) fn is_at(&self, other: &Peer, here: SocketAddr, there: SocketAddr) -> bool {
        self == other && (self.in_band.is_none() || here == there)
    }
}

/// What became of one session.
#[derive(Clone, Debug)]
pub struct Watched {
    /// With whom.
    pub peer: IpAddr,
    /// Where its control packets are sent to: that of the peer's data in-band.
    pub port: u16,
    /// The session, as it is, or was before it was ended.
    pub report: LinkReport,
    /// How its packets come.
    pub reception: Reception,
    /// What the port that it shares with others has discarded because it was for no session, by reason; told of the first
    /// session of a port alone.
    pub discarded_by_port: bfd::Discards,
}

/// A session and what it was asked with.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) peer: Peer,
    /// Where its link listens; of several links the first.
    pub(crate) at: SocketAddr,
    pub(crate) reception: Reception,
    pub(crate) link: bfd::Link,
    /// The first session of a port tells what that discards.
    pub(crate) port: Option<Arc<Port>>,
}

/// All sessions of a forwarder: one for each peer, however many links it is for, and in-band one for each link.
#[derive(Debug, Default)]
pub(crate) struct Sessions(pub(crate) Vec<Session>);

impl Sessions {
    pub(crate) fn start<'a>(peers: impl Iterator<Item = (Peer, &'a Group)>) -> Result<Sessions, LinkError> {
        let mut sessions: Vec<Session> = Vec::new();
        let mut ports: Vec<Arc<Port>> = Vec::new();
        for (peer, group) in peers {
            let (at, reception) = (group.address(), peer.reception(group));
            if sessions.iter().any(|session| session.peer.is_at(&peer, session.at, at)) {
                continue;
            }
            if let Some(in_band) = peer.in_band {
                let link = bfd::Link::start(&in_band.settings(&peer, group)?)?;
                sessions.push(Session { peer, at, reception, link, port: None });
                continue;
            }
            let settings = peer.settings()?;
            let local = SocketAddr::new(settings.local.ip(), PORT);
            let known = ports.iter().find(|port| port.address() == local).cloned();
            let is_first = known.is_none();
            let port = match known {
                Some(port) => port,
                None => {
                    let port = Port::open(local, None)?;
                    ports.push(Arc::clone(&port));
                    port
                }
            };
            let receive = Receive::Shared(Arc::clone(&port));
            let link = bfd::Link::start(&LinkSettings { receive, ..settings })?;
            sessions.push(Session { peer, at, reception, link, port: is_first.then_some(port) });
        }
        Ok(Sessions(sessions))
    }

    fn find(&self, peer: &Peer, at: SocketAddr) -> Option<&Session> {
        self.0.iter().find(|session| session.peer.is_at(peer, session.at, at))
    }

    pub(crate) fn read(&self) -> Vec<Watched> {
        self.0.iter().map(|session| session.watched(session.link.state().report())).collect()
    }

    /// All say together that they end, and go when their peers have heard it.
    pub(crate) fn drain(&mut self) -> Vec<Watched> {
        let before = self.read();
        self.0.iter().for_each(|session| session.link.set_admin_down(true));
        let ended = self.0.drain(..).zip(before).map(|(session, before)| {
            let Watched { report: LinkReport { state, diagnostic, ups, downs, .. }, .. } = before;
            let port = session.port.clone();
            let report = LinkReport { state, diagnostic, ups, downs, ..session.link.drain() };
            let discarded_by_port = port.map(|port| port.discards()).unwrap_or_default();
            Watched { report, discarded_by_port, ..before }
        });
        ended.collect()
    }
}

impl Session {
    /// Where its control packets go.
    pub(crate) fn goes_to(&self) -> SocketAddr {
        SocketAddr::new(self.peer.address, self.peer.in_band.map_or(PORT, |in_band| in_band.port))
    }

    fn watched(&self, report: LinkReport) -> Watched {
        let discarded_by_port = self.port.as_ref().map(|port| port.discards()).unwrap_or_default();
        let port = self.goes_to().port();
        Watched { peer: self.peer.address, port, report, reception: self.reception, discarded_by_port }
    }
}

/// What a plane sees of a link's session.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    peer: IpAddr,
    state: LinkState,
    /// None of the next hops has the address of the peer: it is a router on the way to all of them.
    is_for_all: Arc<AtomicBool>,
    /// Of a session whose packets come among the data, and that nothing but a plane tells from them.
    inbox: Option<Inbox>,
}

impl Watch {
    pub(crate) fn new(
        sessions: &Sessions,
        peer: Option<&Peer>,
        at: SocketAddr,
        routes: &Routes,
    ) -> Option<Watch> {
        let peer = peer?;
        let session = sessions.find(peer, at)?;
        let watch = Watch {
            peer: peer.address,
            state: session.link.state(),
            is_for_all: Arc::new(AtomicBool::new(false)),
            inbox: (session.reception == Reception::Planes).then(|| session.link.inbox()),
        };
        watch.look_at(routes);
        Some(watch)
    }

    /// The routes were exchanged for these.
    pub(crate) fn look_at(&self, routes: &Routes) {
        let is_for_all = !routes.hops().any(|hop| hop.ip() == self.peer);
        self.is_for_all.store(is_for_all, Ordering::Relaxed);
    }

    /// Whether planes look for control packets among the data, for which they have to be told the hops.
    pub(crate) fn hands_over(&self) -> bool {
        self.inbox.is_some()
    }

    /// Hands the session what is its own. False: it is data.
    pub(crate) fn takes(&self, payload: &[u8], datagram: &Datagram<'_>) -> bool {
        let (Some(inbox), Some(from)) = (&self.inbox, datagram.from()) else { return false };
        let is_control = in_band::CONTROL.finds(payload, datagram.hops, from.port());
        if is_control {
            // What finds no room is counted by the inbox.
            inbox.offer(payload, from, datagram.hops);
        }
        is_control
    }

    /// Whether packets for this hop would be lost: one load as long as the link is up.
    pub(crate) fn is_down(&self, hop: SocketAddr) -> bool {
        self.state.has_failed() && (hop.ip() == self.peer || self.is_for_all.load(Ordering::Relaxed))
    }
}
