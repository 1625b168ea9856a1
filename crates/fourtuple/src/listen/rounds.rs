//! An estimate of how long a request on a kept connection waited for its worker. The caller passes all times.
//!
//! A worker polls for ready connections, serves the returned connections, and polls again. A connection that a poll returns
//! at once became ready at some time since the previous poll, or since it was kept; on average its request waited for half of
//! this period. A connection that a poll returns after the worker slept did not wait. If a poll returns several connections, a
//! later one also waited while the earlier ones were served, and this time is known exactly.
//!
//! The wait is misplaced if another worker could have served the request. This is checked only at both ends of the period: the
//! whole wait counts if another worker is idle at one of the ends, and nothing counts otherwise. So the estimate is too high
//! if that worker was busy in between, and too low if it was idle only in between.

use std::time::{Duration, Instant};

/// A poll for ready connections.
#[derive(Clone, Copy, Debug)]
struct PollPoint {
    at: Instant,
    /// Whether another worker was idle.
    others_idle: bool,
}

/// The last two polls of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    before: Option<PollPoint>,
    last: Option<PollPoint>,
}

impl Rounds {
    /// Records a poll that returned connections without sleeping.
    pub(crate) fn found(&mut self, at: Instant, others_idle: bool) {
        self.before = self.last.replace(PollPoint { at, others_idle });
    }

    /// Records a poll in which the worker slept.
    pub(crate) fn woken(&mut self, at: Instant, others_idle: bool) {
        self.before = None;
        self.last = Some(PollPoint { at, others_idle });
    }

    /// Returns the misplaced wait of the request that the worker is about to serve. The last poll returned its connection, which
    /// was kept at `kept`. The worker asked for a connection at `asked`: before this poll, or after serving earlier connections that the
    /// poll returned. The time that the worker itself needs to return a connection is not a wait: every other worker needs it too.
    pub(crate) fn misplaced(
        &self,
        kept: Instant,
        asked: Instant,
        others_idle: impl FnOnce() -> bool,
    ) -> Duration {
        let Some(last) = self.last else { return Duration::ZERO };
        // The connection was kept after the last poll, so that poll did not return it.
        if kept > last.at {
            return Duration::ZERO;
        }
        let unseen =
            self.before.map_or(Duration::ZERO, |before| last.at.duration_since(before.at.max(kept)) / 2);
        let waited = unseen + asked.saturating_duration_since(last.at);
        let idle = self.before.is_some_and(|before| before.others_idle) || last.others_idle || others_idle();
        if idle { waited } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(begin: Instant, milliseconds: u64) -> Instant {
        begin + Duration::from_millis(milliseconds)
    }

    #[test]
    fn the_wait_is_half_the_gap_plus_earlier_requests() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        assert_eq!(rounds.misplaced(zero, zero, || true), Duration::ZERO);
        // Two connections woke the worker: the second waits for the first.
        rounds.woken(after(zero, 100), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 90), || true), Duration::ZERO);
        assert_eq!(rounds.misplaced(zero, after(zero, 100), || true), Duration::ZERO);
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || false), Duration::ZERO);
        // Three connections were ready after 20 ms of work.
        rounds.found(after(zero, 120), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 120), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 125), || true), Duration::from_millis(15));
        // The last of these connections was kept after the work had begun.
        assert_eq!(rounds.misplaced(after(zero, 116), after(zero, 125), || true), Duration::from_millis(7));
        assert_eq!(rounds.misplaced(after(zero, 121), after(zero, 125), || true), Duration::ZERO);
    }

    #[test]
    fn a_worker_idle_at_either_end_counts() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        rounds.woken(zero, true);
        rounds.found(after(zero, 10), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 10), || false), Duration::from_millis(5));
        rounds.found(after(zero, 20), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 20), || false), Duration::ZERO);
        rounds.found(after(zero, 30), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 30), || false), Duration::from_millis(5));
        // After a sleep the polls before it do not count.
        rounds.woken(after(zero, 40), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 40), || true), Duration::ZERO);
    }
}
