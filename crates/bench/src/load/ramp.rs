use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple_record::{LoadRamp, LoadResults, LoadStep, Remark};

use crate::load::arrival::Arrival;
use crate::load::error::LoadError;
use crate::load::prepared::{Measured, Prepared};
use crate::load::run::RunProgress;

/// Ascending rates of an open loop, with equal ratios.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ramp {
    /// The first rate, per second.
    pub from: f64,
    /// The last rate, per second.
    pub to: f64,
    /// Number of rates, at least 2.
    pub steps: u32,
}

impl Ramp {
    /// Maximum number of rates.
    pub const MAX_STEPS: u32 = 100;

    /// Returns the rates, those between the first and the last with three digits.
    pub fn rates(&self) -> Vec<f64> {
        let last = self.steps.saturating_sub(1).max(1);
        let ratio = (self.to / self.from).powf(1.0 / f64::from(last));
        let between = |step: u32| {
            let rate = self.from * ratio.powi(step as i32);
            let digit = 10_f64.powf(rate.log10().floor() - 2.0);
            (rate / digit).round() * digit
        };
        (0..self.steps)
            .map(|step| match step {
                0 => self.from,
                step if step == last => self.to,
                step => between(step),
            })
            .collect()
    }

    /// Returns the settings for the record.
    pub(crate) fn settings(&self) -> LoadRamp {
        LoadRamp { from_per_s: self.from, to_per_s: self.to, steps: self.steps }
    }
}

/// The remark of a rate that was not reached.
const NOT_REACHED: &str = "offered-rate-not-reached";

/// The remarks that end a ramp.
const ENDING: [&str; 3] = [NOT_REACHED, "all-refused", "interrupted"];

/// The remarks on the first rate that was not reached that concern the knee: they say that it is not the server's.
const OF_KNEE: [&str; 3] = ["client-saturated", "ports-ran-out", "interrupted"];

impl Prepared {
    /// Runs the steps of a ramp until one is not reached. The results are those of the last step that was reached, or of the first
    /// step if none was.
    pub(super) fn climb(
        &self,
        ramp: &Ramp,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&RunProgress),
    ) -> Result<Measured, LoadError> {
        let mut steps: Vec<LoadStep> = Vec::new();
        let mut knee: Option<Measured> = None;
        let mut of_knee: Vec<Remark> = Vec::new();
        for rate in ramp.rates() {
            let measured = self.at_rate(rate)?.run_once(stop, None, progress)?;
            let ending = measured.remarks.iter().find(|remark| ENDING.contains(&remark.id.as_str()));
            let reason = ending.map(|remark| remark.message.clone());
            steps.push(step(&measured.results, reason.clone()));
            if reason.is_none() || knee.is_none() {
                knee = Some(measured);
            } else {
                of_knee = measured.remarks;
                of_knee.retain(|remark| OF_KNEE.contains(&remark.id.as_str()));
            }
            if reason.is_some() || stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let mut knee = knee.expect("a ramp has two rates or more");
        for remark in of_knee {
            if !knee.remarks.iter().any(|other| other.id == remark.id) {
                knee.remarks.push(remark);
            }
        }
        knee.results.steps = steps;
        Ok(knee)
    }

    /// Prepares a step: the preflight of the whole ramp has judged the ports, and those in use are read again.
    fn at_rate(&self, rate: f64) -> Result<Prepared, LoadError> {
        let mut load = self.load().clone();
        load.ramp = None;
        load.arrival = match load.arrival {
            Arrival::Even(_) => Arrival::Even(rate),
            _ => Arrival::Poisson(rate),
        };
        Prepared::at(load, self.endpoints().to_vec()).map(Prepared::without_findings)
    }
}

fn step(results: &LoadResults, not_reached: Option<String>) -> LoadStep {
    let total = &results.latency_ns.total;
    LoadStep {
        offered_per_s: results.offered_per_s,
        rate_per_s: results.rate_per_s,
        operations: results.operations,
        connections: results.connections,
        errors: results.errors.values().sum(),
        warm_up_operations: results.warm_up.map_or(0, |warm_up| warm_up.operations),
        p50_ns: total.p50,
        p99_ns: total.p99,
        max_ns: total.max,
        client_cpu_ns_per_operation: results.client_cpu_ns_per_operation,
        not_reached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_equal_ratios_and_both_ends() {
        let rates = |from, to, steps| Ramp { from, to, steps }.rates();
        assert_eq!(rates(1000.0, 20_000.0, 4), [1000.0, 2710.0, 7370.0, 20_000.0]);
        assert_eq!(rates(1.0, 3.0, 2), [1.0, 3.0]);
        assert_eq!(rates(50.0, 50.0, 3), [50.0, 50.0, 50.0]);
    }
}
