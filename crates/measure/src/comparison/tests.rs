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
            let (first, second) = if matches!(comparison.pairs() % 4, 0 | 3) { (1.0, b) } else { (b, 1.0) };
            let (first_rate, second_rate) = (self.trial(first * 1e4), self.trial(second * 1e4));
            if matches!(comparison.pairs() % 4, 0 | 3) {
                comparison.push(first_rate, second_rate);
            } else {
                comparison.push(second_rate, first_rate);
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
        // The output is cited in the documentation of `Comparison`: cargo test -p fourtuple-measure false_positives
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
