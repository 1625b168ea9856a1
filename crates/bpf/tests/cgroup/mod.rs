//! A cgroup (version 2) that this process is in while a test needs it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard};

use fourtuple_testing::cgroup_root;

/// The number of tests that need the cgroup. A socket belongs to the cgroup of its process at the time of socket().
static USERS: Mutex<u32> = Mutex::new(0);

/// A cgroup that is removed when the last value is dropped.
pub(crate) struct Cgroup {
    root: PathBuf,
    directory: File,
}

impl Cgroup {
    /// Moves this process into a cgroup of its own.
    pub(crate) fn enter() -> io::Result<Cgroup> {
        let root = cgroup_root()?;
        let path = path(&root);
        let mut users = users();
        if *users == 0 {
            // A killed process with the same ID may have left it.
            fs::create_dir_all(&path)?;
            fs::write(path.join("cgroup.procs"), "0").inspect_err(|_| drop(fs::remove_dir(&path)))?;
        }
        *users += 1;
        let directory = File::open(&path)?;
        Ok(Cgroup { root, directory })
    }

    /// Moves this process out of the cgroup. Only for a test that is alone in its process.
    #[allow(dead_code, reason = "every theme uses its part of it")]
    pub(crate) fn leave(&self) -> io::Result<()> {
        fs::write(self.root.join("cgroup.procs"), "0")
    }

    /// Moves this process back into the cgroup.
    #[allow(dead_code, reason = "every theme uses its part of it")]
    pub(crate) fn enter_again(&self) -> io::Result<()> {
        fs::write(path(&self.root).join("cgroup.procs"), "0")
    }

    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut users = users();
        *users -= 1;
        if *users == 0 {
            let _ = fs::write(self.root.join("cgroup.procs"), "0");
            let _ = fs::remove_dir(path(&self.root));
        }
    }
}

fn users() -> MutexGuard<'static, u32> {
    USERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn path(root: &Path) -> PathBuf {
    root.join(format!("fourtuple-test-{}", process::id()))
}
