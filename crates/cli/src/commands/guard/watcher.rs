//! Readings of network namespaces: of the guard's own, and of those in which programs of the policy run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_fix::guard::{Scope, own_cgroup};
use fourtuple_observe::doctor::with_callers;
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_syscalls::{netns, procfs};

use crate::watch::{Namespace, Watch};

/// Maximum number of other namespaces.
pub(super) const MAX_NAMESPACES: usize = 64;
/// Share of a processor for the passes over the sockets of a namespace.
const SHARE: f64 = 0.004;
/// Time after which all processes are looked at again, and not only those that are new: setns(2) may have moved one.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Time limit for the readings of all other namespaces. Those that take longer, as on a host without a free processor, are used later:
/// meanwhile guard has to answer and to look after its fixes.
const PATIENCE: Duration = Duration::from_secs(2);

/// A snapshot of a network namespace.
pub(super) struct Reading {
    /// Inode of the namespace.
    pub(super) namespace: u32,
    /// Whether it is the guard's own namespace.
    pub(super) is_own: bool,
    pub(super) snapshot: Snapshot,
}

/// Namespaces that cannot be followed.
#[derive(Default)]
pub(super) struct Followed {
    /// The error of one that cannot be entered.
    pub(super) refused: Option<io::Error>,
    /// How many are beyond the maximum.
    pub(super) left_out: usize,
}

/// The namespaces that are watched.
pub(super) struct Watcher {
    own: u32,
    watch: Watch,
    others: BTreeMap<u32, Other>,
    /// Processes of this namespace, and since when they are collected.
    known: (Instant, BTreeSet<u32>),
}

/// Another namespace, which a thread reads on request. The thread ends when this is dropped.
struct Other {
    request: Sender<()>,
    snapshots: Receiver<Snapshot>,
    /// Whether the last request has no answer yet.
    is_reading: bool,
}

impl Watcher {
    pub(super) fn begin(namespace: &Namespace, trace: bool) -> Watcher {
        Watcher {
            own: namespace.inode,
            watch: Watch::begin(namespace, trace, SHARE),
            others: BTreeMap::new(),
            known: (Instant::now(), BTreeSet::new()),
        }
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

    /// Follows the programs of the policy: their namespaces are watched, and those without such a program no more.
    pub(super) fn follow(&mut self, scopes: &[&Scope]) -> Followed {
        if self.known.0.elapsed() > LOOK_AGAIN {
            self.known = (Instant::now(), BTreeSet::new());
        }
        let found = namespaces(scopes, self.own, &mut self.known.1);
        self.others.retain(|namespace, _| found.contains_key(namespace));
        let new: Vec<(u32, u32)> =
            found.into_iter().filter(|(namespace, _)| !self.others.contains_key(namespace)).collect();
        let mut followed = Followed::default();
        for (namespace, process) in new {
            if self.others.len() == MAX_NAMESPACES {
                followed.left_out += 1;
                continue;
            }
            match Other::begin(namespace, process) {
                Ok(Some(other)) => _ = self.others.insert(namespace, other),
                // The process has ended in the meantime.
                Ok(None) => {}
                Err(error) => followed.refused = Some(error),
            }
        }
        followed
    }

    /// Reads all namespaces, except those whose reading takes too long: theirs is returned once it is there.
    pub(super) fn read(&mut self) -> Vec<Reading> {
        request(&mut self.others);
        let own = Reading { namespace: self.own, is_own: true, snapshot: attributed(self.watch.read()) };
        let mut readings = vec![own];
        readings.extend(collect(&mut self.others, PATIENCE));
        readings
    }
}

/// Requests a reading of each namespace that is not being read. One whose thread has ended is watched no more, until [`Watcher::follow`] finds it
/// again.
fn request(others: &mut BTreeMap<u32, Other>) {
    others.retain(|_, other| {
        let is_read = other.is_reading || other.request.send(()).is_ok();
        other.is_reading = true;
        is_read
    });
}

/// Returns the readings that are there within a time limit for all.
fn collect(others: &mut BTreeMap<u32, Other>, limit: Duration) -> Vec<Reading> {
    let end = Instant::now() + limit;
    let mut readings = Vec::new();
    others.retain(|namespace, other| {
        match other.snapshots.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(snapshot) => {
                other.is_reading = false;
                readings.push(Reading { namespace: *namespace, is_own: false, snapshot });
                true
            }
            Err(error) => error == RecvTimeoutError::Timeout,
        }
    });
    readings
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
        Ok(Some(Other { request, snapshots, is_reading: false }))
    }
}

/// Returns the namespaces other than `own` in which programs of a policy run, each with one of its processes. `known`: processes of `own`.
fn namespaces(scopes: &[&Scope], own: u32, known: &mut BTreeSet<u32>) -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    let mut still = BTreeSet::new();
    for process in procfs::processes("/") {
        let inode = match known.contains(&process) {
            true => own,
            false => fs::metadata(format!("/proc/{process}/ns/net")).map_or(own, |file| file.ino() as u32),
        };
        if inode == own {
            still.insert(process);
            continue;
        }
        if found.contains_key(&inode) {
            continue;
        }
        let cgroup = own_cgroup(process).unwrap_or_default();
        if scopes.iter().any(|scope| scope.find(&cgroup).is_some()) {
            found.insert(inode, process);
        }
    }
    *known = still;
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readings of 64 namespaces that each took 10 s would stop the guard for ten minutes.
    #[test]
    fn a_slow_namespace_is_read_once_and_later() {
        let (request_sender, requests) = mpsc::channel();
        let (sender, snapshots) = mpsc::channel();
        let slow = Other { request: request_sender, snapshots, is_reading: false };
        let (ended, _) = mpsc::channel();
        let (_, no_snapshots) = mpsc::channel();
        let gone = Other { request: ended, snapshots: no_snapshots, is_reading: false };
        let mut others = BTreeMap::from([(1, slow), (2, gone)]);
        let mut read = || {
            request(&mut others);
            let namespaces =
                collect(&mut others, Duration::ZERO).iter().map(|reading| reading.namespace).collect();
            (namespaces, others.keys().copied().collect())
        };
        let nothing: (Vec<u32>, Vec<u32>) = (vec![], vec![1]);
        assert_eq!(
            (read(), read()),
            (nothing.clone(), nothing.clone()),
            "it is watched, and the one that ended is not"
        );
        assert_eq!(requests.try_iter().count(), 1);
        sender.send(Snapshot::default()).unwrap();
        assert_eq!((read(), read()), ((vec![1], vec![1]), nothing));
        assert_eq!(requests.try_iter().count(), 1);
    }
}
