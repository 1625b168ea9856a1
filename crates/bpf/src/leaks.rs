//! Connections that were counted at their SYN and never come: floods, resets before the accept, queues that overflow.
//!
//! A worker looks now and then. What was claimed more than a second ago and is neither accepted nor in the accept queue has
//! leaked. Where accepts go on meanwhile, newer connections stand in for the missing ones and less is found: never too
//! much. A worker that gets none meanwhile finds the rest within a second; but one that gets a few, because the others are
//! busier still, would look busier than it is for as long as that goes on: two claims that leaked took a worker nine tenths
//! of its share. So there is a second rule: the lowest number that was on its way at any glance in two seconds is taken
//! off, too. Some of that may be handshakes over long paths, which take turns being on their way; every worker has its
//! share of those, so that they make no difference between workers. When they come no more, `accepted` is too high by
//! them, and is put right.

use std::collections::VecDeque;
use std::time::Duration;

/// How old a claim must be to count as lost. Handshakes over the longest paths take less, and a SYN-ACK that was lost is
/// sent again after this time (TCP_TIMEOUT_INIT): such a connection is put right when it comes.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a number on its way must never have been lower to be taken off.
const STEADY: Duration = Duration::from_secs(2);

/// The fewest glances that tell a number which is always there from one that was there by chance. A worker that starves
/// has few: one for each connection that it still gets.
const GLANCES: u32 = 8;

/// The memory of one worker's looks.
#[derive(Debug, Default)]
pub struct Leaks {
    /// When, and what was claimed then; oldest first. Only the first may be older than the patience.
    looks: VecDeque<(Duration, u64)>,
    /// What was on its way, at the least, since the first look of this span.
    least: Option<Least>,
}

#[derive(Debug)]
struct Least {
    since: Duration,
    coming: u64,
    glances: u32,
}

impl Leaks {
    /// Nothing seen yet. To be made anew with every seat that is taken.
    pub fn new() -> Leaks {
        Leaks::default()
    }

    /// A look in between that changes nothing: `claimed`, `accepted` and `queued` as they are now. It costs next to nothing
    /// while the span has seen nobody on the way, and then `queued` is not asked for.
    pub fn glance(&mut self, claimed: u64, accepted: u64, queued: impl FnOnce() -> u64) {
        let Some(least) = self.least.as_mut().filter(|least| least.coming > 0) else { return };
        least.glances += 1;
        let coming = claimed.saturating_sub(accepted);
        // With its queue it can only be lower.
        let coming = if coming == 0 { 0 } else { coming.saturating_sub(queued()) };
        least.coming = least.coming.min(coming);
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
            self.least = None;
            return -signed(accepted - claimed);
        }
        let lost = match self.looks.front().filter(|look| is_old(look)) {
            Some(&(_, then)) => then.saturating_sub(accepted.saturating_add(queued)),
            None => 0,
        };
        let steady = self.steady(now, (claimed - accepted).saturating_sub(queued));
        let change = lost.max(steady);
        if change > 0 {
            self.least = None;
        }
        signed(change)
    }

    /// What was never lower, where that is known by now.
    fn steady(&mut self, now: Duration, coming: u64) -> u64 {
        let least = self.least.get_or_insert(Least { since: now, coming, glances: 0 });
        least.coming = least.coming.min(coming);
        if now.saturating_sub(least.since) < STEADY || (least.coming > 0 && least.glances < GLANCES) {
            return 0;
        }
        let found = least.coming;
        self.least = None;
        found
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
    fn what_is_always_on_its_way_is_found_under_load_by_looking_often() {
        let mut leaks = Leaks::new();
        // 3 leaked at the start; then one comes every 10 ms, and is there at every second glance.
        let mut found = 0;
        for tick in 0..500_u64 {
            let accepted = tick / 2 + found;
            let claimed = 3 + tick.div_ceil(2);
            leaks.glance(claimed, accepted, || 0);
            if tick % 100 == 0 {
                found += leaks.look(ms(5 * tick), claimed, accepted, 0).unsigned_abs();
            }
        }
        assert_eq!(found, 3);
    }

    #[test]
    fn a_worker_that_gets_ten_a_second_is_not_starved_by_two_that_leaked() {
        let mut leaks = Leaks::new();
        // As the soak has seen it: what it gets stands in for what is missing, for ever.
        let mut found = 0;
        for tick in 0..100_u64 {
            leaks.glance(2 + tick, tick + found, || 0);
            if tick % 5 == 0 {
                found += leaks.look(ms(100 * tick), 2 + tick, tick + found, 0).unsigned_abs();
            }
        }
        assert_eq!(found, 2);
    }

    #[test]
    fn what_is_on_its_way_now_and_then_is_not_taken_off() {
        let mut leaks = Leaks::new();
        for tick in 0..2_000_u64 {
            let coming = u64::from(tick % 70 != 0);
            leaks.glance(tick + coming, tick, || 0);
            if tick % 100 == 1 {
                assert_eq!(leaks.look(ms(5 * tick), tick + coming, tick, 0), 0);
            }
        }
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
