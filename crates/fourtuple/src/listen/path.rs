//! The path of a unix socket: what is in its way, and who removes it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process;

use fourtuple_syscalls::{Endpoint, socket};

use crate::listen::error::ListenError;

/// A unix socket bound to a path, not listening yet, and the path, which is removed when that is dropped. A socket in the way
/// that nobody listens on is removed first.
///
/// # Errors
///
/// Something else is in the way: [`ListenError::PathInUse`], [`ListenError::NotASocket`]; or a call failed.
pub fn bind_path(path: &Path, nonblocking: bool) -> Result<(OwnedFd, OwnPath), ListenError> {
    remove_dead(path)?;
    let endpoint = Endpoint::Unix(path.to_owned());
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |source| ListenError::Call { call, endpoint, source }
    };
    let socket = socket::open_stream(&endpoint, nonblocking).map_err(failed("socket()"))?;
    socket::bind_endpoint(socket.as_fd(), &endpoint).map_err(failed("bind()"))?;
    Ok((socket, OwnPath::of(path)))
}

/// Removes the socket of a server that is no more.
fn remove_dead(path: &Path) -> Result<(), ListenError> {
    let endpoint = Endpoint::Unix(path.to_owned());
    match fs::symlink_metadata(path) {
        // Also a file that is no socket refuses connections: it must not be removed.
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(ListenError::Call { call: "stat()", endpoint, source }),
    }
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |source| ListenError::Call { call, endpoint, source }
    };
    let caller = socket::open_stream(&endpoint, true).map_err(failed("socket()"))?;
    match socket::connect_endpoint(caller.as_fd(), &endpoint) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("unlink()"))
        }
        // A full queue is somebody's, too.
        Ok(_) => Err(ListenError::PathInUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(ListenError::PathInUse { path: path.to_owned() })
        }
        Err(error) => Err(failed("connect()")(error)),
    }
}

/// The path of our socket, removed at the end by the process that made it unless it is somebody else's by then.
#[derive(Debug)]
pub struct OwnPath {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    process: u32,
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl OwnPath {
    fn of(path: &Path) -> OwnPath {
        OwnPath { path: path.to_owned(), inode: inode(path), process: process::id() }
    }
}

impl Drop for OwnPath {
    fn drop(&mut self) {
        if self.process == process::id() && self.inode.is_some() && inode(&self.path) == self.inode {
            // Whoever has removed it already has done our work.
            let _ = fs::remove_file(&self.path);
        }
    }
}
