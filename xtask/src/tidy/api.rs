//! Checks that the public API of the library can grow, and that it names no type of another crate that is not part of it.
//!
//! The check reads lines as rustfmt writes them. Private items of a private module pass by being named `pub(crate)` or `pub(super)`.

use std::path::Path;

use crate::tidy::source::Source;
use crate::tidy::tree::{Fault, Tree};

const LIBRARY: &str = "crates/fourtuple/src";

/// Items without `#[non_exhaustive]`, and the reason.
const EXHAUSTIVE: &[(&str, &str)] = &[
    ("Closer", "a connection has two ends"),
    ("Family", "mirrors the addresses of a listener"),
    ("Retry", "the loop of a caller must handle each value"),
    ("Step", "the loop of a caller must handle each value"),
    ("FlowKey", "callers fill in all fields"),
    ("Plan", "feature plan"),
    ("Fleet", "feature plan"),
    ("Costs", "feature plan"),
    ("CostsByFill", "feature plan"),
    ("SearchResult", "feature plan"),
    ("WindowSearch", "feature plan"),
];

/// Types and crates that no public signature may name: a new version of their crate would be a new version of the library.
const FOREIGN: &[&str] =
    &["Rng", "IpNet", "BpfError", "libc", "io_uring", "fastrand", "ipnet", "fourtuple_bpf"];

/// The only re-export of an internal crate, whose version is fixed (`=`) in the manifest.
const REEXPORTED: &str = "pub use fourtuple_syscalls::{Endpoint, EndpointParseError};";

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    library(tree).flat_map(faults).collect()
}

/// Returns the files of the library.
pub(super) fn library(tree: &Tree) -> impl Iterator<Item = &Source> {
    tree.sources.iter().filter(|source| source.path.starts_with(Path::new(LIBRARY)) && !source.is_test())
}

/// Returns the lines of a file above its tests.
pub(super) fn product_lines(source: &Source) -> Vec<&str> {
    let end = source.text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(source.text.len());
    source.text[..end].lines().collect()
}

fn faults(source: &Source) -> Vec<Fault> {
    let lines = product_lines(source);
    let mut faults = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let fault = |message: String| Fault::at(&source.path, index + 1, message);
        if line.starts_with("pub use fourtuple_") && *line != REEXPORTED {
            faults.push(fault("a re-export of an internal crate".to_owned()));
        }
        if let Some(name) = can_grow(&lines, index)
            && !is_non_exhaustive(&lines[..index])
            && !EXHAUSTIVE.iter().any(|(exempt, _)| *exempt == name)
        {
            faults
                .push(fault(format!("{name} has no #[non_exhaustive] and is not in the list of this check")));
        }
        if let Some(foreign) = foreign_type(&lines[index..]) {
            faults.push(fault(format!("{foreign} of another crate in the public API")));
        }
    }
    faults
}

/// Returns the name of a public enum, or of a public struct whose fields are all public, that starts at a line.
fn can_grow<'a>(lines: &[&'a str], index: usize) -> Option<&'a str> {
    let name = |rest: &'a str| rest.split(|letter: char| !letter.is_alphanumeric()).next();
    if let Some(rest) = lines[index].strip_prefix("pub enum ") {
        return name(rest);
    }
    let rest = lines[index].strip_prefix("pub struct ").filter(|rest| rest.ends_with('{'))?;
    let body = lines[index + 1..].iter().take_while(|line| **line != "}");
    let mut fields = body.filter(|line| !line.trim_start().starts_with(['/', '#']));
    fields.all(|line| line.starts_with("    pub ")).then(|| name(rest)).flatten()
}

/// Returns whether the attributes directly above an item have `#[non_exhaustive]`.
fn is_non_exhaustive(above: &[&str]) -> bool {
    let attributes = above.iter().rev().take_while(|line| !line.is_empty() && **line != "}");
    attributes.into_iter().any(|line| *line == "#[non_exhaustive]")
}

/// Returns the foreign type in the public function or field that starts at the first line.
fn foreign_type(lines: &[&str]) -> Option<&'static str> {
    let first = lines[0].trim_start();
    let is_function =
        ["pub fn ", "pub const fn ", "pub async fn "].iter().any(|start| first.starts_with(start));
    let is_field = first.starts_with("pub ") && first.ends_with(',') && first.contains(": ");
    let end = match (is_function, is_field) {
        (true, _) => lines.iter().position(|line| line.ends_with(['{', ';', '}']))?,
        (_, true) => 0,
        _ => return None,
    };
    let signature = &lines[..=end];
    FOREIGN.iter().copied().find(|foreign| {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        signature.iter().any(|line| line.split(|letter| !is_word(letter)).any(|word| word == *foreign))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    fn found(text: &str) -> Vec<String> {
        lines(check(&tree(vec![package("fourtuple", &[])], &[("crates/fourtuple/src/dial.rs", text)])))
    }

    #[test]
    fn an_api_that_can_grow_passes() {
        let text = "
#[derive(Debug)]
#[non_exhaustive]
pub enum DialError {
    A,
}

pub enum Retry {
    A,
}

/// Private fields.
pub struct Dialer {
    pub a: u8,
    b: u8,
}

pub(crate) enum Internal {
    A,
}

pub(crate) fn step(random: &mut Rng) {}
pub use fourtuple_syscalls::{Endpoint, EndpointParseError};
";
        assert_eq!(found(text), Vec::<String>::new());
    }

    #[test]
    fn each_obstacle_to_growth_is_found() {
        let text = "pub enum E {
    A,
}

/// Plain data.
pub struct S {
    /// A number.
    pub a: u8,
    pub b: BpfError,
}

pub fn step(
    random: &mut fastrand::Rng,
) -> u8 {
    0
}
pub use fourtuple_syscalls::errno_name;
";
        let path = "crates/fourtuple/src/dial.rs";
        let list = "has no #[non_exhaustive] and is not in the list of this check";
        assert_eq!(
            found(text),
            [
                format!("{path}:1: E {list}"),
                format!("{path}:6: S {list}"),
                format!("{path}:9: BpfError of another crate in the public API"),
                format!("{path}:12: Rng of another crate in the public API"),
                format!("{path}:17: a re-export of an internal crate"),
            ]
        );
    }
}
