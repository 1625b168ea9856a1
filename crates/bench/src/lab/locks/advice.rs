use fourtuple_record::measure::{Comparison, Conclusion, Verdict};
use fourtuple_record::{LabLocksResults, LocksRatio, LocksSide};

use crate::lab::locks::Change;

/// Number of processors up to which waits for spinlocks are rare.
const FEW: usize = 4;

/// Share of queries with a lock wait from which advice mentions the waits: one in a thousand.
const WORTH_A_WORD: f64 = 0.001;

/// Returns advice for one change: its effect, and what to set.
pub(super) fn of_pair(
    change: Change,
    rate: &FigureVerdict,
    cpu: &FigureVerdict,
    sides: [&LocksSide; 2],
) -> String {
    let figures = format!("{}; {}{}", rate.words, cpu.words, waits(sides));
    let verdicts = [rate.verdict, cpu.verdict];
    let (better, worse) = (verdicts.contains(&Verdict::Faster), verdicts.contains(&Verdict::Slower));
    let (what, remedy) = match change {
        Change::Reuseport => (
            "A listener for each worker",
            "Open a listener for each worker, with SO_REUSEPORT set before bind(): \
             ListenerGroupBuilder::at(endpoint).policy(AcceptPolicy::Reuseport), or the parameter `reuseport` of nginx's listen. The \
             cost is placement by hash: see lab accept and lab keepalive",
        ),
        Change::Sources => (
            "Dialing from several sources",
            "Give clients several source addresses: Dialer::builder(server).sources(SourcePool::several(addresses))",
        ),
        Change::FullRange => (
            "A search of the full range, with nine of ten ports taken,",
            "Let connect() search all ports at once: Dialer::builder(server) does so by default where it helps; in C set \
             IP_LOCAL_PORT_RANGE; for programs that you do not write there are `fourtuple run` and `fourtuple fix ports`",
        ),
    };
    match (better, worse) {
        (true, false) => format!("{what} helps on this host: {figures}. {remedy}."),
        (false, true) => format!("{what} makes this host slower: {figures}. Do not change it."),
        (true, true) => format!("{what} improves one figure and worsens another: {figures}."),
        (false, false) if verdicts.contains(&Verdict::Same) => {
            format!("{what} has no effect on this host: {figures}. Do not change it.")
        }
        (false, false) => {
            format!("{what}: {figures}. The runs do not decide it: use more --repeats or a quieter machine.")
        }
    }
}

/// Returns the locks at which waits were counted, and the number of waits.
fn waits([before, after]: [&LocksSide; 2]) -> String {
    let (Some(without), Some(with)) = (before.waits_per_query, after.waits_per_query) else {
        return String::new();
    };
    let per_thousand = |waits: f64| match waits * 1000.0 {
        few if few < 10.0 => format!("{few:.1}"),
        many => format!("{many:.0}"),
    };
    // The class `other` is mostly the locks of the scheduler and of epoll, which no change here affects.
    let most = before.classes.iter().find(|class| class.class != "other");
    let most = most.filter(|class| class.waits_per_query >= WORTH_A_WORD);
    let most = most.map_or(String::new(), |class| format!(" (the longest of TCP for {})", class.class));
    format!(
        "; lock waits per 1,000 queries: {} before{most}, {} after",
        per_thousand(without),
        per_thousand(with)
    )
}

/// Returns advice for the host from all results.
pub(super) fn advice(results: &LabLocksResults, cpus: usize) -> Vec<String> {
    let mut lines: Vec<String> = results.pairs.iter().map(|pair| pair.advice.clone()).collect();
    if !lines.is_empty() && cpus <= FEW {
        lines.push(format!(
            "Waits for locks grow with the number of processors, and this host has {cpus}: a change without an effect here may \
             have one on the affected host. Repeat the experiment there."
        ));
    }
    lines
}

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
    use fourtuple_record::{LocksClass, LocksRatio};

    use super::super::usual;
    use super::*;
    use crate::lab::locks::Sums;

    fn figure_verdict(verdict: Verdict, words: &str) -> FigureVerdict {
        let ratio = LocksRatio { value: 1.0, low: None, high: None };
        FigureVerdict { verdict, ratio, words: words.to_owned() }
    }

    fn side(waits: Option<f64>) -> LocksSide {
        let setup = Change::Sources.sides(&usual(2))[0];
        let mut side = Sums::new(setup).side(&mut fastrand::Rng::with_seed(1));
        side.waits_per_query = waits;
        let class =
            |waits| LocksClass { class: "bhash".into(), waits_per_query: waits, wait_ns_per_query: 1.0 };
        side.classes = waits.map(class).into_iter().collect();
        side
    }

    fn said(rate: Verdict, cpu: Verdict, waits: [Option<f64>; 2]) -> String {
        let [before, after] = waits.map(side);
        let (rate, cpu) = (figure_verdict(rate, "RATE"), figure_verdict(cpu, "CPU"));
        of_pair(Change::Sources, &rate, &cpu, [&before, &after])
    }

    #[test]
    fn changes_with_gain_are_named_with_their_setting() {
        let line = said(Verdict::Faster, Verdict::TooNoisy, [Some(0.25), Some(0.0)]);
        assert!(line.starts_with("Dialing from several sources helps on this host: RATE; CPU;"), "{line}");
        let waits = "250 before (the longest of TCP for bhash), 0.0 after. Give clients";
        assert!(line.contains(waits), "{line}");
    }

    #[test]
    fn changes_without_gain_are_not_recommended() {
        for (rate, cpu, part) in [
            (Verdict::Slower, Verdict::Same, "makes this host slower"),
            (Verdict::Faster, Verdict::Slower, "worsens another"),
            (Verdict::Same, Verdict::TooNoisy, "has no effect on this host"),
            (Verdict::TooNoisy, Verdict::TooNoisy, "do not decide it"),
        ] {
            let line = said(rate, cpu, [None, None]);
            assert!(line.contains(part) && !line.contains("SourcePool") && !line.contains("waits"), "{line}");
        }
    }

    #[test]
    fn few_processors_are_not_a_proof() {
        let mut results =
            LabLocksResults { pairs: vec![], untraced: None, blind_spots: vec![], advice: vec![] };
        assert!(advice(&results, 2).is_empty());
        let [before, after] = [side(None), side(None)];
        let ratio = LocksRatio { value: 1.0, low: None, high: None };
        results.pairs = vec![fourtuple_record::LocksPair {
            change: "sources".into(),
            before,
            after,
            pairs: 1,
            ratio,
            verdict: String::new(),
            cpu_ratio: ratio,
            cpu_verdict: String::new(),
            advice: "Do.".into(),
        }];
        assert!(advice(&results, 2)[1].contains("this host has 2"));
        assert_eq!(advice(&results, 64), ["Do."]);
    }

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
        assert_eq!(words, "queries per second: too noisy to say");
        assert_eq!(cpu, "CPU time per query: too noisy to say");
        let [(_, words), (_, cpu)] = verdicts(8, 1.002);
        assert_eq!(words, "no difference larger than 5% in queries per second");
        assert_eq!(cpu, "no difference larger than 5% in CPU time per query");
        assert!(PairVerdicts::new(0.05).rate().is_none());
    }
}
