//! The comparison of a pair, in numbers and in words, by the rules of `compare`.

use fourtuple_measure::{Comparison, Conclusion, Verdict};
use fourtuple_record::LocksRatio;

/// One figure of a pair.
#[derive(Clone, Debug)]
pub(super) struct FigureVerdict {
    /// The verdict. Higher figures are better.
    pub(super) verdict: Verdict,
    pub(super) ratio: LocksRatio,
    pub(super) words: String,
}

/// Rates and CPU times of the trials of a change, by pair.
#[derive(Clone, Debug)]
pub(super) struct PairVerdicts {
    narrow: f64,
    rate: Comparison,
    /// Queries per CPU time, so that a higher value is better, as for the rate.
    cpu: Comparison,
}

impl PairVerdicts {
    pub(super) fn new(narrow: f64) -> PairVerdicts {
        PairVerdicts { narrow, rate: Comparison::new(narrow), cpu: Comparison::new(narrow) }
    }

    /// Adds the rate and the CPU time per query of a pair of trials.
    pub(super) fn push(&mut self, before: (f64, f64), after: (f64, f64)) {
        self.rate.push(before.0, after.0);
        self.cpu.push(1.0 / before.1, 1.0 / after.1);
    }

    pub(super) fn pairs(&self) -> usize {
        self.rate.pairs()
    }

    /// Compares the rates. The number of pairs is fixed beforehand, so there is one test only, at the full level of 5%.
    pub(super) fn rate(&self) -> Option<FigureVerdict> {
        let conclusion = self.rate.conclude()?;
        let ratio = ratio(&conclusion);
        let verdict = conclusion.verdict;
        let words = words(verdict, ratio, self.narrow, ["more", "fewer"], "queries per second");
        Some(FigureVerdict { verdict, ratio, words })
    }

    /// Compares CPU times: a ratio below 1 is cheaper.
    pub(super) fn cpu(&self) -> Option<FigureVerdict> {
        let conclusion = self.cpu.conclude()?;
        let of_rate = ratio(&conclusion);
        let ratio = LocksRatio {
            value: 1.0 / of_rate.value,
            low: of_rate.high.map(|high| 1.0 / high),
            high: of_rate.low.map(|low| 1.0 / low),
        };
        let verdict = conclusion.verdict;
        let words = words(verdict, ratio, self.narrow, ["less", "more"], "CPU time per query");
        Some(FigureVerdict { verdict, ratio, words })
    }
}

fn ratio(conclusion: &Conclusion) -> LocksRatio {
    LocksRatio {
        value: conclusion.ratio,
        low: conclusion.interval.map(|(low, _)| low),
        high: conclusion.interval.map(|(_, high)| high),
    }
}

/// Formats a verdict: `5.8% more queries per second, 4.1 to 7.4`.
fn words(verdict: Verdict, ratio: LocksRatio, narrow: f64, [better, worse]: [&str; 2], of: &str) -> String {
    let percent = |ratio: f64| (ratio - 1.0).abs() * 100.0;
    let interval = |direction: &str| {
        let ends = [ratio.low.unwrap_or(ratio.value), ratio.high.unwrap_or(ratio.value)].map(percent);
        let (least, most) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        if ratio.value >= 3.0 {
            let (low, high) = (ratio.low.unwrap_or(ratio.value), ratio.high.unwrap_or(ratio.value));
            return format!("{:.1} times the {of}, {low:.1} to {high:.1}", ratio.value);
        }
        format!("{:.1}% {direction} {of}, {least:.1} to {most:.1}", percent(ratio.value))
    };
    match verdict {
        Verdict::Faster => interval(better),
        Verdict::Slower => interval(worse),
        Verdict::Same => {
            let text = format!("{:.2}", narrow * 100.0);
            format!("no difference larger than {}% in {of}", text.trim_end_matches('0').trim_end_matches('.'))
        }
        Verdict::TooNoisy => format!("{of}: too noisy to say"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(pairs: usize, after: f64) -> [(LocksRatio, String); 2] {
        let mut verdicts = PairVerdicts::new(0.05);
        for number in 0..pairs {
            // The noise is small and cancels out.
            let noise = 1.0 + 0.002 * (number % 3) as f64;
            verdicts.push((20_000.0 * noise, 50_000.0), (20_000.0 * after, 50_000.0 / after * noise));
        }
        [verdicts.rate().unwrap(), verdicts.cpu().unwrap()]
            .map(|figure_verdict| (figure_verdict.ratio, figure_verdict.words))
    }

    #[test]
    fn faster_is_more_queries_and_less_cpu_time() {
        let [(rate, words), (cpu, cpu_words)] = verdicts(8, 1.1);
        assert!(rate.low.unwrap() > 1.0 && words.contains("% more queries per second"), "{words}");
        assert!(cpu.high.unwrap() < 1.0 && cpu_words.contains("% less CPU time per query"), "{cpu_words}");
        assert!(cpu.low.unwrap() <= cpu.value && cpu.value <= cpu.high.unwrap(), "{cpu:?}");
        let [(_, words), (_, cpu_words)] = verdicts(8, 0.5);
        assert!(words.starts_with("50.") && words.contains("% fewer queries per second"), "{words}");
        assert!(cpu_words.contains("% more CPU time per query"), "{cpu_words}");
        let [(_, words), (_, cpu_words)] = verdicts(8, 4.0);
        assert!(words.starts_with("4.0 times the queries per second"), "{words}");
        assert!(cpu_words.starts_with("74.9% less") || cpu_words.starts_with("75.0% less"), "{cpu_words}");
    }

    #[test]
    fn few_pairs_and_equal_sides_claim_no_difference() {
        let [(rate, words), (_, cpu)] = verdicts(7, 2.0);
        assert_eq!((rate.low, rate.high), (None, None));
        assert_eq!(
            (words.as_str(), cpu.as_str()),
            ("queries per second: too noisy to say", "CPU time per query: too noisy to say")
        );
        let [(_, words), (_, cpu)] = verdicts(8, 1.002);
        assert_eq!(words, "no difference larger than 5% in queries per second");
        assert_eq!(cpu, "no difference larger than 5% in CPU time per query");
        assert!(PairVerdicts::new(0.05).rate().is_none());
    }
}
