//! Checks the dependencies between crates against a table. A crate that is not in the table is a fault, so that its place
//! is decided.

use crate::tidy::tree::{Fault, Tree};
use crate::workspace::{Dependency, DependencyKind, Package};

/// A crate and its permitted dependencies, by the names of their directories below `crates`.
const ARROWS: &[(&str, &[&str])] = &[
    ("syscalls", &[]),
    ("measure", &[]),
    ("record", &[]),
    ("exposition", &[]),
    ("bpf", &["syscalls"]),
    ("fourtuple", &["syscalls", "bpf"]),
    ("c", &["fourtuple"]),
    ("host", &["syscalls", "bpf", "record"]),
    ("doctor", &["record", "measure"]),
    ("plan", &["fourtuple", "measure", "record"]),
    ("report", &["record", "measure"]),
    ("load", &["fourtuple", "syscalls", "measure", "record"]),
    ("serve", &["fourtuple", "syscalls", "measure", "record"]),
    ("trace", &["bpf", "host", "measure", "record", "syscalls"]),
    ("fix", &["bpf", "host", "record", "syscalls"]),
    ("forward", &["fourtuple", "syscalls", "bpf", "record"]),
    ("compare", &["syscalls", "measure", "record", "load"]),
    ("fleet", &["syscalls", "measure", "record", "load"]),
    (
        "lab",
        &[
            "fourtuple",
            "host",
            "measure",
            "record",
            "syscalls",
            "bpf",
            "doctor",
            "load",
            "serve",
            "trace",
            "forward",
        ],
    ),
    (
        "cli",
        &[
            "syscalls",
            "measure",
            "record",
            "bpf",
            "fourtuple",
            "host",
            "doctor",
            "plan",
            "report",
            "load",
            "serve",
            "trace",
            "fix",
            "forward",
            "exposition",
            "compare",
            "lab",
            "fleet",
        ],
    ),
    ("fuzz", &["syscalls", "record", "fourtuple", "report", "load", "serve", "forward"]),
    ("testing", &["syscalls"]),
    ("guest", &["syscalls"]),
    ("xtask", &[]),
];

/// Dependencies that only a feature may add.
const OPTIONAL: &[(&str, &str)] = &[("fourtuple", "bpf")];

/// Dependencies that only tests and benchmarks may have.
const MEASURING: &[(&str, &str)] = &[
    ("fourtuple", "measure"),
    ("load", "serve"),
    ("trace", "fourtuple"),
    ("doctor", "host"),
    ("doctor", "syscalls"),
];

/// Crates that every crate may use as a dev-dependency only.
const TESTING: &str = "testing";

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let packages = &tree.workspace.packages;
    let mut faults = Vec::new();
    for package in packages {
        let manifest = package.directory.join("Cargo.toml");
        let name = room(&package.name);
        let Some((_, allowed)) = ARROWS.iter().find(|(crate_, _)| *crate_ == name) else {
            let table = "xtask/src/tidy/arrows.rs";
            faults
                .push(Fault::in_file(&manifest, format!("{name} is not in the table of arrows in {table}")));
            continue;
        };
        let inside = package.dependencies.iter().filter(|dependency| is_member(packages, &dependency.name));
        for dependency in inside {
            if let Some(message) = wrong(name, allowed, dependency) {
                faults.push(Fault::in_file(&manifest, message));
            }
        }
    }
    faults
}

/// Returns the fault of a dependency, if it has one.
fn wrong(name: &str, allowed: &[&str], dependency: &Dependency) -> Option<String> {
    let to = room(&dependency.name);
    if to == TESTING {
        return (dependency.kind != DependencyKind::Dev)
            .then(|| format!("{to} is for dev-dependencies only"));
    }
    // A crate that is its own dev-dependency enables its features in its tests.
    if dependency.kind == DependencyKind::Dev && (to == name || MEASURING.contains(&(name, to))) {
        return None;
    }
    if !allowed.contains(&to) {
        let kind = match dependency.kind {
            DependencyKind::Normal => "",
            DependencyKind::Dev => " for its tests",
            DependencyKind::Build => " to be built",
        };
        let list = if allowed.is_empty() { "nothing".to_owned() } else { allowed.join(", ") };
        return Some(format!("{name} must not depend on {to}{kind}; it may on {list}"));
    }
    let needs_feature = dependency.kind != DependencyKind::Dev && OPTIONAL.contains(&(name, to));
    (needs_feature && !dependency.optional).then(|| format!("{name} may depend on {to} only as a feature"))
}

fn is_member(packages: &[Package], name: &str) -> bool {
    packages.iter().any(|package| package.name == name)
}

/// Returns the directory of a package: `lab` for `fourtuple-lab`, `fourtuple` for `fourtuple`.
fn room(package: &str) -> &str {
    package.strip_prefix("fourtuple-").unwrap_or(package)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};
    use DependencyKind::{Build, Dev, Normal};

    fn faults(packages: Vec<Package>) -> Vec<String> {
        lines(check(&tree(packages, &[])))
    }

    #[test]
    fn arrows_of_the_design_pass() {
        let packages = vec![
            package("fourtuple-syscalls", &[("libc", Normal)]),
            package("fourtuple-testing", &[("fourtuple-syscalls", Normal)]),
            package(
                "fourtuple",
                &[("fourtuple-syscalls", Normal), ("fourtuple-testing", Dev), ("fourtuple", Dev)],
            ),
            package("fourtuple-lab", &[("fourtuple", Normal)]),
            package("fourtuple-cli", &[("fourtuple-lab", Normal), ("fourtuple-testing", Dev)]),
        ];
        assert!(faults(packages).is_empty());
    }

    #[test]
    fn wrong_directions_are_named_with_their_kind() {
        let packages = vec![
            package("fourtuple-syscalls", &[("fourtuple", Normal), ("fourtuple-record", Build)]),
            package("fourtuple-record", &[("fourtuple", Dev)]),
            package("fourtuple", &[("fourtuple-testing", Normal)]),
            package("fourtuple-testing", &[]),
        ];
        assert_eq!(
            faults(packages),
            [
                "crates/syscalls/Cargo.toml: syscalls must not depend on fourtuple; it may on nothing",
                "crates/syscalls/Cargo.toml: syscalls must not depend on record to be built; it may on nothing",
                "crates/record/Cargo.toml: record must not depend on fourtuple for its tests; it may on nothing",
                "crates/fourtuple/Cargo.toml: testing is for dev-dependencies only",
            ]
        );
    }

    #[test]
    fn measuring_is_for_benchmarks_only() {
        let packages = |kind| {
            vec![package("fourtuple", &[("fourtuple-measure", kind)]), package("fourtuple-measure", &[])]
        };
        assert!(faults(packages(Dev)).is_empty());
        assert_eq!(faults(packages(Normal)).len(), 1);
    }

    #[test]
    fn bpf_is_a_feature_of_the_library() {
        let mut library = package("fourtuple", &[("fourtuple-bpf", Normal)]);
        let bpf = package("fourtuple-bpf", &[]);
        assert_eq!(
            faults(vec![library.clone(), bpf.clone()]),
            ["crates/fourtuple/Cargo.toml: fourtuple may depend on bpf only as a feature"]
        );
        library.dependencies[0].optional = true;
        assert!(faults(vec![library, bpf]).is_empty());
    }

    #[test]
    fn an_unknown_crate_is_a_fault() {
        assert!(faults(vec![package("fourtuple-attic", &[])])[0].contains("attic is not in the table"));
    }

    #[test]
    fn the_table_has_no_circles() {
        // Each crate stands after all its permitted dependencies.
        for (index, (name, allowed)) in ARROWS.iter().enumerate() {
            for to in *allowed {
                assert!(ARROWS[..index].iter().any(|(before, _)| before == to), "{name} -> {to}");
            }
        }
    }
}
