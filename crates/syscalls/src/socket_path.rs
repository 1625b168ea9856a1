//! The path of a listening unix(7) socket: made with mode 0600, replaced if a killed process has left it, removed by its owner.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{Endpoint, check, socket};

/// The type of a unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SOCK_STREAM
    Stream,
    /// SOCK_SEQPACKET: a stream with message boundaries.
    Packets,
}

impl Kind {
    /// Opens a non-blocking socket, close-on-exec.
    fn open(self) -> io::Result<OwnedFd> {
        socket::open_unix(match self {
            Kind::Stream => libc::SOCK_STREAM,
            Kind::Packets => libc::SOCK_SEQPACKET,
        })
    }

    /// Opens a non-blocking socket that is connected to the listener at `path`.
    ///
    /// # Errors
    ///
    /// ENOENT, ECONNREFUSED: there is no listener. EAGAIN: the accept queue is full. EPROTOTYPE: the listener has another kind.
    pub fn connect(self, path: &Path) -> io::Result<OwnedFd> {
        let socket = self.open()?;
        socket::connect_endpoint(socket.as_fd(), &Endpoint::Unix(path.to_owned()))?;
        Ok(socket)
    }

    /// Opens a non-blocking socket that listens at `path`. Only the owner has access (0600) from the moment the path exists, because bind(2)
    /// gives the path the mode of the socket (`unix_bind_bsd`).
    ///
    /// # Errors
    ///
    /// EADDRINUSE: the path exists, with or without a listener.
    pub fn listen(self, path: &Path, backlog: i32) -> io::Result<OwnedFd> {
        let socket = self.open()?;
        // SAFETY: fchmod() takes no pointers.
        check(unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) })?;
        socket::bind_endpoint(socket.as_fd(), &Endpoint::Unix(path.to_owned()))?;
        socket::listen(socket.as_fd(), backlog)?;
        Ok(socket)
    }
}

/// The path of a listening socket. A drop removes it while this process owns it, unless another socket is there by then.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    /// Device and inode of the path while this process owns it.
    own: Option<(u64, u64)>,
}

impl SocketPath {
    /// Listens at the path, as [`Kind::listen`] does. Replaces a socket that a killed process has left there.
    ///
    /// # Errors
    ///
    /// EADDRINUSE when the path is a file other than a socket, or another process listens there.
    pub fn bind(path: &Path, kind: Kind, backlog: i32) -> io::Result<(SocketPath, OwnedFd)> {
        let listener = match kind.listen(path, backlog) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && was_left_behind(path, kind) => {
                fs::remove_file(path)?;
                kind.listen(path, backlog)?
            }
            result => result?,
        };
        let mut bound = SocketPath::of_another(path);
        bound.own();
        Ok((bound, listener))
    }

    /// Listens at the path in the place of the process that listens there now: at no moment is there no listener. That process keeps its
    /// socket, which gets no further connections.
    pub fn replace(path: &Path, kind: Kind, backlog: i32) -> io::Result<(SocketPath, OwnedFd)> {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}", std::process::id()));
        let (mut bound, listener) = SocketPath::bind(Path::new(&name), kind, backlog)?;
        fs::rename(&bound.path, path)?;
        path.clone_into(&mut bound.path);
        Ok((bound, listener))
    }

    /// Returns a path that another process owns.
    pub fn of_another(path: &Path) -> SocketPath {
        SocketPath { path: path.to_owned(), own: None }
    }

    /// Makes this process the owner.
    pub fn own(&mut self) {
        self.own = identity(&self.path);
    }

    /// Leaves the path to another process.
    pub fn leave(&mut self) {
        self.own = None;
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketPath {
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

/// Returns whether connect(2) failed because no process listens at the path.
pub fn has_no_listener(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Returns whether the path is a socket without a listening process.
fn was_left_behind(path: &Path, kind: Kind) -> bool {
    // connect(2) to a file other than a socket fails with ECONNREFUSED too.
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    is_socket && kind.connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_its_owner_removes_a_path() {
        let room = std::env::temp_dir().join(format!("fourtuple-path-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&room);
        fs::create_dir_all(&room).unwrap();
        let path = room.join("socket");
        for kind in [Kind::Stream, Kind::Packets] {
            assert!(has_no_listener(&kind.connect(&path).unwrap_err()));
            // Listens at the path without an owner who removes it.
            drop(kind.listen(&path, 1).unwrap());
            // A process that another test has just started has a copy of the listener until its exec(), with a queue that soon is full
            // (EAGAIN).
            while !was_left_behind(&path, kind) {
                std::thread::yield_now();
            }
            let (first, listener) = SocketPath::bind(&path, kind, 8).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let refused = SocketPath::bind(&path, kind, 8).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
            let (second, its) = SocketPath::replace(&path, kind, 8).unwrap();
            drop((first, listener));
            let _connection = kind.connect(&path).expect("the second listens");
            assert!(socket::accept_nonblocking(its.as_fd()).is_ok());
            assert_eq!(fs::read_dir(&room).unwrap().count(), 1, "the path alone");
            drop(second);
            assert!(!path.exists());
        }
        fs::write(&path, "a file").unwrap();
        assert!(SocketPath::bind(&path, Kind::Stream, 8).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
        fs::remove_dir_all(&room).unwrap();
    }
}
