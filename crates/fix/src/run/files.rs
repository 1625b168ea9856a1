//! The files that a run makes: the directory of the preloaded library, its counters, and the cgroup of the program.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process;

use fourtuple_observe::host::cgroup;
use fourtuple_syscalls::shared;

use crate::target::ChildCgroup;

/// The library that `--via preload` loads into the program.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fourtuple-preload.so"));

/// Name of the file of the library.
const LIBRARY_NAME: &str = "fourtuple-preload.so";

#[derive(Debug)]
pub(super) struct LibraryDirectory(pub(super) PathBuf);

impl LibraryDirectory {
    /// Makes the directory and its file. Only this user can list and change it.
    pub(super) fn create() -> io::Result<LibraryDirectory> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for parent in [env::temp_dir(), PathBuf::from("/dev/shm"), PathBuf::from("/var/tmp")] {
            match LibraryDirectory::create_in(&parent) {
                Ok(made) => return Ok(made),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn create_in(parent: &Path) -> io::Result<LibraryDirectory> {
        // LD_PRELOAD separates names by colons and spaces.
        if !parent.is_absolute() || parent.as_os_str().as_bytes().iter().any(|byte| b": ".contains(byte)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let name = |number| parent.join(format!("fourtuple-run-{}-{number}", process::id()));
        let free = |path: &PathBuf| DirBuilder::new().mode(0o700).create(path);
        let path = (0..100).map(name).find(|path| free(path).is_ok());
        let path = path.ok_or_else(|| io::Error::from(io::ErrorKind::PermissionDenied))?;
        let directory = LibraryDirectory(path);
        let made = directory.fill();
        if made.is_err() {
            directory.remove();
        }
        made.map(|()| directory)
    }

    fn fill(&self) -> io::Result<()> {
        let path = self.0.join(LIBRARY_NAME);
        let mut library = File::options().read(true).write(true).create_new(true).open(path)?;
        library.write_all(LIBRARY)?;
        if !shared::is_executable(&library) {
            return Err(io::Error::other(format!("{} is mounted noexec", self.0.display())));
        }
        // A program that root started may continue as another user and execute programs.
        library.set_permissions(Permissions::from_mode(0o755))?;
        fs::set_permissions(&self.0, Permissions::from_mode(0o711))
    }

    pub(super) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a cgroup for the program below the cgroup of this process.
pub(super) fn own_cgroup() -> Result<ChildCgroup, String> {
    let root = Path::new("/");
    let mount = cgroup::mount_point(root).map_err(|error| format!("no cgroup2 file system: {error}"))?;
    let text = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let own = cgroup::unified(&text).ok_or("this process is in no cgroup of version 2")?;
    let name = format!("fourtuple-run-{}", process::id());
    ChildCgroup::create(&mount.join(own.trim_start_matches('/')), &name)
}

/// The files that a run removes at its end.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) directory: Option<LibraryDirectory>,
    /// The counters of the library, which have no name in a file system.
    pub(super) counters: Option<File>,
    pub(super) cgroup: Option<ChildCgroup>,
}

impl Files {
    /// Returns the variables of the environment that load the library. The library opens the counters as a descriptor of this process,
    /// which only processes that may trace this one can do.
    pub(super) fn environment(&self) -> io::Result<Vec<(OsString, OsString)>> {
        let (Some(directory), Some(counters)) = (&self.directory, &self.counters) else {
            return Ok(Vec::new());
        };
        let mut libraries = directory.0.join(LIBRARY_NAME).into_os_string();
        if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            libraries.push(":");
            libraries.push(others);
        }
        // The number of this process in the PID namespace of /proc.
        let this = fs::read_link("/proc/self")?;
        let counters = Path::new("/proc").join(this).join(format!("fd/{}", counters.as_raw_fd()));
        Ok(vec![
            ("LD_PRELOAD".into(), libraries),
            ("FOURTUPLE_RUN_COUNTERS".into(), counters.into_os_string()),
        ])
    }

    pub(super) fn remove(&self) {
        if let Some(directory) = &self.directory {
            directory.remove();
        }
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
    }
}
