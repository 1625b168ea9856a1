//! The epoll that watches the sockets of clients for replies, and the format of its tokens.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fourtuple_syscalls::epoll::{Epoll, Interest};

/// Returns the token of the listening socket of port `port`.
pub(crate) fn token_of_listener(port: usize) -> u64 {
    (port as u64) << 32
}

/// Returns the port and the target of a token; `None` stands for the listening socket.
pub(crate) fn read_token(token: u64) -> (usize, Option<usize>) {
    ((token >> 32) as usize, (token as u32 as usize).checked_sub(1))
}

/// The epoll of the plane that owns a port.
#[derive(Debug)]
pub(crate) struct Replies {
    epoll: Arc<Epoll>,
    port: usize,
}

impl Replies {
    pub(crate) fn new(epoll: Arc<Epoll>, port: usize) -> Replies {
        Replies { epoll, port }
    }

    /// Watches the socket of target `target`.
    ///
    /// # Errors
    ///
    /// ENOSPC: the user has as many watches as `fs.epoll.max_user_watches` allows. ENOMEM.
    pub(crate) fn watch(&self, target: usize, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.epoll.add(socket, token_of_listener(self.port) | (target as u64 + 1), Interest::READ)
    }
}
