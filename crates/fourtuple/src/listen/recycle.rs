//! When the server closes a kept connection, so that another worker may get the client's next request.

use std::time::Duration;

use crate::listen::error::ListenError;

/// When the server closes a kept connection.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::listen::{ListenError, ListenerGroupBuilder, Recycle};
///
/// let builder = ListenerGroupBuilder::at(([127, 0, 0, 1], 0));
/// let by_age = Recycle::Age { limit: Duration::from_secs(60), jitter: 0.1 }; // between 54 s and 66 s
/// assert!(builder.clone().recycle(by_age).open()?.break_even().is_none());
///
/// let group = builder.recycle(Recycle::Measured).policy("exclusive".parse().unwrap()).open()?;
/// let costs = group.break_even().expect("the group uses Recycle::Measured");
/// assert_eq!((costs.closes, costs.samples), (false, 0)); // no request yet
/// println!("{costs}");
/// # Ok::<(), ListenError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Recycle {
    /// Never: the connection stays open until the client closes it.
    #[default]
    Never,
    /// After this number of requests; 1 means one connection per request.
    Requests(u32),
    /// With the first request after an age. The age is drawn per connection from `limit` ± `jitter`, so that connections which
    /// were opened together are not closed together.
    Age {
        /// The mean age.
        limit: Duration,
        /// Maximum deviation, as a fraction of `limit` from 0 to 1.
        jitter: f64,
    },
    /// After each request, while a fresh local connection costs less than requests on kept connections wait for their worker
    /// although another worker is idle; otherwise like `Never`.
    ///
    /// Both are measured ([`BreakEven`](crate::listen::BreakEven)). The cost is measured when the group is opened, with 64
    /// connections to a separate listener. The wait is measured continuously, and on one sixteenth of the requests while
    /// connections are closed. This helps clients on the same host; remote clients pay an additional round trip.
    Measured,
}

impl Recycle {
    /// Returns whether the current request of a connection is its last. `chance`: the connection's random number from 0 to 1.
    pub(crate) fn is_last(self, served: u32, age: Duration, chance: f64) -> bool {
        match self {
            // `Measured` is decided by the group's comparison.
            Recycle::Never | Recycle::Measured => false,
            Recycle::Requests(most) => served.saturating_add(1) >= most,
            Recycle::Age { limit, jitter } => {
                // Computed in floating point: `Duration::MAX` times more than 1 would overflow.
                age.as_secs_f64() >= limit.as_secs_f64() * (1.0 + jitter * (2.0 * chance - 1.0))
            }
        }
    }

    /// Refuses a jitter outside of 0 to 1.
    pub(crate) fn check(self) -> Result<(), ListenError> {
        match self {
            Recycle::Age { jitter, .. } if !(0.0..=1.0).contains(&jitter) => Err(ListenError::Setting {
                setting: "jitter",
                value: jitter.to_string(),
                accepted: "a number from 0 to 1",
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_age_limit_a_connection() {
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

    #[test]
    fn duration_max_never_ends_and_jitter_is_checked() {
        let never = Recycle::Age { limit: Duration::MAX, jitter: 1.0 };
        assert!(never.check().is_ok() && !never.is_last(0, Duration::from_secs(1 << 40), 1.0));
        for jitter in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
            let error = Recycle::Age { limit: Duration::from_secs(1), jitter }.check().unwrap_err();
            assert!(error.is_usage(), "{error}");
        }
    }
}
