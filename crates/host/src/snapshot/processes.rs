//! The processes that hold sockets.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use fourtuple_bpf::SocketHolders;
use fourtuple_record::snapshot::{Owner, Process};
use fourtuple_syscalls::sock_diag::state;

use crate::snapshot::fast::Fast;

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
    bound: Option<Vec<Bound>>,
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

    /// Returns a process with a number of sockets.
    pub(super) fn owner(&self, pid: u32, sockets: u32) -> Owner {
        Owner { pid, name: name(&self.root, pid), sockets }
    }

    /// Returns the TCP sockets that are only bound; `None`: they were not looked for.
    pub(super) fn bound(&self) -> Option<&[Bound]> {
        self.bound.as_deref()
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

/// Reads the limits of the processes that hold sockets.
pub(super) fn read(_root: &Path, _sockets: &Sockets) -> Result<Vec<Process>, String> {
    Err("not read".to_owned())
}
