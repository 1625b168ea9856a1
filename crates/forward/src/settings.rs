use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fourtuple::spread::{DeviceName, Selector, UdpGroup, UdpGroupError};
use fourtuple_syscalls::errno_name;

use crate::bfd::{LinkError, LinkSettings, Receive, Timers};
use crate::handover::HandoverError;
use crate::plane::PlaneKind;
use crate::route::Routes;

/// An address to listen on, and the next hops of its packets.
#[derive(Clone, Debug)]
pub struct Link {
    /// The address to listen on. With port 0 the kernel chooses a port.
    pub listen: SocketAddr,
    /// The next hops.
    pub routes: Routes,
    /// How packets are distributed over the planes.
    pub spread: Selector,
    /// Whether replies of next hops return to the client that sent the packet. Each client then has a socket of its own, as with
    /// NAT. Without it, packets are forwarded in one direction only.
    pub replies: bool,
    /// How long the socket of a client stays open without a packet. Used only with `replies`.
    pub idle: Duration,
    /// Maximum number of clients of one plane. Used only with `replies`.
    pub clients: usize,
    /// The BFD peer. When its session goes down, packets for next hops with the peer's address take the default route if that is
    /// another address, and are dropped otherwise. If no next hop has the peer's address, the session stands for all next hops.
    pub bfd: Option<Peer>,
}

impl Link {
    /// Returns a link that forwards in one direction from `listen` to `to`, distributed by the hash of the 4-tuple. If `replies` is set
    /// later, clients are closed after 60 s, and a plane has at most 4,096.
    pub fn new(listen: SocketAddr, to: SocketAddr) -> Link {
        Link {
            listen,
            routes: Routes::to(to),
            spread: Selector::Hash,
            replies: false,
            idle: Duration::from_secs(60),
            clients: 4096,
            bfd: None,
        }
    }

    /// Returns whether planes need the destination address of each packet: to choose the route, or as source of the replies.
    pub(crate) fn needs_destination(&self) -> bool {
        let has_many = self.listen.ip().to_canonical().is_unspecified();
        self.routes.are_by_destination() || self.replies && has_many
    }
}

/// The settings of a forwarder.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The links. Each plane serves all links.
    pub links: Vec<Link>,
    /// The number of planes. Each plane is a thread.
    pub planes: usize,
    /// How planes move packets.
    pub kind: PlaneKind,
    /// Whether plane i is pinned to the i-th CPU that the process may use.
    pub pin: bool,
    /// Additional CPU time for each packet, for experiments.
    pub work: Duration,
    /// Maximum number of clients of all links and planes together. Used only with [`Link::replies`]. The default is described at
    /// [`crate::ClientLimit`].
    pub clients: Option<usize>,
    /// Whether a link may use an address at which another process has sockets. The kernel then distributes packets over the sockets of
    /// both processes.
    pub share: bool,
    /// The size of the receive queue of each listening socket in bytes (SO_RCVBUF, bounded by net.core.rmem_max). `None` is the
    /// kernel's default.
    pub receive_buffer: Option<i32>,
}

impl Forward {
    /// Returns settings for one link on `planes` planes of the kind [`PlaneKind::Offload`], not pinned.
    pub fn new(link: Link, planes: usize) -> Forward {
        Forward {
            links: vec![link],
            planes,
            kind: PlaneKind::Offload,
            pin: false,
            work: Duration::ZERO,
            clients: None,
            share: false,
            receive_buffer: None,
        }
    }
}

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

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The listening sockets could not be opened.
    #[error(transparent)]
    Spread(#[from] UdpGroupError),
    /// A BFD session could not be started.
    #[error("BFD: {0}")]
    Bfd(#[from] LinkError),
    /// A link would forward to itself for ever.
    #[error("{listen} would forward to itself: {to} is where it listens")]
    Loop {
        /// The address of the link.
        listen: SocketAddr,
        /// The next hop.
        to: SocketAddr,
    },
    /// Links would forward to each other in a circle for ever.
    #[error("packets would go round: {}, and {} again", in_words(listens), in_words(&listens[..1]))]
    Round {
        /// The addresses of the links on the circle: two or more.
        listens: Vec<SocketAddr>,
    },
    /// Two links have one address: the kernel would distribute packets over the sockets of both.
    #[error("two links listen at {listen}")]
    Twice { listen: SocketAddr },
    /// Another process has sockets at the address.
    #[error(
        "{listen}: EADDRINUSE: another process has sockets there, and the kernel would spread packets over both"
    )]
    Taken { listen: SocketAddr },
    /// The settings have no link or no plane.
    #[error("links: {links}, planes: {planes}; there must be one of each at least")]
    Nothing {
        /// The number of links in the settings.
        links: usize,
        /// The number of planes in the settings.
        planes: usize,
    },
    /// The process lacks a permission that this kind of plane needs.
    #[error("{kind} is not permitted here: {call}: {} ({source}); {needs}", errno_name(source))]
    NotPermitted {
        /// The requested kind of plane.
        kind: PlaneKind,
        /// The call that the kernel refused.
        call: &'static str,
        /// The permission that the call needs.
        needs: &'static str,
        /// The error of the call.
        source: io::Error,
    },
    /// The kernel lacks a feature that this kind of plane needs.
    #[error("{kind} is not possible here: {what}: {} ({source})", errno_name(source))]
    Absent {
        /// The requested kind of plane.
        kind: PlaneKind,
        /// The missing feature.
        what: &'static str,
        /// The error of the call.
        source: io::Error,
    },
    /// The requested limit of clients exceeds the number of possible sockets.
    #[error(
        "{clients} clients cannot be: each takes an ephemeral UDP port, of which there are {ports} \
         (net.ipv4.ip_local_port_range), and a descriptor, of which RLIMIT_NOFILE leaves {descriptors}"
    )]
    TooManyClients {
        /// The requested limit.
        clients: usize,
        /// Ephemeral ports of the network namespace.
        ports: usize,
        /// Descriptors available for clients.
        descriptors: usize,
    },
    /// A plane ended without a request to end.
    #[error("plane {plane} has ended: {why}")]
    Plane {
        plane: usize,
        /// The failed call, or the statement that the thread panicked.
        why: String,
    },
    /// The plane cannot leave: it has ended, or is the last plane.
    #[error("plane {plane} cannot leave: it is not at work, or no other one is")]
    NoPlane { plane: usize },
    /// No plane can join: no plane has two sockets of a link to give one away.
    #[error(
        "all planes, {planes} in number, have a socket of each link, and no plane has two: no other one can join"
    )]
    NoSeat {
        /// The number of running planes.
        planes: usize,
    },
    /// The takeover from another process failed.
    #[error(transparent)]
    Handover(#[from] HandoverError),
    /// A system call failed.
    #[error("{call}: {} ({source})", errno_name(source))]
    Call {
        call: &'static str,
        /// The error of the call.
        source: io::Error,
    },
}

impl ForwardError {
    /// Returns whether other settings would have avoided the error.
    pub fn is_usage(&self) -> bool {
        match self {
            ForwardError::Loop { .. }
            | ForwardError::Round { .. }
            | ForwardError::Twice { .. }
            | ForwardError::TooManyClients { .. } => true,
            ForwardError::Spread(error) => error.is_usage(),
            ForwardError::Handover(error) => matches!(error, HandoverError::Differs { .. }),
            _ => false,
        }
    }
}

/// Returns the addresses as a list with commas.
fn in_words(listens: &[SocketAddr]) -> String {
    listens.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}
