//! The choice of a policy for `Auto`.

use std::fmt;

use crate::listen::policy::{AcceptPolicy, Family, Workers};

/// An accept policy and the reason for it.
///
/// Example: [`ListenerGroup`](crate::listen::ListenerGroup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PolicyChoice {
    /// The policy.
    pub policy: AcceptPolicy,
    /// The reason, as a phrase.
    pub why: &'static str,
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.policy, self.why)
    }
}

/// Returns the requested policy, or the one for `Auto`.
///
/// The policies for `Auto` work on every kernel from 5.15: EPOLLEXCLUSIVE is from 4.5, EPOLLONESHOT from 2.6.
pub(crate) fn choose(requested: AcceptPolicy, _family: Family, workers: Workers) -> PolicyChoice {
    match (requested, workers) {
        (AcceptPolicy::Auto, Workers::Threads) => PolicyChoice {
            policy: AcceptPolicy::SharedOneshot,
            why: "threads can share one epoll of listener and connections, so that no request waits behind a busy worker \
                  while another is idle (with Workers::Threads; a runtime reads the requests of its connections itself)",
        },
        (AcceptPolicy::Auto, Workers::Runtimes) => PolicyChoice {
            policy: AcceptPolicy::ROTATE,
            why: "a runtime keeps its connections; workers take turns, so that each runtime gets as many connections",
        },
        (AcceptPolicy::Auto, Workers::Processes) => PolicyChoice {
            policy: AcceptPolicy::ROTATE,
            why: "processes cannot share connections; they take turns because each adds the listener again after an accept",
        },
        (policy, _) => PolicyChoice { policy, why: "as requested" },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_chooses_a_possible_policy() {
        for family in Family::ALL {
            for workers in [Workers::Threads, Workers::Runtimes, Workers::Processes] {
                let choice = choose(AcceptPolicy::Auto, family, workers);
                assert!(choice.policy.check(family, workers).is_ok(), "{choice}");
            }
        }
        assert_eq!(choose(AcceptPolicy::Plain, Family::Unix, Workers::Threads).policy, AcceptPolicy::Plain);
    }
}
