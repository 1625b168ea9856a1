//! One trial: workers, clients and a number of queries in a namespace. A query is a connect(), one byte each way and a
//! close(); the client closes first, so the TIME_WAIT socket is the client's.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, SourcePool};
use fourtuple::listen::{Acceptor, ListenError, Recycle};
use fourtuple_observe::trace::Instrument;
use fourtuple_record::{LabLocksSettings, errno};
use fourtuple_syscalls::{errno_name, option, resource};

use crate::lab::locks::Setup;
use crate::lab::namespace::{Family, Namespace};
use crate::lab::pool::workers::Pool;
use crate::lab::{LabError, Start, Watch, start_thread};

/// Port of the server, below every range of the clients.
const SERVER: u16 = 80;

/// Interval at which a worker without events checks the stop flag.
const GLANCE: Duration = Duration::from_millis(500);

/// Maximum wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Number of queries that a client takes from the shared counter at a time, so that all clients end at about the same time.
const HANDFUL: u64 = 8;

/// The result of a trial.
#[derive(Clone, Debug, Default)]
pub(super) struct Trial {
    pub(super) queries: u64,
    /// Time from the first connect() to the last close().
    pub(super) elapsed: Duration,
    /// CPU time of workers and clients.
    pub(super) cpu: Duration,
    /// Queries that failed, by the name of the errno.
    pub(super) errors: BTreeMap<String, u64>,
    /// Whether the watcher ended the trial.
    pub(super) cut: bool,
}

impl Trial {
    /// Returns the rate; `None` if no query was answered.
    pub(super) fn queries_per_s(&self) -> Option<f64> {
        (self.queries > 0).then(|| self.queries as f64 / self.elapsed.as_secs_f64().max(1e-9))
    }

    /// Returns the CPU time per query; `None` if no query was answered.
    pub(super) fn cpu_ns_per_query(&self) -> Option<f64> {
        (self.queries > 0).then(|| self.cpu.as_nanos().max(1) as f64 / self.queries as f64)
    }
}

/// Runs a trial. `around` receives a function that makes the queries, and calls it: a trace begins before the call and ends
/// after it.
pub(super) fn run<R: Send>(
    settings: &LabLocksSettings,
    setup: Setup,
    watch: &Watch<'_>,
    around: impl FnOnce(&mut dyn FnMut() -> Trial) -> R + Send,
) -> Result<(R, Trial), LabError> {
    Namespace::run(|namespace| {
        namespace.set_range(setup.range)?;
        // The default, 2, reuses ports in TIME_WAIT after a second, on loopback only.
        namespace.set("net.ipv4.tcp_tw_reuse", "0")?;
        // Beyond this limit sockets skip TIME_WAIT and their ports are free at once; the default depends on the host's
        // memory.
        namespace.set("net.ipv4.tcp_max_tw_buckets", "262144")?;
        let server = SocketAddr::new(Family::V4.loopback(), SERVER);
        let workers = settings.workers as usize;
        let pool = Pool::of(&server.into(), setup.policy, workers, Recycle::Never, serve)?;
        let sources = namespace.sources(Family::V4, setup.sources)?;
        let clients = (0..settings.clients as usize)
            .map(|number| dialers(server, setup, &sources, number, settings.clients as usize))
            .collect::<Result<Vec<_>, _>>()?;
        let mut asked = Ok(Trial::default());
        let mut queries = || {
            asked = ask(settings, &clients, watch);
            asked.as_ref().cloned().unwrap_or_default()
        };
        let result = around(&mut queries);
        let mut trial = asked?;
        trial.cpu += pool.end()?;
        Ok((result, trial))
    })
}

/// Returns a dialer for each source of client `number`. Clients share no dialer, so they contend in the kernel only.
fn dialers(
    server: SocketAddr,
    setup: Setup,
    sources: &[IpAddr],
    number: usize,
    clients: usize,
) -> Result<Vec<Dialer>, LabError> {
    let own = sources.iter().skip(number % sources.len()).step_by(clients.min(sources.len()));
    own.map(|source| {
        let dialer = Dialer::builder(server).sources(SourcePool::one(*source)).strategy(setup.strategy);
        Ok(dialer.without_census().build()?)
    })
    .collect()
}

/// Runs all queries, with all clients at once.
fn ask(settings: &LabLocksSettings, clients: &[Vec<Dialer>], watch: &Watch<'_>) -> Result<Trial, LabError> {
    let left = AtomicU64::new(settings.queries);
    let together = Start::default();
    let ask = |number: usize, dialers: &[Dialer]| {
        if !together.wait() {
            return Trial::default();
        }
        client(dialers, &left, watch.stop, |left| {
            // One client reports the progress of all.
            if number == 0 {
                watch.progress.at(settings.queries.saturating_sub(left));
            }
        })
    };
    let ask = &ask;
    thread::scope(|scope| -> Result<Trial, LabError> {
        let threads: Result<Vec<_>, LabError> = clients
            .iter()
            .enumerate()
            .map(|(number, dialers)| start_thread(scope, move || ask(number, dialers)))
            .collect();
        let threads = threads.inspect_err(|_| together.cancel())?;
        together.begin(threads.len());
        let begun = Instant::now();
        let mut trial = Trial::default();
        for thread in threads {
            let part = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            trial.queries += part.queries;
            trial.cpu += part.cpu;
            for (errno, number) in part.errors {
                *trial.errors.entry(errno).or_default() += number;
            }
        }
        trial.elapsed = begun.elapsed();
        trial.cut = watch.stopped();
        Ok(trial)
    })
}

/// Runs one client. Calls `at` now and then with the number of queries left for all clients.
fn client(dialers: &[Dialer], left: &AtomicU64, stop: &AtomicBool, at: impl Fn(u64)) -> Trial {
    let mut part = Trial::default();
    let mut turns = dialers.iter().cycle();
    loop {
        let take = |left: u64| Some(left - left.min(HANDFUL));
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        if before == 0 || stop.load(Ordering::Relaxed) {
            break;
        }
        for dialer in turns.by_ref().take(before.min(HANDFUL) as usize) {
            match query(dialer) {
                Ok(()) => part.queries += 1,
                Err(errno) => *part.errors.entry(errno).or_default() += 1,
            }
        }
        at(before);
    }
    part.cpu = resource::thread_cpu_time();
    part
}

/// Makes one query; returns the name of the errno if the query fails.
fn query(dialer: &Dialer) -> Result<(), String> {
    let (mut stream, _) = dialer.dial().map_err(|error| match error {
        DialError::PortsExhausted { .. } => errno::EADDRNOTAVAIL.to_owned(),
        DialError::Refused { .. } => errno::ECONNREFUSED.to_owned(),
        DialError::Call { error, .. } => errno_name(&error).to_string(),
        other => other.to_string(),
    })?;
    exchange(&mut stream).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => "closed without an answer".to_owned(),
        // SO_RCVTIMEO expires with EAGAIN.
        io::ErrorKind::WouldBlock => "timeout".to_owned(),
        _ => errno_name(&error).to_string(),
    })
}

fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    option::set_receive_timeout(stream.as_fd(), PATIENCE)?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// Runs one worker: answers each byte, and closes after the client. Returns the CPU time of the thread.
fn serve(acceptor: &mut Acceptor, stop: &AtomicBool) -> Result<Duration, ListenError> {
    while !stop.load(Ordering::Relaxed) {
        let Some(mut connection) = acceptor.next(Some(GLANCE))? else { continue };
        match connection.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => {
                if connection.write_all(b"!").is_ok() {
                    connection.response_sent();
                    acceptor.keep(connection)?;
                }
            }
            Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
                acceptor.keep(connection)?;
            }
            // The client has closed the connection and has counted the query.
            Err(_) => {}
        }
    }
    Ok(resource::thread_cpu_time())
}

/// Waits for locks, of one trial or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waits {
    /// Number of queries during which waits were counted.
    pub(super) queries: u64,
    pub(super) waits: u64,
    pub(super) wait_ns: u64,
    /// Count and time by class.
    pub(super) classes: BTreeMap<String, (u64, u64)>,
}

impl Waits {
    /// Adds the waits of a trial with `queries` queries.
    pub(super) fn add(&mut self, of_trial: &Waits, queries: u64) {
        self.queries += queries;
        self.waits += of_trial.waits;
        self.wait_ns += of_trial.wait_ns;
        for (class, (count, ns)) in &of_trial.classes {
            let sum = self.classes.entry(class.clone()).or_default();
            sum.0 += count;
            sum.1 += ns;
        }
    }

    pub(super) fn per_query(&self, number: u64) -> f64 {
        number as f64 / self.queries.max(1) as f64
    }
}

/// The waits counted during the queries.
#[derive(Clone, Debug)]
pub(super) struct CountedWaits {
    pub(super) waits: Waits,
    /// Waits that the trace cannot see.
    pub(super) blind_spots: Vec<String>,
    /// Losses of the trace, one line each.
    pub(super) lost: Vec<String>,
}

/// Counts lock waits of this process while `queries` run. Returns the reason if waits cannot be counted; `queries` is then
/// not run.
pub(super) fn count(queries: &mut dyn FnMut()) -> Result<CountedWaits, String> {
    let locks = fourtuple_observe::trace::Locks {
        process: Some(process::id()),
        ..fourtuple_observe::trace::Locks::default()
    };
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (sender, attached) = mpsc::channel();
        let begun = move || {
            // The receiver is gone only after a panic of this thread, and the result is not needed then.
            let _ = sender.send(());
        };
        let trace =
            start_thread(scope, || locks.run(&stop, begun, |_| {})).map_err(|error| error.to_string())?;
        // The sender is dropped unused if no program could be attached.
        if attached.recv().is_ok() {
            queries();
        }
        stop.store(true, Ordering::Relaxed);
        let outcome = trace.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let outcome = outcome.map_err(|error| error.to_string())?;
        let results = outcome.results;
        let classes = results.classes.into_iter().map(|class| (class.class, (class.waits, class.wait_ns)));
        Ok(CountedWaits {
            waits: Waits {
                queries: 0,
                waits: results.waits,
                wait_ns: results.wait_ns,
                classes: classes.collect(),
            },
            blind_spots: results.blind_spots,
            lost: outcome.validity.into_iter().map(|remark| remark.message).collect(),
        })
    })
}
