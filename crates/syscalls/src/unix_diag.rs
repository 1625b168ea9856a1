//! unix_diag: the accept queues of listening unix sockets.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::netlink::{self, word};

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
/// The errors of open(2) with O_PATH on `path`. ENOENT: the kernel has no unix_diag and cannot load it. Other errors are from
/// netlink.
pub fn listener(path: &Path) -> io::Result<Option<Queue>> {
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result?,
    };
    let stat = file.metadata()?;
    let (major, minor) =
        file_system(&file).unwrap_or_else(|| (libc::major(stat.dev()), libc::minor(stat.dev())));
    // The kernel returns the lower 32 bits of the inode, and the device in its internal form (MKDEV).
    let wanted = [(stat.ino() as u32).to_ne_bytes(), (major << 20 | minor).to_ne_bytes()].concat();
    let mut found = None;
    let request = request(LISTEN, UDIAG_SHOW_VFS | UDIAG_SHOW_RQLEN);
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request, |body| {
        found = found.or_else(|| queue(body, &wanted));
    })?;
    Ok(found)
}

/// A listening unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detail {
    /// The path, or `@` and the abstract name; empty for a socket without a name. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd.
    pub inode: u32,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    pub queue: Queue,
}

/// Calls `found` for every listening unix socket in the calling thread's network namespace.
///
/// # Errors
///
/// ENOENT: the kernel has no unix_diag and cannot load it. Other errors are from netlink.
pub fn each_listener(mut found: impl FnMut(Detail)) -> io::Result<()> {
    let request = request(LISTEN, UDIAG_SHOW_NAME | UDIAG_SHOW_RQLEN);
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request, |body| {
        detail(body).into_iter().for_each(&mut found);
    })
}

/// Calls `found` with the cookie of every listening unix socket in the calling thread's network namespace and the inodes of the clients whose
/// connections are in its accept queue, the oldest connection first. The inode is 0 for a client that has closed its socket. The kernel
/// ends the dump without an error at a queue that does not fit into a message (8,000 connections): this listener and others are then missing.
///
/// # Errors
///
/// As [`each_listener`].
pub fn each_queue(mut found: impl FnMut(u64, Vec<u32>)) -> io::Result<()> {
    let request = request(LISTEN, UDIAG_SHOW_ICONS);
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request, |body| {
        if let Some((cookie, clients)) = clients(body) {
            found(cookie, clients);
        }
    })
}

/// Parses a reply with the clients of an accept queue.
pub(crate) fn clients(reply: &[u8]) -> Option<(u64, Vec<u32>)> {
    let inodes = netlink::attribute(reply.get(MESSAGE..)?, UNIX_DIAG_ICONS)?;
    Some((cookie(reply)?, inodes.chunks_exact(4).filter_map(|inode| word(inode, 0)).collect()))
}

/// One end of a connection between unix sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The path of this end, as in [`Detail`]; an accepted connection has the one of its listener.
    pub name: String,
    /// Inode of the socket; 0 in an accept queue.
    pub inode: u32,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// The peer has closed its socket (`unix_release_sock`).
    pub is_closed_by_peer: bool,
}

/// Calls `found` for every end of a connection (SOCK_STREAM and SOCK_SEQPACKET) in the calling thread's network namespace.
///
/// # Errors
///
/// As [`each_listener`].
pub fn each_connection(mut found: impl FnMut(Connection)) -> io::Result<()> {
    let request = request(ESTABLISHED, UDIAG_SHOW_NAME | UDIAG_SHOW_PEER);
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request, |body| {
        connection(body).into_iter().for_each(&mut found);
    })
}

/// Parses a reply about a connection. `None`: another kind of socket.
pub(crate) fn connection(reply: &[u8]) -> Option<Connection> {
    let kind = libc::c_int::from(*reply.get(1)?);
    if kind != libc::SOCK_STREAM && kind != libc::SOCK_SEQPACKET {
        return None;
    }
    let attributes = reply.get(MESSAGE..)?;
    let peer = netlink::attribute(attributes, UNIX_DIAG_PEER).and_then(|peer| word(peer, 0));
    let shutdown = netlink::attribute(attributes, UNIX_DIAG_SHUTDOWN).and_then(|shutdown| shutdown.first());
    Some(Connection {
        name: name(attributes),
        inode: word(reply, 4)?,
        cookie: cookie(reply)?,
        // shutdown() of both directions gives the same state while the peer still has its socket.
        is_closed_by_peer: shutdown == Some(&SHUTDOWN_MASK) && peer.unwrap_or(0) == 0,
    })
}

/// Parses a reply with a name and a queue.
pub(crate) fn detail(reply: &[u8]) -> Option<Detail> {
    let attributes = reply.get(MESSAGE..)?;
    let queue = queue_in(attributes)?;
    Some(Detail { name: name(attributes), inode: word(reply, 4)?, cookie: cookie(reply)?, queue })
}

/// Returns the cookie of the socket that a reply is about.
fn cookie(reply: &[u8]) -> Option<u64> {
    Some(u64::from(word(reply, 12)?) << 32 | u64::from(word(reply, 8)?))
}

/// Returns the queue among the attributes of a reply.
fn queue_in(attributes: &[u8]) -> Option<Queue> {
    let queue = netlink::attribute(attributes, UNIX_DIAG_RQLEN)?;
    Some(Queue { waiting: word(queue, 0)?, backlog: word(queue, 4)? })
}

/// Returns the path, or `@` and the abstract name.
fn name(attributes: &[u8]) -> String {
    let name = netlink::attribute(attributes, UNIX_DIAG_NAME).unwrap_or_default();
    match name.split_first() {
        Some((0, name)) => format!("@{}", String::from_utf8_lossy(name)),
        // The kernel returns a path with its NUL.
        _ => String::from_utf8_lossy(name).trim_end_matches('\0').to_owned(),
    }
}

/// Returns the device numbers of the file system of a file, as in the kernel's superblock. The device of stat(2) is another one for
/// subvolumes of btrfs and for overlayfs. `None` without /proc.
fn file_system(file: &File) -> Option<(u32, u32)> {
    let info = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd())).ok()?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    // The paths of other mounts may not be UTF-8.
    let mounts = fs::read("/proc/thread-self/mountinfo").ok()?;
    String::from_utf8_lossy(&mounts).lines().find_map(|line| {
        // ID of the mount, ID of its parent, MAJOR:MINOR.
        let mut fields = line.split(' ');
        let (major, minor) = fields.next().filter(|id| *id == mount).and(fields.nth(1))?.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

/// Returns the queue in a reply, if the reply is about the socket with the wanted inode and device.
pub(crate) fn queue(reply: &[u8], wanted: &[u8]) -> Option<Queue> {
    let attributes = reply.get(MESSAGE..)?;
    netlink::attribute(attributes, UNIX_DIAG_VFS).filter(|place| *place == wanted)?;
    queue_in(attributes)
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_VFS: u16 = 1;
const UNIX_DIAG_PEER: u16 = 2;
const UNIX_DIAG_ICONS: u16 = 3;
const UNIX_DIAG_RQLEN: u16 = 4;
const UNIX_DIAG_SHUTDOWN: u16 = 6;
const UDIAG_SHOW_NAME: u32 = 0x01;
const UDIAG_SHOW_VFS: u32 = 0x02;
const UDIAG_SHOW_PEER: u32 = 0x04;
const UDIAG_SHOW_ICONS: u32 = 0x08;
const UDIAG_SHOW_RQLEN: u32 = 0x10;

/// Size of struct unix_diag_msg: family, type, state, padding, inode, cookie.
const MESSAGE: usize = 16;

/// unix_diag numbers states as TCP does.
const LISTEN: u32 = 10;
const ESTABLISHED: u32 = 1;
/// RCV_SHUTDOWN and SEND_SHUTDOWN.
const SHUTDOWN_MASK: u8 = 3;

/// Returns struct unix_diag_req: family, protocol, padding, states, no inode, requested attributes, no cookie.
fn request(state: u32, attributes: u32) -> Vec<u8> {
    let mut body = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [1 << state, 0, attributes, u32::MAX, u32::MAX] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::ffi::{CStr, CString};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::process;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::check;

    /// Waits until what closed sockets leave is there: a child of another test has copies of the descriptors until exec() or its end.
    #[track_caller]
    fn until_closed(holds: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < end, "a socket is open");
            thread::yield_now();
        }
    }

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
        // The file is still there.
        until_closed(|| listener(&path).unwrap().is_none());
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(listener(&path).unwrap(), None, "the file is gone");
    }

    #[test]
    fn connections_have_their_ends_and_their_order() {
        let path = env::temp_dir().join(format!("fourtuple-unix-ends-{}", process::id()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let mut clients: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let inode = |client: &UnixStream| {
            let link = fs::read_link(format!("/proc/self/fd/{}", client.as_raw_fd())).unwrap();
            let link = link.to_str().unwrap();
            link["socket:[".len()..link.len() - 1].parse::<u32>().unwrap()
        };
        let name = path.to_str().unwrap();
        let of_listener = || {
            let (mut cookie, mut queue, mut accepted) = (None, None, Vec::new());
            each_listener(|found| cookie = cookie.or((found.name == name).then_some(found.cookie))).unwrap();
            each_queue(|found, clients| queue = queue.take().or((Some(found) == cookie).then_some(clients)))
                .unwrap();
            // A connection in the queue has no inode.
            each_connection(|found| {
                accepted.extend((found.name == name && found.inode > 0).then_some(found))
            })
            .unwrap();
            (queue.unwrap(), accepted)
        };
        let inodes: Vec<u32> = clients.iter().map(inode).collect();
        assert_eq!(of_listener(), (inodes.clone(), Vec::new()));
        let (accepted, _) = listener.accept().unwrap();
        drop(clients.remove(1));
        // The second client has closed its socket.
        until_closed(|| of_listener().0 == [0, inodes[2]]);
        let is_closed = |ends: &[Connection]| {
            ends.iter().map(|end| (end.inode, end.is_closed_by_peer)).collect::<Vec<_>>()
        };
        assert_eq!(is_closed(&of_listener().1), [(inode(&accepted), false)]);
        accepted.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(!of_listener().1[0].is_closed_by_peer, "the client has its socket");
        drop(clients);
        until_closed(|| of_listener().1[0].is_closed_by_peer);
        fs::remove_file(&path).unwrap();
    }

    /// Mounts a file system in the calling thread's mount namespace.
    fn mount(kind: &CStr, target: &Path, data: &str) -> io::Result<()> {
        let target = CString::new(target.as_os_str().as_bytes())?;
        let data = CString::new(data)?;
        let (kind, target, data) = (kind.as_ptr(), target.as_ptr(), data.as_ptr().cast());
        // SAFETY: all strings end in NUL and outlive the call.
        check(unsafe { libc::mount(kind, target, kind, 0, data) }).map(drop)
    }

    #[test]
    fn the_queue_is_found_on_overlayfs() {
        let directory = env::temp_dir().join(format!("fourtuple-unix-diag-overlay-{}", process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        // On an overlay of two file systems, stat(2) does not return the device of the overlay.
        let mounted = || -> io::Result<PathBuf> {
            // SAFETY: unshare() takes no pointers.
            check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
            let none = std::ptr::null();
            // SAFETY: a change of mount propagation reads the target only, a string that ends in NUL.
            check(unsafe {
                libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast())
            })?;
            mount(c"tmpfs", &directory, "")?;
            let [lower, upper, work, merged] =
                ["lower", "up/per", "up/work", "merged"].map(|name| directory.join(name));
            fs::create_dir(&lower)?;
            mount(c"tmpfs", &lower, "")?;
            for path in [&upper, &work, &merged] {
                fs::create_dir_all(path)?;
            }
            let [lowerdir, upperdir, workdir] = [lower, upper, work].map(|path| path.display().to_string());
            mount(
                c"overlay",
                &merged,
                &format!("lowerdir={lowerdir},upperdir={upperdir},workdir={workdir}"),
            )?;
            Ok(merged)
        };
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                // Without privilege, or without overlayfs, there is nothing to test.
                let Ok(merged) = mounted() else { return };
                let path = merged.join("a");
                let _listener = UnixListener::bind(&path).unwrap();
                assert_eq!(listener(&path).unwrap().map(|queue| queue.waiting), Some(0));
            });
            there.join().unwrap();
        });
        fs::remove_dir(&directory).unwrap();
    }
}
