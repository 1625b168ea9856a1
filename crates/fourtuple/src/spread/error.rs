use std::io;
use std::net::SocketAddr;

use fourtuple_syscalls::errno_name;

use crate::spread::selector::Spread;

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpreadError {
    /// A group has a member at least.
    #[error("a group of {members} sockets: 1 to {most} can be had", most = crate::spread::group::MOST)]
    Members {
        /// How many were asked for.
        members: usize,
    },
    /// This kernel has not got it.
    #[error("{spread} is not possible here: this kernel has no {what}")]
    Absent {
        /// What was asked for.
        spread: Spread,
        /// What is missing.
        what: &'static str,
    },
    /// A call failed.
    #[error("{call} for {address}: {} ({source})", errno_name(source))]
    Call {
        /// Which.
        call: &'static str,
        /// The group's address.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
}
