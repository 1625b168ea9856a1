//! Where the one that is at work can be reached by the one that is to take over.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fourtuple_syscalls::{message, socket};

use super::error::HandoverError;
use super::line::Line;

/// Connections that may wait: one is enough.
const BACKLOG: i32 = 8;

/// A unix socket at which a process with the same path takes over from this one: [`crate::Running::hand_over`]. Only this user
/// and root can (the path has mode 0600, and the kernel says who is there). The path goes when this is dropped, unless it is
/// somebody else's by then.
#[derive(Debug)]
pub struct Door {
    path: PathBuf,
    pub(super) listener: OwnedFd,
    pub(super) visitor: Option<Visitor>,
    /// From whom this process has taken over.
    predecessor: Option<Line>,
    /// Device and inode of the path, as long as it is this process's to remove.
    own: Option<(u64, u64)>,
}

/// Somebody who is to take over.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) line: Line,
    /// When it was last its turn to say something.
    pub(super) since: Instant,
}

/// The one that is at work, which can be taken over from: [`crate::Forward::take_over`].
#[derive(Debug)]
pub struct Predecessor {
    pub(super) path: PathBuf,
    pub(super) line: Line,
}

impl Predecessor {
    /// The one that answers at this path; nobody does when it is not there, or was left behind by one that has been killed.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Stranger`], and [`HandoverError::Call`]: EPROTOTYPE when another kind of socket is there.
    pub fn at(path: &Path) -> Result<Option<Predecessor>, HandoverError> {
        match message::connect_to(path) {
            Ok(socket) => Ok(Some(Predecessor { path: path.to_owned(), line: Line::new(socket, path)? })),
            Err(error) if is_nobody(&error) => Ok(None),
            Err(source) => Err(HandoverError::Call { call: "connect()", path: path.to_owned(), source }),
        }
    }
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

impl Door {
    /// Opens the path, at which nobody answers: what was left behind there is removed, if it is a socket.
    ///
    /// # Errors
    ///
    /// [`HandoverError::Call`]: EADDRINUSE when a file is there that is no socket, or somebody answers by now.
    pub fn open(path: &Path) -> Result<Door, HandoverError> {
        let failed = |call| move |source| HandoverError::Call { call, path: path.to_owned(), source };
        let listener = match message::listen_at(path, BACKLOG) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && was_left_behind(path) => {
                fs::remove_file(path).map_err(failed("unlink()"))?;
                message::listen_at(path, BACKLOG)
            }
            result => result,
        };
        let mut door = Door::with(path, listener.map_err(failed("bind()"))?);
        door.own();
        Ok(door)
    }

    /// With a socket that listens at the path already, which is not this process's yet.
    pub(super) fn with(path: &Path, listener: OwnedFd) -> Door {
        Door { path: path.to_owned(), listener, visitor: None, predecessor: None, own: None }
    }

    /// The path is this process's from now on.
    pub(super) fn own(&mut self) {
        self.own = identity(&self.path);
    }

    pub(super) fn taken_over_from(&mut self, predecessor: Line) {
        self.own();
        self.predecessor = Some(predecessor);
    }

    /// The path is the successor's.
    pub(super) fn leave(&mut self) {
        self.own = None;
    }

    /// Waits until the process from which this one has taken over has ended, and with it all that it had open: whether it has
    /// within this time. True as well where there was none.
    pub fn predecessor_has_ended(&self, time: Duration) -> bool {
        self.predecessor.as_ref().is_none_or(|predecessor| predecessor.wait_for_end(time))
    }

    /// Whoever is there, and whoever comes when nobody is.
    pub(super) fn visitor(&mut self) -> Result<Option<&mut Visitor>, HandoverError> {
        if self.visitor.is_none() {
            let socket = match socket::accept_nonblocking(self.listener.as_fd()) {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(source) => {
                    return Err(HandoverError::Call { call: "accept4()", path: self.path.clone(), source });
                }
            };
            self.visitor = Some(Visitor { line: Line::new(socket, &self.path)?, since: Instant::now() });
        }
        Ok(self.visitor.as_mut())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl std::ops::Drop for Door {
    fn drop(&mut self) {
        if self.own.is_some() && self.own == identity(&self.path) {
            // Whoever finds it finds that nobody answers.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// A socket at which nobody answers.
fn was_left_behind(path: &Path) -> bool {
    // The kernel refuses to connect to any other file as well.
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    is_socket
        && message::connect_to(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_was_left_behind_is_used_anew_and_a_file_is_not() {
        let room = std::env::temp_dir().join(format!("fourtuple-door-{}", std::process::id()));
        fs::create_dir_all(&room).unwrap();
        let path = room.join("door");
        assert!(Predecessor::at(&path).unwrap().is_none());
        drop(message::listen_at(&path, 1).unwrap());
        assert!(path.exists() && Predecessor::at(&path).unwrap().is_none());
        let door = Door::open(&path).unwrap();
        assert_eq!(Predecessor::at(&path).unwrap().unwrap().line.peer.process, std::process::id());
        let error = Door::open(&path).unwrap_err();
        assert!(error.to_string().contains("EADDRINUSE"), "{error}");
        // Removed, and somebody else's: it stays.
        fs::remove_file(&path).unwrap();
        let other = Door::open(&path).unwrap();
        drop(door);
        assert!(path.exists());
        drop(other);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(Door::open(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
        fs::remove_dir_all(&room).unwrap();
    }
}
