//! One epoll per worker, with EPOLLEXCLUSIVE on the shared listener.
//!
//! The kernel walks the waiting epolls in the order in which they were added and wakes the first whose worker sleeps
//! (`__wake_up_common`, `ep_poll_callback`). The first worker gets every connection that arrives while it is idle, the second
//! worker gets connections that arrive while only the first is busy, and so on.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{ListenerInterest, Pool};
use crate::listen::wait::seat::{Seat, Wait};

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let interest = Interest::ACCEPT.and(Interest::EXCLUSIVE);
    Pool::boxed(seat, ListenerInterest { interest, readd_after: None })
}
