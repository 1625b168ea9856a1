//! The twin of `least_busy` in a build without the feature `bpf`.

use crate::listen::error::ListenError;
use crate::listen::policy::Policy;
use crate::listen::wait::{Common, Seat, Wait};

const NOT_BUILT: ListenError = ListenError::NotBuilt { policy: Policy::ReuseportLeastBusy, feature: "bpf" };

pub(super) fn common(_seats: usize) -> Result<Common, ListenError> {
    Err(NOT_BUILT)
}

pub(super) fn open(_seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Err(NOT_BUILT)
}
