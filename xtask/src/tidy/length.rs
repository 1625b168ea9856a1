//! Reports long files. A long file is a hint, not a fault.

use crate::tidy::tree::{Fault, Tree};

/// Number of lines above which a file usually covers two subjects.
const LINES: usize = 500;

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut notices = Vec::new();
    for source in &tree.sources {
        let lines = source.text.lines().count();
        if lines > LINES {
            notices.push(Fault::in_file(&source.path, format!("{lines} lines, more than {LINES}")));
        }
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, tree};

    #[test]
    fn only_long_files_are_listed() {
        let (short, long) = ("\n".repeat(LINES), "\n".repeat(LINES + 1));
        let tree = tree(Vec::new(), &[("a.rs", &short), ("b.rs", &long)]);
        assert_eq!(lines(check(&tree)), ["b.rs: 501 lines, more than 500"]);
    }
}
