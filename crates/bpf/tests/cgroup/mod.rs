//! A cgroup (version 2) of the thread of a test, so that the connects of other tests in the same process are not counted.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fourtuple_testing::cgroup_root;

static CGROUPS: Mutex<Cgroups> = Mutex::new(Cgroups { entered: 0, in_use: 0 });

/// The cgroups of threads of this process.
struct Cgroups {
    entered: u32,
    in_use: u32,
}

/// A threaded cgroup that is removed when the value is dropped. A socket belongs to the cgroup of the thread that called socket(); a new
/// thread starts in the cgroup of the thread that created it.
pub(crate) struct Cgroup {
    root: PathBuf,
    path: PathBuf,
    directory: File,
}

impl Cgroup {
    /// Moves the process into a cgroup of its own, and the calling thread into one below it.
    pub(crate) fn enter() -> io::Result<Cgroup> {
        let root = cgroup_root()?;
        let of_process = of_process(&root);
        let mut cgroups = cgroups();
        if cgroups.in_use == 0 {
            // A killed process with the same ID may have left it.
            fs::create_dir_all(&of_process)?;
            fs::write(of_process.join("cgroup.procs"), "0")
                .inspect_err(|_| drop(fs::remove_dir(&of_process)))?;
        }
        let path = of_process.join(cgroups.entered.to_string());
        fs::create_dir_all(&path)?;
        fs::write(path.join("cgroup.type"), "threaded")?;
        let directory = File::open(&path)?;
        cgroups.entered += 1;
        cgroups.in_use += 1;
        // Dropping the value takes the lock.
        drop(cgroups);
        let cgroup = Cgroup { root, path, directory };
        cgroup.enter_again()?;
        Ok(cgroup)
    }

    /// Moves the calling thread out of the cgroup.
    pub(crate) fn leave(&self) -> io::Result<()> {
        fs::write(of_process(&self.root).join("cgroup.threads"), "0")
    }

    /// Moves the calling thread back into the cgroup.
    pub(crate) fn enter_again(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.threads"), "0")
    }

    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.leave();
        remove(&self.path);
        let mut cgroups = cgroups();
        cgroups.in_use -= 1;
        if cgroups.in_use == 0 {
            let _ = fs::write(self.root.join("cgroup.procs"), "0");
            remove(&of_process(&self.root));
        }
    }
}

fn cgroups() -> MutexGuard<'static, Cgroups> {
    CGROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a cgroup. A thread that was joined may still be in it for a moment, because its exit goes on after the join.
fn remove(path: &Path) {
    for _ in 0..1_000 {
        if fs::remove_dir(path).is_ok() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn of_process(root: &Path) -> PathBuf {
    root.join(format!("fourtuple-test-{}", process::id()))
}
