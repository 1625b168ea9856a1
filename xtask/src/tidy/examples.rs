//! Checks that examples in doc comments run as tests.

use crate::tidy::tree::{Fault, Tree};

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    let without: Vec<_> = tree.workspace.packages.iter().filter(|package| !package.has_doctests).collect();
    for source in &tree.sources {
        if !without.iter().any(|package| source.path.starts_with(package.directory.join("src"))) {
            continue;
        }
        let mut inside = false;
        for (index, line) in source.text.lines().enumerate() {
            let line = line.trim_start();
            let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            let Some(language) = comment.and_then(|comment| comment.trim_start().strip_prefix("```")) else {
                continue;
            };
            inside = !inside;
            if inside && !matches!(language, "text" | "console" | "sh" | "json" | "toml") {
                faults.push(Fault::at(
                    &source.path,
                    index + 1,
                    "an example that does not run: the package has `doctest = false`",
                ));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    #[test]
    fn an_example_runs_or_is_text() {
        let texts = "/// Text:\n///\n/// ```text\n/// a\n/// ```\n///\n/// ```\n/// a();\n/// ```\nfn a() {}";
        let sources = [("crates/lab/src/a.rs", texts), ("crates/fourtuple/src/a.rs", texts)];
        let mut packages = vec![package("fourtuple-lab", &[]), package("fourtuple", &[])];
        packages[0].has_doctests = false;
        assert_eq!(
            lines(check(&tree(packages, &sources))),
            ["crates/lab/src/a.rs:7: an example that does not run: the package has `doctest = false`"]
        );
    }
}
