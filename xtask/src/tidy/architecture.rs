//! Checks that ARCHITECTURE.md names every crate, and that every path in it exists.

use std::path::Path;

use crate::tidy::tree::{Fault, Tree};

const PAGE: &str = "ARCHITECTURE.md";

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let Some(page) = &tree.architecture else { return Vec::new() };
    let root = &tree.workspace.root;
    let mut faults = Vec::new();
    for package in &tree.workspace.packages {
        let directory = package.directory.to_string_lossy();
        if !names(page, &directory) {
            faults.push(Fault::in_file(Path::new(PAGE), format!("does not name {directory}")));
        }
    }
    for (line, path) in paths(page) {
        if !root.join(path).exists() {
            faults.push(Fault::at(Path::new(PAGE), line, format!("names {path}, which is not there")));
        }
    }
    faults
}

/// Returns whether a page names a directory: in full, or by a line of a tree that starts with its last part and a slash.
fn names(page: &str, directory: &str) -> bool {
    let last = directory.rsplit('/').next().unwrap_or(directory);
    let in_full = page.match_indices(directory).any(|(at, _)| {
        let after = page[at + directory.len()..].chars().next();
        after.is_none_or(|character| !character.is_alphanumeric() && !"_-".contains(character))
    });
    // Trees are drawn with spaces or with lines.
    in_full
        || page.lines().any(|line| {
            let entry = line.trim_start_matches([' ', '│', '├', '└', '─', '|', '`', '-', '+']);
            entry.strip_prefix(last).is_some_and(|rest| rest.starts_with('/'))
        })
}

/// Returns each path-like text between single backticks on the page, with its line number.
fn paths(page: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut in_block = false;
    for (index, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            let spans = line.split('`').skip(1).step_by(2);
            found.extend(spans.filter(|span| is_path(span)).map(|span| (index + 1, span)));
        }
    }
    found
}

/// Returns whether the text is a relative path of plain characters. `/proc` is not in the tree, `target` is created by a
/// build, `127.0.0.0/28` is a network and `fourtuple/1` a version.
fn is_path(span: &str) -> bool {
    let is_plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let ends_in_number = span
        .rsplit('/')
        .next()
        .is_some_and(|last| !last.is_empty() && last.chars().all(|c| c.is_ascii_digit()));
    span.contains('/')
        && is_plain
        && !ends_in_number
        && !span.starts_with(['/', '.'])
        && !span.starts_with("target/")
        && !span.starts_with(|c: char| c.is_ascii_digit())
        || span.starts_with(".ci/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    fn faults(page: &str) -> Vec<String> {
        let mut tree = tree(vec![package("fourtuple-lab", &[])], &[]);
        // The directory of this crate stands in for a tree.
        tree.workspace.root = Path::new(env!("CARGO_MANIFEST_DIR")).to_owned();
        tree.architecture = Some(page.to_owned());
        lines(check(&tree))
    }

    #[test]
    fn a_page_with_existing_paths_passes() {
        let page = "See `crates/lab`".replace("`crates/lab`", "crates/lab")
            + ", `src/tidy/`, `src/main.rs`, `/proc/sys/net`, `a | b/c`, `127.0.0.0/28`, `fourtuple/1`, `target/x`.
```
xtask --path `no/such`
```";
        assert_eq!(faults(&page), Vec::<String>::new());
        assert!(faults("```\ncrates/\n  lab/   labs\n```").is_empty());
    }

    #[test]
    fn missing_crates_and_paths_are_named() {
        assert_eq!(
            faults("There is crates/laboratory.\nAnd `src/nothing.rs`."),
            [
                "ARCHITECTURE.md: does not name crates/lab",
                "ARCHITECTURE.md:2: names src/nothing.rs, which is not there",
            ]
        );
    }

    #[test]
    fn without_a_page_there_is_nothing_to_check() {
        assert!(check(&tree(vec![package("fourtuple-lab", &[])], &[])).is_empty());
    }
}
