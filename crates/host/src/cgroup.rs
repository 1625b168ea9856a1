//! Cgroups of version 2 (cgroups(7)).

use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// No file system of this type is mounted.
const ENODEV: i32 = 19;

/// Returns the mount point of the root of the cgroup2 file system that this process sees: in a cgroup namespace, of the root of
/// the namespace.
///
/// # Errors
///
/// ENODEV: none is mounted; an error of reading /proc/self/mountinfo.
pub fn mount_point(root: &Path) -> io::Result<PathBuf> {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo"))?;
    let found = mounts.lines().find_map(of_line).ok_or_else(|| io::Error::from_raw_os_error(ENODEV))?;
    Ok(PathBuf::from(found))
}

/// Returns the mount point if this line of proc_pid_mountinfo(5) mounts the root of a cgroup2 file system.
fn of_line(line: &str) -> Option<&str> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let (root, directory) = (fields.next()?, fields.next()?);
    (kind.split(' ').next() == Some("cgroup2") && root == "/").then_some(directory)
}

/// Returns the metadata of a cgroup's directory; its inode is the id of the cgroup.
///
/// # Errors
///
/// The reason why it is not a cgroup of version 2, and what is expected, for the end of an error message.
pub fn directory(path: &Path) -> Result<Metadata, String> {
    let refuse = |why: &str| {
        format!("{why}; expected a directory of a cgroup2 file system, such as /sys/fs/cgroup/system.slice")
    };
    let directory = fs::metadata(path).map_err(|error| refuse(&error.to_string()))?;
    // A directory of cgroup version 1 does not have this file.
    if !path.join("cgroup.controllers").exists() {
        return Err(refuse("it is not in a cgroup2 file system"));
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mount_of_the_cgroup2_root_is_accepted() {
        let at = "/sys/fs/cgroup/unified";
        let line =
            |root: &str, kind: &str| format!("37 29 0:32 {root} {at} rw,relatime shared:10 - {kind} none rw");
        assert_eq!(of_line(&line("/", "cgroup2")), Some(at));
        assert_eq!(of_line(&line("/web", "cgroup2")), None);
        assert_eq!(of_line(&line("/", "cgroup")), None);
        assert_eq!(of_line(""), None);
    }
}
