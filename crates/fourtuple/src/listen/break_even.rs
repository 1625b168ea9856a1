//! Whether it is better to keep a connection or to close it after each request: what one costs against what the other makes
//! wait. No clock and no socket: waits and chances are passed in.
//!
//! Closing after every N requests costs each of them c/N + m(1 - 1/N), where c is the cost of a fresh connection and m what
//! a request on a kept one waits in vain. That is a straight line in 1/N: the best N is 1 where m > c, else there is none.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Fewer samples say nothing.
const LEAST: u64 = 200;
/// While connections are kept there is a verdict after so many samples, and before where it is clear.
const WINDOW: u64 = 2000;
/// While they are closed, the samples of the few that are kept. A hundredth of all requests may make all of the wait, and
/// too few would see none of them.
const WINDOW_OF_PROBES: u64 = 1000;
/// How often it is looked whether the verdict is clear.
const LOOK: u64 = 50;
/// How many times one must be above the other to change what is done.
const FACTOR: f64 = 1.25;
/// Share of the requests whose connection is kept all the same, so that their wait goes on being measured.
const PROBES: f64 = 1.0 / 16.0;

/// What [`Recycle::Measured`](crate::listen::Recycle::Measured) has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreakEven {
    /// Time for a fresh local connection: connect(2), accept4(2) and two close(2), the median of 64 when the group was opened.
    pub fresh_connection: Duration,
    /// Mean, over requests on kept connections, of the time that one waited for its worker while another was idle.
    pub misplaced_wait: Duration,
    /// Whether connections are closed after each request.
    pub closes: bool,
    /// Requests that the mean is of.
    pub samples: u64,
}

impl fmt::Display for BreakEven {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BreakEven { fresh_connection, misplaced_wait, closes, samples } = self;
        write!(
            formatter,
            "a fresh connection costs {fresh_connection:.1?}, a request on a kept one waits {misplaced_wait:.1?} for its \
             worker while another is idle (mean of {samples}): connections are {}",
            if *closes { "closed after each request" } else { "kept" }
        )
    }
}

/// What is summed up, in memory that all workers share.
#[derive(Clone, Copy)]
enum Sum {
    /// Of the window that is open.
    Samples,
    /// Nanoseconds.
    Waited,
    /// Square microseconds.
    Squares,
    /// 1: connections are closed.
    Closes,
    /// Of the window before, so that there is always something to report.
    SamplesBefore,
    WaitedBefore,
    /// Nanoseconds that a fresh connection costs.
    Fresh,
}

/// Weighs the wait of kept connections against the cost of fresh ones.
pub(crate) struct Scales<'a> {
    sums: &'a [AtomicU64],
}

impl<'a> Scales<'a> {
    /// Numbers that the scales need.
    pub(crate) const SUMS: usize = 7;

    /// `sums` are as many as that, 0 at first.
    pub(crate) fn new(sums: &'a [AtomicU64]) -> Scales<'a> {
        Scales { sums }
    }

    /// Says what a fresh connection costs.
    pub(crate) fn set_fresh(&self, cost: Duration) {
        self.set(Sum::Fresh, u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX));
    }

    fn of(&self, sum: Sum) -> &AtomicU64 {
        &self.sums[sum as usize]
    }

    fn get(&self, sum: Sum) -> u64 {
        self.of(sum).load(Ordering::Relaxed)
    }

    fn set(&self, sum: Sum, value: u64) {
        self.of(sum).store(value, Ordering::Relaxed);
    }

    fn add(&self, sum: Sum, more: u64) {
        self.of(sum).fetch_add(more, Ordering::Relaxed);
    }

    /// Counts a request on a kept connection, and what it waited in vain.
    pub(crate) fn add_request(&self, waited: Duration) {
        let nanoseconds = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        if nanoseconds > 0 {
            // Ten seconds are as bad as any longer time; more would not fit into the sum of squares.
            let nanoseconds = nanoseconds.min(10_000_000_000);
            self.add(Sum::Waited, nanoseconds);
            self.add(Sum::Squares, (nanoseconds / 1000).pow(2));
        }
        let samples = self.of(Sum::Samples).fetch_add(1, Ordering::Relaxed) + 1;
        // One worker comes upon each such number, so they do not look all at once.
        if samples.is_multiple_of(LOOK) && samples >= LEAST {
            self.weigh(samples);
        }
    }

    fn weigh(&self, samples: u64) {
        let count = samples as f64;
        let waited = self.get(Sum::Waited);
        let mean = waited as f64 / count / 1000.0;
        let variance = (self.get(Sum::Squares) as f64 / count - mean * mean).max(0.0);
        let fresh = self.get(Sum::Fresh) as f64 / 1000.0;
        let closes = self.get(Sum::Closes) != 0;
        let full = samples >= if closes { WINDOW_OF_PROBES } else { WINDOW };
        // Who looks often sees chance more often, too.
        let doubt = if full { 2.0 } else { 4.0 } * (variance / count).sqrt();
        let other_is_better = if closes {
            full && mean + doubt < fresh && mean * FACTOR < fresh
        } else {
            mean - doubt > fresh && mean > fresh * FACTOR
        };
        if !other_is_better && !full {
            return;
        }
        self.set(Sum::SamplesBefore, samples);
        self.set(Sum::WaitedBefore, waited);
        if other_is_better {
            self.set(Sum::Closes, (!closes).into());
        }
        // What was measured before connections were closed says nothing of what is now.
        self.set(Sum::Waited, 0);
        self.set(Sum::Squares, 0);
        self.set(Sum::Samples, 0);
    }

    /// Whether the connection of a request is to be closed after it. `chance`: from 0 to 1, drawn for the request.
    pub(crate) fn is_last(&self, chance: f64) -> bool {
        chance >= PROBES && self.get(Sum::Closes) != 0
    }

    pub(crate) fn report(&self) -> BreakEven {
        let (mut samples, mut waited) = (self.get(Sum::Samples), self.get(Sum::Waited));
        // While connections are closed few samples come, and of a load that closing has changed: until there is a verdict on
        // them the one before is what explains what is done.
        let enough = if self.get(Sum::Closes) == 0 { LEAST } else { WINDOW_OF_PROBES };
        if samples < enough && self.get(Sum::SamplesBefore) > 0 {
            (samples, waited) = (self.get(Sum::SamplesBefore), self.get(Sum::WaitedBefore));
        }
        BreakEven {
            fresh_connection: Duration::from_nanos(self.get(Sum::Fresh)),
            misplaced_wait: Duration::from_nanos(waited.checked_div(samples).unwrap_or(0)),
            closes: self.get(Sum::Closes) != 0,
            samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRESH: Duration = Duration::from_micros(50);

    fn sums() -> Vec<AtomicU64> {
        (0..Scales::SUMS).map(|_| AtomicU64::new(0)).collect()
    }

    fn weighing(sums: &[AtomicU64]) -> Scales<'_> {
        let scales = Scales::new(sums);
        scales.set_fresh(FRESH);
        scales
    }

    /// Requests of which one in `one_in` waits `wait`: how often it was decided anew, and the share of kept ones.
    fn play(
        scales: &Scales<'_>,
        random: &mut fastrand::Rng,
        requests: u32,
        one_in: u32,
        wait: Duration,
    ) -> (u32, f64) {
        let (mut changes, mut kept, mut was) = (0, 0, scales.report().closes);
        for _ in 0..requests {
            if !scales.is_last(random.f64()) {
                kept += 1;
                scales.add_request(if random.u32(..one_in) == 0 { wait } else { Duration::ZERO });
            }
            let closes = scales.report().closes;
            changes += u32::from(closes != was);
            was = closes;
        }
        (changes, f64::from(kept) / f64::from(requests))
    }

    #[test]
    fn it_closes_where_kept_connections_wait_and_keeps_them_again_where_they_do_not() {
        for seed in 0..20 {
            let sums = sums();
            let scales = weighing(&sums);
            let mut random = fastrand::Rng::with_seed(seed);
            assert_eq!(play(&scales, &mut random, 10_000, 1000, Duration::from_micros(10)), (0, 1.0));
            // A hundredth waits 20 ms: four times the cost of a connection.
            let (changes, kept) = play(&scales, &mut random, 100_000, 100, Duration::from_millis(20));
            assert!(changes == 1 && kept < 0.1, "seed {seed}: {changes} changes, {kept} kept");
            let found = scales.report();
            assert!(found.closes && found.misplaced_wait > FRESH && found.samples >= LEAST, "{found}");
            let (changes, kept) = play(&scales, &mut random, 100_000, 1000, Duration::from_micros(10));
            assert!(changes == 1 && kept > 0.5, "seed {seed}: {changes} changes, {kept} kept");
            assert!(!scales.report().closes);
        }
    }

    #[test]
    fn it_does_not_flap_where_both_cost_the_same() {
        for wait in [40, 45, 50, 55, 60] {
            let sums = sums();
            let scales = weighing(&sums);
            let mut random = fastrand::Rng::with_seed(wait);
            let wait = Duration::from_micros(wait * 10);
            let (changes, _) = play(&scales, &mut random, 1_000_000, 10, wait);
            assert!(changes <= 2, "{changes} changes at {wait:?} for a tenth");
        }
    }

    #[test]
    fn a_few_waits_decide_nothing() {
        let sums = sums();
        let scales = weighing(&sums);
        for _ in 0..LEAST - 1 {
            scales.add_request(Duration::from_secs(1));
            assert!(!scales.is_last(1.0));
        }
        scales.add_request(Duration::from_secs(100));
        assert!(scales.is_last(1.0) && scales.is_last(0.07) && !scales.is_last(0.05));
        assert_eq!(
            scales.report().to_string(),
            "a fresh connection costs 50.0µs, a request on a kept one waits 1.0s for its worker while another is idle (mean \
             of 200): connections are closed after each request"
        );
    }

    #[test]
    fn nothing_known_is_nothing_done() {
        let sums = sums();
        let scales = weighing(&sums);
        assert_eq!(scales.report(), BreakEven { fresh_connection: FRESH, ..BreakEven::default() });
        assert!(!scales.is_last(1.0));
    }
}
