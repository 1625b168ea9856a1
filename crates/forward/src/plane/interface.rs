use std::io;
use std::os::fd::BorrowedFd;

use crate::path::Path;

/// Moves packets. One thread owns a plane and the sockets of its ports.
pub(crate) trait Plane: Send {
    /// Takes the listening socket of port `number`, and returns the descriptor that becomes readable when packets can be forwarded.
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        let _ = number;
        Ok(listener)
    }

    /// Forwards up to one batch of the messages that wait at `listener`. Returns their number.
    ///
    /// # Errors
    ///
    /// The kernel refuses to receive and would refuse again: the plane must end.
    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize>;

    /// Forwards the packets that the plane has received from port `number` and still holds, before another plane takes the socket.
    fn release(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) {
        let _ = (number, listener, path);
    }

    /// Returns up to one batch of replies from the next hop of target `index` to its client.
    ///
    /// # Errors
    ///
    /// The same errors as [`Plane::forward`].
    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()>;
}
