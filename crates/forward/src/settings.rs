use std::net::SocketAddr;
use std::time::Duration;

use fourtuple::spread::Selector;

use crate::peer::Peer;
use crate::plane::kind::PlaneKind;
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
