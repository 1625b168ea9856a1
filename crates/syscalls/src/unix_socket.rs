//! unix(7) sockets: messages that carry descriptors (SCM_RIGHTS), the credentials of the peer, and the path of a listening socket, which
//! has mode 0600, is replaced if a killed process has left it, and is removed by its owner.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{Endpoint, Errno, check, option, socket};

/// Opens a connected pair of SOCK_SEQPACKET sockets, close-on-exec and non-blocking. They preserve message boundaries.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    pair_of(libc::SOCK_NONBLOCK)
}

/// Opens a connected pair like [`pair`]. `flags`: 0 or SOCK_NONBLOCK.
pub(crate) fn pair_of(flags: libc::c_int) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | flags;
    // SAFETY: the pointer is to writable memory for two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    // SAFETY: the call above returned two new descriptors, which have no other owner.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// The maximum number of descriptors in one message (SCM_MAX_FD, include/net/scm.h).
pub const MAX_DESCRIPTORS: usize = 253;

/// A buffer for the control message of [`MAX_DESCRIPTORS`] descriptors, with the alignment of a cmsghdr.
#[repr(C, align(8))]
pub(crate) struct Control([u8; 1040]);

impl Control {
    pub(crate) fn new() -> Control {
        Control([0; 1040])
    }

    /// Returns the header of a message with this content, and with this buffer for its control message.
    pub(crate) fn message(&mut self, part: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: msghdr consists of numbers and pointers, for which zero is a valid value.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_iov = part;
        header.msg_iovlen = 1;
        header.msg_control = self.0.as_mut_ptr().cast();
        header.msg_controllen = self.0.len() as _;
        header
    }
}

/// Sends `bytes`, at least one, in one message, with a copy of `descriptor` if it is set (sendmsg(2)). WouldBlock: the
/// receive queue of the peer is full.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    send_all(socket, bytes, descriptor.as_slice())
}

/// Like [`send`] with several descriptors, at most [`MAX_DESCRIPTORS`]; InvalidInput for more.
pub fn send_all(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control::new();
    let mut header = control.message(&mut part);
    header.msg_controllen = 0;
    if !descriptors.is_empty() {
        let length = mem::size_of_val(descriptors) as libc::c_uint;
        // SAFETY: CMSG_SPACE only computes.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(length) } as _;
        // SAFETY: the header describes an aligned buffer that is large enough for one control message of MAX_DESCRIPTORS ints. There
        // are no more descriptors than that, and a BorrowedFd is an int.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(length) as _;
            let data = libc::CMSG_DATA(first).cast::<libc::c_int>();
            for (index, descriptor) in descriptors.iter().enumerate() {
                data.add(index).write_unaligned(descriptor.as_raw_fd());
            }
        }
    }
    // SAFETY: the header describes initialised memory that outlives the call, which the kernel only reads.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives one message into `buffer` (recvmsg(2)) and returns its length and its descriptor, close-on-exec. A length of
/// 0 means that the other end is closed. A message that is longer than `buffer`, or whose descriptor exceeds
/// RLIMIT_NOFILE, is an error.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let (count, descriptors) = receive_all(socket, buffer)?;
    Ok((count, descriptors.into_iter().next()))
}

/// Like [`receive`], with all descriptors of the message.
pub fn receive_all(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = Control::new();
    let mut header = control.message(&mut part);
    // SAFETY: the header describes writable memory that outlives the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has filled the header and the control buffer. CMSG_FIRSTHDR checks its length, and
    // the length of the control message gives the number of descriptors after its header.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        if !first.is_null()
            && (*first).cmsg_level == libc::SOL_SOCKET
            && (*first).cmsg_type == libc::SCM_RIGHTS
        {
            let data = libc::CMSG_DATA(first).cast::<libc::c_int>();
            let bytes = ((*first).cmsg_len as usize).saturating_sub(data as usize - first as usize);
            for index in 0..bytes / size_of::<libc::c_int>() {
                // The kernel has created these descriptors for this call; they have no other owner.
                descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
            }
        }
    }
    if header.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(io::Error::other("the message is longer than the buffer for it"));
    }
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::from(Errno::EMFILE));
    }
    Ok((count, descriptors))
}

/// The credentials of the peer of a connection (SO_PEERCRED).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Id of the process that called connect(2) or listen(2); 0 if it is in another PID namespace.
    pub process: u32,
    /// Effective user id of that process at the time of the call.
    pub user: u32,
}

impl Peer {
    /// Returns whether the process belongs to root or to the user of this process.
    pub fn is_root_or_own(&self) -> bool {
        self.user == 0 || self.user == own_user()
    }
}

/// Returns the credentials of the peer of a connected unix socket (SO_PEERCRED).
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let [process, user, _group] = option::get_three(socket, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(Peer { process, user })
}

/// Returns the effective user id (geteuid(2)).
pub fn own_user() -> u32 {
    // SAFETY: geteuid() takes no pointers and cannot fail.
    unsafe { libc::geteuid() }
}

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
    use std::fs;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::socket;

    #[test]
    fn a_descriptor_arrives_with_its_message() {
        let (ours, theirs) = pair().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        send(ours.as_fd(), b"one", Some(far.as_fd())).unwrap();
        send(ours.as_fd(), b"two", None).unwrap();
        drop(far);
        let mut buffer = [0; 16];
        let (count, descriptor) = receive(theirs.as_fd(), &mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"one");
        let mut far = UnixStream::from(descriptor.unwrap());
        near.write_all(b"x").unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).unwrap();
        let (count, descriptor) = receive(theirs.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..count], descriptor.is_none()), (b"two".as_slice(), true));
        assert_eq!(receive(theirs.as_fd(), &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        let ended = loop {
            match receive(theirs.as_fd(), &mut buffer) {
                // A process that another test has forked holds a copy of `ours` until it executes its program.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
                ended => break ended.unwrap(),
            }
        };
        assert_eq!(ended.0, 0);
    }

    #[test]
    fn a_message_that_does_not_fit_is_an_error() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), b"longer", None).unwrap();
        assert!(receive(theirs.as_fd(), &mut [0; 3]).is_err());
    }

    #[test]
    fn a_message_carries_the_maximum_of_descriptors() {
        let (ours, theirs) = pair().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        for number in [2, MAX_DESCRIPTORS] {
            send_all(ours.as_fd(), b"x", &vec![far.as_fd(); number]).unwrap();
            let (count, descriptors) = receive_all(theirs.as_fd(), &mut [0; 4]).unwrap();
            assert_eq!((count, descriptors.len()), (1, number));
            let mut last = UnixStream::from(descriptors.into_iter().next_back().unwrap());
            last.write_all(b"y").unwrap();
        }
        let mut bytes = [0; 2];
        (&near).read_exact(&mut bytes).unwrap();
        let refused = send_all(ours.as_fd(), b"x", &[far.as_fd(); MAX_DESCRIPTORS + 1]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn both_ends_show_their_peer() {
        let directory = std::env::temp_dir().join(format!("fourtuple-message-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let listener = Kind::Packets.listen(&path, 8).unwrap();
        let near = Kind::Packets.connect(&path).unwrap();
        let far = socket::accept_nonblocking(listener.as_fd()).unwrap();
        let us = Peer { process: std::process::id(), user: own_user() };
        assert_eq!((peer(near.as_fd()).unwrap(), peer(far.as_fd()).unwrap()), (us, us));
        assert!(us.is_root_or_own() && !Peer { user: own_user() + 1, ..us }.is_root_or_own());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn only_its_owner_removes_a_path() {
        let directory = std::env::temp_dir().join(format!("fourtuple-path-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
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
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "the path alone");
            drop(second);
            assert!(!path.exists());
        }
        fs::write(&path, "a file").unwrap();
        assert!(SocketPath::bind(&path, Kind::Stream, 8).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
        fs::remove_dir_all(&directory).unwrap();
    }
}
