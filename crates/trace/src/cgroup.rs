//! Finds the root of the cgroup2 hierarchy: programs attached there see every connect() of the host.

use std::fs::{self, File};
use std::io;

/// Opens the root of the cgroup2 file system that this process sees: in a cgroup namespace, the root of the namespace.
pub(crate) fn root() -> io::Result<File> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let directory = mounts.lines().find_map(directory).ok_or_else(|| io::Error::from_raw_os_error(ENODEV))?;
    File::open(directory)
}

/// No file system of this type is mounted.
const ENODEV: i32 = 19;

/// Returns the mount point if this line of proc_pid_mountinfo(5) mounts the root of a cgroup2 file system.
fn directory(line: &str) -> Option<&str> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let (root, directory) = (fields.next()?, fields.next()?);
    (kind.split(' ').next() == Some("cgroup2") && root == "/").then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mount_of_the_cgroup2_root_is_accepted() {
        let at = "/sys/fs/cgroup/unified";
        let line =
            |root: &str, kind: &str| format!("37 29 0:32 {root} {at} rw,relatime shared:10 - {kind} none rw");
        assert_eq!(directory(&line("/", "cgroup2")), Some(at));
        assert_eq!(directory(&line("/web", "cgroup2")), None);
        assert_eq!(directory(&line("/", "cgroup")), None);
        assert_eq!(directory(""), None);
    }
}
