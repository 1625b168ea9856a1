//! EPOLLEXCLUSIVE, and the listener removed from the worker's epoll and added to it anew: the worker is then the last in the
//! listener's queue of waiters, and workers take turns. It is done after accept() and before the request is served, so that
//! the next connection finds somebody else first. EPOLL_CTL_MOD would not do: an exclusive item refuses it (EINVAL).

use std::num::NonZeroU32;

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{Pool, Watching};
use crate::listen::wait::{Seat, Wait};

pub(super) fn open(seat: &Seat, every: NonZeroU32) -> Result<Box<dyn Wait>, ListenError> {
    let interest = Interest::ACCEPT.and(Interest::EXCLUSIVE);
    Pool::boxed(seat, Watching { interest, anew_after: Some(every) })
}
