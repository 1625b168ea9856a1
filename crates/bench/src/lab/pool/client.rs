//! A client with one request in progress at a time, and its results.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use fourtuple::listen::SeatStats;
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::{errno_name, schedule};

use crate::lab::pool::address::ServerAddress;
use crate::lab::pool::wire::{self, ServerTiming};
use crate::lab::pool::workers::Pool;
use crate::lab::pool::{Mix, Pause};
use crate::lab::{LabError, Start, Watch, start_thread};

/// Maximum sleep between two checks of the stop flag; longer pauses are split.
const NAP: Duration = Duration::from_millis(20);

/// An answered request. Times are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnsweredRequest {
    /// Intended time of sending. If the client wakes late, the delay is part of the latency.
    pub(crate) intended_ns: u64,
    /// Time of sending; for a new connection the time before connect().
    pub(crate) sent_ns: u64,
    /// Time at which the answer was complete.
    pub(crate) received_ns: u64,
    /// Requested service time.
    pub(crate) asked_ns: u64,
    /// The worker and times that the response named.
    pub(crate) timing: ServerTiming,
    /// Whether the request was the first on its connection.
    pub(crate) first: bool,
}

#[derive(Debug, Default)]
pub(crate) struct ClientResults {
    pub(crate) answered: Vec<AnsweredRequest>,
    /// Requests that failed, by the name of the errno.
    pub(crate) errors: BTreeMap<String, u64>,
}

pub(crate) struct Client<'a> {
    place: &'a ServerAddress,
    /// Number of requests after which the client closes its connection; 0: never.
    close_every: u64,
    /// Index of the next source address.
    turn: usize,
    open: Option<OpenConnection>,
    bytes: Vec<u8>,
    pub(crate) results: ClientResults,
}

struct OpenConnection {
    stream: TcpStream,
    /// Number of requests sent on this connection.
    sent: u64,
}

/// The reason why a request got no answer.
enum Failure {
    Call(io::Error),
    Ended,
    Malformed(&'static str),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Call(error)
    }
}

impl Failure {
    fn name(&self) -> String {
        match self {
            // SO_RCVTIMEO expires with EAGAIN.
            Failure::Call(error) if error.kind() == io::ErrorKind::WouldBlock => "timeout".to_owned(),
            Failure::Call(error) => errno_name(error).to_string(),
            Failure::Ended => "closed without an answer".to_owned(),
            Failure::Malformed(why) => (*why).to_owned(),
        }
    }
}

/// The behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientSettings {
    pub(crate) mix: Mix,
    pub(crate) pause: Pause,
    /// Seed of the client's random generator: the sequence of service times and pauses does not depend on the server.
    pub(crate) seed: u64,
}

impl<'a> Client<'a> {
    pub(crate) fn new(place: &'a ServerAddress, close_every: u64, turn: usize) -> Client<'a> {
        Client { place, close_every, turn, open: None, bytes: Vec::new(), results: ClientResults::default() }
    }

    /// Sends requests and pauses until `until_ns`, or until told to stop. The last connection stays open.
    pub(crate) fn run(&mut self, settings: ClientSettings, until_ns: u64, stop: &AtomicBool) {
        let mut random = Rng::with_seed(settings.seed);
        let mut due = monotonic_ns() + nanos(settings.pause.draw(&mut random));
        while due < until_ns && sleep_until(due, stop) {
            let work = settings.mix.draw(&mut random);
            let pause = settings.pause.draw(&mut random);
            self.request(work, due);
            due = monotonic_ns() + nanos(pause);
        }
    }

    /// Sends one request and waits for the answer; counts a failure.
    pub(crate) fn request(&mut self, work: Duration, intended_ns: u64) {
        match self.exchange(work, intended_ns) {
            Ok(answered) => self.results.answered.push(answered),
            Err(failure) => {
                self.open = None;
                *self.results.errors.entry(failure.name()).or_default() += 1;
                // The pause keeps a refused client from retrying at once.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn exchange(&mut self, work: Duration, intended_ns: u64) -> Result<AnsweredRequest, Failure> {
        let sent_ns = monotonic_ns();
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                self.turn = self.turn.wrapping_add(1);
                OpenConnection { stream: self.place.connect(self.turn)?, sent: 0 }
            }
        };
        open.sent += 1;
        let first = open.sent == 1;
        let last = open.sent == self.close_every;
        self.bytes.clear();
        wire::write_request(&mut self.bytes, &self.place.path, &self.place.host, work, last);
        open.stream.write_all(&self.bytes)?;
        let response = self.read_response(&mut open.stream)?;
        let received_ns = monotonic_ns();
        if !last && !response.close {
            self.open = Some(open);
        }
        Ok(AnsweredRequest {
            intended_ns: intended_ns.min(sent_ns),
            sent_ns,
            received_ns,
            asked_ns: nanos(work),
            timing: response.timing,
            first,
        })
    }

    /// Reads one complete answer.
    fn read_response(&mut self, stream: &mut TcpStream) -> Result<wire::Response, Failure> {
        self.bytes.clear();
        let mut buffer = [0; 4096];
        loop {
            let count = match stream.read(&mut buffer) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            self.bytes.extend_from_slice(&buffer[..count]);
            let response =
                wire::parse_response(&self.bytes).map_err(|wire::Malformed(why)| Failure::Malformed(why))?;
            match response {
                Some(response) if response.length.is_some_and(|length| self.bytes.len() >= length) => {
                    return Ok(response);
                }
                Some(response) if count == 0 && response.length.is_none() => return Ok(response),
                _ if count == 0 => return Err(Failure::Ended),
                _ => {}
            }
        }
    }

    /// Takes the open connection, so that the next request opens a new connection.
    pub(crate) fn take_connection(&mut self) -> Option<TcpStream> {
        self.open.take().map(|open| open.stream)
    }
}

/// Returns a duration in nanoseconds; the duration must fit (584 years).
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
}

/// Sleeps until a time. Returns false if told to stop.
fn sleep_until(due_ns: u64, stop: &AtomicBool) -> bool {
    loop {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        match due_ns.checked_sub(monotonic_ns()) {
            None | Some(0) => return true,
            Some(left) => thread::sleep(Duration::from_nanos(left).min(NAP)),
        }
    }
}

/// The clients of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientLoad {
    pub(crate) clients: u32,
    /// Number of requests after which a connection is closed; 0: never.
    pub(crate) close_every: u64,
    pub(crate) mix: Mix,
    /// Mean pause of each client.
    pub(crate) pause: Duration,
    /// Service time of the requests of a further client, the probe, which pauses for [`PROBE_PAUSE`].
    pub(crate) probe: Option<Duration>,
    pub(crate) length: Duration,
    pub(crate) seed: u64,
}

/// Pause of the probe, as in the published experiment.
const PROBE_PAUSE: Duration = Duration::from_millis(5);

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// Start of the run, CLOCK_MONOTONIC.
    pub(crate) begun_ns: u64,
    pub(crate) load: Vec<AnsweredRequest>,
    pub(crate) probe: Option<Vec<AnsweredRequest>>,
    pub(crate) errors: BTreeMap<String, u64>,
    /// Counters of each worker, read at the end while connections are still open; empty for an external server.
    pub(crate) seats: Vec<SeatStats>,
    /// CPU time of the workers.
    pub(crate) cpu: Duration,
    /// Whether the run was told to stop early.
    pub(crate) cut: bool,
}

impl Measured {
    pub(crate) fn add_errors(&mut self, errors: BTreeMap<String, u64>) {
        for (name, count) in errors {
            *self.errors.entry(name).or_default() += count;
        }
    }

    /// Returns the number of requests answered, including the probe's.
    pub(crate) fn all(&self) -> impl Iterator<Item = &AnsweredRequest> {
        self.load.iter().chain(self.probe.iter().flatten())
    }
}

/// Interval at which the run checks the time.
const TICK: Duration = Duration::from_millis(50);

impl ClientLoad {
    /// Runs against the lab's own server, and then ends the server.
    pub(crate) fn run(&self, pool: Pool, watch: &Watch<'_>) -> Result<Measured, LabError> {
        let place = ServerAddress::at(pool.endpoint().clone());
        let (mut measured, connections) = self.run_against(&place, watch)?;
        measured.seats = pool.settled(measured.all().count() as u64, connections.len() as u64);
        // Clients close before the workers end; otherwise an ending worker would pass its connections to other workers.
        drop(connections);
        pool.settled(0, 0);
        measured.cpu = pool.end()?;
        Ok(measured)
    }

    /// Runs against any server. Connections that are open at the end stay open until they are dropped.
    pub(crate) fn run_against(
        &self,
        place: &ServerAddress,
        watch: &Watch<'_>,
    ) -> Result<(Measured, Vec<TcpStream>), LabError> {
        let together = Start::default();
        let over = AtomicBool::new(false);
        let mut measured = Measured::default();
        let mut connections = Vec::new();
        let begin = |settings: ClientSettings, number: usize| {
            let (together, over) = (&together, &over);
            move || {
                // With the default timer slack a client would send its requests late.
                let _ = schedule::sleep_precisely();
                let mut client = Client::new(place, self.close_every, number);
                if !together.wait() {
                    return (None, client.results);
                }
                let until = monotonic_ns().saturating_add(nanos(self.length));
                client.run(settings, until, over);
                (client.take_connection(), client.results)
            }
        };
        thread::scope(|scope| -> Result<(), LabError> {
            // Consecutive seeds are mixed first: generators with similar seeds may start alike.
            let seed = |number: u64| fastrand::Rng::with_seed(self.seed ^ number.rotate_left(32)).u64(..);
            let load: Result<Vec<_>, LabError> = (0..self.clients)
                .map(|number| {
                    let pause = Pause::Exponential(self.pause);
                    let settings = ClientSettings { mix: self.mix, pause, seed: seed(u64::from(number) + 1) };
                    start_thread(scope, begin(settings, number as usize))
                })
                .collect();
            let probe = self.probe.map(|work| {
                let settings =
                    ClientSettings { mix: Mix::all(work), pause: Pause::Fixed(PROBE_PAUSE), seed: seed(0) };
                start_thread(scope, begin(settings, self.clients as usize))
            });
            let (load, probe) = match (load, probe.transpose()) {
                (Ok(load), Ok(probe)) => (load, probe),
                (Err(error), _) | (_, Err(error)) => {
                    together.cancel();
                    return Err(error);
                }
            };
            together.begin(load.len() + usize::from(probe.is_some()));
            measured.begun_ns = monotonic_ns();
            let end = measured.begun_ns.saturating_add(nanos(self.length));
            loop {
                let now = monotonic_ns();
                if now >= end {
                    break;
                }
                if watch.stopped() {
                    measured.cut = true;
                    break;
                }
                watch.progress.at((now - measured.begun_ns) / 1_000_000);
                thread::sleep(Duration::from_nanos(end - now).min(TICK));
            }
            over.store(true, Ordering::Relaxed);
            let mut join = |thread: thread::ScopedJoinHandle<'_, (Option<TcpStream>, ClientResults)>| {
                let (connection, results) =
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                connections.extend(connection);
                results
            };
            for results in load.into_iter().map(&mut join).collect::<Vec<_>>() {
                measured.load.extend(results.answered);
                measured.add_errors(results.errors);
            }
            if let Some(results) = probe.map(join) {
                measured.probe = Some(results.answered);
                measured.add_errors(results.errors);
            }
            Ok(())
        })?;
        Ok((measured, connections))
    }
}
