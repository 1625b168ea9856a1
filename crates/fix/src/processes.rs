//! Processes by /proc: their names, parents and descendants.

use std::collections::BTreeSet;
use std::fs;

/// Returns all processes that this process sees.
pub(crate) fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the name of a process, empty if it has ended.
pub(crate) fn command(process: u32) -> String {
    fs::read_to_string(format!("/proc/{process}/comm"))
        .map_or_else(|_| String::new(), |name| name.trim().to_owned())
}

/// Returns a process and its descendants.
pub(crate) fn tree(root: u32) -> BTreeSet<u32> {
    let parents: Vec<(u32, u32)> =
        processes().filter_map(|process| Some((process, parent(process)?))).collect();
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

    #[test]
    fn the_parent_comes_after_the_name() {
        assert_eq!(parent_in("42 (a b) c) S 7 42 42 0"), Some(7));
        assert_eq!(parent_in("42"), None);
    }
}
