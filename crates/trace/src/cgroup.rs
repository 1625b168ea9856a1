//! Where programs see every connect() of a host: the root of its cgroups (version 2).

use std::fs::{self, File};
use std::io;

/// The root of the cgroup2 file system, as far up as this process sees it: in a cgroup namespace that is the namespace's.
pub(crate) fn root() -> io::Result<File> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let directory =
        mounts.lines().find_map(directory).ok_or_else(|| io::Error::from_raw_os_error(NOTHING))?;
    File::open(directory)
}

/// ENODEV: there is no file system of this kind.
const NOTHING: i32 = 19;

/// Of a line of mountinfo(5): where the root of a cgroup2 file system is. A mount of something below the root is none.
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
    fn only_the_root_of_version_2_is_taken() {
        let at = "/sys/fs/cgroup/unified";
        let line =
            |root: &str, kind: &str| format!("37 29 0:32 {root} {at} rw,relatime shared:10 - {kind} none rw");
        assert_eq!(directory(&line("/", "cgroup2")), Some(at));
        assert_eq!(directory(&line("/web", "cgroup2")), None);
        assert_eq!(directory(&line("/", "cgroup")), None);
        assert_eq!(directory(""), None);
    }
}
