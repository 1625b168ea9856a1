//! When the ports of a run end, told while it goes.

use std::time::Duration;

use fourtuple_record::Second;

use crate::preflight::{Preflight, predict_live};

/// Shares of the ports, one in so many, between whose use the rate is measured that tells when they end: late enough for
/// the run to have found its pace.
const FROM: u64 = 10;
const UNTIL: u64 = 4;

/// How many tuples there still are, and when there will be none.
pub(crate) struct Forecast {
    /// Tuples that were free when the run began; `None`: there are no ports.
    free: Option<u64>,
    kept: Duration,
    pub(crate) predicted: Option<Duration>,
    /// Whether a forecast is still to be made from the rate.
    open: bool,
    /// When the first part of the ports was used, and how many.
    from: Option<(u64, Duration)>,
}

impl Forecast {
    pub(crate) fn new(preflight: &Preflight) -> Self {
        let predicted = preflight.stall.and_then(|stall| stall.at);
        Forecast {
            free: preflight.budget.map(|budget| budget.saturating_sub(preflight.taken)),
            kept: preflight.kept,
            predicted,
            open: predicted.is_none() && preflight.stall.is_some(),
            from: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Makes the forecast when enough ports are used.
    pub(crate) fn look(&mut self, used: u64, elapsed: Duration) {
        let Some(free) = self.free.filter(|free| self.open && used >= free / FROM) else { return };
        let (before, since) = *self.from.get_or_insert((used, elapsed));
        if used >= free / UNTIL && used > before {
            self.open = false;
            let left = free.saturating_sub(used);
            let pace = (elapsed - since).div_f64((used - before) as f64);
            let at = elapsed + pace.mul_f64(left as f64);
            // Later, the first of them are back.
            self.predicted = (at < self.kept).then_some(at);
        }
    }

    /// Those that were opened while a tuple is kept are not there.
    pub(crate) fn left(&self, seconds: &[Second], connections: u64) -> Option<u64> {
        let free = self.free?;
        let kept = self.kept.as_secs() as usize;
        if self.kept.is_zero() {
            return Some(free);
        }
        let older = seconds.len().saturating_sub(kept);
        let back: u64 = seconds[..older].iter().map(|second| second.connections).sum();
        Some(free.saturating_sub(connections - back.min(connections)))
    }

    pub(crate) fn end(&self, used: u64, elapsed: Duration) -> Option<Duration> {
        predict_live(self.free?.saturating_sub(used), used, elapsed, self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Stall;

    /// 10,000 free tuples that are kept for a minute, in a closed loop that is said to stall some time.
    fn forecast(kept: u64) -> Forecast {
        Forecast::new(&Preflight {
            budget: Some(10_500),
            taken: 500,
            needed: Some(20_000),
            kept: Duration::from_secs(kept),
            stall: Some(Stall { at: None, after_connections: 10_000 }),
            sustainable_per_s: None,
            findings: Vec::new(),
        })
    }

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_pace_of_the_first_quarter_goes_on_and_a_slow_start_does_not_count() {
        let mut forecast = forecast(60);
        // Nothing for half a second, then 10,000 a second.
        forecast.look(0, MS(500));
        forecast.look(1_000, MS(600));
        assert!(forecast.is_open() && forecast.predicted.is_none());
        forecast.look(2_500, MS(750));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, Some(MS(1_500))));
        forecast.look(9_000, MS(9_000));
        assert_eq!(forecast.predicted, Some(MS(1_500)), "it is said once");
    }

    #[test]
    fn ports_that_are_back_before_the_last_is_taken_do_not_end() {
        let mut forecast = forecast(1);
        forecast.look(1_000, MS(500));
        forecast.look(2_500, MS(1_250));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, None));
        assert_eq!(forecast.end(2_500, MS(1_250)), None);
    }

    #[test]
    fn what_was_opened_while_a_tuple_is_kept_is_not_left() {
        let second = |connections| Second {
            at_ns: 0,
            operations: 0,
            connections,
            errors: 0,
            p50_ns: 0,
            p99_ns: 0,
            max_ns: 0,
            ports_left: None,
        };
        let seconds = [second(100), second(200), second(400)];
        assert_eq!(forecast(2).left(&seconds, 750), Some(10_000 - 650), "those of the first second are back");
        assert_eq!(forecast(60).left(&seconds, 750), Some(10_000 - 750));
        assert_eq!(forecast(0).left(&seconds, 750), Some(10_000), "none is kept");
    }
}
