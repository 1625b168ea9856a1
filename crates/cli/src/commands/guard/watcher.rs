//! Readings of network namespaces: of the guard's own, and of those in which programs of the policy run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use fourtuple_fix::guard::{Scope, own_cgroup};
use fourtuple_observe::doctor::with_callers;
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_syscalls::{netns, procfs};

use crate::watch::{Namespace, Watch};

/// Maximum number of other namespaces.
const MAX_NAMESPACES: usize = 64;
/// Share of a processor for the passes over the sockets of another namespace.
const SHARE: f64 = 0.005;
/// Time limit for a reading of another namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// A snapshot of a network namespace.
pub(super) struct Reading {
    /// Inode of the namespace.
    pub(super) namespace: u32,
    /// Whether it is the guard's own namespace.
    pub(super) is_own: bool,
    pub(super) snapshot: Snapshot,
}

/// The namespaces that are watched.
pub(super) struct Watcher {
    own: u32,
    watch: Watch,
    others: BTreeMap<u32, Other>,
}

/// Another namespace, which a thread reads on request. The thread ends when this is dropped.
struct Other {
    request: Sender<()>,
    snapshots: Receiver<Snapshot>,
}

impl Watcher {
    pub(super) fn begin(namespace: &Namespace, trace: bool) -> Watcher {
        Watcher { own: namespace.inode, watch: Watch::begin(namespace, trace), others: BTreeMap::new() }
    }

    pub(super) fn watch(&mut self) -> &mut Watch {
        &mut self.watch
    }

    pub(super) fn own(&self) -> u32 {
        self.own
    }

    /// Returns the number of namespaces that are watched.
    pub(super) fn namespaces(&self) -> usize {
        1 + self.others.len()
    }

    /// Follows the programs of the policy: their namespaces are watched, and those without such a program no more. Returns the error of a
    /// namespace that cannot be entered.
    pub(super) fn follow(&mut self, scopes: &[&Scope]) -> Option<io::Error> {
        let found = namespaces(scopes, self.own);
        self.others.retain(|namespace, _| found.contains_key(namespace));
        let mut refused = None;
        for (namespace, process) in found {
            if self.others.len() < MAX_NAMESPACES && !self.others.contains_key(&namespace) {
                match Other::begin(namespace, process) {
                    Ok(Some(other)) => _ = self.others.insert(namespace, other),
                    // The process has ended in the meantime.
                    Ok(None) => {}
                    Err(error) => refused = Some(error),
                }
            }
        }
        refused
    }

    /// Reads all namespaces. One whose reading fails is watched no more, until [`Watcher::follow`] finds it again.
    pub(super) fn read(&mut self) -> Vec<Reading> {
        self.others.retain(|_, other| other.request.send(()).is_ok());
        let own = Reading { namespace: self.own, is_own: true, snapshot: attributed(self.watch.read()) };
        let mut readings = vec![own];
        self.others.retain(|namespace, other| {
            let snapshot = other.snapshots.recv_timeout(PATIENCE).ok();
            let is_read = snapshot.is_some();
            readings.extend(snapshot.map(|snapshot| Reading {
                namespace: *namespace,
                is_own: false,
                snapshot,
            }));
            is_read
        });
        readings
    }
}

/// TIME_WAIT sockets have no process: those that the trace saw stand for it.
fn attributed(snapshot: Snapshot) -> Snapshot {
    with_callers(&snapshot).unwrap_or(snapshot)
}

impl Other {
    /// Begins to read the namespace of a process. `None`: the process has ended.
    fn begin(namespace: u32, process: u32) -> io::Result<Option<Other>> {
        let Ok(file) = File::open(format!("/proc/{process}/ns/net")) else { return Ok(None) };
        // The number of a process that has ended may be another's.
        if file.metadata()?.ino() as u32 != namespace {
            return Ok(None);
        }
        let (request, requests) = mpsc::channel::<()>();
        let (sender, snapshots) = mpsc::channel();
        let (entering, entered) = mpsc::channel();
        let read = move || {
            let result = netns::enter(file.as_fd());
            drop(file);
            let is_inside = result.is_ok();
            let _ = entering.send(result);
            if !is_inside {
                return;
            }
            let mut reader = Reader::new(Path::new("/")).limited_to(SHARE);
            reader.read();
            while requests.recv().is_ok() && sender.send(reader.read()).is_ok() {}
        };
        thread::Builder::new().name(format!("netns-{namespace}")).spawn(read)?;
        entered.recv().unwrap_or(Ok(()))?;
        Ok(Some(Other { request, snapshots }))
    }
}

/// Returns the namespaces other than `own` in which programs of a policy run, each with one of its processes.
fn namespaces(scopes: &[&Scope], own: u32) -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    for process in procfs::processes("/") {
        let inode = fs::metadata(format!("/proc/{process}/ns/net")).map_or(own, |file| file.ino() as u32);
        if inode == own || found.contains_key(&inode) {
            continue;
        }
        let cgroup = own_cgroup(process).unwrap_or_default();
        if scopes.iter().any(|scope| scope.find(&cgroup).is_some()) {
            found.insert(inode, process);
        }
    }
    found
}
