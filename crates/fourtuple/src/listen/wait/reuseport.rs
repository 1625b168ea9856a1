//! SO_REUSEPORT: one listener with its own accept queue per worker.
//!
//! The hash of the 4-tuple chooses a listener at the SYN (`reuseport_select_sock`), before it is known which worker will be
//! busy. The shares of the workers become even only in the long run.

use fourtuple_syscalls::epoll::Interest;

use crate::listen::error::ListenError;
use crate::listen::wait::pool::{ListenerInterest, Pool};
use crate::listen::wait::seat::{Seat, Wait};

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    Pool::boxed(seat, ListenerInterest { interest: Interest::ACCEPT, readd_after: None })
}
