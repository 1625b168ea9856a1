use fourtuple_measure::Verdict;
use fourtuple_record::{LabLocksResults, LocksSide};

use crate::locks::change::Change;
use crate::locks::verdict::FigureVerdict;

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
            "Give clients several source addresses: Dialer::to(server).sources(SourcePool::several(addresses))",
        ),
        Change::FullRange => (
            "A search of the full range, with nine of ten ports taken,",
            "Let connect() search all ports at once: Dialer::to(server) does so by default where it helps; in C set \
             IP_LOCAL_PORT_RANGE",
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

#[cfg(test)]
mod tests {
    use fourtuple_record::{LocksClass, LocksRatio};

    use super::super::Locks;
    use super::super::sums::Sums;
    use super::*;

    fn figure_verdict(verdict: Verdict, words: &str) -> FigureVerdict {
        let ratio = LocksRatio { value: 1.0, low: None, high: None };
        FigureVerdict { verdict, ratio, words: words.to_owned() }
    }

    fn side(waits: Option<f64>) -> LocksSide {
        let setup = Change::Sources.sides(&Locks::on(2, Change::ALL.to_vec(), 1))[0];
        let mut side = Sums::new(setup).side(&mut fastrand::Rng::with_seed(1));
        side.waits_per_query = waits;
        let class =
            |waits| LocksClass { class: "bhash".into(), waits_per_query: waits, wait_ns_per_query: 1.0 };
        side.classes = waits.map(class).into_iter().collect();
        side
    }

    fn said(rate: Verdict, cpu: Verdict, waits: [Option<f64>; 2]) -> String {
        let [before, after] = waits.map(side);
        of_pair(
            Change::Sources,
            &figure_verdict(rate, "RATE"),
            &figure_verdict(cpu, "CPU"),
            [&before, &after],
        )
    }

    #[test]
    fn changes_with_gain_are_named_with_their_setting() {
        let line = said(Verdict::Faster, Verdict::TooNoisy, [Some(0.25), Some(0.0)]);
        assert!(line.starts_with("Dialing from several sources helps on this host: RATE; CPU;"), "{line}");
        assert!(
            line.contains("250 before (the longest of TCP for bhash), 0.0 after. Give clients"),
            "{line}"
        );
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
    fn few_processors_are_no_proof() {
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
}
