//! One epoll per worker with EPOLLEXCLUSIVE, from which a worker removes the listener after an accept and adds it again.
//!
//! The worker is then last in the listener's wait queue, so workers take turns. The worker does this before it serves the
//! request, so that the kernel wakes another worker for the next connection. EPOLL_CTL_MOD is no alternative: the kernel
//! refuses it for an exclusive item (EINVAL).

use std::num::NonZeroU32;

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::policy::AcceptPolicy;
use crate::listen::wait::pool::{ListenerInterest, Pool};
use crate::listen::wait::seat::{Seat, Wait};

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let every = match seat.group.policy() {
        AcceptPolicy::Rotate { every } => every,
        _ => NonZeroU32::MIN,
    };
    let interest = Interest::ACCEPT.and(Interest::EXCLUSIVE);
    Pool::boxed(seat, ListenerInterest { interest, readd_after: Some(every) })
}
