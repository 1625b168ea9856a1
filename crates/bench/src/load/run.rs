use std::io;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant, SystemTime};

use fourtuple::dial::{Dialer, Strategy};
use fourtuple_record::measure::Histogram;
use fourtuple_record::measure::words::counted;
use fourtuple_record::{
    Held, Latency, LoadAddress, LoadHttp2, LoadPorts, LoadRequestCount, LoadRequests, LoadResults,
    LoadSettings, LoadStatus, LoadWarmUp, Quantile, Remark, Second, classes, format_time,
};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, resource, schedule};

use crate::load::LoadError;
use crate::load::arrival::Schedule;
use crate::load::driver::{Driver, Live, Share, Shared};
use crate::load::engine::{
    Engine, EngineChoice, EpollEngine, Http2Engine, Options, Setup, UringEngine, self_test,
};
use crate::load::origin::Origin;
use crate::load::preflight::{
    self, Closer, Forecast, Need, NoPort, Offered, Preflight, RunMeasurements, hindsight,
};
use crate::load::settings::{Close, Load};
use crate::load::tally::{Coordination, SecondSums, Tally};
use crate::load::target::Scheme;
use crate::load::workload::{HttpRequest, Order, Requests, Workload};

/// Maximum number of requests of a list that the record counts one by one.
const MAX_COUNTED: usize = 1000;

/// Time between two calls of the progress callback.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Time between two checks whether enough ports are in use for a forecast.
const FORECAST: Duration = Duration::from_millis(5);

#[derive(Clone, Debug)]
pub struct RunProgress {
    /// Time since the start of the run.
    pub elapsed: Duration,
    pub operations: u64,
    pub connections: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Held connections (`--hold`) that are open.
    pub held: u64,
    /// The last complete second, if there is one.
    pub last: Option<Second>,
    /// Free 4-tuples left; `None` for targets without ports.
    pub ports_left: Option<u64>,
    /// Time from the start of the run to the end of the free ports, at the rate so far; `None`: they do not end.
    pub ports_end: Option<Duration>,
}

/// The outcome of a run, before hindsight judges it.
pub struct Outcome {
    pub(crate) tally: Tally,
    /// The connections to each address, if there are several.
    pub(crate) addresses: Vec<LoadAddress>,
    /// Time from the start to the end of the last operation, or to the end of the run if there was no operation.
    pub(crate) elapsed: Duration,
    /// The counts of each second.
    pub(crate) seconds: Vec<Second>,
    /// Operations in progress at the end of each second.
    pub(crate) in_flight: Vec<u64>,
    /// Failures by an answer in each second.
    pub(crate) answers: Vec<u64>,
    /// Whether the run ended because everything was refused.
    pub(crate) refused: bool,
    /// The log of histograms, if it was requested.
    pub log: Option<String>,
    /// `uring`, `epoll` or `h2`.
    pub(crate) engine: &'static str,
    engine_reason: Option<String>,
    /// The strategy for source ports; `None` for targets without ports.
    pub(crate) strategy: Option<String>,
    /// Whether the caller stopped the run.
    interrupted: bool,
    pub(crate) threads: usize,
    /// Predicted time until the ports run out: by the preflight, or from the rate at the beginning of the run.
    pub(crate) predicted_stall: Option<Duration>,
    /// Delay of the last thread behind the start that a coordinator set; 0 without a coordinator.
    pub start_error: Duration,
}

impl Load {
    /// Executes the run. Its connections go to `endpoints` in turn. Setting `stop` ends it early; `progress` is called about four times a second.
    ///
    /// # Errors
    ///
    /// See [`LoadError`]. A failed operation is not an error of the run: the result counts it.
    pub fn run(
        &self,
        endpoints: &[Endpoint],
        preflight: &Preflight,
        stop: &AtomicBool,
        progress: impl FnMut(&RunProgress),
    ) -> Result<Outcome, LoadError> {
        self.run_coordinated(endpoints, preflight, stop, None, progress)
    }

    /// Executes the run like [`Load::run`], at the start that a coordinator sets, and delivers its intervals.
    ///
    /// # Errors
    ///
    /// The errors of [`Load::run`].
    pub fn run_coordinated(
        &self,
        endpoints: &[Endpoint],
        preflight: &Preflight,
        stop: &AtomicBool,
        coordination: Option<Coordination>,
        mut progress: impl FnMut(&RunProgress),
    ) -> Result<Outcome, LoadError> {
        self.check()?;
        self.require_local_sources()?;
        let tls = self.tls_setup()?;
        let (engine, engine_reason) = self.choose_engine()?;
        let (origin, strategy) = self.origin(endpoints, preflight)?;
        let threads = self.threads_for_descriptors(engine)?;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let start = coordination.as_ref().map(|coordination| coordination.start);
        let sink = coordination.map(|coordination| coordination.intervals);
        let detailed = sink.is_some();
        let board = SecondSums::new(threads, self.log, since_epoch + self.warm_up, sink);
        let live = Live::default();
        let shared = Shared {
            load: self,
            origin: &origin,
            board: &board,
            live: &live,
            stop,
            refused: AtomicBool::new(false),
            begun: start.unwrap_or_else(Instant::now),
            awaits_start: start.is_some(),
            start_error: AtomicU64::new(0),
            detailed,
            tickets: AtomicU64::new(0),
            ramping: AtomicU64::new(threads as u64),
            requests: self.encoded(),
            tls,
        };
        let finished = AtomicU64::new(0);
        let watcher = thread::current();
        let mut forecast = Forecast::new(preflight);
        let result: Result<Vec<Tally>, LoadError> = thread::scope(|scope| {
            let (shared, finished, live, watcher) = (&shared, &finished, &live, &watcher);
            let mut handles = Vec::with_capacity(threads);
            let mut refused = None;
            for number in 0..threads {
                let share = self.share(number, threads);
                let generate = move || {
                    let mut end = EndGuard { finished, watcher, stop: shared.stop, failed: true };
                    let result = self.generate(engine, endpoints, shared, share);
                    end.failed = result.is_err();
                    result
                };
                match thread::Builder::new().spawn_scoped(scope, generate) {
                    Ok(handle) => handles.push(handle),
                    Err(error) => {
                        shared.stop.store(true, Ordering::Relaxed);
                        refused = Some(LoadError::Thread(error));
                        break;
                    }
                }
            }
            let mut last_progress = Duration::ZERO;
            while finished.load(Ordering::Relaxed) < handles.len() as u64 {
                thread::park_timeout(if forecast.is_open() { FORECAST } else { PROGRESS_INTERVAL });
                let elapsed = shared.begun.elapsed();
                let connections = live.connections.load(Ordering::Relaxed);
                forecast.look(connections, elapsed);
                if elapsed < last_progress + PROGRESS_INTERVAL {
                    continue;
                }
                last_progress = elapsed;
                let (last, before) = board.look(forecast.kept_seconds());
                progress(&RunProgress {
                    elapsed,
                    operations: live.operations.load(Ordering::Relaxed),
                    connections,
                    errors: live.errors.load(Ordering::Relaxed),
                    held: live.open.load(Ordering::Relaxed),
                    last,
                    ports_left: forecast.left(before, connections),
                    ports_end: forecast.end(connections, elapsed),
                });
            }
            let join = |handle: thread::ScopedJoinHandle<'_, _>| {
                handle.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            let tallies = handles.into_iter().map(join).collect();
            refused.map_or(tallies, Err)
        });
        let mut tally = Tally::new(endpoints.len(), self.list().len());
        result?.into_iter().for_each(|part| tally.merge(part));
        let elapsed = match tally.last_end {
            0 => shared.begun.elapsed(),
            end => Duration::from_nanos(end),
        };
        let counts = endpoints.iter().zip(&tally.by_destination);
        let addresses = counts
            .filter(|_| endpoints.len() > 1)
            .map(|(endpoint, connections)| LoadAddress {
                address: endpoint.to_string(),
                connections: *connections,
            })
            .collect();
        let predicted_stall = forecast.predicted;
        let interrupted = stop.load(Ordering::Relaxed);
        let start_error = Duration::from_nanos(shared.start_error.load(Ordering::Relaxed));
        let refused = shared.refused.load(Ordering::Relaxed);
        let (seconds, [in_flight, answers], log) = board.finish();
        Ok(Outcome {
            tally,
            addresses,
            elapsed,
            seconds,
            in_flight,
            answers,
            refused,
            log,
            engine,
            engine_reason,
            strategy,
            interrupted,
            threads,
            predicted_stall,
            start_error,
        })
    }

    /// Returns the name of the engine, and the reason if it is not the first choice.
    fn choose_engine(&self) -> Result<(&'static str, Option<String>), LoadError> {
        if self.streams.is_some() {
            return Ok(("h2", None));
        }
        if self.engine == EngineChoice::Epoll {
            return Ok(("epoll", None));
        }
        let has_ports = self.target.scheme() != Scheme::Unix && self.transport() == Transport::Tcp;
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

    /// Returns the port strategy. With `auto` and nearly all ports free this is the kernel's own search. That search is the
    /// cheapest, because it needs no socket option, and so one step less in each chain of io_uring.
    fn strategy(&self, preflight: &Preflight) -> Strategy {
        const AMPLE: u64 = 4;
        let budget = preflight.budget.unwrap_or(0);
        let is_ample = preflight.needed.is_some_and(|needed| (preflight.taken + needed) * AMPLE <= budget);
        if self.strategy == Strategy::Auto && is_ample { Strategy::KernelDefault } else { self.strategy }
    }

    fn origin(
        &self,
        endpoints: &[Endpoint],
        preflight: &Preflight,
    ) -> Result<(Origin, Option<String>), LoadError> {
        let plain = || Origin::plain(&self.sources, endpoints.len());
        Ok(match (self.target.scheme(), self.transport()) {
            (Scheme::Unix, _) => (plain(), None),
            (_, Transport::Udp) => (plain(), Some("kernel-default".to_owned())),
            (_, Transport::Tcp) => {
                let dialer = |destination| {
                    Dialer::builder(destination)
                        .sources(self.sources.clone())
                        .strategy(self.strategy(preflight))
                        // Thousands of dials may fail in a row; the hindsight makes one census for all of them.
                        .without_census()
                        .build()
                };
                let dialers = endpoints.iter().filter_map(Endpoint::inet).map(dialer);
                let dialers = dialers.collect::<Result<Vec<_>, _>>()?;
                let choice = dialers.first().map(|dialer| dialer.choice().to_string());
                (Origin::dialers(dialers), choice)
            }
        })
    }

    /// Returns the number of threads. With uring the number is raised if the connections do not fit into the tables of
    /// direct descriptors: each thread has one table, limited by RLIMIT_NOFILE.
    fn threads_for_descriptors(&self, engine: &str) -> Result<usize, LoadError> {
        let (soft, _) = resource::descriptor_limits().map_err(LoadError::call("getrlimit"))?;
        let wanted = u64::from(self.hold) + u64::from(self.connections);
        if engine == "uring" {
            let capacity = soft.saturating_sub(64).max(1);
            return Ok(self.threads.max(wanted.div_ceil(capacity) as usize).max(1));
        }
        if wanted + 64 > soft {
            return Err(LoadError::Setting(format!(
                "{} at once: more descriptors than this process may have ({soft}); raise \
                 RLIMIT_NOFILE, or use --engine uring",
                counted(wanted, "connection")
            )));
        }
        Ok(self.threads.max(1))
    }

    fn share(&self, number: usize, threads: usize) -> Share {
        let part = |whole: u32| {
            let (whole, threads) = (whole as usize, threads);
            (whole / threads + usize::from(number < whole % threads)) as u32
        };
        // With more threads than connections, only as many threads as connections have a schedule.
        let workers = threads.min(self.connections as usize).max(1);
        let schedule =
            if number < workers { Schedule::new(self.arrival, number, workers, self.seed) } else { None };
        Share { number, connections: part(self.connections), hold: part(self.hold), schedule }
    }

    fn generate(
        &self,
        engine: &str,
        endpoints: &[Endpoint],
        shared: &Shared<'_>,
        share: Share,
    ) -> Result<Tally, LoadError> {
        if self.pinned {
            let allowed = schedule::allowed_cpus().map_err(LoadError::call("sched_getaffinity"))?;
            let cpu = allowed[share.number % allowed.len()];
            schedule::pin_to(cpu).map_err(LoadError::call("sched_setaffinity"))?;
        }
        if share.schedule.is_some() || shared.awaits_start {
            // The default timer slack of 50 us would delay each intended start.
            schedule::sleep_precisely().map_err(LoadError::call("prctl PR_SET_TIMERSLACK"))?;
        }
        let slots = share.connections + share.hold;
        let options = Options {
            reset_on_close: self.close == Close::Reset,
            // With HTTP/2 a server that writes SETTINGS and a response apart would wait for a delayed ACK between them (Nagle).
            ack_with_request: !self.separate_ack
                && self.streams.is_none()
                && self.target.scheme() != Scheme::Unix
                && self.transport() == Transport::Tcp,
        };
        let result = if engine == "uring" {
            let engine = UringEngine::new(self.transport(), endpoints, slots.max(1), options);
            drive(engine.map_err(LoadError::call("io_uring_setup"))?, shared, share)
        } else if self.streams.is_some() {
            let setup = Setup::new(self, shared.tls.clone()).map_err(LoadError::Setting)?;
            let engine = Http2Engine::new(endpoints, share.connections, options, setup);
            drive(engine.map_err(LoadError::call("epoll_create1"))?, shared, share)
        } else {
            let engine = EpollEngine::new(self.transport(), endpoints, slots, options);
            drive(engine.map_err(LoadError::call("epoll_create1"))?, shared, share)
        };
        result.map_err(LoadError::call("an engine's system call"))
    }
}

fn drive(engine: impl Engine, shared: &Shared<'_>, share: Share) -> io::Result<Tally> {
    shared.wait_for_start();
    Driver::new(engine, shared, share).run()
}

/// A guard that reports the end of a thread when it is dropped, after a panic too. If the thread failed, the guard stops
/// the remaining threads, which would otherwise wait for the thread. The guard always wakes `watcher`.
struct EndGuard<'a> {
    finished: &'a AtomicU64,
    watcher: &'a Thread,
    stop: &'a AtomicBool,
    failed: bool,
}

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if self.failed {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.finished.fetch_add(1, Ordering::Relaxed);
        self.watcher.unpark();
    }
}

impl Load {
    /// Returns the requests of a list; empty without one.
    pub(crate) fn list(&self) -> &[HttpRequest] {
        self.requests.as_ref().map_or(&[], |list| &list.requests)
    }

    /// Returns all requests of HTTP, those of a list or the only one.
    pub(crate) fn http_requests(&self) -> &[HttpRequest] {
        match (&self.requests, &self.workload) {
            (Some(list), _) => &list.requests,
            (None, Workload::Http(request)) => std::slice::from_ref(request),
            _ => &[],
        }
    }

    /// Returns the bytes of all requests of HTTP.
    pub(crate) fn encoded(&self) -> Arc<Requests> {
        let order = self.requests.as_ref().map_or(Order::Turn, |list| list.order);
        Arc::new(Requests::new(self.http_requests(), order, self.seed))
    }

    /// Returns the sizes of a request (with HTTP the longest body) and of a response in bytes, 0 if they are not settings.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        match self.list().iter().map(|request| request.body.len()).max() {
            Some(longest) => (longest, 0),
            None => self.workload.sizes(),
        }
    }

    /// Returns the requests of a list with their responses, for the record.
    fn requests_of(&self, responses: &[u64]) -> Vec<LoadRequestCount> {
        let requests = self.list().iter().zip(responses).take(MAX_COUNTED);
        requests
            .map(|(request, responses)| LoadRequestCount {
                method: request.method.clone(),
                path: request.path.clone(),
                responses: *responses,
            })
            .collect()
    }

    /// Returns the need of the run.
    pub fn need(&self) -> Need {
        let steps = self.ramp.map_or(1, |ramp| ramp.steps);
        let length = self.length.map(|length| (self.warm_up + length) * steps);
        let in_warm_up = |rate: f64| (rate * self.warm_up.as_secs_f64()).ceil() as u64;
        let operations = match (self.operations, self.arrival.rate_per_s(), &self.ramp) {
            (_, _, Some(ramp)) => {
                let step = self.warm_up + self.length.unwrap_or_default();
                Some((ramp.rates().iter().sum::<f64>() * step.as_secs_f64()).ceil() as u64)
            }
            (operations, ..) if self.warm_up.is_zero() => operations,
            (Some(operations), Some(rate), None) => Some(operations + in_warm_up(rate)),
            // How many operations a closed loop begins in its warm-up is not known.
            _ => None,
        };
        let sends_nothing = matches!(self.workload, Workload::Connect);
        Need {
            transport: match (self.target.scheme(), self.transport()) {
                (Scheme::Unix, _) => preflight::Transport::Unix,
                (_, Transport::Tcp) => preflight::Transport::Tcp,
                (_, Transport::Udp) => preflight::Transport::Udp,
            },
            closer: match self.close {
                Close::Client => Closer::Client,
                Close::Reset => Closer::Reset,
                Close::Server => Closer::Server,
            },
            rate_per_s: self.arrival.rate_per_s(),
            connections: u64::from(self.connections),
            pause: self.pause,
            // Held connections only: no other connection is opened.
            operations: if self.connections == 0 { Some(0) } else { operations },
            length,
            requests_per_connection: if sends_nothing { 1 } else { self.close_every },
            hold: u64::from(self.hold),
            threads: self.threads as u64,
            engine_needs_descriptors: self.engine == EngineChoice::Epoll || self.streams.is_some(),
            may_keep_alive: matches!(self.workload, Workload::Http(_)),
        }
    }

    /// Returns the settings for the record. `sources` is the text as typed.
    pub fn settings(&self, endpoints: &[Endpoint], sources: Option<&str>, anyway: bool) -> LoadSettings {
        let sends_nothing = self.workload.sends_nothing();
        let (request_bytes, response_bytes) = self.sizes();
        let method = match &self.workload {
            Workload::Http(request) if self.requests.is_none() => request.method.clone(),
            _ => String::new(),
        };
        LoadSettings {
            target: self.target.to_string(),
            address: endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            resolve: self.resolve.as_ref().map(ToString::to_string),
            all_addresses: self.all_addresses,
            streams: self.streams.map(u64::from),
            workload: if self.hold > 0 && sends_nothing { Workload::HOLD } else { self.workload.name() }
                .to_owned(),
            arrival: self.arrival.name().to_owned(),
            rate_per_s: self.arrival.rate_per_s(),
            connections: u64::from(self.connections),
            pause_ns: nanoseconds(self.pause),
            close_every: self.close_every,
            hold: u64::from(self.hold),
            operations: self.operations,
            for_ns: self.length.map(nanoseconds),
            timeout_ns: nanoseconds(self.timeout),
            threshold_ns: self.threshold.map(nanoseconds),
            engine: self.engine.name().to_owned(),
            threads: self.threads as u64,
            pinned: self.pinned,
            strategy: self.strategy.to_string(),
            sources: sources.map(str::to_owned),
            close: self.close.name().to_owned(),
            request_bytes: request_bytes as u64,
            response_bytes: response_bytes as u64,
            method,
            separate_ack: self.separate_ack,
            anyway,
            seed: self.seed,
            tls: (self.target.scheme() == Scheme::Https).then(|| self.tls.settings(self.streams)),
            requests: self.requests.as_ref().map(|list| LoadRequests {
                file: list.file.clone(),
                count: list.requests.len() as u64,
                order: match list.order {
                    Order::Turn => "turn".to_owned(),
                    Order::Random => "random".to_owned(),
                },
            }),
            expect: Vec::new(),
            warm_up_ns: nanoseconds(self.warm_up),
            ramp: self.ramp.map(|ramp| ramp.settings()),
        }
    }
}

impl Outcome {
    /// Returns the results and the remarks of the hindsight. `time_wait`: the number of TIME_WAIT sockets to the destination now.
    pub fn results(
        self,
        load: &Load,
        need: &Need,
        preflight: &Preflight,
        time_wait: Option<u64>,
    ) -> (LoadResults, Vec<Remark>) {
        let tally = &self.tally;
        let details = tally.details.iter().map(|(name, text)| (name.to_string(), text.clone())).collect();
        let statuses: Vec<LoadStatus> = tally.statuses.values().cloned().collect();
        let errors = tally.errors.iter().map(|(name, count)| (name.to_string(), *count)).collect();
        let no_port = tally.stall.first.map(|first| NoPort {
            first: Duration::from_nanos(first),
            last: Duration::from_nanos(tally.stall.last),
            total: Duration::from_nanos(tally.stall.length),
        });
        let mut seconds = self.seconds;
        let budget = preflight.budget;
        if let Some(budget) = budget {
            let taken = preflight.taken + tally.warm_up.connections;
            count_ports(&mut seconds, budget.saturating_sub(taken), preflight.kept);
        }
        // No other connection is opened while the held connections are opened.
        let opening = if load.warm_up.is_zero() { tally.ramp.unwrap_or(0) } else { 0 };
        let span = self.elapsed.saturating_sub(Duration::from_nanos(opening));
        let tuples_used = tally.connections + tally.warm_up.connections;
        let mut need = *need;
        need.threads = self.threads as u64;
        let seen = RunMeasurements {
            preflight,
            need: &need,
            predicted_stall: self.predicted_stall,
            no_port,
            tuples_used,
            time_wait,
            errors: &errors,
            details: &details,
            statuses: &statuses,
            operations: tally.operations,
            seconds: &seconds,
            in_flight: &self.in_flight,
            answers: &self.answers,
            request_bytes: load.sizes().0 as u64,
            offered: load.arrival.rate_per_s().map(|_| Offered {
                intended: tally.offered,
                done: tally.operations,
                span,
                behind: Duration::from_nanos(tally.behind),
            }),
            elapsed: self.elapsed,
            client_cpu: Duration::from_nanos(tally.cpu_ns),
            all_busy: Duration::from_nanos(tally.all_busy),
        };
        let mut judged = hindsight(&seen);
        if tally.retried > 0 {
            judged.advice.push(format!(
                "The server closed kept connections: {} sent again on new ones.",
                requests(tally.retried)
            ));
        }
        let mut remarks = judged.remarks;
        if self.refused {
            let text = format!(
                "nothing listens there: all {} of the first {} were refused, and the run ended",
                counted(tally.errors.values().sum(), "attempt"),
                format_time(self.elapsed)
            );
            remarks.insert(0, Remark::new("all-refused", text));
        }
        if self.interrupted {
            remarks.insert(
                0,
                Remark::new("interrupted", "ended from outside: what was measured until then is shown"),
            );
        }
        let rate = tally.operations as f64 / span.as_secs_f64().max(1e-9);
        let per = |whole: f64, parts: u64| if parts == 0 { 0.0 } else { whole / parts as f64 };
        let results = LoadResults {
            operations: tally.operations,
            connections: tally.connections,
            retried: tally.retried,
            elapsed_ns: nanoseconds(self.elapsed),
            rate_per_s: rate,
            offered_per_s: load.arrival.rate_per_s().unwrap_or(rate),
            client_cpu_ns_per_operation: per(tally.cpu_ns as f64, tally.operations) as u64,
            syscalls_per_connection: per(tally.syscalls as f64, tally.connections),
            engine: self.engine.to_owned(),
            engine_reason: self.engine_reason,
            close: load.close.name().to_owned(),
            strategy: self.strategy,
            latency_ns: Latency {
                search: (&tally.search).into(),
                handshake: (&tally.handshake).into(),
                first_byte: (&tally.first_byte).into(),
                total: (&tally.total).into(),
                tls: (&tally.tls).into(),
            },
            late_ns: (&tally.late).into(),
            slow_count: tally.slow_count,
            distribution: points(&tally.total),
            ports: budget.map(|budget| LoadPorts {
                budget,
                taken_before: preflight.taken,
                needed: preflight.needed,
                used: tuples_used,
                kept_ns: nanoseconds(preflight.kept),
                predicted_stall_ns: self.predicted_stall.map(nanoseconds),
                stalled_ns: tally.stall.first,
                stall_length_ns: tally.stall.length,
            }),
            hold: (load.hold > 0).then_some(Held {
                opened: tally.held,
                lost: tally.held_lost,
                ramp_ns: tally.ramp.unwrap_or(0),
            }),
            advice: judged.advice,
            hosts: Vec::new(),
            addresses: self.addresses,
            http2: tally.streams.map(|streams| LoadHttp2 {
                most_streams: streams.most,
                server_limit: streams.server_limit,
                goaways: streams.goaways,
                refused_streams: streams.refused,
                window_waits: streams.window_waits,
                window_wait_ns: streams.window_wait_ns,
            }),
            errors,
            error_details: details,
            status_classes: classes(&statuses),
            statuses,
            sent_bytes: Some(tally.sent_bytes),
            received_bytes: Some(tally.received_bytes),
            expectations: Vec::new(),
            requests: load.requests_of(&tally.by_request),
            tls: tally.sessions.iter().map(|(session, count)| session.counted(*count)).collect(),
            warm_up: (!load.warm_up.is_zero())
                .then(|| LoadWarmUp { for_ns: nanoseconds(load.warm_up), ..tally.warm_up }),
            steps: Vec::new(),
            seconds,
            slow: self.tally.slow,
        };
        (results, remarks)
    }
}

/// Sets the number of free 4-tuples at the end of each second: all but the ones used by connections opened within the time that a
/// tuple is kept.
fn count_ports(seconds: &mut [Second], free: u64, kept: Duration) {
    let kept = kept.as_secs() as usize;
    let mut taken = 0;
    for index in 0..seconds.len() {
        if kept > 0 {
            taken += seconds[index].connections;
            if let Some(back) = index.checked_sub(kept) {
                taken -= seconds[back].connections;
            }
        }
        seconds[index].ports_left = Some(free.saturating_sub(taken));
    }
}

fn requests(count: u64) -> String {
    format!("{} {}", counted(count, "request"), if count == 1 { "was" } else { "were" })
}

fn points(histogram: &Histogram) -> Vec<Quantile> {
    histogram.distribution().into_iter().map(|(share, ns)| Quantile { share, ns }).collect()
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos().min(u128::from(u64::MAX)) as u64
}
