//! Why a session cannot be.

use std::io;
use std::net::{IpAddr, SocketAddr};

use thiserror::Error;

/// Why a link, or the port of several, could not be opened.
#[derive(Debug, Error)]
pub enum LinkError {
    /// IPv4 on one side, IPv6 on the other.
    #[error("{local} cannot reach {peer}: one is IPv4, the other IPv6")]
    Families {
        /// The address here.
        local: IpAddr,
        /// That of the peer.
        peer: IpAddr,
    },
    /// Both ends of the link are the same, so that packets would confirm themselves.
    #[error("{0} is the address of both ends of the link")]
    Itself(IpAddr),
    /// The kernel has no route to the peer, or none that names an address here: ENETUNREACH, ENOENT.
    #[error("which address {peer} would be reached from: {source}")]
    NoRoute {
        /// The peer.
        peer: IpAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another session on this port has the same peer: RFC 5881, section 3.
    #[error("there is a session with {0} at this address already")]
    Taken(IpAddr),
    /// None of the 16384 source ports of RFC 5881, section 4 is free at this address.
    #[error("no source port from 49152 to 65535 is free at {0}: end what holds them")]
    NoSourcePort(IpAddr),
    /// A system call failed.
    #[error("{call} of {address}: {source}")]
    Socket {
        /// Which one.
        call: &'static str,
        /// For which address.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// No thread, or what wakes it, could be had.
    #[error("{call}: {source}")]
    Thread {
        /// Which call failed.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

pub(super) fn socket_failed(call: &'static str, address: SocketAddr) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Socket { call, address, source }
}

pub(super) fn thread_failed(call: &'static str) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Thread { call, source }
}
