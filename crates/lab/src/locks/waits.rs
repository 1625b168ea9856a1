//! Lock waits of a trial.

use std::collections::BTreeMap;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use fourtuple_trace::{Instrument, Locks};

use crate::start;

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
    let locks = Locks { process: Some(process::id()), ..Locks::default() };
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (sender, attached) = mpsc::channel();
        let begun = move || {
            // The receiver is gone only after a panic of this thread, and the result is not needed then.
            let _ = sender.send(());
        };
        let trace =
            start::thread(scope, || locks.run(&stop, begun, |_| {})).map_err(|error| error.to_string())?;
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
