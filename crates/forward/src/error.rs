use std::io;
use std::net::SocketAddr;

use fourtuple::spread::UdpGroupError;
use fourtuple_syscalls::errno_name;

use crate::bfd::LinkError;
use crate::handover::HandoverError;
use crate::plane::PlaneKind;

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
