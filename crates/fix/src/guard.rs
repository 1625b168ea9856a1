//! The decisions of `fourtuple guard`: which programs a policy includes, and when a fix begins and ends.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fourtuple_observe::host::cgroup;

/// Minimum number of digits of the ID of a container.
const DIGITS: usize = 6;

/// The programs that a policy includes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    units: Vec<String>,
    cgroups: Vec<Vec<String>>,
    containers: Vec<String>,
}

/// Why a pattern is refused: what is expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    #[error("expected the name of a unit, such as nginx.service or worker-*.service")]
    Unit,
    #[error(
        "expected a path below the root of the cgroups, such as /system.slice/nginx.service or /kubepods.slice/**"
    )]
    Cgroup,
    #[error("expected at least 6 hexadecimal digits of the ID of a container, or \"*\"")]
    Container,
}

impl Scope {
    /// Adds units by name; `*` stands for any text. A name without a suffix is a service.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Unit`]
    pub fn add_unit(&mut self, name: &str) -> Result<(), ScopeError> {
        if name.is_empty() || name.contains('/') || name.chars().any(char::is_control) {
            return Err(ScopeError::Unit);
        }
        let has_suffix = [".service", ".slice", ".scope", "*"].iter().any(|suffix| name.ends_with(suffix));
        self.units.push(if has_suffix { name.to_owned() } else { format!("{name}.service") });
        Ok(())
    }

    /// Adds cgroups by path: `*` stands for any text within a part of the path, `**` for any number of parts.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Cgroup`]
    pub fn add_cgroup(&mut self, path: &str) -> Result<(), ScopeError> {
        let parts: Option<Vec<String>> = path
            .strip_prefix('/')
            .map(|path| path.trim_end_matches('/').split('/').map(str::to_owned).collect());
        let is_part =
            |part: &String| !matches!(part.as_str(), "" | "." | "..") && !part.chars().any(char::is_control);
        self.cgroups.push(parts.filter(|parts| parts.iter().all(is_part)).ok_or(ScopeError::Cgroup)?);
        Ok(())
    }

    /// Adds a container by the beginning of its ID, or all of them with `*`.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Container`]
    pub fn add_container(&mut self, id: &str) -> Result<(), ScopeError> {
        let is_id = id.len() >= DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if id != "*" && !is_id {
            return Err(ScopeError::Container);
        }
        self.containers.push(id.to_owned());
        Ok(())
    }

    /// Returns whether no program is included.
    pub fn is_empty(&self) -> bool {
        self.units.is_empty() && self.cgroups.is_empty() && self.containers.is_empty()
    }

    /// Returns the cgroup that is included: the cgroup of a process, as in /proc/PID/cgroup, or the highest one above it.
    pub fn find<'a>(&self, cgroup: &'a str) -> Option<&'a str> {
        let ends = cgroup.match_indices('/').map(|(at, _)| at).skip(1).chain([cgroup.len()]);
        ends.map(|end| &cgroup[..end]).find(|above| above.len() > 1 && self.includes(above))
    }

    fn includes(&self, cgroup: &str) -> bool {
        let parts: Vec<&str> = cgroup.split('/').skip(1).collect();
        let Some(name) = parts.last() else { return false };
        self.units.iter().any(|unit| matches(unit, name))
            || self.containers.iter().any(|id| match id.as_str() {
                "*" => cgroup::container(name).is_some(),
                id => cgroup::is_container(name, id),
            })
            || self.cgroups.iter().any(|pattern| matches_path(pattern, &parts))
    }
}

/// Returns whether a text matches a pattern in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => {
            let Some(text) = text.strip_prefix(start) else { return false };
            let mut starts = text.char_indices().map(|(at, _)| at).chain([text.len()]);
            starts.any(|at| matches(rest, &text[at..]))
        }
    }
}

fn matches_path(pattern: &[String], parts: &[&str]) -> bool {
    match (pattern.split_first(), parts.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "**" => {
            (0..=parts.len()).any(|skipped| matches_path(rest, &parts[skipped..]))
        }
        (Some((first, rest)), Some((part, below))) => matches(first, part) && matches_path(rest, below),
        _ => false,
    }
}

/// Returns the cgroup of a process, such as `/system.slice/nginx.service`; `None` if the process has ended, or there are no cgroups of version 2.
pub fn own_cgroup(process: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    cgroup::unified(&text).map(str::to_owned)
}

/// Returns the directory of a cgroup below the mount of the cgroups.
pub fn directory_of(mount: &Path, cgroup: &str) -> PathBuf {
    mount.join(cgroup.trim_start_matches('/'))
}

/// Returns the user other than root and the user of this process who may have chosen the name of a cgroup: the owner of a cgroup above it
/// (delegation).
pub fn user_who_chose(mount: &Path, cgroup: &str) -> Option<u32> {
    let directory = directory_of(mount, cgroup);
    let above = directory.ancestors().skip(1).take_while(|above| above.starts_with(mount));
    let above: Vec<&Path> = above.collect();
    above.into_iter().find_map(|directory| crate::target::foreign_owner(mount, directory))
}

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

    fn scope(units: &[&str], cgroups: &[&str], containers: &[&str]) -> Scope {
        let mut scope = Scope::default();
        units.iter().for_each(|unit| scope.add_unit(unit).unwrap());
        cgroups.iter().for_each(|cgroup| scope.add_cgroup(cgroup).unwrap());
        containers.iter().for_each(|id| scope.add_container(id).unwrap());
        scope
    }

    #[test]
    fn the_highest_cgroup_that_matches_is_taken() {
        let id = "8a2f64c0b1d97e53aa01";
        let pod = format!("/kubepods.slice/pod7.slice/cri-containerd-{id}.scope");
        for (scope, cgroup, found) in [
            (scope(&["nginx"], &[], &[]), "/system.slice/nginx.service", Some("/system.slice/nginx.service")),
            (scope(&["nginx"], &[], &[]), "/a/nginx.service/b/nginx.service", Some("/a/nginx.service")),
            (
                scope(&["w-*.service"], &[], &[]),
                "/system.slice/w-7.service",
                Some("/system.slice/w-7.service"),
            ),
            (scope(&["w-*.service"], &[], &[]), "/system.slice/v-7.service", None),
            (scope(&[], &["/a/*"], &[]), "/a/b/c", Some("/a/b")),
            (scope(&[], &["/a/**"], &[]), "/a/b/c", Some("/a")),
            (scope(&[], &["/a/**/c"], &[]), "/a/b/b/c/d", Some("/a/b/b/c")),
            (scope(&[], &["/a"], &[]), "/ab", None),
            (scope(&[], &[], &["*"]), &pod, Some(pod.as_str())),
            (scope(&[], &[], &["8a2f64"]), &pod, Some(pod.as_str())),
            (scope(&[], &[], &["8a2f65"]), &pod, None),
            // The root has all programs of the host.
            (scope(&["*"], &["/**"], &["*"]), "/", None),
            (scope(&[], &[], &[]), "/a", None),
        ] {
            assert_eq!(scope.find(cgroup), found, "{scope:?} {cgroup}");
        }
    }

    #[test]
    fn wrong_patterns_are_refused() {
        let mut scope = Scope::default();
        for name in ["", "a/b", "a\nb"] {
            assert_eq!(scope.add_unit(name), Err(ScopeError::Unit), "{name:?}");
        }
        for path in ["", "a", "/", "/a//b", "/a/../b", "/a\n"] {
            assert_eq!(scope.add_cgroup(path), Err(ScopeError::Cgroup), "{path:?}");
        }
        for id in ["", "12345", "1234567z"] {
            assert_eq!(scope.add_container(id), Err(ScopeError::Container), "{id:?}");
        }
        assert!(scope.is_empty());
    }

    #[test]
    fn the_user_of_a_delegated_cgroup_may_have_chosen_the_names_below_it() {
        let mount = std::env::temp_dir().join(format!("fourtuple-scope-{}", std::process::id()));
        fs::create_dir_all(mount.join("user.slice/app.service")).unwrap();
        let is_given = std::os::unix::fs::chown(mount.join("user.slice"), Some(1000), None).is_ok();
        let chosen = ["/user.slice/app.service", "/user.slice"].map(|cgroup| user_who_chose(&mount, cgroup));
        fs::remove_dir_all(&mount).unwrap();
        assert_eq!(chosen, [is_given.then_some(1000), None]);
    }

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
        assert_eq!(step, [Step::End("a", Why::Quiet), Step::Begin("b")], "the place of a is free");
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
