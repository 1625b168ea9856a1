use std::net::SocketAddr;
use std::time::Duration;

use fourtuple::spread::Spread;

use crate::plane::PlaneKind;
use crate::route::Routes;
use crate::watch::Peer;

/// An address to listen at, and where its packets go on to.
#[derive(Clone, Debug)]
pub struct Link {
    /// Where packets come to; port 0 is any.
    pub listen: SocketAddr,
    /// Where they go.
    pub routes: Routes,
    /// Which plane gets which.
    pub spread: Spread,
    /// Whether what next hops answer goes back to whom it is for: a socket per client, as with NAT. Otherwise one way.
    pub replies: bool,
    /// After how long without a packet a client is forgotten; only with `replies`.
    pub idle: Duration,
    /// The most clients of one plane; only with `replies`.
    pub clients: usize,
    /// Whom BFD is spoken with: when that session goes down, packets for next hops with the peer's address go by the default
    /// route if that is another one, and are dropped otherwise. Where no next hop has the address, it is for all of them.
    pub bfd: Option<Peer>,
}

impl Link {
    /// One way from `listen` to `to`, by hash; clients would be forgotten after 60 s, and 4,096 of a plane be known.
    pub fn new(listen: SocketAddr, to: SocketAddr) -> Link {
        Link {
            listen,
            routes: Routes::to(to),
            spread: Spread::Hash,
            replies: false,
            idle: Duration::from_secs(60),
            clients: 4096,
            bfd: None,
        }
    }

    /// Whether planes have to know which address a packet was sent to: it says where it goes, or where its replies come from.
    pub(crate) fn needs_destination(&self) -> bool {
        let has_many = self.listen.ip().to_canonical().is_unspecified();
        self.routes.are_by_destination() || self.replies && has_many
    }
}

/// What to forward, and how.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The links; all planes serve all of them.
    pub links: Vec<Link>,
    /// How many threads.
    pub planes: usize,
    /// How each of them moves packets.
    pub kind: PlaneKind,
    /// Each on a processor of its own, in the order of those that are allowed.
    pub pin: bool,
    /// What a packet costs beyond being moved: for experiments.
    pub work: Duration,
    /// Bytes that may wait at each socket that listens (SO_RCVBUF, which the kernel bounds by net.core.rmem_max); absent: the
    /// kernel's default.
    pub receive_buffer: Option<i32>,
}

impl Forward {
    /// One link on `planes` threads, with offload, not pinned.
    pub fn new(link: Link, planes: usize) -> Forward {
        Forward {
            links: vec![link],
            planes,
            kind: PlaneKind::Offload,
            pin: false,
            work: Duration::ZERO,
            receive_buffer: None,
        }
    }
}
