//! Rows of short processes: a loop that starts curl, or a server that forks for each connection, would hide everything else.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::path::Path;

/// Processes of one name that have ended, from which on they are one row.
const MIN_ENDED: usize = 3;

/// Items that are one row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Indices of the items, in ascending order.
    pub(crate) items: Vec<usize>,
    /// Number of processes: 1, or all of them have ended.
    pub(crate) processes: u32,
}

/// Returns the rows of items, by their first item. Items of an equal kind whose processes have ended are one row, if these are
/// [`MIN_ENDED`] processes or more; every other item is a row. `kind`: `None` for an item that is a row in any case.
pub(crate) fn rows<T, K: Eq + Hash>(
    items: &[T],
    kind: impl Fn(&T) -> Option<K>,
    process: impl Fn(&T) -> u32,
    is_alive: impl Fn(u32) -> bool,
) -> Vec<Row> {
    let mut same: HashMap<K, Vec<usize>> = HashMap::new();
    for (index, item) in items.iter().enumerate() {
        if let Some(kind) = kind(item) {
            same.entry(kind).or_default().push(index);
        }
    }
    let processes =
        |indices: &[usize]| indices.iter().map(|&index| process(&items[index])).collect::<BTreeSet<_>>();
    let mut rows = Vec::new();
    let mut is_merged = vec![false; items.len()];
    for mut merged in same.into_values() {
        let mut all = processes(&merged);
        if all.len() < MIN_ENDED {
            continue;
        }
        all.retain(|process| !is_alive(*process));
        merged.retain(|&index| all.contains(&process(&items[index])));
        if all.len() >= MIN_ENDED {
            merged.iter().for_each(|&index| is_merged[index] = true);
            rows.push(Row { items: merged, processes: all.len() as u32 });
        }
    }
    let single = (0..items.len()).filter(|&index| !is_merged[index]);
    rows.extend(single.map(|index| Row { items: vec![index], processes: 1 }));
    rows.sort_by_key(|row| row.items[0]);
    rows
}

/// Returns whether a process exists.
pub(crate) fn is_alive(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_processes_of_one_name_are_one_row() {
        let rows_of = |items: &[(&'static str, u32)], alive: &[u32]| {
            let kind = |item: &(&'static str, u32)| (item.1 != 0).then_some(item.0);
            let rows = rows(items, kind, |item| item.1, |process| alive.contains(&process));
            rows.into_iter().map(|row| (row.items, row.processes)).collect::<Vec<_>>()
        };
        let three = [("curl", 1), ("nginx", 2), ("curl", 3), ("curl", 4), ("", 0)];
        let merged = vec![(vec![0, 2, 3], 3), (vec![1], 1), (vec![4], 1)];
        assert_eq!(rows_of(&three, &[2]), merged);
        assert_eq!(rows_of(&three, &[3]).len(), 5, "two have ended");
        assert_eq!(rows_of(&[("curl", 0), ("curl", 0), ("curl", 0)], &[]).len(), 3);
        // Threads of one process are not processes.
        assert_eq!(rows_of(&[("curl", 1), ("curl", 1), ("curl", 1)], &[]).len(), 3);
        let threads = [("curl", 1), ("curl", 1), ("curl", 2), ("curl", 3), ("curl", 4)];
        assert_eq!(rows_of(&threads, &[4]), [(vec![0, 1, 2, 3], 3), (vec![4], 1)]);
    }
}
