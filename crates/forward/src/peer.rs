//! The BFD peer of a link: its address, timers and reception.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use fourtuple::spread::{DeviceName, UdpGroup};

use crate::bfd::{LinkError, LinkSettings, Receive, Timers};

/// The BFD peer of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address that control packets are sent to.
    pub address: IpAddr,
    /// The address that control packets are sent from and received at; `None`: the source address that the kernel would choose.
    /// An in-band session uses the address of the link instead.
    pub local: Option<IpAddr>,
    /// The device that the session is bound to (SO_BINDTODEVICE). Required for link-local addresses; not used in-band.
    pub device: Option<DeviceName>,
    /// Intervals and detection multiplier.
    pub timers: Timers,
    /// Control packets share the port of the data; `None`: they use port 3784.
    pub in_band: Option<InBand>,
}

impl Peer {
    /// Returns a peer at port 3784 with the default timers: 300 ms, detection multiplier 3.
    pub fn new(address: IpAddr) -> Peer {
        Peer { address, local: None, device: None, timers: Timers::default(), in_band: None }
    }

    /// Returns an in-band peer: control packets go from the address of the link to this address, among the data.
    pub fn in_band(address: SocketAddr) -> Peer {
        Peer { in_band: Some(InBand::at(address.port())), ..Peer::new(address.ip()) }
    }

    pub(crate) fn settings(&self) -> Result<LinkSettings, LinkError> {
        let settings = match (self.device, self.local) {
            (Some(device), local) => LinkSettings::on_device(device, self.address, local)?,
            (None, Some(local)) => LinkSettings::new(local, self.address),
            (None, None) => LinkSettings::towards(self.address)?,
        };
        Ok(LinkSettings { timers: self.timers, ..settings })
    }

    /// Returns whether both peers stand for the same session. In-band sessions differ by the address of their link too.
    pub(crate) fn is_at(&self, other: &Peer, here: SocketAddr, there: SocketAddr) -> bool {
        self == other && (self.in_band.is_none() || here == there)
    }
}

/// Settings of a session whose control packets share the port of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InBand {
    /// The port of the peer's data.
    pub port: u16,
    /// Whether the filter [`crate::CONTROL`] gives control packets a socket of their own. `false` is for comparison: control packets
    /// wait behind data, and are dropped with data.
    pub filter: bool,
}

impl InBand {
    /// Returns settings with the filter.
    pub fn at(port: u16) -> InBand {
        InBand { port, filter: true }
    }

    /// Returns the settings of a session that sends from the address of the link.
    pub(crate) fn settings(&self, peer: &Peer, group: &UdpGroup) -> Result<LinkSettings, LinkError> {
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
