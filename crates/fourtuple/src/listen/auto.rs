//! What `Auto` becomes, and why.

use std::fmt;

use crate::listen::group::Workers;
use crate::listen::policy::{Family, Policy};

/// A policy, and why it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The policy.
    pub policy: Policy,
    /// The reason, in a sentence.
    pub why: &'static str,
}

impl fmt::Display for Choice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.policy, self.why)
    }
}

/// Needs nothing that a kernel from 5.15 may lack: EPOLLEXCLUSIVE is from 4.5, EPOLLONESHOT from 2.6.
pub(crate) fn choose(asked: Policy, _family: Family, workers: Workers) -> Choice {
    match (asked, workers) {
        (Policy::Auto, Workers::Threads) => Choice {
            policy: Policy::SharedOneshot,
            why: "threads can share one queue of listener and connections, so that no request waits behind a busy worker \
                  while another is idle",
        },
        (Policy::Auto, Workers::Processes) => Choice {
            policy: Policy::ROTATE,
            why: "processes cannot share connections; with the listener added anew after each they take turns",
        },
        (policy, _) => Choice { policy, why: "it was asked for" },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_auto_becomes_is_possible() {
        for family in Family::ALL {
            for workers in [Workers::Threads, Workers::Processes] {
                let choice = choose(Policy::Auto, family, workers);
                assert!(choice.policy.check(family, workers).is_ok(), "{choice}");
            }
        }
        assert_eq!(choose(Policy::Plain, Family::Unix, Workers::Threads).policy, Policy::Plain);
    }
}
