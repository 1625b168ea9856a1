//! Lock waits of a trial.

use std::collections::BTreeMap;

/// Waits for locks, of one trial or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waits {
    /// Queries during which they were counted.
    pub(super) queries: u64,
    pub(super) waits: u64,
    pub(super) wait_ns: u64,
    /// Count and time by class.
    pub(super) classes: BTreeMap<String, (u64, u64)>,
}

impl Waits {
    /// Takes those of a trial of so many queries.
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

/// What was counted while queries were made.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    pub(super) waits: Waits,
    /// What such a count does not see.
    pub(super) blind_spots: Vec<String>,
}

/// Counts lock waits of this process while `queries` run; else why not, and they were not run.
pub(super) fn count(_queries: &mut dyn FnMut()) -> Result<Counted, String> {
    Err("lock waits cannot be traced here".to_owned())
}
