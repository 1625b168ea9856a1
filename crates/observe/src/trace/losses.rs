//! Events that a trace lost, and whether their number makes the run invalid.

use fourtuple_record::Remark;

/// A run stays valid while it lost at most one event in this many counted events.
const TOLERATED: u64 = 100;

/// Describes events for which the kernel did not run a program (`recursion_misses`).
pub(crate) const MISSED: &str = "events were not seen: the kernel does not run a BPF program that is already running on \
                                 the same processor (recursion_misses)";

/// Numbers of lost events, each with its meaning.
#[derive(Clone, Debug)]
pub(crate) struct Losses(Vec<(u64, &'static str)>);

/// The losses of a run as remarks if they make the run invalid, else as notes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Judgement {
    pub(crate) validity: Vec<Remark>,
    pub(crate) notes: Vec<String>,
}

impl Losses {
    pub(crate) fn new(all: impl IntoIterator<Item = (u64, &'static str)>) -> Losses {
        Losses(all.into_iter().filter(|(number, _)| *number > 0).collect())
    }

    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|(number, _)| number).sum()
    }

    /// Decides by the number of counted events whether the losses make the run invalid.
    pub(crate) fn judge(&self, counted: u64) -> Judgement {
        let lines = self.0.iter().map(|(number, meaning)| format!("{number} {meaning}"));
        if self.sum() > counted / TOLERATED {
            let remarks = lines.map(|line| Remark::new("events-lost", line));
            Judgement { validity: remarks.collect(), notes: Vec::new() }
        } else {
            let notes = lines.map(|line| format!("{line}; {counted} were counted"));
            Judgement { validity: Vec::new(), notes: notes.collect() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_stays_valid_up_to_1_percent_losses() {
        let losses = Losses::new([(2, "waits were not counted"), (0, "others")]);
        assert_eq!(losses.sum(), 2);
        let judged = losses.judge(200);
        assert_eq!(judged.notes, ["2 waits were not counted; 200 were counted"]);
        assert_eq!(judged.validity, []);
    }

    #[test]
    fn more_than_1_percent_losses_make_a_run_invalid() {
        let losses = Losses::new([(2, "waits were not counted"), (1, "had no path")]);
        let judged = losses.judge(299);
        assert_eq!(judged.notes, [""; 0]);
        let messages: Vec<_> = judged.validity.iter().map(|remark| remark.message.as_str()).collect();
        assert_eq!(messages, ["2 waits were not counted", "1 had no path"]);
        assert!(judged.validity.iter().all(|remark| remark.id == "events-lost"));
    }

    #[test]
    fn without_losses_there_are_no_remarks() {
        assert_eq!(Losses::new([(0, "waits")]).judge(0), Judgement::default());
    }
}
