//! Files of procfs, among them sysctls.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the first read. The list of all odd ports, the longest list of reserved ports, has 188 KiB.
const FIRST_READ: usize = 64 << 10;

/// Reads a file of procfs as text.
///
/// A sysctl returns its value to the first read(2) only, cut to the size of the buffer (`proc_do_large_bitmap`), and
/// [`std::fs::read_to_string`] begins with a read of 32 bytes, because files of procfs report the size 0. This function reads into a
/// large buffer. If the file fills the buffer, the function opens the file again and reads into a buffer of twice the size.
///
/// # Errors
/// The errors of open(2) and read(2); [`io::ErrorKind::InvalidData`] if the file is not UTF-8.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    read_with(path.as_ref(), FIRST_READ)
}

fn read_with(path: &Path, mut size: usize) -> io::Result<String> {
    loop {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; size];
        let mut filled = 0;
        while filled < size {
            match file.read(&mut buffer[filled..]) {
                Ok(0) => {
                    buffer.truncate(filled);
                    return String::from_utf8(buffer)
                        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
                }
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        size *= 2;
    }
}

/// Returns the processes that this process sees, in no order. `root`: the directory that has `proc`; without procfs there are none.
pub fn processes(root: impl AsRef<Path>) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(root.as_ref().join("proc")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the name of a process, without the line's end.
///
/// # Errors
/// ENOENT if the process has ended.
pub fn name(root: impl AsRef<Path>, process: u32) -> io::Result<String> {
    let comm = fs::read(root.as_ref().join(format!("proc/{process}/comm")))?;
    Ok(program(String::from_utf8_lossy(comm.trim_ascii_end()).into_owned()))
}

/// Returns the name of a program by that of its first thread: Node.js calls it `MainThread` since version 24.
pub fn program(comm: String) -> String {
    if comm == "MainThread" { "node".to_owned() } else { comm }
}

/// Returns the open descriptors of a process, each with the name of its file. One that is closed meanwhile may be missing.
///
/// # Errors
/// ENOENT if the process has ended, EACCES if it belongs to another user.
pub fn descriptors(root: impl AsRef<Path>, process: u32) -> io::Result<impl Iterator<Item = (i32, PathBuf)>> {
    let entries = fs::read_dir(root.as_ref().join(format!("proc/{process}/fd")))?;
    Ok(entries.flatten().filter_map(|entry| {
        Some((entry.file_name().to_str()?.parse().ok()?, fs::read_link(entry.path()).ok()?))
    }))
}

/// Returns the sockets of a process: descriptor and inode, which sock_diag(7) reports too.
///
/// # Errors
/// Those of [`descriptors`].
pub fn sockets(root: impl AsRef<Path>, process: u32) -> io::Result<impl Iterator<Item = (i32, u32)>> {
    Ok(descriptors(root, process)?.filter_map(|(descriptor, name)| {
        let inode = name.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some((descriptor, inode.parse().ok()?))
    }))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::process;

    use super::*;

    #[test]
    fn sockets_are_told_from_other_descriptors() {
        let (socket, file) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), File::open("/proc/self/stat").unwrap());
        let inode = fs::metadata(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap().ino() as u32;
        let own = process::id();
        assert!(processes("/").any(|process| process == own));
        let found: Vec<_> = sockets("/", own).unwrap().collect();
        assert!(found.contains(&(socket.as_raw_fd(), inode)), "{found:?}");
        assert!(found.iter().all(|(descriptor, _)| *descriptor != file.as_raw_fd()), "{found:?}");
        assert!(descriptors("/", own).unwrap().any(|(descriptor, _)| descriptor == file.as_raw_fd()));
        assert_eq!(sockets("/", u32::MAX).map(|_| ()).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(processes("/sys").count(), 0, "no procfs there");
    }

    #[test]
    fn a_process_has_the_name_of_its_program() {
        let own = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(name("/", process::id()).unwrap(), own.trim_end());
        assert_eq!(name("/", u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(program("MainThread".to_owned()), "node");
        assert_eq!(program("nginx".to_owned()), "nginx");
    }

    #[test]
    fn a_file_is_read_whole_in_buffers_of_any_size() {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let release = std::fs::read_to_string("/proc/version").unwrap();
        for size in 1..=64 {
            let read = |path| read_with(Path::new(path), size).unwrap();
            assert_eq!(
                (read("/proc/sys/net/ipv4/ip_local_port_range"), read("/proc/version")),
                (range.clone(), release.clone())
            );
        }
        assert_eq!(read_to_string("/proc/no such file").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
