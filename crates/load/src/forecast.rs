//! The forecast during a run of when its ports are exhausted.

use std::time::Duration;

use crate::preflight::{Preflight, predict_live};

/// The rate is measured between two uses of the ports, as fractions (1/n) of all ports. The first is large enough that the
/// run has reached its steady rate.
const FROM: u64 = 10;
const UNTIL: u64 = 4;

/// The number of free 4-tuples, and the time at which none will be left.
pub(crate) struct Forecast {
    /// Number of 4-tuples that were free at the start of the run; `None` for targets without ports.
    free: Option<u64>,
    kept: Duration,
    pub(crate) predicted: Option<Duration>,
    /// Whether the forecast from the rate is still due.
    open: bool,
    /// Time at which the first fraction of the ports was used, and the number of ports used.
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

    /// Makes the forecast once enough ports are in use.
    pub(crate) fn look(&mut self, used: u64, elapsed: Duration) {
        let Some(free) = self.free.filter(|free| self.open && used >= free / FROM) else { return };
        let (before, since) = *self.from.get_or_insert((used, elapsed));
        if used >= free / UNTIL && used > before {
            self.open = false;
            let left = free.saturating_sub(used);
            let pace = (elapsed - since).div_f64((used - before) as f64);
            let at = elapsed + pace.mul_f64(left as f64);
            // From here on, 4-tuples of the first connections are free again.
            self.predicted = (at < self.kept).then_some(at);
        }
    }

    /// Returns the number of whole seconds for which a connection keeps its 4-tuple.
    pub(crate) fn kept_seconds(&self) -> usize {
        self.kept.as_secs() as usize
    }

    /// Returns the number of free 4-tuples: all except those used by connections opened within the time that a tuple is
    /// kept. `before`: the connections that were opened before that time.
    pub(crate) fn left(&self, before: u64, connections: u64) -> Option<u64> {
        let free = self.free?;
        if self.kept.is_zero() {
            return Some(free);
        }
        Some(free.saturating_sub(connections.saturating_sub(before)))
    }

    pub(crate) fn end(&self, used: u64, elapsed: Duration) -> Option<Duration> {
        predict_live(self.free?.saturating_sub(used), used, elapsed, self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::Stall;

    /// Creates a forecast for 10,000 free tuples, each kept for a minute, in a closed loop that the preflight expects to
    /// stall.
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
    fn the_forecast_ignores_a_slow_start() {
        let mut forecast = forecast(60);
        // No connection for half a second, then 10,000 per second.
        forecast.look(0, MS(500));
        forecast.look(1_000, MS(600));
        assert!(forecast.is_open() && forecast.predicted.is_none());
        forecast.look(2_500, MS(750));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, Some(MS(1_500))));
        forecast.look(9_000, MS(9_000));
        assert_eq!(forecast.predicted, Some(MS(1_500)), "it is said once");
    }

    #[test]
    fn ports_freed_before_the_last_is_taken_do_not_run_out() {
        let mut forecast = forecast(1);
        forecast.look(1_000, MS(500));
        forecast.look(2_500, MS(1_250));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, None));
        assert_eq!(forecast.end(2_500, MS(1_250)), None);
    }

    #[test]
    fn tuples_of_recent_connections_are_not_free() {
        assert_eq!((forecast(2).kept_seconds(), forecast(60).kept_seconds()), (2, 60));
        assert_eq!(forecast(2).left(100, 750), Some(10_000 - 650), "older 4-tuples are free again");
        assert_eq!(forecast(60).left(0, 750), Some(10_000 - 750));
        assert_eq!(forecast(60).left(800, 750), Some(10_000), "the counts are not of the same moment");
        assert_eq!(forecast(0).left(0, 750), Some(10_000), "none is kept");
    }
}
