use std::io;
use std::net::SocketAddr;

use fourtuple_syscalls::errno_name;

use crate::spread::control::ControlFilter;
use crate::spread::device::DeviceName;
use crate::spread::selector::Selector;

/// An error of a [`UdpGroup`](crate::spread::UdpGroup).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UdpGroupError {
    /// The number of members is outside the accepted range.
    #[error("a group of {members} sockets: 1 to {most} can be had", most = crate::spread::group::MOST)]
    Members {
        /// The requested number.
        members: usize,
    },
    /// The selector is not possible on any kernel.
    #[error("{spread} is not possible: {why}")]
    Impossible {
        /// The requested selector.
        spread: Selector,
        /// The reason.
        why: &'static str,
    },
    /// The selector and the filter cannot be combined on any kernel.
    #[error("{spread} with control packets by {filter} is not possible: {why}")]
    NoControl {
        /// The requested selector.
        spread: Selector,
        /// The requested filter.
        filter: ControlFilter,
        /// The reason and an alternative.
        why: &'static str,
    },
    /// The kernel lacks a feature that the selector needs.
    #[error("{spread} is not possible here: this kernel has no {what}")]
    Absent {
        /// The requested selector.
        spread: Selector,
        /// The missing feature.
        what: &'static str,
    },
    /// The crate was built without a feature that the selector needs.
    #[error("{spread} is not in this build: the crate fourtuple needs its feature {feature}")]
    NotBuilt {
        /// The requested selector.
        spread: Selector,
        /// The missing Cargo feature.
        feature: &'static str,
    },
    /// The BPF program of the selector could not be loaded or attached.
    #[cfg(feature = "bpf")]
    #[error("{spread}: {source}")]
    Bpf {
        /// The requested selector.
        spread: Selector,
        /// The failed step and the required permission.
        source: fourtuple_bpf::BpfError,
    },
    /// The device does not exist.
    #[error("{spread}: {device}: {} ({source})", errno_name(source))]
    NoDevice {
        /// The requested selector.
        spread: Selector,
        /// The name of the device.
        device: DeviceName,
        /// The error of the call.
        source: io::Error,
    },
    /// No single device has the address, so that the device must be named.
    #[error("{spread}: no one device has {address}: name one, as {spread}@DEVICE")]
    WhichDevice {
        /// The requested selector.
        spread: Selector,
        /// The group's address.
        address: SocketAddr,
    },
    /// The group cannot change: only a group with [`Selector::Map`] can.
    #[error("{spread} is what it was opened as: only map can be changed")]
    Fixed {
        /// The selector of the group.
        spread: Selector,
    },
    /// The weights are not valid.
    #[error("weights {given:?} for {members} seats: {why}")]
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
    NoMember {
        /// The number of the member.
        index: usize,
    },
    /// The given sockets do not form a group.
    #[error("{spread}: these sockets are no group of it: {why}")]
    NotOne {
        /// The selector of the expected group.
        spread: Selector,
        /// The reason.
        why: &'static str,
    },
    /// A system call failed.
    #[error("{call} for {address}: {} ({source})", errno_name(source))]
    Call {
        /// The name of the call.
        call: &'static str,
        /// The group's address.
        address: SocketAddr,
        /// The error of the call.
        source: io::Error,
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
}
