use fastrand::Rng;

/// When operations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// The next one when the last one is over: a slow server is asked less often.
    Closed,
    /// So many a second, evenly, whether or not the last one is over.
    Even(f64),
    /// So many a second on average, at random moments.
    Poisson(f64),
}

impl Arrival {
    /// `closed`, `even` or `poisson`.
    pub fn name(self) -> &'static str {
        match self {
            Arrival::Closed => "closed",
            Arrival::Even(_) => "even",
            Arrival::Poisson(_) => "poisson",
        }
    }

    /// Operations per second that are offered; `None` in a closed loop.
    pub fn rate_per_s(self) -> Option<f64> {
        match self {
            Arrival::Closed => None,
            Arrival::Even(rate) | Arrival::Poisson(rate) => Some(rate),
        }
    }
}

/// The intended starts of one of several threads, in nanoseconds since the start of the run.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Nanoseconds between two starts of this thread, on average.
    gap: f64,
    random: Option<Rng>,
    next: f64,
}

impl Schedule {
    /// The part of thread `number` of `threads`; `None` in a closed loop.
    pub(crate) fn new(arrival: Arrival, number: usize, threads: usize, seed: u64) -> Option<Self> {
        let gap = 1e9 / arrival.rate_per_s()? * threads as f64;
        let mut schedule = match arrival {
            Arrival::Closed => return None,
            // The threads take turns.
            Arrival::Even(_) => Schedule { gap, random: None, next: gap * number as f64 / threads as f64 },
            // As many independent processes of Poisson are one.
            Arrival::Poisson(_) => {
                let random = Rng::with_seed(seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                Schedule { gap, random: Some(random), next: 0.0 }
            }
        };
        if schedule.random.is_some() {
            schedule.advance();
        }
        Some(schedule)
    }

    /// The next intended start.
    pub(crate) fn next(&self) -> u64 {
        self.next as u64
    }

    /// Goes on to the one after it.
    pub(crate) fn advance(&mut self) {
        let share = match &mut self.random {
            // 1 minus a number below 1 is never 0, whose logarithm there is none of.
            Some(random) => -(1.0 - random.f64()).ln(),
            None => 1.0,
        };
        self.next += self.gap * share;
    }

    /// How many starts are intended before `until`, the ones that were taken included; leaves the schedule there.
    pub(crate) fn count_until(&mut self, until: u64) -> u64 {
        let mut count = 0;
        while self.next() < until {
            count += 1;
            self.advance();
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(arrival: Arrival, threads: usize, until: u64) -> Vec<u64> {
        let mut all = Vec::new();
        for number in 0..threads {
            let mut schedule = Schedule::new(arrival, number, threads, 7).unwrap();
            while schedule.next() < until {
                all.push(schedule.next());
                schedule.advance();
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn even_starts_are_evenly_apart_however_many_threads_share_them() {
        let all = starts(Arrival::Even(1000.0), 3, 1_000_000_000);
        assert_eq!(all.len(), 1000);
        assert!(all.windows(2).all(|pair| (999_999..=1_000_001).contains(&(pair[1] - pair[0]))));
        assert!(Schedule::new(Arrival::Closed, 0, 1, 1).is_none());
    }

    #[test]
    fn poisson_starts_have_the_rate_and_the_scatter_of_chance() {
        let all = starts(Arrival::Poisson(10_000.0), 2, 10_000_000_000);
        // The count has a standard deviation of 316.
        assert!((98_500..101_500).contains(&all.len()), "{}", all.len());
        let gaps: Vec<f64> = all.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Of an exponential distribution both are equal.
        assert!((0.95..1.05).contains(&(variance.sqrt() / mean)));
        let mut schedule = Schedule::new(Arrival::Even(10.0), 0, 1, 1).unwrap();
        assert_eq!((schedule.count_until(1_000_000_000), schedule.count_until(1_000_000_000)), (10, 0));
    }
}
