//! Is B faster than A, by how much, and when is enough measured to say so?

use fastrand::Rng;

use crate::interval::median;
use crate::student;

/// Pairs before the first look.
pub const FIRST_LOOK: usize = 8;

/// What the looks may spend of the 5%: at 8, 16, 32, ... pairs; each after these has half of the one before. Their sum,
/// for ever, is 0.025, so that the last look has as much at least, and by the union bound all intervals together are wrong
/// in at most 5% of comparisons.
///
/// The first has little, because four quads say little. Half is kept for the last, because on a noisy machine time is
/// over before the interval is narrow, and all that the looks before have spent was spent for nothing.
const SPENDING: [f64; 5] = [0.0025, 0.005, 0.00625, 0.00625, 0.0025];

/// All that may be spent.
const ALPHA: f64 = 0.05;

/// Samples of a saved side below which resampling it gives no honest interval.
const FEWEST_SAMPLES: usize = 6;

/// An A/B comparison that is fed pairs of trials while they run, and says when it is decided.
///
/// Trials run A B B A, then B A A B, and so on. Two pairs are a quad, in which a drift that is linear cancels; the
/// logarithm of B/A of each quad is one sample. Their trimmed mean (a fifth off each end, so that outliers weigh
/// little) has a t-interval by Yuen's method on the winsorised variance.
///
/// Who looks after every pair and stops when something shows finds differences that are not there. So this looks at 8,
/// 16, 32, ... pairs only, each look has a part of the 5%, and the last one, when time is over, has what is left. The
/// interval is therefore wider than one that is looked at once, and true however often it was looked at.
///
/// On 2,000 simulated comparisons of A with A (3% log-normal noise that is correlated between neighbours, one trial in
/// 20 slower by up to a factor of three, drift of up to 10%, 4 to 256 pairs) it claimed a difference in 47; of 2,000 in
/// which B was 5.8% faster it saw 1,974 with 32 pairs at most, and all with 64 (`cargo test -p fourtuple-measure
/// two_thousand -- --nocapture`).
#[derive(Clone, Debug)]
pub struct Comparison {
    narrow: f64,
    pairs: usize,
    /// log(B/A) of the pair that waits for its second half.
    half: Option<f64>,
    /// log(B/A) of each quad.
    quads: Vec<f64>,
    looks: usize,
    spent: f64,
}

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conclusion {
    /// How much faster B is than A: 1.058 is 5.8% faster.
    pub ratio: f64,
    /// Ends of the 95% interval of the ratio; `None` where there is too little for one.
    pub interval: Option<(f64, f64)>,
    /// What may be said.
    pub verdict: Verdict,
}

/// What a comparison may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The interval is above 1.
    Faster,
    /// The interval is below 1.
    Slower,
    /// The interval has 1 in it and nothing that matters.
    Same,
    /// Anything else.
    TooNoisy,
}

impl Comparison {
    /// A comparison that is to end when the interval reaches no further than `narrow` each way (0.02 is 2%).
    pub fn new(narrow: f64) -> Self {
        Comparison { narrow, pairs: 0, half: None, quads: Vec::new(), looks: 0, spent: 0.0 }
    }

    /// Takes a sample of each side that ran next to each other, more being better; both positive and finite.
    ///
    /// # Panics
    /// When a sample is not positive and finite: it has no logarithm.
    pub fn push(&mut self, a: f64, b: f64) {
        assert!(a > 0.0 && b > 0.0 && a.is_finite() && b.is_finite(), "no ratio of {b} to {a}");
        self.pairs += 1;
        let ratio = b.ln() - a.ln();
        match self.half.take() {
            Some(first) => self.quads.push((first + ratio) / 2.0),
            None => self.half = Some(ratio),
        }
    }

    /// Pairs taken.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// To be asked after each pair: the conclusion, once there is one at a planned look; `None`: go on.
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

    /// The last look, when there is to be no further pair: has all that the others left. `None`: no pair at all.
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
        let reach = error * student::two_sided(alpha, freedom);
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

    /// The verdict in words: `B is 5.8% faster, 4.1 to 7.4`, `no difference larger than 2%`, `too noisy to say`.
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

/// What a look may spend.
fn level(look: usize) -> f64 {
    let last = SPENDING.len() - 1;
    SPENDING[look.min(last)] * 0.5_f64.powi(look.saturating_sub(last) as i32)
}

/// The mean of what is left when a fifth is cut off each end, its standard error and the degrees of freedom (Yuen 1974).
/// The error is infinite where there is but one sample.
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

/// Compares samples that did not run in pairs, more being better: the ratio of the medians, B to A, with its bootstrap
/// interval at 95%. `None` when a side has no sample; no interval when one has fewer than six.
///
/// Nothing here cancels a drift: it knows no more than what was saved.
pub fn compare_saved(a: &[f64], b: &[f64], narrow: f64, random: &mut Rng) -> Option<Conclusion> {
    const RESAMPLES: usize = 4000;
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let ratio = median(&mut b.to_vec()) / median(&mut a.to_vec());
    if a.len().min(b.len()) < FEWEST_SAMPLES {
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

#[cfg(test)]
mod tests;
