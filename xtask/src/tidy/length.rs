//! Files that have grown long. A sign, not a fault.

use super::{Fault, Tree};

/// Above this a file is usually two.
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
    use super::super::fixture::{lines, tree};
    use super::*;

    #[test]
    fn only_long_files_are_listed() {
        let (short, long) = ("\n".repeat(LINES), "\n".repeat(LINES + 1));
        let tree = tree(Vec::new(), &[("a.rs", &short), ("b.rs", &long)]);
        assert_eq!(lines(check(&tree)), ["b.rs: 501 lines, more than 500"]);
    }
}
