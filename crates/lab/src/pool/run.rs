//! One run: clients send requests for a while, then all counters are read.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::SeatStats;
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::schedule;

use crate::pool::address::ServerAddress;
use crate::pool::client::{AnsweredRequest, Client, ClientResults, ClientSettings, nanos};
use crate::pool::mix::{Mix, Pause};
use crate::pool::workers::Pool;
use crate::start::Start;
use crate::{LabError, Watch, start};

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
    /// Seed of this repeat.
    pub(crate) seed: u64,
}

/// Pause of the probe, as in the published experiment.
pub(crate) const PROBE_PAUSE: Duration = Duration::from_millis(5);

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
                    start::thread(scope, begin(settings, number as usize))
                })
                .collect();
            let probe = self.probe.map(|work| {
                let settings =
                    ClientSettings { mix: Mix::all(work), pause: Pause::Fixed(PROBE_PAUSE), seed: seed(0) };
                start::thread(scope, begin(settings, self.clients as usize))
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
