//! How long a request on a kept connection has waited for its worker, as the worker can tell. Times are passed in.
//!
//! A worker learns what is ready when it looks, and between two looks it serves. What it finds at once became ready at some
//! time since it looked before, or since the connection was kept: it waited half of that on average. What it finds after
//! it had to sleep waited for nothing. Of several that were found together the later ones waited, in addition, for those
//! served before them, and that is known exactly.
//!
//! The wait is misplaced where another worker could have served the request. That is asked at the ends of the period only:
//! if another worker is idle at one of them all of the wait counts, else none. So it is too much where the other was busy
//! for a part of it, and too little where it was idle in between only.

use std::time::{Duration, Instant};

/// A moment at which a worker looked what is ready.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    /// Another worker was idle.
    others_idle: bool,
}

/// The last two looks of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds {
    before: Option<Look>,
    last: Option<Look>,
}

impl Rounds {
    /// The worker has looked, and found something without sleeping.
    pub(crate) fn found(&mut self, at: Instant, others_idle: bool) {
        self.before = self.last.replace(Look { at, others_idle });
    }

    /// The worker has slept, and was woken.
    pub(crate) fn woken(&mut self, at: Instant, others_idle: bool) {
        self.before = None;
        self.last = Some(Look { at, others_idle });
    }

    /// How long the request that is served now has waited in vain, on a connection that was found in the last look, and
    /// is kept since `kept`.
    pub(crate) fn misplaced(
        &self,
        kept: Instant,
        now: Instant,
        others_idle: impl FnOnce() -> bool,
    ) -> Duration {
        let Some(last) = self.last else { return Duration::ZERO };
        // Kept since the look: this was not found in it.
        if kept > last.at {
            return Duration::ZERO;
        }
        let unseen =
            self.before.map_or(Duration::ZERO, |before| last.at.duration_since(before.at.max(kept)) / 2);
        let waited = unseen + now.saturating_duration_since(last.at);
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
    fn half_of_what_nobody_saw_and_all_of_what_was_served_before() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        assert_eq!(rounds.misplaced(zero, zero, || true), Duration::ZERO);
        // Woken by two: the second waits for the first.
        rounds.woken(after(zero, 100), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 100), || true), Duration::ZERO);
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 110), || false), Duration::ZERO);
        // Three were ready after 20 ms of work.
        rounds.found(after(zero, 120), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 120), || true), Duration::from_millis(10));
        assert_eq!(rounds.misplaced(zero, after(zero, 125), || true), Duration::from_millis(15));
        // The last of them was kept after the work had begun.
        assert_eq!(rounds.misplaced(after(zero, 116), after(zero, 125), || true), Duration::from_millis(7));
        assert_eq!(rounds.misplaced(after(zero, 121), after(zero, 125), || true), Duration::ZERO);
    }

    #[test]
    fn another_who_was_idle_at_either_end_counts() {
        let zero = Instant::now();
        let mut rounds = Rounds::default();
        rounds.woken(zero, true);
        rounds.found(after(zero, 10), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 10), || false), Duration::from_millis(5));
        rounds.found(after(zero, 20), false);
        assert_eq!(rounds.misplaced(zero, after(zero, 20), || false), Duration::ZERO);
        rounds.found(after(zero, 30), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 30), || false), Duration::from_millis(5));
        // After a sleep what was before is forgotten.
        rounds.woken(after(zero, 40), true);
        assert_eq!(rounds.misplaced(zero, after(zero, 40), || true), Duration::ZERO);
    }
}
