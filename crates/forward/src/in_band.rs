//! BFD among the data: which packets of a link are control, and how they come to their session.

use std::net::SocketAddr;
use std::sync::Arc;

use fourtuple::spread::{ControlFilter, Group, Key, Spread, SpreadError};

use crate::bfd::{LinkError, LinkSettings, Receive};
use crate::settings::Link;
use crate::watch::Peer;

/// A control packet as sessions without authentication send it: version 1, neither authenticated nor multipoint, 24 bytes long
/// (RFC 5880, section 4.1), with all hops to live (RFC 5881, section 5).
pub const CONTROL: ControlFilter =
    ControlFilter::Neighbour { key: Key { offset: 0, width: 4, mask: 0xe005_00ff }, value: 0x2000_0018 };

/// How a session's control packets are among the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InBand {
    /// The peer's port: that of its data.
    pub port: u16,
    /// Whether [`CONTROL`] gives them a socket of their own; `false` is for comparison: they wait, and are dropped, behind data.
    pub filter: bool,
}

impl InBand {
    /// With the filter.
    pub fn at(port: u16) -> InBand {
        InBand { port, filter: true }
    }

    /// Of a session that sends from where the link listens.
    pub(crate) fn settings(&self, peer: &Peer, group: &Group) -> Result<LinkSettings, LinkError> {
        let local = group.address();
        let is_steered = group.has_control();
        let socket = if is_steered { group.control() } else { group.member(0) };
        let socket = socket.map_err(|source| LinkError::Socket { call: "dup()", address: local, source })?;
        Ok(LinkSettings {
            local,
            peer: SocketAddr::new(peer.address, self.port),
            timers: peer.timers,
            receive: Receive::InBand { socket: Arc::new(socket), is_steered },
            ..LinkSettings::new(local.ip(), peer.address)
        })
    }
}

/// How the control packets of a session come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reception {
    /// At port 3784, apart from the data.
    Port,
    /// Among the data, from which the kernel takes them out ([`CONTROL`]): to a socket that only the session reads.
    Filter,
    /// Among the data, from which planes take them out: behind data that wait, and lost with them.
    Planes,
}

impl Reception {
    /// As in records.
    pub fn name(self) -> &'static str {
        match self {
            Reception::Port => "port",
            Reception::Filter => "filter",
            Reception::Planes => "planes",
        }
    }
}

impl Peer {
    /// How its packets come to a link with these sockets.
    pub(crate) fn reception(&self, group: &Group) -> Reception {
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

    /// What so many sockets are spread by. Of one socket everybody chooses the same, and a program leaves out that of control.
    pub(crate) fn spread_over(&self, sockets: usize) -> Spread {
        let is_free = sockets == 1 && self.spread == Spread::Hash && self.has_filter();
        if is_free { Spread::Random } else { self.spread }
    }

    /// Opens the sockets, of which control packets among the data have one where that can be.
    pub(crate) fn open(&self, planes: usize) -> Result<Group, SpreadError> {
        let spread = self.spread_over(planes);
        if self.has_filter() {
            match Group::open_with_control(self.listen, planes, &spread, &CONTROL) {
                // What comes of it is in `Watched::reception`: nobody takes it for what was asked for.
                Err(SpreadError::NoControl { .. }) => {}
                opened => return opened,
            }
        }
        Group::open(self.listen, planes, &spread)
    }
}
