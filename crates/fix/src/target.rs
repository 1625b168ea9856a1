//! Finds the cgroup of the programs to fix: by its path, a systemd unit, a process or a container.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::host::cgroup;
use fourtuple_syscalls::fork::Guard;
use fourtuple_syscalls::procfs;

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
    #[error("the root of a cgroup2 file system: {0}{remedy}", remedy = cgroup::remedy(.0))]
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
        process: u32,
        /// The directory of the root cgroup.
        root: PathBuf,
        /// The call that failed, and its error.
        reason: String,
    },
    /// The value of a flag names no cgroup.
    #[error("invalid value '{value}' for '--{flag}': {reason}")]
    Value {
        flag: &'static str,
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

/// Starts a process that moves the processes of a cgroup back when this process has ended, in any way. This process has no second thread
/// and holds no BPF objects yet.
fn guard(cgroup: PathBuf) -> io::Result<Guard> {
    Guard::start(c"fourtuple-guard", |mut pipe| {
        // It ends with the writing end, into which nothing is written.
        let _ = pipe.read(&mut [0]);
        ChildCgroup(cgroup).remove();
        0
    })
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
        let guard = guard(directory.clone()).map_err(|error| {
            made.remove();
            failed(format!("the process that moves it back cannot be started: {error}"))
        })?;
        let programs = Programs { directory, made: Some((made, guard)) };
        let (made, _) = programs.made.as_ref().expect("made above");
        made.enter(process).map_err(|error| failed(format!("the process cannot be moved: {error}")))?;
        // Processes that start meanwhile are descendants of a process that is moved in the next turn, or of one that is inside.
        for _ in 0..2 {
            for process in service(process) {
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
                    &found,
                    "no cgroup has the name of the unit; `systemctl status` shows whether it runs",
                )
            }
            Target::Container(id) => {
                let found = search(&mount(root)?, &|directory| cgroup::is_container(directory, id));
                only(
                    "container",
                    id,
                    &found,
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

/// A cgroup with the name that was searched for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Match {
    path: PathBuf,
    /// A user other than root and the user of this process. This user may make cgroups there and choose their names (delegation).
    chosen_by: Option<u32>,
}

/// Returns the owner of a directory, if that is neither root nor the user of this process.
pub(crate) fn foreign_owner(mount: &Path, directory: &Path) -> Option<u32> {
    let owner = |directory: &Path| fs::metadata(directory).map(|directory| directory.uid()).ok();
    // In a user namespace, the root of the file system may belong to a user that has no number there.
    let trusted = [Some(0), owner(Path::new("/proc/self")), owner(mount)];
    owner(directory).filter(|user| !trusted.contains(&Some(*user)))
}

/// Returns the cgroups with an accepted name. Does not search below them.
fn search(mount: &Path, accepts: &dyn Fn(&str) -> bool) -> Vec<Match> {
    let mut found = Vec::new();
    let mut waiting = vec![(mount.to_owned(), None)];
    while let Some((directory, above)) = waiting.pop() {
        // A cgroup may be removed during the search.
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        let chosen_by = above.or_else(|| foreign_owner(mount, &directory));
        for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            match entry.file_name().to_str() {
                Some(name) if accepts(name) => found.push(Match { path: entry.path(), chosen_by }),
                _ => waiting.push((entry.path(), chosen_by)),
            }
        }
    }
    found.sort();
    found
}

/// Returns the only match. Names that other users have chosen neither count nor make another one ambiguous.
fn only(flag: &'static str, name: &str, found: &[Match], absent: &str) -> Result<PathBuf, TargetError> {
    let paths = |matches: &[&Match]| {
        let paths: Vec<String> = matches.iter().map(|found| found.path.display().to_string()).collect();
        paths.join(", ")
    };
    let (own, foreign): (Vec<&Match>, Vec<&Match>) =
        found.iter().partition(|found| found.chosen_by.is_none());
    match (own.as_slice(), foreign.as_slice()) {
        ([one], _) => Ok(one.path.clone()),
        ([], []) => Err(value(flag, name, absent)),
        ([], [first, ..]) => {
            let user = first.chosen_by.unwrap_or_default();
            let reason = format!(
                "only cgroups match whose name user {user} may have chosen; name one with --cgroup if it is meant: {}",
                paths(&foreign)
            );
            Err(value(flag, name, reason))
        }
        (several, _) => Err(value(
            flag,
            name,
            format!("several cgroups match; name one with --cgroup: {}", paths(several)),
        )),
    }
}

/// Maximum time until a cgroup whose processes have ended can be removed.
const REMOVAL: Duration = Duration::from_secs(60);
/// The same with cgroups below it, whose processes may run for ever.
const SHORT_REMOVAL: Duration = Duration::from_secs(1);

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

    fn is_divided(&self) -> bool {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
    }

    /// Moves processes that still run to the parent of the cgroup, and removes the cgroup. A cgroup that the program has divided
    /// stays until its processes have ended.
    pub(crate) fn remove(&self) {
        let Some(parent) = self.0.parent() else { return };
        // A process that has just ended holds its cgroup until it has left its processor, which may take seconds on a busy machine.
        let begun = Instant::now();
        let limit = || if self.is_divided() { SHORT_REMOVAL } else { REMOVAL };
        while begun.elapsed() < limit() {
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

/// Returns the name of a process, empty if it has ended.
pub(crate) fn command(process: u32) -> String {
    procfs::name("/", process).unwrap_or_default()
}

/// Returns a process and its descendants.
pub(crate) fn tree(root: u32) -> BTreeSet<u32> {
    let parents: Vec<(u32, u32)> =
        procfs::processes("/").filter_map(|process| Some((process, parent(process)?))).collect();
    let mut found = BTreeSet::from([root]);
    loop {
        let before = found.len();
        let children = parents.iter().filter(|(_, parent)| found.contains(parent));
        let children: Vec<u32> = children.map(|(process, _)| *process).collect();
        found.extend(children);
        if found.len() == before {
            return found;
        }
    }
}

/// Returns the processes of the service of a process: its ancestors with its name, such as the master process of a worker, and all
/// descendants of these.
pub(crate) fn service(process: u32) -> BTreeSet<u32> {
    let name = command(process);
    let mut root = process;
    while let Some(above) = parent(root).filter(|above| *above > 1 && command(*above) == name) {
        root = above;
    }
    tree(root)
}

fn parent(process: u32) -> Option<u32> {
    parent_in(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// Returns the parent from the text of /proc/PID/stat, whose second field may contain spaces and parentheses.
fn parent_in(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cgroups: &[(&str, Option<u32>)]) -> Result<PathBuf, String> {
        let found: Vec<Match> = cgroups
            .iter()
            .map(|(path, chosen_by)| Match { path: path.into(), chosen_by: *chosen_by })
            .collect();
        only("unit", "nginx", &found, "no cgroup").map_err(|error| error.to_string())
    }

    #[test]
    fn a_name_that_another_user_chose_is_not_taken() {
        let (system, user) =
            ("/cg/system.slice/nginx.service", "/cg/user.slice/user@1000.service/nginx.service");
        assert_eq!(found(&[(system, None), (user, Some(1000))]), Ok(system.into()));
        let refused = found(&[(user, Some(1000))]).unwrap_err();
        assert!(refused.contains("user 1000") && refused.ends_with(user), "{refused}");
        let several = found(&[(system, None), ("/cg/nginx.service", None), (user, Some(1000))]).unwrap_err();
        assert!(several.contains("several") && several.ends_with("/cg/nginx.service"), "{several}");
        assert!(found(&[]).unwrap_err().ends_with("no cgroup"));
    }

    #[test]
    fn the_user_of_a_delegated_cgroup_chooses_the_names_below_it() {
        let mount = std::env::temp_dir().join(format!("fourtuple-target-{}", std::process::id()));
        let delegated = mount.join("user@1000.service");
        fs::create_dir_all(delegated.join("app/web.service")).unwrap();
        fs::create_dir_all(mount.join("system.slice/web.service")).unwrap();
        // Only root can give a directory away.
        let is_given = std::os::unix::fs::chown(&delegated, Some(1000), None).is_ok();
        let matches = search(&mount, &|name| name == "web.service");
        let own = search(&mount, &|name| name == "user@1000.service");
        fs::remove_dir_all(&mount).unwrap();
        let chosen: Vec<Option<u32>> = matches.iter().map(|found| found.chosen_by).collect();
        assert_eq!(chosen, [None, is_given.then_some(1000)], "{matches:?}");
        assert_eq!(own[0].chosen_by, None, "the name of the delegated cgroup itself");
    }

    #[test]
    fn the_parent_comes_after_the_name() {
        assert_eq!(parent_in("42 (a b) c) S 7 42 42 0"), Some(7));
        assert_eq!(parent_in("42"), None);
    }
}
