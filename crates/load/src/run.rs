use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant, SystemTime};

use fourtuple::dial::{Dialer, Strategy};
use fourtuple_record::Second;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, resource, schedule};

use crate::arrival::{Arrival, Schedule};
use crate::board::Board;
use crate::driver::{Driver, Live, Share, Shared};
use crate::engine::{EngineChoice, EpollEngine, Options, UringEngine, self_test};
use crate::forecast::Forecast;
use crate::origin::Origin;
use crate::preflight::Preflight;
use crate::settings::{Close, Load};
use crate::tally::Tally;
use crate::workload::{TlsSetup, Workload};
use crate::{LoadError, Scheme};

/// How often whoever watches is told.
const NEWS: Duration = Duration::from_millis(250);

/// How often it is looked whether enough ports are used for a forecast.
const FORECAST: Duration = Duration::from_millis(5);

/// How a run is going.
#[derive(Clone, Debug)]
pub struct News {
    /// Since its start.
    pub elapsed: Duration,
    /// Operations done.
    pub operations: u64,
    /// Connections established.
    pub connections: u64,
    /// Failures.
    pub errors: u64,
    /// Connections that are held.
    pub held: u64,
    /// The last whole second, if there was one.
    pub last: Option<Second>,
    /// Tuples left, where there are ports.
    pub ports_left: Option<u64>,
    /// When they end, since the start of the run, at the rate so far; `None`: never.
    pub ports_end: Option<Duration>,
}

/// What came out of a run, before it is judged.
pub struct Outcome {
    pub(crate) tally: Tally,
    /// From the start to the end of the last operation, or of the run where there was none.
    pub(crate) elapsed: Duration,
    /// Second by second.
    pub(crate) seconds: Vec<Second>,
    /// Operations under way at the end of each.
    pub(crate) in_flight: Vec<u64>,
    /// The log of histograms, if one was wanted.
    pub log: Option<String>,
    /// `uring` or `epoll`.
    pub(crate) engine: &'static str,
    pub(crate) engine_reason: Option<String>,
    /// What was done for source ports; `None`: there are none.
    pub(crate) strategy: Option<String>,
    /// Whether the run was ended from outside.
    pub(crate) interrupted: bool,
    /// Threads that it took.
    pub(crate) threads: usize,
    /// When the ports were to run out: said before the run, or from the rate of its beginning.
    pub(crate) predicted_stall: Option<Duration>,
}

impl Load {
    /// Where the target is.
    ///
    /// # Errors
    ///
    /// [`LoadError::Resolve`]
    pub fn resolve(&self) -> Result<Endpoint, LoadError> {
        let failed = |error| LoadError::Resolve { target: self.target.to_string(), error };
        self.target.resolve().map_err(failed)
    }

    /// TCP, or what carries bytes like it; or UDP.
    pub fn transport(&self) -> Transport {
        match self.workload {
            Workload::Udp { .. } => Transport::Udp,
            _ => Transport::Tcp,
        }
    }

    /// Refuses what does not go together, without asking the kernel.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`]
    pub fn check(&self) -> Result<(), LoadError> {
        let refuse = |why: &str| Err(LoadError::Setting(why.to_owned()));
        let scheme = self.target.scheme();
        let fits = match self.workload {
            Workload::Connect | Workload::Crr { .. } => matches!(scheme, Scheme::Tcp | Scheme::Unix),
            Workload::Http(_) => matches!(scheme, Scheme::Http | Scheme::Https | Scheme::Unix),
            Workload::Udp { .. } => scheme == Scheme::Udp,
        };
        if !fits {
            return Err(LoadError::Setting(format!(
                "the workload {} does not go with {}: connect and crr need tcp:// or unix:, http needs http://, \
                 https:// or unix:, udp needs udp://",
                self.workload.name(),
                self.target
            )));
        }
        let says_nothing = self.workload.says_nothing();
        if self.connections == 0 && (self.hold == 0 || self.arrival != Arrival::Closed) {
            return refuse("no connections: expected at least 1 for --connections, or --hold alone");
        } else if self.connections == 0 && self.operations.is_some() {
            return refuse(
                "--operations counts what is done beside --hold, and there is nothing: expected --connections",
            );
        } else if self.close != Close::Client && self.close_every == 0 && !says_nothing {
            return refuse(
                "--close says how connections are closed, and with --close-every never none is: say --close-every 1",
            );
        } else if self.close == Close::Server && says_nothing {
            return refuse("nothing is said in the workload connect, so that no server knows when to close");
        } else if self.close == Close::Reset && scheme == Scheme::Unix {
            return refuse("there is no RST over a unix socket: expected --close client or server");
        } else if !self.sources.addresses().is_empty() && scheme == Scheme::Unix {
            return refuse("a unix socket has no source addresses");
        }
        Ok(())
    }

    /// Refuses what this host has not got: a source address, a file of certificates. [`Load::run`] does it too; before the
    /// preflight it spares its findings.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Tls`]
    pub fn check_here(&self) -> Result<(), LoadError> {
        self.require_local_sources()?;
        self.tls().map(drop)
    }

    fn tls(&self) -> Result<Option<TlsSetup>, LoadError> {
        match self.target.scheme() {
            Scheme::Https => TlsSetup::new(self.target.host(), &self.trust).map(Some),
            _ => Ok(None),
        }
    }

    /// Makes the run. `stop` ends it early; `news` is told how it goes, about four times a second.
    ///
    /// # Errors
    ///
    /// See [`LoadError`]; what fails on a connection is no error of the run, but counted in its result.
    pub fn run(
        &self,
        endpoint: &Endpoint,
        preflight: &Preflight,
        stop: &AtomicBool,
        mut news: impl FnMut(&News),
    ) -> Result<Outcome, LoadError> {
        self.check()?;
        self.require_local_sources()?;
        let tls = self.tls()?;
        let (engine, engine_reason) = self.choose_engine(endpoint)?;
        let (origin, strategy) = self.origin(endpoint, preflight)?;
        let threads = self.threads_for_descriptors(engine)?;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let board = Board::new(threads, self.log, since_epoch);
        let live = Live::default();
        let shared = Shared {
            load: self,
            origin: &origin,
            board: &board,
            live: &live,
            stop,
            begun: Instant::now(),
            tickets: AtomicU64::new(0),
            ramping: AtomicU64::new(threads as u64),
            tls,
        };
        let finished = AtomicU64::new(0);
        let watcher = thread::current();
        let mut forecast = Forecast::new(preflight);
        let result: Result<Vec<Tally>, LoadError> = thread::scope(|scope| {
            let (shared, finished, live, watcher) = (&shared, &finished, &live, &watcher);
            let handles: Vec<_> = (0..threads)
                .map(|number| {
                    let share = self.share(number, threads);
                    scope.spawn(move || {
                        let mut end = End { finished, watcher, stop: shared.stop, failed: true };
                        let result = self.generate(engine, endpoint, shared, share);
                        end.failed = result.is_err();
                        result
                    })
                })
                .collect();
            let mut told = Duration::ZERO;
            while finished.load(Ordering::Relaxed) < threads as u64 {
                thread::park_timeout(if forecast.is_open() { FORECAST } else { NEWS });
                let elapsed = shared.begun.elapsed();
                let connections = live.connections.load(Ordering::Relaxed);
                forecast.look(connections, elapsed);
                if elapsed < told + NEWS {
                    continue;
                }
                told = elapsed;
                let seconds = board.seconds_from(0);
                news(&News {
                    elapsed,
                    operations: live.operations.load(Ordering::Relaxed),
                    connections,
                    errors: live.errors.load(Ordering::Relaxed),
                    held: live.open.load(Ordering::Relaxed),
                    last: seconds.last().copied(),
                    ports_left: forecast.left(&seconds, connections),
                    ports_end: forecast.end(connections, elapsed),
                });
            }
            let join = |handle: thread::ScopedJoinHandle<'_, _>| {
                handle.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            handles.into_iter().map(join).collect()
        });
        let mut tally = Tally::new();
        result?.into_iter().for_each(|part| tally.merge(part));
        let elapsed = match tally.last_end {
            0 => shared.begun.elapsed(),
            end => Duration::from_nanos(end),
        };
        let predicted_stall = forecast.predicted;
        let interrupted = stop.load(Ordering::Relaxed);
        let (seconds, in_flight, log) = board.finish();
        Ok(Outcome {
            tally,
            elapsed,
            seconds,
            in_flight,
            log,
            engine,
            engine_reason,
            strategy,
            interrupted,
            threads,
            predicted_stall,
        })
    }

    /// Which engine, and why not the first choice.
    fn choose_engine(&self, endpoint: &Endpoint) -> Result<(&'static str, Option<String>), LoadError> {
        if self.engine == EngineChoice::Epoll {
            return Ok(("epoll", None));
        }
        let has_ports = endpoint.inet().is_some() && self.transport() == Transport::Tcp;
        let with_options = self.close == Close::Reset
            || (has_ports && !self.separate_ack)
            || (has_ports && self.strategy != Strategy::KernelDefault);
        let with_bind = !self.sources.addresses().is_empty()
            || (has_ports && matches!(self.strategy, Strategy::SelectTestRepeat { .. }));
        match self_test(with_options || with_bind, with_bind) {
            Ok(()) => Ok(("uring", None)),
            Err(why) if self.engine == EngineChoice::Auto => {
                Ok(("epoll", Some(format!("io_uring does not do here what is needed: {why}"))))
            }
            Err(why) => Err(LoadError::Engine(why)),
        }
    }

    /// What `auto` does here. The kernel's own search is the cheapest as long as nearly every port is free: it needs no
    /// option, which is a step less in every chain.
    fn strategy(&self, preflight: &Preflight) -> Strategy {
        const ROOMY: u64 = 4;
        let room = preflight.budget.unwrap_or(0);
        let is_roomy = preflight.needed.is_some_and(|needed| (preflight.taken + needed) * ROOMY <= room);
        if self.strategy == Strategy::Auto && is_roomy { Strategy::KernelDefault } else { self.strategy }
    }

    fn origin(
        &self,
        endpoint: &Endpoint,
        preflight: &Preflight,
    ) -> Result<(Origin, Option<String>), LoadError> {
        Ok(match (endpoint.inet(), self.transport()) {
            (Some(destination), Transport::Tcp) => {
                let dialer = Dialer::to(destination)
                    .sources(self.sources.clone())
                    .strategy(self.strategy(preflight))
                    // Thousands may fail in a row, and the hindsight counts once.
                    .without_census()
                    .build()?;
                let choice = dialer.choice().to_string();
                (Origin::Dialer(Box::new(dialer)), Some(choice))
            }
            (Some(_), Transport::Udp) => (Origin::plain(&self.sources), Some("kernel-default".to_owned())),
            (None, _) => (Origin::plain(&self.sources), None),
        })
    }

    /// EADDRNOTAVAIL has two meanings: a source that is not of this host must not be taken for one without ports.
    fn require_local_sources(&self) -> Result<(), LoadError> {
        let is_foreign = |source: &&IpAddr| {
            // All of 127.0.0.0/8 is here.
            !matches!(source, IpAddr::V4(source) if source.is_loopback())
                && UdpSocket::bind((**source, 0))
                    .is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
        };
        match self.sources.addresses().iter().find(is_foreign) {
            Some(source) => Err(LoadError::Setting(format!(
                "invalid value '{source}' for '--source': expected addresses of this host, and this is none"
            ))),
            None => Ok(()),
        }
    }

    /// More threads where a table of direct descriptors, of which each thread has one, would be too small.
    fn threads_for_descriptors(&self, engine: &str) -> Result<usize, LoadError> {
        let (soft, _) = resource::descriptor_limits().map_err(LoadError::call("getrlimit"))?;
        let wanted = u64::from(self.hold) + u64::from(self.connections);
        if engine == "uring" {
            let room = soft.saturating_sub(64).max(1);
            return Ok(self.threads.max(wanted.div_ceil(room) as usize).max(1));
        }
        if wanted + 64 > soft {
            return Err(LoadError::Setting(format!(
                "{wanted} connections at once need more descriptors than this process may have ({soft}): raise \
                 RLIMIT_NOFILE, or use --engine uring"
            )));
        }
        Ok(self.threads.max(1))
    }

    fn share(&self, number: usize, threads: usize) -> Share {
        let part = |whole: u32| {
            let (whole, threads) = (whole as usize, threads);
            (whole / threads + usize::from(number < whole % threads)) as u32
        };
        // Where there are more threads than connections some do nothing, and offer nothing.
        let workers = threads.min(self.connections as usize).max(1);
        let schedule =
            if number < workers { Schedule::new(self.arrival, number, workers, self.seed) } else { None };
        Share { number, connections: part(self.connections), hold: part(self.hold), schedule }
    }

    fn generate(
        &self,
        engine: &str,
        endpoint: &Endpoint,
        shared: &Shared<'_>,
        share: Share,
    ) -> Result<Tally, LoadError> {
        if self.pinned {
            let allowed = schedule::allowed_cpus().map_err(LoadError::call("sched_getaffinity"))?;
            let cpu = allowed[share.number % allowed.len()];
            schedule::pin_to(cpu).map_err(LoadError::call("sched_setaffinity"))?;
        }
        if share.schedule.is_some() {
            // Else every intended start could be 50 us late.
            schedule::sleep_precisely().map_err(LoadError::call("prctl PR_SET_TIMERSLACK"))?;
        }
        let slots = share.connections + share.hold;
        let options = Options {
            reset_on_close: self.close == Close::Reset,
            ack_with_request: !self.separate_ack
                && endpoint.inet().is_some()
                && self.transport() == Transport::Tcp,
        };
        let result = if engine == "uring" {
            let engine = UringEngine::new(self.transport(), endpoint, slots.max(1), options)
                .map_err(LoadError::call("io_uring_setup"))?;
            Driver::new(engine, shared, share).run()
        } else {
            let engine = EpollEngine::new(self.transport(), endpoint, slots, options)
                .map_err(LoadError::call("epoll_create1"))?;
            Driver::new(engine, shared, share).run()
        };
        result.map_err(LoadError::call("an engine's system call"))
    }
}

/// Of a thread, be it by a panic: the others would wait for one that has failed, and `watcher` for each.
struct End<'a> {
    finished: &'a AtomicU64,
    watcher: &'a Thread,
    stop: &'a AtomicBool,
    failed: bool,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if self.failed {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.finished.fetch_add(1, Ordering::Relaxed);
        self.watcher.unpark();
    }
}
