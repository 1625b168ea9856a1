//! The trials of one side, summed.

use std::collections::BTreeMap;

use fastrand::Rng;
use fourtuple_measure::{Interval, median_interval};
use fourtuple_record::{LocksClass, LocksSide};

use crate::locks::change::Setup;
use crate::locks::trial::Trial;
use crate::locks::waits::Waits;

/// One side of a change.
#[derive(Debug)]
pub(super) struct Sums {
    pub(super) setup: Setup,
    queries: u64,
    rates: Vec<f64>,
    cpu: Vec<f64>,
    errors: BTreeMap<String, u64>,
    waits: Option<Waits>,
}

impl Sums {
    pub(super) fn new(setup: Setup) -> Sums {
        let errors = BTreeMap::new();
        Sums { setup, queries: 0, rates: Vec::new(), cpu: Vec::new(), errors, waits: None }
    }

    /// Adds a timed trial and returns its rate and its CPU time per query; returns `None` if no query was answered.
    pub(super) fn add(&mut self, trial: &Trial) -> Option<(f64, f64)> {
        self.add_errors(trial);
        let figures = trial.queries_per_s().zip(trial.cpu_ns_per_query())?;
        self.queries += trial.queries;
        self.rates.push(figures.0);
        self.cpu.push(figures.1);
        Some(figures)
    }

    /// Adds a traced trial. Its times are not used, since they include the cost of the trace.
    pub(super) fn add_traced(&mut self, trial: &Trial, waits: &Waits) {
        self.add_errors(trial);
        self.waits.get_or_insert_default().add(waits, trial.queries);
    }

    fn add_errors(&mut self, trial: &Trial) {
        for (errno, number) in &trial.errors {
            *self.errors.entry(errno.clone()).or_default() += number;
        }
    }

    pub(super) fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    pub(super) fn side(&self, random: &mut Rng) -> LocksSide {
        let mut interval = |samples: &[f64]| {
            median_interval(samples, random).unwrap_or(Interval { value: 0.0, low: 0.0, high: 0.0 })
        };
        let (rate, cpu) = (interval(&self.rates), interval(&self.cpu));
        let Setup { policy, sources, strategy, range } = self.setup;
        let waits = self.waits.as_ref().filter(|waits| waits.queries > 0);
        LocksSide {
            policy: policy.to_string(),
            sources,
            strategy: strategy.to_string(),
            low: range.low(),
            high: range.high(),
            queries: self.queries,
            queries_per_s: rate.value,
            queries_per_s_low: rate.low,
            queries_per_s_high: rate.high,
            cpu_ns_per_query: cpu.value,
            cpu_ns_per_query_low: cpu.low,
            cpu_ns_per_query_high: cpu.high,
            waits_per_query: waits.map(|waits| waits.per_query(waits.waits)),
            wait_ns_per_query: waits.map(|waits| waits.per_query(waits.wait_ns)),
            classes: waits.map(classes).unwrap_or_default(),
            errors: self.errors.clone(),
        }
    }
}

fn classes(waits: &Waits) -> Vec<LocksClass> {
    let mut classes: Vec<LocksClass> = waits
        .classes
        .iter()
        .filter(|(_, (count, _))| *count > 0)
        .map(|(class, (count, ns))| LocksClass {
            class: class.clone(),
            waits_per_query: waits.per_query(*count),
            wait_ns_per_query: waits.per_query(*ns),
        })
        .collect();
    classes.sort_by(|a, b| b.wait_ns_per_query.total_cmp(&a.wait_ns_per_query));
    classes
}
