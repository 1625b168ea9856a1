use std::io;
use std::net::SocketAddr;

use fourtuple::spread::SpreadError;
use fourtuple_syscalls::errno_name;

/// Why nothing is forwarded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The sockets to listen with cannot be had.
    #[error(transparent)]
    Spread(#[from] SpreadError),
    /// Packets would go round for ever.
    #[error("{listen} would forward to itself: {to} is where it listens")]
    Loop {
        /// Where it listens.
        listen: SocketAddr,
        /// The next hop.
        to: SocketAddr,
    },
    /// Nothing to forward, or nobody to do it.
    #[error("{links} links and {planes} planes: there must be one of each at least")]
    Nothing {
        /// Links that were asked for.
        links: usize,
        /// Planes that were asked for.
        planes: usize,
    },
    /// A call failed.
    #[error("{call}: {} ({source})", errno_name(source))]
    Call {
        /// Which.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}
