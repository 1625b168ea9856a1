//! Small servers for tests and measurements, which count what each worker did.
//!
//! ```no_run
//! use fourtuple_bench::serve::{Protocol, Serve};
//!
//! let serve = Serve::new(Protocol::Http { body: 2 }, "127.0.0.1:0".parse::<std::net::SocketAddr>()?.into());
//! let running = serve.start()?;
//! println!("{}", running.address());
//! let results = running.stop();
//! println!("{} requests", results.workers.iter().map(|worker| worker.requests).sum::<u64>());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Serve::start`] creates the sockets and the worker threads. They belong to the network namespace of the calling thread and
//! inherit its CPU affinity.

mod decoder;
#[doc(hidden)]
pub mod fuzzing;
mod listener;
mod policy_worker;
mod protocol;
mod running;
mod service;
mod worker;

use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{
    AcceptPolicy, Dispatcher, Family, ListenError, ListenerGroup, ListenerGroupBuilder, SocketPath, Workers,
};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Remark, ServeResults, errno};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, schedule};

use crate::serve::listener::SocketRequest;
use crate::serve::running::{Counts, DispatcherThread, Source, Stop, WorkerThread, WorkerThreads};
use crate::serve::service::Work;

pub use protocol::Protocol;
pub use running::Running;
pub use service::{Service, Shape};

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Serve {
    pub protocol: Protocol,
    /// The address to listen on. With port 0 the kernel chooses a free port.
    pub listen: Endpoint,
    /// Number of threads, at least 1. Each serves its connections one request at a time.
    pub workers: usize,
    /// The accept policy of [`fourtuple::listen`] by which workers wait. `None`: an event loop of this crate per worker, with a
    /// listening socket each (`Reuseport`) over TCP and UDP, and a shared one (`Exclusive`) over unix sockets.
    pub policy: Option<AcceptPolicy>,
    /// The side that closes connections.
    pub close: Close,
    /// A connection on which nothing was received or sent for this long is closed and counted (`idle-closed`). Not for UDP.
    pub idle: Duration,
    /// The service time of a request. Meanwhile the worker serves no other connection.
    pub service: Service,
    /// Computes during the service time instead of sleeping.
    pub spin: bool,
    /// A period in which no worker serves.
    pub stall: Option<Stall>,
    /// Length of each accept queue; the kernel limits it to net.core.somaxconn.
    pub backlog: u32,
    /// Pins worker i to the i-th CPU that the calling thread may use, modulo the number of these CPUs.
    pub pin: bool,
    /// Seed of the service times; worker i uses seed + i.
    pub seed: u64,
}

impl Serve {
    /// Returns default settings: one worker per CPU, the client closes, an idle limit of 60 s, no service time, queues of 4096.
    pub fn new(protocol: Protocol, listen: Endpoint) -> Serve {
        Serve {
            protocol,
            listen,
            workers: thread::available_parallelism().map_or(1, NonZeroUsize::get),
            policy: None,
            close: Close::Client,
            idle: Duration::from_secs(60),
            service: Service::NONE,
            spin: false,
            stall: None,
            backlog: 4096,
            pin: false,
            seed: 1,
        }
    }

    /// Returns the address in the syntax of `--listen`: `127.0.0.1:8080`, `unix:/path`.
    pub fn listen(&self) -> String {
        listener::shown(&self.listen)
    }

    /// Returns whether the server sets TCP_DEFER_ACCEPT: over TCP, without an accept policy, if the client sends first.
    pub fn defers_accept(&self) -> bool {
        self.policy.is_none() && self.connections_have_responses() && self.listen.inet().is_some()
    }

    fn connections_have_responses(&self) -> bool {
        self.protocol.has_connections() && self.protocol.has_responses()
    }

    /// Opens the sockets, starts the workers, and returns when all workers are ready.
    ///
    /// # Errors
    ///
    /// An invalid setting, an address that cannot be bound, or a thread that cannot be started or pinned.
    pub fn start(&self) -> Result<Running, ServeError> {
        self.check()?;
        let decoder = self.protocol.decoder();
        let open_sources = self.open_sources(decoder.is_some())?;
        let stop =
            Stop::new().map_err(|source| ServeError::Worker { worker: 0, call: "socketpair()", source })?;
        let cpus = self.cpus()?;
        let mut started = WorkerThreads {
            protocol: self.protocol,
            address: open_sources.address,
            policy: open_sources.policy,
            path: open_sources.path,
            stop: stop.clone(),
            group: open_sources.group,
            dispatcher_thread: open_sources.dispatcher.map(DispatcherThread::start).transpose()?,
            backlog: self.backlog,
            workers: Vec::with_capacity(self.workers),
        };
        // Declared after the workers, so dropped before them: after an error the closed channels end the waiting workers.
        let mut gates = Vec::with_capacity(self.workers);
        let (ready, all_ready) = mpsc::channel();
        for (number, source) in open_sources.sources.into_iter().enumerate() {
            let seed = self.seed.wrapping_add(number as u64);
            let counts = Arc::new(Counts::default());
            let worker = WorkerThread {
                number,
                cpu: cpus.as_ref().map(|cpus| cpus[number % cpus.len()]),
                source,
                deferred: self.defers_accept(),
                protocol: self.protocol,
                decoder: decoder.clone(),
                close: self.close,
                idle: self.idle,
                work: Work::new(self.service.clone(), self.spin, seed, stop.clone()),
                stop: stop.clone(),
                counts: Arc::clone(&counts),
            };
            let (gate, go) = mpsc::channel();
            let ready = ready.clone();
            let thread = thread::Builder::new()
                .name(format!("serve-{number}"))
                .spawn(move || worker.run(&ready, &go))
                .map_err(|source| ServeError::Worker { worker: number, call: "a new thread", source })?;
            started.workers.push((thread, counts));
            gates.push(gate);
        }
        drop(ready);
        for outcome in all_ready.iter().take(self.workers) {
            outcome?;
        }
        let begin = Instant::now();
        let stall = self.stall.and_then(|stall| {
            let from = begin.checked_add(stall.at)?;
            Some((from, from.checked_add(stall.length)?))
        });
        for gate in gates {
            let _ = gate.send(stall);
        }
        Ok(Running::new(started, begin))
    }

    /// Opens the sources of connections, in the order of the workers. With some policies that order decides which worker wakes up.
    fn open_sources(&self, streams: bool) -> Result<ConnectionSources, ServeError> {
        let Some(policy) = self.policy else {
            let sockets = listener::open(&SocketRequest {
                endpoint: &self.listen,
                transport: if streams { Transport::Tcp } else { Transport::Udp },
                workers: self.workers,
                backlog: i32::try_from(self.backlog).unwrap_or(i32::MAX),
                defer_accept: self.defers_accept(),
            })?;
            let shared = sockets.policy == AcceptPolicy::Exclusive;
            let sources = sockets.of_worker.into_iter().map(|socket| Source::Socket { socket, shared });
            return Ok(ConnectionSources {
                sources: sources.collect(),
                group: None,
                dispatcher: None,
                address: sockets.address,
                policy: sockets.policy,
                path: sockets.path,
            });
        };
        let group = ListenerGroupBuilder::at(self.listen.clone())
            .policy(policy)
            .max_workers(self.workers)
            .backlog(self.backlog)
            .idle_timeout(self.idle)
            .write_timeout(self.write_limit())
            .open()?;
        let acceptors = (0..self.workers).map(|_| group.join()).collect::<Result<Vec<_>, _>>()?;
        Ok(ConnectionSources {
            dispatcher: (group.policy() == AcceptPolicy::Dispatcher)
                .then(|| group.dispatcher())
                .transpose()?,
            sources: acceptors.into_iter().map(Source::Pool).collect(),
            address: group.endpoint().clone(),
            policy: group.policy(),
            path: None,
            group: Some(group),
        })
    }

    /// Returns how long a worker waits for a client that does not read: one second, and the time of a response at 10 MB/s.
    fn write_limit(&self) -> Duration {
        let (_, response) = self.protocol.sizes();
        Duration::from_secs(1) + Duration::from_nanos(response.unwrap_or(0) * 100)
    }

    /// Checks the settings without a system call.
    pub fn check(&self) -> Result<(), ServeError> {
        let refuse = |setting, value: &str, accepted: &str| {
            Err(ServeError::Setting { setting, value: value.to_owned(), accepted: accepted.to_owned() })
        };
        let unix = self.listen.inet().is_none();
        if self.workers == 0 {
            return refuse("workers", "0", "expected at least 1");
        }
        if let Some(policy) = self.policy {
            if !self.protocol.has_connections() {
                return refuse("policy", &policy.to_string(), "udp has no connections to wait for");
            }
            policy.check(Family::of(&self.listen), Workers::Threads)?;
        }
        if !self.protocol.has_connections() && unix {
            return refuse(
                "listen",
                &listener::shown(&self.listen),
                "udp needs an address and a port, such as 127.0.0.1:8080",
            );
        }
        if unix && matches!(self.close, Close::Reset { .. }) {
            return refuse("close", "rst", "a unix socket has no RST; expected client or server");
        }
        if !self.connections_have_responses() && self.close != Close::Client {
            return refuse(
                "close",
                self.close.name(),
                "the server closes after responses, in crr and http; expected client",
            );
        }
        if self.idle.is_zero() {
            return refuse("idle", "0s", "expected more than 0");
        }
        if self.close.every() == Some(0) {
            return refuse("close-every", "0", "expected at least 1");
        }
        match self.protocol {
            Protocol::Crr { request: 0, .. } => refuse("request", "0", "expected at least 1 byte"),
            Protocol::Crr { response: 0, .. } => refuse("response", "0", "expected at least 1 byte"),
            _ => Ok(()),
        }
    }

    fn cpus(&self) -> Result<Option<Vec<usize>>, ServeError> {
        if !self.pin {
            return Ok(None);
        }
        let failed = |source| ServeError::Worker { worker: 0, call: "sched_getaffinity()", source };
        schedule::allowed_cpus().map(Some).map_err(failed)
    }
}

/// The sources of connections of all workers.
struct ConnectionSources {
    sources: Vec<Source>,
    group: Option<ListenerGroup>,
    dispatcher: Option<Dispatcher>,
    address: Endpoint,
    policy: AcceptPolicy,
    path: Option<SocketPath>,
}

/// The side that closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The client. With HTTP the server still closes after `Connection: close` and after HTTP/1.0 requests.
    Client,
    /// The server, with FIN, after this many responses. The server has the TIME_WAIT socket.
    Server {
        /// Number of responses, at least 1.
        every: u64,
    },
    /// The server, with RST, after this many responses. Neither side has a TIME_WAIT socket. Applications do not close like this.
    Reset {
        /// Number of responses, at least 1.
        every: u64,
    },
}

impl Close {
    /// Returns the name: `client`, `server` or `rst`.
    pub fn name(self) -> &'static str {
        match self {
            Close::Client => "client",
            Close::Server { .. } => "server",
            Close::Reset { .. } => "rst",
        }
    }

    /// Returns the number of responses after which the server closes.
    pub fn every(self) -> Option<u64> {
        match self {
            Close::Client => None,
            Close::Server { every } | Close::Reset { every } => Some(every),
        }
    }
}

/// A single period in which no worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Time from the start of the server to the start of the stall.
    pub at: Duration,
    pub length: Duration,
}

/// Returns remarks on a run from its counts: exhausted descriptors or memory, and workers that ended early.
pub fn validity(results: &ServeResults) -> Vec<Remark> {
    let count = |wanted: &str| -> u64 {
        let names = [format!("accept: {wanted}"), format!("dispatcher accept: {wanted}")];
        results
            .workers
            .iter()
            .flat_map(|worker| names.iter().filter_map(|name| worker.errors.get(name)))
            .sum()
    };
    let mut remarks = Vec::new();
    for (errno, what) in [
        (errno::EMFILE, "this process may have no more descriptors (RLIMIT_NOFILE): raise ulimit -n"),
        (errno::ENFILE, "this host has no more descriptors: raise fs.file-max"),
        (errno::ENOBUFS, "the kernel had no memory for sockets"),
        (errno::ENOMEM, "the kernel had no memory for sockets"),
    ] {
        let times = count(errno);
        if times > 0 {
            let message = format!(
                "accept() gave {errno} {}; each time a worker accepted no connection for 10 ms: {what}",
                counted(times, "time")
            );
            remarks.push(Remark::new("accept-failed", message));
        }
    }
    let unwatched: u64 = results
        .workers
        .iter()
        .flat_map(|worker| &worker.errors)
        .filter_map(|(name, count)| name.ends_with("epoll_ctl: ENOSPC").then_some(count))
        .sum();
    if unwatched > 0 {
        let message = format!(
            "closed {} that epoll could not watch: raise fs.epoll.max_user_watches",
            counted(unwatched, "connection")
        );
        remarks.push(Remark::new("epoll-full", message));
    }
    for (number, worker) in results.workers.iter().enumerate() {
        if let Some(name) = worker.errors.keys().find(|name| name.starts_with("worker-ended")) {
            let message = format!("worker {number} ended before it was told to: {name}");
            remarks.push(Remark::new("worker-ended", message));
        }
        if let Some(name) = worker.errors.keys().find(|name| name.starts_with("dispatcher-ended")) {
            let message = format!("the dispatcher ended before it was told to: {name}");
            remarks.push(Remark::new("dispatcher-ended", message));
        }
    }
    remarks
}

/// The reason why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A setting has an invalid value.
    #[error("{setting} is {value}: {accepted}")]
    Setting {
        /// Name of the setting, which is also the name of the flag.
        setting: &'static str,
        /// The given value.
        value: String,
        accepted: String,
    },
    /// The path or the accept policy is not available.
    #[error(transparent)]
    Group(#[from] ListenError),
    /// A system call that sets up a listening socket failed.
    #[error("cannot listen on {address}: {call}: {source}{hint}")]
    Listen {
        /// The call, or the socket option.
        call: &'static str,
        address: String,
        /// The errno.
        source: io::Error,
        /// Advice, after a semicolon; may be empty.
        hint: &'static str,
    },
    /// A worker could not be set up.
    #[error("cannot start worker {worker}: {call}: {source}")]
    Worker {
        /// Number of the worker, from 0.
        worker: usize,
        call: &'static str,
        /// The errno.
        source: io::Error,
    },
}

impl ServeError {
    /// Returns whether the settings are at fault, and not the environment.
    pub fn is_usage(&self) -> bool {
        match self {
            ServeError::Setting { .. } => true,
            ServeError::Group(error) => error.is_usage(),
            ServeError::Listen { .. } | ServeError::Worker { .. } => false,
        }
    }
}
