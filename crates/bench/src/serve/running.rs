//! A running server.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, ListenerGroup, SocketPath};
use fourtuple_record::measure::balance;
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Remark, ServeResults, ServeWorker};
use fourtuple_syscalls::Endpoint;

use crate::serve::listener;
use crate::serve::protocol::Protocol;
use crate::serve::worker_thread::DispatcherThread;

/// The worker threads and their resources. Dropping this value ends the threads.
pub(crate) struct WorkerThreads {
    pub(crate) protocol: Protocol,
    pub(crate) address: Endpoint,
    pub(crate) policy: AcceptPolicy,
    pub(crate) path: Option<SocketPath>,
    pub(crate) stop: Stop,
    pub(crate) workers: Vec<(JoinHandle<()>, Arc<Counts>)>,
    /// The group of the workers that wait with an accept policy.
    pub(crate) group: Option<ListenerGroup>,
    /// The thread of the policy `dispatcher`.
    pub(crate) dispatcher_thread: Option<DispatcherThread>,
    /// Requested length of each accept queue.
    pub(crate) backlog: u32,
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        // The path is removed first, so that no client connects while the workers end.
        self.path.take();
        self.stop.set();
        // It wakes the workers; a worker of a drained group closes its connections and hands over none of them. After a failure the
        // workers see the stop flag half a second later.
        let _ = self.group.take().map(|group| group.drain(Duration::ZERO));
        for (thread, counts) in self.workers.drain(..) {
            if thread.join().is_err() {
                counts.error("worker-ended: panic");
            }
            // The counts of the first worker include the failures of the dispatcher, which accepts for all workers.
            for (name, count) in
                self.dispatcher_thread.as_mut().map(DispatcherThread::end).unwrap_or_default()
            {
                counts.errors(&name, count);
            }
        }
    }
}

/// A running server. Dropping it ends the server.
pub struct Running {
    started: WorkerThreads,
    begin: Instant,
}

impl Running {
    pub(crate) fn new(started: WorkerThreads, begin: Instant) -> Running {
        Running { started, begin }
    }

    /// Returns the address, with the actual port.
    pub fn address(&self) -> &Endpoint {
        &self.started.address
    }

    /// Returns the address in the syntax of `--listen`: `127.0.0.1:8080`, `unix:/run/x`.
    pub fn listen(&self) -> String {
        listener::shown(&self.started.address)
    }

    /// Returns the policy by which connections reach the workers.
    pub fn policy(&self) -> AcceptPolicy {
        self.started.policy
    }

    /// Returns the counts of each worker so far. The counts are not all read at the same moment.
    pub fn counts(&self) -> Vec<ServeWorker> {
        self.started.workers.iter().map(|(_, counts)| counts.now()).collect()
    }

    /// Returns whether a worker has ended before it was stopped. The results contain the reason.
    pub fn has_failed(&self) -> bool {
        let dispatcher_thread = self.started.dispatcher_thread.as_ref();
        dispatcher_thread.is_some_and(DispatcherThread::has_failed)
            || self.started.workers.iter().any(|(thread, _)| thread.is_finished())
    }

    /// Returns a remark if the kernel has limited the accept queues to net.core.somaxconn. It reads the value in the network
    /// namespace of the calling thread.
    pub fn backlog_remark(&self) -> Option<Remark> {
        if !self.started.protocol.has_connections() {
            return None;
        }
        let most = fs::read_to_string("/proc/sys/net/core/somaxconn").ok()?.trim().parse::<u32>().ok()?;
        let asked = self.started.backlog;
        (asked > most).then(|| {
            let message = format!(
                "accept queues hold {} instead of {asked}: raise net.core.somaxconn, or ask for --backlog {most}",
                counted(most.into(), "connection")
            );
            Remark::new("backlog-cut", message)
        })
    }

    /// Ends all workers, closes their connections, and returns the results.
    pub fn stop(mut self) -> ServeResults {
        let counts: Vec<Arc<Counts>> =
            self.started.workers.iter().map(|(_, counts)| Arc::clone(counts)).collect();
        let (protocol, policy, listen) = (self.started.protocol, self.started.policy, self.listen());
        self.started.stop.set();
        let elapsed = self.begin.elapsed();
        self.started.path.take();
        drop(self);
        let workers: Vec<ServeWorker> = counts.iter().map(|counts| counts.now()).collect();
        let requests: u64 = workers.iter().map(|worker| worker.requests).sum();
        let shares: Vec<u64> = workers
            .iter()
            .map(|worker| if protocol.has_responses() { worker.requests } else { worker.accepted })
            .collect();
        ServeResults {
            listen,
            protocol: protocol.name().to_owned(),
            policy: policy.to_string(),
            elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
            requests_per_s: requests as f64 / elapsed.as_secs_f64().max(1e-9),
            jain: balance::jain(&shares),
            max_over_mean: balance::max_over_mean(&shares),
            workers,
        }
    }
}

/// A counter that one thread writes and others read, without atomic read-modify-write instructions.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds to the counter. Only the worker that owns the counter may call this.
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts of one worker, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts {
    pub(crate) accepted: Count,
    pub(crate) requests: Count,
    pub(crate) received_bytes: Count,
    pub(crate) sent_bytes: Count,
    errors: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    /// Counts a failure by name. Failures are rare, so a lock is acceptable.
    pub(crate) fn error(&self, name: &str) {
        self.errors(name, 1);
    }

    /// Counts several failures of one name.
    pub(crate) fn errors(&self, name: &str, more: u64) {
        if more == 0 {
            return;
        }
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        match errors.get_mut(name) {
            Some(count) => *count += more,
            None => drop(errors.insert(name.to_owned(), more)),
        }
    }

    /// Returns the current counts.
    pub(crate) fn now(&self) -> ServeWorker {
        ServeWorker {
            accepted: self.accepted.get(),
            requests: self.requests.get(),
            received_bytes: self.received_bytes.get(),
            sent_bytes: self.sent_bytes.get(),
            errors: self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// A flag for busy workers, and a descriptor that becomes readable for workers in epoll_wait().
#[derive(Clone, Debug)]
pub(crate) struct Stop(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    set: AtomicBool,
    ours: UnixStream,
    theirs: UnixStream,
}

impl Stop {
    pub(crate) fn new() -> io::Result<Stop> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok(Stop(Arc::new(Inner { set: AtomicBool::new(false), ours, theirs })))
    }

    /// Sets the flag and wakes all workers.
    pub(crate) fn set(&self) {
        self.0.set.store(true, Ordering::Release);
        // The end of the stream makes the descriptor readable in each epoll, and it stays readable.
        let _ = self.0.ours.shutdown(Shutdown::Both);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.set.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.theirs.as_fd()
    }
}
