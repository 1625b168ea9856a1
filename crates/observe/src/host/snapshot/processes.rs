//! The processes that hold sockets.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fourtuple_bpf::SocketHolders;
use fourtuple_record::snapshot::{Owner, Process};
use fourtuple_syscalls::procfs;
use fourtuple_syscalls::sock_diag::state;

use crate::host::cgroup;
use crate::host::snapshot::LISTED;
use crate::host::snapshot::sums::Fast;

/// The way in which the processes of sockets are found.
#[derive(Debug, Default)]
pub(super) enum Source {
    /// Not decided yet.
    #[default]
    Undecided,
    /// A BPF iterator over the descriptors of all processes.
    Bpf(SocketHolders),
    /// /proc/PID/fd.
    Proc,
}

/// A TCP socket that is bound to a port and has no peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) local: SocketAddr,
    pub(super) inode: u32,
}

/// The processes that hold each socket.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    root: PathBuf,
    /// Place of the processes of a socket in `pids`, by its inode: start and length.
    places: HashMap<u32, (u32, u32), Fast>,
    pids: Vec<u32>,
    /// Sockets that are only bound; `None`: not seen in this way.
    pub(super) bound: Option<Vec<Bound>>,
    /// Processes whose descriptors could not be read.
    pub(super) hidden: u32,
}

impl Sockets {
    /// Reads the descriptors of all processes. `earlier`: the sockets of the reading before.
    pub(super) fn read(root: &Path, source: &mut Source, earlier: Option<&Sockets>) -> Sockets {
        let mut sockets = Sockets::find(root, source);
        sockets.order(earlier);
        sockets
    }

    fn find(root: &Path, source: &mut Source) -> Sockets {
        if matches!(source, Source::Undecided) {
            // Another root has files of /proc only.
            let iterator = (root == Path::new("/")).then(SocketHolders::load).and_then(Result::ok);
            *source = iterator.map_or(Source::Proc, Source::Bpf);
        }
        if let Source::Bpf(iterator) = source {
            match Sockets::read_iterator(root, iterator) {
                Ok(sockets) => return sockets,
                Err(_) => *source = Source::Proc,
            }
        }
        Sockets::read_files(root)
    }

    fn read_iterator(root: &Path, iterator: &mut SocketHolders) -> Result<Sockets, fourtuple_bpf::BpfError> {
        const TCP: u8 = 6;
        let (mut pairs, mut bound) = (Vec::new(), Vec::new());
        iterator.each(|holder| {
            pairs.push((holder.inode, holder.process));
            if holder.state == state::CLOSE && holder.protocol == TCP && holder.local.port() != 0 {
                bound.push(Bound { local: holder.local, inode: holder.inode });
            }
        })?;
        // Several descriptors may be of the same socket.
        bound.sort_unstable_by_key(|bound| bound.inode);
        bound.dedup_by_key(|bound| bound.inode);
        Ok(Sockets { bound: Some(bound), ..Sockets::of_pairs(root, pairs) })
    }

    fn read_files(root: &Path) -> Sockets {
        let mut pairs = Vec::new();
        let mut hidden = 0;
        for pid in procfs::processes(root) {
            match procfs::sockets(root, pid) {
                Ok(sockets) => pairs.extend(sockets.map(|(_, inode)| (inode, pid))),
                // A process that has ended in the meantime is not hidden.
                Err(_) => hidden += u32::from(root.join(format!("proc/{pid}")).exists()),
            }
        }
        // The mount option hidepid=2 leaves the processes of other users out.
        hidden += u32::from(root.join("proc/self").exists() && !root.join("proc/1").exists());
        Sockets { hidden, ..Sockets::of_pairs(root, pairs) }
    }

    /// Takes pairs of inode and process.
    fn of_pairs(root: &Path, mut pairs: Vec<(u32, u32)>) -> Sockets {
        pairs.sort_unstable();
        pairs.dedup();
        let mut places = HashMap::with_capacity_and_hasher(pairs.len(), Fast::default());
        for (at, (inode, _)) in pairs.iter().enumerate() {
            places.entry(*inode).or_insert((at as u32, 0)).1 += 1;
        }
        let pids = pairs.iter().map(|(_, pid)| *pid).collect();
        Sockets { root: root.to_owned(), places, pids, bound: None, hidden: 0 }
    }

    /// Sorts the processes that share a socket: a process that held it in the reading before comes first, then the process that started first. A child
    /// has copies of all descriptors of its parent between fork() and execve(), and it may have the lower number.
    fn order(&mut self, earlier: Option<&Sockets>) {
        let mut ages: HashMap<u32, (u64, usize)> = HashMap::new();
        let shared: Vec<(u32, (u32, u32))> = self
            .places
            .iter()
            .map(|(inode, place)| (*inode, *place))
            .filter(|(_, (_, length))| *length > 1)
            .collect();
        for (_, (start, length)) in &shared {
            let pids = &self.pids[*start as usize..(start + length) as usize];
            for pid in pids {
                ages.entry(*pid).or_insert_with(|| age(&self.root, *pid));
            }
        }
        for (inode, (start, length)) in shared {
            let before = earlier.map_or(&[][..], |earlier| earlier.holders(inode));
            self.pids[start as usize..(start + length) as usize]
                .sort_unstable_by_key(|pid| (!before.contains(pid), ages[pid], *pid));
        }
    }

    /// Returns the processes that hold a socket; the first is to be named for it.
    pub(super) fn holders(&self, inode: u32) -> &[u32] {
        if inode == 0 {
            return &[];
        }
        let place = self.places.get(&inode);
        place.map_or(&[], |(start, length)| &self.pids[*start as usize..(start + length) as usize])
    }

    /// Returns all processes that hold sockets.
    fn processes(&self) -> BTreeSet<u32> {
        self.pids.iter().copied().collect()
    }

    /// Returns the process that is to be named for a socket.
    pub(super) fn holder(&self, inode: u32) -> Option<u32> {
        self.holders(inode).first().copied()
    }

    /// Returns a process with a number of sockets, or `None` if it has ended: no advice may name it.
    pub(super) fn owner(&self, pid: u32, sockets: u32) -> Option<Owner> {
        Some(Owner { pid, name: name(&self.root, pid)?, sockets })
    }

    /// Returns the process with most of these sockets.
    pub(super) fn owner_of_most(&self, inodes: &[u32]) -> Option<Owner> {
        let mut held = BTreeMap::<u32, u32>::new();
        for holder in inodes.iter().filter_map(|inode| self.holder(*inode)) {
            *held.entry(holder).or_default() += 1;
        }
        let (pid, number) = held.into_iter().max_by_key(|&(pid, number)| (number, Reverse(pid)))?;
        self.owner(pid, number)
    }

    /// Returns the processes that hold a socket, each with this socket.
    pub(super) fn owners(&self, inode: u32) -> Vec<Owner> {
        self.holders(inode).iter().filter_map(|pid| self.owner(*pid, 1)).collect()
    }

    /// Returns the directory that has /proc.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns how the processes were found: `bpf` or `proc`.
    pub(super) fn found_by(&self) -> &'static str {
        if self.bound.is_some() { "bpf" } else { "proc" }
    }
}

/// Returns the name of a process, which is never empty; `None` if the process has ended. Process 0 stands for processes that are not visible.
fn name(root: &Path, pid: u32) -> Option<String> {
    if pid == 0 {
        return Some(String::new());
    }
    let is_hidden = || root.join(format!("proc/{pid}")).exists() || !root.join("proc/self").exists();
    match procfs::name(root, pid) {
        Ok(name) if !name.is_empty() => Some(name),
        Err(_) if !is_hidden() => None,
        // A program may delete its name, and /proc may be absent.
        _ => Some("unknown".to_owned()),
    }
}

/// Returns the time of the start of a process in ticks, and how many of its ancestors started in the same tick: a process comes after its
/// parent. A process that has ended is the youngest.
fn age(root: &Path, pid: u32) -> (u64, usize) {
    const MAX_ANCESTORS: usize = 16;
    let Some(own) = Stat::read(root, pid) else { return (u64::MAX, 0) };
    let mut parent = Stat::read(root, own.parent);
    let mut ancestors = 0;
    while let Some(found) = parent.filter(|parent| parent.started == own.started && ancestors < MAX_ANCESTORS)
    {
        ancestors += 1;
        parent = Stat::read(root, found.parent);
    }
    (own.started, ancestors)
}

/// Returns the time since the start of a process; `None` if it has ended.
pub(super) fn running_ns(root: &Path, pid: u32) -> Option<u64> {
    let uptime = fs::read_to_string(root.join("proc/uptime")).ok()?;
    let uptime_s: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    let started_ns = Stat::read(root, pid)?.started * TICK_NS;
    Some(((uptime_s * 1e9) as u64).saturating_sub(started_ns))
}

/// Fields of /proc/PID/stat.
pub(super) struct Stat {
    state: char,
    pub(super) parent: u32,
    group: u32,
    /// Processor time, in ticks.
    cpu: u64,
    /// Time of the start, in ticks.
    started: u64,
}

impl Stat {
    pub(super) fn read(root: &Path, pid: u32) -> Option<Stat> {
        let stat = fs::read_to_string(root.join(format!("proc/{pid}/stat"))).ok()?;
        // The name is in parentheses and may contain any character.
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Stat {
            state: fields.first()?.chars().next()?,
            parent: number(1)? as u32,
            group: number(2)? as u32,
            cpu: number(11)? + number(12)?,
            started: number(19)?,
        })
    }
}

/// What is kept of the processes from one pass to the next.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// CPU time in ticks, by process ID and time of the start.
    ticks: HashMap<(u32, u64), u64>,
    limits: HashMap<u32, Limit>,
}

/// What seldom changes of a process that may be listed for its descriptors. To read it of thousands of processes takes most of a pass.
#[derive(Clone, Copy, Debug)]
struct Limit {
    /// Inode of /proc/PID/fd: the directory of another process with this number has another one.
    inode: u64,
    read: Instant,
    /// Whether the process is in this network namespace.
    is_here: bool,
    descriptors: Option<u64>,
}

/// Time after which a limit is read again: prlimit(2) may have changed it, or setns(2) the namespace.
const LIMIT_AGE: Duration = Duration::from_secs(60);

/// Maximum number of processes that are read.
const READ: usize = 4096;
/// A tick of /proc/PID/stat: USER_HZ is 100 on all architectures of Linux that programs see.
const TICK_NS: u64 = 10_000_000;

/// The processes that a snapshot needs.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Those that hold sockets of interest.
    pub(super) named: BTreeSet<u32>,
    /// Of these, those that share an address: their command lines differ.
    pub(super) sharing: BTreeSet<u32>,
    /// Of these, those for which connections wait.
    pub(super) awaited: BTreeSet<u32>,
}

/// Reads the processes that are wanted, and those of the namespace with sockets that have used the largest share of their descriptors.
pub(super) fn read(
    root: &Path,
    sockets: &Sockets,
    Wanted { named, sharing, awaited }: &Wanted,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Result<Vec<Process>, String> {
    let holders = sockets.processes();
    let others = holders.iter().copied().filter(|pid| !named.contains(pid)).take(READ);
    let fullest = fullest(root, others, before, now);
    let mut processes: Vec<Process> = named
        .iter()
        .take(READ)
        .chain(&fullest)
        .filter_map(|pid| process(root, *pid, sockets, before, is_first, now))
        .collect();
    for process in processes.iter_mut().filter(|process| named.contains(&process.pid)) {
        add_origin(root, process);
        process.command_line =
            sharing.contains(&process.pid).then(|| command_line(root, process.pid)).flatten();
        process.waits_in = if awaited.contains(&process.pid) { waits_in(root, process.pid) } else { None };
    }
    let is_empty = || procfs::processes(root).next().is_none();
    // Of a process that /proc had. The iterator may name one of another PID namespace, which /proc never has.
    let is_gone = |pid: &u32| !root.join(format!("proc/{pid}")).exists();
    let has_ended = |pid: &u32| {
        let stat = Stat::read(root, *pid);
        sockets.bound.is_none() && stat.map_or_else(|| is_gone(pid), |stat| stat.state == 'Z')
    };
    if processes.is_empty() && (!holders.iter().all(has_ended) || is_empty()) {
        return Err("/proc/PID/stat, /proc/PID/limits: no process could be read".to_owned());
    }
    let share = |process: &Process| share(process.descriptors, process.descriptor_limit);
    processes
        .sort_by_key(|process| (Reverse(named.contains(&process.pid)), Reverse(share(process)), process.pid));
    Ok(processes)
}

/// Returns the share of its descriptors that a process uses, in thousandths.
fn share(descriptors: u32, limit: Option<u64>) -> u64 {
    u64::from(descriptors) * 1000 / limit.unwrap_or(u64::MAX).max(1)
}

/// Returns the processes of this network namespace that use the largest share of their descriptors.
fn fullest(root: &Path, pids: impl Iterator<Item = u32>, before: &Before, now: &mut Before) -> Vec<u32> {
    let here = fs::read_link(root.join("proc/thread-self/ns/net")).ok();
    let at = Instant::now();
    let (mut shares, mut unreadable) = (Vec::new(), Vec::new());
    for pid in pids {
        let directory = root.join(format!("proc/{pid}"));
        let (number, inode) = descriptors(&directory.join("fd"));
        let known = before.limits.get(&pid);
        let known = known.filter(|known| known.inode == inode && at.duration_since(known.read) < LIMIT_AGE);
        let read = || {
            let there = fs::read_link(directory.join("ns/net")).ok();
            let [limit, _] = open_files(&fs::read_to_string(directory.join("limits")).ok()?)?;
            let is_here = here.is_none() || there.is_none() || here == there;
            Some(Limit { inode, read: at, is_here, descriptors: limit })
        };
        // It may have ended.
        let Some(limit) = known.copied().or_else(read) else { continue };
        now.limits.insert(pid, limit);
        match number {
            _ if !limit.is_here => {}
            Some(number) => shares.push((Reverse(share(number, limit.descriptors)), pid)),
            None => unreadable.push(pid),
        }
    }
    shares.sort_unstable();
    // One that is listed says that some are not readable.
    shares.truncate(LISTED - usize::from(!unreadable.is_empty()));
    shares.into_iter().map(|(_, pid)| pid).chain(unreadable).take(LISTED).collect()
}

fn process(
    root: &Path,
    pid: u32,
    sockets: &Sockets,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Option<Process> {
    let Stat { state, parent, group, cpu, started } = Stat::read(root, pid)?;
    now.ticks.insert((pid, started), cpu);
    let cpu_before = before.ticks.get(&(pid, started)).copied();
    let limits = fs::read_to_string(root.join(format!("proc/{pid}/limits"))).ok()?;
    let [limit, ceiling] = open_files(&limits)?;
    let descriptors = descriptors(&root.join(format!("proc/{pid}/fd"))).0;
    // A process that held a socket and has no descriptor is about to end.
    if descriptors == Some(0) {
        return None;
    }
    Some(Process {
        pid,
        name: sockets.owner(pid, 0)?.name,
        descriptors: descriptors.unwrap_or(0),
        descriptor_limit: limit,
        descriptor_ceiling: ceiling,
        parent,
        parent_name: None,
        executable: None,
        cgroup: None,
        command_line: None,
        waits_in: None,
        group,
        state,
        started_ns: started * TICK_NS,
        cpu_ns: cpu_before.filter(|_| !is_first).map(|before| cpu.saturating_sub(before) * TICK_NS),
    })
}

/// Adds what tells instances of a service from copies that were left behind.
fn add_origin(root: &Path, process: &mut Process) {
    let directory = root.join(format!("proc/{}", process.pid));
    let cgroup = fs::read_to_string(directory.join("cgroup")).ok();
    process.cgroup = cgroup.and_then(|text| cgroup::unified(&text).map(str::to_owned));
    process.executable =
        fs::read_link(directory.join("exe")).ok().map(|path| path.to_string_lossy().into_owned());
    process.parent_name = Some(process.parent).filter(|pid| *pid != 0).and_then(|pid| name(root, pid));
}

/// Maximum length of a command line, in characters.
const MAX_COMMAND_LINE: usize = 160;

/// Returns the beginning of the command line; `None`: it is not visible or empty, as that of a thread of the kernel.
fn command_line(root: &Path, pid: u32) -> Option<String> {
    let bytes = fs::read(root.join(format!("proc/{pid}/cmdline"))).ok()?;
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let cut = match text.char_indices().nth(MAX_COMMAND_LINE) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    };
    (!cut.is_empty()).then_some(cut)
}

/// Returns the function of the kernel in which all threads of a process wait.
fn waits_in(root: &Path, pid: u32) -> Option<String> {
    const MAX_THREADS: usize = 64;
    let threads = fs::read_dir(root.join(format!("proc/{pid}/task"))).ok()?;
    let mut functions = BTreeSet::new();
    for thread in threads.flatten().take(MAX_THREADS) {
        let function = fs::read_to_string(thread.path().join("wchan")).ok()?;
        // The compiler adds suffixes such as `.constprop.0` to parts of a function.
        functions.insert(function.split('.').next().unwrap_or_default().to_owned());
    }
    // `0`: it runs, or the reader may not know.
    let only = functions.pop_first().filter(|function| functions.is_empty() && function != "0")?;
    (!only.is_empty()).then_some(only)
}

/// Returns the number of entries of /proc/PID/fd, `None` without the permission to read them, and its inode. The directory has this number as
/// its size since Linux 6.2; before, its size is 0.
fn descriptors(path: &Path) -> (Option<u32>, u64) {
    let (size, inode) = fs::metadata(path).map_or((0, 0), |directory| (directory.len(), directory.ino()));
    let number = match size {
        0 => match fs::read_dir(path) {
            Ok(entries) => Some(entries.count() as u32),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            // The process has ended.
            Err(_) => Some(0),
        },
        size => Some(size as u32),
    };
    (number, inode)
}

/// Returns the soft and the hard limit of the line about open files; `None` stands for unlimited.
fn open_files(limits: &str) -> Option<[Option<u64>; 2]> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let mut values = line.split_whitespace().map(|word| word.parse().ok());
    Some([values.next()?, values.next()?])
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn limits_may_be_unlimited() {
        let limits = "Max processes  7  8  processes\nMax open files            1024                 unlimited            files\n";
        assert_eq!(open_files(limits), Some([Some(1024), None]));
        assert_eq!(open_files("Max processes 7 8 processes\n"), None);
    }
    /// Writes /proc/PID/stat and /proc/PID/comm below a new directory.
    fn with_processes(test: &str, processes: &[(u32, &str, u32, u64)]) -> PathBuf {
        let root = env::temp_dir().join(format!("fourtuple-processes-{test}-{}", process::id()));
        fs::create_dir_all(root.join("proc/self")).unwrap();
        for (pid, name, parent, started) in processes {
            let directory = root.join(format!("proc/{pid}"));
            fs::create_dir_all(&directory).unwrap();
            let zeros = "0 ".repeat(17);
            fs::write(directory.join("stat"), format!("{pid} ({name}) S {parent} {zeros}{started} 0"))
                .unwrap();
            fs::write(directory.join("comm"), format!("{name}\n")).unwrap();
        }
        root
    }

    #[test]
    fn of_parent_and_children_the_parent_is_named() {
        let root = with_processes(
            "parent",
            &[
                (201, "child", 30_001, 90),
                (202, "child", 201, 90),
                (30_001, "proxy", 1, 90),
                (7, "late", 1, 91),
            ],
        );
        let shared = [7, 201, 202, 30_001, 9].map(|pid| (1, pid));
        let find = |pairs: &[(u32, u32)], earlier: Option<&Sockets>| {
            let mut sockets = Sockets::of_pairs(&root, pairs.to_vec());
            sockets.order(earlier);
            sockets
        };
        let sockets = find(&shared, None);
        assert_eq!(sockets.holders(1), [30_001, 201, 202, 7, 9]);
        let names: Vec<_> = sockets.owners(1).into_iter().map(|owner| owner.name).collect();
        assert_eq!(names, ["proxy", "child", "child", "late"], "9 has ended");
        let earlier = find(&[(1, 7)], None);
        assert_eq!(find(&shared, Some(&earlier)).holder(1), Some(7), "it held the socket before");
        let another = find(&[(2, 7)], None);
        assert_eq!(find(&shared, Some(&another)).holder(1), Some(30_001), "it held another socket before");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_process_that_has_ended_hides_no_process() {
        let root = with_processes("ended", &[(5, "hidden", 1, 1), (6, "zombie", 1, 1)]);
        fs::write(root.join("proc/6/stat"), format!("6 (zombie) Z 1 {}1 0", "0 ".repeat(17))).unwrap();
        let number = |sockets: &Sockets| {
            let (wanted, before, mut now) = (Wanted::default(), Before::default(), Before::default());
            read(&root, sockets, &wanted, &before, false, &mut now).map(|found| found.len())
        };
        let of = |pid: u32| Sockets::of_pairs(&root, vec![(1, pid)]);
        assert_eq!([number(&of(6)), number(&of(9))], [Ok(0), Ok(0)], "a zombie, and one that is gone");
        number(&of(5)).unwrap_err();
        number(&Sockets { bound: Some(Vec::new()), ..of(9) }).unwrap_err();
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_origin_of_a_process_is_read() {
        let root = with_processes("origin", &[(5, "server", 6, 1), (6, "systemd", 0, 1)]);
        let directory = root.join("proc/5");
        fs::write(directory.join("cgroup"), "1:cpu:/x\n0::/system.slice/web.service\n").unwrap();
        std::os::unix::fs::symlink("/usr/sbin/server (deleted)", directory.join("exe")).unwrap();
        let mut process = Process { pid: 5, parent: 6, ..Process::default() };
        add_origin(&root, &mut process);
        let Process { parent_name, executable, cgroup, .. } = process;
        let found = [parent_name, executable, cgroup].map(Option::unwrap);
        assert_eq!(found, ["systemd", "/usr/sbin/server (deleted)", "/system.slice/web.service"]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn threads_wait_in_one_function_or_in_several() {
        let root = with_processes("wchan", &[(5, "server", 1, 1)]);
        let waits = |functions: &[&str]| {
            for (thread, function) in functions.iter().enumerate() {
                let directory = root.join(format!("proc/5/task/{thread}"));
                fs::create_dir_all(&directory).unwrap();
                fs::write(directory.join("wchan"), function).unwrap();
            }
            waits_in(&root, 5)
        };
        assert_eq!(waits(&[]), None);
        assert_eq!(waits(&["ep_poll"]).as_deref(), Some("ep_poll"));
        assert_eq!(waits(&["poll_schedule_timeout.constprop.0"]).as_deref(), Some("poll_schedule_timeout"));
        assert_eq!(waits(&["0"]), None, "it runs");
        assert_eq!(waits(&["ep_poll", "futex_wait_queue"]), None);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn limits_are_kept_as_long_as_the_process_lives() {
        let root = with_processes("limits", &[(5, "a", 1, 1), (6, "b", 1, 1), (7, "c", 1, 1)]);
        let set = |pid: u32, descriptors: u32, limit: &str| {
            let directory = root.join(format!("proc/{pid}"));
            // As the kernel does for a new process with this number.
            fs::create_dir_all(directory.join("new")).unwrap();
            (0..descriptors).for_each(|number| drop(fs::write(directory.join(format!("new/{number}")), "")));
            let _ = fs::rename(directory.join("fd"), directory.join("old"));
            fs::rename(directory.join("new"), directory.join("fd")).unwrap();
            let _ = fs::remove_dir_all(directory.join("old"));
            fs::write(directory.join("limits"), format!("Max open files  {limit}  {limit}  files\n"))
                .unwrap();
        };
        let (mut first, mut second, mut third) = (Before::default(), Before::default(), Before::default());
        let find = |before: &Before, now: &mut Before| fullest(&root, [5, 6, 7, 8].into_iter(), before, now);
        let limit = |known: &Before, pid| known.limits[&pid].descriptors;
        set(5, 1, "1000000");
        set(6, 1, "2000000");
        fs::remove_file(root.join("proc/7/stat")).unwrap();
        assert_eq!(find(&Before::default(), &mut first), [5, 6], "7 and 8 have ended");
        // prlimit(2) is seen after a while, another process at once.
        fs::write(root.join("proc/5/limits"), "Max open files  3  3  files\n").unwrap();
        set(6, 1, "7");
        find(&first, &mut second);
        assert_eq!((limit(&second, 5), limit(&second, 6)), (Some(1_000_000), Some(7)));
        let known = second.limits.get_mut(&5).unwrap();
        known.read = known.read.checked_sub(LIMIT_AGE).unwrap();
        find(&second, &mut third);
        assert_eq!(limit(&third, 5), Some(3));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn no_name_is_empty() {
        let root = with_processes("names", &[(5, "", 1, 1)]);
        assert_eq!(name(&root, 5).as_deref(), Some("unknown"), "the program deleted its name");
        assert_eq!(name(&root, 6), None, "it has ended");
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(name(&root, 6).as_deref(), Some("unknown"), "there is no /proc");
    }
}
