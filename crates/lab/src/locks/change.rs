//! The changes that `lab locks` tries, and the two setups of each.

use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::Strategy;
use fourtuple::listen::AcceptPolicy;
use fourtuple::ports::PortRange;

use crate::locks::settings::Locks;

/// One change of a server or of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Replaces the shared listener by a listener for each worker (SO_REUSEPORT), which separates the listener's lock
    /// and its accept queue.
    Reuseport,
    /// Replaces one source address by several: connects from one source begin the port search at the same place, and contend
    /// for the same bucket lock (`__inet_hash_connect`).
    Sources,
    /// Replaces the search by parity by a search of the full range, with most ports taken: a search that finds the
    /// even ports taken has locked the bucket of each.
    FullRange,
}

/// The setup of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Setup {
    pub(super) policy: AcceptPolicy,
    pub(super) sources: u32,
    pub(super) strategy: Strategy,
    pub(super) range: PortRange,
}

impl Change {
    /// All changes.
    pub const ALL: [Change; 3] = [Change::Reuseport, Change::Sources, Change::FullRange];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Change::Reuseport => "reuseport",
            Change::Sources => "sources",
            Change::FullRange => "full-range",
        }
    }

    /// Returns the change with this name.
    pub fn named(name: &str) -> Option<Change> {
        Change::ALL.into_iter().find(|change| change.name() == name)
    }

    /// Returns the reason why the change cannot be tried on this kernel, if any.
    pub(super) fn impossible(self, found: LocalPortRange) -> Option<String> {
        let why = match (self, found) {
            (Change::FullRange, LocalPortRange::Absent) => "this kernel has no IP_LOCAL_PORT_RANGE",
            (Change::FullRange, LocalPortRange::Parity) => {
                "this kernel searches by parity also with IP_LOCAL_PORT_RANGE"
            }
            _ => return None,
        };
        Some(format!("{} cannot be tried: {why}", self.name()))
    }

    /// Returns the two setups, without and with the change; they are equal in everything else.
    pub(super) fn sides(self, settings: &Locks) -> [Setup; 2] {
        // Half of the even ports are never taken, from any number of sources, so the search finds an even port at once.
        let roomy = Setup {
            policy: AcceptPolicy::Reuseport,
            sources: settings.sources,
            strategy: Strategy::KernelDefault,
            range: wide(),
        };
        match self {
            Change::Reuseport => [Setup { policy: AcceptPolicy::Exclusive, ..roomy }, roomy],
            Change::Sources => [Setup { sources: 1, ..roomy }, roomy],
            Change::FullRange => {
                let tight = Setup { sources: 1, range: tight(settings.queries), ..roomy };
                [tight, Setup { strategy: Strategy::FullRange, ..tight }]
            }
        }
    }
}

/// Returns all ports that need no privilege to bind.
pub(super) fn wide() -> PortRange {
    PortRange::new(1024, u16::MAX).expect("not backwards")
}

/// Returns a range of which the queries take nine tenths: during the second half of the queries no even port is free.
fn tight(queries: u32) -> PortRange {
    let ports = (queries.saturating_mul(10) / 9 + 2).min(wide().len());
    PortRange::new(u16::MAX - (ports - 1) as u16, u16::MAX).expect("not backwards")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::settings::{MAX_QUERIES, MIN_QUERIES};

    fn settings(queries: u32) -> Locks {
        Locks { queries, ..Locks::on(2, Change::ALL.to_vec(), 1) }
    }

    #[test]
    fn a_pair_differs_in_its_change_alone() {
        for change in Change::ALL {
            let [before, after] = change.sides(&settings(1000));
            let same = [
                before.policy == after.policy,
                before.sources == after.sources,
                before.strategy == after.strategy,
                before.range == after.range,
            ];
            assert_eq!(same.iter().filter(|same| !**same).count(), 1, "{change:?}");
            assert_eq!(Change::named(change.name()), Some(change));
        }
        assert_eq!(Change::named("prayer"), None);
    }

    #[test]
    fn setups_exhaust_half_of_the_ports_as_planned() {
        for queries in [MIN_QUERIES, 10_000, MAX_QUERIES] {
            for setup in Change::ALL.iter().flat_map(|change| change.sides(&settings(queries))) {
                let ports = setup.range.len();
                assert!(ports > queries, "{setup:?}");
                let even_are_enough = ports / 2 > queries;
                assert_eq!(even_are_enough, setup.range == wide(), "{setup:?} {queries}");
            }
        }
    }

    #[test]
    fn impossible_changes_have_a_reason() {
        assert_eq!(Change::FullRange.impossible(LocalPortRange::Linear), None);
        assert_eq!(Change::Sources.impossible(LocalPortRange::Absent), None);
        let why = Change::FullRange.impossible(LocalPortRange::Absent).unwrap();
        assert_eq!(why, "full-range cannot be tried: this kernel has no IP_LOCAL_PORT_RANGE");
    }
}
