//! Checks the layout of modules and the form of imports.

use std::path::Path;

use crate::tidy::lexer::{Kind, Token};
use crate::tidy::source::Source;
use crate::tidy::tree::{Fault, Tree};

/// Longest permitted name of a test, in characters.
const MAX_TEST_NAME: usize = 60;

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in &tree.sources {
        faults.extend(twin_of_directory(source, tree));
        faults.extend(relative_imports(source));
        faults.extend(long_test_names(source));
    }
    faults
}

/// Returns the fault of a file `name.rs` beside a directory `name`: a module with children is `name/mod.rs`.
fn twin_of_directory(source: &Source, tree: &Tree) -> Option<Fault> {
    let directory = source.path.with_extension("");
    let is_twin = tree.sources.iter().any(|other| other.path.parent() == Some(directory.as_path()));
    let is_crate_root = matches!(source.path.file_name()?.to_str()?, "lib.rs" | "main.rs" | "mod.rs");
    (is_twin && !is_crate_root && is_module(&source.path))
        .then(|| Fault::in_file(&source.path, "a module with children is a mod.rs in its directory"))
}

/// Returns whether a file is a module and not the root of a program: `tests/name.rs` and `examples/name.rs` may have their
/// modules in a directory `name`.
fn is_module(path: &Path) -> bool {
    !path.parent().is_some_and(|parent| {
        parent.file_name().is_some_and(|name| name == "tests" || name == "examples" || name == "benches")
    })
}

/// Imports inside a crate start with `crate::`. A module of tests may say `use super::*`, and a `mod.rs` re-exports its
/// children with `self::`.
fn relative_imports(source: &Source) -> Vec<Fault> {
    let tokens: Vec<Token<'_>> =
        source.product_tokens().into_iter().filter(|token| token.kind != Kind::Comment).collect();
    let mut faults = Vec::new();
    for window in tokens.windows(2) {
        let [keyword, first] = window else { continue };
        let is_use = keyword.kind == Kind::Word && keyword.text == "use";
        if is_use && first.kind == Kind::Word && first.text == "super" {
            faults.push(Fault::at(&source.path, first.line, "imports inside a crate start with crate::"));
        }
    }
    faults
}

/// Returns the names of functions under `#[test]`.
fn long_test_names(source: &Source) -> Vec<Fault> {
    let tokens: Vec<Token<'_>> =
        source.tokens().into_iter().filter(|token| token.kind != Kind::Comment).collect();
    let mut faults = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let is_test = token.kind == Kind::Word
            && token.text == "test"
            && index > 0
            && (tokens[index - 1].is('[') || tokens[index - 1].is(':'));
        if !is_test {
            continue;
        }
        let mut after = tokens[index..].iter().skip_while(|token| token.text != "fn").skip(1);
        if let Some(name) = after.next().filter(|name| name.text.chars().count() > MAX_TEST_NAME) {
            let message = format!("{} has more than {MAX_TEST_NAME} characters", name.text);
            faults.push(Fault::at(&source.path, name.line, message));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, tree};

    fn faults(sources: &[(&str, &str)]) -> Vec<String> {
        lines(check(&tree(Vec::new(), sources)))
    }

    #[test]
    fn one_layout_passes() {
        let long = format!("fn {}() {{}}", "a".repeat(70));
        let sources = [
            ("crates/lab/src/lib.rs", "mod ports; #[cfg(test)] mod tests { use super::*; }"),
            ("crates/lab/src/ports/mod.rs", "use crate::b; pub use self::cost::C; #[test] fn short() {}"),
            ("crates/lab/src/ports/cost.rs", long.as_str()),
            ("crates/lab/tests/ports.rs", "mod fill;"),
            ("crates/lab/tests/ports/fill.rs", "use super::x;"),
        ];
        assert_eq!(faults(&sources), Vec::<String>::new());
    }

    #[test]
    fn twins_relative_imports_and_long_names_are_caught() {
        let long = format!("#[test]\nfn {}() {{}}", "a".repeat(61));
        let sources =
            [("crates/lab/src/ports.rs", "\nuse super::b;"), ("crates/lab/src/ports/cost.rs", long.as_str())];
        let found = faults(&sources);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("crates/lab/src/ports.rs: a module with children"));
        assert!(found[1].starts_with("crates/lab/src/ports.rs:2: imports inside a crate"));
        assert!(found[2].starts_with("crates/lab/src/ports/cost.rs:2: aaa"));
    }
}
