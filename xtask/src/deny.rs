//! Checks dependencies against `deny.toml`: licences, registries and wildcards, as `cargo deny check licenses sources bans` does. It is
//! here because CI cannot rely on cargo-deny, which has to be built from source. Advisories need a database: only cargo-deny checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{Workspace, metadata};

/// The only registry that is permitted.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The part of `deny.toml` that this check reads.
#[derive(Debug, Deserialize)]
struct Policy {
    graph: Graph,
    licenses: Licenses,
}

#[derive(Debug, Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
struct Exception {
    allow: BTreeSet<String>,
    #[serde(rename = "crate")]
    name: String,
}

/// A package of the dependency graph.
#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    #[serde(default)]
    dependencies: Vec<Requirement>,
}

/// A dependency as its manifest declares it.
#[derive(Debug, Deserialize)]
struct Requirement {
    name: String,
    req: String,
    path: Option<String>,
}

/// Checks all workspaces of the tree. Returns true if no fault was found.
pub(crate) fn run() -> Result<bool> {
    let root = Workspace::read()?.root;
    let text = fs::read_to_string(root.join("deny.toml")).context("read deny.toml")?;
    let policy: Policy = toml::from_str(&text).context("read deny.toml")?;
    let mut packages = BTreeMap::new();
    for workspace in workspaces(&root)? {
        for package in graph(&workspace, &policy.graph.targets)? {
            packages.insert(package.id.clone(), package);
        }
    }
    let packages: Vec<Package> = packages.into_values().collect();
    let faults = faults(&policy, &packages);
    faults.iter().for_each(|fault| eprintln!("{fault}"));
    let twice = versions(&packages);
    if !twice.is_empty() {
        eprintln!("warning: more than one version: {}", twice.join(", "));
    }
    println!(
        "{} packages, {} faults; advisories: not checked, that needs cargo-deny and a database",
        packages.len(),
        faults.len()
    );
    Ok(faults.is_empty())
}

/// Returns the directories with a Cargo.lock, without build output and hidden directories.
fn workspaces(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if name == "Cargo.lock" {
            found.push(directory.to_owned());
        } else if entry.file_type()?.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.')
        {
            found.extend(workspaces(&entry.path())?);
        }
    }
    Ok(found)
}

/// Returns all packages that are built for one of `targets`.
fn graph(workspace: &Path, targets: &[String]) -> Result<Vec<Package>> {
    let mut arguments = vec!["--locked", "--all-features"];
    arguments.extend(targets.iter().flat_map(|target| ["--filter-platform", target]));
    let metadata = metadata(workspace, &arguments)?;
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata: no nodes")?;
    let built: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let packages: Vec<Package> =
        Deserialize::deserialize(&metadata["packages"]).context("read packages of cargo metadata")?;
    Ok(packages.into_iter().filter(|package| built.contains(package.id.as_str())).collect())
}

/// Returns one line for each fault.
fn faults(policy: &Policy, packages: &[Package]) -> Vec<String> {
    let mut faults = Vec::new();
    for package in packages {
        let Package { name, version, source, .. } = package;
        match source.as_deref() {
            None | Some(REGISTRY) => {}
            Some(other) => faults.push(format!("{name} {version} comes from {other}")),
        }
        let exceptions = policy.licenses.exceptions.iter().filter(|exception| exception.name == *name);
        let more: BTreeSet<&String> = exceptions.flat_map(|exception| &exception.allow).collect();
        let is_allowed = |licence: &str| {
            policy.licenses.allow.contains(licence) || more.iter().any(|allowed| *allowed == licence)
        };
        match package.license.as_deref().map(|text| (text, allows(text, &is_allowed))) {
            // A workspace package without a licence of its own is not published.
            None if source.is_none() => {}
            None => faults.push(format!("{name} {version} names no licence")),
            Some((_, Some(true))) => {}
            Some((text, Some(false))) => faults
                .push(format!("{name} {version} has the licence {text}, which deny.toml does not allow")),
            Some((text, None)) => faults
                .push(format!("{name} {version} has the licence {text:?}, which is not an SPDX expression")),
        }
        let wildcards =
            package.dependencies.iter().filter(|needed| needed.req == "*" && needed.path.is_none());
        if source.is_none() {
            faults.extend(wildcards.map(|needed| format!("{name} takes any version of {}", needed.name)));
        }
    }
    faults
}

/// Returns the packages that occur in several versions.
fn versions(packages: &[Package]) -> Vec<String> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().push(&package.version);
    }
    let several = versions.into_iter().filter(|(_, versions)| versions.len() > 1);
    several.map(|(name, versions)| format!("{name} {}", versions.join(" and "))).collect()
}

// SPDX licence expressions: OR, AND, WITH, brackets; and the slash of old manifests, which is OR.

/// Returns whether an expression can be met with allowed licences. `is_allowed` is called for each licence with its
/// exception (`Apache-2.0 WITH LLVM-exception`). Returns `None` if the text is not a valid expression.
pub(super) fn allows(expression: &str, is_allowed: &dyn Fn(&str) -> bool) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader { words: &words, is_allowed };
    let allowed = reader.either()?;
    reader.words.is_empty().then_some(allowed)
}

struct Reader<'a> {
    words: &'a [&'a str],
    is_allowed: &'a dyn Fn(&str) -> bool,
}

impl<'a> Reader<'a> {
    /// Takes the next word if it equals `word`.
    fn take(&mut self, word: &str) -> bool {
        let is_next = self.words.first() == Some(&word);
        self.words = &self.words[usize::from(is_next)..];
        is_next
    }

    fn either(&mut self) -> Option<bool> {
        let mut allowed = self.both()?;
        while self.take("OR") {
            allowed |= self.both()?;
        }
        Some(allowed)
    }

    fn both(&mut self) -> Option<bool> {
        let mut allowed = self.one()?;
        while self.take("AND") {
            allowed &= self.one()?;
        }
        Some(allowed)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let allowed = self.either()?;
            return self.take(")").then_some(allowed);
        }
        let name = self.name()?;
        if self.take("WITH") {
            let exception = self.name()?;
            return Some((self.is_allowed)(&format!("{name} WITH {exception}")));
        }
        Some((self.is_allowed)(name))
    }

    fn name(&mut self) -> Option<&'a str> {
        let (name, rest) = self.words.split_first()?;
        self.words = rest;
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-.+".contains(c);
        (name.chars().all(is_word) && !["OR", "AND", "WITH"].contains(name)).then_some(*name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, license: Option<&str>, source: Option<&str>) -> Package {
        Package {
            id: name.to_owned(),
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            source: source.map(str::to_owned),
            dependencies: Vec::new(),
        }
    }

    fn policy() -> Policy {
        toml::from_str(
            r#"
            graph = { targets = [] }
            licenses = { allow = ["MIT"], exceptions = [{ allow = ["CDDL-1.0"], crate = "inferno" }] }
            "#,
        )
        .unwrap()
    }

    #[test]
    fn every_workspace_is_checked() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut found = workspaces(root).unwrap();
        found.sort();
        let expected =
            ["", "bindings/c", "bindings/python", "contrib/adoption", "contrib/reqwest", "fleet", "fuzz"];
        assert_eq!(found, expected.map(|workspace| root.join(workspace)));
    }

    #[test]
    fn permitted_dependencies_pass() {
        let ours = Package {
            dependencies: vec![Requirement {
                name: "here".into(),
                req: "*".into(),
                path: Some("crates/here".into()),
            }],
            ..package("ours", None, None)
        };
        let packages = [
            ours,
            package("one", Some("MIT OR GPL-2.0"), Some(REGISTRY)),
            package("inferno", Some("CDDL-1.0"), Some(REGISTRY)),
        ];
        assert_eq!(faults(&policy(), &packages), Vec::<String>::new());
    }

    #[test]
    fn licences_sources_and_wildcards_are_named() {
        let ours = Package {
            dependencies: vec![Requirement { name: "serde".into(), req: "*".into(), path: None }],
            ..package("ours", Some("MIT"), None)
        };
        let packages = [
            ours,
            package("two", Some("CDDL-1.0"), Some(REGISTRY)),
            package("three", None, Some(REGISTRY)),
            package("four", Some("MIT"), Some("git+https://example.org/four")),
            package("five", Some("as you like"), Some(REGISTRY)),
        ];
        assert_eq!(
            faults(&policy(), &packages),
            [
                "ours takes any version of serde",
                "two 1.0.0 has the licence CDDL-1.0, which deny.toml does not allow",
                "three 1.0.0 names no licence",
                "four 1.0.0 comes from git+https://example.org/four",
                "five 1.0.0 has the licence \"as you like\", which is not an SPDX expression",
            ]
        );
    }

    #[test]
    fn expressions_are_met_or_not() {
        let is_allowed = |licence: &str| ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].contains(&licence);
        for (text, expected) in [
            ("MIT", Some(true)),
            ("GPL-3.0+", Some(false)),
            ("GPL-3.0 OR MIT", Some(true)),
            ("MIT/Apache-2.0", Some(true)),
            ("MIT AND GPL-3.0", Some(false)),
            ("(MIT OR GPL-3.0) AND ISC", Some(true)),
            ("MIT OR GPL-3.0 AND GPL-2.0", Some(true)),
            ("Apache-2.0 WITH LLVM-exception", Some(true)),
            ("Apache-2.0", Some(false)),
            ("", None),
            ("MIT ISC", None),
            ("(MIT", None),
            ("MIT OR", None),
        ] {
            assert_eq!(allows(text, &is_allowed), expected, "{text:?}");
        }
    }
}
