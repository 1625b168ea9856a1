//! `cargo xtask tidy`: the project's rules that a program can check, one file per check, one line per fault.
//!
//! To add a check, add a file in this directory and a line to [`CHECKS`].

mod api;
mod architecture;
mod arrows;
mod circles;
mod documented;
mod examples;
mod layout;
mod length;
mod lexer;
mod links;
mod names;
mod plurals;
mod printing;
mod purity;
mod source;
mod tree;
mod unsafe_code;

use anyhow::Result;

use crate::tidy::tree::{Fault, Tree};
use crate::workspace::Workspace;

/// The effect of a check's findings on the run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// Each finding fails the run.
    Fault,
    /// Findings are printed and fail nothing.
    Notice,
}

/// A check: its name, the effect of its findings, and its function.
type Check = (&'static str, Severity, fn(&Tree) -> Vec<Fault>);

const CHECKS: &[Check] = &[
    ("arrows", Severity::Fault, arrows::check),
    ("unsafe", Severity::Fault, unsafe_code::check),
    ("names", Severity::Fault, names::check),
    ("length", Severity::Notice, length::check),
    ("printing", Severity::Fault, printing::check),
    ("purity", Severity::Fault, purity::check),
    ("architecture", Severity::Fault, architecture::check),
    ("circles", Severity::Fault, circles::check),
    ("layout", Severity::Fault, layout::check),
    ("plurals", Severity::Fault, plurals::check),
    ("links", Severity::Fault, links::check),
    ("examples", Severity::Fault, examples::check),
    ("api", Severity::Fault, api::check),
    ("documented", Severity::Fault, documented::check),
];

/// Runs every check; returns true if none found a fault.
pub(crate) fn run() -> Result<bool> {
    let workspace = Workspace::read()?;
    let (sources, pages) = source::read(&workspace.root)?;
    let architecture = std::fs::read_to_string(workspace.root.join("ARCHITECTURE.md")).ok();
    let tree = Tree { workspace, sources, pages, architecture };
    let (mut faults, mut notices) = (0, 0);
    for (name, severity, check) in CHECKS {
        let findings = check(&tree);
        findings.iter().for_each(|finding| println!("{name}: {finding}"));
        *(if *severity == Severity::Fault { &mut faults } else { &mut notices }) += findings.len();
    }
    let files = tree.sources.len();
    let packages = tree.workspace.packages.len();
    println!("tidy: {files} files of {packages} crates, {faults} faults, {notices} notices");
    Ok(faults == 0)
}

/// Small trees for the tests of the checks.
#[cfg(test)]
mod fixture {
    use std::path::{Path, PathBuf};

    use crate::tidy::source::Source;
    use crate::tidy::tree::{Fault, Tree};
    use crate::workspace::{Dependency, DependencyKind, Package, Workspace};

    /// Returns a package in `crates/<name>` with a library and some dependencies.
    pub(super) fn package(name: &str, dependencies: &[(&str, DependencyKind)]) -> Package {
        let directory = Path::new("crates").join(name.trim_start_matches("fourtuple-"));
        Package {
            name: name.to_owned(),
            roots: vec![directory.join("src/lib.rs")],
            directory,
            has_doctests: true,
            dependencies: dependencies
                .iter()
                .map(|&(name, kind)| Dependency { name: name.to_owned(), kind, optional: false })
                .collect(),
        }
    }

    pub(super) fn tree(packages: Vec<Package>, sources: &[(&str, &str)]) -> Tree {
        let root = PathBuf::from("/nowhere");
        let sources = sources
            .iter()
            .map(|&(path, text)| Source { path: PathBuf::from(path), text: text.to_owned() })
            .collect();
        let workspace = Workspace { target: root.join("target"), root, packages };
        Tree { workspace, sources, pages: Vec::new(), architecture: None }
    }

    pub(super) fn lines(faults: Vec<Fault>) -> Vec<String> {
        faults.iter().map(ToString::to_string).collect()
    }
}
