use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use fourtuple_record::{LoadRamp, LoadResults, LoadStep, Remark};

use crate::load::LoadError;
use crate::load::prepared::{Measured, Prepared};
use crate::load::run::RunProgress;

/// The arrival process: when operations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// Closed loop: an operation begins when the previous one ends, so a slow server gets fewer requests.
    Closed,
    /// Open loop: this many operations per second at equal intervals, whether or not earlier ones have ended.
    Even(f64),
    /// Open loop: a Poisson process with this mean rate per second.
    Poisson(f64),
}

impl Arrival {
    /// Returns the name on the command line: `closed`, `even` or `poisson`.
    pub fn name(self) -> &'static str {
        match self {
            Arrival::Closed => "closed",
            Arrival::Even(_) => "even",
            Arrival::Poisson(_) => "poisson",
        }
    }

    /// Returns the offered load in operations per second; `None` in a closed loop.
    pub fn rate_per_s(self) -> Option<f64> {
        match self {
            Arrival::Closed => None,
            Arrival::Even(rate) | Arrival::Poisson(rate) => Some(rate),
        }
    }
}

/// Maximum number of starts that are drawn one by one. The standard deviation of a Poisson count this large is 0.1% of its mean.
const MAX_DRAWN: u64 = 1_000_000;

/// The intended starts of one of several threads, in nanoseconds since the start of the run.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Mean time between two starts of this thread, in nanoseconds.
    gap: f64,
    process: Process,
    next: f64,
}

#[derive(Debug)]
enum Process {
    /// The starts of all threads are multiples of `gap`. Each start is computed from its number: the sum of many gaps would drift, and
    /// a start that is due at the end of the run would come before it.
    Even {
        number: u64,
        threads: u64,
        gap: f64,
    },
    Poisson(Rng),
}

impl Schedule {
    /// Creates the schedule of thread `number` of `threads`; `None` in a closed loop.
    pub(crate) fn new(arrival: Arrival, number: usize, threads: usize, seed: u64) -> Option<Self> {
        let of_all = 1e9 / arrival.rate_per_s()?;
        let gap = of_all * threads as f64;
        Some(match arrival {
            Arrival::Closed => return None,
            // The starts are dealt to the threads in turn.
            Arrival::Even(_) => {
                let process = Process::Even { number: number as u64, threads: threads as u64, gap: of_all };
                Schedule { gap, process, next: (of_all * number as f64).round() }
            }
            // The sum of independent Poisson processes is a Poisson process.
            Arrival::Poisson(_) => {
                let random = Rng::with_seed(seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let mut schedule = Schedule { gap, process: Process::Poisson(random), next: 0.0 };
                schedule.advance(1);
                schedule
            }
        })
    }

    /// Returns the next intended start.
    pub(crate) fn next(&self) -> u64 {
        self.next as u64
    }

    /// Advances by this number of starts, in a Poisson process of more than one start by their mean.
    pub(crate) fn advance(&mut self, starts: u64) {
        self.next = match &mut self.process {
            Process::Even { number, threads, gap } => {
                *number += *threads * starts;
                (*number as f64 * *gap).round()
            }
            // f64() is below 1, so the logarithm is never taken of 0.
            Process::Poisson(random) if starts == 1 => self.next - (1.0 - random.f64()).ln() * self.gap,
            Process::Poisson(_) => self.next + self.gap * starts as f64,
        };
    }

    /// Advances the schedule to `until` and returns the number of starts it passed. Beyond [`MAX_DRAWN`] this is the expected
    /// number, because counting a rate of 1 G/s one by one would take seconds.
    pub(crate) fn count_until(&mut self, until: u64) -> u64 {
        for count in 0..MAX_DRAWN {
            if self.next() >= until {
                return count;
            }
            self.advance(1);
        }
        let mut rest = ((until as f64 - self.next).max(0.0) / self.gap).ceil() as u64;
        self.advance(rest);
        while self.next() < until {
            self.advance(1);
            rest += 1;
        }
        MAX_DRAWN + rest
    }
}

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

/// The remarks that end a ramp. A server whose answers take seconds stalls at every rate, so that a stall ends none.
const ENDING: [&str; 3] = [NOT_REACHED, "all-refused", "interrupted"];

/// Maximum share of responses by which a server may shed load: they are operations that were done, so that the rate seems reached.
const MAX_SHED: f64 = 0.01;

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
            let has_shed = has_shed(&measured.results);
            let ending = measured
                .remarks
                .iter()
                .find(|remark| ENDING.contains(&remark.id.as_str()) || (has_shed && remark.id == "errors"));
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

/// Returns whether the server refused operations by a response: 429, or a failure of its own.
fn has_shed(results: &LoadResults) -> bool {
    let is_refusal = |name: &str| name == "status-429" || name.starts_with("status-5");
    let refused = results.errors.iter().filter(|(name, _)| is_refusal(name));
    let shed: u64 = refused.map(|(_, number)| number).sum();
    shed as f64 > results.operations as f64 * MAX_SHED
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

    fn starts(arrival: Arrival, threads: usize, until: u64) -> Vec<u64> {
        let mut all = Vec::new();
        for number in 0..threads {
            let mut schedule = Schedule::new(arrival, number, threads, 7).unwrap();
            while schedule.next() < until {
                all.push(schedule.next());
                schedule.advance(1);
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn even_starts_have_equal_gaps_over_all_threads() {
        let all = starts(Arrival::Even(1000.0), 3, 1_000_000_000);
        assert_eq!(all.len(), 1000);
        assert!(all.windows(2).all(|pair| (999_999..=1_000_001).contains(&(pair[1] - pair[0]))));
        assert!(Schedule::new(Arrival::Closed, 0, 1, 1).is_none());
    }

    #[test]
    fn even_starts_are_exactly_rate_times_time() {
        const SECOND: u64 = 1_000_000_000;
        for rate in (1..=30).chain([97, 333, 1000]) {
            for (seconds, threads) in [(1, 1), (2, 1), (3, 2), (10, 3), (60, 7)] {
                let all = starts(Arrival::Even(rate as f64), threads, seconds * SECOND);
                assert_eq!(all.len() as u64, rate * seconds, "{rate}/s for {seconds} s in {threads} threads");
                let first =
                    Schedule::new(Arrival::Even(rate as f64), 0, 1, 1).unwrap().count_until(seconds * SECOND);
                assert_eq!(first, rate * seconds);
            }
        }
    }

    #[test]
    fn poisson_starts_have_the_rate_and_its_variance() {
        let all = starts(Arrival::Poisson(10_000.0), 2, 10_000_000_000);
        // The count has a standard deviation of 316.
        assert!((98_500..101_500).contains(&all.len()), "{}", all.len());
        let gaps: Vec<f64> = all.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // The mean and the standard deviation of an exponential distribution are equal.
        assert!((0.95..1.05).contains(&(variance.sqrt() / mean)));
        let mut schedule = Schedule::new(Arrival::Even(10.0), 0, 1, 1).unwrap();
        assert_eq!((schedule.count_until(1_000_000_000), schedule.count_until(1_000_000_000)), (10, 0));
    }

    #[test]
    fn starts_of_a_huge_rate_are_counted_at_once() {
        const HOUR: u64 = 3_600_000_000_000;
        for arrival in [Arrival::Even(1e9), Arrival::Poisson(1e9)] {
            let mut schedule = Schedule::new(arrival, 0, 1, 3).unwrap();
            let count = schedule.count_until(HOUR) as f64;
            assert!((0.999..1.001).contains(&(count / HOUR as f64)), "{count}");
            assert_eq!(schedule.count_until(HOUR), 0);
        }
    }

    #[test]
    fn rates_have_equal_ratios_and_both_ends() {
        let rates = |from, to, steps| Ramp { from, to, steps }.rates();
        assert_eq!(rates(1000.0, 20_000.0, 4), [1000.0, 2710.0, 7370.0, 20_000.0]);
        assert_eq!(rates(1.0, 3.0, 2), [1.0, 3.0]);
        assert_eq!(rates(50.0, 50.0, 3), [50.0, 50.0, 50.0]);
    }

    #[test]
    fn many_refusals_shed_load() {
        let has_shed = |name: &str, number: u64| {
            let errors = [(name.to_owned(), number)].into();
            has_shed(&LoadResults { operations: 1_000, errors, ..LoadResults::default() })
        };
        assert_eq!([10, 11].map(|number| has_shed("status-503", number)), [false, true]);
        assert!(has_shed("status-429", 11) && !has_shed("status-404", 1_000));
    }
}
