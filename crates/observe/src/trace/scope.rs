//! Which processes a filter selects, from /proc, for what no BPF program counts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::host::cgroup;
use fourtuple_bpf::filter::TaskFilter;

/// Returns whether a filter selects a process by its number, a thread's name or its cgroup. The network namespace is that of a socket, and is
/// not looked at.
pub(crate) fn is_selected(root: &Path, pid: u32, wanted: &TaskFilter) -> bool {
    let process = root.join("proc").join(pid.to_string());
    wanted.process.is_none_or(|wanted| wanted == pid)
        && wanted.name.as_ref().is_none_or(|name| has_thread(&process, name))
        && wanted.cgroup.is_none_or(|cgroup| is_in_cgroup(root, &process, cgroup))
}

fn comm(task: &Path) -> Vec<u8> {
    fs::read(task.join("comm")).unwrap_or_default().trim_ascii_end().to_owned()
}

fn has_thread(process: &Path, wanted: &str) -> bool {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    // The kernel keeps 15 bytes, which may end within a character.
    let wanted = &wanted.as_bytes()[..wanted.len().min(15)];
    threads.into_iter().any(|thread| comm(&thread.path()) == wanted)
}

/// Returns whether a process is in the cgroup with this inode or below it.
fn is_in_cgroup(root: &Path, process: &Path, wanted: u64) -> bool {
    let Ok(mount) = cgroup::mount_point(root) else { return false };
    let text = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let own = cgroup::unified(&text).unwrap_or_default();
    let own = mount.join(own.trim_start_matches('/'));
    let mut directories = own.ancestors().take_while(|directory| directory.starts_with(&mount));
    directories.any(|directory| fs::metadata(directory).is_ok_and(|file| file.ino() == wanted))
}
