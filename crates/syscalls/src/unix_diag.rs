//! unix_diag: the accept queues of listening unix sockets.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::netlink;

/// The accept queue of a listening unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Connections in the accept queue.
    pub waiting: u32,
    /// Limit of the accept queue: the backlog of listen(2), cut to net.core.somaxconn. The kernel admits one more
    /// connection; then a non-blocking connect() fails with EAGAIN (`unix_recvq_full`).
    pub backlog: u32,
}

/// Returns the queue of the socket that listens at `path` in the calling thread's network namespace. `None`: no socket
/// listens there, or the path does not exist.
///
/// # Errors
///
/// The errors of stat(2) on `path`. ENOENT: the kernel has no unix_diag and cannot load it. Other errors are from
/// netlink.
pub fn listener(path: &Path) -> io::Result<Option<Queue>> {
    let file = match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result?,
    };
    // The kernel returns the lower 32 bits of the inode, and the device in its internal form (MKDEV).
    let device = libc::major(file.dev()) << 20 | libc::minor(file.dev());
    let wanted = [(file.ino() as u32).to_ne_bytes(), device.to_ne_bytes()].concat();
    let mut found = None;
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request(), |body| {
        found = found.or_else(|| queue(body, &wanted));
    })?;
    Ok(found)
}

/// Returns the queue in a reply, if the reply is about the socket with the wanted inode and device.
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

/// Size of struct unix_diag_msg: family, type, state, padding, inode, cookie.
const MESSAGE: usize = 16;

/// unix_diag numbers states as TCP does.
const LISTEN: u32 = 10;

/// Returns struct unix_diag_req: family, protocol, padding, states, no inode, requested attributes, no cookie.
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
    use std::thread;

    use super::*;

    #[test]
    fn the_queue_is_found_for_each_kind_of_path() {
        let directory = env::temp_dir().join(format!("fourtuple-unix-diag-{}", process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&directory);
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
        // The file is still there. A child of another test has a copy of the listener until its end.
        while listener(&path).unwrap().is_some() {
            thread::yield_now();
        }
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(listener(&path).unwrap(), None, "the file is gone");
    }
}
