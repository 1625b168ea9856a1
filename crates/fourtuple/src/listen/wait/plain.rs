//! No flag at all: every worker that waits is woken for each connection, one of them gets it, and the others find nobody.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{Pool, Watching};
use crate::listen::wait::{Seat, Wait};

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Pool::boxed(seat, Watching { interest: Interest::ACCEPT, anew_after: None })
}
