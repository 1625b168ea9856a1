//! Distributions of service times. The caller provides the random number generator.

use std::fmt;
use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use crate::serve::running::Stop;

/// A distribution of service times: a mixture of shapes.
///
/// Text forms: `50us` is constant, `exp:1ms` exponential with this mean, `pareto:1ms:1.5` heavy-tailed with mean and
/// shape. `10%:100ms`: a tenth of the requests 100 ms, the rest nothing; `5%:10ms,100us`: a twentieth 10 ms, the rest
/// 100 us.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// Probability and shape of each part. With the remaining probability the time is 0.
    parts: Vec<(f64, Shape)>,
}

/// One part of a mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// A constant time.
    Fixed(Duration),
    Exponential(Duration),
    /// Pareto with this mean. The smaller the shape, the heavier the tail; with 2 and less the variance is infinite.
    Pareto {
        mean: Duration,
        /// Above 1: else there is no mean.
        shape: f64,
    },
}

/// Smallest share of a part: the text form has no more digits.
const MIN_SHARE: f64 = 1e-9;

const ACCEPTED: &str = "expected a time such as 50us, exp:MEAN, pareto:MEAN:SHAPE (above 1), PERCENT%: before any of \
                        them, or such parts with commas, of which one may go without percent and is the rest";

impl Service {
    /// No service time.
    pub const NONE: Service = Service { parts: Vec::new() };

    /// Creates a distribution of one shape.
    pub fn of(shape: Shape) -> Service {
        Service { parts: vec![(1.0, shape)] }
    }

    /// Adds a part: this share of the requests (0 to 1) has a time of `shape`; the rest keeps the previous distribution.
    #[must_use]
    pub fn with(mut self, share: f64, shape: Shape) -> Service {
        let share = share.clamp(0.0, 1.0);
        self.parts.iter_mut().for_each(|(probability, _)| *probability *= 1.0 - share);
        self.parts.push((share, shape));
        self
    }

    /// Parses the text form. `duration` parses a time with its unit.
    ///
    /// # Errors
    ///
    /// A line that names the error and the accepted values.
    pub fn parse(text: &str, duration: impl Fn(&str) -> Result<Duration, String>) -> Result<Service, String> {
        let refuse = || format!("{text:?} is not a service time: {ACCEPTED}");
        let mut parts = Vec::new();
        let mut rest = None;
        let mut said = 0.0;
        for part in text.split(',') {
            match part.split_once("%:") {
                Some((percent, shape)) => {
                    let share = percent.parse::<f64>().map_err(|_| refuse())? / 100.0;
                    if !(MIN_SHARE..=1.0).contains(&share) {
                        return Err(refuse());
                    }
                    said += share;
                    parts.push((share, Shape::parse(shape, &duration).ok_or_else(refuse)?));
                }
                None if rest.is_none() => rest = Some(Shape::parse(part, &duration).ok_or_else(refuse)?),
                None => return Err(refuse()),
            }
        }
        if said > 1.0 + MIN_SHARE {
            return Err(format!("{text:?} is not a service time: its parts are more than 100%"));
        }
        if let Some(shape) = rest {
            let share = 1.0 - said;
            if share < 2.0 * MIN_SHARE {
                return Err(format!(
                    "{text:?} is not a service time: its parts are 100% without the last one"
                ));
            }
            parts.push((share, shape));
        }
        parts.retain(|(_, shape)| !shape.is_zero());
        Ok(Service { parts })
    }

    /// Returns whether every request has a service time of 0.
    pub fn is_none(&self) -> bool {
        self.parts.is_empty()
    }

    /// Draws a service time.
    pub fn draw(&self, random: &mut fastrand::Rng) -> Duration {
        let mut left = match self.parts.as_slice() {
            [] => return Duration::ZERO,
            // A single part needs no random number.
            [(probability, shape)] if *probability >= 1.0 => return shape.draw(random),
            _ => random.f64(),
        };
        for (probability, shape) in &self.parts {
            if left < *probability {
                return shape.draw(random);
            }
            left -= probability;
        }
        Duration::ZERO
    }
}

impl Shape {
    fn parse(text: &str, duration: &impl Fn(&str) -> Result<Duration, String>) -> Option<Shape> {
        if let Some(mean) = text.strip_prefix("exp:") {
            return Some(Shape::Exponential(duration(mean).ok()?));
        }
        if let Some(rest) = text.strip_prefix("pareto:") {
            let (mean, shape) = rest.split_once(':')?;
            let shape = shape.parse().ok().filter(|shape: &f64| *shape > 1.0 && shape.is_finite())?;
            return Some(Shape::Pareto { mean: duration(mean).ok()?, shape });
        }
        duration(text).ok().map(Shape::Fixed)
    }

    fn is_zero(&self) -> bool {
        let (Shape::Fixed(time) | Shape::Exponential(time) | Shape::Pareto { mean: time, .. }) = self;
        time.is_zero()
    }

    fn draw(&self, random: &mut fastrand::Rng) -> Duration {
        // In (0, 1]: the logarithm is finite.
        let mut uniform = || 1.0 - random.f64();
        let seconds = match self {
            Shape::Fixed(time) => return *time,
            Shape::Exponential(mean) => mean.as_secs_f64() * -uniform().ln(),
            Shape::Pareto { mean, shape } => {
                mean.as_secs_f64() * (shape - 1.0) / shape * uniform().powf(-1.0 / shape)
            }
        };
        // A time beyond the range of Duration never ends.
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

impl fmt::Display for Service {
    /// Writes the text form, with a percentage for each part of a mixture.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return formatter.write_str("0s");
        }
        for (index, (probability, shape)) in self.parts.iter().enumerate() {
            if index > 0 {
                formatter.write_str(",")?;
            }
            if *probability < 1.0 {
                // Rounded: the percentage as typed, without the error of a binary fraction.
                write!(formatter, "{}%:", (probability * 1e12).round() / 1e10)?;
            }
            write!(formatter, "{shape}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Fixed(time) => formatter.write_str(&typed(*time)),
            Shape::Exponential(mean) => write!(formatter, "exp:{}", typed(*mean)),
            Shape::Pareto { mean, shape } => write!(formatter, "pareto:{}:{shape}", typed(*mean)),
        }
    }
}

/// Formats a duration in the largest unit in which it is an integer.
fn typed(time: Duration) -> String {
    let ns = time.as_nanos();
    for (unit, size) in [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)] {
        if ns.is_multiple_of(size) {
            return format!("{}{unit}", ns / size);
        }
    }
    format!("{ns}ns")
}

/// Maximum length of one sleep. Between two sleeps the worker checks the stop flag.
const NAP: Duration = Duration::from_millis(20);

/// Start and end of the stall, if there is one.
pub(crate) type StallTimes = Option<(Instant, Instant)>;

/// Service times and the stall. A worker serves no other connection meanwhile, like a synchronous handler.
pub(crate) struct Work {
    service: Service,
    spin: bool,
    random: fastrand::Rng,
    /// Start and end of the stall.
    stall: StallTimes,
    stop: Stop,
}

impl Work {
    pub(crate) fn new(service: Service, spin: bool, seed: u64, stop: Stop) -> Work {
        Work { service, spin, random: fastrand::Rng::with_seed(seed), stall: None, stop }
    }

    /// Sets start and end of the stall.
    pub(crate) fn set_stall(&mut self, stall: StallTimes) {
        self.stall = stall;
    }

    /// Returns whether the worker sleeps for service times, which then need a precise timer.
    pub(crate) fn sleeps(&self) -> bool {
        !self.service.is_none() && !self.spin
    }

    /// Sleeps until the end of the stall, if the stall has begun.
    pub(crate) fn stall(&mut self) {
        let Some((from, until)) = self.stall else { return };
        let now = Instant::now();
        if now >= from {
            self.stall = None;
            // All workers continue at the same moment, even if they noticed the stall at different times.
            self.sleep(until);
        }
    }

    /// Spends the service time of one request.
    pub(crate) fn serve(&mut self) {
        if self.service.is_none() {
            return;
        }
        let time = self.service.draw(&mut self.random);
        if time.is_zero() {
            return;
        }
        let until = Instant::now().checked_add(time);
        match until {
            Some(until) if self.spin => {
                while Instant::now() < until && !self.stop.is_set() {
                    hint::spin_loop();
                }
            }
            Some(until) => self.sleep(until),
            // The end is beyond the range of the clock.
            None => {
                while !self.stop.is_set() {
                    thread::sleep(NAP);
                }
            }
        }
    }

    fn sleep(&self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.is_set() {
                return;
            }
            thread::sleep(left.min(NAP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn duration(text: &str) -> Result<Duration, String> {
        let number = |unit| text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
        number("us")
            .map(Duration::from_micros)
            .or_else(|| number("ms").map(Duration::from_millis))
            .or_else(|| number("s").map(Duration::from_secs))
            .ok_or_else(|| "no".to_owned())
    }

    fn parse(text: &str) -> Service {
        Service::parse(text, duration).unwrap()
    }

    fn draws(text: &str, count: usize) -> Vec<Duration> {
        let mut random = fastrand::Rng::with_seed(7);
        let service = parse(text);
        (0..count).map(|_| service.draw(&mut random)).collect()
    }

    fn mean(times: &[Duration]) -> f64 {
        times.iter().map(Duration::as_secs_f64).sum::<f64>() / times.len() as f64
    }

    #[test]
    fn the_text_form_survives_a_round_trip() {
        for (text, shown) in [
            ("0s", "0s"),
            ("1000us", "1ms"),
            ("exp:1ms", "exp:1ms"),
            ("pareto:1ms:1.5", "pareto:1ms:1.5"),
            ("10%:100ms", "10%:100ms"),
            ("1ms,1%:100ms", "1%:100ms,99%:1ms"),
            ("0.1%:exp:1s,30%:1ms", "0.1%:exp:1s,30%:1ms"),
            ("100%:1ms", "1ms"),
            ("5%:10ms,0s", "5%:10ms"),
        ] {
            assert_eq!(parse(text).to_string(), shown, "{text}");
            assert_eq!(parse(shown), parse(text), "{text}");
        }
    }

    #[test]
    fn invalid_distributions_are_refused() {
        for (why, texts) in [
            ("no unit", &["", "1", "exp:1"][..]),
            ("no number", &["fast", "exp", "exp:", "10%:", "1ms,"]),
            ("no shape", &["pareto:1ms"]),
            ("a shape that has no mean", &["pareto:1ms:1", "pareto:1ms:nan", "pareto:1ms:inf"]),
            ("a share that is none", &["0%:1ms", "101%:1ms", "-1%:1ms", "nan%:1ms", "%:1ms"]),
            ("two without a share", &["1ms,2ms"]),
            ("more than 100%", &["60%:1ms,50%:2ms"]),
        ] {
            for text in texts {
                let error = Service::parse(text, duration).expect_err(why);
                let is_clear = error.contains("is not a service time") && !error.contains('\n');
                assert!(is_clear, "{why}: {text}: {error}");
            }
        }
    }

    #[test]
    fn draws_have_the_requested_means() {
        assert!(draws("50us", 10).iter().all(|time| *time == Duration::from_micros(50)));
        assert!(draws("0s", 10).iter().all(Duration::is_zero));
        // The seed is fixed: these are the same draws on every machine.
        assert!((mean(&draws("exp:1ms", 100_000)) - 1e-3).abs() < 2e-5);
        assert!((mean(&draws("pareto:1ms:3", 100_000)) - 1e-3).abs() < 2e-5);
        let smallest = *draws("pareto:1ms:3", 100_000).iter().min().unwrap();
        assert!(smallest >= Duration::from_nanos(666_666), "mean x (shape - 1) / shape: {smallest:?}");
    }

    #[test]
    fn draws_have_the_requested_shares() {
        let times = draws("5%:10ms,100us", 100_000);
        let slow = times.iter().filter(|time| **time == Duration::from_millis(10)).count();
        assert!((4_800..5_200).contains(&slow), "{slow}");
        assert_eq!(times.iter().filter(|time| **time == Duration::from_micros(100)).count(), 100_000 - slow);
        let built = Service::of(Shape::Fixed(Duration::from_micros(100)))
            .with(0.05, Shape::Fixed(Duration::from_millis(10)));
        let mut random = fastrand::Rng::with_seed(3);
        let slow = (0..100_000).filter(|_| built.draw(&mut random) > Duration::from_millis(1)).count();
        assert!((4_800..5_200).contains(&slow), "{slow}");
    }
}
