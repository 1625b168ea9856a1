//! Finds the network namespace of a process or a container.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use fourtuple_syscalls::procfs;

use crate::host::cgroup;

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The namespace of a process.
    Process(u32),
    /// The namespace of a file, such as /run/netns/NAME.
    File(PathBuf),
}

/// The reason why a network namespace was not opened.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// No process has this ID.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// No process is in a cgroup with this container ID.
    #[error(
        "no process is in a cgroup of the container {0}; expected at least 6 hexadecimal digits of the ID of a running container"
    )]
    NoContainer(String),
    /// The beginning of an ID matches several containers.
    #[error("several containers match {id}: {}; name more digits of one", .found.join(", "))]
    Several {
        /// The beginning of the ID.
        id: String,
        /// IDs of the containers.
        found: Vec<String>,
    },
    /// The file of the namespace was not opened.
    #[error("open({}): {source}{}", path.display(), remedy(source))]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of open(2).
        source: io::Error,
    },
}

/// Returns what to do about an error of open(2), if that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; the namespace of a process of another user needs root",
        io::ErrorKind::NotFound => "; `ip netns` lists the names",
        _ => "",
    }
}

impl NamespaceError {
    /// Returns whether another value would avoid the error.
    pub fn is_usage(&self) -> bool {
        match self {
            NamespaceError::Open { source, .. } => source.kind() == io::ErrorKind::NotFound,
            NamespaceError::NoProcess(_)
            | NamespaceError::NoContainer(_)
            | NamespaceError::Several { .. } => true,
        }
    }
}

/// Opens a network namespace, for `netns::enter` of the crate `syscalls`. `root` is the directory that has `proc`, usually `/`.
///
/// # Errors
///
/// [`NamespaceError`]
pub fn open(target: &Target, root: &Path) -> Result<OwnedFd, NamespaceError> {
    match target {
        Target::Process(process) => of_process(root, *process),
        Target::File(path) => open_file(path),
    }
}

fn of_process(root: &Path, process: u32) -> Result<OwnedFd, NamespaceError> {
    if !root.join(format!("proc/{process}")).exists() {
        return Err(NamespaceError::NoProcess(process));
    }
    open_file(&root.join(format!("proc/{process}/ns/net")))
}

fn open_file(path: &Path) -> Result<OwnedFd, NamespaceError> {
    let opened = File::open(path).map(OwnedFd::from);
    opened.map_err(|source| NamespaceError::Open { path: path.to_owned(), source })
}

/// Returns the process with the lowest ID of a container, by at least 6 digits of the ID of the container. `root` is the directory that
/// has `proc`.
///
/// # Errors
///
/// [`NamespaceError::NoContainer`], [`NamespaceError::Several`]
pub fn first_process(root: &Path, id: &str) -> Result<u32, NamespaceError> {
    let mut found: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for process in procfs::processes(root) {
        // A process may end in the meantime.
        let text = fs::read_to_string(root.join(format!("proc/{process}/cgroup"))).unwrap_or_default();
        let container = text.lines().find_map(|line| {
            let (_, path) = line.rsplit_once(':')?;
            cgroup::container(path.split('/').find(|name| cgroup::is_container(name, id))?)
        });
        if let Some(container) = container {
            found.entry(container.to_owned()).or_default().insert(process);
        }
    }
    let first = found.values().next().and_then(|processes| processes.first());
    match (first, found.len()) {
        (Some(process), 1) => Ok(*process),
        (Some(_), _) => {
            Err(NamespaceError::Several { id: id.to_owned(), found: found.into_keys().collect() })
        }
        (None, _) => Err(NamespaceError::NoContainer(id.to_owned())),
    }
}

/// Returns the network namespace of a process, by its inode; `None`: the process has ended, or nobody may look.
fn of(process: u32) -> Option<u32> {
    Some(fs::metadata(format!("/proc/{process}/ns/net")).ok()?.ino() as u32)
}

/// Returns the network namespace of this thread, by its inode.
pub fn of_this_thread() -> Option<u32> {
    Some(fs::metadata("/proc/thread-self/ns/net").ok()?.ino() as u32)
}

/// Returns whether the network namespace of this thread is the initial one, which alone has some sysctls. In a container process 1 does not
/// tell.
pub fn is_initial() -> bool {
    fs::exists("/proc/sys/net/ipv4/tcp_mem").unwrap_or(false)
}

/// Returns whether a network namespace, which is the one of this thread, is that of process 1. Where nobody may look at that: whether it is the
/// initial one.
pub fn is_of_host(namespace: u32) -> bool {
    of(1).map_or_else(is_initial, |of| of == namespace)
}

/// Returns the other network namespaces of the processes that are visible, each with the lowest of their numbers.
pub fn others(namespace: u32) -> BTreeMap<u32, u32> {
    let mut processes = BTreeMap::new();
    for process in procfs::processes("/") {
        if let Some(other) = of(process).filter(|other| *other != namespace) {
            let first = processes.entry(other).or_insert(process);
            *first = process.min(*first);
        }
    }
    processes
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process;

    use super::*;

    #[test]
    fn a_remedy_fits_its_error() {
        let error = |kind: io::ErrorKind| {
            NamespaceError::Open { path: "/run/netns/a".into(), source: kind.into() }.to_string()
        };
        assert!(error(io::ErrorKind::PermissionDenied).ends_with("another user needs root"));
        assert!(error(io::ErrorKind::NotFound).ends_with("; `ip netns` lists the names"));
        assert!(!error(io::ErrorKind::InvalidInput).contains(';'));
    }

    #[test]
    fn a_container_is_found_by_the_beginning_of_its_id() {
        let root = env::temp_dir().join(format!("fourtuple-namespace-{}", process::id()));
        let (web, db) = ("8a2f64c0b1d97e53aa01", "8a2f64ffffffffffffff");
        for (process, cgroup) in [
            (40, format!("0::/system.slice/docker-{web}.scope\n")),
            (7, format!("12:cpu:/kubepods/pod1/{web}\n0::/\n")),
            (8, format!("0::/docker-{db}.scope\n")),
            (1, "0::/init.scope\n".to_owned()),
        ] {
            fs::create_dir_all(root.join(format!("proc/{process}"))).unwrap();
            fs::write(root.join(format!("proc/{process}/cgroup")), cgroup).unwrap();
        }
        assert_eq!(first_process(&root, "8a2f64c").unwrap(), 7);
        let several = first_process(&root, "8a2f64").unwrap_err();
        assert!(several.to_string().contains(&format!("{web}, {db}")), "{several}");
        assert_eq!(first_process(&root, "8a2f64f").unwrap(), 8);
        assert!(matches!(first_process(&root, "123456"), Err(NamespaceError::NoContainer(_))));
        assert!(matches!(open(&Target::Process(99), &root), Err(NamespaceError::NoProcess(99))));
        fs::remove_dir_all(&root).unwrap();
    }
}
