//! A cgroup (version 2) for the time of a fix or a run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// A cgroup that this process has made.
#[derive(Debug)]
pub(crate) struct ChildCgroup(pub(crate) PathBuf);

impl ChildCgroup {
    /// Makes a cgroup below another one.
    pub(crate) fn create(parent: &Path, name: &str) -> Result<ChildCgroup, String> {
        let path = parent.join(name);
        match fs::create_dir(&path) {
            Ok(()) => Ok(ChildCgroup(path)),
            Err(error) => Err(format!("cannot make the cgroup {}: {error}", path.display())),
        }
    }

    /// Moves a process into the cgroup.
    pub(crate) fn enter(&self, process: u32) -> io::Result<()> {
        fs::write(self.0.join("cgroup.procs"), process.to_string())
    }

    /// Moves processes that still run to the parent of the cgroup, and removes the cgroup. A cgroup that the program has divided
    /// stays until its processes have ended.
    pub(crate) fn remove(&self) {
        let Some(parent) = self.0.parent() else { return };
        // A process that has just ended holds its cgroup for a moment, on a slow or busy machine for longer.
        for _ in 0..500 {
            let left = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
            for process in left.lines() {
                let _ = fs::write(parent.join("cgroup.procs"), process);
            }
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}
