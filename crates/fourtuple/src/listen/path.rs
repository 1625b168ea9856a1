//! The path of a unix socket: it is checked before bind(2) and removed when the server ends.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process;

use fourtuple_syscalls::{Endpoint, socket};

use crate::listen::error::ListenError;

/// Binds a unix socket to a path. Returns the socket, which does not listen yet, and a guard that removes the path when it is
/// dropped. An existing socket on which no process listens is removed first.
///
/// # Errors
///
/// [`ListenError::PathInUse`] or [`ListenError::NotASocket`] if the path is taken; [`ListenError::Call`] if a system call failed.
///
/// # Examples
///
/// ```
/// let path = std::env::temp_dir().join(format!("fourtuple-{}.sock", std::process::id()));
/// let (socket, bound) = fourtuple::listen::bind_path(&path, true)?;
/// assert!(path.exists());
/// drop((socket, bound));
/// assert!(!path.exists());
/// # Ok::<(), fourtuple::listen::ListenError>(())
/// ```
pub fn bind_path(path: &Path, nonblocking: bool) -> Result<(OwnedFd, SocketPath), ListenError> {
    remove_dead(path)?;
    let endpoint = Endpoint::Unix(path.to_owned());
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |error| ListenError::Call { call, endpoint, error }
    };
    let socket = socket::open_stream(&endpoint, nonblocking).map_err(failed("socket()"))?;
    socket::bind_endpoint(socket.as_fd(), &endpoint).map_err(failed("bind()"))?;
    Ok((socket, SocketPath::of(path)))
}

/// Removes the socket file of a server that has ended.
fn remove_dead(path: &Path) -> Result<(), ListenError> {
    let endpoint = Endpoint::Unix(path.to_owned());
    match fs::symlink_metadata(path) {
        // connect(2) to a regular file fails with ECONNREFUSED too; such a file must not be removed.
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ListenError::Call { call: "stat()", endpoint, error }),
    }
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |error| ListenError::Call { call, endpoint, error }
    };
    let caller = socket::open_stream(&endpoint, true).map_err(failed("socket()"))?;
    match socket::connect_endpoint(caller.as_fd(), &endpoint) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("unlink()"))
        }
        // EAGAIN means a full accept queue, so a process listens.
        Ok(_) => Err(ListenError::PathInUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(ListenError::PathInUse { path: path.to_owned() })
        }
        Err(error) => Err(failed("connect()")(error)),
    }
}

/// The path of a bound unix socket. Dropping it in the process that bound the socket removes the path, unless another socket has
/// replaced it.
///
/// Example: [`bind_path`].
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    process: u32,
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl SocketPath {
    fn of(path: &Path) -> SocketPath {
        SocketPath { path: path.to_owned(), inode: inode(path), process: process::id() }
    }

    /// Leaves the path to another process.
    pub(crate) fn leave(mut self) {
        self.inode = None;
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        if self.process == process::id() && self.inode.is_some() && inode(&self.path) == self.inode {
            // An error means that the path is already removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}
