use std::io;
use std::net::SocketAddr;

use fourtuple_syscalls::errno_name;

use crate::spread::control::ControlFilter;
use crate::spread::device::Device;
use crate::spread::selector::Spread;

/// Why there is no group, or why it was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpreadError {
    /// A group has a member at least.
    #[error("a group of {members} sockets: 1 to {most} can be had", most = crate::spread::group::MOST)]
    Members {
        /// How many were asked for.
        members: usize,
    },
    /// No kernel can do this.
    #[error("{spread} is not possible: {why}")]
    Impossible {
        /// What was asked for.
        spread: Spread,
        /// The reason.
        why: &'static str,
    },
    /// These two do not go together, on no kernel.
    #[error("{spread} with control packets by {filter} is not possible: {why}")]
    NoControl {
        /// What was asked for.
        spread: Spread,
        /// Which packets are control.
        filter: ControlFilter,
        /// The reason, and what there is instead.
        why: &'static str,
    },
    /// This kernel has not got it.
    #[error("{spread} is not possible here: this kernel has no {what}")]
    Absent {
        /// What was asked for.
        spread: Spread,
        /// What is missing.
        what: &'static str,
    },
    /// The program that uses this crate was built without it.
    #[error("{spread} is not in this build: the crate fourtuple needs its feature {feature}")]
    NotBuilt {
        /// What was asked for.
        spread: Spread,
        /// The feature.
        feature: &'static str,
    },
    /// Its program was not loaded, or not attached.
    #[cfg(feature = "bpf")]
    #[error("{spread}: {source}")]
    Bpf {
        /// What was asked for.
        spread: Spread,
        /// What went wrong, and what it takes.
        source: fourtuple_bpf::BpfError,
    },
    /// There is no such device.
    #[error("{spread}: {device}: {} ({source})", errno_name(source))]
    NoDevice {
        /// What was asked for.
        spread: Spread,
        /// Its name.
        device: Device,
        /// What the kernel said.
        source: io::Error,
    },
    /// Which device the packets come to cannot be told from the address.
    #[error("{spread}: no one device has {address}: name one, as {spread}@DEVICE")]
    WhichDevice {
        /// What was asked for.
        spread: Spread,
        /// The group's address.
        address: SocketAddr,
    },
    /// Only [`Spread::Map`] can be changed.
    #[error("{spread} is what it was opened as: only map can be changed")]
    Fixed {
        /// What the group was opened with.
        spread: Spread,
    },
    /// Shares that cannot be.
    #[error("weights {given:?} for {members} seats: {why}")]
    Weights {
        /// What was given.
        given: Vec<u32>,
        /// How many seats there are.
        members: usize,
        /// The reason.
        why: &'static str,
    },
    /// A member that is not there.
    #[error("there is no member {index}")]
    NoMember {
        /// Its number.
        index: usize,
    },
    /// Sockets that are no group.
    #[error("{spread}: these sockets are no group of it: {why}")]
    NotOne {
        /// What they were to be.
        spread: Spread,
        /// The reason.
        why: &'static str,
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

impl SpreadError {
    /// Whether other settings would have helped, and not another environment.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            SpreadError::Members { .. }
                | SpreadError::Impossible { .. }
                | SpreadError::NoControl { .. }
                | SpreadError::NoDevice { .. }
                | SpreadError::WhichDevice { .. }
                | SpreadError::Weights { .. }
                | SpreadError::NoMember { .. }
                | SpreadError::Fixed { .. }
        )
    }
}
