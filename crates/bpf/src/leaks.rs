//! Connections that were counted at their SYN and never come: floods, resets before the accept, queues that overflow.
//!
//! A worker looks now and then. What was claimed more than a second ago and is neither accepted nor in the accept queue has
//! leaked. Where accepts go on meanwhile, newer connections stand in for the missing ones and less is found: never too
//! much. That heals by itself, for a worker that looks busier than it is gets fewer connections, and with none the rest is
//! found within a second.

use std::collections::VecDeque;
use std::time::Duration;

/// How old a claim must be to count as lost. Handshakes over the longest paths take less, and a SYN-ACK that was lost is
/// sent again after this time (TCP_TIMEOUT_INIT): such a connection is put right when it comes.
const PATIENCE: Duration = Duration::from_secs(1);

/// The memory of one worker's looks.
#[derive(Debug, Default)]
pub struct Leaks {
    /// When, and what was claimed then; oldest first. Only the first may be older than the patience.
    looks: VecDeque<(Duration, u64)>,
}

impl Leaks {
    /// Nothing seen yet. To be made anew with every seat that is taken.
    pub fn new() -> Leaks {
        Leaks::default()
    }

    /// What is to be added to `accepted`: the claims that are lost, or, below 0, connections that nobody claimed here (SYN
    /// cookies, the kernel's hash).
    pub fn look(&mut self, now: Duration, claimed: u64, accepted: u64, queued: u64) -> i64 {
        self.looks.push_back((now, claimed));
        let is_old = |&(then, _): &(Duration, u64)| now.saturating_sub(then) >= PATIENCE;
        while self.looks.get(1).is_some_and(is_old) {
            self.looks.pop_front();
        }
        if accepted > claimed {
            return -signed(accepted - claimed);
        }
        match self.looks.front().filter(|look| is_old(look)) {
            Some(&(_, then)) => signed(then.saturating_sub(accepted.saturating_add(queued))),
            None => 0,
        }
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_claim_is_lost_after_a_second_and_only_once() {
        let mut leaks = Leaks::new();
        assert_eq!(leaks.look(ms(0), 5, 0, 0), 0);
        assert_eq!(leaks.look(ms(500), 5, 0, 0), 0);
        assert_eq!(leaks.look(ms(1000), 5, 0, 0), 5);
        assert_eq!(leaks.look(ms(1500), 5, 5, 0), 0);
        assert_eq!(leaks.look(ms(2500), 5, 5, 0), 0);
    }

    #[test]
    fn what_waits_in_the_queue_is_not_lost() {
        let mut leaks = Leaks::new();
        for look in 0..10 {
            assert_eq!(leaks.look(ms(500 * look), 7, 0, 7), 0);
        }
        assert_eq!(leaks.look(ms(6000), 7, 0, 4), 3);
    }

    #[test]
    fn handshakes_under_way_are_not_lost() {
        // 100 connections a second, each 200 ms on its way, looked at every 500 ms.
        let mut leaks = Leaks::new();
        for look in 0..20_u64 {
            let claimed = 50 * look + 20;
            assert_eq!(leaks.look(ms(500 * look), claimed, 50 * look, 0), 0);
        }
    }

    #[test]
    fn under_load_fewer_are_found_and_the_rest_when_it_ends() {
        let mut leaks = Leaks::new();
        // 10 of the first second never come; 50 more do in every half second.
        let mut accepted = 0;
        for look in 1..6_u64 {
            accepted += 50;
            assert_eq!(leaks.look(ms(500 * look), 10 + 50 * look, accepted, 0), 0);
        }
        let claimed = 10 + 250;
        assert_eq!(leaks.look(ms(3000), claimed, accepted, 0), 0);
        assert_eq!(leaks.look(ms(3500), claimed, accepted, 0), 10);
        assert_eq!(leaks.look(ms(4000), claimed, accepted + 10, 0), 0);
    }

    #[test]
    fn connections_that_nobody_claimed_are_put_right_at_once() {
        let mut leaks = Leaks::new();
        assert_eq!(leaks.look(ms(0), 3, 5, 0), -2);
        assert_eq!(leaks.look(ms(100), 3, 3, 0), 0);
    }

    #[test]
    fn looks_that_come_late_or_often_change_nothing() {
        let mut leaks = Leaks::new();
        for look in 0..100_000_u64 {
            assert_eq!(leaks.look(Duration::from_micros(look), 1, 0, 0), 0);
        }
        assert_eq!(leaks.look(ms(60_000), 9, 0, 0), 1, "only what was there a second ago");
        assert_eq!(leaks.looks.len(), 2);
    }
}
