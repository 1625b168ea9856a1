//! The twin of `programs` in a build without the feature `bpf`.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::spread::control::ControlFilter;
use crate::spread::error::SpreadError;
use crate::spread::group::AtDevice;
use crate::spread::selector::{Rule, Spread};

/// There are none.
#[derive(Debug)]
pub(super) struct Programs {
    spread: Spread,
}

impl Programs {
    pub(super) const SLOTS: usize = 1;

    pub(super) fn load(
        spread: Spread,
        _rule: Option<Rule>,
        _control: Option<&ControlFilter>,
    ) -> Result<Programs, SpreadError> {
        Err(SpreadError::NotBuilt { spread, feature: "bpf" })
    }

    fn not_built(&self) -> SpreadError {
        SpreadError::NotBuilt { spread: self.spread, feature: "bpf" }
    }

    pub(super) fn attach(&self, _socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn attach_to_device(
        &mut self,
        _address: SocketAddr,
        _device: u32,
        _members: usize,
    ) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn seat(&self, _seat: usize, _socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn seat_control(&self, _socket: BorrowedFd<'_>) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn leave(&self, _seat: usize) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn choose(&self, _rule: Rule) -> Result<(), SpreadError> {
        Err(self.not_built())
    }

    pub(super) fn give(&self, _slot: usize, _seat: usize) {}

    pub(super) fn strays(&self) -> u64 {
        0
    }

    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    pub(super) fn at_device(&self) -> Option<AtDevice> {
        None
    }
}
