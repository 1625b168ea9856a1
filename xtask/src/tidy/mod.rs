//! `cargo xtask tidy`: the rules of the house that a machine can check, one file per check, one line per fault.
//!
//! To add a check, add a file beside the others and a line to [`CHECKS`].

mod architecture;
mod arrows;
mod length;
mod lexer;
mod names;
mod purity;
mod source;
mod unsafe_code;

use std::fmt;
use std::path::Path;

use anyhow::Result;

use self::source::Source;
use crate::workspace::Workspace;

/// What the checks look at.
struct Tree {
    workspace: Workspace,
    sources: Vec<Source>,
    /// ARCHITECTURE.md, once there is one.
    architecture: Option<String>,
}

/// Something that breaks a rule, or for a notice bends it.
#[derive(Debug, PartialEq, Eq)]
struct Fault {
    /// A file, with a line where there is one.
    place: String,
    message: String,
}

impl Fault {
    fn in_file(path: &Path, message: impl Into<String>) -> Fault {
        Fault { place: path.display().to_string(), message: message.into() }
    }

    fn at(path: &Path, line: usize, message: impl Into<String>) -> Fault {
        Fault { place: format!("{}:{line}", path.display()), message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Whether what a check finds fails the run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Severity {
    Fault,
    Notice,
}

/// A name for people, what its findings count as, and the check.
type Check = (&'static str, Severity, fn(&Tree) -> Vec<Fault>);

const CHECKS: &[Check] = &[
    ("arrows", Severity::Fault, arrows::check),
    ("unsafe", Severity::Fault, unsafe_code::check),
    ("names", Severity::Fault, names::check),
    ("length", Severity::Notice, length::check),
    ("purity", Severity::Fault, purity::check),
    ("architecture", Severity::Fault, architecture::check),
];

/// Runs every check; true when none found a fault.
pub(crate) fn run() -> Result<bool> {
    let workspace = Workspace::read()?;
    let sources = source::read(&workspace.root)?;
    let architecture = std::fs::read_to_string(workspace.root.join("ARCHITECTURE.md")).ok();
    let tree = Tree { workspace, sources, architecture };
    let (mut faults, mut notices) = (0, 0);
    for (name, severity, check) in CHECKS {
        for fault in check(&tree) {
            match severity {
                Severity::Fault => {
                    faults += 1;
                    println!("{name}: {fault}");
                }
                Severity::Notice => {
                    notices += 1;
                    println!("{name}: notice: {fault}");
                }
            }
        }
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

    use super::{Fault, Source, Tree};
    use crate::workspace::{Dependency, DependencyKind, Package, Workspace};

    /// A package in `crates/<name>` with a library and some dependencies.
    pub(super) fn package(name: &str, dependencies: &[(&str, DependencyKind)]) -> Package {
        let directory = Path::new("crates").join(name.trim_start_matches("fourtuple-"));
        Package {
            name: name.to_owned(),
            roots: vec![directory.join("src/lib.rs")],
            directory,
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
        Tree { workspace, sources, architecture: None }
    }

    pub(super) fn lines(faults: Vec<Fault>) -> Vec<String> {
        faults.iter().map(ToString::to_string).collect()
    }
}
