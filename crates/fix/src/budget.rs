//! The limit of the processor time of work that repeats while a fix runs.

use std::time::{Duration, Instant};

/// Allows work again when the processor time of its last turn is at most a share of the time since then.
#[derive(Debug)]
pub(crate) struct Budget {
    share: f64,
    from: Instant,
}

impl Budget {
    /// Limits the work to this share of a processor.
    pub(crate) fn of(share: f64) -> Budget {
        Budget { share, from: Instant::now() }
    }

    pub(crate) fn allows(&self, now: Instant) -> bool {
        now >= self.from
    }

    /// Notes the processor time of work that began at `now`.
    pub(crate) fn spend(&mut self, now: Instant, used: Duration) {
        self.from = now + used.div_f64(self.share);
    }
}
