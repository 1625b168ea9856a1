//! A running server.

use std::fs;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, ListenerGroup, SocketPath};
use fourtuple_measure::balance;
use fourtuple_record::{Remark, ServeResults, ServeWorker};
use fourtuple_syscalls::Endpoint;

use crate::counts::Counts;
use crate::dispatcher_thread::DispatcherThread;
use crate::listener;
use crate::protocol::Protocol;
use crate::stop::Stop;

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
                "accept queues hold {most} connections instead of {asked}: raise net.core.somaxconn, or ask for --backlog {most}"
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
