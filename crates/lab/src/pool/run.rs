//! One run: clients ask for a while, then everything is counted.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::SeatStats;
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::schedule;

use super::client::{Answered, Client, Diary, Habit, nanos};
use super::mix::{Mix, Pause};
use super::place::Place;
use super::workers::Pool;
use crate::{LabError, Watch};

/// The clients of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crowd {
    pub(crate) clients: u32,
    /// After how many requests a connection is closed, 0: never.
    pub(crate) close_every: u64,
    pub(crate) mix: Mix,
    /// Mean pause of each of them.
    pub(crate) pause: Duration,
    /// A client besides that asks for this much, and pauses for [`PROBE_PAUSE`].
    pub(crate) probe: Option<Duration>,
    pub(crate) length: Duration,
    /// Seed of this repeat.
    pub(crate) seed: u64,
}

/// As in seed 001.
pub(crate) const PROBE_PAUSE: Duration = Duration::from_millis(5);

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// When it began, CLOCK_MONOTONIC.
    pub(crate) begun_ns: u64,
    pub(crate) load: Vec<Answered>,
    pub(crate) probe: Option<Vec<Answered>>,
    pub(crate) errors: BTreeMap<String, u64>,
    /// What each worker did, at the end and with the connections still open; empty of a server that is not ours.
    pub(crate) seats: Vec<SeatStats>,
    /// CPU time of the workers.
    pub(crate) cpu: Duration,
    /// It was told to stop.
    pub(crate) cut: bool,
}

impl Measured {
    pub(crate) fn add_errors(&mut self, errors: BTreeMap<String, u64>) {
        for (name, count) in errors {
            *self.errors.entry(name).or_default() += count;
        }
    }

    /// Requests answered, the probe's as well.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Answered> {
        self.load.iter().chain(self.probe.iter().flatten())
    }
}

/// Looks at the time this often.
const TICK: Duration = Duration::from_millis(50);

impl Crowd {
    /// Runs against a server of our own, and ends it.
    pub(crate) fn run(&self, pool: Pool, watch: &Watch<'_>) -> Result<Measured, LabError> {
        let place = Place::at(pool.endpoint().clone());
        let (mut measured, connections) = self.ask(&place, watch)?;
        measured.seats = pool.settled(measured.all().count() as u64, connections.len() as u64);
        // Clients close before the workers end, which else would look for others to take the connections over.
        drop(connections);
        pool.settled(0, 0);
        measured.cpu = pool.end()?;
        Ok(measured)
    }

    /// Runs against any server. The connections that are open at the end stay so until they are dropped.
    pub(crate) fn ask(
        &self,
        place: &Place,
        watch: &Watch<'_>,
    ) -> Result<(Measured, Vec<TcpStream>), LabError> {
        let barrier = Barrier::new(self.clients as usize + usize::from(self.probe.is_some()) + 1);
        let over = AtomicBool::new(false);
        let mut measured = Measured::default();
        let mut connections = Vec::new();
        let begin = |habit: Habit, number: usize| {
            let (barrier, over) = (&barrier, &over);
            move || {
                // A client that oversleeps would be late for its requests.
                let _ = schedule::sleep_precisely();
                let mut client = Client::new(place, self.close_every, number);
                barrier.wait();
                let until = monotonic_ns().saturating_add(nanos(self.length));
                client.go_on(habit, until, over);
                (client.take_connection(), client.diary)
            }
        };
        thread::scope(|scope| {
            // Seeds of neighbours must not be neighbours: generators of such may begin alike.
            let seed = |number: u64| fastrand::Rng::with_seed(self.seed ^ number.rotate_left(32)).u64(..);
            let load: Vec<_> = (0..self.clients)
                .map(|number| {
                    let pause = Pause::Exponential(self.pause);
                    let habit = Habit { mix: self.mix, pause, seed: seed(u64::from(number) + 1) };
                    scope.spawn(begin(habit, number as usize))
                })
                .collect();
            let probe = self.probe.map(|work| {
                let habit = Habit { mix: Mix::all(work), pause: Pause::Fixed(PROBE_PAUSE), seed: seed(0) };
                scope.spawn(begin(habit, self.clients as usize))
            });
            barrier.wait();
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
            let mut join = |thread: thread::ScopedJoinHandle<'_, (Option<TcpStream>, Diary)>| {
                let (connection, diary) =
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                connections.extend(connection);
                diary
            };
            for diary in load.into_iter().map(&mut join).collect::<Vec<_>>() {
                measured.load.extend(diary.answered);
                measured.add_errors(diary.errors);
            }
            if let Some(diary) = probe.map(join) {
                measured.probe = Some(diary.answered);
                measured.add_errors(diary.errors);
            }
        });
        Ok((measured, connections))
    }
}
