//! unix_diag: the accept queues of listening unix sockets.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
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
    let request = request(UDIAG_SHOW_VFS | UDIAG_SHOW_RQLEN);
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
    /// The accept queue.
    pub queue: Queue,
}

/// Calls `found` for every listening unix socket in the calling thread's network namespace.
///
/// # Errors
///
/// ENOENT: the kernel has no unix_diag and cannot load it. Other errors are from netlink.
pub fn each_listener(mut found: impl FnMut(Detail)) -> io::Result<()> {
    let request = request(UDIAG_SHOW_NAME | UDIAG_SHOW_RQLEN);
    netlink::ask(libc::NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, true, &request, |body| {
        detail(body).into_iter().for_each(&mut found);
    })
}

/// Parses a reply with a name and a queue.
pub(crate) fn detail(reply: &[u8]) -> Option<Detail> {
    let attributes = reply.get(MESSAGE..)?;
    let word = |at: usize| Some(u32::from_ne_bytes(*reply.get(at..)?.first_chunk::<4>()?));
    let name = netlink::attribute(attributes, UNIX_DIAG_NAME).unwrap_or_default();
    let name = match name.split_first() {
        Some((0, name)) => format!("@{}", String::from_utf8_lossy(name)),
        // The kernel returns a path with its NUL.
        _ => String::from_utf8_lossy(name).trim_end_matches('\0').to_owned(),
    };
    let (waiting, rest) = netlink::attribute(attributes, UNIX_DIAG_RQLEN)?.split_first_chunk::<4>()?;
    let backlog = rest.first_chunk::<4>()?;
    let queue = Queue { waiting: u32::from_ne_bytes(*waiting), backlog: u32::from_ne_bytes(*backlog) };
    Some(Detail { name, inode: word(4)?, cookie: u64::from(word(12)?) << 32 | u64::from(word(8)?), queue })
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
    let (waiting, rest) = netlink::attribute(attributes, UNIX_DIAG_RQLEN)?.split_first_chunk::<4>()?;
    let backlog = rest.first_chunk::<4>()?;
    Some(Queue { waiting: u32::from_ne_bytes(*waiting), backlog: u32::from_ne_bytes(*backlog) })
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_VFS: u16 = 1;
const UNIX_DIAG_RQLEN: u16 = 4;
const UDIAG_SHOW_NAME: u32 = 0x01;
const UDIAG_SHOW_VFS: u32 = 0x02;
const UDIAG_SHOW_RQLEN: u32 = 0x10;

/// Size of struct unix_diag_msg: family, type, state, padding, inode, cookie.
const MESSAGE: usize = 16;

/// unix_diag numbers states as TCP does.
const LISTEN: u32 = 10;

/// Returns struct unix_diag_req: family, protocol, padding, states, no inode, requested attributes, no cookie.
fn request(attributes: u32) -> Vec<u8> {
    let mut body = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [1 << LISTEN, 0, attributes, u32::MAX, u32::MAX] {
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

    use super::*;
    use crate::check;

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
