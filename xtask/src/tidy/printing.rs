//! Checks that commands print by the functions of one file, which replace control characters in the text of others.

use std::path::Path;

use crate::tidy::lexer::{Kind, Token};
use crate::tidy::tree::{Fault, Tree};

/// Where the command writes to stdout and stderr.
const PRINTS: &str = "crates/cli/src/output.rs";

/// Directories of programs that no user starts, and of one that runs inside of other programs.
const OTHERS: &[&str] = &["crates/testing", "crates/guest", "crates/fix/preload", "crates/fuzz"];

const MACROS: &[&str] = &["print", "println", "eprint", "eprintln"];

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in &tree.sources {
        let is_other = OTHERS.iter().any(|directory| source.path.starts_with(directory));
        if !source.path.starts_with("crates")
            || is_other
            || source.path == Path::new(PRINTS)
            || source.path.ends_with("build.rs")
        {
            continue;
        }
        let tokens = source.product_tokens();
        for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.kind == Kind::Word) {
            let is_macro =
                MACROS.contains(&token.text) && tokens.get(at + 1).is_some_and(|next| next.is('!'));
            if is_macro || is_stream(&tokens, at) {
                let what = format!(
                    "{} outside of {PRINTS}: its functions print the text of others safely",
                    token.text
                );
                faults.push(Fault::at(&source.path, token.line, what));
            }
        }
    }
    faults
}

/// Returns whether the token is a call of `std::io::stdout` or `stderr` for something else than a question about the terminal.
fn is_stream(tokens: &[Token<'_>], at: usize) -> bool {
    let is = |at: usize, character| tokens.get(at).is_some_and(|token| token.is(character));
    let is_call = matches!(tokens[at].text, "stdout" | "stderr") && is(at + 1, '(') && is(at + 2, ')');
    // `io::stdout()`; a method such as `Command::stdout(...)` has an argument.
    let begin = (0..at).rev().find(|at| !is(*at, ':') && !matches!(tokens[*at].text, "io" | "std"));
    let is_reference = begin.is_some_and(|at| tokens[at].is('&'));
    let asks = is(at + 3, '.') && tokens.get(at + 4).is_some_and(|token| token.text == "is_terminal");
    is_call && !is_reference && !asks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, package, tree};

    #[test]
    fn questions_about_the_terminal_pass() {
        let text = "fn a() { io::stderr().is_terminal(); has_colour(&std::io::stdout()); command.stdout(Stdio::null()); }";
        let packages = vec![package("fourtuple-cli", &[])];
        let tree = tree(packages, &[("crates/cli/src/lib.rs", text), (PRINTS, "fn a() { println!() }")]);
        assert!(check(&tree).is_empty());
    }

    #[test]
    fn writes_to_streams_are_caught() {
        let text =
            "fn a() {\nprintln!(\"a\");\nlet _ = writeln!(io::stderr(), \"b\");\nstdout().write_all(b);\n}";
        let tree = tree(vec![package("fourtuple-cli", &[])], &[("crates/cli/src/lib.rs", text)]);
        let found = lines(check(&tree));
        let places: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        let file = "crates/cli/src/lib.rs";
        assert_eq!(places, [2, 3, 4].map(|line| format!("{file}:{line}:")), "{found:?}");
    }
}
