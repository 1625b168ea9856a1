//! A cgroup for the programs of a test.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::DEADLINE;

/// A cgroup of a test, removed at its end.
pub(crate) struct Cgroup(pub(crate) PathBuf);

impl Cgroup {
    pub(crate) fn new(name: &str) -> Option<Cgroup> {
        let path =
            fourtuple_testing::cgroup_root().ok()?.join(format!("fourtuple-{name}-{}", std::process::id()));
        fs::create_dir(&path).ok().map(|()| Cgroup(path))
    }

    /// Removes the cgroup, and those that its programs made in it, after its processes have ended.
    pub(crate) fn remove(&self) {
        let deadline = Instant::now() + DEADLINE;
        while self.0.exists() && removed(&self.0).is_err() {
            assert!(Instant::now() < deadline, "{} has processes", self.0.display());
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn flags(&self, more: &str) -> String {
        format!("fix ports --cgroup {} {more}", self.0.display())
    }
}

fn removed(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            removed(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !thread::panicking() {
            return self.remove();
        }
        // After a failure its processes may still run; Linux 5.14 can end them.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(2);
        while self.0.exists() && removed(&self.0).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
    }
}
