//! When fixes begin and end. Pure: the time and what was seen are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

/// Minimum time between two changes of one target.
const PAUSE: Duration = Duration::from_secs(10);
/// Time for which a target is left alone after a fix that did not help, or could not be attached.
const REST: Duration = Duration::from_secs(600);

/// How many fixes, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of fixes at once.
    pub max: usize,
    /// Time without need after which a fix ends.
    pub quiet: Duration,
}

/// What a fix has done since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effect {
    /// It had too little to do.
    #[default]
    Pending,
    Helps,
    /// It had something to do, and did not help.
    Fails,
}

/// Why a fix ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was not needed for the quiet time.
    Quiet,
    /// It did not help.
    NoEffect,
}

/// A change to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<K> {
    Begin(K),
    End(K, Why),
    /// The fix is needed, but as many as permitted run. Said once for each time that it is needed.
    Full(K),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A fix runs. `needed`: when it was needed last.
    Fixed {
        since: Duration,
        needed: Duration,
    },
    /// No fix before `until`.
    Resting {
        until: Duration,
    },
    Refused,
}

/// The targets with a fix, or that had one.
#[derive(Clone, Debug)]
pub struct Keeper<K> {
    limits: Limits,
    targets: BTreeMap<K, State>,
}

impl<K: Clone + Ord> Keeper<K> {
    pub fn new(limits: Limits) -> Keeper<K> {
        Keeper { limits, targets: BTreeMap::new() }
    }

    /// Returns the changes to make, in this order: ends, then beginnings. `needed`: targets that need a fix now; `effect`: of a fix that runs.
    pub fn step(
        &mut self,
        now: Duration,
        needed: &[K],
        mut effect: impl FnMut(&K) -> Effect,
    ) -> Vec<Step<K>> {
        let mut steps = Vec::new();
        for (target, state) in &mut self.targets {
            let State::Fixed { since, needed: last } = state else { continue };
            if needed.contains(target) {
                *last = now;
            }
            let why = match effect(target) {
                Effect::Fails => Some(Why::NoEffect),
                _ if now.saturating_sub(*last) >= self.limits.quiet => Some(Why::Quiet),
                _ => None,
            };
            if let Some(why) = why.filter(|_| now.saturating_sub(*since) >= PAUSE) {
                let rest = if why == Why::NoEffect { REST } else { PAUSE };
                *state = State::Resting { until: now + rest };
                steps.push(Step::End(target.clone(), why));
            }
        }
        self.targets.retain(|target, state| match state {
            State::Fixed { .. } => true,
            State::Resting { until } => now < *until,
            State::Refused => needed.contains(target),
        });
        for target in needed {
            if matches!(self.targets.get(target), Some(State::Fixed { .. } | State::Resting { .. })) {
                continue;
            }
            if self.fixed() < self.limits.max {
                self.targets.insert(target.clone(), State::Fixed { since: now, needed: now });
                steps.push(Step::Begin(target.clone()));
            } else if self.targets.insert(target.clone(), State::Refused).is_none() {
                steps.push(Step::Full(target.clone()));
            }
        }
        steps
    }

    /// Takes note of a fix that another guard had begun.
    pub fn adopt(&mut self, now: Duration, target: K) {
        self.targets.insert(target, State::Fixed { since: now, needed: now });
    }

    /// Takes note of a fix that could not begin.
    pub fn failed(&mut self, now: Duration, target: K) {
        self.targets.insert(target, State::Resting { until: now + REST });
    }

    /// Takes note of a target that is gone. A new one of the same name may be fixed at once.
    pub fn gone(&mut self, target: &K) {
        self.targets.remove(target);
    }

    /// Returns the number of fixes that run.
    pub fn fixed(&self) -> usize {
        self.targets.values().filter(|state| matches!(state, State::Fixed { .. })).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Duration = Duration::from_secs(60);

    fn keeper(max: usize) -> Keeper<&'static str> {
        Keeper::new(Limits { max, quiet: QUIET })
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_fix_ends_after_the_quiet_time() {
        let mut keeper = keeper(1);
        let pending = |_: &_| Effect::Pending;
        assert_eq!(keeper.step(seconds(0), &["a"], pending), [Step::Begin("a")]);
        assert_eq!(keeper.step(seconds(30), &["a"], pending), []);
        assert_eq!(keeper.step(seconds(89), &[], pending), [], "needed 59 s ago");
        assert_eq!(keeper.step(seconds(90), &[], pending), [Step::End("a", Why::Quiet)]);
        assert_eq!(keeper.fixed(), 0);
    }

    #[test]
    fn a_target_changes_at_most_every_10_seconds() {
        let mut keeper = Keeper::new(Limits { max: 1, quiet: Duration::ZERO });
        let pending = |_: &_| Effect::Pending;
        assert_eq!(keeper.step(seconds(0), &["a"], pending), [Step::Begin("a")]);
        assert_eq!(keeper.step(seconds(9), &[], pending), []);
        assert_eq!(keeper.step(seconds(10), &[], pending), [Step::End("a", Why::Quiet)]);
        assert_eq!(keeper.step(seconds(19), &["a"], pending), []);
        assert_eq!(keeper.step(seconds(20), &["a"], pending), [Step::Begin("a")]);
    }

    #[test]
    fn a_fix_that_does_not_help_ends_and_rests() {
        let mut keeper = keeper(1);
        let fails = |_: &_| Effect::Fails;
        keeper.step(seconds(0), &["a"], fails);
        assert_eq!(keeper.step(seconds(5), &["a"], fails), [], "a change at most every 10 s");
        assert_eq!(keeper.step(seconds(10), &["a"], fails), [Step::End("a", Why::NoEffect)]);
        assert_eq!(keeper.step(seconds(609), &["a"], fails), []);
        assert_eq!(keeper.step(seconds(610), &["a"], fails), [Step::Begin("a")]);
        // One that helps stays.
        assert_eq!(keeper.step(seconds(630), &["a"], |_| Effect::Helps), []);
    }

    #[test]
    fn a_fix_that_could_not_begin_rests() {
        let mut keeper = keeper(1);
        let pending = |_: &_| Effect::Pending;
        keeper.step(seconds(0), &["a"], pending);
        keeper.failed(seconds(0), "a");
        assert_eq!(keeper.step(seconds(599), &["a"], pending), []);
        assert_eq!(keeper.step(seconds(600), &["a"], pending), [Step::Begin("a")]);
    }

    #[test]
    fn no_more_fixes_than_permitted() {
        let mut keeper = keeper(1);
        let pending = |_: &_| Effect::Pending;
        assert_eq!(keeper.step(seconds(0), &["a", "b"], pending), [Step::Begin("a"), Step::Full("b")]);
        assert_eq!(keeper.step(seconds(5), &["a", "b"], pending), [], "said once");
        assert_eq!(keeper.step(seconds(10), &["a"], pending), []);
        assert_eq!(keeper.step(seconds(15), &["a", "b"], pending), [Step::Full("b")], "needed again");
        let step = keeper.step(seconds(80), &["b"], pending);
        assert_eq!(step, [Step::End("a", Why::Quiet), Step::Begin("b")], "room was made");
    }

    #[test]
    fn a_target_that_was_made_again_is_new() {
        let mut keeper = keeper(1);
        let pending = |_: &_| Effect::Pending;
        keeper.step(seconds(0), &["a"], pending);
        keeper.gone(&"a");
        assert_eq!(keeper.step(seconds(1), &["a"], pending), [Step::Begin("a")]);
    }

    #[test]
    fn a_fix_of_the_guard_before_is_kept() {
        let mut keeper = keeper(1);
        keeper.adopt(seconds(0), "a");
        assert_eq!(keeper.step(seconds(1), &["a"], |_| Effect::Pending), []);
        assert_eq!(keeper.step(seconds(61), &[], |_| Effect::Pending), [Step::End("a", Why::Quiet)]);
    }
}
