//! Accept queues of unix listeners. The kernel has no tracepoint at them, so their lengths are readings.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use crate::host::snapshot;
use fourtuple_bpf::failed_calls::Failed;
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::TraceUnixListener;
use fourtuple_record::snapshot::UnixListener;
use fourtuple_syscalls::unix_diag::{self, Detail};
use fourtuple_syscalls::{Errno, errno_name};

use crate::trace::scope::is_selected;

/// Maximum number of listeners in a record.
const MAX_ROWS: usize = 100;

/// The readings of the queues in the network namespace of the calling thread.
#[derive(Debug, Default)]
pub(crate) struct UnixQueues {
    seen: BTreeMap<u64, Queue>,
}

/// The readings of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Queue {
    readings: u64,
    first: u32,
    last: u32,
    max: u32,
    full: u64,
}

impl Queue {
    fn add(&mut self, waiting: u32, backlog: u32) {
        if self.readings == 0 {
            self.first = waiting;
        }
        self.readings += 1;
        self.last = waiting;
        self.max = self.max.max(waiting);
        self.full += u64::from(waiting > backlog);
    }
}

impl UnixQueues {
    /// Reads the queues once more.
    pub(crate) fn look(&mut self) -> Result<(), String> {
        let add = |Detail { cookie, queue, .. }: Detail| {
            self.seen.entry(cookie).or_default().add(queue.waiting, queue.backlog);
        };
        unix_diag::each_listener(add).map_err(|error| format!("unix_diag: {}", errno_name(&error)))
    }

    /// Reads the queues a last time and returns the listeners of the processes that the filter selects; without a filter of processes, those
    /// that had a queue or refused connections. `failed`: `None` if failed calls were not counted. `namespace`: of the calling thread.
    pub(crate) fn finish(
        mut self,
        wanted: &TaskFilter,
        failed: Option<&[Failed]>,
        namespace: u32,
    ) -> Result<Vec<TraceUnixListener>, String> {
        self.look()?;
        let root = Path::new("/");
        let is_filtered = wanted.process.is_some() || wanted.name.is_some() || wanted.cgroup.is_some();
        // The clients are other processes than the filter selects.
        let failed = failed.filter(|_| !is_filtered);
        let rows = snapshot::unix_listeners(root)?.into_iter().map(|listener| {
            let refused = failed.map(|failed| refused(failed, &listener.path, namespace));
            row(listener, &self.seen, refused)
        });
        let is_shown = |row: &TraceUnixListener| match is_filtered {
            true => row.owners.iter().chain(&row.workers).any(|owner| is_selected(root, owner.pid, wanted)),
            false => row.waiting_max > 0 || row.refused > Some(0),
        };
        let mut rows: Vec<TraceUnixListener> = rows.filter(is_shown).collect();
        rows.sort_by_key(|row| (Reverse(row.refused), Reverse(row.waiting_max), row.cookie));
        rows.truncate(MAX_ROWS);
        Ok(rows)
    }
}

fn row(listener: UnixListener, seen: &BTreeMap<u64, Queue>, refused: Option<u64>) -> TraceUnixListener {
    let queue = seen.get(&listener.cookie).copied().unwrap_or_default();
    TraceUnixListener {
        path: listener.path,
        cookie: listener.cookie,
        readings: queue.readings,
        waiting_first: queue.first,
        waiting_last: queue.last,
        waiting_max: queue.max,
        full: queue.full,
        backlog: listener.backlog,
        refused,
        owners: listener.owners,
        workers: listener.workers,
    }
}

/// Returns the calls of connect() to a path that found its queue full. An abstract name is one of a network namespace, other paths are of the file
/// system.
fn refused(failed: &[Failed], path: &str, namespace: u32) -> u64 {
    let path = path.escape_debug().to_string();
    let is_refused = |failed: &&Failed| {
        let failure = &failed.failure;
        failure.call() == "connect"
            && Errno::new(failure.errno.into()) == Errno::EAGAIN
            && (!path.starts_with('@') || failure.namespace == namespace)
            && failure.path().as_ref() == Some(&path)
    };
    failed.iter().filter(is_refused).map(|failed| failed.calls).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_full_with_one_more_than_its_backlog() {
        let mut queue = Queue::default();
        for waiting in [3, 9, 8, 1] {
            queue.add(waiting, 8);
        }
        assert_eq!(queue, Queue { readings: 4, first: 3, last: 1, max: 9, full: 1 });
    }
}
