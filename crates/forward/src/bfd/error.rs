//! Errors of opening a session.

use std::io;
use std::net::{IpAddr, SocketAddr};

use fourtuple::spread::DeviceName;
use thiserror::Error;

/// An error of opening a link, or the port that several links share.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The local address and the peer are of different IP versions.
    #[error("{local} cannot reach {peer}: one is IPv4, the other IPv6")]
    Families {
        /// The local address.
        local: IpAddr,
        /// The peer's address.
        peer: IpAddr,
    },
    /// Both ends of the link have the same address, so that the session would receive its own packets.
    #[error("{0} is the address of both ends of the link")]
    Itself(IpAddr),
    /// The kernel has no route to the peer, or its route names no local address: ENETUNREACH, ENOENT.
    #[error("which address {peer} would be reached from: {source}")]
    NoRoute {
        /// The peer.
        peer: IpAddr,
        /// The error from the kernel.
        source: io::Error,
    },
    /// A link-local address is only valid with a device.
    #[error("{0} is a link-local address: name the device that it is on")]
    NoScope(IpAddr),
    /// The network device does not exist: ENODEV.
    #[error("the network device {device}: {source}")]
    NoDevice {
        /// The name of the device.
        device: DeviceName,
        /// The error from the kernel.
        source: io::Error,
    },
    /// Another session on this port has the same peer (RFC 5881, section 3).
    #[error("there is a session with {0} at this address already")]
    Taken(IpAddr),
    /// None of the 16384 source ports of RFC 5881, section 4 is free at this address.
    #[error("no source port from 49152 to 65535 is free at {0}: end what holds them")]
    NoSourcePort(IpAddr),
    /// A system call failed.
    #[error("{call} of {address}: {source}")]
    Socket {
        /// The name of the system call.
        call: &'static str,
        /// The address that the call was made for.
        address: SocketAddr,
        /// The error from the kernel.
        source: io::Error,
    },
    /// The thread or its waker could not be created.
    #[error("{call}: {source}")]
    Thread {
        /// The name of the call.
        call: &'static str,
        /// The error from the kernel.
        source: io::Error,
    },
}

pub(super) fn socket_failed(call: &'static str, address: SocketAddr) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Socket { call, address, source }
}

pub(super) fn thread_failed(call: &'static str) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Thread { call, source }
}
