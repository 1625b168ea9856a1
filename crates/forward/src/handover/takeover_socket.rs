//! The unix socket at which a new process reaches the running process.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket::AcceptFailure;
use fourtuple_syscalls::{message, socket};

use crate::handover::HandoverError;
use crate::handover::connection::PeerConnection;

/// The accept backlog: one connection is enough.
const BACKLOG: i32 = 8;

/// A unix socket at which a process with the same path takes over from this process: [`crate::Running::hand_over`]. Only this user and
/// root can take over (the path has mode 0600, and both sides check SO_PEERCRED). A drop removes the path, unless another process owns
/// it by then.
#[derive(Debug)]
pub struct TakeoverSocket {
    path: PathBuf,
    pub(super) listener: OwnedFd,
    pub(super) request: Option<TakeoverRequest>,
    /// The connection to the process that this process has taken over from.
    predecessor: Option<PeerConnection>,
    /// Device and inode of the path while this process owns it; a drop then removes it.
    own: Option<(u64, u64)>,
}

/// A process that requests the takeover.
#[derive(Debug)]
pub(super) struct TakeoverRequest {
    pub(super) connection: PeerConnection,
    /// The time of its last message.
    pub(super) since: Instant,
}

/// The running process, for [`crate::Forward::take_over`].
#[derive(Debug)]
pub struct Predecessor {
    pub(super) path: PathBuf,
    pub(super) connection: PeerConnection,
}

impl Predecessor {
    /// Connects to the process at this path. Returns `None` when the path does not exist or a killed process has left it.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Stranger`], and [`HandoverError::Call`]: EPROTOTYPE when the path is another kind of socket.
    pub fn at(path: &Path) -> Result<Option<Predecessor>, HandoverError> {
        match message::connect_to(path) {
            Ok(socket) => Ok(Some(Predecessor {
                path: path.to_owned(),
                connection: PeerConnection::new(socket, path)?,
            })),
            Err(error) if has_no_listener(&error) => Ok(None),
            Err(source) => Err(HandoverError::Call { call: "connect()", path: path.to_owned(), source }),
        }
    }
}

/// Returns whether connect(2) failed because no process listens at the path.
fn has_no_listener(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

impl TakeoverSocket {
    /// Binds the path. Replaces a socket that a killed process has left there.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Call`]: EADDRINUSE when the path is a file other than a socket, or another process listens there.
    pub fn open(path: &Path) -> Result<TakeoverSocket, HandoverError> {
        let failed = |call| move |source| HandoverError::Call { call, path: path.to_owned(), source };
        let listener = match message::listen_at(path, BACKLOG) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && was_left_behind(path) => {
                fs::remove_file(path).map_err(failed("unlink()"))?;
                message::listen_at(path, BACKLOG)
            }
            result => result,
        };
        let mut takeover_socket = TakeoverSocket::with(path, listener.map_err(failed("bind()"))?);
        takeover_socket.own();
        Ok(takeover_socket)
    }

    /// Returns a takeover socket with the listening socket of another process, which still owns the path.
    pub(super) fn with(path: &Path, listener: OwnedFd) -> TakeoverSocket {
        TakeoverSocket { path: path.to_owned(), listener, request: None, predecessor: None, own: None }
    }

    /// Makes this process the owner of the path.
    pub(super) fn own(&mut self) {
        self.own = identity(&self.path);
    }

    pub(super) fn taken_over_from(&mut self, predecessor: PeerConnection) {
        self.own();
        self.predecessor = Some(predecessor);
    }

    /// Leaves the path to the successor.
    pub(super) fn leave(&mut self) {
        self.own = None;
    }

    /// Waits until the predecessor has ended, which closes its other sockets. Returns whether it has ended within this time; true without a
    /// predecessor.
    pub fn predecessor_has_ended(&self, time: Duration) -> bool {
        self.predecessor.as_ref().is_none_or(|predecessor| predecessor.wait_for_end(time))
    }

    /// Returns the connected process, or accepts a connection if there is none.
    pub(super) fn request(&mut self) -> Result<Option<&mut TakeoverRequest>, HandoverError> {
        if self.request.is_none() {
            let socket = match socket::accept_nonblocking(self.listener.as_fd()) {
                Ok(socket) => socket,
                Err(error)
                    if matches!(AcceptFailure::of(&error), AcceptFailure::Wait | AcceptFailure::Retry) =>
                {
                    return Ok(None);
                }
                Err(source) => {
                    return Err(HandoverError::Call { call: "accept4()", path: self.path.clone(), source });
                }
            };
            self.request = Some(TakeoverRequest {
                connection: PeerConnection::new(socket, &self.path)?,
                since: Instant::now(),
            });
        }
        Ok(self.request.as_mut())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl std::ops::Drop for TakeoverSocket {
    fn drop(&mut self) {
        if self.own.is_some() && self.own == identity(&self.path) {
            // If the removal fails, the next process replaces the unused path.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Returns whether the path is a socket without a listening process.
fn was_left_behind(path: &Path) -> bool {
    // connect(2) to a file other than a socket fails with ECONNREFUSED too.
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    is_socket
        && message::connect_to(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_socket_is_replaced_and_a_file_is_not() {
        let room = std::env::temp_dir().join(format!("fourtuple-door-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&room);
        fs::create_dir_all(&room).unwrap();
        let path = room.join("door");
        assert!(Predecessor::at(&path).unwrap().is_none());
        drop(message::listen_at(&path, 1).unwrap());
        assert!(path.exists() && Predecessor::at(&path).unwrap().is_none());
        let takeover_socket = TakeoverSocket::open(&path).unwrap();
        assert_eq!(Predecessor::at(&path).unwrap().unwrap().connection.peer.process, std::process::id());
        let error = TakeoverSocket::open(&path).unwrap_err();
        assert!(error.to_string().contains("EADDRINUSE"), "{error}");
        // The path belongs to another takeover socket by now, so that the first drop keeps it.
        fs::remove_file(&path).unwrap();
        let other = TakeoverSocket::open(&path).unwrap();
        drop(takeover_socket);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(TakeoverSocket::open(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
        fs::remove_dir_all(&room).unwrap();
    }
}
