//! EPOLLEXCLUSIVE: the kernel goes through the waiting epolls in the order in which they were added and wakes the first
//! whose worker sleeps in it (`__wake_up_common`, `ep_poll_callback`). So the first worker gets everything that it can take,
//! the second what comes while the first is busy, and so on: the ladder.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{Pool, Watching};
use crate::listen::wait::{Seat, Wait};

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let interest = Interest::ACCEPT.and(Interest::EXCLUSIVE);
    Pool::boxed(seat, Watching { interest, anew_after: None })
}
