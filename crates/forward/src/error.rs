use std::io;
use std::net::SocketAddr;

use fourtuple::spread::SpreadError;
use fourtuple_syscalls::errno_name;

use crate::bfd::LinkError;
use crate::handover::HandoverError;
use crate::plane::PlaneKind;

/// Why nothing is forwarded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The sockets to listen with cannot be had.
    #[error(transparent)]
    Spread(#[from] SpreadError),
    /// A BFD session cannot be.
    #[error("BFD: {0}")]
    Bfd(#[from] LinkError),
    /// Packets would go round for ever.
    #[error("{listen} would forward to itself: {to} is where it listens")]
    Loop {
        /// Where it listens.
        listen: SocketAddr,
        /// The next hop.
        to: SocketAddr,
    },
    /// Packets would go round for ever, by way of other links.
    #[error("packets would go round: {}, and {} again", in_words(listens), in_words(&listens[..1]))]
    Round {
        /// Where the links listen that they would come by, two at least.
        listens: Vec<SocketAddr>,
    },
    /// The kernel would spread packets over both.
    #[error("two links listen at {listen}")]
    Twice {
        /// Where.
        listen: SocketAddr,
    },
    /// Nothing to forward, or nobody to do it.
    #[error("{links} links and {planes} planes: there must be one of each at least")]
    Nothing {
        /// Links that were asked for.
        links: usize,
        /// Planes that were asked for.
        planes: usize,
    },
    /// This process may not move packets in this way.
    #[error("{kind} is not permitted here: {call}: {} ({source}); {needs}", errno_name(source))]
    NotPermitted {
        /// The way that was asked for.
        kind: PlaneKind,
        /// What was refused.
        call: &'static str,
        /// Which permission it takes.
        needs: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// This kernel has not got this way to move packets.
    #[error("{kind} is not possible here: {what}: {} ({source})", errno_name(source))]
    Absent {
        /// The way that was asked for.
        kind: PlaneKind,
        /// What is missing.
        what: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// A plane has ended though nobody told it to.
    #[error("plane {plane} has ended: {why}")]
    Plane {
        /// Which.
        plane: usize,
        /// The call that failed, or that it has panicked.
        why: String,
    },
    /// It cannot leave.
    #[error("plane {plane} cannot leave: it is not at work, or no other one is")]
    NoPlane {
        /// Which.
        plane: usize,
    },
    /// Nobody can join.
    #[error("{planes} planes have a socket of each link, and no plane has two: no other one can join")]
    NoSeat {
        /// How many are at work.
        planes: usize,
    },
    /// Another process was to be followed, and could not be.
    #[error(transparent)]
    Handover(#[from] HandoverError),
    /// A call failed.
    #[error("{call}: {} ({source})", errno_name(source))]
    Call {
        /// Which.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl ForwardError {
    /// Whether other settings would have helped.
    pub fn is_usage(&self) -> bool {
        match self {
            ForwardError::Loop { .. } | ForwardError::Round { .. } | ForwardError::Twice { .. } => true,
            ForwardError::Spread(error) => error.is_usage(),
            ForwardError::Handover(error) => matches!(error, HandoverError::Differs { .. }),
            _ => false,
        }
    }
}

fn in_words(listens: &[SocketAddr]) -> String {
    listens.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}
