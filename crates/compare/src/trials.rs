use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fourtuple_measure::{Comparison, Conclusion, FIRST_LOOK};
use fourtuple_record::{CompareResults, CompareSettings, Host, Remark};

use crate::error::CompareError;
use crate::metric::{self, Metric};
use crate::outcome::Outcome;
use crate::side::Side;
use crate::testbed::Servers;
use crate::trial::TrialOutcome;

/// Trials of one side in a row that may be dropped before the comparison ends.
const MAX_DROPPED: u32 = 3;

/// The settings of a comparison of two commands whose trials run in turn.
#[derive(Debug)]
pub struct Trials {
    /// The commands A and B.
    pub sides: [Side; 2],
    /// The servers of loads; `None` runs trials where the calling thread runs.
    pub servers: Option<Servers>,
    /// The number that each trial gives.
    pub metric: Metric,
    /// Maximum time for all trials, warm-up included. The trial that runs at its end is finished.
    pub time: Duration,
    /// The width of the interval, each way, at which the comparison ends, as a share. Also the largest difference that
    /// counts as none.
    pub narrow: f64,
    /// Maximum number of pairs; `None` for as many as the time allows.
    pub pairs: Option<u32>,
    /// Trials of each side that run first and are not used.
    pub warmup: u32,
}

impl Trials {
    /// Refuses what cannot give a result, before anything runs.
    ///
    /// # Errors
    /// [`CompareError::Usage`] if a side lacks the metric, if one side is a load and the other a lab, or if the loads take
    /// too long for the first interval.
    pub fn check(&self) -> Result<(), CompareError> {
        if let Some(side) = self.sides.iter().find(|side| !side.has(self.metric)) {
            return Err(CompareError::Usage(metric::only_rate(&side.text, self.metric)));
        }
        if self.sides[0].load().is_some() != self.sides[1].load().is_some() {
            let message = "a load and a lab have no number in common: expected two of load, or two of lab";
            return Err(CompareError::Usage(message.to_owned()));
        }
        let pair: Duration = self.sides.iter().filter_map(Side::fixed_length).sum();
        let needed = pair * (FIRST_LOOK as u32 + self.warmup);
        if self.pairs.is_some() || needed <= self.time {
            return Ok(());
        }
        Err(CompareError::Usage(format!(
            "invalid value '{}s' for '--for': a pair of these loads takes {}s, and {FIRST_LOOK} after warming up {}s; give \
             the loads a shorter --for, such as 1s, or --operations, or compare more time",
            self.time.as_secs_f64(),
            pair.as_secs_f64(),
            needed.as_secs_f64()
        )))
    }

    /// Returns the settings as the record shows them.
    pub fn settings(&self, seed: u64) -> CompareSettings {
        let nanoseconds = |time: Duration| time.as_nanos().min(u64::MAX.into()) as u64;
        let server = |side: usize| self.servers.as_ref().map(|servers| servers.commands[side].text.clone());
        let [a, b] = &self.sides;
        CompareSettings {
            a: a.text.clone(),
            b: b.text.clone(),
            metric: self.metric.name().to_owned(),
            for_ns: Some(nanoseconds(self.time)),
            narrow: self.narrow,
            trials: self.pairs.map(u64::from),
            warmup: self.warmup,
            server_a: server(0),
            server_b: server(1),
            server_wait_ns: self.servers.as_ref().map(|servers| nanoseconds(servers.wait)),
            pinned: self.servers.as_ref().is_some_and(|servers| servers.cpus.is_some()),
            // A lab makes a namespace for itself.
            fresh_namespace: Some(self.servers.is_some() || a.load().is_none()),
            seed,
        }
    }

    /// Runs trials until the interval is narrow enough, the time or the pairs are used up, or `stop` is set. Calls
    /// `progress` with the elapsed time after each trial. The pairs that are complete when `stop` is set are used.
    ///
    /// # Errors
    /// Any [`CompareError`]; [`CompareError::Interrupted`] only if no pair is complete.
    pub fn run(&self, stop: &AtomicBool, progress: &dyn Fn(Duration)) -> Result<Outcome, CompareError> {
        let mut session = Session {
            trials: self,
            stop,
            progress,
            begun: Instant::now(),
            comparison: Comparison::new(self.narrow),
            decided: None,
            samples: [Vec::new(), Vec::new()],
            saturated: 0,
            host: None,
            dropped: [0; 2],
            remarks: Vec::new(),
        };
        session.measure()?;
        session.report_dropped();
        session.finish()
    }
}

/// The state of a comparison that runs.
struct Session<'a> {
    trials: &'a Trials,
    stop: &'a AtomicBool,
    progress: &'a dyn Fn(Duration),
    begun: Instant,
    comparison: Comparison,
    decided: Option<Conclusion>,
    samples: [Vec<f64>; 2],
    /// Trials after the warm-up whose client was saturated.
    saturated: u64,
    host: Option<Host>,
    /// Trials of each side that were not valid.
    dropped: [u64; 2],
    remarks: Vec<Remark>,
}

impl Session<'_> {
    /// Runs pairs of trials until there is a reason to end.
    fn measure(&mut self) -> Result<(), CompareError> {
        for _ in 0..self.trials.warmup {
            for side in 0..2 {
                if self.trial(side)?.is_none() {
                    return Ok(());
                }
            }
        }
        self.saturated = 0;
        let most = self.trials.pairs.map_or(usize::MAX, |pairs| pairs as usize);
        while self.decided.is_none() && self.comparison.pairs() < most {
            let mut pair = [0.0; 2];
            for side in order_of_pair(self.comparison.pairs()) {
                let Some(value) = self.trial(side)? else { return Ok(()) };
                pair[side] = value;
                (self.progress)(self.begun.elapsed());
            }
            for (samples, value) in self.samples.iter_mut().zip(pair) {
                samples.push(value);
            }
            let [a, b] = pair.map(|value| self.trials.metric.merit(value));
            self.comparison.push(a, b);
            self.decided = self.comparison.look();
        }
        Ok(())
    }

    /// Returns the metric of one trial; repeats a trial that was not valid. `None` ends the comparison.
    fn trial(&mut self, side: usize) -> Result<Option<f64>, CompareError> {
        let name = self.trials.sides[side].name;
        for _ in 0..MAX_DROPPED {
            if self.begun.elapsed() >= self.trials.time {
                return Ok(None);
            }
            let testbed = self.trials.servers.as_ref().map(|servers| servers.testbed(side));
            match self.trials.sides[side].run(self.trials.metric, testbed.as_ref(), self.stop)? {
                TrialOutcome::Measured { value, host, saturated } => {
                    self.host.get_or_insert(*host);
                    self.saturated += u64::from(saturated);
                    return Ok(Some(value));
                }
                TrialOutcome::Refused(why) => {
                    let message = format!("{name} was not started, and no more trials were made: {why}");
                    self.remarks.push(Remark::new("trial-refused", message));
                    return Ok(None);
                }
                TrialOutcome::Dropped(_) | TrialOutcome::Interrupted if self.stop.load(Ordering::Relaxed) => {
                    let message = "interrupted: the trials made until then are used";
                    self.remarks.push(Remark::new("interrupted", message));
                    return Ok(None);
                }
                TrialOutcome::Interrupted => return Ok(None),
                TrialOutcome::Dropped(why) => {
                    self.dropped[side] += 1;
                    if self.dropped[side] == 1 {
                        let message = format!("a trial of {name} was not valid: {why}");
                        self.remarks.push(Remark::new("trial-not-valid", message));
                    }
                }
            }
        }
        let message = format!("{MAX_DROPPED} trials of {name} in a row were not valid: no more were made");
        self.remarks.push(Remark::new("gave-up", message));
        Ok(None)
    }

    /// Adds a remark with the number of dropped trials of each side.
    fn report_dropped(&mut self) {
        for (side, dropped) in self.trials.sides.iter().zip(self.dropped) {
            if dropped > 0 {
                let message =
                    format!("trials of {} that were not valid and were dropped: {dropped}", side.name);
                self.remarks.push(Remark::new("dropped", message));
            }
        }
    }

    fn finish(self) -> Result<Outcome, CompareError> {
        let Some(conclusion) = self.decided.or_else(|| self.comparison.conclude()) else {
            return Err(self.no_result());
        };
        let pairs = self.comparison.pairs() as u64;
        let verdict = if pairs < FIRST_LOOK as u64 {
            let plural = if pairs == 1 { "" } else { "s" };
            format!("too noisy to say: {pairs} pair{plural}, {FIRST_LOOK} are needed")
        } else {
            conclusion.words(self.trials.narrow)
        };
        let [samples_a, samples_b] = self.samples;
        let results = CompareResults {
            ratio: conclusion.ratio,
            low: conclusion.interval.map(|(low, _)| low),
            high: conclusion.interval.map(|(_, high)| high),
            verdict,
            trials: 2 * pairs,
            pairs,
            // The count may include the first trial of a pair that was not completed.
            client_saturated: self.saturated.min(2 * pairs),
            samples_a,
            samples_b,
        };
        Ok(Outcome { host: self.host.unwrap_or_default(), remarks: self.remarks, results })
    }

    /// Returns the reason why no pair is complete.
    fn no_result(self) -> CompareError {
        if self.stop.load(Ordering::Relaxed) {
            return CompareError::Interrupted;
        }
        if let Some(remark) = self.remarks.into_iter().next() {
            return CompareError::NotValid(remark.message);
        }
        CompareError::Usage(format!(
            "invalid value '{}s' for '--for': it was over before a trial of each side was done; expected more time",
            self.trials.time.as_secs_f64()
        ))
    }
}

/// Returns the sides of a pair in their order: A B, B A, B A, A B. Over each two pairs a linear drift of the machine
/// cancels, and over each four a quadratic drift does.
fn order_of_pair(pair: usize) -> [usize; 2] {
    if matches!(pair % 4, 0 | 3) { [0, 1] } else { [1, 0] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_run_in_a_balanced_order() {
        let order: Vec<usize> = (0..4).flat_map(order_of_pair).collect();
        assert_eq!(order, [0, 1, 1, 0, 1, 0, 0, 1]);
    }
}
