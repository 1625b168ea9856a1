//! One epoll per worker, without a flag: the kernel wakes every waiting worker for each connection. One worker gets the
//! connection, and accept(2) returns EAGAIN to the remaining workers.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{ListenerInterest, Pool};
use crate::listen::wait::seat::{Seat, Wait};

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Pool::boxed(seat, ListenerInterest { interest: Interest::ACCEPT, readd_after: None })
}
