//! How long requests are worked on, and how long clients pause in between.

use std::time::Duration;

use fastrand::Rng;

/// The service times of a load: most requests are short, some are long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// Service time of most.
    pub short: Duration,
    /// Service time of the others.
    pub long: Duration,
    /// How many are long, 0 to 1.
    pub long_share: f64,
}

impl Mix {
    /// All requests take this long.
    pub fn all(time: Duration) -> Mix {
        Mix { short: time, long: time, long_share: 0.0 }
    }

    /// Draws a service time: one number of the generator, whatever comes out.
    pub(crate) fn draw(&self, random: &mut Rng) -> Duration {
        if random.f64() < self.long_share { self.long } else { self.short }
    }
}

/// How a worker spends the service time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spend {
    /// It sleeps, as one that waits for a disk: workers do not take each other's processors, so that few are enough.
    Sleep,
    /// It computes: only a machine with a processor for each worker shows what the policy does.
    Spin,
}

impl Spend {
    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            Spend::Sleep => "sleep",
            Spend::Spin => "spin",
        }
    }
}

/// What a client waits between an answer and its next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Exponential with this mean: then requests of many clients come independently of each other.
    Exponential(Duration),
    /// Always the same, as the probe of seed 001 does.
    Fixed(Duration),
}

impl Pause {
    /// Draws a pause: one number of the generator, whatever comes out.
    pub(crate) fn draw(self, random: &mut Rng) -> Duration {
        let share = random.f64();
        match self {
            Pause::Exponential(mean) => mean.mul_f64(-(1.0 - share).ln()),
            Pause::Fixed(time) => time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_share_of_long_requests_is_what_was_asked() {
        let mix = Mix { short: MS, long: 9 * MS, long_share: 0.05 };
        let mut random = Rng::with_seed(4);
        let long = (0..20_000).filter(|_| mix.draw(&mut random) == 9 * MS).count();
        assert!((900..1_100).contains(&long), "{long} of 20,000");
        let none = Mix::all(MS);
        assert!((0..1_000).all(|_| none.draw(&mut random) == MS));
    }

    #[test]
    fn pauses_have_their_mean_and_a_seed_gives_them_again() {
        let draw = |seed| -> Vec<Duration> {
            let mut random = Rng::with_seed(seed);
            (0..20_000).map(|_| Pause::Exponential(MS).draw(&mut random)).collect()
        };
        let pauses = draw(1);
        let mean = pauses.iter().sum::<Duration>() / 20_000;
        assert!((mean.as_secs_f64() - 1e-3).abs() < 5e-5, "{mean:?}");
        assert_eq!(pauses, draw(1));
        assert_ne!(pauses, draw(2));
        assert_eq!(Pause::Fixed(MS).draw(&mut Rng::with_seed(9)), MS);
        assert_eq!(Pause::Exponential(Duration::ZERO).draw(&mut Rng::with_seed(9)), Duration::ZERO);
    }
}
