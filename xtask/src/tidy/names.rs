//! Finds names that do not describe their content.

use std::path::Path;

use crate::tidy::lexer::Kind;
use crate::tidy::tree::{Fault, Tree};

const EMPTY_NAMES: &[&str] = &["util", "utils", "helper", "helpers", "common", "misc"];

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for package in &tree.workspace.packages {
        if let Some(name) = empty_part(&package.directory) {
            faults.push(Fault::in_file(&package.directory, says_nothing(name)));
        }
    }
    for source in &tree.sources {
        // Package names were checked above.
        let package =
            tree.workspace.packages.iter().find(|package| source.path.starts_with(&package.directory));
        let inside = package.map_or(source.path.as_path(), |package| {
            source.path.strip_prefix(&package.directory).unwrap_or(&source.path)
        });
        if let Some(name) = empty_part(inside) {
            faults.push(Fault::in_file(&source.path, says_nothing(name)));
        }
        // A module in braces has no file name to check.
        let tokens: Vec<_> =
            source.tokens().into_iter().filter(|token| token.kind != Kind::Comment).collect();
        for window in tokens.windows(3) {
            let [keyword, name, brace] = window else { continue };
            if keyword.kind == Kind::Word
                && keyword.text == "mod"
                && brace.is('{')
                && is_empty_name(name.text)
            {
                faults.push(Fault::at(&source.path, name.line, says_nothing(name.text)));
            }
        }
    }
    faults
}

fn is_empty_name(name: &str) -> bool {
    EMPTY_NAMES.contains(&name)
}

fn empty_part(path: &Path) -> Option<&str> {
    path.iter().filter_map(|part| part.to_str()).find(|part| is_empty_name(part.trim_end_matches(".rs")))
}

fn says_nothing(name: &str) -> String {
    format!("{} says nothing about what is inside", name.trim_end_matches(".rs"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    #[test]
    fn names_with_a_meaning_pass() {
        let tree = tree(
            vec![package("fourtuple-lab", &[])],
            &[("crates/lab/src/lib.rs", "mod ports; mod tests { fn common() {} } // mod util {")],
        );
        assert!(check(&tree).is_empty());
    }

    #[test]
    fn files_directories_and_braces_are_caught() {
        let tree = tree(
            vec![package("fourtuple-common", &[]), package("fourtuple-lab", &[])],
            &[
                ("crates/common/src/lib.rs", ""),
                ("crates/lab/src/util.rs", ""),
                ("crates/lab/tests/common/mod.rs", ""),
                ("crates/lab/src/lib.rs", "\npub mod helpers {}"),
            ],
        );
        assert_eq!(
            lines(check(&tree)),
            [
                "crates/common: common says nothing about what is inside",
                "crates/lab/src/util.rs: util says nothing about what is inside",
                "crates/lab/tests/common/mod.rs: common says nothing about what is inside",
                "crates/lab/src/lib.rs:2: helpers says nothing about what is inside",
            ]
        );
    }
}
