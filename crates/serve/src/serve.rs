//! A server that is yet to be started.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{Family, Listen, OwnPath, Policy, Waker, Workers};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, schedule};

use crate::counts::Counts;
use crate::error::ServeError;
use crate::listener::{self, Wanted};
use crate::running::{Running, Started};
use crate::seat::{Seat, Source};
use crate::service::Service;
use crate::stop::Stop;
use crate::talk::Talk;
use crate::work::Work;

/// What is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Connect, request, response: so many bytes each way, again and again until somebody closes.
    Crr {
        /// Bytes that make a request, at least 1.
        request: u64,
        /// Bytes of the response, at least 1.
        response: usize,
    },
    /// HTTP/1.1 and 1.0; every request has the same response.
    Http {
        /// Bytes of its body.
        body: usize,
    },
    /// Datagrams, sent back as they came.
    Udp {
        /// Shorter datagrams are counted as errors and not sent back.
        request: usize,
    },
    /// Streams that are read and never answered; kept until the client closes them.
    Sink,
}

impl Protocol {
    /// `crr`, `http`, `udp`, `sink`.
    pub fn name(&self) -> &'static str {
        match self {
            Protocol::Crr { .. } => "crr",
            Protocol::Http { .. } => "http",
            Protocol::Udp { .. } => "udp",
            Protocol::Sink => "sink",
        }
    }
}

/// Who closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The client. HTTP's own rules hold all the same: `Connection: close` and HTTP/1.0 make the server close.
    Client,
    /// The server, with FIN, after so many responses: TIME_WAIT is its.
    Server {
        /// Responses, at least 1.
        every: u64,
    },
    /// The server, with RST, after so many responses: nobody has a TIME_WAIT. Applications do not close like this.
    Reset {
        /// Responses, at least 1.
        every: u64,
    },
}

impl Close {
    /// `client`, `server`, `rst`.
    pub fn name(self) -> &'static str {
        match self {
            Close::Client => "client",
            Close::Server { .. } => "server",
            Close::Reset { .. } => "rst",
        }
    }

    /// After how many responses the server closes.
    pub fn every(self) -> Option<u64> {
        match self {
            Close::Client => None,
            Close::Server { every } | Close::Reset { every } => Some(every),
        }
    }
}

/// A time in which no worker serves, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// When it begins, since the start.
    pub at: Duration,
    /// How long it is.
    pub length: Duration,
}

/// A server that is yet to be started.
#[derive(Clone, Debug)]
pub struct Serve {
    /// What is spoken.
    pub protocol: Protocol,
    /// Where; port 0 is any free one.
    pub listen: Endpoint,
    /// Threads, at least 1; each serves its connections one request at a time.
    pub workers: usize,
    /// How workers wait for connections and requests, through [`fourtuple::listen`]. `None`: as this server does by itself,
    /// with an event loop per worker that serves many connections at once: `Reuseport` over TCP and UDP, `Exclusive` over
    /// unix sockets.
    pub policy: Option<Policy>,
    /// Who closes connections.
    pub close: Close,
    /// How long each request is worked on. A worker that works or sleeps serves nobody else.
    pub service: Service,
    /// Work by computing instead of sleeping.
    pub spin: bool,
    /// A time without service.
    pub stall: Option<Stall>,
    /// Length of each accept queue; the kernel cuts it to net.core.somaxconn.
    pub backlog: u32,
    /// Worker i on the i-th processor that the calling thread may use, from the first again when there are too few.
    pub pin: bool,
    /// Seed of the service times; worker i has seed + i.
    pub seed: u64,
}

impl Serve {
    /// One worker per processor, the client closes, no service time, queues of 4096.
    pub fn new(protocol: Protocol, listen: Endpoint) -> Serve {
        Serve {
            protocol,
            listen,
            workers: thread::available_parallelism().map_or(1, NonZeroUsize::get),
            policy: None,
            close: Close::Client,
            service: Service::NONE,
            spin: false,
            stall: None,
            backlog: 4096,
            pin: false,
            seed: 1,
        }
    }

    /// Where, in one word: `127.0.0.1:8080`, `unix:/path`.
    pub fn listen(&self) -> String {
        listener::shown(&self.listen)
    }

    /// Whether TCP_DEFER_ACCEPT will be set: over TCP, where the client speaks first, in the server's own event loop.
    pub fn defers_accept(&self) -> bool {
        self.policy.is_none()
            && matches!(self.protocol, Protocol::Crr { .. } | Protocol::Http { .. })
            && self.listen.inet().is_some()
    }

    /// Opens the sockets, starts the workers, and returns when all of them are ready.
    ///
    /// # Errors
    ///
    /// A setting that cannot be met, an address that cannot be had, a thread that cannot be started or pinned.
    pub fn start(&self) -> Result<Running, ServeError> {
        self.check()?;
        let talk = Talk::new(&self.protocol).map(Arc::new);
        let entrance = self.entrance(talk.is_some())?;
        let stop =
            Stop::new().map_err(|source| ServeError::Worker { worker: 0, call: "socketpair()", source })?;
        let cpus = self.cpus()?;
        let mut started = Started {
            protocol: self.protocol,
            address: entrance.address,
            policy: entrance.policy,
            path: entrance.path,
            stop: stop.clone(),
            wakers: entrance.wakers,
            workers: Vec::with_capacity(self.workers),
        };
        // Declared after the workers: where something fails, the gates fall first, and nobody waits for ever.
        let mut gates = Vec::with_capacity(self.workers);
        let (ready, all_ready) = mpsc::channel();
        for (number, source) in entrance.sources.into_iter().enumerate() {
            let seed = self.seed.wrapping_add(number as u64);
            let counts = Arc::new(Counts::default());
            let seat = Seat {
                number,
                cpu: cpus.as_ref().map(|cpus| cpus[number % cpus.len()]),
                source,
                deferred: self.defers_accept(),
                protocol: self.protocol,
                talk: talk.clone(),
                close: self.close,
                work: Work::new(self.service.clone(), self.spin, seed, stop.clone()),
                stop: stop.clone(),
                counts: Arc::clone(&counts),
            };
            let (gate, go) = mpsc::channel();
            let ready = ready.clone();
            let thread = thread::Builder::new()
                .name(format!("serve-{number}"))
                .spawn(move || seat.take(&ready, &go))
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

    /// Where each worker's connections come from, in the order of the workers: with some policies that decides who is woken.
    fn entrance(&self, streams: bool) -> Result<Entrance, ServeError> {
        let Some(policy) = self.policy else {
            let sockets = listener::open(&Wanted {
                endpoint: &self.listen,
                transport: if streams { Transport::Tcp } else { Transport::Udp },
                workers: self.workers,
                backlog: i32::try_from(self.backlog).unwrap_or(i32::MAX),
                defer_accept: self.defers_accept(),
            })?;
            let shared = sockets.policy == Policy::Exclusive;
            let sources = sockets.of_worker.into_iter().map(|socket| Source::Socket { socket, shared });
            return Ok(Entrance {
                sources: sources.collect(),
                wakers: Vec::new(),
                address: sockets.address,
                policy: sockets.policy,
                path: sockets.path,
            });
        };
        let group = Listen::at(self.listen.clone())
            .policy(policy)
            .seats(self.workers)
            .backlog(self.backlog)
            .open()?;
        let acceptors = (0..self.workers).map(|_| group.join()).collect::<Result<Vec<_>, _>>()?;
        Ok(Entrance {
            wakers: acceptors.iter().map(|acceptor| acceptor.waker()).collect(),
            sources: acceptors.into_iter().map(Source::Pool).collect(),
            address: group.endpoint().clone(),
            policy: group.policy(),
            path: None,
        })
    }

    /// Refuses what no kernel could do.
    pub fn check(&self) -> Result<(), ServeError> {
        let refuse = |setting, value: String, accepted: &str| {
            Err(ServeError::Setting { setting, value, accepted: accepted.to_owned() })
        };
        let unix = self.listen.inet().is_none();
        if self.workers == 0 {
            return refuse("workers", "0".to_owned(), "expected at least 1");
        }
        if let Some(policy) = self.policy {
            if matches!(self.protocol, Protocol::Udp { .. }) {
                return refuse("policy", policy.to_string(), "udp has no connections to wait for");
            }
            policy.check(Family::of(&self.listen), Workers::Threads)?;
        }
        if matches!(self.protocol, Protocol::Udp { .. }) && unix {
            return refuse(
                "listen",
                listener::shown(&self.listen),
                "udp needs an address and a port, such as 127.0.0.1:8080",
            );
        }
        if unix && matches!(self.close, Close::Reset { .. }) {
            return refuse("close", "rst".to_owned(), "a unix socket has no RST; expected client or server");
        }
        if matches!(self.protocol, Protocol::Udp { .. } | Protocol::Sink) && self.close != Close::Client {
            let name = self.close.name().to_owned();
            return refuse(
                "close",
                name,
                "the server closes after responses, in crr and http; expected client",
            );
        }
        if self.close.every() == Some(0) {
            return refuse("close-every", "0".to_owned(), "expected at least 1");
        }
        match self.protocol {
            Protocol::Crr { request: 0, .. } => refuse("request", "0".to_owned(), "expected at least 1 byte"),
            Protocol::Crr { response: 0, .. } => {
                refuse("response", "0".to_owned(), "expected at least 1 byte")
            }
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

/// What the workers of a server come to connections by.
struct Entrance {
    sources: Vec<Source>,
    wakers: Vec<Waker>,
    address: Endpoint,
    policy: Policy,
    path: Option<OwnPath>,
}
