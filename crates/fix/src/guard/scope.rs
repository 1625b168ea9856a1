//! The programs that a policy includes, by their cgroups (version 2).

use std::fs;
use std::path::{Path, PathBuf};

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
}
