//! SO_REUSEPORT: a listener and a queue for each worker, and the hash of the 4-tuple chooses one at the SYN
//! (`reuseport_select_sock`), before anybody knows who will be busy. Shares are even in the long run only.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{Pool, Watching};
use crate::listen::wait::{Seat, Wait};

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Pool::boxed(seat, Watching { interest: Interest::ACCEPT, anew_after: None })
}
