//! Finds wording that readers had to read twice: pronouns in the place of a noun, and references known only to insiders.
//!
//! Checks comments, strings and names of Rust files, comments of C and Go files and the prose of Markdown files. Code between
//! backticks and in fences is not prose.

use std::path::Path;

use crate::tidy::lexer::{self, Kind, Token};
use crate::tidy::tree::{Fault, Tree};

/// Words that stand for a thing or a process as if it were a person, or say nothing about which thing is meant.
const WORDS: &[&str] =
    &["whoever", "whomever", "whom", "who", "nobody", "somebody", "anybody", "everybody", "whatever", "anew"];

/// Phrases that point at a thing instead of naming it; a `$` stands for the end of a clause.
const PHRASES: &[&str] = &[
    "those that",
    "those which",
    "those of",
    "those with",
    "those in",
    "that of",
    "the one that",
    "the others$",
    "the other$",
    "comes of it",
    "what is left",
    "seed 00",
];

/// Forbidden parts of names of items and tests.
const NAME_PARTS: &[&str] = &["nobody", "somebody", "whoever", "whom", "anybody", "everybody", "anew", "who"];

/// The file that lists the words, which has to contain them.
const EXEMPT: &str = "xtask/src/tidy/language.rs";

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in tree.sources.iter().filter(|source| source.path != Path::new(EXEMPT)) {
        let mut doc = false;
        let mut last_line = 0;
        for token in source.tokens() {
            let continues = doc && token.kind == Kind::Comment && token.line == last_line + 1;
            faults.extend(token_faults(&source.path, &token, continues));
            doc = token.kind == Kind::Comment && is_doc(token.text);
            last_line = token.line;
        }
    }
    for page in &tree.pages {
        if page.path.extension().is_some_and(|extension| extension == "md") {
            for (line, prose) in markdown_prose(&page.text) {
                faults.extend(in_prose(&prose).into_iter().map(|found| fault(&page.path, line, &found)));
            }
        } else {
            // Comments and strings of C and Go have the same syntax as in Rust.
            for token in lexer::tokens(&page.text).iter().filter(|token| token.kind != Kind::Word) {
                faults.extend(token_faults(&page.path, token, true));
            }
        }
    }
    faults
}

fn fault(path: &Path, line: usize, found: &str) -> Fault {
    Fault::at(path, line, format!("`{found}`: name the thing"))
}

/// Returns the findings in one token of a Rust file; `continues`: the line above is a doc comment too.
fn token_faults(path: &Path, token: &Token<'_>, continues: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    match token.kind {
        Kind::Comment | Kind::Literal => {
            for (index, line) in token.text.lines().enumerate() {
                let line = without_code(line);
                faults
                    .extend(in_prose(&line).into_iter().map(|found| fault(path, token.line + index, &found)));
            }
            if !continues && is_doc(token.text) && starts_with_question(token.text) {
                let message = "a doc comment starts with a full sentence or a noun phrase";
                faults.push(Fault::at(path, token.line, message));
            }
        }
        Kind::Word => {
            let part = token.text.split('_').find(|part| NAME_PARTS.contains(&part.to_lowercase().as_str()));
            faults.extend(part.map(|part| fault(path, token.line, part)));
        }
        Kind::Punctuation | Kind::Lifetime => {}
    }
    faults
}

fn is_doc(comment: &str) -> bool {
    comment.starts_with("///") || comment.starts_with("//!")
}

/// Returns whether a doc comment begins with a question word without being a question: "What a token is."
fn starts_with_question(comment: &str) -> bool {
    let text = comment[3..].trim();
    ["What ", "Who "].iter().any(|word| text.starts_with(word)) && !text.contains('?')
}

/// Returns the words and phrases found in a line of prose.
fn in_prose(line: &str) -> Vec<String> {
    let lower = line.to_lowercase();
    // Identifiers with hyphens, such as the finding `nobody-listens` in saved records, keep their names.
    let words: Vec<&str> = lower.split(|c: char| !c.is_alphanumeric() && c != '\'' && c != '-').collect();
    let mut found: Vec<String> =
        words.iter().filter(|word| WORDS.contains(word)).map(|word| (*word).to_owned()).collect();
    for phrase in PHRASES {
        let plain = phrase.trim_end_matches('$');
        let whole_clause = plain.len() < phrase.len();
        for (at, _) in lower.match_indices(plain) {
            let before = lower[..at].chars().next_back();
            let after = lower[at + plain.len()..].chars().next();
            let is_start = before.is_none_or(|c| !c.is_alphanumeric());
            let is_end = match after {
                None => true,
                Some(c) if whole_clause => ".,;:)".contains(c),
                Some(c) => !c.is_alphabetic(),
            };
            if is_start && is_end {
                found.push(plain.to_owned());
            }
        }
    }
    found
}

/// Returns the line without the text between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// Returns the lines of a Markdown page outside of fences, without code.
fn markdown_prose(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_fence = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_fence = !in_fence;
        } else if !in_fence {
            found.push((index + 1, without_code(line)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, tree};
    use crate::tidy::source::Page;

    fn rust(text: &str) -> Vec<String> {
        lines(check(&tree(Vec::new(), &[("a.rs", text)])))
    }

    fn page(path: &str, text: &str) -> Vec<String> {
        let mut tree = tree(Vec::new(), &[]);
        tree.pages.push(Page { path: path.into(), text: text.to_owned() });
        lines(check(&tree))
    }

    #[test]
    fn plain_sentences_pass() {
        let text = "/// Returns the port that `whoever` holds; the other worker waits.
            fn nobodys() {} // What does connect() cost?
            /// The kind.
            /// What follows is more of it.
            struct A; const B: &str = \"the whole range\";";
        assert_eq!(rust(text), Vec::<String>::new());
        assert_eq!(page("a.md", "The worker.\n```\nnobody\n```\nOf `whom`."), Vec::<String>::new());
        assert_eq!(page("a.c", "int who; /* the worker */ int nobody;"), Vec::<String>::new());
    }

    #[test]
    fn pronouns_are_caught_in_comments_strings_and_names() {
        let text = "// whoever comes\nfn nobody_waits() {}\nconst A: &str = \"who is it\";\n/// What a token is.\nfn b() {}";
        let found = rust(text);
        let at =
            |line: usize| found.iter().filter(|fault| fault.starts_with(&format!("a.rs:{line}:"))).count();
        assert_eq!([at(1), at(2), at(3), at(4), at(5)], [1, 1, 1, 1, 0], "{found:?}");
    }

    #[test]
    fn phrases_are_caught_in_prose_of_pages_and_c() {
        assert_eq!(page("a.md", "As seed 000 says,\nit is those that wait for the other.").len(), 3);
        assert_eq!(page("a.c", "int a; // that of the port\n/* one\n * whom */ int whom;").len(), 2);
    }
}
