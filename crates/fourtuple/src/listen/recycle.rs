//! When a connection that is kept is closed all the same, so that its next request may find another worker.

use std::time::Duration;

/// When a kept connection is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Recycle {
    /// When the client closes it.
    #[default]
    Never,
    /// After so many requests; 1 is a connection per request.
    Requests(u32),
    /// With the first request after an age, which is drawn for each connection from `limit` ± `jitter` so that those
    /// which came together do not leave together.
    Age {
        /// The age.
        limit: Duration,
        /// Share of `limit`, from 0 to 1.
        jitter: f64,
    },
    /// After each request, as long as a fresh local connection costs less than the requests on kept ones wait for their
    /// worker while another is idle; else as `Never`. Both are measured ([`BreakEven`](crate::listen::BreakEven)): the cost
    /// when the group is opened, with 64 connections over a listener of its own; the wait all the time, on a sixteenth of
    /// the requests where connections are closed. Of use where clients are on this host: others pay a round trip more.
    Measured,
}

impl Recycle {
    /// Whether the request that a connection comes with is its last. `chance`: a number from 0 to 1 that is the
    /// connection's own.
    pub(crate) fn is_last(self, served: u32, age: Duration, chance: f64) -> bool {
        match self {
            // Whoever has measured knows.
            Recycle::Never | Recycle::Measured => false,
            Recycle::Requests(most) => served.saturating_add(1) >= most,
            Recycle::Age { limit, jitter } => {
                age >= limit.mul_f64((1.0 + jitter.clamp(0.0, 1.0) * (2.0 * chance - 1.0)).max(0.0))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_so_many_requests_or_an_age() {
        let age = Duration::from_secs(10);
        assert!(!Recycle::Never.is_last(u32::MAX, age, 0.0));
        assert!(Recycle::Requests(1).is_last(0, Duration::ZERO, 0.0));
        assert!(!Recycle::Requests(3).is_last(1, age, 0.0));
        assert!(Recycle::Requests(3).is_last(2, age, 0.0));
        let by_age = Recycle::Age { limit: Duration::from_secs(10), jitter: 0.5 };
        assert!(by_age.is_last(0, age, 0.5) && !by_age.is_last(0, age, 0.51));
        assert!(
            by_age.is_last(0, Duration::from_secs(5), 0.0)
                && !by_age.is_last(0, Duration::from_secs(14), 1.0)
        );
    }
}
