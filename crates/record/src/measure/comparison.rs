//! Sequential A/B comparison: the ratio of two programs with its interval, and when the samples suffice.

use fastrand::Rng;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Pairs before the first look.
pub const FIRST_LOOK: usize = 8;

/// The error budget of each look: at 8, 16, 32, ... pairs, each look after the third has half of the previous one's.
/// The sum of the infinite series is 0.025, so that at least as much remains for the last look. By the union bound at
/// most 5% of comparisons have an interval that misses the true ratio.
///
///
/// The first look has a small budget because four quads prove little. The last look has half of the budget: on a
/// noisy machine the time often ends before the interval is narrow, and the budget of all earlier looks is then spent
/// without a result.
const SPENDING: [f64; 5] = [0.0025, 0.005, 0.00625, 0.00625, 0.0025];

/// The error budget of all looks together.
const ALPHA: f64 = 0.05;

/// The number of samples of a saved side below which resampling gives no valid interval.
const MIN_SAMPLES: usize = 6;

/// An A/B comparison that takes pairs of trials while they run and decides when to stop.
///
/// Trials run A B B A, then B A A B, and so on. Two pairs form a quad, in which a linear drift cancels; the logarithm
/// of B/A of each quad is one sample. Their trimmed mean (a fifth off each end, so that outliers have little weight)
/// has a t-interval by Yuen's method on the winsorised variance.
///
/// Checking after every pair and stopping at the first significant result would find differences that do not exist.
/// The comparison therefore looks only at 8, 16, 32, ... pairs. Each look has a part of the 5%, and the last one,
/// when the time is over, has the unspent remainder. The interval is wider than after a single look, and holds for
/// any number of looks.
///
/// In 2,000 simulated comparisons of A with A (3% log-normal noise correlated between neighbours, one trial in 20
/// slower by up to a factor of three, drift of up to 10%, 4 to 256 pairs) it claimed a difference in 47; in 2,000
/// with B faster by 5.8% it found 1,974 within 32 pairs, and all within 64 (`cargo test -p fourtuple-record
/// two_thousand -- --nocapture`).
#[derive(Clone, Debug)]
pub struct Comparison {
    narrow: f64,
    pairs: usize,
    /// log(B/A) of a pair whose quad is incomplete.
    half: Option<f64>,
    /// log(B/A) of each quad.
    quads: Vec<f64>,
    looks: usize,
    spent: f64,
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conclusion {
    /// Ratio of B to A: 1.058 means that B is 5.8% faster.
    pub ratio: f64,
    /// The 95% interval of the ratio; `None`: too few samples.
    pub interval: Option<(f64, f64)>,
    pub verdict: Verdict,
}

/// The verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// B is faster: the whole interval is above 1.
    Faster,
    /// B is slower: the whole interval is below 1.
    Slower,
    /// There is no relevant difference: the interval contains 1 and lies within the requested limits.
    Same,
    /// The samples do not decide.
    TooNoisy,
}

impl Comparison {
    /// Creates a comparison that ends when the interval is within `narrow` of the ratio (0.02 is 2%).
    pub fn new(narrow: f64) -> Self {
        Comparison { narrow, pairs: 0, half: None, quads: Vec::new(), looks: 0, spent: 0.0 }
    }

    /// Adds one pair: a sample of each side, larger is better.
    ///
    /// # Panics
    /// Panics if a sample is not positive and finite, because it has no logarithm.
    pub fn push(&mut self, a: f64, b: f64) {
        assert!(a > 0.0 && b > 0.0 && a.is_finite() && b.is_finite(), "no ratio of {b} to {a}");
        self.pairs += 1;
        let ratio = b.ln() - a.ln();
        match self.half.take() {
            Some(first) => self.quads.push((first + ratio) / 2.0),
            None => self.half = Some(ratio),
        }
    }

    /// Returns the number of pairs added.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Returns the conclusion once a planned look reaches one; `None`: continue. Call it after each pair.
    pub fn look(&mut self) -> Option<Conclusion> {
        if self.pairs != FIRST_LOOK << self.looks {
            return None;
        }
        let alpha = level(self.looks);
        self.looks += 1;
        self.spent += alpha;
        let conclusion = self.at(alpha)?;
        let (low, high) = conclusion.interval?;
        let enough = (high / low).ln() / 2.0 <= self.narrow.ln_1p();
        (enough && conclusion.verdict != Verdict::TooNoisy).then_some(conclusion)
    }

    /// Returns the result of the last look, which spends the remaining error budget; `None`: there is no pair. Call
    /// it when no further pair will follow.
    pub fn conclude(&self) -> Option<Conclusion> {
        self.at(ALPHA - self.spent)
    }

    fn at(&self, alpha: f64) -> Option<Conclusion> {
        let Some((middle, error, freedom)) = trimmed(&self.quads) else {
            let ratio = self.half?.exp();
            return Some(Conclusion { ratio, interval: None, verdict: Verdict::TooNoisy });
        };
        if self.pairs < FIRST_LOOK {
            return Some(Conclusion { ratio: middle.exp(), interval: None, verdict: Verdict::TooNoisy });
        }
        let reach = error * two_sided(alpha, freedom);
        Some(Conclusion::of(middle.exp(), (middle - reach).exp(), (middle + reach).exp(), self.narrow))
    }
}

impl Conclusion {
    fn of(ratio: f64, low: f64, high: f64, narrow: f64) -> Conclusion {
        let verdict = if low > 1.0 {
            Verdict::Faster
        } else if high < 1.0 {
            Verdict::Slower
        } else if high <= 1.0 + narrow && low >= 1.0 / (1.0 + narrow) {
            Verdict::Same
        } else {
            Verdict::TooNoisy
        };
        Conclusion { ratio, interval: Some((low, high)), verdict }
    }

    /// Returns the verdict as text: `B is 5.8% faster, 4.1 to 7.4`, `no difference larger than 2%`, `too noisy to
    /// say`.
    pub fn words(&self, narrow: f64) -> String {
        let (low, high) = self.interval.unwrap_or((self.ratio, self.ratio));
        let percent = |ratio: f64| (ratio - 1.0).abs() * 100.0;
        match self.verdict {
            Verdict::Faster if self.ratio >= 3.0 => {
                format!("B is {:.1} times as fast, {low:.1} to {high:.1}", self.ratio)
            }
            Verdict::Faster => {
                format!(
                    "B is {:.1}% faster, {:.1} to {:.1}",
                    percent(self.ratio),
                    percent(low),
                    percent(high)
                )
            }
            Verdict::Slower => {
                format!(
                    "B is {:.1}% slower, {:.1} to {:.1}",
                    percent(self.ratio),
                    percent(high),
                    percent(low)
                )
            }
            Verdict::Same => {
                let text = format!("{:.2}", narrow * 100.0);
                format!("no difference larger than {}%", text.trim_end_matches('0').trim_end_matches('.'))
            }
            Verdict::TooNoisy => "too noisy to say".to_owned(),
        }
    }
}

/// Returns the error budget of a look by its number, from 0.
fn level(look: usize) -> f64 {
    let last = SPENDING.len() - 1;
    SPENDING[look.min(last)] * 0.5_f64.powi(look.saturating_sub(last) as i32)
}

/// Returns the mean after a fifth is trimmed off each end, its standard error and the degrees of freedom (Yuen 1974).
/// The error is infinite for a single sample.
fn trimmed(samples: &[f64]) -> Option<(f64, f64, f64)> {
    if samples.is_empty() {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let count = sorted.len();
    let cut = count / 5;
    let kept = (count - 2 * cut) as f64;
    let mean = sorted[cut..count - cut].iter().sum::<f64>() / kept;
    let winsorised = || sorted.iter().map(|value| value.clamp(sorted[cut], sorted[count - 1 - cut]));
    let centre = winsorised().sum::<f64>() / count as f64;
    let squares: f64 = winsorised().map(|value| (value - centre).powi(2)).sum();
    let freedom = kept - 1.0;
    let error = if freedom > 0.0 { (squares / (kept * freedom)).sqrt() } else { f64::INFINITY };
    Some((mean, error, freedom))
}

/// Compares samples that did not run in pairs; larger is better. Returns the ratio of the medians, B to A, with its
/// 95% bootstrap interval; `None` if a side has no sample; no interval if a side has fewer than six.
///
/// No drift cancels here, because saved samples do not tell when they were taken.
pub fn compare_saved(a: &[f64], b: &[f64], narrow: f64, random: &mut Rng) -> Option<Conclusion> {
    const RESAMPLES: usize = 4000;
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let ratio = median(&mut b.to_vec()) / median(&mut a.to_vec());
    if a.len().min(b.len()) < MIN_SAMPLES {
        return Some(Conclusion { ratio, interval: None, verdict: Verdict::TooNoisy });
    }
    let mut draw = |side: &[f64]| {
        let mut drawn: Vec<f64> = side.iter().map(|_| side[random.usize(..side.len())]).collect();
        median(&mut drawn)
    };
    let mut ratios: Vec<f64> = (0..RESAMPLES).map(|_| draw(b) / draw(a)).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    Some(Conclusion::of(ratio, ratios[RESAMPLES / 40], ratios[RESAMPLES - 1 - RESAMPLES / 40], narrow))
}

/// Returns the two-sided quantile of Student's t distribution: the `t` that a variable with `freedom` degrees of
/// freedom (above 0) exceeds in magnitude with probability `alpha` (0 to 1, exclusive).
fn two_sided(alpha: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::INFINITY, |student| student.inverse_cdf(1.0 - alpha / 2.0))
}

/// A point estimate with its 95% bootstrap interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The point estimate.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

const RESAMPLES: usize = 2000;

/// Returns the median of `samples` with its 95% bootstrap interval; `None` without samples.
///
/// With fewer than about six samples the interval is little more than their range; with one sample it has no width.
pub fn median_interval(samples: &[f64], random: &mut Rng) -> Option<Interval> {
    if samples.is_empty() {
        return None;
    }
    let mut scratch = samples.to_vec();
    let value = median(&mut scratch);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for slot in &mut scratch {
                *slot = samples[random.usize(..samples.len())];
            }
            median(&mut scratch)
        })
        .collect();
    medians.sort_unstable_by(f64::total_cmp);
    Some(Interval { value, low: medians[RESAMPLES / 40], high: medians[RESAMPLES - 1 - RESAMPLES / 40] })
}

/// Returns the middle sample, or the mean of the two middle ones. Sorts `samples`, which must not be empty.
fn median(samples: &mut [f64]) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let middle = samples.len() / 2;
    if samples.len() % 2 == 1 { samples[middle] } else { (samples[middle - 1] + samples[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated machine with noisy neighbours: correlated noise, outliers, a drift.
    struct Machine {
        random: Rng,
        noise: f64,
        neighbour: f64,
        drift: f64,
        phase: f64,
        at: f64,
    }

    /// Share of the noise that carries over from one trial to the next.
    const CORRELATION: f64 = 0.5;

    impl Machine {
        fn new(seed: u64, noise: f64) -> Machine {
            let mut random = Rng::with_seed(seed);
            let drift = 0.1 * (2.0 * random.f64() - 1.0);
            let phase = random.f64() * 6.0;
            Machine { random, noise, neighbour: 0.0, drift, phase, at: 0.0 }
        }

        fn normal(&mut self) -> f64 {
            let (radius, angle) = (1.0 - self.random.f64(), self.random.f64());
            (-2.0 * radius.ln()).sqrt() * (angle * std::f64::consts::TAU).cos()
        }

        /// Returns the rate of a trial of a program that reaches `rate` on a quiet machine.
        fn trial(&mut self, rate: f64) -> f64 {
            let fresh = self.normal() * self.noise * (1.0_f64 - CORRELATION * CORRELATION).sqrt();
            self.neighbour = CORRELATION * self.neighbour + fresh;
            let outlier = if self.random.f64() < 0.05 { 1.0 + self.random.f64().powi(3) * 2.0 } else { 1.0 };
            self.at += 1.0 / 512.0;
            let drift = self.drift * self.at + 0.02 * (self.at * 20.0 + self.phase).sin();
            rate * (self.neighbour + drift).exp() / outlier
        }

        /// Runs A and B until the comparison is decided, or `most` pairs are done.
        fn compare(&mut self, b: f64, most: usize) -> (Conclusion, usize) {
            let mut comparison = Comparison::new(0.02);
            loop {
                // The order of four pairs is A B, B A, B A, A B.
                if matches!(comparison.pairs() % 4, 0 | 3) {
                    let rate_a = self.trial(1e4);
                    comparison.push(rate_a, self.trial(b * 1e4));
                } else {
                    let rate_b = self.trial(b * 1e4);
                    comparison.push(self.trial(1e4), rate_b);
                }
                if let Some(conclusion) = comparison.look() {
                    return (conclusion, comparison.pairs());
                }
                if comparison.pairs() == most {
                    return (comparison.conclude().unwrap(), most);
                }
            }
        }
    }

    fn claims(conclusion: &Conclusion) -> bool {
        matches!(conclusion.verdict, Verdict::Faster | Verdict::Slower)
    }

    /// Counts the comparisons out of `runs` that claim a difference, with time for 4 to 256 pairs, or for `most`.
    fn claimed(runs: u64, seed: u64, noise: f64, b: f64, most: Option<usize>) -> usize {
        let run = |number: u64| {
            let most = most.unwrap_or_else(|| 4 + (number as usize * 37) % 253);
            Machine::new(seed + number, noise).compare(b, most).0
        };
        (0..runs).filter(|number| claims(&run(*number))).count()
    }

    #[test]
    fn equal_programs_rarely_differ() {
        for noise in [0.01, 0.03, 0.10] {
            let claimed = claimed(200, 1_000, noise, 1.0, None);
            assert!(claimed <= 10, "claimed {claimed} of 200 at a noise of {noise}");
        }
    }

    #[test]
    fn a_relevant_difference_is_found() {
        for b in [1.058, 1.0 / 1.058] {
            let seen = claimed(200, 2_000, 0.03, b, Some(64));
            assert!(seen >= 190, "saw {seen} of 200 of {b}");
        }
    }

    #[test]
    fn two_thousand_equal_comparisons_give_few_false_positives() {
        for noise in [0.01, 0.03, 0.10] {
            let claims = claimed(2_000, 10_000, noise, 1.0, None);
            assert!(claims <= 100, "{claims} of 2000 at {noise}");
            // The output is cited in the documentation of `Comparison`: cargo test -p fourtuple-record false_positives
            // -- --nocapture
            println!("A/A at {noise}: {claims} of 2000");
        }
        for most in [32, 64] {
            let seen = claimed(2_000, 30_000, 0.03, 1.058, Some(most));
            assert!(seen >= 1_900, "{seen} of 2000 within {most} pairs");
            println!("5.8% within {most} pairs: {seen} of 2000");
        }
    }

    #[test]
    fn the_interval_contains_the_true_ratio() {
        let covers = |number: &u64| {
            let (low, high) = Machine::new(5_000 + number, 0.03).compare(1.058, 100).0.interval.unwrap();
            low <= 1.058 && 1.058 <= high
        };
        let covered = (0..200).filter(covers).count();
        assert!(covered >= 190, "covered {covered} of 200");
    }

    #[test]
    fn clear_results_end_early_and_equal_programs_are_same() {
        let (conclusion, pairs) = Machine::new(1, 0.001).compare(1.5, 1 << 12);
        assert_eq!(conclusion.verdict, Verdict::Faster);
        assert!(pairs <= 32, "{pairs} pairs");
        let (conclusion, _) = Machine::new(1, 0.01).compare(1.0, 1 << 12);
        assert_eq!(conclusion.verdict, Verdict::Same, "{conclusion:?}");
        assert_eq!(conclusion.words(0.02), "no difference larger than 2%");
    }

    #[test]
    fn all_looks_stay_within_the_error_budget() {
        let total: f64 = (0..60).map(level).sum();
        assert!(total <= ALPHA / 2.0 + 1e-12, "{total}: the last look has half of it at least");
    }

    #[test]
    fn a_few_pairs_have_a_ratio_and_no_interval() {
        let mut comparison = Comparison::new(0.02);
        assert_eq!(comparison.conclude(), None);
        for pairs in 1..FIRST_LOOK {
            comparison.push(100.0, 200.0);
            assert_eq!(comparison.look(), None);
            let conclusion = comparison.conclude().unwrap();
            assert!((conclusion.ratio - 2.0).abs() < 1e-9, "{conclusion:?}");
            assert_eq!((conclusion.interval, conclusion.verdict), (None, Verdict::TooNoisy), "{pairs} pairs");
        }
        comparison.push(100.0, 200.0);
        assert_eq!(comparison.look().unwrap().verdict, Verdict::Faster);
    }

    #[test]
    fn verdicts_are_text() {
        let words = |ratio, low, high| Conclusion::of(ratio, low, high, 0.02).words(0.02);
        assert_eq!(words(1.058, 1.041, 1.074), "B is 5.8% faster, 4.1 to 7.4");
        assert_eq!(words(0.942, 0.926, 0.959), "B is 5.8% slower, 4.1 to 7.4");
        assert_eq!(words(12.0, 11.0, 13.04), "B is 12.0 times as fast, 11.0 to 13.0");
        assert_eq!(words(1.001, 0.99, 1.012), "no difference larger than 2%");
        assert_eq!(words(1.01, 0.99, 1.03), "too noisy to say");
        assert_eq!(Conclusion::of(1.0, 0.996, 1.004, 0.005).words(0.005), "no difference larger than 0.5%");
    }

    #[test]
    fn saved_samples() {
        let mut random = Rng::with_seed(3);
        let samples = |middle: f64, count: u32| -> Vec<f64> {
            (0..count).map(|number| middle * (1.0 + 0.001 * f64::from(number % 5))).collect()
        };
        let mut compare = |a: &[f64], b: &[f64]| compare_saved(a, b, 0.02, &mut random);
        assert_eq!(compare(&[], &[1.0]), None);
        let one = compare(&[100.0], &[106.0]).unwrap();
        assert_eq!((one.ratio, one.interval, one.verdict), (1.06, None, Verdict::TooNoisy));
        let faster = compare(&samples(100.0, 20), &samples(106.0, 20)).unwrap();
        assert_eq!(faster.verdict, Verdict::Faster, "{faster:?}");
        assert_eq!(compare(&samples(100.0, 20), &samples(100.0, 20)).unwrap().verdict, Verdict::Same);
    }

    #[test]
    fn agrees_with_the_printed_tables() {
        for (alpha, freedom, printed) in [
            (0.05, 1.0, 12.706),
            (0.05, 3.0, 3.182),
            (0.01, 3.0, 5.841),
            (0.05, 10.0, 2.228),
            (0.001, 10.0, 4.587),
            (0.05, 120.0, 1.980),
            (0.005, 30.0, 3.030),
        ] {
            let found = two_sided(alpha, freedom);
            assert!((found - printed).abs() < 6e-4, "{alpha} {freedom}: {found}, not {printed}");
        }
    }

    #[test]
    fn the_interval_covers_the_true_median_at_its_nominal_rate() {
        let mut random = Rng::with_seed(11);
        let mut covers = || {
            let samples: Vec<f64> = (0..25).map(|_| random.f64()).collect();
            let interval = median_interval(&samples, &mut random).unwrap();
            interval.low <= 0.5 && 0.5 <= interval.high
        };
        let covered = (0..300).filter(|_| covers()).count();
        assert!((270..=300).contains(&covered), "covered {covered} of 300");
    }

    #[test]
    fn one_sample_has_no_width() {
        let interval = median_interval(&[3.0], &mut Rng::with_seed(1)).unwrap();
        assert_eq!((interval.value, interval.low, interval.high), (3.0, 3.0, 3.0));
    }
}
