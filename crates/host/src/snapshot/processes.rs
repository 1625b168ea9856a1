//! The processes that hold sockets.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use fourtuple_bpf::SocketHolders;
use fourtuple_record::snapshot::{Owner, Process};
use fourtuple_syscalls::sock_diag::state;

use crate::snapshot::fast::Fast;
use crate::snapshot::reading::LISTED;

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
    /// Reads the descriptors of all processes.
    pub(super) fn read(root: &Path, source: &mut Source) -> Sockets {
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
        for entry in fs::read_dir(root.join("proc")).into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let directory = entry.path();
            let Ok(descriptors) = fs::read_dir(directory.join("fd")) else {
                // A process that has ended in the meantime is not hidden.
                hidden += u32::from(directory.exists());
                continue;
            };
            for descriptor in descriptors.flatten() {
                let Ok(target) = fs::read_link(descriptor.path()) else { continue };
                let inode = target.to_str().and_then(|text| text.strip_prefix("socket:["));
                let inode = inode.and_then(|text| text.strip_suffix(']')).and_then(|text| text.parse().ok());
                pairs.extend(inode.map(|inode: u32| (inode, pid)));
            }
        }
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

    /// Returns the processes that hold a socket, in ascending order.
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

    /// Returns a process with a number of sockets.
    pub(super) fn owner(&self, pid: u32, sockets: u32) -> Owner {
        Owner { pid, name: name(&self.root, pid), sockets }
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

fn name(root: &Path, pid: u32) -> String {
    if pid == 0 {
        return String::new();
    }
    let comm = fs::read_to_string(root.join(format!("proc/{pid}/comm"))).unwrap_or_default();
    comm.trim_end().to_owned()
}

/// CPU time of each process in ticks, by process ID and time of its start.
pub(super) type Before = HashMap<(u32, u64), u64>;

/// The greatest number of processes that are read.
const READ: usize = 4096;
/// A tick of /proc/PID/stat: USER_HZ is 100 on all architectures of Linux that programs see.
const TICK_NS: u64 = 10_000_000;

/// Reads the processes in `named`, and the processes of the namespace with sockets that have used the largest share of their descriptors.
pub(super) fn read(
    root: &Path,
    sockets: &Sockets,
    named: &BTreeSet<u32>,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Result<Vec<Process>, String> {
    let here = fs::read_link(root.join("proc/thread-self/ns/net")).ok();
    let is_here = |pid: u32| {
        let there = fs::read_link(root.join(format!("proc/{pid}/ns/net"))).ok();
        here.is_none() || there.is_none() || here == there
    };
    let holders = sockets.processes();
    let others = holders.iter().copied().filter(|pid| !named.contains(pid));
    let mut processes: Vec<Process> = named
        .iter()
        .copied()
        .chain(others.filter(|pid| is_here(*pid)))
        .take(READ)
        .filter_map(|pid| process(root, pid, sockets, before, is_first, now))
        .collect();
    if processes.is_empty() && !holders.is_empty() {
        return Err("/proc/PID/stat, /proc/PID/limits: no process could be read".to_owned());
    }
    let share = |process: &Process| {
        u64::from(process.descriptors) * 1000 / process.descriptor_limit.unwrap_or(u64::MAX).max(1)
    };
    processes
        .sort_by_key(|process| (Reverse(named.contains(&process.pid)), Reverse(share(process)), process.pid));
    let kept = named.len().min(READ) + LISTED;
    processes.truncate(kept);
    Ok(processes)
}

fn process(
    root: &Path,
    pid: u32,
    sockets: &Sockets,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Option<Process> {
    let stat = fs::read_to_string(root.join(format!("proc/{pid}/stat"))).ok()?;
    // The name is in parentheses and may contain any character.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let (cpu, started) = (number(11)? + number(12)?, number(19)?);
    now.insert((pid, started), cpu);
    let cpu_before = before.get(&(pid, started)).copied();
    let limits = fs::read_to_string(root.join(format!("proc/{pid}/limits"))).ok()?;
    let [limit, ceiling] = open_files(&limits)?;
    Some(Process {
        pid,
        name: sockets.owner(pid, 0).name,
        descriptors: descriptors(&root.join(format!("proc/{pid}/fd"))),
        descriptor_limit: limit,
        descriptor_ceiling: ceiling,
        parent: number(1)? as u32,
        group: number(2)? as u32,
        state: fields.first()?.chars().next()?,
        started_ns: started * TICK_NS,
        cpu_ns: cpu_before.filter(|_| !is_first).map(|before| cpu.saturating_sub(before) * TICK_NS),
    })
}

/// Returns the number of entries of /proc/PID/fd. The directory has this number as its size since Linux 6.2; before, its size is 0.
fn descriptors(path: &Path) -> u32 {
    match fs::metadata(path).map_or(0, |directory| directory.len()) {
        0 => fs::read_dir(path).map_or(0, |entries| entries.count() as u32),
        size => size as u32,
    }
}

/// Returns the soft and the hard limit of the line about open files; `None` stands for unlimited.
fn open_files(limits: &str) -> Option<[Option<u64>; 2]> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let mut values = line.split_whitespace().map(|word| word.parse().ok());
    Some([values.next()?, values.next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_may_be_unlimited() {
        let limits = "Max processes  7  8  processes\nMax open files            1024                 unlimited            files\n";
        assert_eq!(open_files(limits), Some([Some(1024), None]));
        assert_eq!(open_files("Max processes 7 8 processes\n"), None);
    }
}
