//! The readings of the last minutes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::Budget;
use fourtuple_record::snapshot::{Part, Snapshot, Tuple};
use fourtuple_record::{History, Moment};

use crate::units::nanoseconds;

/// The number of readings that are kept: ten minutes at one per second.
const KEPT: usize = 600;
/// The number of tuples in a chart.
const CHARTED: usize = 5;

/// A reading, reduced to what charts show.
#[derive(Clone, Debug)]
struct Reading {
    at: Duration,
    /// Ports in use by tuple, the most first.
    tuples: Vec<(String, u32)>,
    time_wait: u64,
    queued: u64,
}

/// The readings of the last minutes.
#[derive(Debug)]
pub(crate) struct Past {
    began: Instant,
    readings: VecDeque<Reading>,
}

impl Past {
    pub(crate) fn new() -> Past {
        Past { began: Instant::now(), readings: VecDeque::with_capacity(KEPT) }
    }

    pub(crate) fn add(&mut self, snapshot: &Snapshot) {
        if self.readings.len() == KEPT {
            self.readings.pop_front();
        }
        let connections = snapshot.connections.seen().ok();
        let tuples = connections.into_iter().flat_map(|connections| &connections.tuples).take(4 * CHARTED);
        let queued = match &snapshot.listeners {
            Part::Seen(listeners) => listeners.iter().map(|listener| u64::from(listener.waiting)).sum(),
            Part::Hidden(_) => 0,
        };
        self.readings.push_back(Reading {
            at: self.began.elapsed(),
            tuples: tuples.map(|tuple| (tuple.to_string(), tuple.in_use)).collect(),
            time_wait: connections
                .and_then(|connections| connections.states.get("time-wait").copied())
                .unwrap_or(0),
            queued,
        });
    }

    /// Returns the readings with the tuples that have the most ports in use now.
    pub(crate) fn history(&self) -> History {
        let latest = self.readings.back().into_iter().flat_map(|reading| &reading.tuples);
        let tuples: Vec<String> = latest.take(CHARTED).map(|(name, _)| name.clone()).collect();
        let in_use = |reading: &Reading, wanted: &String| {
            reading.tuples.iter().find(|(name, _)| name == wanted).map_or(0, |(_, in_use)| *in_use)
        };
        let moment = |reading: &Reading| Moment {
            at_ns: nanoseconds(reading.at),
            in_use: tuples.iter().map(|tuple| in_use(reading, tuple)).collect(),
            time_wait: reading.time_wait,
            queued: reading.queued,
        };
        History { moments: self.readings.iter().map(moment).collect(), tuples: tuples.clone() }
    }
}

/// Returns the time in seconds until a tuple has no free port at the present growth; `None` without growth.
pub(crate) fn time_to_exhaustion(tuple: &Tuple, budget: &Budget) -> Option<f64> {
    (tuple.growth_per_s > 0.0).then(|| f64::from(budget.free()) / tuple.growth_per_s)
}
