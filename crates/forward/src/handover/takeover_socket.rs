//! The unix socket at which a new process reaches the running process.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::socket_path::{Kind, SocketPath, has_no_listener};

use crate::handover::HandoverError;
use crate::handover::connection::PeerConnection;

/// The accept backlog: one connection is enough.
const BACKLOG: i32 = 8;

/// A unix socket at which a process with the same path takes over from this process: [`crate::Running::hand_over`]. Only this user and
/// root can take over (the path has mode 0600, and both sides check SO_PEERCRED). A drop removes the path, unless another process owns
/// it by then.
#[derive(Debug)]
pub struct TakeoverSocket {
    path: SocketPath,
    pub(super) listener: OwnedFd,
    pub(super) request: Option<TakeoverRequest>,
    /// The connection to the process that this process has taken over from.
    predecessor: Option<PeerConnection>,
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
        match Kind::Packets.connect(path) {
            Ok(socket) => Ok(Some(Predecessor {
                path: path.to_owned(),
                connection: PeerConnection::new(socket, path)?,
            })),
            Err(error) if has_no_listener(&error) => Ok(None),
            Err(source) => Err(HandoverError::Call { call: "connect()", path: path.to_owned(), source }),
        }
    }
}

impl TakeoverSocket {
    /// Binds the path. Replaces a socket that a killed process has left there.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Call`]: EADDRINUSE when the path is a file other than a socket, or another process listens there.
    pub fn open(path: &Path) -> Result<TakeoverSocket, HandoverError> {
        let failed = |source| HandoverError::Call { call: "bind()", path: path.to_owned(), source };
        let (path, listener) = SocketPath::bind(path, Kind::Packets, BACKLOG).map_err(failed)?;
        Ok(TakeoverSocket { path, listener, request: None, predecessor: None })
    }

    /// Returns a takeover socket with the listening socket of another process, which still owns the path.
    pub(super) fn with(path: &Path, listener: OwnedFd) -> TakeoverSocket {
        TakeoverSocket { path: SocketPath::of_another(path), listener, request: None, predecessor: None }
    }

    /// Makes this process the owner of the path.
    pub(super) fn own(&mut self) {
        self.path.own();
    }

    pub(super) fn taken_over_from(&mut self, predecessor: PeerConnection) {
        self.own();
        self.predecessor = Some(predecessor);
    }

    /// Leaves the path to the successor.
    pub(super) fn leave(&mut self) {
        self.path.leave();
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
                    return Err(HandoverError::Call {
                        call: "accept4()",
                        path: self.path().to_owned(),
                        source,
                    });
                }
            };
            self.request = Some(TakeoverRequest {
                connection: PeerConnection::new(socket, self.path.path())?,
                since: Instant::now(),
            });
        }
        Ok(self.request.as_mut())
    }

    pub(super) fn path(&self) -> &Path {
        self.path.path()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_socket_without_a_process_has_no_predecessor() {
        let room = std::env::temp_dir().join(format!("fourtuple-door-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&room);
        fs::create_dir_all(&room).unwrap();
        let path = room.join("door");
        assert!(Predecessor::at(&path).unwrap().is_none());
        drop(Kind::Packets.listen(&path, 1).unwrap());
        assert!(path.exists() && Predecessor::at(&path).unwrap().is_none());
        let takeover_socket = TakeoverSocket::open(&path).unwrap();
        assert_eq!(Predecessor::at(&path).unwrap().unwrap().connection.peer.process, std::process::id());
        let error = TakeoverSocket::open(&path).unwrap_err();
        assert!(error.to_string().contains("EADDRINUSE"), "{error}");
        drop(takeover_socket);
        assert!(!path.exists());
        fs::remove_dir_all(&room).unwrap();
    }
}
