//! The causes of failed calls, each in the situation of its network namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use fourtuple_observe::doctor::causes;
use fourtuple_observe::host::snapshot::{Reader, counter_totals};
use fourtuple_record::snapshot::{Counter, Failures, Part, Snapshot};

use crate::watch::TargetFlags;

/// Most namespaces that are read; calls in further ones have the causes of the errno in general.
const NAMESPACES: usize = 8;

/// The network namespace of a trace at its start.
pub(super) struct Before {
    /// Inode.
    namespace: Option<u32>,
    counters: BTreeMap<String, u64>,
}

impl Before {
    /// Reads the namespace of the calling thread.
    pub(super) fn read() -> Before {
        Before { namespace: own_namespace(), counters: totals() }
    }

    /// Adds the causes to the calls, as their namespaces are now.
    pub(super) fn explain(&self, calls: &mut Part<Failures>) {
        let Part::Seen(Failures { calls, .. }) = calls else { return };
        let namespaces: BTreeSet<u32> = calls.iter().map(|call| call.namespace).collect();
        for (at, namespace) in namespaces.into_iter().enumerate() {
            let mut own: Vec<_> = calls.iter_mut().filter(|call| call.namespace == namespace).collect();
            let snapshot = if Some(namespace) == self.namespace {
                self.now()
            } else {
                let mut processes = own.iter().map(|call| call.owner.pid).filter(|_| at < NAMESPACES);
                processes.find_map(|process| foreign(process, namespace)).unwrap_or_default()
            };
            for call in &mut own {
                call.causes = causes(&snapshot, call);
            }
        }
    }

    /// Returns the namespace of the calling thread, with the events since the start.
    fn now(&self) -> Snapshot {
        let since = |(name, total): (String, u64)| {
            let during = total.saturating_sub(self.counters.get(&name).copied().unwrap_or(0));
            (name, Counter { total, during })
        };
        let counters = totals().into_iter().map(since).collect();
        Snapshot { counters: Part::Seen(counters), ..Reader::new(Path::new("/")).read() }
    }
}

fn totals() -> BTreeMap<String, u64> {
    counter_totals(Path::new("/")).unwrap_or_default()
}

fn own_namespace() -> Option<u32> {
    Some(fs::metadata("/proc/thread-self/ns/net").ok()?.ino() as u32)
}

/// Returns the namespace of a process, if the process lives and still is in it.
fn foreign(process: u32, namespace: u32) -> Option<Snapshot> {
    let target = TargetFlags { pid: Some(process), netns: None, container: None }.open().ok()?;
    let read = || Ok(Reader::new(Path::new("/")).read());
    if target.inode == namespace { target.within(read).ok() } else { None }
}
