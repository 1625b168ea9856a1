//! unix_diag: which unix sockets listen, and their queues.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::netlink;

/// The queue of a unix socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Connections that wait for accept(2).
    pub waiting: u32,
    /// How many may wait: the backlog of listen(2), cut to net.core.somaxconn. The kernel lets one more in; then a
    /// connect() that does not block has EAGAIN (`unix_recvq_full`).
    pub backlog: u32,
}

/// The queue of the socket that listens at `path`, if it belongs to the calling thread's network namespace. `None`: no socket
/// listens there, or there is no such path.
///
/// # Errors
///
/// The errors of stat(2) on `path`. ENOENT: the kernel has no unix_diag and cannot load it. Others are netlink's.
pub fn listener(path: &Path) -> io::Result<Option<Queue>> {
    let file = match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result?,
    };
    // The kernel gives the inode cut to 32 bits, and the device in its own form (MKDEV).
    let device = libc::major(file.dev()) << 20 | libc::minor(file.dev());
    let wanted = [(file.ino() as u32).to_ne_bytes(), device.to_ne_bytes()].concat();
    let mut found = None;
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request(), |body| {
        found = found.or_else(|| queue(body, &wanted));
    })?;
    Ok(found)
}

/// The queue that a reply tells of, if it is about the socket at the wanted inode and device.
pub(crate) fn queue(reply: &[u8], wanted: &[u8]) -> Option<Queue> {
    let attributes = reply.get(MESSAGE..)?;
    netlink::attribute(attributes, UNIX_DIAG_VFS).filter(|place| *place == wanted)?;
    let (waiting, rest) = netlink::attribute(attributes, UNIX_DIAG_RQLEN)?.split_first_chunk::<4>()?;
    let backlog = rest.first_chunk::<4>()?;
    Some(Queue { waiting: u32::from_ne_bytes(*waiting), backlog: u32::from_ne_bytes(*backlog) })
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const UNIX_DIAG_VFS: u16 = 1;
const UNIX_DIAG_RQLEN: u16 = 4;
const UDIAG_SHOW_VFS: u32 = 0x02;
const UDIAG_SHOW_RQLEN: u32 = 0x10;

/// Length of struct unix_diag_msg: family, type, state, padding, inode, cookie.
const MESSAGE: usize = 16;

/// States are numbered as in TCP.
const LISTEN: u32 = 10;

/// struct unix_diag_req: family, protocol, padding, states, no inode, what to show, no cookie.
fn request() -> Vec<u8> {
    let mut body = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [1 << LISTEN, 0, UDIAG_SHOW_VFS | UDIAG_SHOW_RQLEN, u32::MAX, u32::MAX] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process;

    use super::*;

    #[test]
    fn the_queue_is_found_for_each_kind_of_path() {
        let directory = env::temp_dir().join(format!("fourtuple-unix-diag-{}", process::id()));
        fs::create_dir_all(directory.join("b")).unwrap();
        let path = directory.join("a");
        let listener_ = UnixListener::bind(&path).unwrap();
        let waiting = UnixStream::connect(&path).unwrap();
        let queue = listener(&directory.join("b/../a")).unwrap().expect("it listens");
        assert_eq!(queue.waiting, 1);
        assert!(
            queue.backlog >= 128,
            "what the standard library asks for, unless somaxconn is small: {queue:?}"
        );
        assert_eq!(listener(&directory.join("b")).unwrap(), None);
        drop((listener_, waiting));
        assert_eq!(listener(&path).unwrap(), None, "the file is still there");
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(listener(&path).unwrap(), None, "the file is gone");
    }
}
