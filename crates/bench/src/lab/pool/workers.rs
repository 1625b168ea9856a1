//! The workers of a pool, as threads behind one [`ListenerGroup`].

use std::fs;
use std::hint;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple::listen::{
    AcceptPolicy, AcceptWaker, Acceptor, Connection, Endpoint, ListenError, ListenerGroup,
    ListenerGroupBuilder, Recycle, SeatStats,
};
use fourtuple_syscalls::resource::{self, monotonic_ns};
use fourtuple_syscalls::schedule;

use crate::lab::LabError;
use crate::lab::pool::client::nanos;
use crate::lab::pool::{Spend, wire};

/// Backlog of the accept queue: space for all clients at once, even if they arrive without a pause.
pub(crate) const BACKLOG: u32 = 4096;

/// Maximum wait until the workers' counters agree with the clients' counts; workers normally count at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Start of the names of the workers' threads.
const WORKER: &str = "worker ";

/// A worker's serving loop, which runs until told to stop and returns the CPU time of its thread.
pub(crate) trait Serve:
    Fn(&mut Acceptor, &AtomicBool) -> Result<Duration, ListenError> + Clone + Send + 'static
{
}

impl<F> Serve for F where
    F: Fn(&mut Acceptor, &AtomicBool) -> Result<Duration, ListenError> + Clone + Send + 'static
{
}

/// A pool of worker threads, which serve until [`Pool::end`].
pub(crate) struct Pool {
    group: ListenerGroup,
    stop: Arc<AtomicBool>,
    threads: Vec<WorkerThread>,
    count: usize,
}

/// The thread of a worker, or of the dispatcher.
struct WorkerThread {
    thread: JoinHandle<Result<Duration, ListenError>>,
    waker: Option<AcceptWaker>,
}

impl Pool {
    /// Starts workers that do the work which HTTP requests ask for.
    pub(crate) fn start(
        endpoint: &Endpoint,
        policy: AcceptPolicy,
        count: usize,
        spend: Spend,
        recycle: Recycle,
    ) -> Result<Pool, LabError> {
        Pool::of(endpoint, policy, count, recycle, move |acceptor, stop| serve(acceptor, spend, stop))
    }

    /// Opens the group and starts its workers in the order of their numbers: with `Exclusive` the order of registration decides
    /// which worker is woken first. Each worker runs `serve` until told to stop.
    pub(crate) fn of(
        endpoint: &Endpoint,
        policy: AcceptPolicy,
        count: usize,
        recycle: Recycle,
        serve: impl Serve,
    ) -> Result<Pool, LabError> {
        let listen =
            ListenerGroupBuilder::at(endpoint.clone()).policy(policy).max_workers(count).backlog(BACKLOG);
        let group = listen.recycle(recycle).open()?;
        let mut pool = Pool { group, stop: Arc::default(), threads: Vec::new(), count };
        for _ in 0..count {
            pool.start_worker(serve.clone())?;
        }
        if pool.group.policy() == AcceptPolicy::Dispatcher {
            pool.start_dispatcher()?;
        }
        Ok(pool)
    }

    /// Starts the dispatcher thread, which accepts for all workers; its CPU time is added to the workers' time.
    fn start_dispatcher(&mut self) -> Result<(), LabError> {
        let mut dispatcher = self.group.dispatcher()?;
        let (waker, stop) = (dispatcher.waker(), Arc::clone(&self.stop));
        let thread = thread::Builder::new()
            .name("dispatcher".to_owned())
            .spawn(move || dispatcher.run(&stop).map(|()| resource::thread_cpu_time()))
            .map_err(LabError::call("start a dispatcher"))?;
        self.threads.push(WorkerThread { thread, waker: Some(waker) });
        Ok(())
    }

    fn start_worker(&mut self, serve: impl Serve) -> Result<(), LabError> {
        let (group, stop) = (self.group.clone(), Arc::clone(&self.stop));
        let (sender, joined) = mpsc::channel();
        let work = move || {
            let mut acceptor = match group.join() {
                Ok(acceptor) => acceptor,
                Err(error) => {
                    // The error is reported here once; the thread then ends without error.
                    let _ = sender.send(Err(error));
                    return Ok(Duration::ZERO);
                }
            };
            let _ = sender.send(Ok(acceptor.waker()));
            serve(&mut acceptor, &stop)
        };
        let thread = thread::Builder::new()
            .name(format!("{WORKER}{}", self.threads.len()))
            .spawn(work)
            .map_err(LabError::call("start a worker"))?;
        let (waker, result) = match joined.recv() {
            Ok(Ok(waker)) => (Some(waker), Ok(())),
            Ok(Err(error)) => (None, Err(error.into())),
            // The thread panicked; `finish` joins the thread and resumes the panic.
            Err(_) => (None, Ok(())),
        };
        self.threads.push(WorkerThread { thread, waker });
        result
    }

    /// Returns the listener group of the workers.
    pub(crate) fn group(&self) -> &ListenerGroup {
        &self.group
    }

    /// Returns the endpoint on which the group listens.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        self.group.endpoint()
    }

    /// Returns the current counters of each worker.
    fn stats(&self) -> Vec<SeatStats> {
        let mut stats = self.group.stats();
        stats.truncate(self.count);
        stats
    }

    /// Returns whether all workers sleep, as far as procfs tells.
    pub(crate) fn is_waiting(&self) -> bool {
        let Ok(threads) = fs::read_dir("/proc/self/task") else { return true };
        // Process ID, name in parentheses, state: `7 (worker 0) S`.
        let is_busy = |stat: String| stat.contains(WORKER) && !stat.contains(") S ");
        threads
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("stat")).ok())
            .all(|stat| !is_busy(stat))
    }

    /// Returns the counters of each worker once they cover the clients' counts: at least `requests` answers, and at most
    /// `open` open connections. A client receives its answer shortly before the worker counts the request.
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

    /// Ends the workers and returns the CPU time of all their threads.
    pub(crate) fn end(mut self) -> Result<Duration, LabError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Duration, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .iter()
            .filter_map(|worker_thread| worker_thread.waker.as_ref())
            .for_each(AcceptWaker::wake);
        let mut cpu = Duration::ZERO;
        let mut failed = None;
        for worker_thread in self.threads.drain(..) {
            match worker_thread.thread.join() {
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
        // A caller that needs the error calls `end` instead.
        let _ = self.finish();
    }
}

/// Longest piece of work between two checks of the stop flag; longer work is split.
const NAP: Duration = Duration::from_millis(20);

/// Interval at which a worker without events checks the stop flag.
const GLANCE: Duration = Duration::from_millis(500);

/// The next step for a connection.
enum Next {
    Keep,
    Close,
}

/// Serves connections until told to stop; returns the CPU time that this thread has used.
pub(crate) fn serve(
    acceptor: &mut Acceptor,
    spend: Spend,
    stop: &AtomicBool,
) -> Result<Duration, ListenError> {
    // With the default timer slack each sleep takes up to 50 us longer than the service time; X-End reports the true end.
    let _ = schedule::sleep_precisely();
    let mut answer = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Some(mut connection) = acceptor.next(Some(GLANCE))? else { continue };
        let begun_ns = monotonic_ns();
        match serve_one(&mut connection, acceptor.seat(), begun_ns, spend, stop, &mut answer) {
            Next::Keep => acceptor.keep(connection)?,
            Next::Close => drop(connection),
        }
    }
    Ok(resource::thread_cpu_time())
}

fn serve_one(
    connection: &mut Connection,
    seat: usize,
    begun_ns: u64,
    spend: Spend,
    stop: &AtomicBool,
    answer: &mut Vec<u8>,
) -> Next {
    let mut buffer = [0; 2048];
    let request = loop {
        // A client that sends anything but HTTP requests gets its connection closed.
        match wire::parse_request(&connection.carry) {
            Ok(Some(request)) => break request,
            Ok(None) => {}
            Err(_) => return Next::Close,
        }
        match connection.read(&mut buffer) {
            Ok(0) => return Next::Close,
            Ok(count) => connection.carry.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Next::Keep,
            Err(_) => return Next::Close,
        }
    };
    connection.carry.drain(..request.length);
    work(request.work, spend, stop);
    let close = request.close || connection.should_close();
    answer.clear();
    // The end is recorded before the answer is written, so the time for the write counts as wait.
    wire::write_response(answer, seat, begun_ns, monotonic_ns(), close);
    if connection.write_all(answer).is_err() {
        return Next::Close;
    }
    connection.response_sent();
    if close { Next::Close } else { Next::Keep }
}

fn work(time: Duration, spend: Spend, stop: &AtomicBool) {
    if time.is_zero() {
        return;
    }
    let until = monotonic_ns().saturating_add(nanos(time));
    loop {
        let left = until.saturating_sub(monotonic_ns());
        if left == 0 || stop.load(Ordering::Relaxed) {
            return;
        }
        match spend {
            // A sleep may end early if io_uring notifies the thread; the loop then sleeps on.
            Spend::Sleep => thread::sleep(Duration::from_nanos(left).min(NAP)),
            Spend::Spin => hint::spin_loop(),
        }
    }
}
