//! Runs of all engines against real servers, honest and hostile.

mod arrivals;
mod failures;
mod hostile;
mod http2;
mod tls;
mod workloads;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bench::load::preflight::{Preflight, Snapshot, judge};
use fourtuple_bench::load::{EngineChoice, HttpRequest, Load, LoadError, Outcome, Target, Workload};
use fourtuple_bench::serve::{Protocol, Running, Serve};
use fourtuple_record::{LoadResults, Remark, ServeWorker};
use fourtuple_syscalls::{Endpoint, sock_diag, socket};
use fourtuple_testing::{in_namespace_of, process, test_of};

/// The two engines.
const ENGINES: [EngineChoice; 2] = [EngineChoice::Uring, EngineChoice::Epoll];

/// Runs `case` with each engine, in one network namespace.
fn with_each_engine(case: impl Fn(EngineChoice) + Send + 'static) {
    in_namespace_of(test_of(&case), move || ENGINES.into_iter().for_each(case));
}

/// The workload with a request and a response of one byte.
const SMALL: Workload = Workload::Crr { request: 1, response: 1 };

/// The server's protocol for [`SMALL`].
const SMALL_SERVED: Protocol = Protocol::Crr { request: 1, response: 1 };

/// The deadline only makes a failing test end.
const DEADLINE: Duration = Duration::from_secs(60);

/// Time after which a datagram is lost: the queue of the loopback device is that of all tests of the host, and the kernel drops what finds it
/// full.
const LOST: Duration = Duration::from_secs(10);

/// Returns a run with default settings, but a timeout that no operation of a working test reaches.
fn load(engine: EngineChoice, target: &str, workload: Workload) -> Load {
    Load { connections: 8, engine, timeout: DEADLINE, ..Load::new(target.parse().unwrap(), workload) }
}

fn get(target: &str) -> Workload {
    let target: Target = target.parse().unwrap();
    Workload::Http(HttpRequest {
        method: "GET".into(),
        path: target.path().to_owned(),
        authority: target.authority(),
        headers: Vec::new(),
        body: Vec::new(),
        asks_to_close: false,
    })
}

/// The outcome of a run.
#[derive(Debug)]
struct RunOutcome {
    results: LoadResults,
    remarks: Vec<Remark>,
    log: Option<String>,
    /// Duration of the whole call.
    took: Duration,
}

impl RunOutcome {
    fn error(&self, name: &str) -> u64 {
        self.results.errors.get(name).copied().unwrap_or(0)
    }

    fn errors(&self) -> Vec<&str> {
        self.results.errors.keys().map(String::as_str).collect()
    }

    /// Returns the remarks, except remarks that other load on the machine can cause.
    fn remarks_but_of_haste(&self) -> Vec<&str> {
        let of_haste = ["offered-rate-not-reached", "client-saturated", "server-stalled"];
        self.remarks().into_iter().filter(|id| !of_haste.contains(id)).collect()
    }

    fn remarks(&self) -> Vec<&str> {
        self.remarks.iter().map(|remark| remark.id.as_str()).collect()
    }

    /// Checks the invariants of each run.
    fn require_sound(&self) {
        let RunOutcome { results, .. } = self;
        let sum = |of: fn(&fourtuple_record::Second) -> u64| results.seconds.iter().map(of).sum::<u64>();
        assert_eq!(sum(|second| second.operations), results.operations, "{self:#?}");
        assert_eq!(sum(|second| second.connections), results.connections, "{self:#?}");
        assert_eq!(sum(|second| second.errors), results.errors.values().sum::<u64>(), "{self:#?}");
        let times = &results.latency_ns;
        assert_eq!(times.total.samples, results.operations);
        assert!(times.search.samples <= results.connections);
        for time in [times.search, times.handshake, times.first_byte, times.total] {
            let steps = [time.p50, time.p99, time.p999, time.max];
            assert!(steps.is_sorted() && time.mean <= time.max, "{time:?}");
        }
        assert!(results.operations == 0 || results.elapsed_ns > 0);
        assert!(u128::from(results.elapsed_ns) <= self.took.as_nanos());
    }
}

/// Executes `once` with `length` as the length of its run, and with longer ones until the run was long enough: on a loaded host a run
/// may end before the events for which the test waits. Returns the last run, or `None` after a skip.
fn long_enough<T>(
    length: Duration,
    mut once: impl FnMut(Duration) -> Option<T>,
    is_enough: impl Fn(&T) -> bool,
) -> Option<T> {
    let mut lengths = [length, 4 * length, 16 * length].into_iter();
    loop {
        let ran = once(lengths.next()?)?;
        if is_enough(&ran) || lengths.len() == 0 {
            return Some(ran);
        }
    }
}

/// Executes `once` until its run is as expected, 20 times at most: a busy host may stop a thread for seconds, and meanwhile a limit of the run
/// or of its server passes. Returns the last run, or `None` after a skip.
fn until_expected<T>(once: impl FnMut() -> Option<T>, is_expected: impl Fn(&T) -> bool) -> Option<T> {
    process::until_expected(20, once, |ran| ran.as_ref().is_none_or(&is_expected))
}

/// Executes the run in the namespace of this thread, even if the preflight would refuse it. Returns `None`, with a message,
/// if the engine is not available.
fn run(test: &str, load: &Load) -> Option<RunOutcome> {
    run_until(test, load, &AtomicBool::new(false))
}

fn run_until(test: &str, load: &Load, stop: &AtomicBool) -> Option<RunOutcome> {
    match attempt(load, stop) {
        Ok(ran) => Some(ran),
        Err(LoadError::Engine(why)) => {
            fourtuple_testing::skip(test, "uring", &why);
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Executes the run or returns its error. A run that does not end by itself is stopped and fails the test.
fn attempt(load: &Load, stop: &AtomicBool) -> Result<RunOutcome, LoadError> {
    attempt_after(|| (), load, stop)
}

/// Does the same as [`attempt`], with `before` between the preflight and the run.
fn attempt_after(before: impl FnOnce(), load: &Load, stop: &AtomicBool) -> Result<RunOutcome, LoadError> {
    let endpoints = load.resolve()?;
    let (need, preflight) = (load.need(), preflight(load, &endpoints[0]));
    let begun = Instant::now();
    let overdue = AtomicBool::new(false);
    let (over, is_over) = std::sync::mpsc::channel::<()>();
    let outcome: Result<Outcome, LoadError> = thread::scope(|scope| {
        let (overdue, stop) = (&overdue, stop);
        scope.spawn(move || {
            if is_over.recv_timeout(2 * DEADLINE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                overdue.store(true, Ordering::Relaxed);
                stop.store(true, Ordering::Relaxed);
            }
        });
        before();
        let outcome = load.run(&endpoints, &preflight, stop, |_| ());
        drop(over);
        outcome
    });
    assert!(!overdue.load(Ordering::Relaxed), "the run did not end by itself");
    let took = begun.elapsed();
    let outcome = outcome?;
    let log = outcome.log.clone();
    let (results, remarks) = outcome.results(load, &need, &preflight, None);
    let ran = RunOutcome { results, remarks, log, took };
    ran.require_sound();
    Ok(ran)
}

fn preflight(load: &Load, endpoint: &Endpoint) -> Preflight {
    let proc = Path::new("/proc");
    let snapshot = match endpoint {
        Endpoint::Inet(destination) => {
            Snapshot::read(proc, load.transport(), *destination, load.sources.addresses())
        }
        Endpoint::Unix(path) => Snapshot::read_unix(proc, path),
    };
    judge(&snapshot.unwrap(), &load.need())
}

fn serve(protocol: Protocol) -> Serve {
    serve_at(protocol, "127.0.0.1:4000".parse::<SocketAddr>().unwrap().into())
}

fn serve_at(protocol: Protocol, listen: Endpoint) -> Serve {
    let mut serve = Serve::new(protocol, listen);
    serve.workers = 2;
    serve
}

/// Returns the sum of the counts of all workers.
fn sum(workers: Vec<ServeWorker>) -> ServeWorker {
    let mut sum = ServeWorker::default();
    for worker in workers {
        sum.accepted += worker.accepted;
        sum.requests += worker.requests;
        sum.received_bytes += worker.received_bytes;
        sum.sent_bytes += worker.sent_bytes;
        for (name, count) in worker.errors {
            *sum.errors.entry(name).or_default() += count;
        }
    }
    sum
}

/// Stops the server and returns the sum of the counts of its workers.
fn stop(running: Running) -> ServeWorker {
    sum(running.stop().workers)
}

/// Counts the TIME_WAIT sockets to `destination` in this namespace, by local address.
fn time_wait(destination: SocketAddr) -> BTreeMap<IpAddr, u64> {
    let filter =
        sock_diag::Filter { transport: socket::Transport::Tcp, source: None, source_port: None, destination };
    let mut found = BTreeMap::new();
    sock_diag::each(&filter, |entry| {
        if entry.state == sock_diag::state::TIME_WAIT {
            *found.entry(entry.local.ip()).or_default() += 1;
        }
    })
    .unwrap();
    found
}

/// Counts all TIME_WAIT sockets in this namespace.
fn all_time_wait() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/sockstat").unwrap();
    let line = text.lines().find(|line| line.starts_with("TCP:")).unwrap();
    let mut words = line.split_whitespace();
    words.find(|word| *word == "tw").unwrap();
    words.next().unwrap().parse().unwrap()
}

/// Starts a server in this namespace that calls `talk` for each connection, on a thread per connection.
fn answer(talk: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        // A thread that outlives the test ends with its process.
        while let Ok((stream, _)) = listener.accept() {
            let talk = talk.clone();
            thread::spawn(move || {
                stream.set_read_timeout(Some(2 * DEADLINE)).unwrap();
                talk(stream)
            });
        }
    });
    address
}

/// Waits until `happened` returns true.
fn until(mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < DEADLINE, "it never happened");
        thread::sleep(Duration::from_millis(1));
    }
}
