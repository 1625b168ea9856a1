//! In-band BFD: the filter that separates control packets from data, and how they reach their session.

use fourtuple::spread::{ControlFilter, FlowKey, Selector, UdpGroup, UdpGroupError};

use crate::peer::Peer;
use crate::settings::Link;

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
