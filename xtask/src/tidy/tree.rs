//! The input of the checks, and their findings.

use std::fmt;
use std::path::Path;

use crate::tidy::source::{Page, Source};
use crate::workspace::Workspace;

/// The files and packages that the checks read.
pub(super) struct Tree {
    pub(super) workspace: Workspace,
    pub(super) sources: Vec<Source>,
    /// Text files other than Rust: Markdown, and C and Go with their comments.
    pub(super) pages: Vec<Page>,
    /// The text of ARCHITECTURE.md, if the file exists.
    pub(super) architecture: Option<String>,
}

/// A finding of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// The file, and the line if there is one.
    pub(super) place: String,
    pub(super) message: String,
}

impl Fault {
    pub(super) fn in_file(path: &Path, message: impl Into<String>) -> Fault {
        Fault { place: path.display().to_string(), message: message.into() }
    }

    pub(super) fn at(path: &Path, line: usize, message: impl Into<String>) -> Fault {
        Fault { place: format!("{}:{line}", path.display()), message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}
