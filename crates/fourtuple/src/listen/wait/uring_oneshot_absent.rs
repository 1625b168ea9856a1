//! The replacement of `uring_oneshot` in a build without the feature `uring`.

use crate::listen::error::ListenError;
use crate::listen::policy::AcceptPolicy;
use crate::listen::wait::seat::{Seat, Wait};
use crate::listen::wait::shared_state::{Preparation, SharedState};

const NOT_BUILT: ListenError = ListenError::NotBuilt { policy: AcceptPolicy::UringOneshot, feature: "uring" };

pub(crate) fn prepare(_preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    Err(NOT_BUILT)
}

pub(crate) fn open(_seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Err(NOT_BUILT)
}
