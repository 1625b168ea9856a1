//! A server at work.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use fourtuple::listen::{OwnPath, Policy, Waker};
use fourtuple_measure::balance;
use fourtuple_record::{ServeResults, ServeWorker};
use fourtuple_syscalls::Endpoint;

use crate::counts::Counts;
use crate::listener;
use crate::serve::Protocol;
use crate::stop::Stop;

/// Workers and what belongs to them; ends them when it is dropped.
pub(crate) struct Started {
    pub(crate) protocol: Protocol,
    pub(crate) address: Endpoint,
    pub(crate) policy: Policy,
    pub(crate) path: Option<OwnPath>,
    pub(crate) stop: Stop,
    pub(crate) workers: Vec<(JoinHandle<()>, Arc<Counts>)>,
    /// Of those that wait as the policy says.
    pub(crate) wakers: Vec<Waker>,
}

impl Drop for Started {
    fn drop(&mut self) {
        // Nobody new may come before those who listen are gone.
        self.path.take();
        self.stop.set();
        self.wakers.iter().for_each(Waker::wake);
        for (thread, counts) in self.workers.drain(..) {
            if thread.join().is_err() {
                counts.error("worker-ended: panic");
            }
        }
    }
}

/// A server at work; dropping it ends it.
pub struct Running {
    started: Started,
    begin: Instant,
}

impl Running {
    pub(crate) fn new(started: Started, begin: Instant) -> Running {
        Running { started, begin }
    }

    /// Where it can be reached, with the real port.
    pub fn address(&self) -> &Endpoint {
        &self.started.address
    }

    /// The same as `--listen` takes it: `127.0.0.1:8080`, `unix:/run/x`.
    pub fn listen(&self) -> String {
        listener::shown(&self.started.address)
    }

    /// How connections come to the workers.
    pub fn policy(&self) -> Policy {
        self.started.policy
    }

    /// What every worker has done so far. Each number is current, but they are not all of the same moment.
    pub fn counts(&self) -> Vec<ServeWorker> {
        self.started.workers.iter().map(|(_, counts)| counts.now()).collect()
    }

    /// Whether a worker has ended by itself, which none should: the results will say why.
    pub fn has_failed(&self) -> bool {
        self.started.workers.iter().any(|(thread, _)| thread.is_finished())
    }

    /// Ends all workers, closing what is open, and says what they did.
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
            .map(|worker| if protocol == Protocol::Sink { worker.accepted } else { worker.requests })
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
