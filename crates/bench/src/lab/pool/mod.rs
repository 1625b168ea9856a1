//! A pool of workers behind one listener, and its clients; shared by `lab accept` and `lab keepalive`.
//!
//! The setup is a small version of "Keepalives considered harmful" (Cloudflare). Each worker serves one request at a time;
//! the clients are the upstream connections of a TLS terminator, each with one request in progress. Both speak HTTP/1.1, so
//! that the clients can also load nginx or haproxy: a request names the service time, and an answer may name the worker and
//! its timestamps.

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod series;
pub(crate) mod sums;
pub(crate) mod wire;
pub(crate) mod workers;

use std::time::Duration;

use fastrand::Rng;

pub use series::Selection;

/// The service times of a load: most requests are short, some are long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// Service time of short requests.
    pub short: Duration,
    /// Service time of long requests.
    pub long: Duration,
    /// Share of long requests, 0 to 1.
    pub long_share: f64,
}

impl Mix {
    /// Returns a mix in which all requests take this long.
    pub fn all(time: Duration) -> Mix {
        Mix { short: time, long: time, long_share: 0.0 }
    }

    /// Draws a service time. Takes exactly one number from the generator.
    fn draw(&self, random: &mut Rng) -> Duration {
        if random.f64() < self.long_share { self.long } else { self.short }
    }
}

/// How a worker spends the service time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spend {
    /// The worker sleeps, like a worker that waits for a disk. Workers need no processor meanwhile, so few processors are
    /// enough.
    Sleep,
    /// The worker computes. Only a machine with a processor for each worker shows the effect of the policy.
    Spin,
}

impl Spend {
    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Spend::Sleep => "sleep",
            Spend::Spin => "spin",
        }
    }
}

/// The pause of a client between a response and its next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Exponential with this mean, so that requests of many clients arrive independently of each other.
    Exponential(Duration),
    /// Constant, as in the published probe.
    Fixed(Duration),
}

impl Pause {
    /// Draws a pause. Takes exactly one number from the generator.
    fn draw(self, random: &mut Rng) -> Duration {
        let share = random.f64();
        match self {
            Pause::Exponential(mean) => mean.mul_f64(-(1.0 - share).ln()),
            Pause::Fixed(time) => time,
        }
    }
}

/// Returns the Rust expression for a policy name.
pub(crate) fn in_rust(policy: &str) -> String {
    match policy.split_once(':') {
        Some((_, every)) => format!("AcceptPolicy::Rotate {{ every: {every} }}"),
        None if policy == "rotate" => "AcceptPolicy::ROTATE".to_owned(),
        None => {
            let words = policy.split('-').map(|word| {
                let (first, rest) = word.split_at(word.len().min(1));
                first.to_uppercase() + rest
            });
            format!("AcceptPolicy::{}", words.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::AcceptPolicy;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_share_of_long_requests_is_as_requested() {
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

    #[test]
    fn policy_names_match_the_enum_variants() {
        for policy in AcceptPolicy::ALL {
            let said = in_rust(&policy.to_string());
            let is_rotate = policy == AcceptPolicy::ROTATE && said == "AcceptPolicy::ROTATE";
            assert!(is_rotate || said == format!("AcceptPolicy::{policy:?}"), "{said} for {policy:?}");
        }
        assert_eq!(in_rust("rotate:16"), "AcceptPolicy::Rotate { every: 16 }");
    }
}
