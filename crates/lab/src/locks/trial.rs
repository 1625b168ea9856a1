//! One trial: workers and clients in a namespace of their own, and a number of queries. Connect, a byte there, a byte back,
//! close; the client closes first, and has the TIME_WAIT.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, SourcePool};
use fourtuple::listen::{Acceptor, ListenError, Recycle};
use fourtuple_syscalls::{errno_name, option, resource};

use super::Locks;
use super::change::Setup;
use crate::namespace::{Family, Namespace};
use crate::pool::workers::Pool;
use crate::{LabError, Watch};

/// Port of the server: below every range that clients have here.
const SERVER: u16 = 80;

/// A worker that nobody wakes looks so often whether it is to stop.
const GLANCE: Duration = Duration::from_millis(500);

/// No answer takes this long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Queries that a client takes at a time from those that are left, so that all clients end at about the same time.
const HANDFUL: u64 = 8;

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Trial {
    /// Queries answered.
    pub(super) queries: u64,
    /// From the first connect() to the last close().
    pub(super) elapsed: Duration,
    /// CPU time of workers and clients.
    pub(super) cpu: Duration,
    /// Queries that failed, by the name of the errno.
    pub(super) errors: BTreeMap<String, u64>,
    /// The watcher ended it.
    pub(super) cut: bool,
}

impl Trial {
    /// `None`: nothing was answered.
    pub(super) fn queries_per_s(&self) -> Option<f64> {
        (self.queries > 0).then(|| self.queries as f64 / self.elapsed.as_secs_f64().max(1e-9))
    }

    /// `None`: nothing was answered.
    pub(super) fn cpu_ns_per_query(&self) -> Option<f64> {
        (self.queries > 0).then(|| self.cpu.as_nanos().max(1) as f64 / self.queries as f64)
    }
}

/// Runs it. `around` is called with what the queries are, and calls it: whoever traces begins before and ends after.
pub(super) fn run<R: Send>(
    settings: &Locks,
    setup: Setup,
    watch: &Watch<'_>,
    around: impl FnOnce(&mut dyn FnMut() -> Trial) -> R + Send,
) -> Result<(R, Trial), LabError> {
    Namespace::run(|namespace| {
        namespace.set_range(setup.range)?;
        // 2, the default, takes ports in TIME_WAIT over on loopback after a second, and nowhere else.
        namespace.set("net.ipv4.tcp_tw_reuse", "0")?;
        // Beyond it sockets skip TIME_WAIT, and ports come back at once; the default follows the host's memory.
        namespace.set("net.ipv4.tcp_max_tw_buckets", "262144")?;
        let server = SocketAddr::new(Family::V4.loopback(), SERVER);
        let workers = settings.workers as usize;
        let pool = Pool::of(&server.into(), setup.policy, workers, Recycle::Never, serve)?;
        let sources = namespace.sources(Family::V4, setup.sources)?;
        let clients = (0..settings.clients as usize)
            .map(|number| dialers(server, setup, &sources, number, settings.clients as usize))
            .collect::<Result<Vec<_>, _>>()?;
        let mut trial = Trial::default();
        let mut queries = || {
            trial = ask(settings, &clients, watch);
            trial.clone()
        };
        let result = around(&mut queries);
        trial.cpu += pool.end()?;
        Ok((result, trial))
    })
}

/// A dialer for each of the sources that are client `number`'s: none is shared, so that clients meet in the kernel alone.
fn dialers(
    server: SocketAddr,
    setup: Setup,
    sources: &[IpAddr],
    number: usize,
    clients: usize,
) -> Result<Vec<Dialer>, LabError> {
    let own = sources.iter().skip(number % sources.len()).step_by(clients.min(sources.len()));
    own.map(|source| {
        let dialer = Dialer::to(server).sources(SourcePool::one(*source)).strategy(setup.strategy);
        Ok(dialer.without_census().build()?)
    })
    .collect()
}

/// All queries, from all clients at once.
fn ask(settings: &Locks, clients: &[Vec<Dialer>], watch: &Watch<'_>) -> Trial {
    let left = AtomicU64::new(settings.queries.into());
    let ready = Barrier::new(clients.len() + 1);
    let ask = |number: usize, dialers: &[Dialer]| {
        ready.wait();
        client(dialers, &left, watch.stop, |left| {
            // One tells for all.
            if number == 0 {
                watch.progress.at(u64::from(settings.queries).saturating_sub(left));
            }
        })
    };
    let ask = &ask;
    thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(number, dialers)| scope.spawn(move || ask(number, dialers)))
            .collect();
        ready.wait();
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
        trial
    })
}

/// What one client does; `at` hears now and then how many queries are left for all.
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

/// One query; else the name of the errno.
fn query(dialer: &Dialer) -> Result<(), String> {
    let (mut stream, _) = dialer.dial().map_err(|error| match error {
        DialError::PortsExhausted { .. } => "EADDRNOTAVAIL".to_owned(),
        DialError::Refused(_) => "ECONNREFUSED".to_owned(),
        DialError::Call { error, .. } => errno_name(&error),
        other => other.to_string(),
    })?;
    exchange(&mut stream).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => "closed without an answer".to_owned(),
        // What SO_RCVTIMEO says.
        io::ErrorKind::WouldBlock => "timeout".to_owned(),
        _ => errno_name(&error),
    })
}

fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    option::set_receive_timeout(stream.as_fd(), PATIENCE)?;
    stream.write_all(b"?")?;
    stream.read_exact(&mut [0])
}

/// What a worker does: answers what it reads, and closes when the client has. Gives the CPU time of its thread.
fn serve(acceptor: &mut Acceptor, stop: &AtomicBool) -> Result<Duration, ListenError> {
    while !stop.load(Ordering::Relaxed) {
        let Some(mut connection) = acceptor.next(Some(GLANCE))? else { continue };
        match connection.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => {
                if connection.write_all(b"!").is_ok() {
                    connection.answered();
                    acceptor.keep(connection)?;
                }
            }
            Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
                acceptor.keep(connection)?;
            }
            // The client is gone, which it has counted.
            Err(_) => {}
        }
    }
    Ok(resource::thread_cpu_time())
}
