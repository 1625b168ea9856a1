//! The processes that hold sockets.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use fourtuple_record::snapshot::{Owner, Process};

/// The processes that hold each socket.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// Processes by the inode of a socket.
    holders: HashMap<u32, Vec<u32>>,
    names: HashMap<u32, String>,
    /// Whether the descriptors of a process could not be read.
    pub(super) is_partial: bool,
}

impl Sockets {
    /// Reads the descriptors of all processes from /proc.
    pub(super) fn read(root: &Path) -> Sockets {
        let mut sockets = Sockets::default();
        for entry in fs::read_dir(root.join("proc")).into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else {
                sockets.is_partial = true;
                continue;
            };
            for descriptor in descriptors.flatten() {
                let Ok(target) = fs::read_link(descriptor.path()) else { continue };
                let inode = target.to_str().and_then(|text| text.strip_prefix("socket:["));
                let inode = inode.and_then(|text| text.strip_suffix(']')).and_then(|text| text.parse().ok());
                let Some(inode) = inode else { continue };
                let holders = sockets.holders.entry(inode).or_default();
                if holders.last() != Some(&pid) {
                    holders.push(pid);
                }
                sockets.names.entry(pid).or_insert_with(|| name(root, pid));
            }
        }
        sockets
    }

    /// Returns the processes that hold a socket, in ascending order.
    pub(super) fn holders(&self, inode: u32) -> &[u32] {
        self.holders.get(&inode).map_or(&[], Vec::as_slice)
    }

    /// Returns a process with a number of sockets.
    pub(super) fn owner(&self, pid: u32, sockets: u32) -> Owner {
        Owner { pid, name: self.names.get(&pid).cloned().unwrap_or_default(), sockets }
    }
}

fn name(root: &Path, pid: u32) -> String {
    let comm = fs::read_to_string(root.join(format!("proc/{pid}/comm"))).unwrap_or_default();
    comm.trim_end().to_owned()
}

/// Reads the limits of the processes that hold sockets.
pub(super) fn read(_root: &Path, _sockets: &Sockets) -> Result<Vec<Process>, String> {
    Err("not read".to_owned())
}
