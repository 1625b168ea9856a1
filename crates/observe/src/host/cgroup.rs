//! Cgroups of version 2 (cgroups(7)).

use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use fourtuple_syscalls::Errno;

/// Returns the mount point of the root of the cgroup2 file system that this process sees: in a cgroup namespace, of the root of
/// the namespace.
///
/// # Errors
///
/// ENODEV: none is mounted; an error of reading /proc/self/mountinfo.
pub fn mount_point(root: &Path) -> io::Result<PathBuf> {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo"))?;
    let found = mounts.lines().find_map(of_line).ok_or_else(|| io::Error::from(Errno::ENODEV))?;
    Ok(PathBuf::from(found))
}

/// Returns what to do about an error of [`mount_point`], for the end of a message; empty if that is unknown.
pub fn remedy(error: &io::Error) -> &'static str {
    match Errno::of(error) {
        Some(Errno::ENODEV) => "; mount one with `mount -t cgroup2 none DIRECTORY`",
        _ => "",
    }
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

/// Returns the cgroup of version 2 from the text of /proc/PID/cgroup (cgroups(7)).
pub fn unified(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(path.strip_suffix(" (deleted)").unwrap_or(path))
}

/// Returns whether a cgroup is named after a container whose ID begins with `id`: [`container`].
pub fn is_container(directory: &str, id: &str) -> bool {
    id.len() >= 6 && container(directory).is_some_and(|own| own.starts_with(id))
}

/// Returns the ID of the container after which a cgroup is named: `ID`, `docker-ID.scope`, `cri-containerd-ID.scope`,
/// `libpod-ID.scope`. The cgroup of the monitor of a container, `libpod-conmon-ID.scope`, is not the container: the monitor has the
/// network namespace of the host.
pub fn container(directory: &str) -> Option<&str> {
    let name = directory.strip_suffix(".scope").unwrap_or(directory);
    let (runtime, own) = name.rsplit_once(['-', ':']).unwrap_or(("", name));
    (!runtime.ends_with("conmon") && own.len() >= 12 && own.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then_some(own)
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

    #[test]
    fn the_unified_hierarchy_has_number_0() {
        assert_eq!(
            unified("9:name=systemd:/\n1:cpu:/web\n0::/system.slice/nginx.service\n"),
            Some("/system.slice/nginx.service")
        );
        assert_eq!(unified("0::/gone (deleted)\n"), Some("/gone"));
        assert_eq!(unified("1:cpu:/web\n"), None);
    }

    #[test]
    fn containers_are_found_by_the_beginning_of_their_id() {
        let id = "8a2f64c0b1d97e53aa01";
        for name in [
            id.to_owned(),
            format!("docker-{id}.scope"),
            format!("cri-containerd-{id}.scope"),
            format!("libpod-{id}"),
        ] {
            assert!(is_container(&name, "8a2f64c0b1d9"), "{name}");
            assert!(is_container(&name, id), "{name}");
        }
        for name in [format!("libpod-conmon-{id}.scope"), format!("crio-conmon-{id}.scope")] {
            assert!(!is_container(&name, id), "{name} is a monitor");
        }
        assert!(!is_container(&format!("docker-{id}.scope"), "2f64c0"));
        assert!(!is_container(&format!("docker-{id}.scope"), "8a2f6"), "too short to be unique");
        assert!(!is_container("system.slice", "system"));
    }
}
