//! Distribution of datagrams over the sockets of a SO_REUSEPORT group.
//!
//! By default the kernel hashes the 4-tuple, so that all packets with the same 4-tuple reach one socket. A [`UdpGroup`] is opened with
//! a [`Selector`], which is attached before the first packet can arrive. Under traffic, only the table of [`Selector::Map`] changes. A
//! [`ControlFilter`] delivers control packets to a separate socket, so that they do not wait behind data. Example: [`UdpGroup`].
//!
//! A member leaves in three steps, so that no packet is lost: its slots move to other members, the library waits for packets in flight,
//! and the caller reads the receive queue until it is empty.

use std::error::Error;
use std::io;
use std::net::SocketAddr;

use fourtuple_syscalls::errno_name;

use crate::errors::{has_temporary_cause, is_temporary_for_server};

mod group;
mod programs;
mod selector;

pub use group::{UdpGroup, XdpReport};
pub use selector::{
    ControlFilter, ControlFilterParseError, CpuOrder, DeviceName, DeviceNameError, FlowKey, Selector,
    SelectorParseError, SlotRule,
};

/// An error of a [`UdpGroup`].
///
/// ```
/// use std::io;
/// use fourtuple::spread::{Selector, UdpGroup, UdpGroupError};
///
/// let error = UdpGroup::open("127.0.0.1:0".parse()?, 0, &Selector::Hash).unwrap_err();
/// assert!(matches!(error, UdpGroupError::Members { members: 0, .. }));
/// assert!(error.is_usage() && error.kind() == io::ErrorKind::InvalidInput);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UdpGroupError {
    /// The number of members is outside the accepted range.
    #[error("a group of {members} sockets: 1 to {most} can be had", most = group::MAX_MEMBERS)]
    #[non_exhaustive]
    Members {
        /// The requested number.
        members: usize,
    },
    /// The selector is not possible on any kernel.
    #[error("{selector} is not possible: {why}")]
    #[non_exhaustive]
    Impossible {
        /// The requested selector.
        selector: Selector,
        /// The reason.
        why: &'static str,
    },
    /// The selector and the filter cannot be combined on any kernel.
    #[error("{selector} with control packets by {filter} is not possible: {why}")]
    #[non_exhaustive]
    NoControl {
        /// The requested selector.
        selector: Selector,
        /// The requested filter.
        filter: ControlFilter,
        /// The reason and an alternative.
        why: &'static str,
    },
    /// The kernel lacks a feature that the selector needs.
    #[error("{selector} is not possible here: this kernel has no {what}")]
    #[non_exhaustive]
    Absent {
        /// The requested selector.
        selector: Selector,
        /// The missing feature.
        what: &'static str,
        /// The error of the call, if the call was made.
        #[source]
        error: Option<io::Error>,
    },
    /// This process lacks a permission.
    #[error("{selector} is not permitted here: {call}: {}; {needs}", errno_name(.error))]
    #[non_exhaustive]
    NotPermitted {
        /// The requested selector.
        selector: Selector,
        /// The refused call.
        call: &'static str,
        /// The required permission.
        needs: &'static str,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// The crate was built without a feature that the selector needs.
    #[error("{selector} is not in this build: the crate fourtuple needs its feature {feature}")]
    #[non_exhaustive]
    NotBuilt {
        /// The requested selector.
        selector: Selector,
        /// The missing Cargo feature.
        feature: &'static str,
    },
    /// The BPF program of the selector could not be loaded or attached. Occurs only with the feature `bpf`.
    #[error("{selector}: the BPF program failed")]
    #[non_exhaustive]
    Bpf {
        /// The requested selector.
        selector: Selector,
        /// The failed step.
        #[source]
        error: Box<dyn Error + Send + Sync>,
    },
    /// The device does not exist.
    #[error("{selector}: {device}: {}", errno_name(.error))]
    #[non_exhaustive]
    NoDevice {
        /// The requested selector.
        selector: Selector,
        /// The name of the device.
        device: DeviceName,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// No single device has the address, so that the device must be named.
    #[error("{selector}: no one device has {address}: name one, as {selector}@DEVICE")]
    #[non_exhaustive]
    WhichDevice {
        /// The requested selector.
        selector: Selector,
        /// The group's address.
        address: SocketAddr,
    },
    /// The group cannot change: only a group with [`Selector::Map`] can.
    #[error("{selector} is what it was opened as: only map can be changed")]
    #[non_exhaustive]
    Fixed {
        /// The selector of the group.
        selector: Selector,
    },
    /// The weights are not valid.
    #[error("weights {given:?} for {members} seats: {why}")]
    #[non_exhaustive]
    Weights {
        /// The given weights.
        given: Vec<u32>,
        /// The number of members.
        members: usize,
        /// The reason.
        why: &'static str,
    },
    /// The member does not exist.
    #[error("there is no member {index}")]
    #[non_exhaustive]
    NoMember {
        /// The number of the member.
        index: usize,
    },
    /// The given sockets do not form a group.
    #[error("{selector}: these sockets do not form a group of it: {why}")]
    #[non_exhaustive]
    NotOne {
        /// The selector of the expected group.
        selector: Selector,
        /// The reason.
        why: &'static str,
        /// The error of getsockname(2), if a descriptor is not a socket.
        #[source]
        error: Option<io::Error>,
    },
    /// A system call failed.
    #[error("{call} for {address}: {}", errno_name(.error))]
    #[non_exhaustive]
    Call {
        /// The name of the call.
        call: &'static str,
        /// The group's address.
        address: SocketAddr,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
}

impl UdpGroupError {
    /// Returns whether other settings would have avoided the error, instead of another environment.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            UdpGroupError::Members { .. }
                | UdpGroupError::Impossible { .. }
                | UdpGroupError::NoControl { .. }
                | UdpGroupError::NoDevice { .. }
                | UdpGroupError::WhichDevice { .. }
                | UdpGroupError::Weights { .. }
                | UdpGroupError::NoMember { .. }
                | UdpGroupError::Fixed { .. }
        )
    }

    /// Returns whether no port was free for port 0: bind(2) failed with EADDRINUSE. A wider port range avoids the error; a retry helps when
    /// sockets close.
    ///
    /// ```
    /// use fourtuple::spread::{Selector, UdpGroup};
    ///
    /// match UdpGroup::open(([127, 0, 0, 1], 0).into(), 2, &Selector::Random) {
    ///     Err(error) if error.is_exhausted() => eprintln!("widen net.ipv4.ip_local_port_range: {error}"),
    ///     opened => println!("listening on {}", opened?.address()),
    /// }
    /// # Ok::<(), fourtuple::spread::UdpGroupError>(())
    /// ```
    pub fn is_exhausted(&self) -> bool {
        matches!(self, UdpGroupError::Call { call: "bind()", address, error }
            if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0)
    }

    /// Returns whether the same call may succeed later without a change of the settings or of the host's configuration: another process may
    /// end and free the address or the device, or the host may get descriptors or memory.
    ///
    /// ```
    /// use fourtuple::spread::{Selector, UdpGroup, UdpGroupError};
    /// # struct Backoff;
    /// # impl Backoff { fn wait(&mut self) {} }
    ///
    /// # fn example(mut backoff: Backoff) -> Result<UdpGroup, UdpGroupError> {
    /// loop {
    ///     match UdpGroup::open(([0, 0, 0, 0], 4000).into(), 4, &Selector::Random) {
    ///         Err(error) if error.is_retryable() => backoff.wait(),
    ///         opened => return opened,
    ///     }
    /// }
    /// # }
    /// ```
    pub fn is_retryable(&self) -> bool {
        match self {
            UdpGroupError::Bpf { error, .. } => has_temporary_cause(&**error),
            UdpGroupError::NoDevice { error, .. } | UdpGroupError::Call { error, .. } => {
                is_temporary_for_server(error)
            }
            _ => false,
        }
    }

    /// Returns the kind of [`io::Error`] that fits.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            UdpGroupError::Impossible { .. }
            | UdpGroupError::NoControl { .. }
            | UdpGroupError::Absent { .. }
            | UdpGroupError::NotBuilt { .. }
            | UdpGroupError::Fixed { .. } => io::ErrorKind::Unsupported,
            UdpGroupError::NotPermitted { error, .. }
            | UdpGroupError::NoDevice { error, .. }
            | UdpGroupError::Call { error, .. } => error.kind(),
            UdpGroupError::Members { .. }
            | UdpGroupError::WhichDevice { .. }
            | UdpGroupError::Weights { .. }
            | UdpGroupError::NotOne { .. } => io::ErrorKind::InvalidInput,
            UdpGroupError::NoMember { .. } => io::ErrorKind::NotFound,
            UdpGroupError::Bpf { .. } => io::ErrorKind::Other,
        }
    }
}

/// Keeps the [`UdpGroupError`]: [`io::Error::downcast`] returns it.
impl From<UdpGroupError> for io::Error {
    fn from(error: UdpGroupError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}
