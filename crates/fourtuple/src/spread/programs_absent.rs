//! Replaces `programs` in a build without the feature `bpf`.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::spread::control::ControlFilter;
use crate::spread::error::UdpGroupError;
use crate::spread::group::XdpReport;
use crate::spread::selector::{Selector, SlotRule};

/// The eBPF programs of a group, which this build lacks.
#[derive(Debug)]
pub(super) struct Programs {
    spread: Selector,
}

impl Programs {
    pub(super) const SLOTS: usize = 1;

    pub(super) fn load(
        spread: Selector,
        _rule: Option<SlotRule>,
        _control: Option<&ControlFilter>,
    ) -> Result<Programs, UdpGroupError> {
        Err(UdpGroupError::NotBuilt { selector: spread, feature: "bpf" })
    }

    fn not_built(&self) -> UdpGroupError {
        UdpGroupError::NotBuilt { selector: self.spread, feature: "bpf" }
    }

    pub(super) fn attach(&self, _socket: BorrowedFd<'_>) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn attach_to_device(
        &mut self,
        _address: SocketAddr,
        _device: u32,
        _members: usize,
    ) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn seat(&self, _seat: usize, _socket: BorrowedFd<'_>) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn seat_control(&self, _socket: BorrowedFd<'_>) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn leave(&self, _seat: usize) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn choose(&self, _rule: SlotRule) -> Result<(), UdpGroupError> {
        Err(self.not_built())
    }

    pub(super) fn give(&self, _slot: usize, _seat: usize) -> Result<(), UdpGroupError> {
        Ok(())
    }

    pub(super) fn strays(&self) -> u64 {
        0
    }

    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    pub(super) fn at_device(&self) -> Option<XdpReport> {
        None
    }
}
