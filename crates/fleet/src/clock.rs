//! The offset between the monotonic clocks of two machines, from exchanges of messages (as in RFC 5905, section 8, with the
//! minimum of the round-trip times).

use serde::{Deserialize, Serialize};

/// The number of exchanges of an estimate.
pub const EXCHANGES: usize = 64;

/// One request and its answer. Times in nanoseconds of a monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Time at which the request was sent, on the local clock.
    pub sent: i64,
    /// Time at which the remote side answered, on the remote clock.
    pub answered: i64,
    /// Time at which the answer arrived, on the local clock.
    pub received: i64,
}

/// The offset of a remote clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockEstimate {
    /// Remote clock minus local clock, in nanoseconds.
    pub offset_ns: i64,
    /// Minimum round-trip time of the exchanges.
    pub rtt_ns: u64,
    /// Maximum error of the offset: half of the minimum round-trip time.
    pub bound_ns: u64,
}

impl ClockEstimate {
    /// Estimates the offset from the exchange with the minimum round-trip time. `None` without an exchange in which time passes
    /// forward.
    pub fn of(exchanges: &[Exchange]) -> Option<ClockEstimate> {
        let forward = exchanges.iter().filter(|exchange| exchange.received >= exchange.sent);
        let best = forward.min_by_key(|exchange| exchange.received - exchange.sent)?;
        let rtt = (best.received - best.sent) as u64;
        let middle = best.sent + (best.received - best.sent) / 2;
        // Rounded up: the bound holds for an odd round-trip time too.
        // An answer that is far off is a wrong clock, not a panic.
        Some(ClockEstimate {
            offset_ns: best.answered.saturating_sub(middle),
            rtt_ns: rtt,
            bound_ns: rtt.div_ceil(2),
        })
    }

    /// Converts a local time to a time of the remote clock.
    pub fn to_remote(&self, local_ns: i64) -> i64 {
        local_ns.saturating_add(self.offset_ns)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns an exchange with these delays on the way out and back, with a remote clock `offset` ahead.
    fn exchange(sent: i64, offset: i64, out: i64, back: i64) -> Exchange {
        Exchange { sent, answered: sent + out + offset, received: sent + out + back }
    }

    proptest! {
        #[test]
        fn the_offset_is_within_its_bound(
            offset in -3_000_000_000_000_i64..100_000_000_000_000,
            delays in proptest::collection::vec((0_i64..50_000_000, 0_i64..50_000_000), 1..64),
        ) {
            let exchanges: Vec<Exchange> = delays
                .iter()
                .enumerate()
                .map(|(at, (out, back))| exchange(at as i64 * 1_000_000_000, offset, *out, *back))
                .collect();
            let estimate = ClockEstimate::of(&exchanges).unwrap();
            prop_assert!(estimate.offset_ns.abs_diff(offset) <= estimate.bound_ns);
            let least = delays.iter().map(|(out, back)| out + back).min().unwrap();
            prop_assert_eq!(estimate.rtt_ns, least as u64);
        }
    }

    #[test]
    fn the_shortest_exchange_decides() {
        // A queue delays the answers of two exchanges by 5 ms and 40 ms; the third is symmetric.
        let exchanges = [
            exchange(0, 37_000_000_000, 100_000, 5_000_000),
            exchange(1_000_000_000, 37_000_000_000, 100_000, 40_000_000),
            exchange(2_000_000_000, 37_000_000_000, 100_000, 100_000),
        ];
        let estimate = ClockEstimate::of(&exchanges).unwrap();
        assert_eq!(estimate, ClockEstimate { offset_ns: 37_000_000_000, rtt_ns: 200_000, bound_ns: 100_000 });
        assert_eq!(estimate.to_remote(5), 37_000_000_005);
    }

    #[test]
    fn a_clock_that_runs_backwards_gives_no_estimate() {
        assert_eq!(ClockEstimate::of(&[]), None);
        assert_eq!(ClockEstimate::of(&[Exchange { sent: 5, answered: 0, received: 4 }]), None);
    }
}
