//! The workers of a pool, as threads behind one [`Group`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple::listen::{Acceptor, Endpoint, Group, Listen, ListenError, Policy, Recycle, SeatStats, Waker};
use fourtuple_syscalls::resource;

use super::mix::Spend;
use super::worker;
use crate::LabError;

/// Length of the accept queue: room for all clients at once, also where they come without a pause.
pub(crate) const BACKLOG: u32 = 4096;

/// Workers count and close at once; whoever has not after this time never will.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a worker does until told to stop; gives the CPU time that its thread has used.
pub(crate) trait Serve:
    Fn(&mut Acceptor, &AtomicBool) -> Result<Duration, ListenError> + Clone + Send + 'static
{
}

impl<F> Serve for F where
    F: Fn(&mut Acceptor, &AtomicBool) -> Result<Duration, ListenError> + Clone + Send + 'static
{
}

/// Workers that serve until they are ended.
pub(crate) struct Pool {
    group: Group,
    stop: Arc<AtomicBool>,
    hands: Vec<Hand>,
    count: usize,
}

/// The thread of a worker, or of the dispatcher.
struct Hand {
    thread: JoinHandle<Result<Duration, ListenError>>,
    waker: Option<Waker>,
}

impl Pool {
    /// Workers that do what requests over HTTP ask for.
    pub(crate) fn start(
        endpoint: &Endpoint,
        policy: Policy,
        count: usize,
        spend: Spend,
        recycle: Recycle,
    ) -> Result<Pool, LabError> {
        Pool::of(endpoint, policy, count, recycle, move |acceptor, stop| worker::serve(acceptor, spend, stop))
    }

    /// Opens the group and starts its workers one after the other, so that their order is that of their numbers: with
    /// `Exclusive` it decides who is woken first. Each runs `serve` until told to stop.
    pub(crate) fn of(
        endpoint: &Endpoint,
        policy: Policy,
        count: usize,
        recycle: Recycle,
        serve: impl Serve,
    ) -> Result<Pool, LabError> {
        let listen = Listen::at(endpoint.clone()).policy(policy).seats(count).backlog(BACKLOG);
        let group = listen.recycle(recycle).open()?;
        let mut pool = Pool { group, stop: Arc::default(), hands: Vec::new(), count };
        for _ in 0..count {
            pool.hire(serve.clone())?;
        }
        if pool.group.policy() == Policy::Dispatcher {
            pool.hire_dispatcher()?;
        }
        Ok(pool)
    }

    /// Starts the thread that accepts for all; its CPU time is theirs.
    fn hire_dispatcher(&mut self) -> Result<(), LabError> {
        let mut dispatcher = self.group.dispatcher()?;
        let (waker, stop) = (dispatcher.waker(), Arc::clone(&self.stop));
        let thread = thread::Builder::new()
            .name("dispatcher".to_owned())
            .spawn(move || dispatcher.run(&stop).map(|()| resource::thread_cpu_time()))
            .map_err(LabError::call("start a dispatcher"))?;
        self.hands.push(Hand { thread, waker: Some(waker) });
        Ok(())
    }

    fn hire(&mut self, serve: impl Serve) -> Result<(), LabError> {
        let (group, stop) = (self.group.clone(), Arc::clone(&self.stop));
        let (sender, joined) = mpsc::channel();
        let work = move || {
            let mut acceptor = match group.join() {
                Ok(acceptor) => acceptor,
                Err(error) => {
                    // It is told here, so that it is not told again at the end.
                    let _ = sender.send(Err(error));
                    return Ok(Duration::ZERO);
                }
            };
            let _ = sender.send(Ok(acceptor.waker()));
            serve(&mut acceptor, &stop)
        };
        let thread = thread::Builder::new()
            .name(format!("worker {}", self.hands.len()))
            .spawn(work)
            .map_err(LabError::call("start a worker"))?;
        let (waker, result) = match joined.recv() {
            Ok(Ok(waker)) => (Some(waker), Ok(())),
            Ok(Err(error)) => (None, Err(error.into())),
            // It panicked, which is found by waiting for it.
            Err(_) => (None, Ok(())),
        };
        self.hands.push(Hand { thread, waker });
        result
    }

    /// The group of its workers.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Where it listens.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        self.group.endpoint()
    }

    /// What each worker has done so far.
    fn stats(&self) -> Vec<SeatStats> {
        let mut stats = self.group.stats();
        stats.truncate(self.count);
        stats
    }

    /// What each worker has done, when all of them have counted what clients have got: `requests` answers, and no more than
    /// `open` connections left. A client has its answer a moment before its worker has counted it.
    pub(crate) fn settled(&self, requests: u64, open: u64) -> Vec<SeatStats> {
        let begun = Instant::now();
        loop {
            let stats = self.stats();
            let sum = |of: fn(&SeatStats) -> u64| stats.iter().map(of).sum::<u64>();
            let settled = sum(|seat| seat.requests) >= requests && sum(|seat| seat.open) <= open;
            if settled || begun.elapsed() > PATIENCE {
                return stats;
            }
            thread::sleep(Duration::from_micros(500));
        }
    }

    /// Ends the workers, and gives the CPU time that all their threads have used.
    pub(crate) fn end(mut self) -> Result<Duration, LabError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Duration, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        self.hands.iter().filter_map(|hand| hand.waker.as_ref()).for_each(Waker::wake);
        let mut cpu = Duration::ZERO;
        let mut failed = None;
        for hand in self.hands.drain(..) {
            match hand.thread.join() {
                Ok(Ok(time)) => cpu += time,
                Ok(Err(error)) => drop(failed.get_or_insert(error)),
                Err(panic) if !thread::panicking() => std::panic::resume_unwind(panic),
                Err(_) => {}
            }
        }
        failed.map_or(Ok(cpu), |error| Err(error.into()))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Whoever wants to know what failed has called `end`.
        let _ = self.finish();
    }
}
