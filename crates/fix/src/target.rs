//! Finds the cgroup of the programs to fix: by its path, a systemd unit, a process or a container.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read};
use std::path::{Path, PathBuf};

use fourtuple_host::cgroup;
use fourtuple_syscalls::fork::{self, Process};

use crate::child_cgroup::ChildCgroup;
use crate::processes;

/// The programs to fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The programs of a cgroup (version 2), by its directory.
    Cgroup(PathBuf),
    /// The programs of a systemd unit: `nginx.service`, or `nginx`.
    Unit(String),
    /// The programs of the cgroup of a process; in the root cgroup, the processes of its service.
    Process(u32),
    /// The programs of a container, by its ID or the beginning of its ID.
    Container(String),
}

/// The reason why a cgroup was not found.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The root of a cgroup2 file system was not found.
    #[error("the root of a cgroup2 file system: {0}; mount one with `mount -t cgroup2 none DIRECTORY`")]
    NoMount(io::Error),
    /// The kernel has no cgroups of version 2.
    #[error("process {0} is in no cgroup of version 2")]
    NoCgroup(u32),
    /// No cgroup can be made for a process of the root cgroup.
    #[error(
        "cannot fix ports: process {process} is in the root cgroup, and {reason}; `--cgroup {}` concerns all programs of the host",
        root.display()
    )]
    NoChild {
        /// The process.
        process: u32,
        /// The directory of the root cgroup.
        root: PathBuf,
        /// The call that failed, and its error.
        reason: String,
    },
    /// The value of a flag names no cgroup.
    #[error("invalid value '{value}' for '--{flag}': {reason}")]
    Value {
        /// The name of the flag.
        flag: &'static str,
        /// The value.
        value: String,
        /// Why it is not accepted, and what is.
        reason: String,
    },
}

impl TargetError {
    /// Returns whether another value would avoid the error.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, TargetError::Value { .. })
    }
}

/// The cgroup of the programs to fix. A cgroup that was made for them is removed on drop.
#[derive(Debug)]
pub struct Programs {
    directory: PathBuf,
    made: Option<(ChildCgroup, Guard)>,
}

/// A process that moves the processes of a cgroup back when this process has ended, in any way.
#[derive(Debug)]
struct Guard {
    process: Process,
    pipe: PipeWriter,
}

impl Guard {
    /// Starts the guard, before this process has a second thread and before it holds BPF objects.
    fn start(cgroup: PathBuf) -> io::Result<Guard> {
        let (process, pipe) = fork::run_beside(c"fourtuple-guard", |mut pipe: PipeReader| {
            // It ends with the writing end, into which nothing is written.
            let _ = pipe.read(&mut [0]);
            ChildCgroup(cgroup).remove();
            0
        })?;
        Ok(Guard { process, pipe })
    }

    /// Ends the guard.
    fn end(self) {
        drop(self.pipe);
        let _ = self.process.wait();
    }
}

impl Programs {
    /// Returns the directory of the cgroup.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Moves the service of a process out of the root cgroup, because all programs of the host are in and below that one. A guard
    /// process moves the service back, so that it returns even if this process is killed.
    fn of_root(process: u32, root: &Path) -> Result<Programs, TargetError> {
        let failed = |reason| TargetError::NoChild { process, root: root.to_owned(), reason };
        let made =
            ChildCgroup::create(root, &format!("fourtuple-fix-{}", std::process::id())).map_err(failed)?;
        let directory = made.0.clone();
        let guard = Guard::start(directory.clone()).map_err(|error| {
            made.remove();
            failed(format!("the process that moves it back cannot be started: {error}"))
        })?;
        let programs = Programs { directory, made: Some((made, guard)) };
        let (made, _) = programs.made.as_ref().expect("made above");
        made.enter(process).map_err(|error| failed(format!("the process cannot be moved: {error}")))?;
        // Processes that start meanwhile are descendants of a process that is moved in the next turn, or of one that is inside.
        for _ in 0..2 {
            for process in processes::service(process) {
                // The process has ended, or belongs to a user whose processes may not be moved.
                let _ = made.enter(process);
            }
        }
        Ok(programs)
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        if let Some((made, guard)) = self.made.take() {
            guard.end();
            // The guard may have been killed.
            made.remove();
        }
    }
}

impl Target {
    /// Returns the cgroup. `root` is the directory that has `proc`, usually `/`. With `may_move`, a process in the root cgroup gets a
    /// cgroup of its own, with its service, until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`TargetError`]
    pub fn resolve(&self, root: &Path, may_move: bool) -> Result<Programs, TargetError> {
        match self {
            Target::Process(process) if may_move && is_in_root(root, *process)? => {
                Programs::of_root(*process, &mount(root)?)
            }
            _ => Ok(Programs { directory: self.directory(root)?, made: None }),
        }
    }

    fn directory(&self, root: &Path) -> Result<PathBuf, TargetError> {
        match self {
            Target::Cgroup(path) => check(path),
            Target::Unit(name) => {
                let wanted = if name.contains('.') { name.clone() } else { format!("{name}.service") };
                let found = search(&mount(root)?, &|directory| directory == wanted);
                only(
                    "unit",
                    name,
                    found,
                    "no cgroup has the name of the unit; `systemctl status` shows whether it runs",
                )
            }
            Target::Container(id) => {
                let found = search(&mount(root)?, &|directory| cgroup::is_container(directory, id));
                only(
                    "container",
                    id,
                    found,
                    "no cgroup has this container ID; expected at least 6 digits of the ID",
                )
            }
            Target::Process(process) => of_process(root, *process),
        }
    }
}

fn value(flag: &'static str, value: impl ToString, reason: impl ToString) -> TargetError {
    TargetError::Value { flag, value: value.to_string(), reason: reason.to_string() }
}

fn check(path: &Path) -> Result<PathBuf, TargetError> {
    cgroup::directory(path).map_err(|reason| value("cgroup", path.display(), reason))?;
    Ok(path.to_owned())
}

/// Returns the cgroup of a process: `/system.slice/nginx.service`.
fn own(root: &Path, process: u32) -> Result<String, TargetError> {
    let path = root.join(format!("proc/{process}/cgroup"));
    let text = fs::read_to_string(path).map_err(|_| value("pid", process, "there is no such process"))?;
    cgroup::unified(&text).map(str::to_owned).ok_or(TargetError::NoCgroup(process))
}

fn is_in_root(root: &Path, process: u32) -> Result<bool, TargetError> {
    Ok(own(root, process)? == "/")
}

fn of_process(root: &Path, process: u32) -> Result<PathBuf, TargetError> {
    let own = own(root, process)?;
    if own == "/" {
        let reason = "the process is in the root cgroup, as are other programs of the host; a dry run moves no process, so name the \
                      root with --cgroup";
        return Err(value("pid", process, reason));
    }
    let directory = mount(root)?.join(own.trim_start_matches('/'));
    check(&directory).map_err(|_| {
        let reason = format!("its cgroup {own} is not below the cgroup2 file system that fourtuple sees");
        value("pid", process, reason)
    })
}

fn mount(root: &Path) -> Result<PathBuf, TargetError> {
    cgroup::mount_point(root).map_err(TargetError::NoMount)
}

/// Returns the cgroups with an accepted name. Does not search below them.
fn search(directory: &Path, accepts: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // A cgroup may be removed during the search.
    let Ok(entries) = fs::read_dir(directory) else { return found };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        match entry.file_name().to_str() {
            Some(name) if accepts(name) => found.push(entry.path()),
            _ => found.extend(search(&entry.path(), accepts)),
        }
    }
    found.sort();
    found
}

fn only(flag: &'static str, name: &str, found: Vec<PathBuf>, absent: &str) -> Result<PathBuf, TargetError> {
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(value(flag, name, absent)),
        several => {
            let paths: Vec<String> = several.iter().map(|path| path.display().to_string()).collect();
            Err(value(
                flag,
                name,
                format!("several cgroups match; name one with --cgroup: {}", paths.join(", ")),
            ))
        }
    }
}
